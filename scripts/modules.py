"""Run models that other people wrote (timm, transformers) through ``piecegraph.compile``, and tell what happened.

Each is judged in a process of its own (``module_check.py``). Results are kept in a JSON file after every model, so that
a run that was stopped goes on where it was.

    python scripts/modules.py --json modules.json --page docs/modules.md
"""

from __future__ import annotations

import collections
import fnmatch
import functools
import importlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import click
from processes import Verdict, judge_all

from piecegraph.base.progress import Progress

_MEMORY_BYTES = 14 * 2**30
_VERDICTS = ("equal", "fell back", "refused", "wrong", "crashed", "too slow", "not built")


@click.command()
@click.option("--only", default="", help="Patterns of names, with commas between them: timm/*,transformers/t5.")
@click.option("--kinds", "wanted", default="", help="Kinds of models, with commas between them: timm,encoder.")
@click.option("--again", default="", help="Verdicts to judge again, with commas between them: refused,crashed.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--backend", default="inductor", show_default=True, help="What compiles the pieces: inductor, eager.")
@click.option("--jobs", default=2, show_default=True, help="Models that run together.")
@click.option("--timeout", default=180.0, show_default=True, help="Seconds for one model.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Keep results here, and go on from them.")
@click.option("--page", type=click.Path(path_type=Path), help="Write the page here.")
def main(
    only: str,
    wanted: str,
    again: str,
    device: str,
    backend: str,
    jobs: int,
    timeout: float,
    json_path: Path | None,
    page: Path | None,
) -> None:
    """Compare models with themselves, compiled; exits with 1 if one is wrong or crashes. A CPU simulates graphs."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    results = _kept(json_path)
    kinds = _import_what_is_slow(device)
    if wanted:
        kinds = {name: kind for name, kind in kinds.items() if kind in wanted.split(",")}
    names = _chosen(kinds, results, [part for part in only.split(",") if part], again.split(","))
    judge = functools.partial(_judge_model, kinds=kinds, device=device, backend=backend)
    limits = {"jobs": jobs, "timeout": timeout, "memory_bytes": _MEMORY_BYTES if device == "cpu" else None}
    with Progress("auto").bar("models", len(names)) as bar:
        for verdict in judge_all(names, judge, functools.partial(_crashed, kinds=kinds), **limits):
            results[verdict["name"]] = verdict
            if json_path is not None:
                json_path.write_text(json.dumps(dict(sorted(results.items())), indent=1))
            bar.advance(f"{verdict['name']}: {verdict['verdict']}")
            told = f"{verdict['name']:<45} {verdict['verdict']:<10} {verdict['seconds']:5.1f} s"
            click.echo(f"{told}  {verdict['code']} {verdict['reason'][:200]}")
    click.echo(_counts(results.values()))
    if page is not None:
        page.write_text(_page(results, device, backend))
    if any(verdict["verdict"] in ("wrong", "crashed") for verdict in results.values()):
        sys.exit(1)


def _chosen(
    kinds: Mapping[str, str], results: Mapping[str, Verdict], only: Sequence[str], again: Sequence[str]
) -> list[str]:
    """The models that match, without those that are judged already."""
    wanted = [name for name in kinds if not only or any(fnmatch.fnmatch(name, pattern) for pattern in only)]
    return [name for name in wanted if name not in results or results[name]["verdict"] in again]


def _kept(path: Path | None) -> dict[str, Verdict]:
    """Results of an earlier run."""
    if path is None or not path.exists():
        return {}
    kept: dict[str, Verdict] = json.loads(path.read_text())
    return kept


def _import_what_is_slow(device: str) -> dict[str, str]:
    """What every model needs, once: the processes are forked from here. Nothing may start a thread, or a GPU."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    importlib.import_module("module_check")
    if device == "cpu":  # a trace asks which GPUs there are, and no fork may use them afterwards
        torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.ones(2))
    else:
        importlib.import_module("torch._dynamo.convert_frame")
    names: dict[str, str] = importlib.import_module("other_models").all_models()
    return names


def _judge_model(name: str, kinds: Mapping[str, str], device: str, backend: str) -> Verdict:
    from module_check import check_module

    return asdict(check_module(name, kinds[name], device, backend))


def _crashed(name: str, reason: str, kinds: Mapping[str, str]) -> Verdict:
    from module_check import ModuleVerdict, VerdictName

    verdict: VerdictName = "too slow" if reason.startswith("no end") else "crashed"
    return asdict(ModuleVerdict(name=name, kind=kinds[name], verdict=verdict, reason=reason))


# --- the page

_INTRODUCTION = """# Other people's models

Written by `python scripts/modules.py --json FILE --page docs/modules.md`; do not edit. Versions: {versions}; {place}.

Two small models of every family of timm, and one class of every family of transformers (tiny where its sizes can be
made so), with random weights, go through `piecegraph.compile(model)` as they come: {num_calls} calls of batch sizes
{batches} with fresh data, every result compared with the model's own. *Equal* means that all calls were replayed from
a plan and agree; what *fell back* agrees too, but some call ran without its graphs. What is *not built* does not run by
itself: the inputs that the script makes up do not fit it. Kinds that are not in the table were not run.

"""


def _counts(verdicts: Iterable[Verdict]) -> str:
    """A table of verdicts by kind."""
    kinds: dict[str, collections.Counter[str]] = {}
    for verdict in verdicts:
        kinds.setdefault(verdict["kind"], collections.Counter())[verdict["verdict"]] += 1
    total = sum(kinds.values(), collections.Counter())
    rows = [(kind, *(str(count[v]) for v in _VERDICTS)) for kind, count in [*sorted(kinds.items()), ("all", total)]]
    return _table(("kind", *_VERDICTS), rows)


def _page(results: Mapping[str, Verdict], device: str, backend: str) -> str:
    from module_check import BATCHES

    verdicts = [verdict for _, verdict in sorted(results.items())]
    versions = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers", "timm") if find_spec(name))
    place = f"pieces by {backend} on " + ("an NVIDIA GPU" if device == "cuda" else "a CPU, with simulated graphs")
    batches = ", ".join(map(str, BATCHES))
    parts = [
        _INTRODUCTION.format(versions=versions, place=place, num_calls=len(BATCHES), batches=batches),
        _counts(verdicts),
    ]
    for verdict in _VERDICTS[1:]:
        chosen = [v for v in verdicts if v["verdict"] == verdict]
        if chosen:
            rows = [(v["name"], v["kind"], v["code"], _cell(v["reason"])) for v in chosen]
            parts.append(f"\n## {verdict.capitalize()}\n\n" + _table(("model", "kind", "code", "reason"), rows))
    equal = ", ".join(v["name"].partition("/")[2] for v in verdicts if v["verdict"] == "equal")
    return "".join([*parts, f"\n## Equal\n\n{equal}\n"])


def _version(name: str) -> str:
    return str(importlib.import_module(name).__version__).partition("+")[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    main()
