"""What a plan has read outside the call: globals, closures, attributes of the module.

A trace takes such values for constants. So they are looked at again before every call, and a call that finds others is
of another kind.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Sequence
from typing import Any

import torch

from piecegraph.graph.signature import is_constant

_FROM_MODULE = re.compile(
    r"(?P<before>len\(|)(?P<module>.*\._modules\['[^']*'\])\.(?P<attribute>[A-Za-z]\w*)(?P<after>.*)"
)


class OutsideValues:
    """Numbers, strings and tensors outside the call, as they were when it was planned.

    Args:
        tensors: expressions for tensors that are neither parameters nor buffers: another tensor is another value.
        constants: expressions for what is compared by type and value.
        scopes: what the expressions are evaluated in.
    """

    def __init__(self, tensors: Sequence[str], constants: Sequence[str], scopes: dict[str, Any]) -> None:
        self._scopes = dict(scopes)
        known = {name: value for name in constants if is_constant(value := self._try(name))}
        held = {name: value for name in tensors if isinstance(value := self._try(name), torch.Tensor)}
        self.names = (*known, *held)
        shortened = "".join(f"{self._shorten(name)}, " for name in self.names)
        self._code = compile(f"({shortened})", "<outside the call>", "eval")
        self._values = (*known.values(), *held.values())
        self._num_constants = len(known)

    def hold(self) -> bool:
        """Whether all of them are what they were."""
        try:
            values = eval(self._code, self._scopes)
        except (AttributeError, LookupError, TypeError, NameError):  # one of them is gone
            return False
        if all(map(operator.is_, values, self._values)):
            return True
        number = self._num_constants
        now, then = values[:number], self._values[:number]
        return (
            all(map(operator.is_, values[number:], self._values[number:]))
            and list(map(type, now)) == list(map(type, then))
            and bool(now == then)
        )

    def _try(self, name: str) -> Any:
        with contextlib.suppress(Exception):  # a name that only Dynamo can read
            return eval(name, self._scopes)
        return self

    def _shorten(self, name: str) -> str:
        """The expression from the nearest module on, which is another one only if torch tells so."""
        found = _FROM_MODULE.fullmatch(name)
        module = self._try(found["module"]) if found else None
        if not found or not isinstance(module, torch.nn.Module):
            return name
        is_own = found["attribute"] in module.__dict__
        owner = f"{'own' if is_own else 'all'}{id(module)}"
        self._scopes[owner] = module.__dict__ if is_own else module
        attribute = f"[{found['attribute']!r}]" if is_own else f".{found['attribute']}"
        return f"{found['before']}{owner}{attribute}{found['after']}"
