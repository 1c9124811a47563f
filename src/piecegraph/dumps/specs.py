"""The inputs of a piece, written down so that they can be made again without the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
import torch.fx

from piecegraph.base import torch_compat

_FEW_ELEMENTS = 2**22
"""Of a larger tensor, the values of a part are taken for those of all."""


@dataclass(frozen=True, slots=True)
class SizeSpec:
    """An input that is a size."""

    name: str
    value: int
    """In the call that was planned for, or at the first run."""
    origin: str = ""
    """Where it comes from, in words."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input that is a tensor."""

    name: str
    shape: tuple[str, ...]
    """Expressions of the names of sizes."""
    stride: tuple[str, ...]
    dtype: torch.dtype
    device: str
    num_bytes: int
    """In the call that was planned for."""
    low: float | None = None
    """The smallest finite value that was seen; None if none was."""
    high: float | None = None
    origin: str = ""


InputSpec = SizeSpec | TensorSpec


def specs_of(module: torch.fx.GraphModule) -> tuple[InputSpec, ...] | str:
    """What a graph takes, or why that cannot be made anew."""
    placeholders = module.graph.find_nodes(op="placeholder")
    names: dict[sympy.Symbol, str] = {}
    for node in placeholders:
        value = torch_compat.meta_value(node)
        if isinstance(value, torch.SymInt) and isinstance(torch_compat.size_expr(value), sympy.Symbol):
            names[torch_compat.size_expr(value)] = node.name
    specs: list[InputSpec] = []
    for node in placeholders:
        value = torch_compat.meta_value(node)
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            specs.append(SizeSpec(node.name, torch_compat.size_hint(value) or 2))
        elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
            unknown = set(torch_compat.free_symbols(value)) - names.keys()
            if unknown:
                return f"a size of {node.name} is read from data"
            specs.append(_tensor_spec(node.name, value, names))
        else:
            return f"{node.name} is a {type(value).__name__}"
    return tuple(specs)


def _tensor_spec(name: str, value: torch.Tensor, names: Mapping[sympy.Symbol, str]) -> TensorSpec:
    shape, stride = (
        tuple(torch_compat.size_text(number, names) for number in numbers) for numbers in (value.shape, value.stride())
    )
    numel = 1
    for size in value.shape:
        numel *= torch_compat.size_hint(size) or 1
    return TensorSpec(name, shape, stride, value.dtype, str(value.device), numel * value.element_size())


def with_origins(specs: Sequence[InputSpec], origins: Sequence[str]) -> tuple[InputSpec, ...]:
    """The same, with words about where each comes from."""
    return tuple(replace(spec, origin=origin) for spec, origin in zip(specs, origins, strict=True))


def with_values(specs: Sequence[InputSpec], inputs: Sequence[Any]) -> tuple[InputSpec, ...]:
    """The same, with the sizes and the ranges of values that were really there."""
    return tuple(_with_value(spec, value) for spec, value in zip(specs, inputs, strict=True))


def _with_value(spec: InputSpec, value: Any) -> InputSpec:
    if isinstance(spec, SizeSpec):
        return replace(spec, value=int(value))
    low, high = _range_of(value)
    return replace(spec, low=low, high=high, num_bytes=value.numel() * value.element_size())


def _range_of(tensor: torch.Tensor) -> tuple[float | None, float | None]:
    """The smallest and the largest finite value."""
    seen = tensor.detach()
    if seen.is_complex():
        seen = torch.view_as_real(seen.resolve_conj())
    if seen.numel() > _FEW_ELEMENTS:
        seen = seen.flatten()[:_FEW_ELEMENTS]
    wide = seen.double() if seen.is_floating_point() else seen.to(torch.int64)
    finite = wide[wide.isfinite()]
    if not finite.numel():
        return None, None
    low, high = torch.aminmax(finite)
    return low.item(), high.item()
