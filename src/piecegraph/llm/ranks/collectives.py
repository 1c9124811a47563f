"""What is sent between ranks while a model runs: one op, in place, that a trace names its group by a label in.

On a GPU it is part of compiled pieces and is captured with them; gloo's runs on the host, so it is a cut there.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import distributed

from piecegraph.graph.cut_rules import COLLECTIVES

_groups: dict[str, Any] = {}
"""Process groups by their labels, which are the same in every process and at every start."""


class SmallSums(Protocol):
    """Another way to add up small tensors."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether it adds up such a tensor: the same on all ranks."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add up in place."""


_one_shots: dict[str, SmallSums] = {}
"""By the labels of groups that have one."""

_LIBRARY = torch.library.Library(COLLECTIVES, "DEF")
_LIBRARY.define("all_reduce(Tensor(a!) tensor, str group) -> ()")
ALL_REDUCE = torch.ops.piecegraph_ranks.all_reduce.default


def name_group(label: str, group: Any) -> None:
    """Let ops find a process group by its label."""
    _groups[label] = group


def use_one_shot(label: str, sums: SmallSums | None) -> None:
    """Add up small tensors of a group another way, or, with None, no more."""
    if sums is None:
        _one_shots.pop(label, None)
    else:
        _one_shots[label] = sums


def sum_over_ranks(group: str, module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """A hook behind a module whose result is a summand. Its result is nobody else's, so it is written over."""
    torch.ops.piecegraph_ranks.all_reduce(output, group)
    return output


def _all_reduce(tensor: torch.Tensor, group: str) -> None:
    sums = _one_shots.get(group)
    if sums is not None and sums.takes(tensor):
        sums.all_reduce(tensor)
    else:
        distributed.all_reduce(tensor, group=_groups[group])


def _no_result(tensor: torch.Tensor, group: str) -> None:
    """What tracing sees."""


_LIBRARY.impl("all_reduce", _all_reduce, "CompositeExplicitAutograd")
torch.library.register_fake(f"{COLLECTIVES}::all_reduce", _no_result, lib=_LIBRARY)
