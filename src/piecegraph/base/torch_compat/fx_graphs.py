"""FX graphs as Python that is read, run and logged."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx._lazy_graph_module import _LazyGraphModule


def lazy_module(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module of a graph whose Python is not written before it is needed: of most pieces it never is."""
    return _LazyGraphModule(root, graph)


def forward_of(module: torch.fx.GraphModule) -> Callable[..., Any]:
    """What runs a module's graph, as a function with that code, though the module be lazy."""
    _LazyGraphModule.force_recompile(module)
    forward: Callable[..., Any] = module.forward
    return forward


def nodes_by_line(module: torch.fx.GraphModule) -> dict[int, torch.fx.Node]:
    """What each line of a traced module's ``forward`` computes, lines numbered as in its frames."""
    nodes, first = list(module.graph.nodes), forward_of(module).__code__.co_firstlineno
    return {first + line: nodes[index] for line, index in (module._lineno_map or {}).items() if index is not None}


@dataclass(frozen=True, slots=True)
class GraphCode:
    """A graph as Python that can be read and run."""

    text: str
    """``def forward(self, ...):``, with the user's lines as comments."""
    names: Mapping[str, Any]
    """What it calls by a name of its own."""


def graph_code(graph: torch.fx.Graph) -> GraphCode:
    """The code of a graph with layouts and lines in it, which ``GraphModule.code`` leaves out."""
    code = graph.python_code("self", verbose=True, include_stride=True, include_device=True)
    return GraphCode(code.src.strip() + "\n", code.globals)


def run_from_file(module: torch.fx.GraphModule, file: str, text: str, names: Mapping[str, Any]) -> None:
    """Let a traced module's ``forward`` be that of a file, so that breakpoints in the file are met.

    Args:
        module: whose code the file holds, as :func:`graph_code` writes it.
        file: where the text is.
        text: of the whole file; the first function called ``forward`` is taken.
        names: what it calls.
    """
    tree = ast.parse(text)
    function = next(part for part in ast.walk(tree) if isinstance(part, ast.FunctionDef) and part.name == "forward")
    scope = dict(names)
    exec(compile(ast.Module([function], []), file, "exec"), scope)
    type(module).forward = scope["forward"]  # its class is its own, made for it
    module._lineno_map = _node_of_line(module.graph, function)


def _node_of_line(graph: torch.fx.Graph, function: ast.FunctionDef) -> dict[int, int | None]:
    """Which node each line behind a function's first computes: a node is what gives a value to its name."""
    indices = {node.name: index for index, node in enumerate(graph.nodes)}
    lines: dict[int, int | None] = {}
    for statement in function.body:
        if isinstance(statement, ast.Assign) and not _is_none(statement.value):
            targets = statement.targets
        else:
            targets = [statement.target] if isinstance(statement, ast.AnnAssign) else []
        for target in targets:
            if isinstance(target, ast.Name) and target.id in indices:
                lines[statement.lineno - function.lineno] = indices[target.id]
    return lines


def _is_none(value: ast.expr) -> bool:
    """Whether an assignment only lets go of what names held."""
    return isinstance(value, ast.Constant) and value.value is None


def trace_artifact(owner: torch.nn.Module, name: str, encoding: str, make: Callable[[], str]) -> None:
    """Put something into the log that ``TORCH_TRACE`` asks for and tlparse reads; nothing is made if it is not.

    It stands with what Dynamo told of the graph that it wrote down with ``owner``.
    """
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        lambda: {"name": name, "encoding": encoding},
        payload_fn=make,
        expect_trace_id=False,
        compile_id=getattr(owner, "meta", {}).get("dynamo_compile_id"),
    )


def map_aggregate(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested arguments of a node, with every atom changed."""
    from torch.fx.node import map_aggregate as torch_map_aggregate

    return torch_map_aggregate(value, change)
