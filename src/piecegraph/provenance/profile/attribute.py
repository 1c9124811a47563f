"""Who made a launch, as far as a profile of any program tells: from raw launches to a :class:`KernelProfile`.

The ranges around a launch name its op, the Python functions and the class of the module. Of what a replayed graph runs
they say nothing, as they are those of the replay; there only an annotation around it is of use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from piecegraph.base.origin import LaunchCall, Origin
from piecegraph.base.plan import SourceLine
from piecegraph.base.user_code import is_user_file
from piecegraph.provenance.launch import How, KernelProfile, Launch, Range, RawLaunch
from piecegraph.provenance.profile.join import RawProfile
from piecegraph.provenance.profile.timeline import MODULE_PREFIX

Attribution = Callable[[RawLaunch], Launch | None]
"""Knows better than the ranges who made a launch, or returns None."""

OWN_ANNOTATIONS = "piecegraph."
_STEP_COUNTER = "ProfilerStep#"
"""Would make every step a phase of its own."""
_PYTHON_FRAME = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.*)")
_LIBRARY_FOLDERS = ("torch/", "piecegraph/")
"""Profilers leave out the folder that packages are in."""


@dataclass(frozen=True, slots=True)
class _Caller:
    call: LaunchCall | None
    phase: str


def attribute(profile: RawProfile, device: str = "", first: Attribution | None = None) -> KernelProfile:
    """Say of each launch who made it: ``first`` if it knows, else by the ranges around it."""
    callers = _Callers()
    launches = []
    for raw in profile.launches:
        known = first(raw) if first is not None else None
        launches.append(known or _by_ranges(raw, callers.of(raw.ranges)))
    if not profile.device_ids:
        device = "cpu"
    return KernelProfile(tuple(launches), device=device, notes=tuple(_notes(profile, launches)))


def _by_ranges(raw: RawLaunch, caller: _Caller) -> Launch:
    if raw.is_replayed:  # the replay of a graph is no call that kernels have in common
        how: How = "step" if caller.phase else "none"
        return raw.made_by(None, -1, caller.phase, how, raw.correlation)
    return raw.made_by(caller.call, raw.instance, caller.phase, "none" if caller.call is None else "stack")


class _Callers:
    """What ranges tell; launches with the same ranges share one answer."""

    def __init__(self) -> None:
        self._known: dict[int, _Caller] = {}

    def of(self, ranges: tuple[Range, ...]) -> _Caller:
        # Equal ranges are one object, which the profile keeps; hashing dozens of them for each launch would be slow.
        caller = self._known.get(id(ranges))
        if caller is None:
            caller = self._known[id(ranges)] = _Caller(_call(ranges), _phase(ranges))
        return caller


def _call(ranges: tuple[Range, ...]) -> LaunchCall | None:
    callers = [one for one in ranges if one.kind == "op"] or [one for one in ranges if one.kind == "python"]
    if not callers:
        return None
    module = next((one.name.removeprefix(MODULE_PREFIX) for one in ranges if one.kind == "module"), "")
    origin = Origin(callers[0].name, module, python_stack(ranges))
    return LaunchCall(callers[0].name, (origin,), callers[0].shapes)


def _phase(ranges: Iterable[Range]) -> str:
    names = (one.name for one in ranges if one.kind == "annotation")
    return next((name for name in names if not name.startswith((OWN_ANNOTATIONS, _STEP_COUNTER))), "")


def python_stack(ranges: Iterable[Range]) -> tuple[SourceLine, ...]:
    """The Python functions among ranges, outermost first, without those of torch, unless there are no others.

    >>> python_stack([Range("python", "torch/nn/modules/linear.py(130): forward"), Range("python", "model.py(7): f")])
    (SourceLine(file='model.py', line=7, text=''),)
    """
    frames = [_PYTHON_FRAME.fullmatch(one.name) for one in ranges if one.kind == "python"]
    lines = [SourceLine(frame["file"], int(frame["line"])) for frame in reversed(frames) if frame is not None]
    return tuple(line for line in lines if _is_user_line(line)) or tuple(lines[-1:])


def _is_user_line(line: SourceLine) -> bool:
    inside = line.file.rpartition("site-packages/")[2]  # of another machine, perhaps
    return is_user_file(line.file) and not inside.startswith(_LIBRARY_FOLDERS) and "/torch/" not in inside


def _notes(profile: RawProfile, launches: list[Launch]) -> Iterable[str]:
    """What a reader of the tables must know. Only what is still unknown counts."""
    if not profile.device_ids:
        yield "nothing ran on a GPU: these are ops of the CPU, each with its time without the ops it calls"
    total = len(launches)
    unknown = [raw for raw, launch in zip(profile.launches, launches, strict=True) if launch.call is None]
    replayed = [raw for raw in unknown if raw.is_replayed]
    num_ambiguous = sum(raw.correlation in profile.ambiguous for raw in unknown)
    num_unseen = sum(not raw.launcher and raw.correlation not in profile.ambiguous for raw in unknown)
    if num_unseen:
        yield f"{num_unseen:,} of {total:,} were launched outside of the time that was recorded: by whom is not known"
    if num_ambiguous:
        yield f"{num_ambiguous:,} of {total:,} cannot be attributed: several processes were merged into this trace"
    if replayed:
        num_replays = len({raw.correlation for raw in replayed})
        where = f"{len(replayed):,} of {total:,} ran in {num_replays:,} replays of graphs"
        yield f"{where}: a trace of them does not tell what put them there"
    origins = [launch.call.origins for launch in launches if launch.call is not None and launch.how == "stack"]
    if any(origin.stack for one in origins for origin in one):
        yield "lines that were found by stack are where a function begins: the profiler tells no others"
    elif origins:
        yield "there are no lines of Python: record with with_stack=True"
