"""Kernels by device: reference (the oracle), cpu (C++) and cuda. Importing this package does nothing."""

__version__ = "0.1.0"
