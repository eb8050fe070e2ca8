"""One order of cache calls at one cache size: KVCacheManager's rules over contents, compiled.

The same laws as manager.py's and pool.py's, stripped of ids and tables: who holds which content,
which was parked when, what is evicted. It carries no tokens and hashes nothing, so a size costs
nanoseconds a block. What it does not do: prepare calls (miss_ratio.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from workbench.replay.calls import ALLOCATE, FREE

ABSENT, USED, CACHED = range(3)  # a content: not held, in use, held by nobody's block
ACTIVE, PARKED, PEAK, STAMPS, OLDEST, GHOSTS, SIZE, BLOCK_SIZE = range(8)
_HIT, _READMIT, _ALLOCATED, _EVICTED, _THRASHED, _EVENTS, _DUPLICATES = 1, 2, 4, 5, 6, 8, 9


class _Cache(NamedTuple):
    """Arrays of a cache. Sequence s has contents[starts[s]:], in order; so have holds, ghost_of.

    stamp: the park event that cached a content, which parked names again; gone: evicted at least
    once; holds: whether the sequence's block holds it for all; ghost_of: a shared block whose hash
    was withdrawn, by number; known, blocks, published: of each sequence; now: the counters above.
    """

    starts: Any
    contents: Any
    state: Any
    users: Any
    stamp: Any
    gone: Any
    parked: Any
    holds: Any
    ghost_of: Any
    ghost_users: Any
    blocks: Any
    published: Any
    known: Any
    running: Any
    stats: Any
    now: Any


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """By numba at the first call, kept on disk where a folder can be written."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no such folder
        return njit(**options)(function)  # type: ignore[no-any-return]


@_compiled
def run_at_size(
    size: int, block_size: int, calls: Any, starts: Any, contents: Any, num_contents: int
) -> tuple[Any, int]:
    """The counts, as in calls.STATS, and the most blocks in use or asked for at once.

    calls [n, 8]: kind, sequence, contents known after it, tokens, room, coverable blocks,
    readmission, computed tokens (-1: all). Where the peak is above the size, the counts are of no
    order that happens.
    """
    places, sequences = len(contents), len(starts)
    cache = _Cache(
        starts,
        contents,
        np.zeros(num_contents, np.int8),
        np.zeros(num_contents, np.int32),
        np.zeros(num_contents, np.int64),
        np.zeros(num_contents, np.bool_),
        np.zeros(places + 2, np.int32),
        np.zeros(places, np.bool_),
        np.zeros(places, np.int32),
        np.zeros(places + 1, np.int32),
        np.zeros(sequences, np.int64),
        np.zeros(sequences, np.int64),
        np.zeros(sequences, np.int64),
        np.zeros(sequences, np.bool_),
        np.zeros(11, np.int64),
        np.array([0, 0, 0, 1, 1, 0, size, block_size]),
    )
    for number in range(len(calls)):
        kind, s, known, tokens, room, coverable, again, computed = calls[number]
        if kind == FREE:
            _free(cache, s, computed)
            continue
        cache.known[s] = known
        if kind == ALLOCATE:
            _admit(cache, s, tokens, coverable, again)
            _grow(cache, s, room)
        else:
            _require(cache, max(_blocks_for(cache, tokens) - cache.blocks[s], 0))
            _grow(cache, s, tokens)
    return cache.stats, cache.now[PEAK]


@_compiled
def _blocks_for(cache: _Cache, tokens: int) -> int:
    return -(-tokens // cache.now[BLOCK_SIZE])  # type: ignore[no-any-return]


@_compiled
def _require(cache: _Cache, blocks: int) -> None:
    """So many blocks are to be had, beside those in use."""
    cache.now[PEAK] = max(cache.now[PEAK], cache.now[ACTIVE] + blocks)


@_compiled
def _admit(cache: _Cache, s: int, tokens: int, coverable: int, again: int) -> None:
    """Share the longest run of held blocks."""
    start, state, now = cache.starts[s], cache.state, cache.now
    hit, woken = 0, 0
    while hit < coverable and state[cache.contents[start + hit]] != ABSENT:
        woken += state[cache.contents[start + hit]] == CACHED
        hit += 1
    _count(cache, s, tokens, hit, coverable, again)
    _require(cache, _blocks_for(cache, tokens) - hit + woken)
    for i in range(start, start + hit):
        cache.users[cache.contents[i]] += 1
        state[cache.contents[i]] = USED
        cache.holds[i] = True
    now[PARKED] -= woken
    now[ACTIVE] += woken
    cache.running[s] = True
    cache.blocks[s] = cache.published[s] = hit


@_compiled
def _count(cache: _Cache, s: int, tokens: int, hit: int, coverable: int, again: int) -> None:
    start, stats, lost = cache.starts[s], cache.stats, 0
    for i in range(start + hit, start + coverable):
        content = cache.contents[i]
        lost += cache.state[content] == ABSENT and cache.gone[content]
    first = _READMIT if again else 0
    stats[first] += tokens
    stats[first + _HIT] += hit * cache.now[BLOCK_SIZE]
    stats[_THRASHED] += lost
    stats[_THRASHED + 1] += lost if again else 0
    stats[_EVENTS] += lost > 0


@_compiled
def _grow(cache: _Cache, s: int, tokens: int) -> None:
    """Take the blocks that tokens need, then publish those they fill."""
    taken = max(_blocks_for(cache, tokens) - cache.blocks[s], 0)
    cache.blocks[s] += taken
    cache.now[ACTIVE] += taken
    cache.stats[_ALLOCATED] += taken
    _evict(cache)
    full = min(tokens // cache.now[BLOCK_SIZE], cache.known[s])
    for i in range(cache.starts[s] + cache.published[s], cache.starts[s] + full):
        content = cache.contents[i]
        if cache.state[content] == ABSENT:
            cache.state[content] = USED
            cache.users[content] = 1
            cache.holds[i] = True
        else:
            cache.stats[_DUPLICATES] += 1
    cache.published[s] = max(cache.published[s], full)


@_compiled
def _evict(cache: _Cache) -> None:
    """Give up the least recently parked contents until the blocks suffice."""
    now = cache.now
    while now[PEAK] <= now[SIZE] and now[ACTIVE] + now[PARKED] > now[SIZE]:
        content = cache.parked[now[OLDEST]]
        if cache.state[content] == CACHED and cache.stamp[content] == now[OLDEST]:
            cache.state[content] = ABSENT
            cache.gone[content] = True
            now[PARKED] -= 1
            cache.stats[_EVICTED] += 1
        now[OLDEST] += 1


@_compiled
def _free(cache: _Cache, s: int, computed: int) -> None:
    """Withdraw what was never computed, then park or release every block, tail first."""
    start, end, now = cache.starts[s], cache.starts[s] + cache.known[s], cache.now
    kept = end if computed < 0 else min(end, start + computed // now[BLOCK_SIZE])
    cache.running[s] = False
    now[ACTIVE] -= _private(cache, s)
    for i in range(kept, end):
        if cache.holds[i]:
            _withdraw(cache, cache.contents[i])
    for i in range(kept - 1, start - 1, -1):
        if cache.holds[i]:
            _release(cache, cache.contents[i])


@_compiled
def _private(cache: _Cache, s: int) -> int:
    """Blocks that are free without the sequence: nobody else's, and without a hash."""
    private = cache.blocks[s]
    for i in range(cache.starts[s], cache.starts[s] + cache.known[s]):
        ghost = cache.ghost_of[i]
        if cache.holds[i]:
            private -= 1
        elif ghost:
            cache.ghost_users[ghost] -= 1
            private -= cache.ghost_users[ghost] > 0
    return private  # type: ignore[no-any-return]


@_compiled
def _release(cache: _Cache, content: int) -> None:
    now = cache.now
    cache.users[content] -= 1
    if cache.users[content] == 0:
        cache.state[content] = CACHED
        cache.stamp[content] = now[STAMPS]
        cache.parked[now[STAMPS]] = content
        now[STAMPS] += 1
        now[ACTIVE] -= 1
        now[PARKED] += 1


@_compiled
def _withdraw(cache: _Cache, content: int) -> None:
    """It can be hit no more; its block stays with other sequences that use it."""
    if cache.users[content] == 1:
        cache.now[ACTIVE] -= 1
    else:
        cache.now[GHOSTS] += 1
        cache.ghost_users[cache.now[GHOSTS]] = cache.users[content] - 1
        for s in range(len(cache.starts)):
            if cache.running[s]:
                _leave_to(cache, s, content)
    cache.state[content] = ABSENT
    cache.users[content] = 0


@_compiled
def _leave_to(cache: _Cache, s: int, content: int) -> None:
    for i in range(cache.starts[s], cache.starts[s] + cache.known[s]):
        if cache.holds[i] and cache.contents[i] == content:
            cache.holds[i] = False
            cache.ghost_of[i] = cache.now[GHOSTS]
