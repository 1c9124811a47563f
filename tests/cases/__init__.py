"""Functions and modules that the CPU tests and the GPU tests both run."""
