"""What a plan has read outside the call: globals, closures, attributes of the module.

A trace takes such values for constants. So they are looked at again before every call, and a call that finds others is
of another kind.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import torch

from piecegraph.graph.signature import is_constant


class OutsideValues:
    """Numbers, strings and tensors outside the call, as they were when it was planned.

    Args:
        tensors: expressions for tensors that are neither parameters nor buffers: another tensor is another value.
        constants: expressions for what is compared by type and value.
        scopes: what the expressions are evaluated in.
    """

    def __init__(self, tensors: Sequence[str], constants: Sequence[str], scopes: dict[str, Any]) -> None:
        self._scopes = scopes
        known = {name: value for name in constants if is_constant(value := self._try(name))}
        held = {name: value for name in tensors if isinstance(value := self._try(name), torch.Tensor)}
        self.names = (*known, *held)
        self._code = compile(f"({''.join(f'{name}, ' for name in self.names)})", "<outside the call>", "eval")
        self._constants, self._tensors = tuple(known.values()), tuple(held.values())
        self._types = tuple(map(type, self._constants))

    def hold(self) -> bool:
        """Whether all of them are what they were."""
        try:
            values = eval(self._code, self._scopes)
        except (AttributeError, LookupError, TypeError, NameError):  # one of them is gone
            return False
        constants = values[: len(self._constants)]
        return (
            constants == self._constants
            and tuple(map(type, constants)) == self._types
            and all(map(operator.is_, values[len(constants) :], self._tensors))
        )

    def _try(self, name: str) -> Any:
        with contextlib.suppress(Exception):  # a name that only Dynamo can read
            return eval(name, self._scopes)
        return self
