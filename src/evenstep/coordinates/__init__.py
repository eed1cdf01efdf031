"""Coordinate systems: each turns statistics of a layer into the coordinates of a step."""
