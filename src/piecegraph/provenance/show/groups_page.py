"""Groups for people, as text and as Markdown, and for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from piecegraph.provenance.groups.group import Condition, Group, GroupMember, Groups
from piecegraph.provenance.show.text import WIDTH, plain_text

SCHEMA_VERSION = 1


def as_table(groups: Groups) -> RenderableType:
    """A small table and a paragraph for each group. A rich console drops the colours where there is no terminal."""
    if not groups.groups:
        return Text(_nothing(groups))
    blocks: list[RenderableType] = []
    for group in groups.groups:
        title = Text(group.label, "bold cyan").append(f"  {headline(group)}", "bold")
        sentences = Padding(Text(" ".join(_sentences(group, ""))), (0, 0, 1, 4))
        blocks += [title, _member_table(group), sentences]
    return Stack(*blocks, Text(_footer(groups), "dim"))


def as_text(groups: Groups) -> str:
    """The same without colours."""
    return plain_text(as_table(groups), WIDTH)


def as_markdown(groups: Groups) -> str:
    """One small page, for a report."""
    lines = ["# Kernel groups", ""]
    if not groups.groups:
        return "\n".join([*lines, _nothing(groups), ""])
    for group in groups.groups:
        lines += [f"## {group.label}: {headline(group)}", "", " ".join(_sentences(group, "`")), ""]
        lines += ["| member | per call | calls | in the group |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(_markdown_cells(group, member))} |" for member in group.members]
        lines.append("")
    return "\n".join([*lines, _footer(groups), ""])


def as_document(groups: Groups) -> dict[str, Any]:
    """Everything mined, in plain types."""
    return {
        "schema_version": SCHEMA_VERSION,
        "num_calls": groups.num_calls,
        "reason": groups.reason,
        "groups": [_group_document(group) for group in groups.groups],
    }


def headline(group: Group) -> str:
    """``always given splitKreduce_kernel, in 60 calls of aten::mm (360 in all)``"""
    verdict = f"{group.verdict} {group.anchor}" if group.verdict == "always given" else group.verdict
    owners = ", ".join(f"{owner.support} calls of {owner.op} ({owner.calls} in all)" for owner in group.owners)
    return f"{verdict}, in {owners}"


def sentence(group: Group, quote: str = "`") -> str:
    """The claim in words, with its direction and the place to intercept."""
    anchor = group.anchor_member
    others = [slot for slot in group.slots if not slot[0].is_optional and slot[0].slot != anchor.slot]
    owner = " or ".join(f"{quote}{one.op}{quote}" for one in group.owners)
    place = f"in the same {owner} call; intercept at {owner}."
    name = f"{quote}{anchor.name}{quote}"
    if not others:
        return f"{name} always runs {_repeats(anchor)} times {place}"
    if group.verdict == "always":
        listed = _listed([_either(slot, quote) for slot in group.slots if not slot[0].is_optional])
        return f"{listed} never run without each other{', in this order' if group.is_ordered else ''}, {place}"
    company = _company(group, others, anchor, quote)
    if group.verdict == "usually":
        share = f"{_share(anchor)} of its launches ({anchor.launches} of {anchor.launches_in_all})"
        return f"{name} runs with {company} in {share}, {place}"
    return f"{name} never runs without {company}, {place}"


def _sentences(group: Group, quote: str) -> list[str]:
    said = [sentence(group, quote)]
    for member in group.members:
        name = f"{quote}{member.name}{quote}"
        if not member.is_sure and member.name != group.anchor:
            said.append(
                f"{name} also runs elsewhere: {member.launches} of its {member.launches_in_all} launches are here."
            )
        if member.is_optional:
            said.append(f"{name} is optional: in {member.calls} of {group.support} calls.")
        if member.condition is not None:
            said.append(_condition_sentence(member, member.condition, quote))
    if group.bound is not None:
        calls = group.anchor_member.calls
        said.append(
            f"No exception in {calls} calls: fewer than {group.bound * 100:.2g} % are to be expected (95 % confidence)."
        )
    if group.places:
        more = group.num_places - len(group.places)
        said.append(f"At {'; '.join(group.places)}{f' and {more} more' if more else ''}.")
    return said


def _condition_sentence(member: GroupMember, condition: Condition, quote: str) -> str:
    tested = f"{quote}{condition.member}{quote}"
    what = "the group" if condition.member == member.name else f"{quote}{member.name}{quote}"
    return (
        f"{tested} with {condition.holds}: {condition.num_with} of {condition.num_with} launches with {what}; "
        f"{condition.otherwise}: 0 of {condition.num_without}."
    )


def _company(group: Group, others: list[tuple[GroupMember, ...]], anchor: GroupMember, quote: str) -> str:
    """``A before it and B after it``"""
    if not group.is_ordered:
        return _listed([_either(slot, quote) for slot in others])
    before = [_either(slot, quote) for slot in others if slot[0].slot < anchor.slot]
    after = [_either(slot, quote) for slot in others if slot[0].slot > anchor.slot]
    parts = [f"{_listed(side)} {word} it" for side, word in ((before, "before"), (after, "after")) if side]
    return " and ".join(parts)


def _either(slot: tuple[GroupMember, ...], quote: str) -> str:
    return " or ".join(f"{quote}{member.name}{quote}" for member in slot)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _share(member: GroupMember) -> str:
    """Rounded, but never up to all."""
    return "100 %" if member.is_sure else f"{min(member.confidence, 0.999):.1%}".replace("%", " %")


def _repeats(member: GroupMember) -> str:
    least, most = member.repeats
    return str(least) if least == most else f"{least} to {most}"


def _member_table(group: Group) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for member in group.members:
        name = Text(member.name, "bold" if member.name == group.anchor else "")
        if member.repeats != (1, 1):
            name.append(f" x {_repeats(member)}", "dim")
        table.add_row("  ", name, _share(member), Text(_role(group, member), "dim"))
    return table


def _role(group: Group, member: GroupMember) -> str:
    if member.is_optional:
        return f"optional, {member.calls} of {group.support} calls"
    if sum(other.slot == member.slot for other in group.members) > 1:
        return f"one of several, {member.calls} of {group.support} calls"
    return "anchor" if member.name == group.anchor and group.verdict != "always" else ""


def _markdown_cells(group: Group, member: GroupMember) -> list[str]:
    name = f"`{member.name.replace('|', chr(92) + '|')}`"
    role = _role(group, member)
    return [
        f"{name} ({role})" if role else name,
        _repeats(member),
        f"{member.calls} of {group.support}",
        f"{_share(member)} ({member.launches} of {member.launches_in_all})",
    ]


def _group_document(group: Group) -> dict[str, Any]:
    document = dataclasses.asdict(group)
    for member, values in zip(group.members, document["members"], strict=True):
        values["confidence"] = member.confidence
    return {**document, "op": group.op, "support": group.support, "bound": group.bound, "sentence": sentence(group, "")}


def _nothing(groups: Groups) -> str:
    return f"No kernel groups: {groups.reason}. Calls looked at: {groups.num_calls}."


def _footer(groups: Groups) -> str:
    return (
        f"Mined from {groups.num_calls} calls that were seen as they launched or were captured; replays add time alone."
    )
