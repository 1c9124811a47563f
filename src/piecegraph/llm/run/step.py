"""The nouns of one step: which tokens of which requests are computed together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from piecegraph.llm.run.request import Request
from piecegraph.llm.specs import StepKind

MAX_PROMPTS = 32
"""Sequences of a step with more than one token, where there are many sequences. Kernels for prompts have work to do for
each that there could be.
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
    preempted: tuple[Request, ...] = ()
    """Requests that had to give up their blocks for this step, and will compute their tokens again."""

    @property
    def num_seqs(self) -> int:
        return len(self.works)

    @property
    def num_decodes(self) -> int:
        """How many sequences come first with one token each."""
        return next((i for i, work in enumerate(self.works) if work.num_tokens != 1), len(self.works))


@dataclass(frozen=True, slots=True)
class Bucket:
    """The size a step runs at, padding included."""

    num_tokens: int
    num_seqs: int
    kind: StepKind = "mixed"
    """``"decode"``: ``num_tokens == num_seqs``, and serves decode steps alone."""

    @property
    def separates_prompts(self) -> bool:
        """Whether there may be so many sequences that those with one token are told apart."""
        return self.kind == "mixed" and self.num_seqs > MAX_PROMPTS

    def __post_init__(self) -> None:
        assert min(self.num_seqs, self.num_tokens) > 0, self
        assert self.kind == "mixed" or self.num_tokens == self.num_seqs, self
