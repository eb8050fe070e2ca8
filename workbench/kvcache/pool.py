"""Blocks and their references: which are in use, which are free, when a cached one is given up.

A block is active (referenced), cached (unreferenced, its content can be hit) or free; the three add
up to the total. What it does not do: know sequences, tokens or hits (manager.py), or where a block
lies in memory (storage.py). A pool that leases its blocks with their pages is in leases.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from workbench.errors import ConfigError
from workbench.kvcache.prefix import PrefixIndex
from workbench.kvcache.resizing import Copies, ResizeAnswer, answer_resize
from workbench.kvcache.tails import Tokens


@dataclass(slots=True, eq=False)
class Block:
    """One block of KV. digest: the hash under which it can be hit, None while it is private."""

    id: int
    ref_count: int = 0
    digest: bytes | None = None


@dataclass(slots=True)
class CacheStats:
    """Counts since the cache was created: *_tokens in tokens, the others in blocks.

    readmit_*: the second and later admissions of preempted requests, not contained in query_tokens
    and hit_tokens. thrashed: missed full blocks whose content was evicted before, both kinds;
    thrash_events: admissions with any.
    """

    query_tokens: int = 0
    hit_tokens: int = 0
    readmit_query_tokens: int = 0
    readmit_hit_tokens: int = 0
    allocated: int = 0
    evicted: int = 0
    thrashed: int = 0
    thrashed_readmit: int = 0
    thrash_events: int = 0
    duplicates: int = 0
    copied: int = 0  # for what goes on with a partial block, or moved out of the way


class BlockPool:
    """All blocks of one cache; reused are those without content, then as parked.py says."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.index = PrefixIndex()
        self.stats = CacheStats()
        self.copies = Copies()
        self.target = num_blocks
        self.floor = 1  # blocks; a smaller target is refused
        self._free = deque(self.blocks)  # unreferenced and without content, first freed first
        self._retired: list[Block] = []  # beyond the target; their bytes are not used

    @property
    def num_blocks(self) -> int:
        """Blocks that can be used now: active, cached and free."""
        return len(self.blocks) - len(self._retired)

    @property
    def room(self) -> int:
        """Blocks to count on for long."""
        return self.target

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks nobody uses whose content can still be hit."""
        return self.index.num_parked

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out: free and cached ones."""
        return len(self._free) + self.index.num_parked

    @property
    def num_active(self) -> int:
        """Blocks that a running sequence uses."""
        return len(self.blocks) - len(self._retired) - self.num_available

    def find(self, digest: bytes) -> Block | None:
        """The block that can be hit under this hash."""
        block_id = self.index.find(digest)
        return None if block_id is None else self.blocks[block_id]

    def find_run(self, digests: list[bytes]) -> list[Block]:
        """The blocks that can be hit under these hashes, up to the first that none has."""
        blocks = self.blocks
        return [blocks[i] for i in self.index.find_run(digests)]

    def holder(self, digest: bytes) -> Block:
        """As `find`, of a hash that is held."""
        block = self.find(digest)
        assert block is not None, "a tail without a block"
        return block

    def take(self) -> Block:
        """A private block with one reference; a cached one is evicted if none is free."""
        block = self._free.popleft() if self._free else self._evict()
        self.stats.allocated += 1
        block.ref_count = 1
        return block

    def copy(self, block: Block) -> Block:
        """A private block with the same content, once `copies` is carried out.

        A cached block that is the last available one becomes private itself, content and all.
        """
        if block.ref_count == 0:
            self.touch(block)
        twin = self.take()
        if twin is not block:
            self.copies.add(block.id, twin.id)
            self.stats.copied += 1
        return twin

    def touch(self, block: Block) -> None:
        """A cached block was hit where it is."""
        self.index.touch(block.id)

    def share(self, block: Block) -> None:
        """One more reference to a block that was hit."""
        if block.ref_count == 0:
            self.index.unpark(block.id)
        block.ref_count += 1

    def share_all(self, blocks: Iterable[Block]) -> None:
        """`share` each: mostly of blocks that others use too."""
        for block in blocks:
            if block.ref_count:
                block.ref_count += 1
            else:
                self.share(block)

    def release_all(self, blocks: Iterable[Block]) -> None:
        """`release` each, in this order."""
        for block in blocks:
            if block.ref_count > 1:
                block.ref_count -= 1
            else:
                self.release(block)

    def release(self, block: Block) -> None:
        """One reference less; the last one leaves the block cached if it can be hit, else free."""
        assert block.ref_count > 0, f"block {block.id} is released more often than taken"
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.digest is None:
                self._vacated(block)
            else:
                self.index.park(block.digest, block.id)

    def publish(self, block: Block, digest: bytes) -> None:
        """Let a full block be hit; if another has its content already, it is a duplicate."""
        if self.index.publish(digest, block.id):
            block.digest = digest
        else:
            self.stats.duplicates += 1

    def publish_tail(self, block: Block, parent: bytes, tail: Tokens) -> None:
        """Let a private block be hit by what goes on with its tokens; it is released next.

        Of two tails that begin alike all the way, the longer one is enough.
        """
        found = self.index.tails.longest(parent, tail)
        if found is not None and found.num_tokens == len(tail):
            self.touch(self.holder(found.digest))
            return
        if found is not None and found.num_tokens == found.length:
            self.give_up(self.holder(found.digest))
        block.digest = self.index.publish_tail(parent, tail, block.id)

    def withdraw(self, block: Block) -> None:
        """A referenced block can be hit no more: its KV never came into being."""
        if block.digest is not None:
            self.index.withdraw(block.digest)
            block.digest = None

    def resize(self, num_blocks: int) -> ResizeAnswer:
        """Have so many blocks after the next `settle` that can; changes the target alone."""
        if num_blocks > len(self.blocks):
            raise ConfigError(
                f"resize to {num_blocks} blocks; this cache was made with bytes for "
                f"{len(self.blocks)}: give at most that, or make the engine over a KVArena."
            )
        answer = answer_resize(num_blocks, self.floor, self.num_active)
        self.target = self.target if answer.refused else num_blocks
        return answer

    def settle(self) -> bool:
        """Between steps: come as near to the target as can be. Whether a live block was moved.

        Any block can be retired, so that none ever is: blocks without content go first, then the
        cached ones, then those that are released later.
        """
        while self.num_blocks < self.target:
            self._free.append(self._retired.pop())
        while self.num_blocks > self.target and self.num_available:
            self._retired.append(self._free.pop() if self._free else self._evict())
        return False

    def _evict(self) -> Block:
        block = self.blocks[self.index.evict()]
        block.digest = None
        self.stats.evicted += 1
        return block

    def give_up(self, block: Block) -> None:
        """A cached block's content is worth nothing any more."""
        self.index.give_up([block.id])
        block.digest = None
        self._vacated(block)

    def _vacated(self, block: Block) -> None:
        """A block has neither reference nor content."""
        self._free.append(block)

    def clear(self) -> None:
        """Every block is free and without content; nothing may be referenced."""
        assert self.num_active == 0
        self.index.clear()
        for block in self.blocks:
            block.digest = None
        retired = {block.id for block in self._retired}
        self._free = deque(block for block in self.blocks if block.id not in retired)

    def check(self, references: dict[int, int]) -> None:
        """Raise unless each block's state follows from its references (id -> count) and hash."""
        free = {block.id for block in (*self._free, *self._retired)}
        assert len(free) == len(self._free) + len(self._retired), "a block is free twice"
        check_blocks(self.blocks, self.index, references, free)
        total = self.num_active + self.num_cached + self.num_free
        active = sum(block.ref_count > 0 for block in self.blocks)
        assert total == self.num_blocks, "active + cached + free differs from the total"
        assert self.num_active == active, "a block leaked"


def check_blocks(
    blocks: list[Block], index: PrefixIndex, references: dict[int, int], free: set[int]
) -> None:
    """Raise unless every block is free, parked or referenced, and holds the hash it is found by."""
    parked, holders = index.parked, index.holders
    index.check()
    for i, block in enumerate(blocks):
        named = f"block {block.id}"
        assert block.id == i, f"{named}: listed as {i}"
        assert block.ref_count == references.get(block.id, 0), f"{named}: wrong ref_count"
        unused = block.ref_count == 0
        digest = block.digest
        hittable = digest is not None
        assert (block.id in free) == (unused and not hittable), f"{named}: wrongly (un)free"
        assert (block.id in parked) == (unused and hittable), f"{named}: wrongly (un)cached"
        if digest is not None:
            assert holders.get(digest) == block.id, f"{named}: its hash is another's"
    assert len(holders) == sum(b.digest is not None for b in blocks), "a hash without block"
    assert all(blocks[i].digest == d for i, d in parked.items()), "a parked hash is stale"
