"""Takes calls: finds the plan that fits, or has one made at the first call, or runs the function itself."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from operator import call as call_it
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

import torch

from piecegraph.base import torch_compat
from piecegraph.base.collector import collector_paused
from piecegraph.base.config import CompileConfig
from piecegraph.base.events import Event, EventLog
from piecegraph.engine.eager_interception import ThreadInterceptions, as_eager_code
from piecegraph.engine.planner import NeitherWayError, Planner, Subject
from piecegraph.engine.recorded import RecordedTapes
from piecegraph.engine.route import Refusal
from piecegraph.engine.runner import PlanRunner
from piecegraph.engine.tree import TreeWatch
from piecegraph.engine.variants import Variants
from piecegraph.errors import CallError, ConfigError, PiecegraphError
from piecegraph.graph.asked import other_answer
from piecegraph.graph.dims import EarlierShape
from piecegraph.graph.interception import Interception, registry
from piecegraph.graph.outside import OutsideValues
from piecegraph.graph.signature import Binder, Call, LayoutMisfit, Signature, flatten_arguments
from piecegraph.tape.library import TapeLibrary
from piecegraph.tape.tape import WeightMovedError

run_eagerly: ContextVar[bool] = ContextVar("piecegraph_eager", default=False)
"""Set inside ``with piecegraph.eager():``."""

OnFailure = Callable[[str, BaseException], None]
"""Told when something cannot be planned or recorded: its name, and the error that is about to be raised."""


class _Kind(NamedTuple):
    """One kind of call, and its plans."""

    signature: Signature
    outside: OutsideValues | None
    switches: tuple[Any, ...]
    """Those of torch, as it was planned with them."""
    plans: Variants[PlanRunner]
    is_rigid: bool = False
    """Whether it is known that it cannot be planned for more sizes."""


class _Raised(NamedTuple):
    """What the function raised while a call was planned."""

    error: Exception


class Engine:
    """The plans of one compiled function or module."""

    def __init__(
        self, subject: Subject, config: CompileConfig, on_failure: OnFailure = lambda name, error: None
    ) -> None:
        self.subject = subject
        self.config = config
        self.events = EventLog(config.on_fallback)
        self.planner = Planner(subject, config, self.events)
        self._switches: tuple[Any, ...] = ()
        """Those of torch, in the call under way."""
        self.num_calls = 0
        self.num_replays = 0
        self._on_failure = on_failure
        self._kinds: list[_Kind] = []
        self._binder = Binder(subject.function)
        self._lock = threading.RLock()
        self._tree = TreeWatch(subject.module, subject.function)
        self._is_closed = False
        self._is_serving = False
        """Whether a call is being served: what it runs eagerly may call again."""
        self._unplanned: Refusal | None = None
        """Why a call could not be planned, though the function itself raises nothing."""
        registry.compiled.add(self)

    @property
    def name(self) -> str:
        return self.subject.name

    @property
    def plans(self) -> list[PlanRunner]:
        """The plan of every kind of call seen."""
        with self._lock:
            return [kind.plans.shown for kind in self._kinds if kind.plans.all]

    @property
    def recorded(self) -> RecordedTapes:
        """All that is recorded. Raises after ``close()``."""
        return RecordedTapes(self.name, self._lock, self._libraries)

    def num_places(self, each: Interception) -> int:
        """How many calls in the plans an interception is for."""
        with self._lock:
            return sum(kind.plans.num_places(each) for kind in self._kinds)

    # -- copies of a module that it is installed in: the plans stay with the original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.subject.function, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        module = self.subject.module
        if module is None or getattr(self.subject.function, "__func__", None) is not type(module).forward:
            raise ConfigError(
                "PG105",
                f"{self.name} cannot be pickled while it is installed",
                why="its forward is not that of its class",
                hint="close() the installation first, or save its state_dict()",
            )
        return getattr, (module, "forward")

    @property
    def __code__(self) -> CodeType:
        """That of the original: Dynamo asks the ``forward`` of an ``fx.GraphModule`` for it."""
        return self.subject.function.__code__  # type: ignore[no-any-return]

    # -- a call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch_compat.is_jit_tracing():
            return self.subject.function(*args, **kwargs)
        if run_eagerly.get():
            return self._call_original(args, kwargs)
        if not registry.live:
            served = self._serve(args, kwargs)
        else:
            with ThreadInterceptions.here().suspended():
                served = self._serve(args, kwargs)
        if isinstance(served, Refusal):
            return self._fall_back(served.event, args, kwargs)
        return self._call_as_written(served, args, kwargs) if type(served) is _Raised else served

    def _serve(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_anew: bool = False) -> Any:
        """The result of a call, or why no plan can give it. ``is_anew``: a weight has moved since it was planned, so
        this is the second time that it is.
        """
        with self._lock:
            self.num_calls += 1
            if self._is_serving:
                return _IS_INSIDE
            try:
                num_modes = torch_compat.num_dispatch_modes() + torch_compat.num_function_modes()
                if torch_compat.transform_level() is not None or (
                    num_modes and _are_others(torch_compat.watching_modes())
                ):
                    return _IS_WATCHED
                tree, next_hook = self._tree, torch_compat.hook_numbers.next_id
                if tree.dead or tree.next_hook != next_hook or not tree.versions.are_known():
                    self._notice_changes()
                if torch.is_grad_enabled() and self._needs_grad(args, kwargs):
                    return _NEEDS_GRAD
                if torch_compat.is_any_autocast():
                    return _IS_AUTOCAST
                found = self._match(args, kwargs) or self._try(self._plan_or_refuse, args, kwargs)
                if isinstance(found, Refusal | _Raised):
                    return found
                plan, call = found
                if plan.sharing is not None and (reason := plan.sharing.found_in(call.tensors)):
                    return _refuse("PG206", reason)
                questions = plan.body.questions
                if questions and (reason := other_answer(questions, call.tensors)):
                    return _refuse("PG517", reason, _QUESTION_HINT)
                route = plan.routes.get(call.sizes)
                if route is None:
                    route = self._try(plan.arrange, call)
                    questions = plan.body.questions  # some ask at this size alone
                    if questions and (reason := other_answer(questions, call.tensors)):
                        return _refuse("PG517", reason, _QUESTION_HINT)
                if isinstance(route, Refusal | _Raised):
                    return route
                if route.loss is not None:
                    self.events.emit(route.loss)
                self._is_serving = True
                try:
                    result = route.serve(call)
                finally:
                    self._is_serving = False
                self.num_replays += route.replays
                return result
            except WeightMovedError as moved:
                self._plan_anew(f"{moved.what}: {moved.why}")
                if is_anew:
                    return _Raised(moved)
                self.num_calls -= 1
                return self._serve(args, kwargs, is_anew=True)
            except PiecegraphError as error:
                if error.phase:  # it was planned or recorded, not replayed
                    self._on_failure(self.name, error)
                raise

    def _match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[PlanRunner, Call] | None:
        names, values = self._binder.bind(args, kwargs)
        module = self.subject.module
        training = None if module is None else getattr(module, "training", None)
        devices = torch_compat.num_function_modes() and torch_compat.default_devices()
        self._switches = switches = (*map(call_it, torch_compat.SWITCHES), devices, self._tree.replaced)
        for kind in self._kinds:
            if kind.switches != switches or (kind.outside is not None and not kind.outside.hold()):
                continue
            call = kind.signature.match(names, values, training, args, kwargs)
            if type(call) is Call:
                return kind.plans.current(call), call
        return None

    # -- a call that no plan serves yet, or none will

    def _try(self, make: Callable[..., Any], *given: Any) -> Any:
        """What is made for later calls, too, or what the function raised meanwhile."""
        if self._unplanned is not None and self.events.counts.get("PG524", 0) >= _MAX_UNPLANNED:
            return self._unplanned
        try:
            with running_eagerly():  # what is compiled inside of the function is part of this plan, and makes none
                return make(*given)
        except NeitherWayError as error:
            return _Raised(error)
        except (PiecegraphError, WeightMovedError):
            raise
        except Exception as error:  # noqa: BLE001 - the function will raise it once more when it runs as it is written
            return _Raised(error)

    def _call_as_written(self, raised: _Raised, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What was tried left no trace. So the function runs once more: what it does before it raises happens."""
        result = self._call_original(args, kwargs)
        error = raised.error
        reason = f"{type(error).__name__} while the call was planned: {str(error).partition(chr(10))[0]}"
        self._unplanned = _refuse("PG524", reason, "see what the function does where it is raised")
        self.events.emit(self._unplanned.event)
        return result

    def _plan_or_refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[PlanRunner, Call] | Refusal:
        self._check_open()
        misfits = self._misfits(args, kwargs)
        layout = next((reason for reason in misfits if isinstance(reason, LayoutMisfit)), None)
        if layout is not None:
            return _refuse("PG514", layout, _LAYOUT_HINT)
        is_full = len(self._kinds) >= self.config.options.max_signatures
        has_sizes = any(kind.signature.size_names for kind in self._live_kinds())
        if has_sizes or is_full:
            widened = self._widen(args, kwargs) if self.config.dynamic_dims == "auto" else None
            if widened is not None:
                return widened
        if has_sizes:
            return _refuse("PG502", "; ".join(misfits), "call capture() to plan for such inputs too")
        if is_full:
            outside = [kind.outside for kind in self._kinds if kind.outside is not None]
            changed = next(filter(None, (values.first_changed() for values in reversed(outside))), "")
            reason = f"{len(self._kinds)} kinds of calls are recorded already"
            reason += f"; {changed} has changed" if changed else ""
            return _refuse("PG509", reason, "raise options['max_signatures']")
        return self._make_plan(args, kwargs)

    def _widen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[PlanRunner, Call] | Refusal | None:
        """Plan again for a call in which a dimension has changed that nothing says is a size; None if that is no way.

        The new plan takes the place of the one that was too narrow.
        """
        names, values = self._binder.bind(args, kwargs)
        for kind in self._live_kinds():
            earlier = {} if kind.is_rigid else kind.signature.varied(names, values, self.subject.training)
            if not earlier:
                continue
            try:
                found = self._make_plan(args, kwargs, earlier)
            except PiecegraphError:  # it can be planned for one size and not for all
                self._kinds[self._kinds.index(kind)] = kind._replace(is_rigid=True)
                continue
            if found is not _IS_EMPTY:
                self._replace_narrow(kind)
            return found
        return None

    def _replace_narrow(self, narrow: _Kind) -> None:
        """Drop a plan if the newest one serves its calls, too; else the model itself fixes what has changed."""
        newest = self._kinds[-1]
        sizes = {(leaf.name, dim) for leaf in newest.signature.tensors for dim, _ in leaf.dynamic}
        pairs = zip(narrow.signature.tensors, newest.signature.tensors, strict=True)
        varied = {
            (a.name, d) for a, b in pairs for d, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if n != m
        }
        if varied <= sizes:
            self._kinds.remove(narrow)
            dims = ", ".join(f"{name}[{dim}]" for name, dim in sorted(varied))
            self.events.emit(Event("PG516", self.name, f"planned again: {dims} turned out to change"))
        else:
            self._kinds[self._kinds.index(narrow)] = narrow._replace(is_rigid=True)
            self._kinds[-1] = newest._replace(is_rigid=True)

    @collector_paused()
    def _make_plan(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        earlier: Mapping[str, EarlierShape] = MappingProxyType({}),
    ) -> tuple[PlanRunner, Call] | Refusal:
        example = self.planner.example(self._binder, args, kwargs, earlier)
        if example.is_empty:
            return _IS_EMPTY
        blueprint, call = self.planner.read(example)
        plans = Variants(blueprint.num_places, partial(self.planner.make, blueprint))
        found = (plans.current(call), call) if isinstance(call, Call) else _refuse("PG514", call, _LAYOUT_HINT)
        self._kinds.append(_Kind(blueprint.signature, blueprint.outside, self._switches, plans))
        self._tree.add((args, kwargs), blueprint.classes)
        return found

    def _live_kinds(self) -> list[_Kind]:
        """The kinds that were planned with what is outside the call as it is now."""
        alike = [kind for kind in self._kinds if kind.switches == self._switches]
        return [kind for kind in alike if kind.outside is None or kind.outside.hold()]

    def _notice_changes(self) -> None:
        """Of what the graphs of all plans hold."""
        changed = self._tree.what_changed()
        if not changed:
            return
        self.subject = self.planner.subject = self.subject.of_now(self)
        self._binder = Binder(self.subject.function)
        if self._kinds:
            self._plan_anew(changed)
        else:
            self._tree.renew(self.subject.function)

    def _plan_anew(self, reason: str) -> None:
        """Forget plans whose graphs read weights that are the module's no more."""
        self.events.emit(Event("PG515", self.name, f"{reason}; what was recorded is recorded again"))
        self.forget()

    def _misfits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Why no plan fits a call."""
        names, values = self._binder.bind(args, kwargs)
        reasons = [kind.signature.misfit(names, values, self.subject.training) for kind in self._live_kinds()]
        return list(dict.fromkeys(filter(None, reasons)))

    def _needs_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.subject.module is not None and any(p.requires_grad for p in self.subject.module.parameters()):
            return True
        leaves = flatten_arguments((args, kwargs))[0]
        return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)

    def _fall_back(self, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_open()
        self.events.emit(event)
        if event.code != "PG502":
            return self._call_original(args, kwargs)
        try:
            return self._call_original(args, kwargs)
        except RuntimeError as error:
            # What does not fit the plan (another device, another dtype) is most likely why the function fails, too.
            why = f"{event.reason}; run eagerly, it raised: {error}"
            raise CallError(event.code, f"{self.name} failed", why=why) from error

    def _call_original(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with as_eager_code(self.subject.module):
            return self.subject.function(*args, **kwargs)

    # -- all plans

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan for an example call if there is none, and record its sizes."""
        with ThreadInterceptions.here().suspended(), self._lock, running_eagerly():
            self._check_open()
            try:
                self._notice_changes()
                found = self._match(args, kwargs) or self._make_plan(args, kwargs)
                if isinstance(found, Refusal):
                    raise CallError(found.event.code, f"{self.name} cannot be captured", why=found.event.reason)
                plan, call = found
                if plan.plan.mode != "none":
                    plan.capture(call)
            except Exception as error:
                self._on_failure(self.name, error)
                raise

    def forget(self) -> None:
        """Drop every plan; the next call makes a new one."""
        with self._lock:
            self._kinds.clear()
            self.planner.release()
            self._tree.renew(self.subject.function)

    def close(self) -> None:
        """Give back graphs and memory. Calls afterwards are an error; the original is untouched."""
        with self._lock:
            self._is_closed = True
            registry.compiled.discard(self)
            self._kinds.clear()
            self.planner.release()
            self.planner.device = None

    def _check_open(self) -> None:
        if self._is_closed:
            hint = "call the original, or compile again"
            raise CallError("PG106", f"{self.name} was called after close()", hint=hint)

    def _libraries(self) -> list[TapeLibrary[Any]]:
        self._check_open()
        return [library for plan in self.plans for library in plan.libraries]


def _are_others(modes: Sequence[Any]) -> bool:
    """Whether one of them is not ours: ours know of replays."""
    return any(type(mode).__module__.partition(".")[0] != __name__.partition(".")[0] for mode in modes)


@contextlib.contextmanager
def running_eagerly() -> Iterator[None]:
    """Inside, what is compiled runs its original code."""
    token = run_eagerly.set(True)
    try:
        yield
    finally:
        run_eagerly.reset(token)


def _refuse(code: str, reason: str, hint: str = "") -> Refusal:
    return Refusal(Event(code, "call", reason, hint))


_MAX_UNPLANNED = 3
"""Calls that could not be planned, behind which no more is tried: it takes long."""
_QUESTION_HINT = "call it as at the first time, or take the question out of what is compiled"
_LAYOUT_HINT = "pass tensors as they lay at the first call, such as contiguous ones"
_NEEDS_GRAD = _refuse(
    "PG501",
    "gradients are on and a parameter or input requires them",
    "call under torch.no_grad() or torch.inference_mode()",
)
_IS_EMPTY = _refuse("PG507", "there are no rows to plan with")
_IS_WATCHED = _refuse(
    "PG522",
    "a transform of torch.func or a dispatch mode wants to see every op, and a replay shows none",
    "transform the original, or call outside of the mode",
)
_IS_INSIDE = _refuse(
    "PG518",
    "it is called again by what runs inside of it, and the buffers of the outer call are in use",
    "have the eager op or the callback call the original",
)
_IS_AUTOCAST = _refuse("PG506", "a plan does not know autocast", "put autocast inside forward")
