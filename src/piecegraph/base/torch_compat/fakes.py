"""Fake tensors: tensors without memory, and how they are made anew in another process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx

from piecegraph.base.torch_compat.memory import storage_id
from piecegraph.base.torch_compat.sizes import size_expr


def fake_like(tensor: torch.Tensor, neighbour: Any) -> torch.Tensor:
    """A fake tensor of the same layout, with fixed sizes, in the world of another fake.

    The fakes in a Dynamo graph are not of the mode that Dynamo hands to backends, though both share their symbols.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if tensor.is_inference():  # so would be its fake, which counts no writes
        with unset_fake_temporarily():
            plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor = plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    fake: torch.Tensor = neighbour.fake_mode.from_tensor(tensor, static_shapes=True)
    let_go_of_tensors([fake])
    return fake


@functools.lru_cache(maxsize=256)
def are_fake(types: tuple[type, ...]) -> bool:
    """Whether an op is called on stand-ins for tensors, by something that traces."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return any(issubclass(cls, (FakeTensor, FunctionalTensor)) for cls in types)


def let_go_of_tensors(fakes: Iterable[Any]) -> None:
    """Have the modes of fake tensors forget what they stand for. A tensor that anybody holds weakly cannot be swapped
    (``torch.utils.swap_tensors``), as ``module.to`` does with weights of other classes.
    """
    for mode in {id(fake.fake_mode): fake.fake_mode for fake in fakes}.values():
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


def run_fake(function: Callable[..., Any], *fakes: Any) -> Any:
    """What a function would make of fake tensors.

    Without the Python dispatcher, torch 2.11 runs composite ops in C++, which knows no symbolic sizes.
    """
    from torch._dispatch.python import enable_python_dispatcher

    with enable_python_dispatcher(), fakes[0].fake_mode, torch.no_grad():
        return function(*fakes)


def is_faked(arguments: Any) -> bool:
    """Whether a call is part of somebody's trace: a FakeTensor is among the arguments, or fakes are being made."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode(arguments) is not None


@dataclass(frozen=True, slots=True)
class KeptSymbol:
    """A symbolic size, as far as tracing and compiling know it."""

    symbol: sympy.Symbol
    hint: int | None
    """Its value in the example; None for one that stands for data."""
    lower: Any
    upper: Any


@dataclass(frozen=True, slots=True)
class FakeLayout:
    """All that there is of a fake tensor."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]
    """Numbers and expressions."""
    strides: tuple[Any, ...]
    offset: Any
    storage: int
    """Equal for those that share memory."""


def kept_symbols(fake_mode: Any) -> tuple[KeptSymbol, ...]:
    """The symbols of a trace."""
    env = fake_mode.shape_env if fake_mode is not None else None
    if env is None:
        return ()
    return tuple(
        KeptSymbol(
            symbol, None if (hint := env.backed_var_to_val.get(symbol)) is None else int(hint), span.lower, span.upper
        )
        for symbol, span in env.var_to_range.items()
    )


def kept_layout(fake: torch.Tensor) -> FakeLayout:
    """A fake tensor as a value."""
    plain = (int(n) if not isinstance(n, torch.SymInt) else size_expr(n) for n in (*fake.shape, *fake.stride()))
    numbers = tuple(plain)
    offset = fake.storage_offset()
    return FakeLayout(
        fake.dtype,
        fake.device,
        numbers[: fake.dim()],
        numbers[fake.dim() :],
        size_expr(offset) if isinstance(offset, torch.SymInt) else int(offset),
        storage_id(fake),
    )


def is_keepable_fake(value: Any) -> bool:
    """Whether a fake tensor is nothing but its layout."""
    from torch._subclasses.fake_tensor import FakeTensor

    if type(value) is not FakeTensor or value.layout is not torch.strided:
        return False
    return not (value.is_quantized or value.is_conj() or value.is_neg() or value.is_nested)


class FakeWorld:
    """Symbols and fake tensors made anew, for a graph that was traced in another process."""

    def __init__(self, symbols: Sequence[KeptSymbol]) -> None:
        from torch._guards import SLoc
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv, ValueRangesSLoc
        from torch.utils._sympy.value_ranges import ValueRanges

        self._env = env = ShapeEnv()
        # Torch looks for a line of the user's instead, and imports all of torch.export to know which are its own.
        place = SLoc("a kept trace", None)
        for kept in symbols:
            env.var_to_range[kept.symbol] = ValueRanges(kept.lower, kept.upper)
            env.var_to_range_sloc[kept.symbol] = ValueRangesSLoc(place, place)
            env.var_to_sources[kept.symbol] = []
            if kept.hint is not None:
                env.backed_var_to_val[kept.symbol] = sympy.Integer(kept.hint)
        self.mode = FakeTensorMode(shape_env=env)
        self._fake_class: Any = FakeTensor
        self._bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        """What reads a storage as a dtype, one for each of both."""
        self._storages: dict[int, Any] = {}
        self._sizes: dict[tuple[sympy.Expr, str], Any] = {}

    def size(self, expr: sympy.Expr, kind: str) -> Any:
        """A number of a trace: ``kind`` is the name of its class, SymInt, SymFloat or SymBool."""
        from torch.fx.experimental.sym_node import SymNode

        if (expr, kind) not in self._sizes:
            python = {"SymInt": int, "SymFloat": float, "SymBool": bool}[kind]
            self._sizes[expr, kind] = getattr(torch, kind)(SymNode(expr, self._env, python, None))
        return self._sizes[expr, kind]

    @contextlib.contextmanager
    def making_tensors(self) -> Iterator[None]:
        """Around calls of :meth:`tensor`: to enter it for each would take as long as the rest."""
        from torch.utils._mode_utils import no_dispatch

        with no_dispatch(), self._env.suppress_guards(), torch.no_grad():
            yield

    def tensor(self, layout: FakeLayout) -> torch.Tensor:
        """A fake tensor of that layout; those of one storage share memory.

        A view of a tensor of one element takes a tenth of the time that a tensor of symbolic sizes does, whose bytes
        are computed.
        """
        shape, strides = tuple(map(self._number, layout.shape)), tuple(map(self._number, layout.strides))
        offset = self._number(layout.offset)
        base = self._base(layout.storage, layout.dtype).as_strided(shape, strides, offset)
        fake: torch.Tensor = self._fake_class(self.mode, base, layout.device)
        return fake

    def _number(self, value: Any) -> Any:
        return value if isinstance(value, int) else self.size(value, "SymInt")

    def _base(self, storage: int, dtype: torch.dtype) -> torch.Tensor:
        if (storage, dtype) not in self._bases:
            base = torch.empty(1, dtype=dtype, device="meta")
            if storage in self._storages:
                base.set_(self._storages[storage], 0, (1,), (1,))
            self._storages.setdefault(storage, base.untyped_storage())
            self._bases[storage, dtype] = base
        return self._bases[storage, dtype]
