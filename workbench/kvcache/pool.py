"""Blocks and their references: which are in use, which are free, when a cached one is given up.

A block is active (referenced), cached (unreferenced, its content can be hit) or free; the three add
up to the total. A pool can be resized between steps: a target may be set from any thread, the owner
calls `settle` before it schedules, and copies what `copies` says before anything is stored. The
pool that leases its blocks with their pages is in arena.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

from workbench.errors import ConfigError
from workbench.kvcache.prefix import PrefixIndex, Tokens


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


@dataclass(frozen=True, slots=True)
class ResizeAnswer:
    """What becomes of a target. outcome: "reached" with the next step; "later", as running
    sequences release their blocks; or "refused", and nothing changes. reason: why not at once.
    """

    outcome: str
    target: int
    reason: str = ""

    @property
    def refused(self) -> bool:
        """Whether the target was not taken."""
        return self.outcome == "refused"


class Copies:
    """Contents of blocks still to be copied: all sources are read before anything is written."""

    def __init__(self) -> None:
        self._source: dict[int, int] = {}  # destination -> source

    def add(self, source: int, destination: int, *, moved: bool = False) -> None:
        """The destination shall hold what the source holds once all earlier copies are done.

        moved: what the source holds afterwards does not matter.
        """
        origin = self._source.get(source, source)
        if moved:
            self._source.pop(source, None)
        if origin == destination:  # there and back again
            self._source.pop(destination, None)
        else:
            self._source[destination] = origin

    def forget(self, pages: Iterable[int], per_page: int) -> None:
        """The blocks of these pages lost their content, some before it came."""
        if self._source:
            lost = set(pages)
            for destination in [d for d in self._source if d // per_page in lost]:
                del self._source[destination]

    def take(self) -> list[tuple[int, int]]:
        """(source, destination) of each; they count as carried out."""
        taken = [(source, destination) for destination, source in self._source.items()]
        self._source.clear()
        return taken


class BlockPool:
    """All blocks of one cache; blocks without content are reused first, then PrefixIndex evicts.

    Of those without content the last one freed is taken first: memory that was never written is
    touched only when it is needed (a fresh page costs far more than the store into it).

    target: blocks asked for last; floor: a smaller target is refused. lock: held while a step is
    planned or taken in, where threads share the memory.
    """

    lock: AbstractContextManager[object] = nullcontext()

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.index = PrefixIndex()
        self.stats = CacheStats()
        self.copies = Copies()
        self.target = num_blocks
        self.floor = 1
        self._free = deque(reversed(self.blocks))  # no references, no content; taken from its end
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
    def num_available(self) -> int:
        """Blocks that `take` can hand out: free and cached ones."""
        return self.num_free + self.index.num_evictable

    @property
    def num_active(self) -> int:
        """Blocks that a running sequence uses."""
        return self.num_blocks - self.num_available

    # -- references --

    def take(self) -> Block:
        """A private block with one reference; a cached one is evicted if none is free."""
        block = self._free.pop() if self._free else self._evict()
        self.stats.allocated += 1
        block.ref_count = 1
        return block

    def copy(self, block: Block) -> Block:
        """A private block with the content of a cached partial one, once `copies` is carried out.

        If that is the last available block, it becomes private itself, content and all.
        """
        self.touch(block)
        twin = self.take()
        if twin is not block:
            self.copies.add(block.id, twin.id)
            self.stats.copied += 1
        return twin

    def touch(self, block: Block) -> None:
        """A cached partial block was used where it is."""
        self.index.touch(block.id)

    def share(self, blocks: Iterable[Block]) -> None:
        """One more reference to each of these, which were hit."""
        for block in blocks:
            if block.ref_count == 0:
                self._reused(block)
            block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """One reference less; the last one leaves a block cached if it can be hit, else free."""
        for block in blocks:
            assert block.ref_count > 0, f"block {block.id} is released more often than taken"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._unused(block)

    def _reused(self, block: Block) -> None:
        self.index.remove_evictable(block.id)

    def _unused(self, block: Block) -> None:
        if block.digest is None:
            self._vacated(block)
        else:
            self.index.add_evictable(block.digest, block.id)

    def _vacated(self, block: Block) -> None:
        """A block has neither reference nor content."""
        self._free.append(block)

    # -- contents --

    def find(self, digest: bytes) -> Block | None:
        """The block that can be hit under this hash."""
        block_id = self.index.holders.get(digest)
        return None if block_id is None else self.blocks[block_id]

    def find_run(self, digests: list[bytes]) -> list[Block]:
        """The blocks that can be hit under these hashes, up to the first that none has."""
        found, blocks = list(map(self.index.holders.get, digests)), self.blocks
        run = found[: found.index(None)] if None in found else found
        return [blocks[i] for i in cast("list[int]", run)]

    def find_partial(self, parent: bytes, tokens: Tokens) -> tuple[Block | None, int]:
        """The cached partial block after `parent` that begins most like these, and how far."""
        found = self.index.partials.longest(parent, tokens)
        return (None, 0) if found is None else (self.find(found.digest), found.num_tokens)

    def publish(self, block: Block, digest: bytes) -> None:
        """Let a full block be hit; if another has its content already, it is a duplicate."""
        if self.index.holders.setdefault(digest, block.id) == block.id:
            block.digest = digest
        else:
            self.stats.duplicates += 1

    def publish_partial(self, block: Block, parent: bytes, tokens: Tokens) -> None:
        """Let a private block be hit by what goes on with its tokens; it is released next.

        Of two partial blocks that begin alike all the way, the longer one is enough.
        """
        found = self.index.partials.longest(parent, tokens)
        if found is not None and found.num_tokens in (len(tokens), found.length):
            other = self.blocks[self.index.holders[found.digest]]
            if found.num_tokens == len(tokens):
                self.touch(other)
                return
            self.give_up(other)
        block.digest = self.index.partials.add(parent, tokens)
        self.index.holders[block.digest] = block.id

    def withdraw(self, block: Block) -> None:
        """A referenced block can be hit no more: its KV never came into being."""
        if block.digest is not None:
            del self.index.holders[block.digest]
            block.digest = None

    def give_up(self, block: Block) -> None:
        """A cached block's content is worth nothing any more.

        Not counted in `stats.evicted`; asked for again, a full one counts as thrashed.
        """
        self.index.give_up([block.id])
        block.digest = None
        self._vacated(block)

    def _evict(self) -> Block:
        block = self.blocks[self.index.evict()]
        block.digest = None
        self.stats.evicted += 1
        return block

    # -- what an arena learns from its pools --

    def admitted(self, missed: list[bytes], readmission: bool) -> None:
        """A sequence was admitted that missed these contents."""

    def refused(self, num_blocks: int) -> None:
        """An admission failed for want of so many blocks, those in use included."""

    # -- size --

    def resize(self, num_blocks: int) -> ResizeAnswer:
        """Have so many blocks after the next `settle` that can; changes the target alone."""
        if num_blocks > len(self.blocks):
            raise ConfigError(
                f"resize to {num_blocks} blocks; this cache was made with bytes for "
                f"{len(self.blocks)}: give at most that, or make the engine over a KVArena."
            )
        if num_blocks < self.floor:
            reason = f"{num_blocks} blocks; one request of the longest length needs {self.floor}"
            return ResizeAnswer("refused", num_blocks, reason)
        self.target = num_blocks
        if num_blocks < self.num_active:
            return ResizeAnswer("later", num_blocks, f"{self.num_active} blocks are in use")
        return ResizeAnswer("reached", num_blocks)

    def settle(self) -> bool:
        """Between steps: come as near to the target as can be. Whether a live block was moved.

        Any block can be retired, so that none ever is: blocks without content go first, then the
        cached ones, then those that are released later.
        """
        while self.num_blocks < self.target:
            self._free.append(self._retired.pop())
        while self.num_blocks > self.target and self.num_available:
            self._retired.append(self._free.popleft() if self._free else self._evict())
        return False

    def clear(self) -> None:
        """Every block is free and without content; nothing may be referenced."""
        assert self.num_active == 0
        self.index = PrefixIndex()
        for block in self.blocks:
            block.digest = None
        retired = {block.id for block in self._retired}
        self._free = deque(block for block in reversed(self.blocks) if block.id not in retired)

    def check(self, references: dict[int, int]) -> None:
        """Raise unless each block's state follows from its references (id -> count) and hash."""
        free = {block.id for block in (*self._free, *self._retired)}
        assert len(free) == len(self._free) + len(self._retired), "a block is free twice"
        self._check_blocks(references, free)

    def _check_blocks(self, references: dict[int, int], free: set[int]) -> None:
        """Each is free, evictable or referenced, and holds the hash it is found by."""
        index = self.index
        evictable = index.evictable
        index.check()
        for i, block in enumerate(self.blocks):
            named, digest, unused = f"block {block.id}", block.digest, block.ref_count == 0
            assert block.id == i, f"{named}: listed as {i}"
            assert block.ref_count == references.get(block.id, 0), f"{named}: wrong ref_count"
            is_free, is_cached = unused and digest is None, unused and digest is not None
            assert (block.id in free) == is_free, f"{named}: wrongly (un)free"
            assert (block.id in evictable) == is_cached, f"{named}: wrongly (un)cached"
            if digest is not None:
                assert index.holders.get(digest) == block.id, f"{named}: its hash is another's"
        hashed = sum(block.digest is not None for block in self.blocks)
        assert len(index.holders) == hashed, "a hash without block"
        assert all(self.blocks[i].digest == d for i, d in evictable.items()), "a stale hash"
        live = sum(block.ref_count > 0 for block in self.blocks)
        assert self.num_active == live, "a block leaked"
        total = self.num_active + index.num_evictable + self.num_free
        assert total == self.num_blocks, "active + cached + free differs from the total"
