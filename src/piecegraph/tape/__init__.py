"""A program becomes tapes: graphs and eager ops in a flat list, one for each size."""
