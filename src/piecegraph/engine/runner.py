"""How the calls of one plan are served: which recorded size, and what has to be recorded or tried first.

The slow questions (is the plan valid at this size, which bucket, may it be padded) are answered once for each size that
occurs and kept as a :class:`~piecegraph.engine.route.Route`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.compare import first_difference
from piecegraph.base.config import CompileConfig
from piecegraph.base.events import Event, EventLog
from piecegraph.base.plan import Decision, Plan, SizeKey
from piecegraph.base.structure import Structure, each_once, flatten
from piecegraph.base.text import count_of
from piecegraph.engine.breakable import BreakableBody, OtherStructureError
from piecegraph.engine.paths import PathRecorder, Paths, library_of
from piecegraph.engine.pipeline import Pipeline
from piecegraph.engine.route import FunctionRoute, PiecesRoute, Refusal, Route, TapeRoute, UpdatingRoute, why_elsewhere
from piecegraph.engine.sharing import Sharing
from piecegraph.engine.watch import writes_put_back
from piecegraph.errors import CallError, ConfigError, PiecegraphError, RecordError
from piecegraph.graph import interception
from piecegraph.graph.signature import Binder, Call, Signature, flatten_arguments
from piecegraph.tape.body import Body, Sizes, TracedBody, can_cut
from piecegraph.tape.buckets import best_fit, ladder, next_rung
from piecegraph.tape.buffers import preserved, rows_at, unharmed
from piecegraph.tape.calls import SizedCalls
from piecegraph.tape.device import GraphDevice
from piecegraph.tape.library import TapeLibrary, TapeWatch
from piecegraph.tape.padding import Unclear, number_of_rows_changes, padding_changes, with_other_numbers
from piecegraph.tape.tape import Addresses, Tape

_MAX_ROUTES = 4096


class PlanRunner:
    """A plan with its tapes and its routes."""

    def __init__(
        self,
        plan: Plan,
        signature: Signature,
        body: Body,
        device: GraphDevice | None,
        *,
        config: CompileConfig,
        events: EventLog,
        example: Call,
        function: Callable[..., Any],
        pipeline: Pipeline | None,
        watch: TapeWatch | None = None,
    ) -> None:
        self.plan = plan
        self.signature = signature
        self.body = body
        self.calls = SizedCalls(signature, body, example, config.options, events)
        self.library = library_of(self.calls, device, config.options, events, watch)
        self.paths: dict[SizeKey, Paths] = {}
        """For sizes at which what Python reads decides what runs."""
        self.decisions: list[Decision] = []
        self.routes: dict[Sizes, Route | Refusal] = {}
        """How calls of each size are served, for sizes that have occurred."""
        self._device = device
        self._config = config
        self._events = events
        self._function = function
        self._example = example
        self._pipeline = pipeline
        """What keeps the plan once it has run; None if it is kept, or not to be."""
        self.seconds = 0.0
        """What deciding on sizes and recording them took."""
        self._valid: dict[SizeKey, bool] = {}
        pad = {"always": True, "never": False, "auto": None}[config.padding]
        self._can_pad: list[bool | None] = [pad] * len(signature.size_names)
        """For each size dimension; None until it was tried."""
        weights = body.weights() if device is not None else []
        self._addresses = Addresses(weights) if weights else None
        self.sharing = Sharing(signature, body) if body.written_calls or body.written_state else None
        """Looks for memory that a call writes to and reads in another place; None if calls write nothing."""
        self._check_sizes()

    def _check_sizes(self) -> None:
        sizes, names = self._config.capture_sizes, self.signature.size_names
        if sizes != "auto" and self.plan.mode != "none" and len(sizes[0]) != len(names):
            raise ConfigError(
                "PG102",
                f"capture_sizes gives {count_of(len(sizes[0]), 'number')} for each size",
                why=f"the call has {count_of(len(names), 'dynamic size')} ({', '.join(names) or 'none'})",
                hint="name the dynamic dimensions with dynamic_dims, or annotate parameters as torch.Tensor, and give "
                "one number for each",
            )

    # -- a size that has not occurred

    def arrange(self, call: Call) -> Route | Refusal:
        """Decide how calls of a new size are served."""
        if len(self.routes) >= _MAX_ROUTES:  # a server that sees every size: decide again
            self.routes.clear()
        found: Route | Refusal | None = self._why_invalid(call.sizes)
        if found is None:
            try:
                with self._recording(), preserved(self._of_pool(call.tensors)):
                    self.body.learn(call.tensors, call.sizes)
                    found = self._why_invalid(call.sizes) or self._compared_route(call)
            except OtherStructureError as error:
                found = Refusal(Event(error.code, "call", error.what))
        self.routes[call.sizes] = found
        return found

    def _of_pool(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Results of the call before, if they are not cloned: recording takes their memory before they are read."""
        device = self._device
        if device is None or self._config.options.clone_outputs:
            return []
        return [tensor for tensor in tensors if device.owns(tensor)]

    def capture(self, call: Call) -> None:
        """Record sizes before they are asked for."""
        with self._recording():
            self.record_listed(call)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Timed. The first time, the plan is kept: what its kernels were tuned to is known then, too."""
        start = time.perf_counter()
        with contextlib.nullcontext() if self._pipeline is None else self._pipeline.compiling():
            yield
        if self._pipeline is not None and isinstance(self.body, TracedBody):
            self._pipeline.keep(self.body.traced)
        self._pipeline = None
        self.seconds += time.perf_counter() - start

    def _why_invalid(self, sizes: Sizes) -> Refusal | None:
        if 0 in sizes:
            return Refusal(Event("PG507", "call", f"size {SizeKey(sizes)} has no elements"))
        if self._writes_inference_tensor():
            reason = (
                "a weight or buffer that is written to was made in inference mode, and nobody may write to it outside"
            )
            return Refusal(Event("PG523", "call", reason, "make the module outside of torch.inference_mode()"))
        violated = self.body.violated(sizes)
        return None if violated is None else Refusal(Event("PG505", "call", f"size {SizeKey(sizes)}: {violated}"))

    def _writes_inference_tensor(self) -> bool:
        """Without a trace, what is written to is known by its memory only."""
        written = {torch_compat.storage_id(tensor) for tensor in self.body.written_state}
        tensors = (*self.body.written_state, *(weight.tensor for weight in self.body.weights() if written))
        return any(tensor.is_inference() and torch_compat.storage_id(tensor) in written for tensor in tensors)

    def _updating_route(self, call: Call) -> Route | Refusal:
        found = self._choose_route(call)
        if self.body.updates and not isinstance(found, Refusal):
            return UpdatingRoute(found, self.body.updates, Binder(self._function))
        return found

    def _choose_route(self, call: Call) -> Route | Refusal:
        mode = self.plan.mode
        if self.body.reads_data(call.sizes):
            return self._follow_reads(call)
        key = None if mode == "none" else self._bucket_for(call)
        if key is None or not can_cut(self.body, key.values, call.sizes):
            loss = None if mode == "none" else self._why_not_recorded(call.sizes)
            if isinstance(self.body, BreakableBody):
                return FunctionRoute(self.body.call, replays=False, device=self._device, loss=loss)
            return PiecesRoute(self.body, call.sizes, self.signature.tensors, device=self._device, loss=loss)
        if isinstance(self.body, BreakableBody) and self._device is None:
            return FunctionRoute(self.body.call, replays=True, device=None, loss=None)
        tape = self.library.tapes[key]
        if isinstance(tape, Tape) and (reason := why_elsewhere(self.body, tape)):
            return Refusal(Event("PG405", f"size {key}", reason))
        is_heavy = any(have > 2 * want for have, want in zip(key.values, call.sizes, strict=True))
        reason = f"size {SizeKey(call.sizes)} runs as {key}"
        loss = Event("PG510", "call", reason, "add a capture size nearer to it") if is_heavy else None
        return TapeRoute(
            self.body,
            tape,
            key,
            call.sizes,
            self.calls.buffers,
            clone=self._config.options.clone_outputs,
            device=self._device,
            addresses=self._addresses,
            loss=loss,
        )

    def _why_not_recorded(self, sizes: Sizes) -> Event:
        wanted, options, num_tapes = SizeKey(sizes), self._config.options, len(self.library.tapes)
        name = f"size {wanted} runs the compiled pieces without graphs"
        if wanted in self.library.dropped:
            return Event("PG402", "call", f"{name}: {self.library.dropped[wanted]}")
        if not any(key.covers(wanted) for key in self._candidates(sizes)):
            return Event("PG503", "call", f"{name}: the largest recorded size is smaller", "add a larger capture size")
        if num_tapes >= options.max_sizes and self._config.is_lazy:
            reason = f"{name}: {num_tapes} sizes are recorded already"
            return Event("PG509", "call", reason, "raise options['max_sizes']")
        return Event("PG504", "call", f"{name}: only exact sizes may be used", "list the size in capture_sizes")

    def _compared_route(self, call: Call) -> Route | Refusal:
        """How a call is served, compared once with the function itself where its size may change what that does.

        Dynamo takes a size of one for a constant, so that it was not traced; and which way code goes that is not traced
        at all is not known for a size that is padded.
        """
        if isinstance(self.body, BreakableBody):
            route = self._updating_route(call)
            is_padded = isinstance(route, TapeRoute) and route.is_padded
            return self._unless_different(route, call, "PG505") if is_padded else route
        if min(call.sizes, default=2) >= 2:
            return self._updating_route(call)
        try:
            return self._unless_different(self._updating_route(call), call, "PG508")
        except (PiecegraphError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - of what was traced at a larger size; the function itself may do
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return Refusal(Event("PG508", "call", f"size {SizeKey(call.sizes)} gives {reason}"))

    def _unless_different(self, route: Route | Refusal, call: Call, code: str) -> Route | Refusal:
        """The route, if it gives what the function gives, also for other numbers."""
        if isinstance(route, Refusal):
            return route
        reason = self._difference(route, call)
        for tensors in with_other_numbers(self.calls, call.tensors) if reason is None else ():
            with contextlib.suppress(Exception):  # numbers that must go together: nothing is learned
                reason = reason or self._difference(route, self._with_tensors(call, tensors))
        return route if reason is None else Refusal(Event(code, "call", f"size {SizeKey(call.sizes)} gives {reason}"))

    def _difference(self, route: Route, call: Call) -> str | None:
        """How a route gives something else than the function, or None."""
        state, devices = self.calls.state, self.calls.devices
        with preserved(state), unharmed(call.tensors), torch_compat.drawn_again(devices), interception.off():
            found, shape = _outcome(route.serve, call, state)
        with torch_compat.drawn_again(devices), writes_put_back(call.tensors) as seen:
            expected, expected_shape = _outcome(lambda c: self._function(*c.args, **c.kwargs), call, state)
            unknown = seen.first_unknown(state)
        if unknown is not None:
            return f"a write to memory of {unknown.numel()} elements that other sizes do not write to"
        return first_difference(found, expected) if shape == expected_shape else "another structure"

    def _with_tensors(self, call: Call, tensors: list[torch.Tensor]) -> Call:
        """A call with others in the place of its tensors."""
        others = {id(tensor): other for tensor, other in zip(call.tensors, tensors, strict=True)}
        leaves, _, structure = flatten_arguments((call.args, call.kwargs))
        args, kwargs = structure.build(others.get(id(leaf), leaf) for leaf in leaves)
        return call._replace(tensors=tensors, args=args, kwargs=kwargs)

    # -- a size at which what Python reads decides what runs, see Note [Paths]

    def _follow_reads(self, call: Call) -> Route | Refusal:
        body, key = self.body, SizeKey(call.sizes)
        assert isinstance(body, BreakableBody), "what is traced reads nothing"
        if self._device is None:
            return FunctionRoute(body.call, replays=self.plan.mode != "none", device=None, loss=None)
        if body.interceptions:
            reason = "a call that leaves its tape at what the host reads would run callbacks twice"
            return Refusal(Event("PG511", "call", reason))
        if key not in self.paths and (loss := self._why_no_paths(key)) is not None:
            return FunctionRoute(body.call, replays=False, device=self._device, loss=loss)
        return self._paths_at(key)

    def _paths_at(self, key: SizeKey) -> Paths:
        if key not in self.paths:
            if self.signature.size_names and not self.paths:
                self._refuse_padding("padded rows would be part of what the host reads")
            assert isinstance(self.body, BreakableBody), "what is traced reads nothing"
            assert self._device is not None, "there is nothing to record"
            recorder = PathRecorder(
                self.body,
                key,
                self.signature,
                self._example,
                self.calls.buffers,
                self._device,
                self._addresses,
                self._config.options,
                self._events,
            )
            self.paths[key] = Paths(recorder, self._config.options.max_paths)
        return self.paths[key]

    def _refuse_padding(self, reason: str) -> None:
        names = ", ".join(self.signature.size_names)
        self.decisions = [each for each in self.decisions if not each.subject.startswith("padding of ")]
        self.decisions.append(Decision(f"padding of {names}", "refused", reason))
        if self._config.padding != "never":
            self._events.emit(Event("PG404", f"size {names}", reason))

    def _why_no_paths(self, key: SizeKey) -> Event | None:
        listed, options = self._config.capture_sizes, self._config.options
        name = f"size {key} runs without graphs"
        if listed != "auto" and key.values not in listed:
            return Event("PG504", "call", f"{name}: only exact sizes may be used", "list the size in capture_sizes")
        if listed == "auto" and any(size > options.max_capture_size for size in key.values):
            return Event("PG503", "call", f"{name}: it is above options['max_capture_size']")
        if len(self.paths) >= options.max_sizes:
            reason = f"{name}: {len(self.paths)} sizes are recorded already"
            return Event("PG509", "call", reason, "raise options['max_sizes']")
        return None

    @property
    def libraries(self) -> list[TapeLibrary[SizeKey]]:
        """All that is recorded."""
        return [self.library, *(path.library for paths in self.paths.values() for path in paths.paths)]

    # -- choosing a size

    def record_listed(self, call: Call) -> None:
        """Record every size that was listed, or the ladder up to the call's size, and decide on padding."""
        if 0 in call.sizes:
            why = "there are no rows to record with"
            raise CallError("PG507", f"the example has size {SizeKey(call.sizes)}", why=why)
        listed = self._config.capture_sizes
        if listed != "auto":
            keys = [SizeKey(values) for values in listed]
        elif len(call.sizes) == 1:
            keys = [SizeKey((size,)) for size in ladder(min(call.sizes[0], self._config.options.max_capture_size))]
        else:
            keys = [SizeKey(call.sizes)]
        tapes = self.library.tapes
        wanted = [key for key in keys if key not in tapes and self._is_recordable(key)]
        branching = [key for key in wanted if self._reads_data(key, call)]
        for key in branching if self._device is not None else ():
            if not self._paths_at(key).paths:
                made = self._paths_at(key).add(call._replace(tensors=self._rows(call, key.values), sizes=key.values))
                if isinstance(made, str):
                    self._events.emit(Event("PG511", f"size {key}", made))
        self.library.record([key for key in wanted if key not in branching], call)
        if tapes:
            largest = max(tapes, key=lambda key: key.volume)
            for dim, may in enumerate(self._can_pad):
                if may is None:
                    self._decide_padding(dim, largest, call)

    def _candidates(self, sizes: Sizes, *, exact: bool = False) -> list[SizeKey]:
        """The sizes a call may be padded to, recorded yet or not.

        Args:
            exact: dimensions of which it is not known whether they may be padded are not.
        """
        listed, tapes = self._config.capture_sizes, self.library.tapes
        if listed != "auto":
            return [key for key in map(SizeKey, listed) if self._is_recordable(key)]
        limit = self._config.options.max_capture_size
        if any(size > limit for size in sizes):
            return list(tapes)
        can_pad = self._may_pad(exact=exact)
        rung = SizeKey(tuple(min(next_rung(n), limit) if may else n for n, may in zip(sizes, can_pad, strict=True)))
        # The plan may not be valid at the rung, or recording it ran out of memory: the exact size may still do.
        wanted = rung if self._is_recordable(rung) else SizeKey(sizes)
        return [key for key in {*tapes, wanted} if self._is_recordable(key, is_own=key.values == sizes)]

    def _is_recordable(self, key: SizeKey, *, is_own: bool = False) -> bool:
        """Whether a size can be recorded: if it was dropped with repeated rows, with those of a call of that size."""
        if key not in self._valid:
            self._valid[key] = self.body.violated(key.values) is None
        return self._valid[key] and (key not in self.library.dropped or (is_own and key in self.calls.untried))

    def _reads_data(self, key: SizeKey, call: Call) -> bool:
        """Whether what Python reads decides what runs at a size; then its tapes are those of paths."""
        try:
            self.body.learn(self._rows(call, key.values), key.values)
        except Exception:
            if key.values == call.sizes:
                raise
            return False  # repeated rows are nobody's call: the library says what it cannot run
        reads = self.body.reads_data(key.values)
        if reads:
            self._valid[key] = False
        return reads

    def _rows(self, call: Call, sizes: Sizes) -> list[torch.Tensor]:
        """The tensors of a call, their rows repeated to a size."""
        leaves = self.signature.tensors
        return [rows_at(tensor, leaf, call.sizes, sizes) for tensor, leaf in zip(call.tensors, leaves, strict=True)]

    def _may_pad(self, *, exact: bool) -> list[bool]:
        return [may is True if exact else may is not False for may in self._can_pad]

    def _bucket_for(self, call: Call, *, exact: bool = False) -> SizeKey | None:
        """The recorded size to use; it is recorded, and padding to it tried, first if need be."""
        wanted = SizeKey(call.sizes)
        while True:
            key = best_fit(wanted, self._candidates(call.sizes, exact=exact), self._may_pad(exact=exact))
            if key is None:
                return None
            if key not in self.library.tapes:
                if not (self._config.is_lazy and len(self.library.tapes) >= self._config.options.max_sizes):
                    self._record_for(key, call)
                    continue  # a size that ran out of memory is no candidate any more: look again
                key = best_fit(wanted, self.library.tapes, self._may_pad(exact=True))
                if key is None:
                    return None
            pairs = enumerate(zip(key.values, call.sizes, strict=True))
            undecided = [dim for dim, (have, want) in pairs if have > want and self._can_pad[dim] is None]
            if not undecided and (key == wanted or self._keeps_numbers(key, call)):
                return key
            for dim in undecided:
                self._decide_padding(dim, key, call)
            if any(self._can_pad[dim] is None for dim in undecided):  # this call's rows do not show it
                return self._bucket_for(call, exact=True)

    def _record_for(self, key: SizeKey, call: Call) -> None:
        try:
            if not self._config.is_lazy and key not in self.library.dropped:
                self.record_listed(call)
            elif not self._reads_data(key, call):
                self.library.record([key], call)
        except RecordError:
            # A call that the function itself does not take raises what it raises without us.
            with writes_put_back(call.tensors):
                _outcome(lambda c: self._function(*c.args, **c.kwargs), call, ())
            raise

    def _decide_padding(self, dim: int, key: SizeKey, call: Call) -> None:
        """Find out whether one size dimension may be padded, if the rows of this call show it."""
        sizes = self._probe_size(dim, key, call)
        if sizes is None:
            return
        name = self.signature.size_names[dim]
        reason = self._why_not_pad(key, sizes, call)
        if isinstance(reason, Unclear):
            self._events.emit(Event("PG404", f"size {name}", f"it cannot be tried with this call: {reason}"))
            return
        self._can_pad[dim] = reason is None
        if reason is None:
            reason = "tried: what padded rows hold does not reach real rows"
            self.decisions.append(Decision(f"padding of {name}", "allowed", reason))
        else:
            self.decisions.append(Decision(f"padding of {name}", "refused", reason))
            self._events.emit(Event("PG404", f"size {name}", reason, 'padding="always" accepts it'))

    def _keeps_numbers(self, key: SizeKey, call: Call) -> bool:
        """Whether numbers that are made of how many rows there are do not show at a recorded size. If they do, nothing
        is padded any more. See Note [Padding].
        """
        body = self.body
        if self._config.padding == "always" or not isinstance(body, TracedBody) or not body.computes_with_sizes:
            return True
        reason = self._why_not_pad(key, call.sizes, call, number_of_rows_changes)
        if reason is not None:
            self._can_pad = [False] * len(self._can_pad)
            self.routes.clear()
            self._refuse_padding(f"numbers are made of how many rows there are: {reason}")
        return reason is None

    def _why_not_pad(
        self, key: SizeKey, sizes: Sizes, call: Call, changes: Callable[..., str | Unclear | None] = padding_changes
    ) -> str | Unclear | None:
        """How padding calls of ``sizes`` to a recorded size would change them, or None. See Note [Padding]."""
        with self.library.session(tidies=False):  # it was recorded just now
            self.calls.prepare(sizes)
            try:
                return changes(self.calls, self.library.tapes[key].run, key, sizes, call)
            except Exception as error:  # noqa: BLE001 - of the user's code at a size it does not expect: anything
                return f"trying {SizeKey(sizes)} rows raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def _probe_size(self, dim: int, key: SizeKey, call: Call) -> Sizes | None:
        """A size to try padding with: half full shows most, the call's own is known to be valid."""
        full, own = key.values[dim], call.sizes[dim]
        for size in (max(full // 2 + 1, own), full // 2 + 1, full - 1, own):
            sizes = (*key.values[:dim], size, *key.values[dim + 1 :])
            if 2 <= size < full and self.body.violated(sizes) is None:
                return sizes
        return (*key.values[:dim], own, *key.values[dim + 1 :]) if own < full else None


def _outcome(run: Callable[[Call], Any], call: Call, state: Sequence[torch.Tensor]) -> tuple[list[Any], Structure]:
    """What a call gives, what its containers hold afterwards, and what it leaves in its arguments and in other memory.
    The caller's own containers are left alone.
    """
    leaves, _, structure = flatten_arguments((call.args, call.kwargs))
    args, kwargs = structure.build(iter(leaves))
    result = run(call._replace(args=args, kwargs=kwargs))
    found, _, shape = flatten((result, args, kwargs), is_container=each_once())
    return [*found, *(tensor.clone() for tensor in (*call.tensors, *state))], shape
