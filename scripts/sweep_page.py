"""The page of a sweep: which families run, which are refused and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_INTRODUCTION = """# Models

Written by `python scripts/model_sweep.py --json FILE --page docs/models.md`; do not edit. Versions: {versions}.

Every family of causal language models that transformers knows (`AutoModelForCausalLM`) was built tiny, with random
weights and every kind of layer that the family has, and run by `piecegraph.LLM` on a CPU in float32: three prompts of
{prompts} tokens, {new} new tokens for each, at most 8 tokens in a step and blocks of 4 tokens. So prompts are split,
steps are mixed, and windows of 6 tokens matter. Then all again, with what the prefix cache holds. The logits of all
tokens and the greedy tokens are compared with one forward of transformers without a cache. *Right* means that the
tokens are the same and every row of logits is within {tolerance} of its norm (for layers that compute one token by
another formula than many: within what transformers, token by token, differs from itself).

A tiny model shows that a family's layers are understood, not that every checkpoint fits into memory or is quick.

| families | number |
|---|---|
| right | {right} |
| refused when the model is loaded, with the reason | {refused} |
| wrong | {wrong} |
| not built: the sweep has no tiny model of it | {not_built} |
"""

_GUARDED = """
## Refused by the self check alone

Without the check (`options={"self_check": False}`) these would run and answer wrongly:

"""

_NOT_GUARDED = """
## Refused by the self check alone

None: every family above is refused for a reason of its own, also with `options={"self_check": False}`.
"""


def write_page(results: Mapping[str, Any], other: Mapping[str, Any] | None) -> str:
    """The page as Markdown.

    Args:
        results: versions, and the verdict on each family.
        other: the same of other versions, of which only differences are told.
    """
    families = [verdict for _, verdict in sorted(results["families"].items())]
    by_verdict = {name: [v for v in families if v["verdict"] == name] for name in _VERDICTS}
    guarded = [v for v in by_verdict["refused"] if v["error_unchecked"] is not None]
    parts = [
        _introduction(results["versions"], by_verdict),
        "\n## Right\n\n",
        _right_table(by_verdict["right"]),
        "\n## Refused\n\n",
        _table(("family", "code", "reason"), ((v["family"], v["code"], v["reason"]) for v in by_verdict["refused"])),
        _GUARDED if guarded else _NOT_GUARDED,
        _table(("family", "error"), ((v["family"], f"{v['error_unchecked']:.0%}") for v in guarded)) if guarded else "",
        "\n## Not built\n\n",
        _table(("family", "reason"), ((v["family"], v["reason"]) for v in by_verdict["not built"])),
    ]
    if wrong := [*by_verdict["wrong"], *by_verdict["crashed"]]:
        parts += ["\n## Wrong\n\n", _table(("family", "reason"), ((v["family"], v["reason"]) for v in wrong))]
    if other is not None:
        parts.append(_differences(results, other))
    return "".join(parts).rstrip() + "\n"


_VERDICTS = ("right", "refused", "wrong", "crashed", "not built")


def _introduction(versions: Mapping[str, str], by_verdict: Mapping[str, Sequence[Any]]) -> str:
    from family_check import NEW_TOKENS, PROMPT_LENGTHS, TOLERANCE

    return _INTRODUCTION.format(
        versions=_named(versions),
        prompts=", ".join(map(str, PROMPT_LENGTHS)),
        new=NEW_TOKENS,
        tolerance=f"{TOLERANCE:.1%}",
        right=len(by_verdict["right"]),
        refused=len(by_verdict["refused"]),
        wrong=len(by_verdict["wrong"]) + len(by_verdict["crashed"]),
        not_built=len(by_verdict["not built"]),
    )


def _named(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _right_table(verdicts: Iterable[Mapping[str, Any]]) -> str:
    rows = ((v["family"], v["architecture"], v["cache"], f"{v['error']:.0e}") for v in verdicts)
    return _table(("family", "class", "what its layers keep", "largest error"), rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _differences(results: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Families with another verdict there."""
    here, there = results["families"], other["families"]
    rows = []
    for family in sorted({*here, *there}):
        pair = [_short(families.get(family)) for families in (here, there)]
        if pair[0] != pair[1]:
            reason = there.get(family, {}).get("reason", "")
            rows.append((family, *pair, reason))
    count = sum(verdict["verdict"] == "right" for verdict in there.values())
    title = f"\n## With {_named(other['versions'])}\n\n{count} of {len(there)} families are right. What differs:\n\n"
    return title + _table(("family", "here", "there", "reason there"), rows)


def _short(verdict: Mapping[str, Any] | None) -> str:
    if verdict is None:
        return "not known"
    return f"{verdict['verdict']} {verdict['code']}".strip()
