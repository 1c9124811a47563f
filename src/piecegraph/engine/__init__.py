"""A call is served: planned at the first, replayed afterwards."""
