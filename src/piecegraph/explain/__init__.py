"""Understanding a run: what failed and why, and what this machine lacks. Nothing here imports torch."""
