"""Run every family of causal language models of the installed transformers, and write down which of them are right.

Each family is judged in a process of its own (``family_check.py``), forked after the slow imports, with limits on time
and memory: a crash or a hang is a verdict too. Results are kept in a JSON file after every family, so that a sweep that
was stopped goes on where it was. ``sweep_page.py`` makes the page of them.

    python scripts/model_sweep.py --json sweep.json --page docs/models.md
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from processes import Verdict, judge_all

from piecegraph.base.progress import Progress

_MEMORY_BYTES = 12 * 2**30


@click.command()
@click.option(
    "--only", default="", help="Families to run, with commas between them, even if they have a result. Default: all."
)
@click.option("--jobs", default=2, show_default=True, help="Families that run together.")
@click.option("--timeout", default=120.0, show_default=True, help="Seconds for one family.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Keep results here, and go on from them.")
@click.option("--page", type=click.Path(path_type=Path), help="Write the page here.")
@click.option(
    "--compare", type=click.Path(path_type=Path, exists=True), help="Results of other versions, for the page."
)
def main(only: str, jobs: int, timeout: float, json_path: Path | None, page: Path | None, compare: Path | None) -> None:
    """Compare tiny models of every family with transformers; exits with 1 if one is wrong or crashes."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    results = _kept(json_path)
    names = [name for name in only.split(",") if name] or [
        name for name in importlib.import_module("tiny_config").families() if name not in results
    ]
    if names:
        _import_what_is_slow()
        with Progress("auto").bar("families", len(names)) as bar:
            limits = {"jobs": jobs, "timeout": timeout, "memory_bytes": _MEMORY_BYTES}
            for verdict in judge_all(names, _judge_family, _crashed, **limits):
                results[verdict["family"]] = verdict
                _keep(json_path, results)
                bar.advance(f"{verdict['family']}: {verdict['verdict']}")
                click.echo(_line(verdict))
    if page is not None:
        write_page = importlib.import_module("sweep_page").write_page
        other = json.loads(compare.read_text()) if compare is not None else None
        page.write_text(write_page({"versions": _versions(), "families": results}, other))
    bad = [name for name, verdict in sorted(results.items()) if verdict["verdict"] in ("wrong", "crashed")]
    if bad:
        click.echo(f"wrong or crashed: {', '.join(bad)}", err=True)
        sys.exit(1)


def _versions() -> dict[str, str]:
    names = ("torch", "transformers")
    return {name: importlib.import_module(name).__version__.partition("+")[0] for name in names}


def _kept(path: Path | None) -> dict[str, Any]:
    """Results of an earlier run with the same versions."""
    if path is None or not path.exists():
        return {}
    kept = json.loads(path.read_text())
    if kept["versions"] != _versions():
        raise click.UsageError(f"{path} was written with {kept['versions']}, and here is {_versions()}")
    families: dict[str, Any] = kept["families"]
    return families


def _keep(path: Path | None, results: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps({"versions": _versions(), "families": dict(sorted(results.items()))}, indent=1))


def _line(verdict: dict[str, Any]) -> str:
    error = "" if verdict["error"] is None else f"{verdict['error']:.1e}"
    told = f"{verdict['family']:<28} {verdict['verdict']:<10} {verdict['seconds']:5.1f} s"
    return f"{told}  {error}{verdict['reason'][:200]}"


def _import_what_is_slow() -> None:
    """What every family needs, once: the processes are forked from here. Nothing may start a thread."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("family_check", "piecegraph.llm.llm", "transformers.models.mixtral.modeling_mixtral"):
        importlib.import_module(name)
    torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.ones(2))


def _judge_family(family: str) -> Verdict:
    from family_check import check_family

    return asdict(check_family(family))


def _crashed(family: str, reason: str) -> Verdict:
    from family_check import FamilyVerdict

    return asdict(FamilyVerdict(family=family, verdict="crashed", reason=reason))


if __name__ == "__main__":
    main()
