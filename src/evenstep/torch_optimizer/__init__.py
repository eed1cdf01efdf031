"""What torch.optim expects of an optimizer."""
