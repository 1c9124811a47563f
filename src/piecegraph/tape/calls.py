"""The calls of a function at their sizes: what the library of a compiled function records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from piecegraph.base.config import Options
from piecegraph.base.events import Event, EventLog
from piecegraph.base.plan import SizeKey
from piecegraph.base.user_code import user_line
from piecegraph.errors import RecordError
from piecegraph.graph.program import equal_pieces_once
from piecegraph.graph.signature import Call, Signature
from piecegraph.tape.body import Body, Sizes
from piecegraph.tape.buffers import StaticInputs
from piecegraph.tape.library import Way
from piecegraph.tape.tape import WatchedWeight


class SizedCalls:
    """A :class:`~piecegraph.tape.library.Recordable` whose keys are sizes.

    Args:
        signature: what is expected of the calls.
        body: what they run.
        example: one of them.
        options: those of ``compile``.
        events: where sizes are told that the function does not take.
        buffers: of the inputs, if others have made them already.
    """

    def __init__(
        self,
        signature: Signature,
        body: Body,
        example: Call,
        options: Options,
        events: EventLog,
        buffers: StaticInputs | None = None,
    ) -> None:
        self._signature = signature
        self._events = events
        self._is_own_size = True
        """Whether the buffers were last filled with a call as it is, without rows that are repeated or left out."""
        self.untried: set[SizeKey] = set()
        """Sizes that failed with repeated rows, and were not tried with those of a call."""
        self._prepare = options.prepare
        self.body = body
        self.devices = tuple(leaf.device for leaf in signature.tensors)
        self.buffers = buffers or StaticInputs(signature.tensors, options.pad_values, example.tensors)
        static = [example.tensors[i] for i in body.written_calls if signature.tensors[i].address is not None]
        self.state = (*body.written_state, *static)
        """Memory outside the buffers that the body writes to."""

    def title(self, key: SizeKey) -> str:
        return f"size {key}"

    def volume(self, key: SizeKey) -> tuple[int, ...]:
        return (key.volume, *key.values)

    def written(self, key: SizeKey) -> Sequence[torch.Tensor]:
        views = self.buffers.views(key.values)
        return (*self.state, *(views[i] for i in self.body.written_calls))

    def prepare(self, sizes: Sizes) -> None:
        """Tell the user which sizes run next: cut ops may read a batch of the host."""
        if self._prepare is not None:
            self._prepare(dict(zip(self._signature.size_names, sizes, strict=True)))

    def fill_example(self, key: SizeKey, source: Call) -> None:
        """With the rows of a call, repeated as often as needed."""
        self._is_own_size = key.values == source.sizes
        self.prepare(key.values)
        self.buffers.fill(key.values, source)

    def run(self, key: SizeKey) -> Sequence[Any]:
        views = self.buffers.views(key.values)
        self.body.check_writes(views, key.values)
        return self.body.run(views, key.values)

    def warm_up(self, key: SizeKey) -> None:
        with equal_pieces_once():
            self.run(key)

    def direct(self, key: SizeKey, source: Call) -> Callable[[], Sequence[Any]]:
        views = self.buffers.views(key.values)
        self.buffers.fill(key.values, source)
        self.body.learn(views, key.values)  # nothing else runs this size before its results are cut
        return lambda: self.body.run(views, key.values)

    def ways(self, key: SizeKey) -> Sequence[Way]:
        return (lambda recorder: self.body.record(recorder, self.buffers.views(key.values), key.values),)

    def failed(self, key: SizeKey, way: int | None, error: Exception, place: dict[str, Any]) -> None:
        """A size that the function does not take with repeated rows is dropped: real rows of that size may do."""
        line, why = str(user_line(error) or ""), f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if way is None and not self._is_own_size:
            hint = "a call of this size is tried with its own rows"
            self.untried.add(key)
            self._events.emit(Event("PG406", self.title(key), f"with repeated rows it raised {why}", hint))
            return
        self.untried.discard(key)
        raise RecordError(
            "PG403",
            f"size {key} could not be recorded",
            where=line,
            why=f"{why}; nor can it be traced: {self.body.untraced}" if self.body.untraced else why,
            hint="mark what cannot be captured with @piecegraph.eager_op or name it in splitting_ops",
            **(place | ({"line": line} if line else {})),
        ) from error

    def weights(self, key: SizeKey) -> Sequence[WatchedWeight]:
        return self.body.weights()

    def current(self, key: SizeKey | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def before_rerun(self, key: SizeKey) -> None:
        """Its inputs are copies, and what else it writes to is put back."""

    def why_gone(self, key: SizeKey) -> tuple[str, str]:
        return "", ""
