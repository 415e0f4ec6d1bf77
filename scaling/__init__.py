"""Measures how distributed training scales on real hardware."""

__version__ = "0.1.0"
