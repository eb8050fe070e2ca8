"""What a running search did, second by second, in a table that never grows beyond its size.

Time is cut into buckets; when the last is full, neighbours are joined and buckets are twice as
wide. So a step costs the same after an hour as at the start, and a figure draws as many points.
What it does not do: draw, or read a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

import numpy as np
import pandas as pd

SUMS = ("tokens", "llm_s", "prm_s")
"""Added up over a bucket: sampled tokens, seconds in steps of either model."""
LEVELS = ("llm_target", "llm_actual", "llm_held", "prm_held")
"""As they were last in a bucket: shares of the arena's pages."""
MEAN_S = 2.0  # tokens/s is a mean over about so many seconds, in whole buckets
MOST_MOVES = 200


@dataclass(frozen=True, slots=True)
class Move:
    """A re-split asked for. outcome: ResizeAnswer's (reached | later | refused)."""

    time_s: float
    share: float
    outcome: str


class Timeline:
    """Buckets of equal width since second 0; any thread may add, any thread may read."""

    def __init__(self, width_s: float = 0.1, most: int = 240) -> None:
        """most: buckets, an even number."""
        assert most % 2 == 0
        self.width_s, self._most = width_s, most
        self._lock = Lock()
        self._used, self._until_s = 0, 0.0
        self._sums = np.zeros((len(SUMS), most))
        self._levels = np.full((len(LEVELS), most), np.nan)
        self._moves: list[Move] = []

    def add(
        self, role: str, start_s: float, end_s: float, tokens: int, levels: Mapping[str, float]
    ) -> None:
        """One step of an engine ("llm" or "prm"), the tokens it finished, and LEVELS after it."""
        with self._lock:
            last = self._bucket(end_s)
            self._until_s = max(self._until_s, end_s)
            self._sums[0, last] += tokens
            self._levels[:, last] = [levels[name] for name in LEVELS]
            width, busy = self.width_s, self._sums[SUMS.index(f"{role}_s")]
            for bucket in range(int(start_s / width), last + 1):  # a step may be longer than one
                busy[bucket] += min(end_s, (bucket + 1) * width) - max(start_s, bucket * width)

    def move(self, move: Move) -> None:
        """A re-split; of more than MOST_MOVES the oldest go."""
        with self._lock:
            self._moves = [*self._moves[1 - MOST_MOVES :], move]

    @property
    def moves(self) -> tuple[Move, ...]:
        """All that are kept, by time."""
        with self._lock:
            return tuple(self._moves)

    @property
    def window_s(self) -> float:
        """Seconds over which tokens_per_s is a mean: about MEAN_S, or one bucket once wider."""
        return self._window() * self.width_s

    def frame(self) -> pd.DataFrame:
        """One row a bucket: time_s (its middle), tokens_per_s (a mean over the last window_s),
        llm_busy and prm_busy (fractions of its time), LEVELS.

        Of the last bucket only the part up to the last step's end has passed; its tokens_per_s is
        over the window before it too, so that a step that has just begun it is no peak.
        """
        with self._lock:
            used, width, window = self._used, self.width_s, self._window()
            ends = np.minimum(np.arange(1, used + 1) * width, self._until_s)
            sums, levels = self._sums[:, :used].copy(), self._levels[:, :used].copy()
        starts = np.arange(used) * width
        seconds = np.maximum(ends - starts, 1e-9)  # a step may end where a bucket begins
        first = np.arange(used) - window + 1
        first[-1:] -= 1
        first = np.maximum(first, 0)
        before = np.concatenate([[0.0], np.cumsum(sums[0])])
        columns = {
            "time_s": (starts + ends) / 2,
            "tokens_per_s": (before[1:] - before[first]) / np.maximum(ends - starts[first], 1e-9),
            "llm_busy": np.minimum(1.0, sums[1] / seconds),
            "prm_busy": np.minimum(1.0, sums[2] / seconds),
        }
        frame = pd.DataFrame(columns | dict(zip(LEVELS, levels, strict=True)))
        frame[list(LEVELS)] = frame[list(LEVELS)].ffill()
        return frame

    def _window(self) -> int:
        return max(1, round(MEAN_S / self.width_s))

    def _bucket(self, time_s: float) -> int:
        while time_s >= self._most * self.width_s:
            self._join()
        bucket = int(time_s / self.width_s)
        self._used = max(self._used, bucket + 1)
        return bucket

    def _join(self) -> None:
        """Two neighbours become one."""
        half = self._most // 2
        first, second = self._levels[:, 0::2], self._levels[:, 1::2]
        levels = np.where(np.isnan(second), first, second)
        sums = self._sums[:, 0::2] + self._sums[:, 1::2]
        self._sums, self._levels = np.zeros_like(self._sums), np.full_like(self._levels, np.nan)
        self._sums[:, :half], self._levels[:, :half] = sums, levels
        self.width_s *= 2
        self._used = -(-self._used // 2)
