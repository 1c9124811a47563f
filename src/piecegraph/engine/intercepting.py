"""What a user calls to observe or replace an op wherever it runs: :func:`intercept`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piecegraph.base.text import count_of
from piecegraph.engine.eager_interception import ThreadInterceptions
from piecegraph.graph import interception
from piecegraph.graph.interception import Interception


class InterceptHandle:
    """Ends an interception: by :meth:`remove`, or at the end of a ``with`` block."""

    def __init__(self, added: Interception) -> None:
        self._interception = added
        self._thread = ThreadInterceptions.here()
        self._is_active = True
        interception.registry.add(added)
        self._thread.add(added)

    @property
    def num_calls(self) -> int:
        """How often the op was intercepted so far."""
        return self._interception.num_calls

    def remove(self) -> None:
        """Let the op run as before. Compiled functions go back to the graphs they had. May be called twice."""
        if self._is_active:
            self._is_active = False
            interception.registry.discard(self._interception)
            self._thread.discard(self._interception)

    def __enter__(self) -> InterceptHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        places = ", ".join((*_compiled_places(self._interception), "eager code")) if self._is_active else "removed"
        calls = "1 call" if self.num_calls == 1 else f"{self.num_calls} calls"
        return f"<piecegraph.{self._interception}: {places}; {calls}>"


def intercept(
    op: Any,
    *,
    before: Callable[..., Any] | None = None,
    replace: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
    module: str | None = None,
) -> InterceptHandle:
    """Observe or replace an op: in eager code of this thread, and in everything compiled with piecegraph.

    A compiled function is cut at the op, so that the callbacks run between graphs, at every call, on the tensors of
    that call. Only what the cuts change is compiled and recorded again; a function without the op is not touched.
    Once the interception is removed, the function goes on with the graphs it had before.

    The op is matched as the code calls it. ``F.linear`` is one op to a compiled function and in eager code; the
    ``aten::addmm`` that it is made of is seen in eager code only. What a custom op calls belongs to the custom op.

    Tensors given to a callback may be memory of a graph, which the next call overwrites: clone what you keep. Inside a
    callback nothing is intercepted, so ``replace`` may call the op itself. Several interceptions of one op wrap each
    other, the last one outermost; a ``replace`` takes the place of those inside it, too.

    A :class:`piecegraph.LLM` is cut in the same way: in its decoder, and in its head. Its steps then run at their own
    size, without padding, and no step is one graph.

    Not covered: what ``torch.compile`` fused, and eager code of other threads. Ops inside code joined by
    ``fuse_linears`` are seen as they are after joining; an ``LLM`` joins linears unless it is told not to.

    Args:
        op: ``"ns::op"``, an op or overload of ``torch.ops``, a custom op, or a function such as ``F.linear``.
        before: called with the op's arguments. Returns None, or other arguments as ``(args, kwargs)``.
        replace: called with the arguments in the op's place; returns the result.
        after: called with the result and the arguments. Returns None, or another result.
        module: only calls made by modules whose path fits this pattern (``"layers.*.mlp"``), or made inside of them;
            it may begin at any part of a path.

    Returns:
        A handle with ``remove()`` and ``num_calls``, which is a context manager, too.

    Example:
        >>> import torch
        >>> with intercept("aten::relu", after=lambda result, x: result + 1) as handle:
        ...     torch.relu(torch.tensor([-1.0, 2.0]))
        tensor([1., 3.])
        >>> handle.num_calls, torch.relu(torch.tensor([-1.0, 2.0]))
        (1, tensor([0., 2.]))
    """
    return InterceptHandle(Interception(op, before, replace, after, module))


def _compiled_places(added: Interception) -> list[str]:
    counted = sorted((each.name, each.num_places(added)) for each in interception.registry.compiled)
    return [f"{count_of(number, 'cut')} in {name}" for name, number in counted if number]
