"""A step of a language model: requests, schedule, batch, forward, tokens."""
