"""The Python that Inductor generates for a graph in; which of its lines launches what, and from which nodes, out.

Two sources are joined. Above a launch stands a comment with the nodes its kernel comes from; C++ kernels have none.
And Inductor's provenance map, where it was asked for, has the nodes behind each launch. Neither is complete: the map
gives only ``add`` for an addmm made of ``linear`` and ``add``, and the comment may leave the ``add`` out. Both name too
much for calls of ops: what computes an op's inputs is listed too, though it runs in a kernel of its own. It takes the
graph to tell, so that is left to the reader.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from piecegraph.base import torch_compat
from piecegraph.base.torch_compat import CompiledSource

LaunchKind = Literal["kernel", "template", "op"]
"""A generated kernel, one from a template for matmuls or attention, or the call of an op."""


@dataclass(frozen=True, slots=True)
class WrapperLaunch:
    """One statement that launches kernels."""

    name: str
    """As written: ``triton_poi_fused_add_0``, ``extern_kernels.mm``, ``torch.ops.my.op.default``."""
    kind: LaunchKind
    op: str
    """Of a call of an op: ``aten::mm``, ``my::op``. Of a kernel: its name."""
    nodes: tuple[str, ...]
    """Names of nodes of the graph that was compiled."""
    atens: tuple[str, ...]
    """The ATen ops that Inductor lowered: ``aten::mm``."""


_FUNCTIONS = re.compile(r"call|partition_\d+")
_SOURCE_NODES = re.compile(r"# (?:Topologically Sorted|Unsorted) Source Nodes: \[(.*?)\], Original ATen: \[(.*?)\]")
_HANDLE = re.compile(r"# \[Provenance debug handles\] (\S+:\d+)")
_OP_ROOTS = {"aten": "aten", "inductor_ops": "inductor", "_quantized": "_quantized"}
_NOT_LAUNCHED = frozenset({"inductor::_reinterpret_tensor", "inductor::_alloc_from_pool"})
_TENSOR_METHODS = frozenset({"copy_", "item", "zero_", "fill_"})


def wrapper_launches(source: CompiledSource) -> dict[int, WrapperLaunch]:
    """The launch of each line; all lines of a statement have the same."""
    tree = ast.parse(source.code)
    kernels = _kernel_names(tree)
    mapped = _nodes_of_handles(source.provenance)
    lines = source.code.splitlines()
    launches: dict[int, WrapperLaunch] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and _FUNCTIONS.fullmatch(function.name):
            above = function.lineno
            for statement in _statements(function.body):
                called = _launched(statement, kernels)
                if called is None:
                    continue
                comments = [text.strip() for text in lines[above : statement.lineno - 1] if text.lstrip()[:1] == "#"]
                above = statement.end_lineno or statement.lineno
                launch = _make_launch(*called, comments, mapped)
                launches |= dict.fromkeys(range(statement.lineno, above + 1), launch)
    return launches


def _kernel_names(tree: ast.Module) -> frozenset[str]:
    """What the module defines with ``async_compile.triton(...)``, ``async_compile.cpp_pybinding(...)`` and the like."""
    names: set[str] = set()
    for statement in (part for part in tree.body if isinstance(part, ast.Assign)):
        made = statement.value
        if isinstance(made, ast.Call) and _written(made.func).startswith("async_compile."):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def _nodes_of_handles(provenance: str | None) -> Mapping[str, Sequence[str]]:
    """The node names behind each ``kernel:number``."""
    if provenance is None:
        return {}
    maps = json.loads(provenance)
    # "cppCode" is what Inductor calls generated code of any kind.
    return {
        handle: [before for after in lowered for before in maps["postToPre"].get(after, ())]
        for handle, lowered in maps["cppCodeToPost"].items()
    }


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The simple statements of a block, in order, those of inner blocks included."""
    for statement in body:
        inner = [*getattr(statement, "body", ()), *getattr(statement, "orelse", ())]
        if inner:
            yield from _statements(inner)
        else:
            yield statement


def _launched(statement: ast.stmt, kernels: frozenset[str]) -> tuple[str, LaunchKind, str] | None:
    """(name, kind, op) of what a statement launches."""
    for call in ast.walk(statement):
        if not isinstance(call, ast.Call):
            continue
        written = _written(call.func)
        kernel = written.removesuffix(".run")
        if kernel in kernels or (kernel != written and "." not in kernel):
            return kernel, "template" if "_tem_" in kernel else "kernel", kernel
        op = _op_called(written)
        if op and op not in _NOT_LAUNCHED:
            return written, "op", op
    return None


def _written(function: ast.expr) -> str:
    """A dotted name as it is written, or an empty string."""
    parts = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    return ".".join([function.id, *reversed(parts)]) if isinstance(function, ast.Name) else ""


def _op_called(written: str) -> str:
    """The op behind a dotted name, or an empty string."""
    root, *parts = written.split(".")
    if root == "extern_kernels" and parts:
        is_aten = torch_compat.find_op(f"aten::{parts[0]}") is not None
        return f"aten::{parts[0]}" if is_aten else f"inductor::{parts[0]}"
    if root == "torch" and parts[:1] == ["ops"]:
        return _op_name(parts[1:])
    if root in _OP_ROOTS and parts:
        return _op_name([_OP_ROOTS[root], *parts])
    if len(parts) == 1 and parts[0] in _TENSOR_METHODS:
        return f"aten::{parts[0]}"
    return ""


def _op_name(parts: Sequence[str]) -> str:
    """``ns::op``, or ``ns::op.overload`` for another overload than the default."""
    return "::".join(parts[:2]) + "".join(f".{part}" for part in parts[2:] if part != "default")


def _make_launch(
    name: str, kind: LaunchKind, op: str, comments: Sequence[str], mapped: Mapping[str, Sequence[str]]
) -> WrapperLaunch:
    nodes: dict[str, None] = {}
    atens: dict[str, None] = {}
    for comment in comments:
        if found := _SOURCE_NODES.match(comment):
            # What went before is of a node for which nothing is launched.
            nodes = dict.fromkeys(part for part in found[1].split(", ") if part)
            atens = dict.fromkeys(_op_name(part.split(".")) for part in found[2].split(", ") if part)
        elif (found := _HANDLE.match(comment)) and found[1].rpartition(":")[0] == name:
            nodes |= dict.fromkeys(mapped.get(found[1], ()))
    return WrapperLaunch(name, kind, op, tuple(nodes), tuple(atens))
