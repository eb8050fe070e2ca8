"""Miss-ratio curves: what caches of every size would hit, from the calls of one replay.

A replay logs its cache's calls with blocks named by content. One pass over them gives the stack
distance of every block looked up: the smallest LRU cache that still holds it (Mattson et al. 1970,
with blocks in use pinned). Where a size cannot follow the order of the calls (`fits` is false),
only a replay at that size tells. `run_calls` runs the calls through KVCacheManager itself, to check
a point. The two differ a little: a block that is filled while another size still holds its content
is private there and its new holder here, a prompt computed in chunks takes blocks in chunks, and
where a request leaves before its tokens are computed evictions may differ by one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.errors import ConfigError
from workbench.kvcache.manager import Allocation, KVCacheManager
from workbench.kvcache.pool import Block, BlockPool, CacheStats

NEVER = 1 << 60


# -- the calls: what succeeded, in order, blocks named by content --


class Allocate(NamedTuple):
    """An admission. contents: of its full blocks; room: tokens that room is made for; coverable:
    full blocks that a hit may cover.
    """

    sequence: int
    contents: list[int]
    tokens: int
    room: int
    coverable: int
    readmission: bool


class Extend(NamedTuple):
    """Room for so many tokens. contents: of the full blocks beyond those named so far."""

    sequence: int
    contents: list[int]
    tokens: int


class Free(NamedTuple):
    """A sequence leaves. computed: tokens whose KV exists; None: all."""

    sequence: int
    computed: int | None


@dataclass(frozen=True, slots=True)
class CacheCalls:
    """An order of calls. num_contents: contents are numbered below it."""

    block_size: int
    num_contents: int
    calls: Sequence[Allocate | Extend | Free]


class LoggedCache(KVCacheManager):
    """A cache that keeps its calls."""

    def __init__(self, *sizes: Any, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        if self.reuse_partial_blocks:
            raise ConfigError(
                "Calls are kept in full blocks; log_calls needs reuse_partial_blocks=False."
            )
        self._numbers: dict[bytes, int] = {}
        self._named: dict[int, int] = {}  # full blocks of each sequence that were named
        self._log: list[Allocate | Extend | Free] = []

    @property
    def calls(self) -> CacheCalls:
        """The calls so far."""
        return CacheCalls(self.block_size, len(self._numbers), self._log)

    def allocate(
        self, seq_id: int, token_ids: Any, num_tokens: int | None = None, **options: Any
    ) -> Allocation | None:
        found = super().allocate(seq_id, token_ids, num_tokens, **options)
        if found is not None:
            contents, length = self._contents(seq_id, token_ids), len(token_ids)
            room = length if num_tokens is None else min(num_tokens, length)
            coverable = self.coverable(length, options.get("max_hit"))
            again = options.get("readmission", False)
            self._log.append(Allocate(seq_id, contents, length, room, coverable, again))
        return found

    def extend(self, seq_id: int, token_ids: Any) -> list[int] | None:
        found = super().extend(seq_id, token_ids)
        if found is not None:
            self._log.append(Extend(seq_id, self._contents(seq_id, token_ids), len(token_ids)))
        return found

    def free(self, seq_id: int, num_computed: int | None = None, **options: Any) -> None:
        super().free(seq_id, num_computed, **options)
        del self._named[seq_id]
        self._log.append(Free(seq_id, num_computed))

    def _contents(self, seq_id: int, token_ids: Any) -> list[int]:
        """Numbers of the sequence's full blocks that were not named before."""
        numbers, first = self._numbers, self._named.get(seq_id, 0)
        full = self._named[seq_id] = max(first, len(token_ids) // self.block_size)
        hashes = self._hashed(token_ids, b"")[2] if full > first else []
        return [numbers.setdefault(digest, len(numbers)) for digest in hashes[first:full]]


@dataclass(slots=True)
class _Known:
    """A sequence as a cache takes it, of which only the contents of full blocks are known."""

    contents: list[Any]
    tokens: int

    def __len__(self) -> int:
        return self.tokens

    def block_hashes(self, root: bytes, block_size: int) -> list[Any]:
        return self.contents


def run_calls(
    calls: CacheCalls, num_blocks: int, pool: BlockPool | None = None
) -> CacheStats | None:
    """The statistics of these calls at another size, by KVCacheManager itself; None: do not fit."""
    cache = KVCacheManager(num_blocks, calls.block_size, calls.num_contents > 0, pool=pool)
    sequences: dict[int, Any] = {}
    for call in calls.calls:
        number = call.sequence
        if isinstance(call, Free):
            cache.free(number, call.computed)
            continue
        if isinstance(call, Allocate):
            sequences[number] = _Known([], 0)
        known = sequences[number]
        known.contents, known.tokens = known.contents + call.contents, call.tokens
        found: object
        if isinstance(call, Extend):
            found = cache.extend(number, known)
        else:
            most, again = call.coverable * calls.block_size, call.readmission
            found = cache.allocate(number, known, call.room, max_hit=most, readmission=again)
        if found is None:
            return None
    return cache.stats


# -- LRU at every size: one pass along them --


@dataclass(slots=True)
class _Holder:
    """A block that can be hit. content: None once its hash was withdrawn; stamp: of its last
    release.
    """

    content: int | None
    users: int = 1
    stamp: int = 0


@dataclass(slots=True)
class _Table:
    """A running sequence: its contents, and its blocks; None is a private block."""

    contents: list[int]
    blocks: list[_Holder | None]
    published: int


class _Stack:
    """A cache that evicts nothing, and the stack distance of all it holds.

    A slot is a cached block or a hole, in the order of release. A block's distance is the number of
    active blocks and of slots not older than it. What is taken fills the newest hole, so that only
    newer blocks move down; a cached block that is hit leaves a hole first, since smaller caches
    take a block for it.
    """

    def __init__(self, calls: CacheCalls) -> None:
        self._size = calls.block_size
        self._holders: dict[int, _Holder] = {}
        self._tables: dict[int, _Table] = {}
        self._active = self._stamp = 0
        self._slots: list[int] = []  # stamps, ascending
        self._holes: list[int] = []  # heap of negative stamps
        self._gone: dict[int, int] = {}  # content -> smaller caches have evicted it
        self.peak = 0  # most blocks active, or asked for, at once
        self.query_tokens = 0  # of first admissions, as the hits
        self.hits: list[int] = []  # least sizes
        self.lost: list[int] = []  # smaller caches thrash
        self.evicted: list[int] = []  # smaller caches evict a content, once more
        for call in calls.calls:
            if isinstance(call, Free):
                self._free(call)
            else:
                self._make_room(call)
        cached = [holder for holder in self._holders.values() if not holder.users]
        self.evicted += [self._distance(holder) for holder in cached]

    def _make_room(self, call: Allocate | Extend) -> None:
        hit: list[_Holder] = []
        room, size = call.tokens, self._size
        if isinstance(call, Allocate):
            contents, room = call.contents[: call.coverable], call.room
            for holder in map(self._holders.get, contents):
                if holder is None:
                    break
                hit.append(holder)
            self._look_up(contents, len(hit), call.readmission)
            self._tables[call.sequence] = _Table([], list(hit), len(hit))
            self.query_tokens += 0 if call.readmission else call.tokens
        table = self._tables[call.sequence]
        table.contents += call.contents
        cached = [holder for holder in hit if not holder.users]
        needed = -(-call.tokens // size) - len(table.blocks) + len(cached)
        self.peak = max(self.peak, self._active + needed)
        for holder in hit:
            holder.users += 1
        for holder in cached:
            heappush(self._holes, -holder.stamp)
            self._fill_hole()
        for _ in range(-(-room // size) - len(table.blocks)):
            self._fill_hole()
            table.blocks.append(None)
        full = min(room // size, len(table.contents))
        for i in range(table.published, full):
            content = table.contents[i]
            held = self._holders.get(content)
            if held is not None and held.users:
                continue  # the new block stays private
            if held is not None:  # it becomes the holder, as in caches that evicted the cached one
                self._lose(content, self._distance(held))
                heappush(self._holes, -held.stamp)
            table.blocks[i] = self._holders[content] = _Holder(content)
        table.published = max(table.published, full)

    def _look_up(self, contents: list[int], num_hit: int, readmission: bool) -> None:
        """A request asks for these contents, and shares the holders of the first num_hit."""
        reach = least = stamp = 0
        for i, content in enumerate(contents):
            holder = self._holders.get(content)
            if holder is None:
                needed = self._gone.get(content, 0)
            elif holder.users:
                needed = 0
            else:  # blocks of a sequence are released tail first
                least = least + 1 if holder.stamp == stamp - 1 else self._distance(holder)
                needed, stamp = least, holder.stamp
            if i < num_hit:
                reach = max(reach, needed)
                if not readmission:
                    self.hits.append(reach)
                if needed:
                    self._lose(content, needed)
            if needed:
                self.lost.append(needed)

    def _lose(self, content: int, size: int) -> None:
        """A cached content is used again, which caches below this size have evicted."""
        self.evicted.append(size)
        self._gone[content] = max(self._gone.get(content, 0), size)

    def _distance(self, holder: _Holder) -> int:
        return self._active + len(self._slots) - bisect_left(self._slots, holder.stamp)

    def _fill_hole(self) -> None:
        """A block becomes active."""
        self._active += 1
        if self._holes:
            del self._slots[bisect_left(self._slots, -heappop(self._holes))]

    def _free(self, call: Free) -> None:
        table = self._tables.pop(call.sequence)
        if call.computed is not None:
            for holder in table.blocks[call.computed // self._size :]:
                if holder is not None and holder.content is not None:
                    del self._holders[holder.content]
                    holder.content = None
        for holder in reversed(table.blocks):
            if holder is not None:
                holder.users -= 1
                if holder.users:
                    continue
            self._active -= 1
            self._stamp += 1
            self._slots.append(self._stamp)
            if holder is None or holder.content is None:
                heappush(self._holes, -self._stamp)
            else:
                holder.stamp = self._stamp


def miss_ratio(calls: CacheCalls, sizes: Sequence[int]) -> pd.DataFrame:
    """One row a size: num_blocks, fits, peak_active, hit_ratio; and query_tokens, hit_tokens (of
    first admissions, as hit_ratio), evicted and thrashed as in CacheStats.

    fits: whether every call succeeds at this size; where not, the scheduler would change the order,
    and the row's other figures are of no order that happens. peak_active: most blocks in use, or
    asked for at once.
    """
    if not len(sizes) or min(sizes) < 1:
        raise ConfigError(f"Cache sizes are {list(sizes)!r:.200}; give one or more, each >= 1.")
    stack = _Stack(calls)
    num_blocks = np.array(sizes, np.int64)

    def above(distances: list[int]) -> NDArray[np.int64]:
        """How many of the distances are above each size."""
        return len(distances) - np.searchsorted(np.sort(distances), num_blocks, side="right")

    hit_tokens = calls.block_size * (len(stack.hits) - above(stack.hits))
    return pd.DataFrame(
        {
            "num_blocks": num_blocks,
            "fits": stack.peak <= num_blocks,
            "peak_active": stack.peak,
            "hit_ratio": hit_tokens / max(stack.query_tokens, 1),
            "query_tokens": stack.query_tokens,
            "hit_tokens": hit_tokens,
            "evicted": above(stack.evicted),
            "thrashed": above(stack.lost),
        }
    )


def curve_sizes(calls: CacheCalls, count: int) -> list[int]:
    """Sizes from half the order's peak of active blocks to where nothing is ever evicted."""
    peak = max(1, int(miss_ratio(calls, [1]).iloc[0]["peak_active"]))
    most = calls.num_contents + peak
    found = np.linspace(max(peak // 2, 1), most, count).astype(int)
    return sorted({*found.tolist(), peak})


# -- the optimum --


class _Belady(BlockPool):
    """A pool that evicts what is needed last, the deepest of a prefix first (Belady 1966).

    requests: of each content, which is its hash, the calls that ask for it, latest first.
    """

    def __init__(self, num_blocks: int, requests: list[list[int]]) -> None:
        super().__init__(num_blocks)
        self._requests = [list(places) for places in requests]
        self._victims: list[tuple[int, int]] = []  # heap: (-next request, -content)

    def admitted(self, missed: list[Any]) -> None:
        """These contents were asked for; one held behind the first miss waits for its next call."""
        for content in missed:
            self._requests[content].pop()
            block = self.holders.get(content)
            if block in self._full:
                heappush(self._victims, self._victim(content))

    def share(self, blocks: Iterable[Block]) -> None:
        """These were asked for, and hit."""
        for block in blocks:
            content: Any = block.digest
            self._requests[content].pop()
        super().share(blocks)

    def _unused(self, block: Block) -> None:
        super()._unused(block)
        if block.digest is not None:
            heappush(self._victims, self._victim(block.digest))

    def _victim(self, content: Any) -> tuple[int, int]:
        """Of a prefix, what comes later has the larger number, and goes first."""
        times = self._requests[content]
        return -(times[-1] if times else NEVER), -content

    @property
    def next_evicted(self) -> Block | None:
        """Entries of what was asked for, used or evicted since are skipped."""
        while self._victims:
            entry = heappop(self._victims)
            holders: dict[Any, Block] = self.holders
            block = holders.get(-entry[1])
            if block in self._full and entry == self._victim(-entry[1]):
                return block
        return None


def optimal_hits(calls: CacheCalls, sizes: Sequence[int]) -> pd.DataFrame:
    """One row a size that fits: what the best policy would hit, knowing the future (Belady 1966).

    Columns as in miss_ratio. Where two sequences fill equal blocks, the victim also decides whose
    block the others share, which Belady did not know: there it is close to the best, no bound.
    """
    requests: list[list[int]] = [[] for _ in range(calls.num_contents)]
    for place in range(len(calls.calls) - 1, -1, -1):
        call = calls.calls[place]
        if isinstance(call, Allocate):
            for content in call.contents[: call.coverable]:
                requests[content].append(place)
    columns = ["num_blocks", "hit_tokens", "hit_ratio", "evicted"]
    found = {size: run_calls(calls, size, _Belady(size, requests)) for size in sizes}
    rows = [
        {name: getattr(best, name, None) for name in columns}
        | {"num_blocks": size, "hit_ratio": best.hit_tokens / max(best.query_tokens, 1)}
        for size, best in found.items()
        if best is not None
    ]
    return pd.DataFrame(rows, columns=columns)
