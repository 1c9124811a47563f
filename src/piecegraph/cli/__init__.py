"""The ``piecegraph`` command: one file for each subcommand. Nothing here imports torch until a command needs it."""
