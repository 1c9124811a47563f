"""One stream's lines to failures: dumps are taken out, the rest is cut, and read in order, unwoven or reconstructed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from piecegraph.explain.evidence import Certainty, Failure, Frame, Process, Raised, TreeLine
from piecegraph.explain.log.fatal import take_deaths
from piecegraph.explain.log.lines import Line
from piecegraph.explain.log.parts import Chunk, Cut, cut
from piecegraph.explain.log.reconstruct import Ending, reconstruct
from piecegraph.explain.log.torn import mend
from piecegraph.explain.log.tracebacks import Act, Story, key_of, num_tellers, read_in_order
from piecegraph.explain.log.unweave import unweave


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a stream holds."""

    failures: tuple[Failure, ...] = ()
    call_chains: tuple[tuple[Frame, ...], ...] = ()
    tree: tuple[TreeLine, ...] = ()
    notes: tuple[str, ...] = ()
    rest_from: int | None = None
    """From this line on, nothing was resolved yet."""


def resolve(lines: Sequence[Line], process: Process, *, may_search: bool = True, is_open: bool = False) -> Resolved:
    """Everything that one stream tells; ``process`` is what its prefix proves.

    Args:
        may_search: whether to spend time on the stacks of processes that differ.
        is_open: whether the stream goes on, so that what is unfinished must wait.
    """
    deaths = take_deaths(mend(lines), process)
    done = cut(deaths.rest)
    part = _complete_part(done) if is_open else done
    woven = _resolve_tracebacks(part, process, may_search)
    rest_from = done.chunks[len(part.chunks)].line if len(part.chunks) < len(done.chunks) else None
    died = tuple(death for death in deaths.failures if rest_from is None or (death.line or 0) < rest_from)
    return Resolved(
        (*died, *woven.failures), (*deaths.call_chains, *woven.call_chains), woven.tree, woven.notes, rest_from
    )


def _complete_part(done: Cut) -> Cut:
    """The chunks up to the last header at which no traceback is unfinished; all of them where there is none."""
    num_open = place = 0
    for at, chunk in enumerate(done.chunks):
        if chunk.kind == "header":
            if num_open == 0 and at and done.chunks[at - 1].kind == "text":
                place = at
            num_open += 1
        elif chunk.kind == "text":
            num_open = max(0, num_open - 1)
    return replace(done, chunks=done.chunks[:place]) if num_open and place else done


def _resolve_tracebacks(done: Cut, process: Process, may_search: bool) -> Resolved:
    if not done.chunks:
        return Resolved()
    stories = read_in_order(done.chunks)
    if stories is None or _may_be_misread(stories, done.chunks):
        same = unweave(done.chunks)
        if same is not None:
            notes = _other_readings(same.num_other_readings)
            failure = _failure(same.story, same.count, _tellers(done, same.count, process), "unwoven")
            return Resolved((failure,), notes=notes)
    if stories is not None:
        return _printed(stories, process)
    found = reconstruct(done.chunks, may_search=may_search)
    return Resolved(tuple(_reconstructed(ending, process) for ending in found.endings), tree=found.tree)


def _may_be_misread(stories: Sequence[Story], chunks: Sequence[Chunk]) -> bool:
    """Whether stories that differ, read in order, could be equal ones of which a part was moved behind another's."""
    if len({key_of(story) for story in stories}) < 2:
        return False
    count = num_tellers(chunks)
    return count > 1 and all(number % count == 0 for number in Counter(chunk.key for chunk in chunks).values())


def _printed(stories: Sequence[Story], process: Process) -> Resolved:
    failures, chains, notes = [], [], []
    for story in stories:
        whole = tuple(act for act in story if act.text is not None)
        if whole:
            failures.append(_failure(whole, 1, _teller(story, process), "printed"))
        for act in story:
            if act.text is None:
                chains.append(_frames(act))
                if not act.is_call_chain:
                    notes.append(f"a traceback that ends at line {act.end} has no exception text: it was cut off")
    return Resolved(tuple(failures), tuple(chain for chain in chains if chain), notes=tuple(notes))


def _teller(story: Story, process: Process) -> tuple[Process, ...]:
    """Who told a story: proven by the prefix, or by a name right above it if nothing stands in between."""
    if process.label:
        return (process,)
    header = story[0].header
    parts = [part for act in story for part in (act.header, *act.frames, act.text) if part is not None]
    # Between chained exceptions stand a link and blank lines.
    is_unbroken = all(b.line - a.end <= 4 for a, b in itertools.pairwise(parts))
    return (Process(header.name),) if header is not None and header.name and is_unbroken else ()


def _tellers(done: Cut, count: int, process: Process) -> tuple[Process, ...]:
    """Who told the one story that all told: every name that announced itself, if there are as many as tellers."""
    if process.label:
        return (process,)
    claims = {chunk.name for chunk in done.chunks if chunk.kind == "header" and chunk.name}
    for names in (set(done.names), claims):
        if len(names) == count:
            return tuple(Process(name) for name in sorted(names, key=lambda name: (len(name), name)))
    return ()


def _failure(story: Story, count: int, processes: tuple[Process, ...], certainty: Certainty) -> Failure:
    origin = story[0].header.origin if story[0].header else ""
    kind: Literal["thread", "exception", "ignored"] = "exception"
    if origin:
        kind = "thread" if origin == "thread" else "ignored"
    return Failure(
        chain=tuple(_raised(act) for act in story),
        kind=kind,
        count=count,
        processes=processes,
        certainty=certainty,
        line=story[-1].end,
    )


def _reconstructed(ending: Ending, process: Process) -> Failure:
    chain = tuple(
        Raised(
            type=told.text.name,
            message=_message(told.text),
            frames=(told.frame.frame,) if told.frame is not None and told.frame.frame is not None else (),
            link=told.link,
        )
        for told in ending.chain
    )
    return Failure(
        chain=chain,
        count=ending.count,
        processes=(process,) if process.label else (),
        certainty="reconstructed",
        line=ending.chain[-1].text.end,
    )


def _raised(act: Act) -> Raised:
    assert act.text is not None
    return Raised(type=act.text.name, message=_message(act.text), frames=_frames(act), link=act.link)


def _frames(act: Act) -> tuple[Frame, ...]:
    return tuple(chunk.frame for chunk in act.frames if chunk.frame is not None)


def _message(text: Chunk) -> str:
    return text.text[len(text.name) :].removeprefix(":").strip()


def _other_readings(number: int) -> tuple[str, ...]:
    if not number:
        return ()
    return (f"{number} other orders of frames that repeat would explain this log as well",)
