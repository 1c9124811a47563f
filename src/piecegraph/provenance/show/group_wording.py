"""The words about groups that text, Markdown and JSON share: the claim as sentences, and what each member is in it."""

from __future__ import annotations

from piecegraph.provenance.groups.group import Condition, Group, GroupMember, Groups


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
        return f"{name} always runs {repeats(anchor)} times {place}"
    if group.verdict == "always":
        listed = _listed([_either(slot, quote) for slot in group.slots if not slot[0].is_optional])
        return f"{listed} never run without each other{', in this order' if group.is_ordered else ''}, {place}"
    company = _company(group, others, anchor, quote)
    if group.verdict == "usually":
        part = f"{share(anchor)} of its launches ({anchor.launches} of {anchor.launches_in_all})"
        return f"{name} runs with {company} in {part}, {place}"
    return f"{name} never runs without {company}, {place}"


def sentences(group: Group, quote: str) -> list[str]:
    """The claim, and all that qualifies it."""
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


def share(member: GroupMember) -> str:
    """The share of a member's launches that belong to the group: rounded, but never up to all."""
    return "100 %" if member.is_sure else f"{min(member.confidence, 0.999):.1%}".replace("%", " %")


def repeats(member: GroupMember) -> str:
    """How often one call launches a member."""
    least, most = member.repeats
    return str(least) if least == most else f"{least} to {most}"


def role(group: Group, member: GroupMember) -> str:
    """What a member is in its group; empty if it is just there."""
    if member.is_optional:
        return f"optional, {member.calls} of {group.support} calls"
    if sum(other.slot == member.slot for other in group.members) > 1:
        return f"one of several, {member.calls} of {group.support} calls"
    return "anchor" if member.name == group.anchor and group.verdict != "always" else ""


def no_groups(groups: Groups) -> str:
    """What is said in place of groups where there are none."""
    return f"No kernel groups: {groups.reason}. Calls looked at: {groups.num_calls}."


def groups_footer(groups: Groups) -> str:
    """What the groups were mined from."""
    return (
        f"Mined from {groups.num_calls} calls that were seen as they launched or were captured; replays add time alone."
    )
