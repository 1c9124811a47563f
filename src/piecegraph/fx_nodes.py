"""Facts about single nodes of a traced graph."""

from __future__ import annotations

import linecache
import operator
import re
from typing import Any

import torch
import torch.fx

from piecegraph import torch_compat
from piecegraph.plan import SourceLine
from piecegraph.user_code import is_user_file

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

_TRACED_ROOT = re.compile(r"^[LG]\['[^']*'\]\.?")
"""What Dynamo writes before the path of a module: the variable that holds the outermost one."""


def source_line(node: torch.fx.Node) -> SourceLine | None:
    """The line of the user's Python that a node was traced from: the innermost frame outside torch."""
    frames = [
        text.strip() for text in (node.meta.get("stack_trace") or "").splitlines() if text.strip().startswith("File ")
    ]
    for frame in reversed(frames):
        file, _, rest = frame.removeprefix('File "').partition('", line ')
        if is_user_file(file):
            line = int(rest.partition(",")[0])
            return SourceLine(file, line, linecache.getline(file, line).strip())
    return None


def op_name(node: torch.fx.Node) -> str:
    """What a node calls, as ``ns::op`` where it is an op."""
    name = torch_compat.qualified_name(node.target)
    return name or (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target)))


def module_path(node: torch.fx.Node) -> str:
    """The module that calls a node, ``layers.3.mlp``, from the traced module on; empty for the module itself."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((str(path) for path, _ in reversed(stack.values())), "")
    return _TRACED_ROOT.sub("", path)


def is_size(node: torch.fx.Node) -> bool:
    """Whether a node only computes a number that follows from the sizes of the call."""
    value = torch_compat.meta_value(node)
    if not isinstance(value, (torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    return not torch_compat.unbacked_symbols(value)


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
    return writes_in_place(node) or ("::" in name and not name.startswith(("aten::", "prims::")))
