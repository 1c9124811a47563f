"""What a plan has read outside the call: globals, closures, attributes of the module and its submodules.

A trace takes such values for constants. So they are looked at again before every call, and a call that finds others is
of another kind. A large model reads hundreds of attributes of its submodules, which would take longer than the replay:
these take turns, a few at every call.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import re
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch

from piecegraph.graph.signature import is_constant

_AT_A_TIME = 8
_FROM_MODULE = re.compile(
    r"(?P<before>len\(|)(?P<module>.*\._modules\['[^']*'\]|L\['\w+'\](\.__self__)?)"
    r"\.(?P<attribute>(?!__)[A-Za-z_]\w*)(?P<after>.*)"
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
        known = [(name, value) for name in constants if is_constant(value := self._try(name))]
        held = [(name, value) for name in tensors if isinstance(value := self._try(name), torch.Tensor)]
        self.names = tuple(name for name, _ in (*known, *held))
        near = [pair for pair in (*known, *held) if "._modules[" not in pair[0]]
        far = [pair for pair in (*known, *held) if "._modules[" in pair[0]]
        self._all = self._compile([*near, *far])
        turns = [far[i : i + _AT_A_TIME] for i in range(0, len(far), _AT_A_TIME)]
        self._turns = itertools.cycle([self._compile([*near, *turn]) for turn in turns or [[]]])
        self._is_doubtful = False
        """Whether one of them has changed: then all are looked at."""
        self._is_late = False
        self._num_turns = len(turns)

    def hold(self) -> bool:
        """Whether they are what they were."""
        code, expected = self._all if self._is_doubtful else next(self._turns)
        try:
            values = eval(code, self._scopes)
        except (AttributeError, LookupError, TypeError, NameError):  # one of them is gone
            return self._doubt()
        if all(map(operator.is_, values, expected)) or all(map(_is_same, values, expected)):
            self._is_doubtful = False
            return True
        return self._doubt()

    def _doubt(self) -> bool:
        self._is_late = self._is_late or (not self._is_doubtful and self._num_turns > 1)
        self._is_doubtful = True
        return False

    def take_late(self) -> int:
        """How many calls may have gone by since a value changed that had to wait for its turn; asked once."""
        is_late, self._is_late = self._is_late, False
        return self._num_turns - 1 if is_late else 0

    def _compile(self, pairs: Sequence[tuple[str, Any]]) -> tuple[CodeType, tuple[Any, ...]]:
        expressions = "".join(f"{self._shorten(name)}, " for name, _ in pairs)
        return compile(f"({expressions})", "<outside the call>", "eval"), tuple(value for _, value in pairs)

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


def _is_same(now: Any, then: Any) -> bool:
    if isinstance(then, torch.Tensor) or type(now) is not type(then):
        return now is then
    return bool(now == then)
