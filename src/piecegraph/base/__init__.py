"""What every room may use: errors are beside it, everything else it needs is here."""
