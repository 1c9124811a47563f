"""Kernels that come from one call together, mined from the calls of a profile."""
