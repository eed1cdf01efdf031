"""The fair race of optimizers, `evenstep compare`: tasks, methods, protocol, training, and its page."""
