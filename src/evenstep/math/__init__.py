"""The paper's mathematics: pure functions of tensors."""
