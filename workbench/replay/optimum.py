"""Belady's optimum beside LRU: what the best policy of all would hit, knowing the future.

The same calls and the same rules of who holds what; only the victim differs: the cached content
whose next request lies farthest ahead, the deepest of a prefix first where that ties. So the gap to
the LRU curve is the policy's, and the rest is the size's. Where two sequences fill equal blocks,
the victim also decides whose block the others share, which Belady did not know: there it is close
to the best, no bound. One size at a time; a line to draw, no policy to run.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

from workbench.replay.calls import Allocate, CacheCalls, Extend, Free

COLUMNS = ["num_blocks", "hit_tokens", "readmit_hit_tokens", "hit_ratio", "evicted"]
NEVER = 1 << 60


def optimal_hits(calls: CacheCalls, sizes: Sequence[int]) -> pd.DataFrame:
    """One row a size, with COLUMNS as in miss_ratio; hit_ratio is of first admissions.

    Sizes that some call does not fit are left out.
    """
    requests = _requests(calls)
    rows = [row for size in sizes if (row := _Optimum(calls, size, requests).run()) is not None]
    return pd.DataFrame(rows, columns=COLUMNS)


def _requests(calls: CacheCalls) -> list[list[int]]:
    """When each content is asked for where a hit may cover it: numbers of calls, latest first."""
    found: list[list[int]] = [[] for _ in range(calls.num_contents)]
    for place in range(len(calls.calls) - 1, -1, -1):
        call = calls.calls[place]
        if isinstance(call, Allocate):
            for content in call.contents[: call.coverable].tolist():
                found[content].append(place)
    return found


@dataclass(slots=True)
class _Holder:
    """A block that can be hit. content: None once its hash was withdrawn."""

    content: int | None
    depth: int
    users: int = 1


@dataclass(slots=True)
class _Table:
    """A running sequence: its contents, and its blocks; None is a private block."""

    contents: list[int]
    blocks: list[_Holder | None] = field(default_factory=list)
    published: int = 0


class _Optimum:
    """One cache of one size that evicts what is needed last."""

    def __init__(self, calls: CacheCalls, size: int, requests: list[list[int]]) -> None:
        self._calls, self._size = calls, size
        self._requests = [list(places) for places in requests]
        self._holders: dict[int, _Holder] = {}
        self._tables: dict[int, _Table] = {}
        self._victims: list[tuple[int, int, int]] = []  # (-next request, -depth, content)
        self._active = self._parked = self._evicted = 0
        self._hit_tokens = self._readmit_hit_tokens = self._query_tokens = 0

    def run(self) -> tuple[int, int, int, float, int] | None:
        """The row of this size; None when a call does not fit."""
        for place, call in enumerate(self._calls.calls):
            if isinstance(call, Free):
                self._free(call)
            elif not (
                self._allocate(call, place) if isinstance(call, Allocate) else self._extend(call)
            ):
                return None
        ratio = self._hit_tokens / max(self._query_tokens, 1)
        return (self._size, self._hit_tokens, self._readmit_hit_tokens, ratio, self._evicted)

    def _allocate(self, call: Allocate, place: int) -> bool:
        contents = call.contents.tolist()
        for content in contents[: call.coverable]:
            self._pass(content, place)
        hit = self._hit(contents[: call.coverable])
        woken = sum(holder.users == 0 for holder in hit)
        needed = self._calls.blocks_for(call.tokens) - len(hit) + woken
        if self._active + needed > self._size:
            return False
        tokens = len(hit) * self._calls.block_size
        if call.readmission:
            self._readmit_hit_tokens += tokens
        else:
            self._query_tokens += call.tokens
            self._hit_tokens += tokens
        for holder in hit:
            holder.users += 1
        self._parked -= woken
        self._active += woken
        table = _Table(contents, list(hit), len(hit))
        self._tables[call.sequence] = table
        self._grow(table, call.room)
        return True

    def _hit(self, contents: list[int]) -> list[_Holder]:
        run = []
        for content in contents:
            holder = self._holders.get(content)
            if holder is None:
                break
            run.append(holder)
        return run

    def _extend(self, call: Extend) -> bool:
        table = self._tables[call.sequence]
        table.contents += call.contents.tolist()
        missing = self._calls.blocks_for(call.tokens) - len(table.blocks)
        if self._active + missing > self._size:
            return False
        self._grow(table, call.tokens)
        return True

    def _grow(self, table: _Table, tokens: int) -> None:
        for _ in range(self._calls.blocks_for(tokens) - len(table.blocks)):
            if self._active + self._parked == self._size:
                self._evict()
            self._active += 1
            table.blocks.append(None)
        full = min(tokens // self._calls.block_size, len(table.contents))
        for i in range(table.published, full):
            content = table.contents[i]
            if content not in self._holders:
                table.blocks[i] = self._holders[content] = _Holder(content, i)
        table.published = max(table.published, full)

    def _pass(self, content: int, place: int) -> None:
        """This call asks for the content; what is cached waits for its next request from now on."""
        times = self._requests[content]
        while times and times[-1] <= place:
            times.pop()
        holder = self._holders.get(content)
        if holder is not None and holder.users == 0:
            heapq.heappush(self._victims, self._victim(content, holder))

    def _victim(self, content: int, holder: _Holder) -> tuple[int, int, int]:
        times = self._requests[content]
        return (-(times[-1] if times else NEVER), -holder.depth, content)

    def _evict(self) -> None:
        """Entries of contents that were asked for, used or evicted since are passed over."""
        while True:
            victim = heapq.heappop(self._victims)
            content = victim[2]
            holder = self._holders.get(content)
            if holder is not None and not holder.users and victim == self._victim(content, holder):
                break
        del self._holders[content]
        self._parked -= 1
        self._evicted += 1

    def _free(self, call: Free) -> None:
        table = self._tables.pop(call.sequence)
        if call.computed is not None:
            for holder in table.blocks[call.computed // self._calls.block_size :]:
                if holder is not None and holder.content is not None:
                    del self._holders[holder.content]
                    holder.content = None
        for holder in reversed(table.blocks):
            self._release(holder)

    def _release(self, holder: _Holder | None) -> None:
        if holder is not None:
            holder.users -= 1
            if holder.users:
                return
        self._active -= 1
        if holder is not None and holder.content is not None:
            self._parked += 1
            heapq.heappush(self._victims, self._victim(holder.content, holder))
