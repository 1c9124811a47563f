"""Who holds a block, which content is known, and what goes first when room is needed."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from piecegraph.errors import ConfigError
from piecegraph.llm.cache.blocks import BlockPool, first_digest, next_digest
from piecegraph.llm.cache.paged import CacheGroup, PagedCache, SequenceBlocks
from tests.cases.fake_llm import first_visible

NUM_BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """A pool beside the plainest possible account of it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[int] = []
        self.content: dict[int, bytes] = {}
        """What was last registered for each block and not overwritten since."""

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def allocate(self) -> None:
        self.take(self.pool.allocate())

    @rule(data=st.data())
    def allocate_many(self, data: st.DataObject) -> None:
        for block in self.pool.allocate_many(data.draw(st.integers(0, self.pool.num_free))):
            self.take(block)

    def take(self, block: int) -> None:
        assert block != 0
        assert block not in self.held
        self.held.append(block)
        self.content.pop(block, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.held), min_size=1, max_size=3, unique=True))
        for block in blocks:
            self.held.remove(block)
        num_free, num_releases = self.pool.num_free, self.pool.num_releases
        self.pool.release(*blocks)
        assert self.pool.num_releases - num_releases == self.pool.num_free - num_free

    @precondition(lambda self: set(self.held) - set(self.content))
    @rule(data=st.data(), name=st.integers(0, 8))
    def register(self, data: st.DataObject, name: int) -> None:
        digest = bytes([name])
        block = data.draw(st.sampled_from(sorted(set(self.held) - set(self.content))))
        self.pool.register(block, digest)
        if digest not in self.content.values():
            self.content[block] = digest

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def find_and_hold(self, data: st.DataObject) -> None:
        block, digest = data.draw(st.sampled_from(sorted(self.content.items())))
        assert self.pool.find(digest) == block
        self.pool.hold(block)
        self.held.append(block)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.num_free == NUM_BLOCKS - 1 - len(set(self.held))
        assert all(self.pool.is_held(block) == (block in self.held) for block in range(1, NUM_BLOCKS))


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate() for _ in range(3)) == [1, 2, 3]
    assert pool.num_free == 0


def test_many_blocks_are_those_that_come_one_by_one() -> None:
    one_by_one, at_once = BlockPool(5), BlockPool(5)
    assert at_once.allocate_many(3) == [one_by_one.allocate() for _ in range(3)] == [1, 2, 3]


def test_unknown_blocks_go_first_then_those_held_longest_ago() -> None:
    pool = BlockPool(5)
    blocks = [pool.allocate() for _ in range(4)]
    for block, digest in zip(blocks[:3], (b"a", b"b", b"c"), strict=True):
        pool.register(block, digest)
    for block in (blocks[1], blocks[0], blocks[2], blocks[3]):
        pool.release(block)
    pool.hold(blocks[1])
    pool.release(blocks[1])
    assert [pool.allocate() for _ in range(4)] == [blocks[3], blocks[0], blocks[2], blocks[1]]
    assert not any(pool.find(digest) for digest in (b"a", b"b", b"c"))


def test_a_block_released_once_too_often_is_our_own_bug() -> None:
    pool = BlockPool(3)
    pool.release(block := pool.allocate())
    with pytest.raises(AssertionError, match="released once too often"):
        pool.release(block)


def test_a_digest_depends_on_key_tokens_and_everything_before() -> None:
    one, two = array("q", [1, 2]), array("q", [2, 1])
    root, other = first_digest(""), first_digest("adapter")
    digests = {
        next_digest(root, one),
        next_digest(root, two),
        next_digest(other, one),
        next_digest(next_digest(root, one), two),
        next_digest(next_digest(root, two), two),
    }
    assert len(digests) == 5
    assert all(len(digest) >= 16 for digest in digests)


@pytest.mark.parametrize(
    "group", [{}, {"window": 1}, {"window": 5}, {"window": 8}, {"chunk": 6}, {"window": 3, "chunk": 8}]
)
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_group_needs_as_many_blocks_as_cover_what_is_visible(group: dict[str, int], block_size: int) -> None:
    cache_group = CacheGroup(num_blocks=9, **group)
    held = 0
    for position in range(40):
        first = first_visible(cache_group, position)
        assert cache_group.first_visible(position) == first
        held = max(held, position // block_size - first // block_size + 1)
        assert held <= cache_group.most_blocks(position + 1, block_size)
    assert held >= cache_group.most_blocks(40, block_size) - 1


@pytest.mark.parametrize("wrong", [{"num_blocks": 1}, {"num_blocks": 4, "window": -1}, {"num_blocks": 4, "chunk": -2}])
def test_a_group_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="PG101 a cache group"):
        CacheGroup(**wrong)


def test_a_block_size_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="PG101 block_size is 0"):
        PagedCache([], block_size=0)


def _written(cache: PagedCache, tokens: array[int]) -> tuple[SequenceBlocks, list[bytes]]:
    """A sequence whose blocks are all computed and known."""
    blocks = cache.begin([])
    cache.extend(blocks, len(tokens))
    digests = cache.digests(tokens, [], "", len(tokens))
    cache.register(blocks, digests)
    return blocks, digests


def test_a_hit_needs_of_a_window_only_what_is_visible_and_of_full_attention_everything() -> None:
    cache = PagedCache([CacheGroup(num_blocks=20), CacheGroup(num_blocks=20, window=5)], block_size=2)
    blocks, digests = _written(cache, array("q", range(16)))
    cache.give_back(blocks, 16)
    assert blocks.num_returned == [0, 6]
    # Other sequences take the memory of the first four blocks that the window gave back.
    while cache.pools[1].num_free > 2:
        cache.pools[1].allocate()
    assert [bool(cache.pools[1].find(digest)) for digest in digests] == [False] * 4 + [True] * 4
    hit = cache.begin(digests)
    assert hit.capacity == 16
    assert hit.tables == [blocks.tables[0], [0] * 6 + blocks.tables[1][6:]]
    # A query at 12 sees tokens from 8 on; one at 10 sees tokens from 6 on, which are gone.
    assert cache.begin(digests[:6]).capacity == 12
    assert cache.begin(digests[:5]).capacity == 0


def test_two_windows_must_agree_on_a_hit() -> None:
    cache = PagedCache([CacheGroup(num_blocks=20, window=3), CacheGroup(num_blocks=20, window=7)], block_size=2)
    blocks, digests = _written(cache, array("q", range(12)))
    cache.release(blocks)
    _evict(cache, 0, digests[5], digests)
    _evict(cache, 1, digests[1], digests)
    # The first group allows up to five blocks; behind five, the second sees blocks 2 to 4.
    hit = cache.begin(digests)
    assert hit.capacity == 10
    cache.release(hit)
    _evict(cache, 1, digests[2], digests)
    assert cache.begin(digests).capacity == 2


def _evict(cache: PagedCache, g: int, digest: bytes, digests: list[bytes]) -> None:
    """Take the memory of one known block, and leave the others."""
    pool = cache.pools[g]
    others = [block for other in digests if other != digest and (block := pool.find(other))]
    for block in others:
        pool.hold(block)
    while pool.find(digest):
        pool.allocate()
    for block in others:
        pool.release(block)
