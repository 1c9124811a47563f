"""A command run with a recorder in every Python process, and what the records prove."""
