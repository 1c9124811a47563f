"""One page to share: what was found out, as a single file that needs no network."""
