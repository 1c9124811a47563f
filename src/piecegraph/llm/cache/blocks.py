"""The blocks of one paged cache: who holds them, which may be taken back, and which hold a known prefix.

Nothing here knows tensors: a block is a number. Block 0 belongs to the padding (Note [Padding of a batch]) and is never
handed out.

Note [Prefix digests]
~~~~~~~~~~~~~~~~~~~~~
A full block is known by a digest of 128 bits over its own tokens, all tokens before them, and a key for whatever else
the keys and values depend on (an adapter, an image). Equal digests mean equal content: nobody compares tokens again, as
a chance collision is less likely than a memory error, and the hash is one that cannot be steered towards one.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b

Digest = bytes

_DIGEST_BYTES = 16


def first_digest(cache_key: str) -> Digest:
    """What the chain of a sequence's digests begins with."""
    return blake2b(cache_key.encode(), digest_size=_DIGEST_BYTES).digest()


def next_digest(before: Digest, tokens: array[int] | bytes) -> Digest:
    """The digest of a block of tokens, or of their bytes, behind the block with digest ``before``."""
    # Not as the hash's key: that takes a third more. All digests are of one length, so nothing else reads the same.
    return blake2b(b"".join((before, tokens)), digest_size=_DIGEST_BYTES).digest()


class BlockPool:
    """Counts who holds each block. A block that nobody holds but whose content is known is kept until room is needed;
    the one that was held longest ago goes first. Every operation takes constant time for each block.

    >>> pool = BlockPool(num_blocks=3)
    >>> first, second = pool.allocate(), pool.allocate()
    >>> pool.num_free
    0
    >>> pool.register(first, b"digest")
    >>> pool.release(first)
    >>> pool.find(b"digest") == first and pool.num_free == 1
    True
    """

    __slots__ = ("_block_of", "_digest_of", "_empty", "_holders", "_kept", "num_releases")

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, num_blocks
        self._holders = [0] * num_blocks
        self._digest_of: list[Digest | None] = [None] * num_blocks
        self._block_of: dict[Digest, int] = {}
        self._empty = list(range(num_blocks - 1, 0, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self.num_releases = 0
        """How often a block became free: whoever found too few free ones need not look again before it changes."""

    @property
    def num_blocks(self) -> int:
        """All blocks, block 0 included."""
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """How many blocks can be handed out."""
        return len(self._empty) + len(self._kept)

    def allocate(self) -> int:
        """A block with one holder and no known content. The caller has made sure that there is one."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            self._forget(block)
        self._holders[block] = 1
        return block

    def allocate_many(self, num_blocks: int) -> list[int]:
        """So many at once, as :meth:`allocate` gives them one by one."""
        first = len(self._empty) - num_blocks
        if first < 0:
            return [self.allocate() for _ in range(num_blocks)]
        blocks = self._empty[first:]
        del self._empty[first:]
        blocks.reverse()
        holders = self._holders
        for block in blocks:
            holders[block] = 1
        return blocks

    def hold(self, block: int) -> None:
        """One more holder of a block that :meth:`find` gave."""
        if self._holders[block] == 0:
            del self._kept[block]
        self._holders[block] += 1

    def release(self, *blocks: int) -> None:
        """One holder less of each. Of a sequence's blocks release the last first: what they continue is then kept
        longer.
        """
        holders, digest_of, empty, num_before = self._holders, self._digest_of, self._empty, self.num_free
        for block in blocks:
            left = holders[block] - 1
            assert left >= 0, f"block {block} is released once too often"
            holders[block] = left
            if left == 0:
                if digest_of[block] is None:
                    empty.append(block)
                else:
                    self._kept[block] = None
        self.num_releases += self.num_free - num_before

    def register(self, block: int, digest: Digest) -> None:
        """Say what a held, fully written block holds. Of several blocks with equal content the first is known."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def find(self, digest: Digest) -> int:
        """The block with this content, or 0."""
        return self._block_of.get(digest, 0)

    def forget(self) -> None:
        """Know the content of no block any more."""
        self._empty.extend(self._kept)
        self._kept.clear()
        self._block_of.clear()
        self._digest_of = [None] * self.num_blocks

    def is_held(self, block: int) -> bool:
        return self._holders[block] > 0

    def check(self) -> None:
        """Compare every record with every other; for tests."""
        empty, kept = set(self._empty), set(self._kept)
        free = {block for block, holders in enumerate(self._holders) if holders == 0}
        assert len(empty) == len(self._empty), "a block is free twice"
        assert not empty & kept
        assert empty | kept | {0} == free, (empty, kept, free)
        assert all(holders >= 0 for holders in self._holders)
        known = {block: digest for block, digest in enumerate(self._digest_of) if digest is not None}
        assert {digest: block for block, digest in known.items()} == self._block_of
        assert kept == free & set(known)

    def _forget(self, block: int) -> None:
        digest = self._digest_of[block]
        assert digest is not None
        del self._block_of[digest]
        self._digest_of[block] = None
