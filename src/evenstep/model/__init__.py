"""What a network is made of: kinds of layers, and how each parameter is treated."""
