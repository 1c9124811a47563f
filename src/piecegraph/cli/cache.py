"""``piecegraph cache``: what is kept of plans, why one was not found, and to carry it elsewhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click


@click.group()
def cache() -> None:
    """Look at the plans that are kept on disk, check and remove them, carry them to another machine.

    The folder is PIECEGRAPH_CACHE, or piecegraph in the user's cache folder.
    """


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def ls(as_json: bool) -> None:
    """List the entries, the last used first."""
    from piecegraph.base.cache_root import cache_root
    from piecegraph.base.entries import Entry, all_entries

    found = list(all_entries())
    entries = sorted((each for each in found if isinstance(each, Entry)), key=lambda entry: -entry.used)
    if as_json:
        _print_json([_document(entry) for entry in entries])
        return
    click.echo(f"{'key':<24}  {'MiB':>7}  {'used':<16}  {'made':<16}  name")
    for entry in entries:
        mib, used, made = entry.num_bytes / 2**20, _shown(entry.used), _shown(entry.made)
        click.echo(f"{entry.key:<24}  {mib:7.1f}  {used:<16}  {made:<16}  {entry.name}")
    for folder, damage in (each for each in found if not isinstance(each, Entry)):
        click.echo(f"{folder.name:<24}  damaged: {damage}")
    total = sum(entry.num_bytes for entry in entries) / 2**20
    click.echo(f"{len(entries)} entries, {total:.1f} MiB in {cache_root()}", err=True)


@cache.command()
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def show(key: str, as_json: bool) -> None:
    """Show what an entry depends on, factor by factor, and its files. The beginning of KEY is enough."""
    from piecegraph.base.entries import entry_named

    entry = entry_named(key)
    if as_json:
        files = {name: size for name, (size, _) in entry.files.items()}
        _print_json({**_document(entry), "factors": entry.factors, "files": files})
        return
    click.echo(f"{entry.name} in {entry.folder}, made {_shown(entry.made)}, {entry.num_bytes / 2**20:.1f} MiB")
    for name, fact in entry.facts.items():
        click.echo(f"  {name}: {fact}")
    for group, factors in entry.factors.items():
        click.echo(f"\n{group}")
        for name, text in factors.items():
            click.echo(f"  {name}: {text}")


@cache.command()
@click.argument("first")
@click.argument("second")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def diff(first: str, second: str, as_json: bool) -> None:
    """Show the factors in which two entries differ: why the one does not serve where the other does."""
    from piecegraph.base.entries import changes, entry_named

    found = changes(entry_named(first).factors, entry_named(second).factors)
    if as_json:
        _print_json([{"factor": factor, "first": old, "second": new} for factor, old, new in found])
        return
    for factor, old, new in found:
        click.echo(f"{factor}\n  - {old}\n  + {new}")


@cache.command()
def verify() -> None:
    """Check every file of every entry. Ends with 1 if one is damaged; it would be made again when it is needed."""
    from piecegraph.base.entries import Entry, all_entries, damage_of

    damaged = 0
    for found in all_entries():
        name, damage = (found.key, damage_of(found)) if isinstance(found, Entry) else (found[0].name, found[1])
        damaged += bool(damage)
        click.echo(f"{name}  {damage or 'whole'}")
    sys.exit(1 if damaged else 0)


@cache.command()
@click.option("--max-gib", type=click.FloatRange(min=0), help="What may stay; by default PIECEGRAPH_CACHE_GIB, or 16.")
def prune(max_gib: float | None) -> None:
    """Remove what is damaged or unfinished, and the least recently used entries until the others fit."""
    from piecegraph.base.entries import prune as prune_entries

    for name in prune_entries(None if max_gib is None else int(max_gib * 2**30)):
        click.echo(name)


@cache.command()
@click.argument("keys", nargs=-1, metavar="[KEY]...")
def clear(keys: tuple[str, ...]) -> None:
    """Remove entries: those of the keys, or all."""
    from piecegraph.base.entries import entry_named, prune, remove_entry

    if not keys:
        prune(0)
    for key in keys:
        remove_entry(entry_named(key).key)


@cache.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("keys", nargs=-1, metavar="[KEY]...")
def export(file: Path, keys: tuple[str, ...]) -> None:
    """Write entries, those of the keys or all, to FILE, a .tar.gz for another machine of the same kind."""
    from piecegraph.base.archive import export_entries
    from piecegraph.base.entries import Entry, all_entries, entry_named

    entries = [entry_named(key) for key in keys] or [each for each in all_entries() if isinstance(each, Entry)]
    export_entries(entries, file)
    click.echo(f"{len(entries)} entries in {file}", err=True)


@cache.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
def import_(file: Path) -> None:
    """Take in the entries of FILE, which export wrote. They hold code that is run: import none that is not yours."""
    from piecegraph.base.archive import import_entries

    for entry in import_entries(file):
        click.echo(entry.key)


def _document(entry: Any) -> dict[str, Any]:
    return {
        "key": entry.key,
        "name": entry.name,
        "bytes": entry.num_bytes,
        "made": entry.made,
        "used": entry.used,
        **entry.facts,
    }


def _shown(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _print_json(value: Any) -> None:
    from piecegraph.base.text import to_json

    click.echo(to_json(value))
