"""Which tokens may come next in the rows of a step, on the device.

Note [Masks behind the decoder]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The mask of a row follows from the token before it, and to compute masks takes the host about as long as a small model
takes for a step. But nothing needs them before the sampler. So a step with masks is two graphs: the model, then the
sampler; while the device is at the first, the host computes the masks and sends them. If the step was launched ahead of
the one before (Note [Looking ahead]), that is where the host waits for its tokens and commits them: the device has the
next model step already. They are on their way beside the model, too: Note [Copies beside steps]. A batch that asks for
no masks runs steps that know of none, or finds all tokens allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from piecegraph.llm.run.structured import fill_masks
from piecegraph.llm.run.upload import Upload

if TYPE_CHECKING:
    from piecegraph.llm.run.request import Request
    from piecegraph.llm.run.step import Work


class MaskBuffers:
    """A static table of bits on the device, one for each token of the vocabulary in each row.

    Args:
        max_seqs: rows of a step at most.
        vocab_size: tokens.
        device: where the model runs.
    """

    def __init__(self, max_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_seqs, -(-vocab_size // 32))
        self._device = device
        self._on_host = self._arrived = self._on_device = torch.empty(0, dtype=torch.int32)
        self._bytes_of_bits = torch.empty(0, dtype=torch.int64)
        self._guided: list[tuple[Request, int]] = []
        """Of the last step, with their rows."""
        self._written: set[int] = set()
        """Rows that do not allow everything."""
        self._upload = Upload(device)
        self.before: Callable[[], None] | None = None
        """What is called before masks are computed: it makes known what they follow from."""

    def prepare(self) -> None:
        """Have the memory: always the same."""
        if not len(self._on_device):
            # Not with inference mode's tensors: they are made in the middle of a step, and written to by others.
            with torch.inference_mode(False):
                is_cuda = self._device.type == "cuda"
                self._on_host = torch.full(self._shape, -1, dtype=torch.int32, pin_memory=is_cuda)
                self._on_device = torch.full(self._shape, -1, dtype=torch.int32, device=self._device)
                self._arrived = torch.empty_like(self._on_device) if is_cuda else self._on_host
                self._bytes_of_bits = bytes_of_bits(self._device)

    def keep_allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of tokens that may come in the rows of the step; minus infinity elsewhere."""
        self.prepare()
        return keep_allowed(logits, self._on_device[: len(logits)].view(torch.uint8), self._bytes_of_bits)

    def collect(self, works: Sequence[Work]) -> bool:
        """Look for guides in a step; whether there are any."""
        self._guided = [
            (work.request, row) for row, work in enumerate(works) if work.request.guide is not None and work.samples
        ]
        return bool(self._guided)

    def send(self) -> None:
        """Compute the masks of the step and send them, without waiting for the device."""
        if self._guided and self.before is not None:
            self.before()
        guides = [(request.guide, row) for request, row in self._guided if request.guide and not request.is_done]
        rows = {row for _, row in guides}
        changed = rows | self._written
        if not changed:
            return
        self._upload.wait()  # the last copy reads the memory that is written now
        self.prepare()
        if stale := self._written - rows:  # not the others, which are written anyway: a row is long
            self._on_host[list(stale)] = -1
        if guides:
            fill_masks(guides, self._on_host.numpy())
        self._written = rows
        end = max(changed) + 1
        with self._upload.sending():
            if self._arrived is not self._on_host:
                self._arrived[:end].copy_(self._on_host[:end], non_blocking=True)
        self._on_device[:end].copy_(self._arrived[:end])
        self._upload.end_use()


def bytes_of_bits(device: torch.device) -> torch.Tensor:
    """int64 [256]: for each byte eight bytes, 1 for each bit that is set, from the lowest on."""
    bits = torch.arange(256).unsqueeze(-1) >> torch.arange(8) & 1
    return bits.to(torch.uint8).view(torch.int64).flatten().to(device)


def keep_allowed(logits: torch.Tensor, masks: torch.Tensor, bytes_of_bits: torch.Tensor) -> torch.Tensor:
    """The logits of tokens that may come; minus infinity elsewhere.

    A vocabulary is long, so it is gone over twice and not once for each step of taking bits apart.

    Args:
        logits: [rows, vocabulary].
        masks: uint8 [rows, vocabulary / 8], bits from the lowest on.
        bytes_of_bits: see there.
    """
    is_allowed = bytes_of_bits.index_select(0, masks.flatten().int()).view(torch.bool).view(len(masks), -1)
    # Where the head is wider than the vocabulary, nothing is behind it; where the table is, it is padding.
    missing = logits.shape[-1] - is_allowed.shape[-1]
    is_allowed = F.pad(is_allowed, (0, missing)) if missing > 0 else is_allowed[:, : logits.shape[-1]]
    return torch.where(is_allowed, logits, -math.inf)
