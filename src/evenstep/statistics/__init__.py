"""What a forward pass adds up: hooks and the sums they fill."""
