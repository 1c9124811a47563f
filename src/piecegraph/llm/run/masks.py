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

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from piecegraph.llm.kernels.race import keep_allowed
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

    def keep_allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of tokens that may come in the rows of the step; minus infinity elsewhere."""
        self.prepare()
        return keep_allowed(logits, self._on_device[: len(logits)].view(torch.uint8))

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
        with self._upload.sending(is_beside=True):
            if self._arrived is not self._on_host:
                self._arrived[:end].copy_(self._on_host[:end], non_blocking=True)
        self._on_device[:end].copy_(self._arrived[:end])
        self._upload.end_use()
