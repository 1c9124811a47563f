"""A transformers model becomes a compiled decoder and a head."""
