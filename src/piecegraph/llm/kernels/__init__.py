"""The kernels of language models, and what calls them."""
