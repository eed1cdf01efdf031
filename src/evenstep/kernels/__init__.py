"""Triton kernels for CUDA devices; each has its plain torch version beside it as its test."""
