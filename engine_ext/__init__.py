"""Sparse weight updates for running inference engines: the receiver core."""

__version__ = "0.1.0"
