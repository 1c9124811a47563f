"""The nouns of a model's memory: what each layer keeps for a token, read from the traced graph, and where a batch's
tokens belong in it; and what kernels say of themselves.

Note [Padding of a batch]
~~~~~~~~~~~~~~~~~~~~~~~~~
A batch runs at the size of its bucket: ``num_tokens`` rows and ``num_seqs`` sequences, some of them padding. A padded
token writes its key and value to block 0, which belongs to no sequence and is never read. A padded sequence has length
0 and no queries: its ``query_starts`` entry is the number of real tokens. Attention writes zeros to the rows of padded
tokens, so that nothing downstream (routing above all) ever sees what happened to lie there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

StepKind = Literal["decode", "mixed"]
"""``decode``: one token of every sequence, none of them a sequence's first; ``mixed``: any number of tokens of each."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """It can."""

    note: str = ""
    """What is worth knowing of how."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """It cannot."""

    reason: str


Support = Accepted | Rejected
"""Whether something can do a job, and if not, why: the reason is shown to the user."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a layer can see; layers of equal reach share a block table."""

    window: int = 0
    """As :attr:`AttentionLayer.window`."""
    chunk: int = 0
    """As :attr:`AttentionLayer.chunk`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One call of attention in the model's forward; the call site is its identity, not the layer number."""

    index: int
    group: int
    """Layers that can see equally far back share a block table; this is its number."""
    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    scale: float
    window: int = 0
    """Key j is visible to query i if ``i - window < j <= i``; 0 for no limit."""
    chunk: int = 0
    """Key j is visible to query i if both lie in the same chunk of this length and ``j <= i``; 0 for no limit."""
    softcap: float = 0.0
    """Scores become ``softcap * tanh(score / softcap)``; 0 for none."""
    has_sinks: bool = False
    """Whether a learned score per head takes part in the softmax without a value."""

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """(how many, width) of a token's queries, keys and values."""
        keys = self.num_kv_heads
        return (self.num_heads, self.key_width), (keys, self.key_width), (keys, self.value_width)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayer:
    """Multi-head latent attention: the cache keeps one compressed vector and one rotated key for all heads."""

    index: int
    group: int
    num_heads: int
    latent_width: int
    rope_width: int
    nope_width: int
    """The part of each query head that meets the latent through the up-projection."""
    value_width: int
    scale: float


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Sequences of a batch one behind the other, as :class:`AttentionBatch` describes them."""

    starts: torch.Tensor
    """int32 [sequences + 1]."""
    lens: torch.Tensor
    """int32 [sequences]."""
    table: torch.Tensor
    """int32 [sequences, max_blocks]."""


SHORT_CONTEXT = 192
"""Tokens of the longest sequence of a step of decoding up to which a few sequences have fewer programs of attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Where the tokens of a batch belong, for one group of layers.

    The tensors live on the device at fixed addresses, so that a captured kernel finds every batch in them. The numbers
    are upper bounds that the bucket fixes: kernels may size their grid by them, and nothing else.
    """

    query_starts: torch.Tensor
    """int32 [num_seqs + 1]: the tokens of sequence i are rows ``query_starts[i]`` to ``query_starts[i + 1]``."""
    seq_lens: torch.Tensor
    """int32 [num_seqs]: tokens of the sequence in the cache once this batch is written; the last are the batch's."""
    block_table: torch.Tensor
    """int32 [num_seqs, max_blocks]: the blocks of each sequence in order."""
    slots: torch.Tensor
    """int64 [num_tokens]: block * block_size + offset of each token."""
    block_size: int
    max_query_len: int
    """1: every real sequence has exactly one query (a decode batch, num_tokens == num_seqs)."""
    max_seq_len: int
    prompts: SequenceRows | None = None
    """The sequences behind those that come first with one query each (row i is sequence i), of which there are as many
    as its first entry of ``starts`` says; None in a bucket of few sequences, all of which are taken for prompts.
    """
    host: Any = None
    """What the kernel's ``read_batch`` made of it, for this step; None if there is none."""

    @property
    def rows(self) -> SequenceRows:
        """All its sequences."""
        return SequenceRows(self.query_starts, self.seq_lens, self.block_table)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvLayer:
    """One call of a causal convolution over time. For each sequence its last inputs are kept."""

    index: int
    channels: int
    width: int
    """Of the kernel; one input less than that is kept."""
    activation: str
    """What is applied to the result; empty for nothing."""
    has_bias: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaLayer:
    """One call of the gated delta rule. For each sequence and head a matrix from keys to values is kept, in float32."""

    index: int
    num_heads: int
    key_width: int
    value_width: int
    normalises: bool
    """Whether queries and keys are made of length one."""
    dtype: torch.dtype
    """Of queries, keys and values."""
    decay_dtype: torch.dtype
    beta_dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class StatefulLayer:
    """One call of a module that keeps a state of its own kind, which only the module itself knows how to use."""

    index: int
    path: str
    """Where the module is in the decoder."""
    width: int
    dtype: torch.dtype


StateLayer = ConvLayer | DeltaLayer | StatefulLayer
"""What a call site keeps for a sequence, whatever the sequence's length. Numbered together, by call site."""


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence in a batch."""

    start: int
    end: int
    is_first: bool
    """Whether the sequence starts here, with nothing remembered (also when it starts again after it was preempted)."""
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBatch:
    """Where the sequences of a batch keep their states. Slot 0 belongs to no sequence; padded sequences write there.

    The tensors live on the device at fixed addresses, like those of :class:`AttentionBatch`.
    """

    query_starts: torch.Tensor
    """int32 [num_seqs + 1]: as :attr:`AttentionBatch.query_starts`."""
    seq_lens: torch.Tensor
    """int32 [num_seqs]: tokens of the sequence up to the last of this batch; 0 for padding."""
    state_slots: torch.Tensor
    """int64 [num_seqs]: 0 for padding."""
    spans: tuple[Span, ...]
    """The same for the host: the real sequences, one behind the other from row 0 on. Not read by what is captured."""
    max_query_len: int
    """1: every real sequence has exactly one token, which is the row of its number (num_tokens == num_seqs)."""
