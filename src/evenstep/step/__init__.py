"""One step: which parameters move, and the backends that move them."""
