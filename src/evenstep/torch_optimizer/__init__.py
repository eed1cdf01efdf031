"""The contract of torch.optim."""
