"""Nodes of a traced graph as places in the user's model, and compiled code as calls with such origins."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.origin import LaunchCall, Origin
from piecegraph.graph.fx_nodes import op_name, places, writes_in_place
from piecegraph.graph.program import StepSource
from piecegraph.provenance.origins.inductor import WrapperLaunch, wrapper_launches

_ALONE = re.compile(r"(aten|prims|inductor|mkldnn)::\w*(mm|matmul|linear|conv(?!ert)|einsum|attention)")
"""Ops that have kernels of their own: a compiler calls them, or takes a template."""


def origins_of(node: torch.fx.Node) -> tuple[Origin, ...]:
    """Where in the user's model a node was traced from: several places for linears that were joined."""
    return tuple(Origin(op_name(node), module, stack) for module, stack in places(node))


_by_line: weakref.WeakKeyDictionary[torch.fx.GraphModule, dict[int, tuple[Origin, ...]]] = weakref.WeakKeyDictionary()


def origins_by_line(module: torch.fx.GraphModule) -> Mapping[int, tuple[Origin, ...]]:
    """The origins of what each line of a traced module's code computes, worked out once and not for each size."""
    if module not in _by_line:
        nodes = torch_compat.nodes_by_line(module)
        _by_line[module] = {line: origins_of(node) for line, node in nodes.items()}
    return _by_line[module]


def all_origins(nodes: Iterable[torch.fx.Node]) -> tuple[Origin, ...]:
    """The places of several nodes, each once."""
    return tuple(dict.fromkeys(origin for node in nodes for origin in origins_of(node)))


_known: weakref.WeakKeyDictionary[torch.fx.GraphModule, dict[int, LaunchCall]] = weakref.WeakKeyDictionary()


def launch_calls(source: StepSource) -> Mapping[int, LaunchCall]:
    """As :func:`_launch_calls`, worked out once for each step and not for each of its sizes."""
    if source.module not in _known:
        _known[source.module] = _launch_calls(source)
    return _known[source.module]


def _launch_calls(source: StepSource) -> dict[int, LaunchCall]:
    """What each line of a compiled piece's source launches, with the origins in this piece's own graph.

    Layers that share their compiled code have equal graphs with equal node names, so that a name in the code is a
    node in each of them, and the node knows its layer.
    """
    if source.compiled is None:
        return {}
    launches = wrapper_launches(source.compiled)
    nodes = {node.name: node for node in source.calls}
    in_kernels = {name for launch in launches.values() if launch.kind == "kernel" for name in launch.nodes}
    calls: dict[WrapperLaunch, LaunchCall] = {}
    for launch in launches.values():
        if launch not in calls:
            named = [node for node in nodes.values() if node.name in launch.nodes]
            calls[launch] = LaunchCall(launch.op, _origins(_own_nodes(launch, named, in_kernels), launch))
    return {line: calls[launch] for line, launch in launches.items()}


def _origins(nodes: Sequence[torch.fx.Node], launch: WrapperLaunch) -> tuple[Origin, ...]:
    """One for each place; if the graph has none of the nodes, the ops that were lowered are all that is known."""
    if nodes:
        return all_origins(nodes)
    return tuple(Origin(aten, "") for aten in launch.atens)


def _own_nodes(launch: WrapperLaunch, named: Sequence[torch.fx.Node], in_kernels: set[str]) -> Sequence[torch.fx.Node]:
    """The nodes that a launch computes, of those that are named with it: the main one first, the others in order.

    - A generated kernel has no matmul in it: that is named for the view of its result which the kernel reads. The main
      node is the last that computes something.
    - The call of an op is the node of that op, or of the one it was lowered from; what is named before computes its
      inputs. What is named after was merged into it (the ``add`` of an ``addmm``), unless a kernel has it.
    """
    if not named:
        return ()
    if launch.kind == "kernel":
        has_lowered = any(map(_ALONE.match, launch.atens))
        own = [node for node in named if has_lowered or not _runs_alone(node)] or list(named)
        main = next((node for node in reversed(own) if not _runs_alone(node) and not _is_view(node)), own[-1])
        return [main, *(node for node in own if node is not main)]
    elsewhere = set() if launch.kind == "template" else in_kernels
    main = _called_node(launch, named, elsewhere)
    after = named[named.index(main) + 1 :]
    return [main, *(node for node in after if node.name not in elsewhere)]


def _called_node(launch: WrapperLaunch, named: Sequence[torch.fx.Node], elsewhere: set[str]) -> torch.fx.Node:
    same = [node for node in named if op_name(node) == launch.op]
    is_alone = launch.kind == "template" or _ALONE.match(launch.op) is not None
    lowered = [node for node in named if is_alone and _runs_alone(node)]
    others = [node for node in named if node.name not in elsewhere]
    return (same or lowered or others or named)[-1]


def _runs_alone(node: torch.fx.Node) -> bool:
    return _ALONE.match(op_name(node)) is not None


def _is_view(node: torch.fx.Node) -> bool:
    value = torch_compat.meta_value(node)
    if not isinstance(value, torch.Tensor) or writes_in_place(node):
        return False
    storage = torch_compat.storage_id(value)
    inputs = [torch_compat.meta_value(arg) for arg in node.all_input_nodes]
    return any(isinstance(v, torch.Tensor) and torch_compat.storage_id(v) == storage for v in inputs)
