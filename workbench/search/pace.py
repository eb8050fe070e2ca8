"""How many of the problems in flight are sampled in a round: as many as both caches hold.

Every problem comes round again in each round. If together they need more than there is, each loses
its prefixes before its next turn, and all are computed again, again and again; with some of them
waiting, the rest keep theirs. Counts decide, never a clock; where two engines at work at once take
pages of one arena (lanes.py), those counts, and so the rounds, may differ from run to run. What it
does not do: choose which problems wait (groups.py: the latest).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from workbench.core import TokenEngine

TOO_MUCH, LITTLE = 0.15, 0.05
"""Shares of the blocks taken that only hold again what was lost: fewer problems, one more."""


class Pace:
    """places: problems that may be sampled, of `most` in flight. No cache is never too small."""

    def __init__(self, most: int, engines: Iterable[TokenEngine]) -> None:
        caches = (getattr(engine, "cache", None) for engine in engines)
        self._caches: list[Any] = [cache for cache in caches if cache is not None]
        self._most = self.places = most
        self._before = [_taken_and_lost(cache) for cache in self._caches]

    def open_round(self) -> None:
        """Once both engines have had a turn, look at what they lost in it."""
        now = [_taken_and_lost(cache) for cache in self._caches]
        taken = [a[0] - b[0] for a, b in zip(now, self._before)]
        if not taken or not all(taken):
            return
        lost = max((a[1] - b[1]) / count for a, b, count in zip(now, self._before, taken))
        self._before = now
        if lost > TOO_MUCH:
            self.places = max(1, 3 * self.places // 4)
        elif lost < LITTLE:
            self.places = min(self._most, self.places + 1)


def _taken_and_lost(cache: Any) -> tuple[int, float]:
    """Blocks taken since the cache was made; those whose content it had evicted or preempted.

    A re-admission computes again all that it does not hit, its evicted blocks among it.
    """
    stats = cache.stats
    again = (stats.readmit_query_tokens - stats.readmit_hit_tokens) / cache.block_size
    return int(stats.allocated), stats.thrashed - stats.thrashed_readmit + again
