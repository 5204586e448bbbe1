"""flashgen's version: part of every build digest."""

__version__ = "0.1.0"
