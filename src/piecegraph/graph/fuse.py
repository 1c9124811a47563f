"""Between trace and split, if asked for: linears of one input become one matmul.

A compiler cannot join ``q_proj(x)``, ``k_proj(x)`` and ``v_proj(x)``, because their weights lie apart. So the weights
are laid out anew, one behind the other, and the parameters become views of the joint memory: nothing is stored twice,
and loading weights in place still reaches the graphs. It is only done where the graph shows that nothing can tell the
difference.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F

from piecegraph.base import torch_compat
from piecegraph.base.plan import Decision
from piecegraph.graph.fx_nodes import take_places, writes_in_place
from piecegraph.graph.sources import FromGraph, GraphInput, Weight
from piecegraph.graph.tracer import Traced
from piecegraph.graph.views import StridedView

_LINEAR = torch_compat.op_of(F.linear)[0]


@dataclass(frozen=True)
class _Group:
    """Linears that take the same input, in order."""

    nodes: tuple[torch.fx.Node, ...]
    weights: tuple[Weight, ...]
    biases: tuple[Weight, ...]
    """One for each linear, or none at all."""

    @property
    def name(self) -> str:
        return " + ".join(weight.name.removesuffix(".weight") for weight in self.weights)


PlaceWeight = Callable[[torch.Tensor, torch.Tensor], None]
"""Gives a parameter other memory of the same layout, which then holds what it held."""


def place_by_copy(parameter: torch.Tensor, memory: torch.Tensor) -> None:
    """The :data:`PlaceWeight` of parameters whose numbers are there."""
    memory.copy_(parameter.detach())
    parameter.data = memory


def fuse_linears(traced: Traced, place: PlaceWeight = place_by_copy) -> tuple[Traced, Decision]:
    """Join the linears of a traced graph that share their input."""
    copied = traced.copied()
    graph, inputs = copied.graph, dict(copied.inputs)
    groups = _find_groups(graph, inputs, {id(weight.tensor) for weight in traced.written_weights})
    replaced: dict[torch.fx.Node, torch.fx.Node] = {}
    known: _KnownFakes = {}
    for group in groups:
        _join_weights(group, place)
        _fuse(graph, inputs, group, replaced, known)
    order = {node: i for i, node in enumerate(graph.nodes)}
    results = tuple(
        replace(leaf, node=replaced.get(leaf.node, leaf.node)) if isinstance(leaf, (FromGraph, StridedView)) else leaf
        for leaf in copied.results
    )
    ordered = {node: inputs[node] for node in sorted(inputs, key=order.__getitem__)}
    names = "; ".join(group.name for group in groups[:2]) + (", ..." if len(groups) > 2 else "")
    decision = Decision("fused linears", f"{len(groups)} groups", names or "none share an input and can be joined")
    return replace(copied, inputs=ordered, results=results), decision


def _find_groups(graph: torch.fx.Graph, inputs: dict[torch.fx.Node, GraphInput], written: set[int]) -> list[_Group]:
    by_input: dict[tuple[torch.fx.Node, bool], list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and torch_compat.op_of(node.target)[0] is _LINEAR and not node.kwargs:
            operands = [inputs.get(arg) for arg in node.args[1:] if arg is not None]
            if operands and all(isinstance(o, Weight) and id(o.tensor) not in written for o in operands):
                by_input.setdefault((node.args[0], len(operands) == 2), []).append(node)
    groups = [_make_group(nodes, inputs) for nodes in by_input.values() if len(nodes) > 1]
    uses = [id(weight.tensor) for group in groups for weight in (*group.weights, *group.biases)]
    return [
        group
        for group in groups
        if _is_uniform(group)
        and all(uses.count(id(weight.tensor)) == 1 for weight in (*group.weights, *group.biases))
        and not _is_input_written_between(group)
    ]


def _make_group(nodes: Sequence[torch.fx.Node], inputs: dict[torch.fx.Node, GraphInput]) -> _Group:
    operands = [[inputs[arg] for arg in node.args[1:] if arg is not None] for node in nodes]  # type: ignore[index]
    weights = tuple(pair[0] for pair in operands if isinstance(pair[0], Weight))
    return _Group(
        tuple(nodes), weights, tuple(pair[1] for pair in operands if len(pair) == 2 and isinstance(pair[1], Weight))
    )


def _is_uniform(group: _Group) -> bool:
    def kind(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.dtype, tensor.device, tensor.is_inference()

    weights, biases = ([weight.tensor for weight in each] for each in (group.weights, group.biases))
    return all(w.dim() == 2 for w in weights) and all(len(set(map(kind, each))) <= 1 for each in (weights, biases))


def _is_input_written_between(group: _Group) -> bool:
    """The joint matmul runs where the first linear was: the others must have seen the same input."""
    node, last = group.nodes[0], group.nodes[-1]
    source = node.args[0]
    assert isinstance(source, torch.fx.Node)
    storage = torch_compat.storage_id(torch_compat.meta_value(source))
    while node is not last:
        if node.op in ("call_function", "call_method") and writes_in_place(node):
            fakes = [torch_compat.meta_value(arg) for arg in node.all_input_nodes]
            if any(isinstance(fake, torch.Tensor) and torch_compat.storage_id(fake) == storage for fake in fakes):
                return True
        node = node.next
    return False


def _fuse(
    graph: torch.fx.Graph,
    inputs: dict[torch.fx.Node, GraphInput],
    group: _Group,
    replaced: dict[torch.fx.Node, torch.fx.Node],
    known: _KnownFakes,
) -> None:
    """Replace the linears by one; each result is made contiguous, so that whatever reads it sees what it saw before."""
    first, source = group.nodes[0], group.nodes[0].args[0]
    assert isinstance(source, torch.fx.Node)
    neighbour = torch_compat.meta_value(source)
    operands = [_add_joint_weight(graph, inputs, group.weights, neighbour)]
    if group.biases:
        operands.append(_add_joint_weight(graph, inputs, group.biases, neighbour))
    widths = [weight.tensor.shape[0] for weight in group.weights]
    with graph.inserting_before(first):
        joint = graph.call_function(first.target, (source, *operands))  # type: ignore[arg-type]
        parts = graph.call_method("split", (joint, widths, -1))
        shaped, fake_parts = _fakes_of(torch_compat.meta_value(first), widths, known)
        joint.meta = {**first.meta, "example_value": shaped}
        parts.meta = {**first.meta, "example_value": fake_parts}
        take_places(joint, group.nodes)
        take_places(parts, group.nodes)
        for index, node in enumerate(group.nodes):
            part = graph.call_function(operator.getitem, (parts, index))
            part.meta = {**node.meta, "example_value": fake_parts[index]}
            result = graph.call_method("contiguous", (part,))
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result)
            replaced[node] = result
    for node in group.nodes:
        graph.erase_node(node)


_KnownFakes = dict[tuple[Any, ...], tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
"""What a joint linear makes, and its parts: equal layers share them, as torch takes milliseconds for each."""


def _fakes_of(
    like: torch.Tensor, widths: list[int], known: _KnownFakes
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The fake result of a joint linear, and its parts, for the result of one of the linears that it stands for."""
    key = (*map(torch_compat.size_expr, like.shape), like.dtype, like.device, *widths)
    if key not in known:
        # Not by F.linear on fakes, which takes torch as long as all the rest that is done here.
        shaped = torch_compat.run_fake(lambda fake: fake.new_empty(*fake.shape[:-1], sum(widths)), like)
        known[key] = shaped, torch_compat.run_fake(lambda fake: fake.split(widths, -1), shaped)
    return known[key]


def _add_joint_weight(
    graph: torch.fx.Graph, inputs: dict[torch.fx.Node, GraphInput], weights: Sequence[Weight], neighbour: torch.Tensor
) -> torch.fx.Node:
    joint = _joint([weight.tensor for weight in weights])
    with graph.inserting_before(next(iter(graph.nodes))):
        node = graph.placeholder("joint_" + "_".join(weight.name.replace(".", "_") for weight in weights))
    node.meta["example_value"] = torch_compat.fake_like(joint, neighbour)
    inputs[node] = Weight(" + ".join(weight.name for weight in weights), joint, tuple(weights))
    return node


def _join_weights(group: _Group, place: PlaceWeight) -> None:
    """Lay the weights of linears one behind the other, and their biases."""
    for weights in filter(None, (group.weights, group.biases)):
        tensors = [weight.tensor for weight in weights]
        if not _is_joined(tensors):
            first, rows = tensors[0], [tensor.shape[0] for tensor in tensors]
            with torch_compat.inference_as(first):
                joint = first.new_empty(sum(rows), *first.shape[1:])
                for tensor, part in zip(tensors, joint.split(rows), strict=True):
                    place(tensor, part)


def _joint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor over tensors that lie one behind the other."""
    first, rows = tensors[0], [tensor.shape[0] for tensor in tensors]
    return torch_compat.stretched(first, (sum(rows), *first.shape[1:]))


def separate(tensors: Sequence[torch.Tensor]) -> None:
    """Undo :func:`_join_weights`: every tensor gets memory of its own again."""
    for tensor in tensors:
        with torch_compat.inference_as(tensor):
            tensor.data = tensor.detach().clone()


def _is_joined(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether they lie one behind the other already, because another plan joined them."""
    expected = tensors[0].data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.data_ptr() != expected:
            return False
        expected += tensor.numel() * tensor.element_size()
    return torch_compat.storage_id(tensors[0]) == torch_compat.storage_id(tensors[-1])
