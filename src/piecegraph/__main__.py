"""``python -m piecegraph``: the command."""

from piecegraph.cli.main import main

if __name__ == "__main__":
    main()
