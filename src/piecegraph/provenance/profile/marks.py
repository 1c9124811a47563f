"""Marks in a profile: every call is a range with a number, under which it is remembered what the call was."""

from __future__ import annotations

from collections.abc import Callable

import torch

from piecegraph.base.origin import LaunchCall

CALL_MARK = "piecegraph.call"
"""The name of the range around a call, before the call's number."""


class Announcer:
    """A :class:`~piecegraph.provenance.observe.CallSink` that a profiler sees."""

    def __init__(self) -> None:
        self.calls: list[LaunchCall | None] = []
        """By number."""
        self._same: dict[LaunchCall, LaunchCall] = {}
        self._range: torch.profiler.record_function | None = None

    @property
    def is_inside(self) -> bool:
        return self._range is not None

    def begin(self) -> None:
        self._range = torch.profiler.record_function(f"{CALL_MARK} {len(self.calls)}")
        self.calls.append(None)
        self._range.__enter__()

    def end(self, make_call: Callable[[], LaunchCall]) -> None:
        assert self._range is not None
        self._range.__exit__(None, None, None)
        self._range = None
        call = make_call()
        self.calls[-1] = self._same.setdefault(call, call)

    def settle(self, make_call: Callable[[], LaunchCall]) -> None:
        """What ran outside of any call has no mark, and is attributed by what the profiler itself saw."""
