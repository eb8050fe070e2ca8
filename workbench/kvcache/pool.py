"""Blocks and their references: which are in use, which are free, when a cached one is given up.

A block is active (referenced), cached (unreferenced, its content can be hit) or free; the three add
up to the total. What it does not do: know sequences, tokens or hits (manager.py), or where a block
lies in memory (storage.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from workbench.kvcache.prefix import PrefixIndex


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


class BlockPool:
    """All blocks of one cache; reused are those without content, then the least recently freed."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.index = PrefixIndex()
        self.stats = CacheStats()
        self._free = deque(self.blocks)  # unreferenced and without content, first freed first

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
        return len(self.blocks) - self.num_available

    def find(self, digest: bytes) -> Block | None:
        """The block that can be hit under this hash."""
        block_id = self.index.find(digest)
        return None if block_id is None else self.blocks[block_id]

    def take(self) -> Block:
        """A private block with one reference; evicts the least recently freed if none is free."""
        if self._free:
            block = self._free.popleft()
        else:
            block = self.blocks[self.index.evict()]
            block.digest = None
            self.stats.evicted += 1
        self.stats.allocated += 1
        block.ref_count = 1
        return block

    def share(self, block: Block) -> None:
        """One more reference to a block that was hit."""
        if block.ref_count == 0:
            self.index.unpark(block.id)
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """One reference less; the last one leaves the block cached if it can be hit, else free."""
        assert block.ref_count > 0, f"block {block.id} is released more often than taken"
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.digest is None:
                self._free.append(block)
            else:
                self.index.park(block.digest, block.id)

    def publish(self, block: Block, digest: bytes) -> None:
        """Let a full block be hit; if another has its content already, it is a duplicate."""
        if self.index.publish(digest, block.id):
            block.digest = digest
        else:
            self.stats.duplicates += 1

    def withdraw(self, block: Block) -> None:
        """A referenced block can be hit no more: its KV never came into being."""
        if block.digest is not None:
            self.index.withdraw(block.digest)
            block.digest = None

    def clear(self) -> None:
        """Every block is free and without content; nothing may be referenced."""
        assert self.num_active == 0
        self.index.clear()
        for block in self.blocks:
            block.digest = None
        self._free = deque(self.blocks)

    def check(self, references: dict[int, int]) -> None:
        """Raise unless each block's state follows from its references (id -> count) and hash."""
        free = {block.id for block in self._free}
        parked, holders = self.index.parked, self.index.holders
        assert len(free) == len(self._free), "a block is free twice"
        for block in self.blocks:
            named = f"block {block.id}"
            assert block.ref_count == references.get(block.id, 0), f"{named}: wrong ref_count"
            unused = block.ref_count == 0
            digest = block.digest
            hittable = digest is not None
            assert (block.id in free) == (unused and not hittable), f"{named}: wrongly (un)free"
            assert (block.id in parked) == (unused and hittable), f"{named}: wrongly (un)cached"
            if digest is not None:
                assert holders.get(digest) == block.id, f"{named}: its hash is another's"
        assert len(holders) == sum(b.digest is not None for b in self.blocks), (
            "a hash without block"
        )
        assert all(self.blocks[i].digest == d for i, d in parked.items()), "a parked hash is stale"
        total = self.num_active + self.num_cached + self.num_free
        active = sum(block.ref_count > 0 for block in self.blocks)
        assert total == len(self.blocks), "active + cached + free differs from the total"
        assert self.num_active == active, "a block leaked"
