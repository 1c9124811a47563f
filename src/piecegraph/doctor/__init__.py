"""What this machine has, what of it would break, and how to mend it. Nothing here imports torch."""
