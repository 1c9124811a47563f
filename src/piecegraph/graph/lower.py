"""Stage 3: segments in, a program of compiled pieces out.

Each structurally distinct piece is compiled once. Its key is its canonical graph, the layout of its inputs, the
backend and the passes, so N equal decoder layers are one compile. Weights are inputs of a piece, never part of it,
which is what makes sharing sound.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.events import Event, EventLog
from piecegraph.base.plan import Cut, Piece
from piecegraph.base.progress import Progress
from piecegraph.errors import LowerError, located
from piecegraph.graph.fx_nodes import (
    attribute,
    is_size,
    module_path,
    picks_result,
    size_parts,
    source_line,
    writes_in_place,
)
from piecegraph.graph.interception import InterceptedOp, layouts_of
from piecegraph.graph.program import Program, Slot, Step, StepSource
from piecegraph.graph.sources import FromSize
from piecegraph.graph.split import Segment
from piecegraph.graph.streams import StreamInterpreter, uses_streams
from piecegraph.graph.tracer import Traced

INDUCTOR_DEFAULTS: Mapping[str, Any] = {
    # The pieces are captured by us, and random numbers must be those eager PyTorch draws.
    "triton.cudagraphs": False,
    "fallback_random": True,
    # Kernels are tuned by the first warm-up run, at the largest size, and not on inputs made up by the compiler.
    "triton.autotune_at_compile_time": False,
}


class KeptPiece(NamedTuple):
    """A compiled piece in another process."""

    artifact: str | None
    """What Inductor finds it by; None for one that runs as it was traced."""
    loss: tuple[str, str] | None = None
    """(code, reason) of the event that is told of it."""


@dataclass(frozen=True, slots=True)
class CompiledPiece:
    """A compiled piece, for all segments with the same graph."""

    function: Callable[..., Any]
    backend: str
    source: torch_compat.CompiledSource | None = None
    kept: KeptPiece | None = None
    """How to have it in another process without compiling it; None if there is no way."""
    is_loaded: bool = False
    """Whether it was compiled in another process."""


CompiledPieces = dict[str, CompiledPiece]
"""By structural key."""


CompilePiece = Callable[[torch.fx.GraphModule], Callable[..., Any]]
"""Compiles a graph as pieces are, or raises."""


class PieceWatch(Protocol):
    """Is told of every distinct piece as it is compiled."""

    def compiling(
        self, index: int, key: str, module: torch.fx.GraphModule, compile_piece: CompilePiece
    ) -> torch_compat.PlaceSource:
        """A piece is about to be compiled. Returns what puts the generated source into a file."""

    def compile_failed(self, key: str, error: Exception) -> str:
        """It could not be. Returns what to do about it."""

    def compiled(self, key: str) -> None:
        """It is done, whether it failed or not."""


@dataclass(frozen=True)
class Lowering:
    """How pieces are compiled."""

    backend: str | Callable[..., Any]
    passes: tuple[Callable[..., Any], ...]
    inductor: Mapping[str, Any]
    provenance: bool = False
    """Whether compiled code comes with a map to the nodes of its graph. It computes the same, so this is no part of a
    piece's key.
    """
    watch: PieceWatch | None = None

    @property
    def name(self) -> str:
        return self.backend if isinstance(self.backend, str) else _describe_callable(self.backend)

    @property
    def settings(self) -> dict[str, Any]:
        """All of Inductor's settings."""
        return {**INDUCTOR_DEFAULTS, **self.inductor}


def lower(
    traced: Traced,
    segments: Sequence[Segment],
    lowering: Lowering,
    events: EventLog,
    progress: Progress,
    compiled: CompiledPieces | None = None,
    kept: Mapping[str, KeptPiece] = MappingProxyType({}),
) -> tuple[Program, int]:
    """Compile every distinct piece and stitch the segments together. Also returns the number of compiles.

    Args:
        compiled: the pieces that were compiled when the same trace was lowered before with other cuts; added to.
        kept: those that another process compiled.
    """
    slots = _Slots(traced, segments)
    compiled = {} if compiled is None else compiled
    known = set(compiled)
    steps, passed = [], dict[str, str]()
    pieces = [segment for segment in segments if segment.verdict is None]
    with progress.bar("compile", len(pieces)) as bar:
        for index, segment in enumerate(segments):
            if segment.verdict is None:
                steps.append(_piece_step(index, segment, slots, lowering, passed, compiled, kept, traced, events))
                bar.advance(str(steps[-1].label))
            else:
                steps.append(_cut_step(index, segment, slots, traced))
    program = Program(
        inputs={slots.of(node): source for node, source in traced.inputs.items() if not isinstance(source, FromSize)},
        steps=tuple(steps),
        outputs=tuple(slots.of(node) for node in traced.output_nodes),
        num_slots=len(slots),
        sizes=traced.sizes,
    )
    return program, sum(not piece.is_loaded for key, piece in compiled.items() if key not in known)


class _Slots:
    """Numbers the values that cross segments, and knows who reads each one last."""

    def __init__(self, traced: Traced, segments: Sequence[Segment]) -> None:
        kept = {*traced.output_nodes, *traced.inputs}
        self._numbers = {node: i for i, node in enumerate(traced.inputs)}
        last_reader: dict[torch.fx.Node, int] = {}
        for index, segment in enumerate(segments):
            for node in segment.outputs:
                self._numbers.setdefault(node, len(self._numbers))
                last_reader[node] = index
            for source in segment.inputs:
                if isinstance(source, torch.fx.Node):
                    last_reader[source] = index
        self._freed: dict[int, list[int]] = {}
        for node, index in last_reader.items():
            if node not in kept:
                self._freed.setdefault(index, []).append(self._numbers[node])

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, node: torch.fx.Node) -> int:
        return self._numbers[node]

    def freed_after(self, segment: int) -> tuple[int, ...]:
        return tuple(self._freed.get(segment, ()))


def _piece_step(
    index: int,
    segment: Segment,
    slots: _Slots,
    lowering: Lowering,
    passed: dict[str, str],
    compiled: CompiledPieces,
    kept: Mapping[str, KeptPiece],
    traced: Traced,
    events: EventLog,
) -> Step:
    module, key = _passed(segment.module, lowering, passed)
    if key not in compiled:
        with located(piece=index, line=str(segment.first_line or "")):
            loaded = _load(f"piece {index}", module, kept[key], events) if key in kept else None
            compiled[key] = loaded or _compile_watched(index, key, module, lowering, traced.fake_mode, events)
    shared = compiled[key]
    return Step(
        label=Piece(index, len(segment.nodes), key, segment.first_line, shared.backend),
        function=shared.function,
        args=_segment_args(segment, slots),
        kwargs={},
        results=tuple((slots.of(node), position) for position, node in enumerate(segment.outputs)),
        frees=slots.freed_after(index),
        source=StepSource(module, shared.source),
    )


_Pass = TypeVar("_Pass", bound=Callable[..., Any])


def goes_by_structure(fx_pass: _Pass) -> _Pass:
    """Say that a pass makes the same of equal graphs: it need not see each of them."""
    fx_pass.goes_by_structure = True  # type: ignore[attr-defined]
    return fx_pass


def _passed(
    module: torch.fx.GraphModule, lowering: Lowering, passed: dict[str, str]
) -> tuple[torch.fx.GraphModule, str]:
    """What passes make of a piece, and its key; of one that equals an earlier one, its key alone, if that will do."""
    before = structural_key(module, lowering)
    if not lowering.passes:
        return module, before
    if before in passed:
        return module, passed[before]
    for fx_pass in lowering.passes:
        module = fx_pass(module) or module
        module.recompile()
    key = structural_key(module, lowering)
    are_alike = all(getattr(fx_pass, "goes_by_structure", False) for fx_pass in lowering.passes)
    if are_alike and lowering.watch is None and not lowering.provenance:
        passed[before] = key
    return module, key


def _compile_watched(
    index: int, key: str, module: torch.fx.GraphModule, lowering: Lowering, fake_mode: Any, events: EventLog
) -> CompiledPiece:
    """Compile one piece, and tell who watches."""
    watch, name = lowering.watch, f"piece {index}"
    if watch is None:
        return _compile(name, module, lowering, fake_mode, events)

    def compile_part(part: torch.fx.GraphModule) -> Callable[..., Any]:
        with torch_compat.keeping_guards(fake_mode):
            return _run_compiler(part, lowering, fake_mode).function

    place = watch.compiling(index, key, module, compile_part)
    made = _compile(name, module, lowering, fake_mode, events, place, partial(watch.compile_failed, key))
    watch.compiled(key)
    return made


def _compile(
    name: str,
    module: torch.fx.GraphModule,
    lowering: Lowering,
    fake_mode: Any,
    events: EventLog,
    place: torch_compat.PlaceSource | None = None,
    advise: Callable[[Exception], str] = lambda error: "",
) -> CompiledPiece:
    """Compile one piece; one that cannot be is run as it was traced, and that is an event."""
    if lowering.backend == "eager":
        return CompiledPiece(torch_compat.forward_of(module), "eager", kept=KeptPiece(None))
    if _writes_overlapping_input(module):
        loss = ("PG303", "compilers assume that inputs written to do not overlap others")
        return _as_traced(name, module, loss, events)
    try:
        return _run_compiler(module, lowering, fake_mode, place)
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything; the piece still runs, and it is counted
        line = next((str(source) for node in module.graph.nodes if (source := source_line(node))), "unknown line")
        reason = f"{lowering.name} failed on it (from {line}): {type(error).__name__}: {error}"
        return _as_traced(name, module, ("PG302", reason), events, advise(error))


def _as_traced(
    name: str, module: torch.fx.GraphModule, loss: tuple[str, str], events: EventLog, hint: str = ""
) -> CompiledPiece:
    """A piece that is not compiled. That a compiler failed may be another matter the next time, and is not kept."""
    events.emit(Event(loss[0], name, loss[1], hint))
    kept = KeptPiece(None, loss) if loss[0] == "PG303" else None
    return CompiledPiece(torch_compat.forward_of(module), "eager", kept=kept)


def _load(name: str, module: torch.fx.GraphModule, kept: KeptPiece, events: EventLog) -> CompiledPiece | None:
    """A piece that another process compiled; None if it cannot be had, and is to be compiled."""
    if kept.artifact is None:
        if kept.loss is not None:
            events.emit(Event(kept.loss[0], name, kept.loss[1]))
        return CompiledPiece(torch_compat.forward_of(module), "eager", kept=kept, is_loaded=True)
    try:
        made = torch_compat.load_compiled(kept.artifact)
    except Exception as error:  # noqa: BLE001 - whatever Inductor raises: it is compiled instead, and that is told
        events.emit(Event("PG674", name, f"what Inductor kept cannot be loaded: {type(error).__name__}: {error}"))
        return None
    return CompiledPiece(made.function, "inductor", made.source, kept, is_loaded=True)


def _run_compiler(
    module: torch.fx.GraphModule,
    lowering: Lowering,
    fake_mode: Any,
    place: torch_compat.PlaceSource | None = None,
) -> CompiledPiece:
    fakes = [torch_compat.meta_value(node) for node in module.graph.find_nodes(op="placeholder")]
    if callable(lowering.backend):
        return CompiledPiece(lowering.backend(module, fakes), lowering.name)
    made = torch_compat.inductor_compile(
        module, fakes, fake_mode, lowering.settings, provenance=lowering.provenance, place=place
    )
    kept = None if made.artifact is None else KeptPiece(made.artifact)
    return CompiledPiece(made.function, "inductor", made.source, kept)


def _writes_overlapping_input(module: torch.fx.GraphModule) -> bool:
    storages = [
        torch_compat.storage_id(value)
        for node in module.graph.find_nodes(op="placeholder")
        if isinstance(value := torch_compat.meta_value(node), torch.Tensor)
    ]
    if len(set(storages)) == len(storages):
        return False
    shared = {storage for storage in storages if storages.count(storage) > 1}
    for node in module.graph.nodes:
        if node.op in ("call_function", "call_method") and writes_in_place(node):
            for arg in node.all_input_nodes:
                value = torch_compat.meta_value(arg)
                if isinstance(value, torch.Tensor) and torch_compat.storage_id(value) in shared:
                    return True
    return False


def _cut_step(index: int, segment: Segment, slots: _Slots, traced: Traced) -> Step:
    assert segment.verdict is not None
    heads = [node for node in segment.nodes if not picks_result(node)]
    nodes = [node for node in segment.nodes if node in segment.outputs or node in heads]
    label = Cut(index, segment.title, segment.verdict.reason, segment.first_line)
    fresh = frozenset(
        slots.of(node) for node in segment.outputs if torch_compat.unbacked_symbols(torch_compat.meta_value(node))
    )
    common: dict[str, Any] = {
        "label": label,
        "frees": slots.freed_after(index),
        "fresh_shapes": fresh,
        "source": StepSource(segment.module),
    }
    if segment.interceptions:
        return _intercepted_step(heads, segment, slots, common, traced)
    if any(uses_streams(node) for node in segment.nodes):
        runner: Callable[..., Any] = StreamInterpreter(segment.module, traced.streams)
    elif len(heads) == 1 and heads[0].op == "call_function" and _is_flat(nodes, heads[0]):
        return _single_op_step(heads[0], segment, slots, common)
    else:
        runner = torch_compat.forward_of(segment.module)
    return Step(
        function=runner,
        args=_segment_args(segment, slots),
        kwargs={},
        results=tuple((slots.of(node), position) for position, node in enumerate(segment.outputs)),
        **common,
    )


def _single_op_step(head: torch.fx.Node, segment: Segment, slots: _Slots, common: dict[str, Any]) -> Step:
    """A cut that is one op is called directly, with nothing of FX around it."""
    args, kwargs = _op_arguments(head, slots)
    return Step(
        function=_op_function(head), args=args, kwargs=kwargs, results=_op_results(head, segment, slots), **common
    )


def _intercepted_step(
    heads: Sequence[torch.fx.Node], segment: Segment, slots: _Slots, common: dict[str, Any], traced: Traced
) -> Step:
    """An op with callbacks around it; see :class:`~piecegraph.graph.interception.InterceptedOp`."""
    head, label = heads[0], common["label"]
    nodes = [node for node in segment.nodes if node in segment.outputs or node is head]
    if len(heads) > 1 or not _are_own_results(nodes, head):
        why = "its results are nested"
        raise LowerError("PG723", f"{label.op} cannot be intercepted here", where=str(label.source or ""), why=why)
    fakes = torch.fx.map_arg((head.args, head.kwargs), torch_compat.meta_value)

    def number(size: Any) -> Any:
        return FromSize(torch_compat.size_expr(size)) if isinstance(size, torch.SymInt) else int(size)

    layouts = layouts_of(torch_compat.meta_value(head), _plain(fakes), number)
    args, kwargs = _op_arguments(head, slots, traced.owner)
    place = f"{module_path(head)} ({label.source})" if label.source else module_path(head)
    return Step(
        function=InterceptedOp(_op_function(head), segment.interceptions, place),
        args=(layouts, *args),
        kwargs=kwargs,
        results=_op_results(head, segment, slots),
        **common,
    )


def _op_function(head: torch.fx.Node) -> Callable[..., Any]:
    if head.op == "call_method":
        return _method_call(str(head.target))
    devices = {
        v.device.type for arg in head.all_input_nodes if isinstance(v := torch_compat.meta_value(arg), torch.Tensor)
    }
    function: Callable[..., Any] = torch_compat.direct_kernel(head.target, devices.pop() if len(devices) == 1 else "")
    return function


def _method_call(name: str) -> Callable[..., Any]:
    return lambda receiver, *args, **kwargs: getattr(receiver, name)(*args, **kwargs)


def _op_arguments(
    head: torch.fx.Node, slots: _Slots, owner: torch.nn.Module | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an op as a step takes them. Attributes of the graph are read off their owner."""

    def translate(arg: torch.fx.Node) -> Any:
        if is_size(arg):
            value = torch_compat.meta_value(arg)
            sizes = tuple(FromSize(torch_compat.size_expr(part)) for part in size_parts(value))
            return sizes if isinstance(value, torch.Size) else sizes[0]
        if arg.op == "get_attr":
            assert owner is not None, arg
            return attribute(owner, arg)
        return Slot(slots.of(arg))

    args, kwargs = (torch.fx.map_arg(part, translate) for part in (head.args, head.kwargs))
    return _plain(args), _plain(kwargs)


def _op_results(head: torch.fx.Node, segment: Segment, slots: _Slots) -> tuple[tuple[int, int | None], ...]:
    return tuple((slots.of(node), None if node is head else int(node.args[1])) for node in segment.outputs)  # type: ignore[arg-type]


def _is_flat(nodes: Sequence[torch.fx.Node], head: torch.fx.Node) -> bool:
    """Whether all results are the op's own or direct items of it, and no argument is an attribute of the graph."""
    return _are_own_results(nodes, head) and all(arg.op != "get_attr" for arg in head.all_input_nodes)


def _are_own_results(nodes: Sequence[torch.fx.Node], head: torch.fx.Node) -> bool:
    return all(node is head or (node.args[0] is head and isinstance(node.args[1], int)) for node in nodes)


def _segment_args(segment: Segment, slots: _Slots) -> tuple[Any, ...]:
    return tuple(source if isinstance(source, FromSize) else Slot(slots.of(source)) for source in segment.inputs)


def _plain(value: Any) -> Any:
    """FX keeps arguments in immutable list and dict types, which ops may not accept."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_plain(part) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def structural_key(module: torch.fx.GraphModule, lowering: Lowering) -> str:
    """A hash of what a piece computes: equal for equal layers, different for anything that compiles differently."""
    numbers: dict[torch.fx.Node, str] = {}
    lines = [lowering.name, repr(sorted(lowering.inductor.items())), *map(_describe_callable, lowering.passes)]
    for node in module.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        args = torch.fx.map_arg((node.args, node.kwargs), lambda arg: _Ref(numbers[arg]))  # type: ignore[arg-type,return-value]
        if node.op == "placeholder":
            lines.append(f"input {_describe_value(torch_compat.meta_value(node))}")
        elif node.op == "get_attr":
            lines.append(f"constant {_describe_constant(attribute(module, node))}")
        else:
            target = node.target if isinstance(node.target, str) else _describe_callable(node.target)
            lines.append(f"{node.op} {target} {args!r}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Ref:
    name: str

    def __repr__(self) -> str:
        return self.name


def _describe_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = ",".join(map(str, value.shape)), ",".join(map(str, value.stride()))
        return f"{value.dtype} {value.device} [{sizes[0]}] [{sizes[1]}]"
    return f"{type(value).__name__} {value}"


def _describe_constant(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{_describe_value(value)} {hashlib.sha256(data).hexdigest()}"
    if isinstance(value, torch.fx.GraphModule):
        return value.code
    return f"{type(value).__name__} {id(value)}"


def _describe_callable(function: Any) -> str:
    """A name for an op, a backend or a pass; the source is part of it for Python functions, which may be redefined."""
    uuid = getattr(function, "uuid", None)
    if callable(uuid):
        return repr(uuid())
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', None) or repr(function)}"
    if not inspect.isfunction(function) or name.startswith("torch."):
        return name
    try:
        source = inspect.getsource(function)
    except OSError:
        source = str(id(function))
    return f"{name} {hashlib.sha256(source.encode()).hexdigest()[:8]}"
