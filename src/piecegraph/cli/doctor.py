"""``piecegraph doctor``: what on this machine would break, and how to mend it."""

from __future__ import annotations

import sys

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def doctor(as_json: bool) -> None:
    """Check this machine: what would break, and how to mend it.

    Ends with 1 if something is broken, with 0 otherwise. Reads only; changes nothing.
    """
    from piecegraph.base.progress import Progress
    from piecegraph.base.text import to_json
    from piecegraph.doctor.checks import examine
    from piecegraph.doctor.finding import counts
    from piecegraph.doctor.page import as_document, as_table
    from piecegraph.doctor.read import read_machine

    machine = read_machine(progress=Progress("auto"))
    findings = examine(machine)
    if as_json:
        click.echo(to_json(as_document(machine, findings)))
    else:
        from rich.console import Console

        Console(highlight=False).print(as_table(machine, findings))
    sys.exit(1 if counts(findings)["broken"] else 0)
