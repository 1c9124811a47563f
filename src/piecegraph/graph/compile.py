"""Pieces in, compiled pieces out: each of them once, and several at a time where that pays.

The key of a piece is its canonical graph, the layout of its inputs, the backend and the passes, so N equal decoder
layers are one compile. Weights are inputs of a piece, never part of it, which is what makes sharing sound.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.events import Event, EventLog
from piecegraph.errors import located
from piecegraph.graph.compile_aside import Answer, PieceCompilers
from piecegraph.graph.fx_nodes import attribute, source_line, writes_in_place

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


_Pass = TypeVar("_Pass", bound=Callable[..., Any])


def goes_by_structure(fx_pass: _Pass) -> _Pass:
    """Say that a pass makes the same of equal graphs: it need not see each of them."""
    fx_pass.goes_by_structure = True  # type: ignore[attr-defined]
    return fx_pass


def passed_piece(
    module: torch.fx.GraphModule, lowering: Lowering, passed: dict[str, str]
) -> tuple[torch.fx.GraphModule, str]:
    """What passes make of a piece, and its key; of one that equals an earlier one, its key alone, if that will do.

    Args:
        passed: the keys of earlier ones, by what they were before; added to.
    """
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


@dataclass(frozen=True, slots=True)
class PassedPiece:
    """A piece behind the passes."""

    index: int
    """Of its segment."""
    key: str
    module: torch.fx.GraphModule
    line: str
    """The first of the user's lines that it computes."""

    @property
    def name(self) -> str:
        return f"piece {self.index}"


@dataclass(frozen=True)
class Compiler:
    """Compiles the pieces of a trace.

    Args:
        lowering: how.
        fake_mode: that of the trace; what compiling relies on is added to its conditions.
        events: where losses are told.
        kept: what another process compiled, by key.
        aside: processes that may compile some of them; None to compile all of them here.
    """

    lowering: Lowering
    fake_mode: Any
    events: EventLog
    kept: Mapping[str, KeptPiece]
    aside: PieceCompilers | None

    def run(self, pieces: Sequence[PassedPiece], on_made: Callable[[PassedPiece, CompiledPiece], None]) -> None:
        """Compile distinct pieces.

        Args:
            pieces: those that are not compiled yet.
            on_made: called with each of them, in any order.
        """
        left = []
        for piece in pieces:
            loaded = self._load(piece, self.kept[piece.key]) if piece.key in self.kept else None
            if loaded is not None:
                on_made(piece, loaded)
            else:
                left.append(piece)
        asked = self._ask_aside(left)
        for piece in left:
            if piece.key not in asked or asked[piece.key].cancel():  # nobody else has begun with it
                on_made(piece, self._compile_watched(piece))
        for piece in left:
            if piece.key in asked and not asked[piece.key].cancelled():
                on_made(piece, self._take(piece, asked[piece.key]) or self._compile_watched(piece))

    # -- by other processes

    def _ask_aside(self, pieces: Sequence[PassedPiece]) -> dict[str, Answer]:
        """Have others begin with those that can be sent."""
        lowering = self.lowering
        if self.aside is None or lowering.backend != "inductor" or lowering.watch is not None or lowering.provenance:
            return {}
        sent = {piece.key: piece.module for piece in pieces if not _writes_overlapping_input(piece.module)}
        return self.aside.submit(sent, self.fake_mode, lowering.settings)

    def _take(self, piece: PassedPiece, answer: Answer) -> CompiledPiece | None:
        """What another process has compiled; None if it has not."""
        assert self.aside is not None
        done = self.aside.result(answer)
        if done is None:
            return None
        found = self._load(piece, KeptPiece(done.artifact))
        if found is not None:
            torch_compat.add_size_guards(self.fake_mode, done.guards)
            self.aside.num_compiled += 1
        return None if found is None else replace(found, is_loaded=False)

    # -- here

    def _compile_watched(self, piece: PassedPiece) -> CompiledPiece:
        """Compile one piece, and tell who watches."""
        watch = self.lowering.watch
        with located(piece=piece.index, line=piece.line):
            if watch is None:
                return self._compile(piece)

            def compile_part(part: torch.fx.GraphModule) -> Callable[..., Any]:
                with torch_compat.keeping_guards(self.fake_mode):
                    return self._run_compiler(part).function

            place = watch.compiling(piece.index, piece.key, piece.module, compile_part)
            made = self._compile(piece, place, partial(watch.compile_failed, piece.key))
            watch.compiled(piece.key)
            return made

    def _compile(
        self,
        piece: PassedPiece,
        place: torch_compat.PlaceSource | None = None,
        advise: Callable[[Exception], str] = lambda error: "",
    ) -> CompiledPiece:
        """Compile one piece; one that cannot be is run as it was traced, and that is an event."""
        module = piece.module
        if self.lowering.backend == "eager":
            return CompiledPiece(torch_compat.forward_of(module), "eager", kept=KeptPiece(None))
        if _writes_overlapping_input(module):
            return self._as_traced(piece, ("PG303", "compilers assume that inputs written to do not overlap others"))
        try:
            return self._run_compiler(module, place)
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything; the piece still runs, and it is counted
            line = next((str(source) for node in module.graph.nodes if (source := source_line(node))), "unknown line")
            reason = f"{self.lowering.name} failed on it (from {line}): {type(error).__name__}: {error}"
            return self._as_traced(piece, ("PG302", reason), advise(error))

    def _as_traced(self, piece: PassedPiece, loss: tuple[str, str], hint: str = "") -> CompiledPiece:
        """A piece that is not compiled. That a compiler failed may be another matter the next time, and is not kept."""
        self.events.emit(Event(loss[0], piece.name, loss[1], hint))
        kept = KeptPiece(None, loss) if loss[0] == "PG303" else None
        return CompiledPiece(torch_compat.forward_of(piece.module), "eager", kept=kept)

    def _load(self, piece: PassedPiece, kept: KeptPiece) -> CompiledPiece | None:
        """A piece that another process compiled; None if it cannot be had, and is to be compiled."""
        if kept.artifact is None:
            if kept.loss is not None:
                self.events.emit(Event(kept.loss[0], piece.name, kept.loss[1]))
            return CompiledPiece(torch_compat.forward_of(piece.module), "eager", kept=kept, is_loaded=True)
        try:
            made = torch_compat.load_compiled(kept.artifact)
        except Exception as error:  # noqa: BLE001 - whatever Inductor raises: it is compiled instead, and that is told
            reason = f"what Inductor kept cannot be loaded: {type(error).__name__}: {error}"
            self.events.emit(Event("PG674", piece.name, reason))
            return None
        return CompiledPiece(made.function, "inductor", made.source, kept, is_loaded=True)

    def _run_compiler(
        self, module: torch.fx.GraphModule, place: torch_compat.PlaceSource | None = None
    ) -> CompiledPiece:
        lowering, fakes = self.lowering, torch_compat.input_values(module)
        if callable(lowering.backend):
            return CompiledPiece(lowering.backend(module, fakes), lowering.name)
        made = torch_compat.inductor_compile(
            module, fakes, self.fake_mode, lowering.settings, provenance=lowering.provenance, place=place
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
