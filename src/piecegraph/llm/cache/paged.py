"""The blocks of a sequence over several groups of layers, each of which can see differently far back.

A group of full attention keeps every block of a sequence. A group with a window, or with chunks, gives back the blocks
that no later token can see; their entries in the block table become 0.

Note [Equal tables]
~~~~~~~~~~~~~~~~~~~
All groups have one block size, and entry i of every table of a sequence is about the tokens from ``i * block_size`` on.
So the tables of a sequence are equally long, one digest names a block in all groups, and one number (``capacity``) says
when the next block is due. That is what makes a step of decoding cheap: nothing is looked at before it is reached.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from piecegraph.errors import ConfigError
from piecegraph.llm.cache.blocks import BlockPool, Digest, first_digest, next_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """One kind of layers, as the host sees it."""

    num_blocks: int
    """Block 0 included, which belongs to the padding."""
    window: int = 0
    """As :attr:`AttentionLayer.window`."""
    chunk: int = 0
    """As :attr:`AttentionLayer.chunk`."""

    def __post_init__(self) -> None:
        if self.num_blocks < 2 or self.window < 0 or self.chunk < 0:
            raise ConfigError(
                "PG101",
                f"a cache group has {self.num_blocks} blocks, window {self.window} and chunk {self.chunk}",
                why="it needs at least two blocks, and no negative number",
            )

    @property
    def is_limited(self) -> bool:
        """Whether it cannot see everything."""
        return self.window > 0 or self.chunk > 0

    def first_visible(self, position: int) -> int:
        """The first token that a query at ``position`` or later can see.

        >>> CacheGroup(num_blocks=8, window=4).first_visible(10), CacheGroup(num_blocks=8, chunk=4).first_visible(10)
        (7, 8)
        """
        first = 0
        if self.window:
            first = max(0, position - self.window + 1)
        if self.chunk:
            first = max(first, position // self.chunk * self.chunk)
        return first

    def most_blocks(self, num_tokens: int, block_size: int) -> int:
        """How many blocks a sequence of this length ever needs at once when it grows by one token at a time."""
        blocks = -(-num_tokens // block_size)
        for reach in (self.window, self.chunk):
            if reach:
                blocks = min(blocks, -(-(reach - 1) // block_size) + 1)
        return blocks


class SequenceBlocks:
    """What one running sequence holds. A new object for every admission, so that a table is known by its identity."""

    __slots__ = ("cache", "capacity", "num_registered", "num_returned", "tables", "version")

    def __init__(self, num_groups: int, cache: weakref.ref[PagedCache] | None = None) -> None:
        self.cache = cache
        """Where its blocks are from."""
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_returned = [0] * num_groups
        """How many entries at the front of each table are 0."""
        self.capacity = 0
        """How many tokens the tables have room for."""
        self.num_registered = 0
        """How many blocks at the front have a known digest, or never will."""
        self.version = 0
        """Changes whenever a table does."""


class PagedCache:
    """The pools of all groups, and the moves of a sequence in them.

    Args:
        groups: one entry for each block table.
        block_size: tokens in a block, for all groups.
        prefix_cache: whether full blocks are remembered for later sequences.
    """

    def __init__(self, groups: Sequence[CacheGroup], *, block_size: int, prefix_cache: bool = True) -> None:
        if block_size < 1:
            raise ConfigError("PG101", f"block_size is {block_size}", why="it must be a positive integer")
        self.groups = tuple(groups)
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.pools: tuple[BlockPool, ...] = ()
        self.num_sequences = 0
        """That have begun, and were not released yet."""
        self.reset()
        self.reference = weakref.ref(self)
        """What sequences know of it: they do not keep it alive."""
        self._limited = tuple(g for g, group in enumerate(self.groups) if group.is_limited)

    def can_hold(self, num_tokens: int) -> bool:
        """Whether a sequence of this length fits when it is alone."""
        return all(
            group.most_blocks(num_tokens, self.block_size) < pool.num_blocks
            for group, pool in zip(self.groups, self.pools, strict=True)
        )

    @property
    def usage(self) -> float:
        """The share of the blocks that sequences hold, in the fullest pool."""
        # Block 0 belongs to no sequence.
        return max((1 - pool.num_free / max(pool.num_blocks - 1, 1) for pool in self.pools), default=0.0)

    def num_releases(self) -> int:
        """Changes whenever a block became free."""
        return sum(pool.num_releases for pool in self.pools)

    def has_free(self, num_blocks: int) -> bool:
        """Whether every pool can hand out so many blocks."""
        return all(pool.num_free >= num_blocks for pool in self.pools)

    def has_free_each(self, num_blocks: Sequence[int], *, reserve: int) -> bool:
        """Whether each pool can hand out its number of blocks and ``reserve`` more."""
        return all(pool.num_free >= num + reserve for pool, num in zip(self.pools, num_blocks, strict=True))

    # ------------------------------------------------------------------ a sequence begins

    def digests(self, tokens: array[int], known: list[Digest], cache_key: str, end: int) -> list[Digest]:
        """Extend ``known`` to all full blocks of the first ``end`` tokens."""
        data, size = tokens[len(known) * self.block_size : end].tobytes(), self.block_size * tokens.itemsize
        before = known[-1] if known else first_digest(cache_key)
        for start in range(0, len(data) - size + 1, size):
            before = next_digest(before, data[start : start + size])
            known.append(before)
        return known

    def num_known_tokens(self, digests: Sequence[Digest]) -> int:
        """How many tokens a sequence with these digests need not compute."""
        return self._longest_hit(digests) * self.block_size

    def begin(self, digests: Sequence[Digest]) -> SequenceBlocks:
        """A sequence that holds the longest known prefix: ``capacity`` says how many tokens of it."""
        blocks = SequenceBlocks(len(self.groups), self.reference)
        self.num_sequences += 1
        num_blocks = self._longest_hit(digests)
        if not num_blocks:
            return blocks
        length = num_blocks * self.block_size
        for g, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            first = group.first_visible(length) // self.block_size
            found = [pool.find(digest) for digest in digests[first:num_blocks]]
            for block in found:
                pool.hold(block)
            blocks.tables[g] = [0] * first + found
            blocks.num_returned[g] = first
        blocks.capacity, blocks.num_registered = length, num_blocks
        return blocks

    def _longest_hit(self, digests: Sequence[Digest]) -> int:
        """The largest number of blocks of which every group has what a query behind them can see."""
        longest = len(digests)
        for group, pool in zip(self.groups, self.pools, strict=True):
            if not group.is_limited:
                longest = next((i for i in range(longest) if not pool.find(digests[i])), longest)
        if not self._limited:
            return longest
        best, size = 0, self.block_size
        runs = dict.fromkeys(self._limited, 0)  # of each group: how many known blocks end here
        for num_blocks in range(1, longest + 1):
            sees_all = True
            for g in self._limited:
                runs[g] = runs[g] + 1 if self.pools[g].find(digests[num_blocks - 1]) else 0
                first = self.groups[g].first_visible(num_blocks * size) // size
                sees_all &= num_blocks - first <= runs[g]
            if sees_all:
                best = num_blocks
        return best

    # ------------------------------------------------------------------ a sequence grows

    def give_back(self, blocks: SequenceBlocks, position: int) -> None:
        """Give back what no query at ``position`` or later can see."""
        for g in self._limited:
            first = min(self.groups[g].first_visible(position) // self.block_size, len(blocks.tables[g]))
            returned = blocks.num_returned[g]
            if first > returned:
                table = blocks.tables[g]
                self.pools[g].release(*table[returned:first])
                table[returned:first] = [0] * (first - returned)
                blocks.num_returned[g] = first
                blocks.version += 1

    def room(self, blocks: SequenceBlocks) -> int:
        """How many tokens the sequence could have with the blocks that are free."""
        return blocks.capacity + min((pool.num_free for pool in self.pools), default=1 << 40) * self.block_size

    def num_missing(self, blocks: SequenceBlocks, num_tokens: int) -> list[int]:
        """Of each group: the blocks still to be found for ``num_tokens`` in all. Where a limited group has no more than
        that, fewer tokens are computed at once.
        """
        return [
            group.most_blocks(num_tokens, self.block_size) - len(table) + returned
            for group, table, returned in zip(self.groups, blocks.tables, blocks.num_returned, strict=True)
        ]

    def extend(self, blocks: SequenceBlocks, num_tokens: int) -> None:
        """Room for ``num_tokens`` in all; the caller has made sure that there is enough."""
        missing = -(-(num_tokens - blocks.capacity) // self.block_size)
        if missing > 0:
            for table, pool in zip(blocks.tables, self.pools, strict=True):
                table += pool.allocate_many(missing)
            blocks.capacity += missing * self.block_size
            blocks.version += 1

    def register(self, blocks: SequenceBlocks, digests: Sequence[Digest]) -> None:
        """Remember the blocks that ``digests`` names; all their tokens have been computed."""
        for g, pool in enumerate(self.pools):
            table = blocks.tables[g]
            for i in range(max(blocks.num_registered, blocks.num_returned[g]), len(digests)):
                pool.register(table[i], digests[i])
        blocks.num_registered = len(digests)

    def release(self, blocks: SequenceBlocks) -> None:
        """The sequence holds nothing any more."""
        self.num_sequences -= 1
        for g, pool in enumerate(self.pools):
            pool.release(*reversed(blocks.tables[g][blocks.num_returned[g] :]))

    def reset(self) -> None:
        """No sequence holds anything, and nothing is known."""
        self.pools = tuple(BlockPool(group.num_blocks) for group in self.groups)
        self.num_sequences = 0

    def forget(self) -> None:
        """Find no prefix any more that was computed until now: the memory is used by somebody else."""
        for pool in self.pools:
            pool.forget()

    def check(self, running: Sequence[SequenceBlocks]) -> None:
        """Compare the pools with what the sequences hold; for tests."""
        assert len(running) == self.num_sequences
        for g, pool in enumerate(self.pools):
            pool.check()
            held = [block for blocks in running for block in blocks.tables[g][blocks.num_returned[g] :]]
            assert 0 not in held
            assert all(not any(blocks.tables[g][: blocks.num_returned[g]]) for blocks in running)
            assert {block for block in range(1, pool.num_blocks) if pool.is_held(block)} == set(held)
