"""Tasks, methods, training and tables of `python scripts/study`, which says how to use it."""
