"""Kernels of graphs that are in use: chosen, timed, and their tensors dumped."""
