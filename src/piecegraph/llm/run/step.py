"""The nouns of one step: which tokens of which requests are computed together; and how many steps there were."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from piecegraph.llm.run.request import Request
from piecegraph.llm.specs import SHORT_CONTEXT, StepKind

MAX_PROMPTS = 32
"""Sequences of a step with more than one token, where there are many sequences. Kernels for prompts have work to do for
each that there could be.
"""
LONG_CONTEXT = 1024
"""Tokens of a sequence that decodes from which on it is kept apart from prompts, if there are few sequences, too. A
kernel for prompts goes through all of them with one program for each head of keys: beside one sequence of 32,768 tokens
a step of Qwen3-0.6B with 8192 tokens of a prompt took 38.5 ms on an H200, alone 24.1.
"""


class Work(NamedTuple):
    """The tokens of one request in a step. A named tuple, because one is made for each sequence of each step."""

    request: Request
    start: int
    """Position of the first token; all before it are in the cache."""
    num_tokens: int
    samples: bool
    """Whether the last token is the newest, so that the next one is chosen from its logits."""

    @property
    def is_first(self) -> bool:
        """Whether the sequence begins here: a recurrent state starts from zero."""
        return self.start == 0

    @property
    def new_rows(self) -> range:
        """Rows that nothing was told about yet: all, except after a preemption. Valid before ``commit``."""
        return range(min(max(0, self.request.num_delivered - self.start), self.num_tokens), self.num_tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What runs next. Work i is sequence i of the batch; a request keeps its place from step to step where it can."""

    works: tuple[Work, ...]
    num_tokens: int
    kind: StepKind
    """``"decode"``: one token for each sequence, none of them a sequence's first."""
    sources: range | tuple[int, ...] | None = None
    """Behind a step that is not committed yet: for each work, which work of that step chooses the token it computes; -1
    if its tokens are known. A range: the works of that step, in their order.
    """
    preempted: tuple[Request, ...] = ()
    """Requests that had to give up their blocks for this step, and will compute their tokens again."""

    @property
    def num_seqs(self) -> int:
        return len(self.works)

    @property
    def num_decodes(self) -> int:
        """How many sequences come first with one token each."""
        return next((i for i, work in enumerate(self.works) if work.num_tokens != 1), len(self.works))

    @property
    def has_long_decodes(self) -> bool:
        """Whether a sequence with one token has so many before it that kernels for prompts are not for it."""
        return any(work.num_tokens == 1 and work.start >= LONG_CONTEXT for work in self.works)

    @property
    def is_short(self) -> bool:
        """Whether no sequence has more than SHORT_CONTEXT tokens, those of this step with them."""
        return all(work.start + work.num_tokens <= SHORT_CONTEXT for work in self.works)


FEW_MIXED = 16
"""Tokens of the shortest steps with prompts, which may run the pieces for few rows. They keep no sequence apart:
kernels that begin early follow each other on one stream.
"""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The size a step runs at, padding included."""

    num_tokens: int
    num_seqs: int
    kind: StepKind = "mixed"
    """``"decode"``: ``num_tokens == num_seqs``, and serves decode steps alone."""
    separates_prompts: bool = False
    """Of a mixed step: whether the sequences with one token are told apart. See Note [Two kinds of rows]."""
    is_short: bool = False
    """Of a step of decoding: whether it serves none but those with sequences of at most SHORT_CONTEXT tokens."""

    def has_few_rows(self, most: int) -> bool:
        """Whether it runs the pieces for few rows: see Note [Pieces of their own for decoding].

        Of prompts only the shortest do, so that the self check sees the pieces of all other steps, too.

        Args:
            most: rows of a step of decoding that does.
        """
        return self.num_tokens <= (most if self.kind == "decode" else min(most, FEW_MIXED))

    def __post_init__(self) -> None:
        assert min(self.num_seqs, self.num_tokens) > 0, self
        assert not self.is_short if self.kind == "mixed" else self.num_tokens == self.num_seqs, self


@dataclass(slots=True)
class KindCounts:
    """Of one kind of steps."""

    num_steps: int = 0
    num_replays: int = 0
    """Steps that were replayed from a tape."""
    num_larger: int = 0
    """Of these, such as ran in a larger size, or with a dearer sampler, than the one that was not recorded yet."""
    num_tokens: int = 0
    num_padding: int = 0
    """Rows that belong to no token."""


@dataclass(slots=True)
class StepCounts:
    """Of all steps."""

    kinds: dict[StepKind, KindCounts] = field(default_factory=lambda: {"decode": KindCounts(), "mixed": KindCounts()})

    @property
    def num_steps(self) -> int:
        return sum(kind.num_steps for kind in self.kinds.values())

    @property
    def num_replays(self) -> int:
        return sum(kind.num_replays for kind in self.kinds.values())

    def add(self, kind: StepKind, num_tokens: int, num_rows: int, *, is_replayed: bool, is_larger: bool) -> None:
        """Count a step of so many tokens that ran in so many rows."""
        counts = self.kinds[kind]
        counts.num_steps += 1
        counts.num_replays += is_replayed
        counts.num_larger += is_larger
        counts.num_tokens += num_tokens
        counts.num_padding += num_rows - num_tokens
