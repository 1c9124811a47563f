"""What is kept of each sequence: blocks of keys and values, and states."""
