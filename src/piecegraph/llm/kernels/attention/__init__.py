"""Attention over the paged cache: kernels that share one contract, and the choice among them."""
