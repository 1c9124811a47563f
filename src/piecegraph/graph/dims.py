"""Which dimensions of the inputs are sizes.

The leaves of an example call and the user's wish come in; :class:`DimRequest` values come out, with a reason.
Sources, in order: ``dynamic_dims={...}``, marks left by ``mark_dynamic``, the annotations of the function (dimension
0 of every tensor).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from piecegraph.base import torch_compat
from piecegraph.base.plan import Decision
from piecegraph.errors import ConfigError

_TENSOR_ANNOTATION = re.compile(
    r"^(typing\.)?(Optional\[)?(torch\.)?([A-Z]\w*)?Tensor(\s*\|\s*None)?\]?$|^None\s*\|\s*(torch\.)?\w*Tensor$"
)


@dataclass(frozen=True, slots=True)
class EarlierShape:
    """The shape of an input in an earlier call, and which of its dimensions were sizes."""

    shape: tuple[int, ...]
    dynamic: frozenset[int]


@dataclass(frozen=True, slots=True)
class DimRequest:
    """One dimension of one input that may vary."""

    leaf: int
    dim: int
    group: str
    """Dimensions of one group always have the same size."""
    is_explicit: bool
    """Asked for by name: the model fixing it is an error. Guessed from annotations: it is then just not dynamic."""


def find_dynamic_dims(
    function: Callable[..., Any],
    leaves: Sequence[Any],
    paths: Sequence[str],
    wish: Literal["auto"] | Mapping[str, Any],
    earlier: Mapping[str, EarlierShape] = MappingProxyType({}),
) -> tuple[tuple[DimRequest, ...], Decision]:
    """Choose the dynamic dimensions of a call and say why.

    Args:
        earlier: the shapes of another call that differs from this one in nothing else: what varies is a size.
    """
    if earlier:
        return _from_two_calls(leaves, paths, earlier)
    if wish != "auto":
        return _from_mapping(leaves, paths, wish), Decision("dynamic dims", _show(wish), "given as dynamic_dims")
    marks = {i: torch_compat.dynamic_marks(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    wanted = [(i, dim, None) for i, dims in marks.items() for dim in dims]
    if wanted:
        return _group(wanted, leaves, paths, is_explicit=True), Decision(
            "dynamic dims", _names(wanted, paths), "marked with mark_dynamic"
        )
    annotated = _annotated_parameters(function)
    wanted = [
        (i, 0, None)
        for i, (leaf, path) in enumerate(zip(leaves, paths, strict=True))
        if path in annotated and isinstance(leaf, torch.Tensor) and leaf.dim() > 0
    ]
    if wanted:
        return _group(wanted, leaves, paths, is_explicit=False), Decision(
            "dynamic dims", _names(wanted, paths), "annotated as Tensor"
        )
    return (), Decision(
        "dynamic dims", "none", "nothing given, marked or annotated: recorded once for each input signature"
    )


def _from_two_calls(
    leaves: Sequence[Any], paths: Sequence[str], earlier: Mapping[str, EarlierShape]
) -> tuple[tuple[DimRequest, ...], Decision]:
    wanted: list[tuple[int, int, str | None]] = []
    for i, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
        if path in earlier:
            before = earlier[path]
            varied = {d for d, (n, m) in enumerate(zip(leaf.shape, before.shape, strict=True)) if n != m}
            wanted += [(i, dim, None) for dim in sorted(varied | before.dynamic)]
    # What was equal by chance in one call was not in the other.
    sizes = {(i, dim): (leaves[i].shape[dim], earlier[paths[i]].shape[dim]) for i, dim, _ in wanted}
    requests = _group(wanted, leaves, paths, is_explicit=False, sizes=sizes)
    return requests, Decision("dynamic dims", _names(wanted, paths), "two calls differed in them, or annotated")


def _from_mapping(leaves: Sequence[Any], paths: Sequence[str], wish: Mapping[str, Any]) -> tuple[DimRequest, ...]:
    tensors = [path for leaf, path in zip(leaves, paths, strict=True) if isinstance(leaf, torch.Tensor)]
    wanted: list[tuple[int, int, str | None]] = []
    for name, dims in wish.items():
        if name not in paths:
            raise ConfigError(
                "PG103",
                f"dynamic_dims names {name!r}",
                why="there is no such input",
                hint=f"inputs: {', '.join(tensors)}",
            )
        leaf = leaves[paths.index(name)]
        if not isinstance(leaf, torch.Tensor):
            continue  # an optional input that this call leaves out
        for dim, group in _named_dims(name, dims):
            if not -leaf.dim() <= dim < leaf.dim():
                raise ConfigError(
                    "PG103", f"dynamic_dims asks for dimension {dim} of {name!r}", why=f"it has {leaf.dim()}"
                )
            wanted.append((paths.index(name), dim % leaf.dim(), group))
    return _group(wanted, leaves, paths, is_explicit=True)


def _named_dims(name: str, dims: Any) -> list[tuple[int, str | None]]:
    if isinstance(dims, Mapping):
        pairs = list(dims.items())
    else:
        pairs = [(dim, None) for dim in (dims if isinstance(dims, (tuple, list)) else (dims,))]
    for dim, group in pairs:
        if not isinstance(dim, int) or not isinstance(group, (str, type(None))):
            raise ConfigError(
                "PG103", f"dynamic_dims[{name!r}] is {dims!r}", why='write 0, (0, 1) or {0: "batch", 1: "length"}'
            )
    return pairs


def _group(
    wanted: Sequence[tuple[int, int, str | None]],
    leaves: Sequence[Any],
    paths: Sequence[str],
    *,
    is_explicit: bool,
    sizes: Mapping[tuple[int, int], Any] = MappingProxyType({}),
) -> tuple[DimRequest, ...]:
    """Dimensions of equal size share one symbol unless they are of one tensor or were given different names."""
    size_of: dict[str, Any] = {}
    members: dict[str, set[int]] = {}
    unnamed: list[str] = []
    requests = []
    for leaf, dim, given in wanted:
        size = sizes.get((leaf, dim), leaves[leaf].shape[dim])
        group = given or next((g for g in unnamed if size_of[g] == size and leaf not in members[g]), f"s{len(unnamed)}")
        if given is None and group not in unnamed:
            unnamed.append(group)
        if size_of.setdefault(group, size) != size:
            raise ConfigError(
                "PG103",
                f"{paths[leaf]}.shape[{dim}] is {size}",
                why=f"other dimensions named {group!r} are {size_of[group]}",
            )
        members.setdefault(group, set()).add(leaf)
        requests.append(DimRequest(leaf, dim, group, is_explicit))
    return tuple(requests)


def _annotated_parameters(function: Callable[..., Any]) -> frozenset[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins have no signature
        return frozenset()
    return frozenset(p.name for p in parameters if _is_tensor_annotation(p.annotation))


def _is_tensor_annotation(annotation: Any) -> bool:
    """Compared as text: string annotations cannot always be evaluated, and all spellings look alike as text."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if not isinstance(annotation, (str, type)):
        text = str(annotation)
    return bool(_TENSOR_ANNOTATION.match(text.strip("'\" ")))


def _names(wanted: Sequence[tuple[int, int, str | None]], paths: Sequence[str]) -> str:
    return ", ".join(f"{paths[leaf]}[{dim}]" for leaf, dim, _ in wanted)


def _show(wish: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}[{dims}]" for name, dims in wish.items())
