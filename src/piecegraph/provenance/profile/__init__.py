"""A profile: taken or read from a file, and every launch in it attributed to the call that made it."""
