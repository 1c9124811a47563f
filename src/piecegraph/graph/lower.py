"""Stage 3: segments in, a program of compiled pieces out.

Each structurally distinct piece is compiled once; see :mod:`piecegraph.graph.compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.events import EventLog
from piecegraph.base.plan import Cut, Piece
from piecegraph.base.progress import Progress
from piecegraph.errors import LowerError
from piecegraph.graph.compile import (
    CompiledPiece,
    CompiledPieces,
    Compiler,
    KeptPiece,
    Lowering,
    PassedPiece,
    passed_piece,
)
from piecegraph.graph.compile_aside import PieceCompilers
from piecegraph.graph.fx_nodes import (
    attribute,
    is_size,
    module_path,
    picks_result,
    size_parts,
)
from piecegraph.graph.interception import InterceptedOp, layouts_of
from piecegraph.graph.program import Program, Slot, Step, StepSource
from piecegraph.graph.sources import FromSize
from piecegraph.graph.split import Segment
from piecegraph.graph.streams import StreamInterpreter, uses_streams
from piecegraph.graph.tracer import Traced


def lower(
    traced: Traced,
    segments: Sequence[Segment],
    lowering: Lowering,
    events: EventLog,
    progress: Progress,
    compiled: CompiledPieces | None = None,
    kept: Mapping[str, KeptPiece] = MappingProxyType({}),
    aside: PieceCompilers | None = None,
) -> tuple[Program, int]:
    """Compile every distinct piece and stitch the segments together. Also returns the number of compiles.

    Args:
        compiled: the pieces that were compiled when the same trace was lowered before with other cuts; added to.
        kept: those that another process compiled.
        aside: processes that may compile some of them.
    """
    slots = _Slots(traced, segments)
    compiled = {} if compiled is None else compiled
    known = set(compiled)
    pieces = _passed_pieces(segments, lowering)
    compiler = Compiler(lowering, traced.fake_mode, events, kept, aside)
    _compile(compiler, pieces.values(), compiled, progress)
    steps = [
        _piece_step(segment, slots, pieces[index], compiled)
        if index in pieces
        else _cut_step(index, segment, slots, traced)
        for index, segment in enumerate(segments)
    ]
    program = Program(
        inputs={slots.of(node): source for node, source in traced.inputs.items() if not isinstance(source, FromSize)},
        steps=tuple(steps),
        outputs=tuple(slots.of(node) for node in traced.output_nodes),
        num_slots=len(slots),
        sizes=traced.sizes,
    )
    return program, sum(not piece.is_loaded for key, piece in compiled.items() if key not in known)


def _passed_pieces(segments: Sequence[Segment], lowering: Lowering) -> dict[int, PassedPiece]:
    """What is to be compiled of the segments, by their indices."""
    pieces, passed = dict[int, PassedPiece](), dict[str, str]()
    for index, segment in enumerate(segments):
        if segment.verdict is None:
            module, key = passed_piece(segment.module, lowering, passed)
            pieces[index] = PassedPiece(index, key, module, str(segment.first_line or ""))
    return pieces


def _compile(compiler: Compiler, pieces: Iterable[PassedPiece], compiled: CompiledPieces, progress: Progress) -> None:
    """Add what is not compiled yet, each distinct piece once."""
    distinct = dict[str, PassedPiece]()
    for piece in pieces:
        if piece.key not in compiled:
            distinct.setdefault(piece.key, piece)
    with progress.bar("compile", len(distinct)) as bar:

        def on_made(piece: PassedPiece, made: CompiledPiece) -> None:
            compiled[piece.key] = made
            bar.advance(f"{piece.name} {piece.line}".rstrip())

        compiler.run(tuple(distinct.values()), on_made)


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


def _piece_step(segment: Segment, slots: _Slots, piece: PassedPiece, compiled: CompiledPieces) -> Step:
    shared = compiled[piece.key]
    return Step(
        label=Piece(piece.index, len(segment.nodes), piece.key, segment.first_line, shared.backend),
        function=shared.function,
        args=_segment_args(segment, slots),
        kwargs={},
        results=tuple((slots.of(node), position) for position, node in enumerate(segment.outputs)),
        frees=slots.freed_after(piece.index),
        source=StepSource(piece.module, shared.source),
    )


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
