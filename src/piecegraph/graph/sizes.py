"""Symbolic sizes: from the sizes of a call to the value of every expression in the graph.

Note [Dropped guards]
~~~~~~~~~~~~~~~~~~~~~
Tracing and compiling take decisions that hold for some sizes only (``if x.shape[0] > 16``). Dynamo would check them
at every call. We check them once for each new size, at that size and not at the bucket it is padded to: a size that
violates one runs eagerly, with the line that took the decision as the reason. A decision on anything else that may
change, which is neither a size nor data that is read while the graph runs, could be checked by nobody: such a function
is not traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.errors import TraceError
from piecegraph.graph.fx_nodes import source_line
from piecegraph.graph.signature import Signature

SizeGuards = tuple[tuple[sympy.Basic, str], ...]
"""Conditions on sizes, each with the line that relies on it."""


@dataclass(frozen=True)
class SizeRules:
    """Knows which size each symbol is, and for which sizes the graph is valid."""

    symbols: Mapping[sympy.Symbol, int]
    """The index of the size each symbol stands for."""
    fake_mode: Any
    kept_guards: SizeGuards = ()
    """Of a trace that was made in another process, and of its compiled pieces."""

    @property
    def guards(self) -> SizeGuards:
        """See Note [Dropped guards]. There are more once pieces were compiled."""
        return (*self.kept_guards, *torch_compat.size_guards(self.fake_mode))

    @staticmethod
    def learn(
        signature: Signature, traced_sizes: Mapping[tuple[int, int], Any], graph: torch.fx.Graph, fake_mode: Any
    ) -> SizeRules:
        """Find the symbol of each size. ``traced_sizes`` says what it became in the graph, by tensor and dimension."""
        symbols: dict[sympy.Symbol, int] = {}
        found: list[tuple[str, sympy.Expr]] = []
        for index, leaf in enumerate(signature.tensors):
            for dim, size in leaf.dynamic:
                if (index, dim) not in traced_sizes:
                    continue
                value = traced_sizes[index, dim]
                found.append((f"{leaf.name}.shape[{dim}]", torch_compat.size_expr(value)))
                symbol = torch_compat.original_symbol(value)
                if symbol is not None:
                    symbols[symbol] = size
        for name, expr in found:  # equal sizes are written with one of their symbols, not always their own
            if expr.free_symbols - symbols.keys():
                raise TraceError(
                    "PG205", f"{name} cannot vary freely", why=f"the model ties it to {expr}", hint="make it static"
                )
        sizes = {torch_compat.original_symbol(value) for value in traced_sizes.values()}  # also those that are fixed
        for symbol, place in _symbols_in_use(graph, fake_mode):
            if symbol not in sizes and not torch_compat.is_unbacked(symbol):
                why = f"{symbol} is the size of no argument, and whether it is as it was would not be looked at"
                raise TraceError("PG201", "a number decides what runs that may change", where=place, why=why)
        return SizeRules(symbols, fake_mode)

    def values(self, sizes: tuple[int, ...]) -> dict[sympy.Symbol, sympy.Integer]:
        """Every symbol's value in a call of these sizes."""
        return {symbol: sympy.Integer(sizes[size]) for symbol, size in self.symbols.items()}

    def evaluate(self, expr: sympy.Expr, sizes: tuple[int, ...]) -> int:
        """The value of a size expression in a call of these sizes."""
        return int(expr.xreplace(self.values(sizes)))

    def violated(self, sizes: tuple[int, ...]) -> str | None:
        """The condition that these sizes violate, with its line. See Note [Dropped guards]."""
        values = self.values(sizes)
        for condition, line in self.guards:
            # A condition on data (an unbacked symbol) is an assertion in the graph itself.
            if condition.free_symbols <= values.keys() and condition.xreplace(values) == sympy.false:
                return f"the plan holds only where {condition}" + (f", decided at `{line}`" if line else "")
        return None


def _symbols_in_use(graph: torch.fx.Graph, fake_mode: Any) -> Iterator[tuple[sympy.Symbol, str]]:
    """The symbols that the graph computes with or that decided what it is, with the lines."""
    for node in graph.nodes:
        for symbol in torch_compat.free_symbols(torch_compat.meta_value(node)):
            yield symbol, str(source_line(node) or "")
    for condition, line in torch_compat.size_guards(fake_mode):
        for symbol in condition.free_symbols:
            yield symbol, line
