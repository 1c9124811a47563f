"""Which tokens may come next in the rows of a step, on the device.

Note [Masks behind the decoder]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The mask of a row follows from the token before it, and to compute masks takes the host about as long as a small model
takes for a step. But nothing needs them before the sampler. So a step with masks is two graphs: the model, then the
sampler; while the device is at the first, the host computes the masks and sends them. If the step was launched ahead of
the one before (Note [Looking ahead]), that is where the host waits for its tokens and commits them: the device has the
next model step already. A batch that asks for no masks runs steps that know of none, or finds all tokens allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from piecegraph.llm.run.structured import fill_masks

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
        self._on_host = self._on_device = torch.empty(0, dtype=torch.int32)
        self._guided: list[tuple[Request, int]] = []
        """Of the last step, with their rows."""
        self._written: set[int] = set()
        """Rows that do not allow everything."""
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        self.before: Callable[[], None] | None = None
        """What is called before masks are computed: it makes known what they follow from."""

    def views(self, num_seqs: int) -> torch.Tensor:
        """uint8 [rows, tokens / 8]: bits from the lowest on. Always at the same address."""
        if not len(self._on_device):
            # Not with inference mode's tensors: they are made in the middle of a step, and written to by others.
            with torch.inference_mode(False):
                is_cuda = self._device.type == "cuda"
                self._on_host = torch.full(self._shape, -1, dtype=torch.int32, pin_memory=is_cuda)
                self._on_device = torch.full(self._shape, -1, dtype=torch.int32, device=self._device)
        return self._on_device[:num_seqs].view(torch.uint8)

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
        if self._sent is not None:
            self._sent.synchronize()  # the last copy reads the memory that is written now
        self.views(1)
        self._on_host[list(self._written)] = -1
        if guides:
            fill_masks(guides, self._on_host.numpy())
        self._written = rows
        end = max(changed) + 1
        self._on_device[:end].copy_(self._on_host[:end], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def keep_allowed(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The logits of tokens that may come; minus infinity elsewhere.

    Args:
        logits: [rows, vocabulary].
        masks: as :meth:`MaskBuffers.views` gives them.
    """
    bits = (masks.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=masks.device)) & 1
    is_allowed = bits.flatten(1).bool()
    # Where the head is wider than the vocabulary, nothing is behind it; where the table is, it is padding.
    is_allowed = F.pad(is_allowed, (0, logits.shape[-1] - is_allowed.shape[-1]))
    return logits.masked_fill(~is_allowed, -math.inf)
