"""Facts about single nodes of a traced graph."""

from __future__ import annotations

import functools
import linecache
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.plan import SourceLine
from piecegraph.base.user_code import is_user_file

_INPLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "imatmul",
        "iand",
        "ior",
        "ixor",
        "ilshift",
        "irshift",
    )
)

TORCHS = ("aten::", "prims::")
_ROOT = "piecegraph_root"
_JOINED = "piecegraph_joined"


def source_line(node: torch.fx.Node) -> SourceLine | None:
    """The line of the user's Python that a node was traced from: the innermost frame outside torch."""
    return next(_user_frames(node.meta), None)


Place = tuple[str, tuple[SourceLine, ...]]
"""(path of the module, lines of the user's Python, outermost first)."""


def places(node: torch.fx.Node) -> tuple[Place, ...]:
    """Where a node was traced from; several places if it does the work of several nodes."""
    metas = node.meta.get(_JOINED) or (node.meta,)
    root = node.meta.get(_ROOT, "")
    return tuple((_module_path(meta, root), tuple(_user_frames(meta))[::-1]) for meta in metas)


def take_places(node: torch.fx.Node, joined: Iterable[torch.fx.Node]) -> None:
    """A node does the work of several others: what is said of their places goes for it."""
    node.meta[_JOINED] = tuple(each.meta for each in joined)


def _user_frames(meta: Mapping[str, Any]) -> Iterator[SourceLine]:
    """The frames outside torch, innermost first."""
    for text in reversed((meta.get("stack_trace") or "").splitlines()):
        frame = text.strip()
        if not frame.startswith('File "'):
            continue
        file, _, rest = frame.removeprefix('File "').partition('", line ')
        if is_user_file(file):
            line = int(rest.partition(",")[0])
            yield SourceLine(file, line, linecache.getline(file, line).strip())


_ACCESS = re.compile(r"""\.?_modules\[['"]([^'"]*)['"]\]|\[['"]?([^'"\]]*)['"]?\]""")
_CELL = re.compile(r"\.__closure__\[\d+\]\.cell_contents")
_GETATTR = re.compile(r"""getattr\((.*), ['"]([^'"]*)['"]\)""")


def module_path(node: torch.fx.Node) -> str:
    """The module whose forward a node was traced from, as ``model.layers.3.mlp``; empty outside of any.

    A path begins below the traced function's own arguments, and at the name of a global; see also :func:`put_below`.
    """
    return _module_path(node.meta, node.meta.get(_ROOT, ""))


def _module_path(meta: Mapping[str, Any], root: str) -> str:
    stack = meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = _dotted(str(next(reversed(stack.values()))[0]))
    return ".".join(part for part in (root, path) if part)


def put_below(graph: torch.fx.Graph, root: str) -> None:
    """What was traced is the part of a model that is called ``root``: paths of modules begin with it."""
    for node in graph.nodes:
        node.meta[_ROOT] = root


def _dotted(source: str) -> str:
    """Dynamo's name for a value, ``L['self'].layers[3]._modules['mlp']``, as a path.

    >>> _dotted("L['self'].layers.3.mlp"), _dotted("L['fn'].__self__._modules['layers']._modules['3']")
    ('layers.3.mlp', 'layers.3')
    >>> _dotted("G['model'].head"), _dotted("getattr(L['self'].layers, '3').experts[1]"), _dotted("L['self']")
    ('model.head', 'layers.3.experts.1', '')
    """
    source = _CELL.sub("", source)
    while (shorter := _GETATTR.sub(r"\1.\2", source)) != source:
        source = shorter
    scope, *parts = [part for part in _ACCESS.sub(r".\1\2", source).split(".") if part not in ("", "__self__")]
    return ".".join(parts[1:] if scope == "L" else parts if scope == "G" else (scope, *parts))


def attribute(owner: torch.nn.Module, node: torch.fx.Node) -> Any:
    """What a ``get_attr`` node stands for."""
    value: Any = owner
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def op_name(node: torch.fx.Node) -> str:
    """What a node calls, as ``ns::op`` where it is an op."""
    return _target_name(node.target)


@functools.lru_cache(maxsize=1024)
def _target_name(target: Any) -> str:
    name = torch_compat.qualified_name(target)
    return name or (target if isinstance(target, str) else getattr(target, "__name__", str(target)))


def is_size(node: torch.fx.Node) -> bool:
    """Whether a node only computes a number that follows from the sizes of the call."""
    value = torch_compat.meta_value(node)
    if not isinstance(value, (torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    return not torch_compat.unbacked_symbols(value)


_SHAPING = frozenset({"view", "reshape", "expand", "unflatten", "flatten", "broadcast_to"})


def computes_with_sizes(node: torch.fx.Node) -> bool:
    """Whether a node may make numbers of how many rows there are, and not only the shape of a tensor."""
    if not node.op.startswith("call") or is_size(node):
        return False
    name = op_name(node)
    if name.endswith("_like") or ("::" in name and not name.startswith(TORCHS)):
        return True
    return name not in _SHAPING and any(map(is_size, node.all_input_nodes))


def picks_result(node: torch.fx.Node) -> bool:
    """Whether a node picks one result of an op that returns a tuple: it stays with the op."""
    if node.target is not operator.getitem or not isinstance(node.args[0], torch.fx.Node):
        return False
    return isinstance(torch_compat.meta_value(node.args[0]), (tuple, list)) and not is_size(node.args[0])


def size_parts(value: Any) -> tuple[Any, ...]:
    """The numbers in a size value: those of a torch.Size, or the number itself."""
    return tuple(value) if isinstance(value, torch.Size) else (value,)


def writes_in_place(node: torch.fx.Node) -> bool:
    """Whether a node writes to one of its arguments."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.target in _INPLACE_OPERATORS or node.target is operator.setitem or "out" in node.kwargs:
        return True
    is_torch_function = torch_compat.op_of(node.target)[0] is not node.target
    if is_torch_function and getattr(node.target, "__name__", "").endswith("_"):
        return True
    return bool(torch_compat.written_args(node.target, node.args, node.kwargs))


def has_effect(node: torch.fx.Node) -> bool:
    """Whether running a node matters even if nobody reads its result. Ops that are not torch's own may do anything."""
    name = torch_compat.qualified_name(node.target)
    if writes_in_place(node) or torch_compat.draws_random_numbers(node.target):
        return True
    return "::" in name and not name.startswith(TORCHS)
