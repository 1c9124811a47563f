"""Which numbers of a call may become indices.

A GPU does not survive an index that is out of range. So where others are tried in place of a call's numbers, whatever
may become one has to stay what calls hold.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.graph.fx_nodes import TORCHS, op_name, writes_in_place

_CASTS = frozenset({"to", "type", "type_as", "long", "int", "short", "char", "byte", "to_copy"})
_RANKINGS = frozenset({"topk", "sort", "max", "min", "mode", "median", "nanmedian", "kthvalue", "cummax", "cummin"})
_ANY_INTEGER = (
    _CASTS
    | (_RANKINGS - {"topk", "kthvalue"})
    | frozenset(
        "float double half bfloat16 bool "
        "add sub mul div true_divide truediv floor_divide floordiv remainder fmod mod neg abs sign square pow "
        "clamp clip clamp_min clamp_max minimum maximum where masked_fill "
        "eq ne lt le gt ge logical_and logical_or logical_not logical_xor isin "
        "bitwise_and bitwise_or bitwise_xor bitwise_not and or xor invert lshift rshift "
        "view view_as reshape expand expand_as permute transpose t swapaxes movedim squeeze unsqueeze "
        "flatten unflatten contiguous clone detach cat concat stack repeat roll flip getitem select narrow "
        "unbind split chunk sum mean prod amax amin argmax argmin any all cumsum cumprod diff count_nonzero triu tril "
        "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty size dim numel".split()
    )
)
"""What takes any integer."""


class Indices(NamedTuple):
    """Inputs, by their numbers."""

    shown: frozenset[int]
    """Those whose numbers are seen to become indices."""
    possible: frozenset[int]
    """These, and those that go where the graph does not show what becomes of them."""


def indices_of(graph: torch.fx.Graph, inputs: Mapping[torch.fx.Node, int]) -> Indices:
    """Which inputs of a graph hold what may become indices.

    Args:
        graph: what was traced.
        inputs: the inputs it is about, with their numbers.
    """
    made_of = {node: frozenset({number}) for node, number in inputs.items()}
    shown, hidden = frozenset[int](), frozenset[int]()
    for node in graph.nodes:
        given = {each: made_of[each] for each in node.all_input_nodes if each in made_of}
        if not given or node.op == "output":
            continue
        if _is_opaque(node):
            hidden = hidden.union(*given.values())
        else:
            shown = shown.union(*(given[each] for each in _taken_for_indices(node, given)))
        if _keeps_size_of_numbers(node, given):
            made_of[node] = frozenset[int]().union(*given.values())
    return Indices(shown, shown | hidden)


def _is_opaque(node: torch.fx.Node) -> bool:
    name = op_name(node)
    is_op = node.op.startswith("call") and not torch_compat.is_higher_order(node.target)
    return not is_op or ("::" in name and not name.startswith(TORCHS)) or writes_in_place(node)


def _taken_for_indices(node: torch.fx.Node, given: Collection[torch.fx.Node]) -> Collection[torch.fx.Node]:
    if node.target is operator.getitem:
        return set(given) - {node.args[0]}
    if takes_any_integer(op_name(node)):
        return ()
    return {each for each in given if is_integer(torch_compat.meta_value(each))}


def _keeps_size_of_numbers(node: torch.fx.Node, given: Collection[torch.fx.Node]) -> bool:
    """Whether larger numbers would make a larger number."""
    if node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
        return not (node.args[1] == 1 and ranks(op_name(node.args[0])))
    values = [torch_compat.meta_value(each) for each in given]
    return keeps_size(op_name(node), node.args, node.kwargs, values, torch_compat.meta_value(node))


def takes_any_integer(op: str) -> bool:
    """Whether an op takes any integer, and none for an index."""
    return _plain(op) in _ANY_INTEGER


def ranks(op: str) -> bool:
    """Whether the second result of an op are places in its argument, whatever numbers are there."""
    return _plain(op) in _RANKINGS


def keeps_size(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Any], made: Any) -> bool:
    """Whether an op makes larger numbers of larger ones: ``argsort`` and a ``clamp`` from both sides do not.

    Args:
        op: its name.
        args: what it is called with.
        kwargs: the same.
        given: the tensors among them that it is about.
        made: what it makes.
    """
    if isinstance(made, torch.Tensor) and made.dtype is torch.bool:
        return False
    name = _plain(op)
    if name in ("clamp", "clip"):
        return sum(isinstance(bound, int | float) for bound in (*args[1:], *kwargs.values())) < 2
    return not is_integer(made) or name in _CASTS or any(map(is_integer, given))


def is_integer(value: Any) -> bool:
    """Whether a value is a tensor of integers."""
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)


def _plain(name: str) -> str:
    """An op's name without namespace and overload.

    >>> _plain("aten::add.Tensor"), _plain("__and__"), _plain("getitem")
    ('add', 'and', 'getitem')
    """
    return name.rpartition("::")[2].partition(".")[0].strip("_")
