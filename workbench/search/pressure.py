"""How full an engine is, read off its scheduler and cache: what may be spent on mere speculation.

Counts only, never a clock, so that a search does the same things every time. What it does not do:
decide (speculation.py).
"""

from __future__ import annotations

from typing import Any

from workbench.core import TokenEngine
from workbench.errors import ConfigError

_NEEDED = ("scheduler", "cache", "config")


class Fullness:
    """Rows and blocks that an engine's present requests leave.

    Raises ConfigError for an engine that does not tell them, or that has no trace, from which the
    tokens of discarded steps are counted.
    """

    def __init__(self, engine: TokenEngine) -> None:
        lacking = [name for name in _NEEDED if not hasattr(engine, name)]
        if lacking or "trace" not in engine.capabilities:
            raise ConfigError(
                f"speculative_extension needs an LLM that tells how full it is, and what it did; "
                f"{engine.name} has no {', '.join(lacking) or 'trace'}. Give an Engine, or "
                "speculative_extension=False."
            )
        told: Any = engine
        self._scheduler, self._cache = told.scheduler, told.cache
        padded = told.config.batching == "static"  # whole batches: nothing can join one
        self._max_num_seqs = 0 if padded else told.config.max_num_seqs
        self.pressure = Pressure(engine)

    @property
    def is_queueing(self) -> bool:
        """Whether a request waits, for a row or for blocks."""
        return bool(self._scheduler.num_waiting)

    @property
    def empty_rows(self) -> int:
        """Rows of the next step that nobody wants: 0 while a prompt waits or is being read."""
        counts = self._scheduler.counts
        if self.is_queueing or counts is None or counts.prefill_tokens:
            return 0
        return max(0, self._max_num_seqs - self._scheduler.num_running)

    @property
    def spare_blocks(self) -> int:
        """Blocks beyond one more for each running request; below 0, the next step may preempt."""
        with self._cache.lock:  # in an arena another engine may be taking pages
            available = self._cache.num_free + self._cache.num_cached
        return int(available - self._scheduler.num_running)

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks of a request of so many tokens, and one to grow into."""
        return int(-(-num_tokens // self._cache.block_size) + 1)


class Pressure:
    """Whether an engine's cache was too small of late. An engine without a cache feels none."""

    def __init__(self, engine: TokenEngine) -> None:
        self._cache: Any = getattr(engine, "cache", None)
        self._before = self._latest = self._lost()

    def open_round(self) -> None:
        """The engine's turn begins."""
        self._before, self._latest = self._latest, self._lost()

    @property
    def is_felt(self) -> bool:
        """Whether anything lost had to be computed again in this turn or the one before it."""
        return self._lost() > self._before

    def _lost(self) -> int:
        """Blocks evicted too early and tokens of preempted requests, since the cache was made."""
        if self._cache is None:
            return 0
        return int(self._cache.stats.thrashed + self._cache.stats.readmit_query_tokens)
