"""A log, from its bytes to what it proves: lines, parts of tracebacks, tracebacks, failures, evidence."""
