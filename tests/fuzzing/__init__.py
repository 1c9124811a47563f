"""Random programs, run plain and through :func:`piecegraph.compile`, which must do the same."""
