"""What the watchdog of torch's process groups says of a collective that took too long, a state for each rank.

The line that names the collective does not name its process group in all versions of torch; the next one of the same
rank does, with the number of the collective.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from piecegraph.explain.evidence import Collective, GroupState, Process

MAX_STATES = 4096
MAX_TEXT = 200
DEFAULT_GROUP = "default_pg"
WORDS = ("atchdog caught coll", "ast enqueued", "orld size", "orld_size", "ORLD_SIZE", "MEMBER: ", "nranks ")
"""A line that is read here holds one of these."""

_WRITER = re.compile(r"\[rank(?P<rank>\d+)\]:")
_RANK = re.compile(
    r"\[(?:PG (?:ID )?(?P<id>\d+) (?:PG GUID (?P<guid>[^\s()\]]+) ?)?(?:\((?P<name>[^()\]]*)\) )?)?"
    r"[Rr]ank (?P<rank>\d+)\]"
)
_TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout: Work\w+\((?:SeqNum=(?P<number>\d+), )?OpType=(?P<op>\w+)"
    r"(?:, NumelIn=(?P<num_in>\d+), NumelOut=(?P<num_out>\d+))?[^\n]{0,100}?\) ran for (?P<ms>\d+) milliseconds"
)
_AT = re.compile(r"(?:at work(?: sequence id)?|Timeout at \w+ work): (?P<number>\d+)")
_STATUS = re.compile(
    r"[Ll]ast enqueued (?:\w+ )?work: (?P<enqueued>-?\d+), (?:last started (?:\w+ )?work: [^,\n]{1,80}, )?"
    r"last completed (?:\w+ )?work: (?P<completed>-?\d+)"
)
_WORLD = re.compile(
    r"(?i:(?<![a-z] )\b(?:global_|torch_)?world[ _]sizes?)['\"]?(?: is| of)? ?[=:]? ?\[?(?P<size>\d{1,5})\b(?![.\d])"
    r"|\bMEMBER: \d+/(?P<members>\d+)|\bcomm 0x\w+ rank \d+ nranks (?P<nranks>\d+) "
)
_OF_OTHERS = re.compile(r"(?i)\b(?:checkpoint|saved|load|resum|expect|previous|must|divisible|mismatch|if|should)")
"""A line about the size of another job, or about sizes in general."""

_Key = tuple[int | str | None, str, int]
"""Who printed it, the group, and the rank in it."""


@dataclass(slots=True)
class WatchdogReports:
    """What was read so far in one run."""

    world_size: int | None = None
    _states: dict[_Key, GroupState] = field(default_factory=dict)

    def read(self, text: str, line: int, process: Process) -> None:
        """Read a line, in which those of several ranks may be glued together."""
        starts = [found.start() for found in _WRITER.finditer(text)]
        for start, end in zip([0, *starts], [*starts, len(text)], strict=True):
            self._read_piece(text[start:end], line, process)
        if "watchdog" not in text:
            self._read_world(text)

    def states(self) -> tuple[GroupState, ...]:
        """All of them; a collective whose group no line names is of the group in which others waited in the same."""
        by_collective = {state.waited: state.group for state in self._states.values() if state.waited and state.group}
        states = [
            state
            if state.group or state.waited not in by_collective
            else replace(state, group=by_collective[state.waited])
            for state in self._states.values()
        ]
        # What an exception says again, in a line without a prefix.
        named = {(state.group, state.rank, state.waited) for state in states if state.world_rank is not None}
        return tuple(
            state
            for state in states
            if state.world_rank is not None or (state.group, state.rank, state.waited) not in named
        )

    def _read_piece(self, text: str, line: int, process: Process) -> None:
        timed_out, status = _TIMED_OUT.search(text), _STATUS.search(text)
        told = timed_out or status
        who = _RANK.search(text, 0, told.start()) if told is not None else None
        if who is None:
            return
        writer = _WRITER.match(text)
        world_rank = int(writer["rank"]) if writer is not None else process.rank
        rank, group = int(who["rank"]), _group_of(who)
        key = (process.label if world_rank is None else world_rank, group, rank)
        if timed_out is not None:
            self._add_wait(key, _state(timed_out, text, line, group, rank, world_rank))
        elif status is not None:
            self._add_status(key, text, status, line, world_rank)

    def _add_wait(self, key: _Key, state: GroupState) -> None:
        writer, group, rank = key
        ungrouped = self._states.get((writer, "", rank)) if group else None
        if ungrouped is not None and ungrouped.waited == state.waited:
            del self._states[writer, "", rank]
        known = self._states.get(key)
        if known is not None and known.waited is None:
            state = replace(state, num_enqueued=known.num_enqueued, num_completed=known.num_completed)
        if known is None or known.waited is None:
            self._keep(key, state)

    def _add_status(
        self,
        key: _Key,
        text: str,
        status: re.Match[str],
        line: int,
        world_rank: int | None,
    ) -> None:
        writer, group, rank = key
        at = _AT.search(text)
        known = self._states.get(key)
        if known is None and at is not None and self._waited_at(writer, rank) == int(at["number"]):
            known = replace(self._states.pop((writer, "", rank)), group=group)
        known = known or GroupState(group=group, rank=rank, world_rank=world_rank, line=line, text=_excerpt(text))
        enqueued, completed = int(status["enqueued"]), int(status["completed"])
        self._keep(key, replace(known, num_enqueued=enqueued, num_completed=completed))

    def _waited_at(self, writer: int | str | None, rank: int) -> int | None:
        """The number of the collective that a rank waited in, and of which no line has named the group yet."""
        known = self._states.get((writer, "", rank))
        return known.waited.number if known is not None and known.waited is not None else None

    def _keep(self, key: _Key, state: GroupState) -> None:
        if key in self._states or len(self._states) < MAX_STATES:
            self._states[key] = state

    def _read_world(self, text: str) -> None:
        """The largest: those of groups inside of the job are called the same."""
        found = _WORLD.search(text)
        if found is not None and not _OF_OTHERS.search(text):
            self.world_size = max(self.world_size or 0, int(found[found.lastgroup or 0]))


def is_report(text: str) -> bool:
    """Whether a watchdog says in a line where a rank is."""
    return _TIMED_OUT.search(text) is not None or _STATUS.search(text) is not None


def _group_of(who: re.Match[str]) -> str:
    if who["id"] is None:
        return ""
    name = who["guid"] or who["id"]
    return (
        DEFAULT_GROUP
        if who["name"] == DEFAULT_GROUP or name == "0"
        else name + (f" ({who['name']})" if who["name"] else "")
    )


def _state(found: re.Match[str], text: str, line: int, group: str, rank: int, world_rank: int | None) -> GroupState:
    number, num_in, num_out = (
        None if found[name] is None else int(found[name]) for name in ("number", "num_in", "num_out")
    )
    return GroupState(
        group=group,
        rank=rank,
        world_rank=world_rank,
        waited=Collective(found["op"], number, num_in, num_out),
        waited_ms=int(found["ms"]),
        line=line,
        text=_excerpt(text),
    )


def _excerpt(text: str) -> str:
    who = _RANK.search(text)
    return text[who.start() if who is not None else 0 :].strip()[:MAX_TEXT]
