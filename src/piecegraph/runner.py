"""Serves the calls of one plan: picks a recorded size, records it if need be, and replays it.

The slow questions (is the plan valid at this size, which bucket, may it be padded) are answered once for each size that occurs and kept as a
:class:`~piecegraph.route.Route`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph import torch_compat
from piecegraph.body import Body
from piecegraph.buckets import best_fit, ladder, next_rung
from piecegraph.buffers import StaticInputs
from piecegraph.compare import first_difference
from piecegraph.config import CompileConfig
from piecegraph.errors import ConfigError, PiecegraphError, RecordError
from piecegraph.events import Event, EventLog
from piecegraph.graph_device import GraphDevice
from piecegraph.padding import padding_changes, preserved
from piecegraph.plan import Decision, RecordedSize, SizeKey
from piecegraph.progress import Progress
from piecegraph.record import Recorder
from piecegraph.route import PiecesRoute, Route, TapeRoute, can_cut
from piecegraph.signature import Call, Signature
from piecegraph.structure import flatten
from piecegraph.tape import DirectTape, GraphStep, Tape
from piecegraph.user_code import user_line

Sizes = tuple[int, ...]
_MAX_ROUTES = 4096


@dataclass(frozen=True, slots=True)
class Refusal:
    """A size that the plan cannot serve: the call runs eagerly."""

    event: Event


class PlanRunner:
    """All tapes of one plan."""

    def __init__(
        self,
        signature: Signature,
        body: Body,
        device: GraphDevice | None,
        *,
        mode: str,
        config: CompileConfig,
        events: EventLog,
        example: Call,
        function: Callable[..., Any],
    ) -> None:
        self.signature = signature
        self.body = body
        self.mode = mode
        self._device = device
        self._config = config
        self._events = events
        self._progress = Progress(config.options.progress)
        self._buffers = StaticInputs(signature.tensors, config.options.pad_values, example.tensors)
        static = [example.tensors[i] for i in body.written_calls if signature.tensors[i].address is not None]
        self._state = (*body.written_state, *static)
        self._function = function
        self._tapes: dict[SizeKey, Tape | DirectTape] = {}
        self._dropped: set[SizeKey] = set()
        self._valid: dict[SizeKey, bool] = {}
        self._routes: dict[Sizes, tuple[Route, Event | None] | Refusal] = {}
        self._uncapturable: dict[int, str] = {}
        pad = {"always": True, "never": False, "auto": None}[config.padding]
        self._can_pad: list[bool | None] = [pad] * len(signature.size_names)
        self.decisions: list[Decision] = []
        self.recorded: list[RecordedSize] = []
        self._sentinel = next(iter(body.weights()), None) if device is not None else None
        self._check_sizes()

    def _check_sizes(self) -> None:
        sizes = self._config.capture_sizes
        if sizes != "auto" and self.mode != "none" and len(sizes[0]) != len(self.signature.size_names):
            names = ", ".join(self.signature.size_names) or "none"
            raise ConfigError(
                "PG102",
                f"capture_sizes gives {len(sizes[0])} numbers for each size",
                why=f"the call has {len(self.signature.size_names)} dynamic sizes ({names})",
                hint="name the dynamic dimensions with dynamic_dims, and give one number for each",
            )

    # -- serving

    def serve(self, call: Call) -> tuple[Any, bool] | Refusal:
        """The result and whether it came from a tape; or why the call cannot be served."""
        found = self._routes.get(call.sizes)
        if found is None:
            found = self._find_route(call)
        if isinstance(found, Refusal):
            return found
        route, loss = found
        if loss is not None:
            if loss.code == "PG510":
                self._events.note(loss)
            else:
                self._events.fallback(loss)
        if self._device is not None:
            self._device.use_caller_stream()
            self._check_sentinel()
        return route.serve(call.tensors), route.replays

    def _check_sentinel(self) -> None:
        """``model.to(...)`` and its like move every weight: looking at one of them at each call is enough to notice."""
        sentinel = self._sentinel
        if sentinel is not None and sentinel.current().data_ptr() != sentinel.address:
            raise sentinel.moved()

    def _find_route(self, call: Call) -> tuple[Route, Event | None] | Refusal:
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        found = self._routes[call.sizes] = self._choose_route(call)
        return found

    def _choose_route(self, call: Call) -> tuple[Route, Event | None] | Refusal:
        name = f"size {SizeKey(call.sizes)}"
        if 0 in call.sizes:
            return Refusal(Event("PG507", "call", f"{name} has no elements"))
        violated = self.body.violated(call.sizes)
        if violated is not None:
            return Refusal(Event("PG505", "call", f"{name}: {violated}"))
        self.body.learn(call.tensors, call.sizes)
        if self.mode == "none":
            route: Route = PiecesRoute(self.body, call.sizes, self.signature.tensors)
            return self._checked_small(route, call) or (route, None)
        key = self._bucket_for(call)
        if key is None or not can_cut(self.body, key.values, call.sizes):
            route = PiecesRoute(self.body, call.sizes, self.signature.tensors)
            return self._checked_small(route, call) or (route, self._why_not_recorded(call.sizes))
        clone = self._config.options.clone_outputs
        route = TapeRoute(self.body, self._tapes[key], key, call.sizes, self._buffers, clone=clone)
        is_heavy = any(have > 2 * want for have, want in zip(key.values, call.sizes, strict=True))
        heavy = Event("PG510", "call", f"{name} runs as {key}", "add a capture size nearer to it") if is_heavy else None
        return self._checked_small(route, call) or (route, heavy)

    def _why_not_recorded(self, sizes: Sizes) -> Event:
        name = f"size {SizeKey(sizes)} runs the compiled pieces without graphs"
        wanted = SizeKey(sizes)
        if wanted in self._dropped:
            return Event("PG402", "call", f"{name}: recording it ran out of memory")
        if not any(key.covers(wanted) for key in self._candidates(sizes)):
            return Event("PG503", "call", f"{name}: the largest recorded size is smaller", "add a larger capture size")
        if len(self._tapes) >= self._config.options.max_sizes and self._config.is_lazy:
            return Event("PG509", "call", f"{name}: {len(self._tapes)} sizes are recorded already", "raise options['max_sizes']")
        return Event("PG504", "call", f"{name}: only exact sizes may be used", "list the size in capture_sizes")

    def _checked_small(self, route: Route, call: Call) -> Refusal | None:
        """A size of one is below what was traced (Dynamo takes 0 and 1 for constants): compared with the function, once."""
        if min(call.sizes, default=2) >= 2:
            return None
        with preserved((*self._state, *(call.tensors[i] for i in self.body.written_calls))):
            found, _, shape = flatten(route.serve(call.tensors))
        with preserved((*self._state, *(call.tensors[i] for i in self.body.written_calls))):
            expected, _, expected_shape = flatten(self._function(*call.args, **call.kwargs))
        reason = first_difference(found, expected) if shape == expected_shape else "another structure"
        if reason is None:
            return None
        return Refusal(Event("PG508", "call", f"size {SizeKey(call.sizes)} gives {reason}"))

    # -- choosing a size

    def _candidates(self, sizes: Sizes) -> list[SizeKey]:
        """The sizes a call may be padded to, recorded yet or not."""
        listed = self._config.capture_sizes
        if listed != "auto":
            return [key for key in map(SizeKey, listed) if self._is_recordable(key)]
        limit = self._config.options.max_capture_size
        if any(size > limit for size in sizes):
            return list(self._tapes)
        can_pad = [may is not False for may in self._can_pad]
        rung = SizeKey(tuple(min(next_rung(n), limit) if may else n for n, may in zip(sizes, can_pad, strict=True)))
        # The plan may not be valid at the rung, or recording it ran out of memory: the exact size may still do.
        wanted = rung if self._is_recordable(rung) else SizeKey(sizes)
        return [key for key in {*self._tapes, wanted} if self._is_recordable(key)]

    def _is_recordable(self, key: SizeKey) -> bool:
        if key not in self._valid:
            self._valid[key] = self.body.violated(key.values) is None
        return self._valid[key] and key not in self._dropped

    def _bucket_for(self, call: Call) -> SizeKey | None:
        """The recorded size to use, recording and testing it first if need be."""
        while True:
            can_pad = [may is not False for may in self._can_pad]
            key = best_fit(SizeKey(call.sizes), self._candidates(call.sizes), can_pad)
            if key is None:
                return None
            if key not in self._tapes:
                if self._config.is_lazy:
                    if len(self._tapes) >= self._config.options.max_sizes:
                        return best_fit(SizeKey(call.sizes), self._tapes, [may is True for may in self._can_pad])
                    self.record([key], call)
                else:
                    self.record_listed(call)
                if key not in self._tapes:
                    continue  # out of memory: the size is dropped, look again
            undecided = [
                i for i, (have, want) in enumerate(zip(key.values, call.sizes, strict=True)) if have > want and self._can_pad[i] is None
            ]
            if not undecided:
                return key
            with self._recording():
                for dim in undecided:
                    self._decide_padding(dim, key, call)

    def _decide_padding(self, dim: int, key: SizeKey, call: Call) -> None:
        """Find out whether one size dimension may be padded, see Note [Padding]."""
        sizes = self._probe_size(dim, key, call)
        if sizes is None:
            return
        self._prepare(sizes)
        reason = padding_changes(self.body, self._tapes[key].run, self._buffers, key, sizes, call.tensors, self._state)
        self._can_pad[dim] = reason is None
        name = self.signature.size_names[dim]
        if reason is None:
            self.decisions.append(Decision(f"padding of {name}", "allowed", "NaN in padded rows does not reach real rows"))
        else:
            self.decisions.append(Decision(f"padding of {name}", "refused", reason))
            self._events.note(Event("PG404", f"size {name}", reason, 'padding="always" accepts it'))

    def _probe_size(self, dim: int, key: SizeKey, call: Call) -> Sizes | None:
        """A size to try padding with: half full shows most, the call's own is known to be valid."""
        full = key.values[dim]
        for size in (full // 2 + 1, full - 1, call.sizes[dim]):
            sizes = (*key.values[:dim], size, *key.values[dim + 1 :])
            if 2 <= size < full and self.body.violated(sizes) is None:
                return sizes
        return (*key.values[:dim], call.sizes[dim], *key.values[dim + 1 :]) if call.sizes[dim] < full else None

    # -- recording

    def record_listed(self, call: Call) -> None:
        """Record every size that was listed, or the ladder up to the call's size, and decide on padding."""
        listed = self._config.capture_sizes
        if listed != "auto":
            keys = [SizeKey(values) for values in listed]
        elif len(call.sizes) == 1:
            keys = [SizeKey((size,)) for size in ladder(min(call.sizes[0], self._config.options.max_capture_size))]
        else:
            keys = [SizeKey(call.sizes)]
        self.record([key for key in keys if key not in self._tapes and self._is_recordable(key)], call)
        if self._tapes:
            largest = max(self._tapes, key=lambda key: key.volume)
            with self._recording():
                for dim, may in enumerate(self._can_pad):
                    if may is None:
                        self._decide_padding(dim, largest, call)

    def record(self, keys: Sequence[SizeKey], call: Call) -> None:
        """Record sizes, largest first, so that smaller ones reuse the memory of larger ones."""
        ordered = sorted(keys, key=lambda key: (key.volume, key.values), reverse=True)
        with self._recording(), self._progress.bar("record", len(ordered)) as bar:
            for key in ordered:
                try:
                    self._record_one(key, call)
                except torch.OutOfMemoryError as error:
                    self._dropped.add(key)
                    self._events.fallback(
                        Event("PG402", f"size {key}", str(error).partition(". ")[0], "lower memory use or leave the size out")
                    )
                free = self._device.free_bytes() if self._device is not None else None
                bar.advance(f"size {key}" + (f", {free / 2**30:.1f} GiB free" if free is not None else ""))

    def _record_one(self, key: SizeKey, call: Call) -> None:
        start = time.perf_counter()
        bytes_before = self._device.reserved_bytes() if self._device is not None else 0
        views = self._buffers.views(key.values)
        self._prepare(key.values)
        if self._device is None:
            body = self.body
            self._tapes[key] = DirectTape(lambda: body.run(views, key.values))
            steps: tuple[Any, ...] = ()
        else:
            tape = self._tapes[key] = self._record_tape(self._device, key, views, call)
            steps = tape.steps
        num_graphs = sum(isinstance(step, GraphStep) for step in steps)
        num_bytes = (self._device.reserved_bytes() if self._device is not None else 0) - bytes_before
        self.recorded.append(RecordedSize(key, num_graphs, len(steps) - num_graphs, time.perf_counter() - start, num_bytes))

    def _record_tape(self, device: GraphDevice, key: SizeKey, views: list[torch.Tensor], call: Call) -> Tape:
        recorder = Recorder(device, self._events, self._uncapturable)
        try:
            with preserved(self._state):
                self._buffers.fill(views, call.tensors)
                self.body.run(views, key.values)  # warm up: compile kernels, create workspaces, on the capture stream
                self._buffers.fill(views, call.tensors)
                outputs = self.body.record(recorder, views, key.values)
        except (torch.OutOfMemoryError, PiecegraphError):
            recorder.abandon()
            raise
        except RuntimeError as error:
            recorder.abandon()
            raise RecordError(
                "PG403",
                f"size {key} could not be recorded",
                where=str(user_line(error) or ""),
                why=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                hint="mark what cannot be captured with @piecegraph.eager_op or name it in splitting_ops",
            ) from error
        finally:
            device.end_size()
        check_always = self._config.options.check_addresses == "always"
        return Tape(recorder.steps, outputs, self.body.weights(), recorder.cells, check_always=check_always)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Recording leaves no trace: not in the caller's modes, not in random numbers."""
        devices = {leaf.device.index for leaf in self.signature.tensors if leaf.device.type == "cuda"}
        session = self._device.session() if self._device is not None else contextlib.nullcontext()
        with torch_compat.outside_inference(), torch.random.fork_rng(sorted(devices)), session:
            yield

    def _prepare(self, sizes: Sizes) -> None:
        if self._config.options.prepare is not None:
            self._config.options.prepare(dict(zip(self.signature.size_names, sizes, strict=True)))
