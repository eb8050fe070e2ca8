"""Miss-ratio curves: one order of cache calls, every cache size asked for, in one pass.

All sizes are carried along together, one column each, and follow KVCacheManager's rules to the
letter, so that each column equals a run of those calls through the manager. Stack distances would
need one column for all, but are exact only while no block is filled whose content another size
still holds: such a duplicate is private there and the new holder here, and from then on the sizes
differ in what is least recent. What it does not do: change the order, as a scheduler at a smaller
size would; sizes that cannot follow it are marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.errors import ConfigError
from workbench.kvcache.pool import CacheStats
from workbench.replay.calls import Allocate, CacheCalls, Contents, Extend, Free

Counts = NDArray[np.int64]  # [sizes]
Marks = NDArray[np.bool_]  # [rows, sizes]

ACTIVE = np.int32(2**31 - 1)
WINDOW = 128  # park events looked at together when a block is to be evicted


def miss_ratio(calls: CacheCalls, sizes: Sequence[int]) -> pd.DataFrame:
    """One row a size: num_blocks, fits, peak_active, hit_ratio, and every field of CacheStats.

    fits: whether every call succeeds at this size; where not, the scheduler would change the order,
    and the row's other figures are of no order that happens. peak_active: most blocks in use, or
    asked for at once. hit_ratio: of first admissions.
    """
    if not len(sizes) or min(sizes) < 1:
        raise ConfigError(f"Cache sizes are {list(sizes)!r:.200}; give one or more, each >= 1.")
    sweep = _Sweep(calls, np.array(sizes, np.int64))
    for call in calls.calls:
        if isinstance(call, Allocate):
            sweep.allocate(call)
        elif isinstance(call, Extend):
            sweep.extend(call)
        else:
            sweep.free(call)
    return sweep.frame()


@dataclass(slots=True)
class _Ghost:
    """A block whose hash was withdrawn while several sequences shared it: users by size."""

    users: Counts


@dataclass(slots=True)
class _Running:
    """A sequence. holds: whether its block i is the holder of contents[i], by size.

    blocks, published: of its table, by size. ghosts: shared blocks without a hash, and where.
    """

    contents: Contents
    holds: Marks
    blocks: Counts
    published: Counts
    ghosts: list[tuple[_Ghost, NDArray[np.bool_]]] = field(default_factory=list)


class _Sweep:
    """Caches of all sizes, side by side.

    stamp [contents, sizes]: 0 where the content is not held, ACTIVE where a sequence uses it, else
    the number of the park event that cached it: the greater, the more recently freed.
    """

    def __init__(self, calls: CacheCalls, sizes: Counts) -> None:
        shape = (calls.num_contents, len(sizes))
        self._calls, self._sizes = calls, sizes
        self._stamp = np.zeros(shape, np.int32)
        self._users = np.zeros(shape, np.int32)
        self._gone = np.zeros(shape, bool)  # evicted at least once
        self._running: dict[int, _Running] = {}
        self._parked_content = np.zeros(_park_events(calls) + WINDOW + 1, np.int32)
        self._next_stamp = 1
        self._oldest = np.ones(len(sizes), np.int64)  # no park event before it is alive
        self._active = np.zeros(len(sizes), np.int64)
        self._parked = np.zeros(len(sizes), np.int64)
        self._peak = np.zeros(len(sizes), np.int64)
        self._owes = False  # blocks were taken and nothing evicted for them yet
        self._stats = {f.name: np.zeros(len(sizes), np.int64) for f in fields(CacheStats)}

    def frame(self) -> pd.DataFrame:
        """A row a size."""
        self._settle()
        ratio = self._stats["hit_tokens"] / np.maximum(self._stats["query_tokens"], 1)
        return pd.DataFrame(
            {
                "num_blocks": self._sizes,
                "fits": self._peak <= self._sizes,
                "peak_active": self._peak,
                "hit_ratio": ratio,
            }
            | self._stats
        )

    def allocate(self, call: Allocate) -> None:
        """Share the longest run of held blocks, take the others, publish what they fill."""
        self._settle()
        within = call.contents[: call.coverable]
        stamp = self._stamp[within]
        run = np.logical_and.accumulate(stamp > 0, axis=0)
        hit = run.sum(axis=0)
        woken = (run & (stamp != ACTIVE)).sum(axis=0)
        self._count(call, hit, (stamp == 0) & self._gone[within])
        self._require(self._calls.blocks_for(call.tokens) - hit + woken)
        self._stamp[within] = np.where(run, ACTIVE, stamp)
        self._users[within] += run
        self._parked -= woken
        self._active += woken
        holds = np.zeros((len(call.contents), len(hit)), bool)
        holds[: call.coverable] = run
        running = _Running(call.contents, holds, hit, hit)
        self._running[call.sequence] = running
        self._grow(running, call.room)

    def extend(self, call: Extend) -> None:
        """Room for more tokens."""
        running = self._running[call.sequence]
        if len(call.contents):
            running.contents = np.concatenate([running.contents, call.contents])
            more = np.zeros((len(call.contents), len(self._sizes)), bool)
            running.holds = np.concatenate([running.holds, more])
        missing = self._calls.blocks_for(call.tokens) - running.blocks
        self._require(np.maximum(missing, 0))
        self._grow(running, call.tokens)

    def free(self, call: Free) -> None:
        """Withdraw what was never computed, then park or release every block, tail first."""
        self._settle()
        running = self._running.pop(call.sequence)
        private = running.blocks - running.holds.sum(axis=0)
        for ghost, where in running.ghosts:
            private -= where
            ghost.users -= where
            self._active -= where & (ghost.users == 0)
        if call.computed is not None:
            self._withdraw(running, call.computed // self._calls.block_size)
        self._active -= private
        contents, holds = running.contents, running.holds
        users = self._users[contents] - holds
        self._users[contents] = users
        idle = holds & (users == 0)
        count = len(contents)
        stamps = self._next_stamp + np.arange(count - 1, -1, -1, dtype=np.int32)
        self._parked_content[stamps] = contents
        self._next_stamp += count
        self._stamp[contents] = np.where(idle, stamps[:, None], self._stamp[contents])
        parked = idle.sum(axis=0)
        self._parked += parked
        self._active -= parked

    def _count(self, call: Allocate, hit: Counts, thrashed: Marks) -> None:
        lost, stats, size = thrashed.sum(axis=0), self._stats, self._calls.block_size
        stats["thrashed"] += lost
        stats["thrash_events"] += lost > 0
        kind = "readmit_" if call.readmission else ""
        stats[f"{kind}query_tokens"] += call.tokens
        stats[f"{kind}hit_tokens"] += hit * size
        if call.readmission:
            stats["thrashed_readmit"] += lost

    def _require(self, blocks: Counts) -> None:
        """So many blocks are to be had, beside those in use."""
        self._peak = np.maximum(self._peak, self._active + blocks)

    def _grow(self, running: _Running, tokens: int) -> None:
        blocks = np.maximum(running.blocks, self._calls.blocks_for(tokens))
        taken = blocks - running.blocks
        self._active += taken
        self._stats["allocated"] += taken
        self._owes = True
        running.blocks = blocks
        self._publish(running, min(tokens // self._calls.block_size, len(running.contents)))

    def _publish(self, running: _Running, full: int) -> None:
        first = int(running.published.min())
        if first >= full:
            return
        rows = running.contents[first:full]
        stamp = self._stamp[rows]
        if ((stamp > 0) & (stamp != ACTIVE)).any():  # an eviction may decide whether it is held
            self._settle()
            stamp = self._stamp[rows]
        offered = np.arange(first, full)[:, None] >= running.published
        new = offered & (stamp == 0)
        self._stamp[rows] = np.where(new, ACTIVE, stamp)
        self._users[rows] += new
        running.holds[first:full] |= new
        self._stats["duplicates"] += (offered & ~new).sum(axis=0)
        running.published = np.maximum(running.published, full)

    def _settle(self) -> None:
        """Evict for the blocks that were taken. Put off while nobody asks what is cached: until
        then blocks are only taken, so that the sum of all is what each would have evicted.
        """
        if self._owes:
            self._evict(self._active + self._parked - self._sizes)
            self._owes = False

    def _evict(self, wanted: Counts) -> None:
        """Give up the least recently parked contents, so many at each size."""
        columns = np.flatnonzero((wanted > 0) & (self._peak <= self._sizes))
        while len(columns):
            events = self._oldest[columns, None] + np.arange(WINDOW)
            contents = self._parked_content[np.minimum(events, self._next_stamp)]
            alive = self._stamp[contents, columns[:, None]] == events
            alive &= events < self._next_stamp
            given = alive & (np.cumsum(alive, axis=1) <= wanted[columns, None])
            self._give_up(contents, columns, given)
            wanted[columns] -= given.sum(axis=1)
            looked = np.where(wanted[columns] > 0, WINDOW, WINDOW - given[:, ::-1].argmax(axis=1))
            self._oldest[columns] += looked
            columns = columns[wanted[columns] > 0]

    def _give_up(self, contents: NDArray[np.int32], columns: Counts, given: Marks) -> None:
        rows, places = np.nonzero(given)
        lost, where = contents[rows, places], columns[rows]
        self._stamp[lost, where] = 0
        self._gone[lost, where] = True
        counts = given.sum(axis=1)
        self._parked[columns] -= counts
        self._stats["evicted"][columns] += counts

    def _withdraw(self, running: _Running, kept: int) -> None:
        """Contents from block `kept` on can be hit no more where this sequence holds them."""
        rows, holds = running.contents[kept:], running.holds[kept:]
        if not holds.any():
            return
        others = self._users[rows] - holds
        self._active -= (holds & (others == 0)).sum(axis=0)
        self._leave_to_others(rows, holds & (others > 0), others)
        self._stamp[rows] = np.where(holds, 0, self._stamp[rows])
        self._users[rows] = np.where(holds, 0, self._users[rows])
        running.contents, running.holds = running.contents[:kept], running.holds[:kept]

    def _leave_to_others(self, rows: Contents, shared: Marks, others: NDArray[np.int32]) -> None:
        """Blocks that lose their hash while other sequences use them stay with those."""
        for i in np.flatnonzero(shared.any(axis=1)).tolist():
            ghost = _Ghost(np.where(shared[i], others[i], 0).astype(np.int64))
            for running in self._running.values():
                for place in np.flatnonzero(running.contents == rows[i]).tolist():
                    where = running.holds[place] & shared[i]
                    running.holds[place] &= ~where
                    running.ghosts.append((ghost, where))


def _park_events(calls: CacheCalls) -> int:
    """At most so many contents are parked."""
    named: dict[int, int] = {}
    total = 0
    for call in calls.calls:
        if isinstance(call, Free):
            total += named.pop(call.sequence)
        elif isinstance(call, Allocate):
            named[call.sequence] = len(call.contents)
        else:
            named[call.sequence] += len(call.contents)
    return total
