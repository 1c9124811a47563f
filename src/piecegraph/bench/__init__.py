"""Measuring: how the demo and the benchmarks time things and show them."""
