"""Measuring: a model in several modes side by side, and a server under load."""
