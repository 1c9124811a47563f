"""Block tables on the device, changed entry by entry.

Tables are by far the largest part of a batch, and from step to step almost nothing in them changes: a sequence that
decodes gets a new block once in ``block_size`` steps. So the host keeps a mirror, and a step sends only the entries
that differ: one copy and one scatter, or nothing at all. To cut a tensor takes longer than to copy some hundred bytes
more, so all cuts are made once, and changes are filled up to a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from piecegraph.llm.cache.paged import SequenceBlocks

_INDEX_BYTES, _ENTRY_BYTES = 8, 4


@dataclass(frozen=True, slots=True)
class _Edits:
    """So many changed entries, on the host and on the device: in one piece of memory each, and cut up."""

    staging: torch.Tensor
    index: NDArray[np.int64]
    entries: NDArray[np.int32]
    sent: torch.Tensor
    sent_index: torch.Tensor
    sent_entries: torch.Tensor


def _cut(staging: torch.Tensor, sent: torch.Tensor, num_entries: int) -> _Edits:
    """The beginnings of both."""
    middle, end = num_entries * _INDEX_BYTES, num_entries * (_INDEX_BYTES + _ENTRY_BYTES)
    index, entries = staging[:middle].numpy().view(np.int64), staging[middle:end].numpy().view(np.int32)
    sent_index, sent_entries = sent[:middle].view(torch.int64), sent[middle:end].view(torch.int32)
    return _Edits(staging[:end], index, entries, sent[:end], sent_index, sent_entries)


class BlockTables:
    """One table [max_seqs, max_blocks] for each group, at fixed addresses.

    Args:
        max_edits: entries that are sent one by one; if more have changed, all are sent.
    """

    def __init__(
        self, num_groups: int, max_seqs: int, max_blocks: int, device: torch.device, max_edits: int = 1 << 16
    ) -> None:
        shape = (num_groups, max_seqs, max_blocks)
        self.mirror: NDArray[np.integer] = np.zeros(shape, np.int32)
        """What the device has, once what was placed is sent."""
        self.flat = self.mirror.reshape(num_groups, max_seqs * max_blocks)
        """The same, each table in one line."""
        self.device = torch.zeros(shape, dtype=torch.int32, device=device)
        max_edits = max(1, min(max_edits, self.mirror.size))
        edit_bytes = max_edits * (_INDEX_BYTES + _ENTRY_BYTES)
        staging = torch.empty(edit_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        sent = torch.empty(edit_bytes, dtype=torch.uint8, device=device)
        powers = range((max_edits - 1).bit_length() + 1)
        self._edits = [_cut(staging, sent, min(1 << power, max_edits)) for power in powers]
        self._max_edits = max_edits
        self._all, self._all_on_device = self.mirror.reshape(-1), self.device.view(-1)
        self._rows: list[SequenceBlocks | None] = [None] * max_seqs
        self._versions = [-1] * max_seqs
        self._lengths = [0] * max_seqs
        self._num_returned = [[0] * num_groups for _ in range(max_seqs)]
        self._num_rows = 0
        self._sent: _Edits | None = None
        """What is sent, and not used yet."""
        self._changed: list[tuple[int, int]] = []
        """(first, end) of each changed range of the flat mirror. Some overlap if a batch was written and not sent; that
        does no harm, as what is sent is what the mirror holds then.
        """

    def place_all(self, rows: Sequence[SequenceBlocks | None]) -> None:
        """Let the first rows show these, and the others nothing."""
        shown, versions = self._rows, self._versions
        for row, blocks in enumerate(rows):
            if blocks is None or blocks is not shown[row] or blocks.version != versions[row]:
                self._place(row, blocks)
        for row in range(len(rows), self._num_rows):
            self._place(row, None)
        self._num_rows = len(rows)

    def _place(self, row: int, blocks: SequenceBlocks | None) -> None:
        """Let a row show a sequence's blocks, or nothing."""
        is_same = blocks is self._rows[row]
        old_length, new_length = self._lengths[row], 0
        for g in range(len(self.mirror)):
            table = blocks.tables[g] if blocks is not None else []
            new_length = len(table)
            returned = blocks.num_returned[g] if blocks is not None else 0
            if is_same:
                self._write(g, row, self._num_returned[row][g], min(returned, old_length), [])
                self._write(g, row, old_length, new_length, table[old_length:])
            else:
                self._write(g, row, 0, max(old_length, new_length), table)
            self._num_returned[row][g] = returned
        self._rows[row], self._lengths[row] = blocks, new_length
        self._versions[row] = blocks.version if blocks is not None else -1

    def _write(self, g: int, row: int, first: int, end: int, values: list[int]) -> None:
        """Entries ``first`` to ``end`` become ``values``, followed by zeros."""
        if first < end:
            line = self.mirror[g, row]
            line[first : first + len(values)] = values
            line[first + len(values) : end] = 0
            base = (g * self.mirror.shape[1] + row) * self.mirror.shape[2]
            self._changed.append((base + first, base + end))

    def send(self) -> None:
        """Send what has changed, without waiting for the device: :meth:`use_sent` comes next. The staging memory is in
        use until the copy has run.
        """
        self._sent = None
        num = sum([end - first for first, end in self._changed])
        if not 0 < num <= self._max_edits:
            return
        self._sent = edits = self._edits[(num - 1).bit_length()]
        index = edits.index
        np.concatenate([np.arange(first, last) for first, last in self._changed], out=index[:num])
        index[num:] = index[num - 1]  # what is written twice is the same
        self._all.take(index, out=edits.entries, mode="clip")
        edits.sent.copy_(edits.staging, non_blocking=True)
        self._changed.clear()

    def use_sent(self) -> None:
        """Bring the tables up to date."""
        if (edits := self._sent) is not None:
            self._all_on_device.index_copy_(0, edits.sent_index, edits.sent_entries)
        elif self._changed:
            self._all_on_device.copy_(torch.from_numpy(self._all))
            self._changed.clear()
