"""Blocks and their references: which are in use, which content each holds, what is evicted next.

A block is active (referenced), cached (unreferenced, its content can be hit) or free; the three add
up to the total. A pool can be resized between steps: a target may be set from any thread, the owner
calls `settle` before it schedules, and copies what `copies` says before anything is stored. The
pool that leases its blocks with their pages is in arena.py.

A full block is found by its hash (manager.py). A *partial block* is the last, partly filled block
of a sequence that left; it is found by the hash of the block before it and its own tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise, takewhile
from operator import eq
from typing import Any, NamedTuple

from workbench.errors import ConfigError

Tokens = tuple[int, ...]

PARTIAL_AGING = 4
"""A partial block is as old as a full one that was last used so many times longer ago: it holds
fewer tokens, and nothing cached leads on from it.

Counted on searches of the tiny pair. Aging alike (1), partial blocks made a PRM with 0.6 of its
working set compute 6 to 8 % more than without them; with 4 it computes 1 % less. With all of its
working set it keeps 70 to 82 % of what they save; evicted before all else, 50 to 70 %.
"""


@dataclass(slots=True, eq=False)
class Block:
    """One block of KV. digest: the hash under which it can be hit, None while it is private; used:
    when it was last released or copied with content, counted in such uses.
    """

    id: int
    ref_count: int = 0
    digest: bytes | None = None
    used: int = 0


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


class Copies(dict[int, int]):
    """Destination -> source of contents still to be copied: all are read before any is written."""

    def add(self, source: int, destination: int, *, moved: bool = False) -> None:
        """The destination shall hold what the source holds once all earlier copies are done.

        moved: what the source holds afterwards does not matter.
        """
        origin = self.get(source, source)
        if moved:
            self.pop(source, None)
        if origin == destination:  # there and back again
            self.pop(destination, None)
        else:
            self[destination] = origin

    def forget(self, blocks: set[int]) -> None:
        """The blocks with these ids lost their content, some before it came."""
        for destination in blocks & self.keys():
            del self[destination]

    def take(self) -> list[tuple[int, int]]:
        """(source, destination) of each; they count as carried out."""
        taken = [(source, destination) for destination, source in self.items()]
        self.clear()
        return taken


def common_prefix(one: Tokens, other: Tokens) -> int:
    """How many tokens both begin with."""
    return sum(takewhile(bool, map(eq, one, other)))


class Found(NamedTuple):
    """A partial block, by its hash and length, and how many of the tokens asked for it has."""

    digest: bytes
    length: int
    num_tokens: int


class PartialIndex:
    """Hash of the block before -> token ids of partial blocks, sorted.

    Invariant: of the partial blocks after one parent none begins another; so the longest common
    beginning with any tokens is that of a neighbour in sorted order.
    """

    def __init__(self) -> None:
        self._of_parent: dict[bytes, list[Tokens]] = {}
        self._place: dict[bytes, tuple[bytes, Tokens]] = {}  # hash -> parent, tokens

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, digest: object) -> bool:
        return digest in self._place

    def longest(self, parent: bytes, tokens: Tokens) -> Found | None:
        """The one that shares the longest beginning with what follows `parent`, if any does."""
        partials = self._of_parent.get(parent)
        if partials is None:
            return None
        at = bisect_left(partials, tokens)
        near = partials[max(0, at - 1) : at + 1]
        common, best = max((common_prefix(partial, tokens), partial) for partial in near)
        return Found(_digest(parent, best), len(best), common) if common else None

    def add(self, parent: bytes, tokens: Tokens) -> bytes:
        """One more, which neither begins another nor another it; returns its hash."""
        digest = _digest(parent, tokens)
        partials = self._of_parent.setdefault(parent, [])
        partials.insert(bisect_left(partials, tokens), tokens)
        self._place[digest] = parent, tokens
        return digest

    def remove(self, digest: bytes) -> None:
        """Forget the one with this hash."""
        parent, tokens = self._place.pop(digest)
        partials = self._of_parent[parent]
        del partials[bisect_left(partials, tokens)]
        if not partials:
            del self._of_parent[parent]

    def check(self) -> None:
        """Raise unless both maps hold the same ones, in order, and none begins another."""
        listed = {(p, tokens) for p, each in self._of_parent.items() for tokens in each}
        assert listed == set(self._place.values()), "a partial block is listed and not placed"
        assert all(_digest(*place) == d for d, place in self._place.items()), "wrong hash"
        for partials in self._of_parent.values():
            assert partials, "a parent without partial blocks"
            for one, other in pairwise(partials):
                assert one < other, "partial blocks out of order"
                assert other[: len(one)] != one, "a partial block begins another"


def _digest(parent: bytes, partial: Tokens) -> bytes:
    """A hash that no full block has: more tokens than these go into one."""
    return sha256(parent + array("i", partial).tobytes()).digest()


MOST_EVICTED = 1 << 18
"""Evicted hashes that are remembered at least: content evicted longer ago may be asked for again
without being counted as a thrash.
"""


class BlockPool:
    """All blocks of one cache. Those without content are reused first, then cached ones evicted.

    Of those without content the last one freed is taken first: memory that was never written is
    touched only when it is needed (a fresh page costs far more than the store into it).

    Invariant: a hash has one holder and a block one hash; a holder without references is cached,
    and holders of partial blocks are, or are about to be.

    target: blocks asked for last; floor: a smaller target is refused. lock: held while a step is
    planned or taken in, where threads share the memory. memory: whose blocks these are, the arena
    or the pool itself.
    """

    lock: AbstractContextManager[object] = nullcontext()
    changing: Any = None  # the cache that changes it, or that was cut short as it did

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.holders: dict[bytes, Block] = {}  # by the hash of what can be hit
        self.partials = PartialIndex()
        self.evicted = OrderedDict[bytes, None]()  # hashes of full blocks, oldest first
        self._full: OrderedDict[Block, None] = OrderedDict()  # cached, oldest first
        self._partial: OrderedDict[Block, None] = OrderedDict()  # cached, oldest first
        self._uses = 0  # of cached blocks
        self.memory: Any = self
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
        """Target size in blocks."""
        return self.target

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that can still be hit."""
        return len(self._full) + len(self._partial)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out: free and cached ones."""
        return self.num_free + self.num_cached

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
        self._uses = block.used = self._uses + 1
        self._partial.move_to_end(block)

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
        del self._full[block]

    def _unused(self, block: Block) -> None:
        if block.digest is None:
            self._vacated(block)
        else:
            self._uses = block.used = self._uses + 1
            (self._partial if block.digest in self.partials else self._full)[block] = None

    def _vacated(self, block: Block) -> None:
        """A block has neither reference nor content."""
        self._free.append(block)

    # -- contents --

    def publish(self, block: Block, digest: bytes) -> None:
        """Let a full block be hit; if another has its content already, it is a duplicate."""
        if self.holders.setdefault(digest, block) is block:
            block.digest = digest
        else:
            self.stats.duplicates += 1

    def publish_partial(self, block: Block, parent: bytes, tokens: Tokens) -> None:
        """Let a private block be hit by what goes on with its tokens; it is released next.

        Of two partial blocks that begin alike all the way, the longer one is enough.
        """
        found = self.partials.longest(parent, tokens)
        if found is not None and found.num_tokens in (len(tokens), found.length):
            other = self.holders[found.digest]
            if found.num_tokens == len(tokens):
                self.touch(other)
                return
            self.give_up(other)
        block.digest = self.partials.add(parent, tokens)
        self.holders[block.digest] = block

    def give_up(self, block: Block) -> None:
        """A cached block's content is worth nothing any more.

        Not counted in `stats.evicted`; asked for again, a full one counts as thrashed.
        """
        self._forget(block)
        self._vacated(block)

    def _forget(self, block: Block) -> None:
        """A cached block loses its content."""
        assert block.digest is not None
        del self.holders[block.digest]
        if block in self._full:
            del self._full[block]
            self.evicted.pop(block.digest, None)
            self.evicted[block.digest] = None
            if len(self.evicted) > max(MOST_EVICTED, len(self.blocks)):
                self.evicted.popitem(last=False)
        else:
            del self._partial[block]
            self.partials.remove(block.digest)
        block.digest = None

    @property
    def next_evicted(self) -> Block | None:
        """The cached block used least recently, if any; partial ones age faster."""
        if not self._partial or not self._full:
            return next(iter(self._full or self._partial), None)
        full, partial = next(iter(self._full)), next(iter(self._partial))
        partial_is_older = PARTIAL_AGING * (self._uses - partial.used) >= self._uses - full.used
        return partial if partial_is_older else full

    def _evict(self) -> Block:
        """A block that was cached, without its content."""
        block = self.next_evicted
        assert block is not None, "a block is taken where none is available"
        self._lose([block])
        return block

    def _lose(self, blocks: list[Block]) -> None:
        """The contents of these cached blocks are evicted."""
        for block in blocks:
            self._forget(block)
        self.stats.evicted += len(blocks)

    # -- what an arena learns from its pools --

    def admitted(self, missed: list[bytes]) -> None:
        """A sequence was admitted that missed these contents."""

    def preempted(self) -> None:
        """A sequence is to lose its blocks for want of others."""

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

    def recover(self) -> None:
        """After a call that was cut short, whose sequences are gone: all blocks are free."""
        self.rebuild([])
        self.changing = None

    def rebuild(self, tables: Iterable[Sequence[Block]]) -> None:
        """Blocks of these tables are in use as they were, all others free and without content."""
        used = Counter(block for table in tables for block in table)
        if not used:
            self.blocks = [Block(i) for i in range(len(self.blocks))]
        for block in self.blocks:
            block.ref_count = used[block]
            block.digest = block.digest if block in used else None
        self.holders = {block.digest: block for block in used if block.digest is not None}
        self.partials = PartialIndex()
        self.copies.forget({block.id for block in self.blocks if block not in used})
        self._full.clear()
        self._partial.clear()
        self._retired.clear()
        self._free = deque(block for block in reversed(self.blocks) if block not in used)

    def clear(self) -> None:
        """Every block is free and without content, as if none had ever had any."""
        assert self.num_active == 0
        for block in (*self._full, *self._partial):
            self.give_up(block)
        self.evicted.clear()

    def check(self, references: dict[int, int], vacant: Sequence[Block] | None = None) -> None:
        """Raise unless each block's state follows from its references (id -> count) and hash.

        vacant: all without reference and content, where these are not in lists of their own.
        """
        vacant = [*self._free, *self._retired] if vacant is None else vacant
        free = {block.id for block in vacant}
        assert len(free) == len(vacant), "a block is free twice"
        self.partials.check()
        cached = self._full | self._partial
        for i, block in enumerate(self.blocks):
            named, digest, unused = f"block {block.id}", block.digest, block.ref_count == 0
            assert block.id == i, f"{named}: listed as {i}"
            assert block.ref_count == references.get(block.id, 0), f"{named}: wrong ref_count"
            assert (block.id in free) == (unused and digest is None), f"{named}: wrongly (un)free"
            assert (block in cached) == (unused and digest is not None), f"{named}: (un)cached"
            if digest is not None:
                assert self.holders.get(digest) is block, f"{named}: its hash is another's"
                is_partial = digest in self.partials
                assert is_partial == (block in self._partial), f"{named}: neither full nor partial"
        hashed = sum(block.digest is not None for block in self.blocks)
        assert len(self.holders) == hashed, "a hash without block"
        assert len(self._partial) == len(self.partials), "a partial block that is not cached"
        live = sum(block.ref_count > 0 for block in self.blocks)
        assert self.num_active == live, "a block leaked"
        total = self.num_active + self.num_cached + self.num_free
        assert total == self.num_blocks, "active + cached + free differs from the total"
