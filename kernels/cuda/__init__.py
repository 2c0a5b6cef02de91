"""Kernels on NVIDIA GPUs, by packages that are optional extras: nothing here imports one before it is needed."""
