"""The former name of what `report` now has."""

from .report import best, conclude

__all__ = ["best", "conclude"]
