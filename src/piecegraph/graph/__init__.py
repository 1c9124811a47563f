"""A call becomes one graph, then pieces and cuts, then a program of compiled pieces."""
