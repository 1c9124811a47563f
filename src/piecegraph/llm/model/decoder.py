"""A compiled decoder in two parts: up to the last op that brings tokens together, and what is behind it.

Note [Rows of the last piece]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Sequences lie one behind the other in one row of tokens, and only cut ops can tell them apart. So a piece that brought
tokens together would bring sequences together, and the model could not be served at all: every piece computes each
token by itself. Behind the last cut that is of use: what is computed there for a token is read by nobody but the head.
So the last piece (the better part of a layer) is run on the rows whose logits are asked for, one of each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.graph.program import Program, RunStep, run_plainly
from piecegraph.graph.sources import FromCall, Weight
from piecegraph.graph.split import Segment
from piecegraph.graph.tracer import Traced
from piecegraph.tape.body import TracedBody
from piecegraph.tape.library import TapeWatch
from piecegraph.tape.tape import WatchedWeight


@dataclass(frozen=True)
class Decoder:
    """Hidden states of tokens; see Note [Rows of the last piece]."""

    body: TracedBody
    tail: TracedBody | None = None
    """The last piece; None if it is part of the body."""
    token_dims: tuple[int | None, ...] = (0,)
    """Of each value that the body gives, which dimension is that of the tokens; None if it has none."""
    why_whole: str = ""
    """Why there is no tail."""
    watch: TapeWatch | None = None
    """Is told what is recorded of it."""

    def run(
        self, inputs: Sequence[torch.Tensor], num_tokens: int, run_step: RunStep = run_plainly
    ) -> list[torch.Tensor]:
        """All that brings tokens together; what comes out is for :meth:`finish`."""
        return self.body.run(inputs, (num_tokens,), run_step)

    def select(self, values: Sequence[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
        """What comes out of :meth:`run`, for some of its tokens."""
        return [
            value if dim is None else value.index_select(dim, rows)
            for value, dim in zip(values, self.token_dims, strict=True)
        ]

    def finish(self, values: Sequence[torch.Tensor], num_tokens: int, run_step: RunStep = run_plainly) -> torch.Tensor:
        """The hidden states of all tokens that the values are of."""
        hidden: torch.Tensor = values[0] if self.tail is None else self.tail.run(values, (num_tokens,), run_step)[0]
        return hidden

    def weights(self) -> list[WatchedWeight]:
        """The weights that graphs read by address."""
        return [weight for part in (self.body, self.tail) if part is not None for weight in part.weights()]

    def violated(self, num_tokens: int) -> str | None:
        """Why steps of a size cannot be run, or None."""
        return self.body.violated((num_tokens,))


def make_decoder(
    traced: Traced, segments: Sequence[Segment], program: Program, watch: TapeWatch | None = None
) -> Decoder:
    """Take the last piece apart from the others, if it can be run on some rows."""

    def body_of(part: Program) -> TracedBody:
        return TracedBody(traced, part, lambda name, recorded: recorded)

    segment = segments[-1]
    is_behind_cut = len(segments) > 1 and segment.verdict is None
    if not is_behind_cut or not set(traced.output_nodes) <= set(segment.outputs):
        why = "the hidden states do not come out of a piece behind a cut"
        return Decoder(body_of(program), why_whole=why, watch=watch)
    tokens = torch_compat.size_expr(torch_compat.meta_value(_first_input(traced)).shape[0])
    passed = {
        slot.index: node
        for node, slot in zip(segment.inputs, program.steps[-1].args, strict=True)
        if isinstance(node, torch.fx.Node) and not isinstance(traced.inputs.get(node), Weight)
    }
    if not all(_has_rows_of(tokens, node) for node in (*passed.values(), *segment.outputs)):
        why = "not all that goes into it, or comes out, is one row behind the other for each token"
        return Decoder(body_of(program), why_whole=why, watch=watch)
    body, tail = _part(program, list(passed))
    return Decoder(body_of(body), body_of(tail), tuple(map(_dim_of_tokens, passed.values())), watch=watch)


def _part(program: Program, slots: Sequence[int]) -> tuple[Program, Program]:
    """All steps but the last, and the last, which is called with what it reads of the others."""
    weights = {slot: source for slot, source in program.inputs.items() if isinstance(source, Weight)}
    calls = {slot: FromCall(index) for index, slot in enumerate(slots)}
    body = replace(program, steps=program.steps[:-1], outputs=tuple(slots), _at={})
    return body, replace(program, inputs={**weights, **calls}, steps=program.steps[-1:], _at={})


def _first_input(traced: Traced) -> torch.fx.Node:
    return next(node for node, source in traced.inputs.items() if source == FromCall(0))


def _has_rows_of(tokens: sympy.Expr, node: torch.fx.Node) -> bool:
    """Whether a value is a tensor with one row for each token, or of a size that has nothing to do with them.

    It must be laid out as the rows will be: compiled code relies on strides.
    """
    value = torch_compat.meta_value(node)
    if not isinstance(value, torch.Tensor):
        return False
    stride, expected = sympy.Integer(1), []
    for size in reversed(value.shape):
        expected.append(stride)
        stride *= torch_compat.size_expr(size)
    varying = [torch_compat.size_expr(size) for size in value.shape if isinstance(size, torch.SymInt)]
    return varying in ([], [tokens]) and [*map(torch_compat.size_expr, reversed(value.stride()))] == expected


def _dim_of_tokens(node: torch.fx.Node) -> int | None:
    shape = torch_compat.meta_value(node).shape
    return next((dim for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)), None)
