"""The step on a GPU, in Triton."""
