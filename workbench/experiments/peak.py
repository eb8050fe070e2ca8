"""At which share throughput peaks, how sure that is, and how two shares differ.

A draw takes the same problems and the same seeds at all shares (the study's pairs), so what makes
one of them slow everywhere cancels, and multiplies each run's seconds by a factor that is drawn
from what runs of equal work differ by (noise.py). Shares at which the runs did the same work are
one: their runs count together, and where they are fastest the peak is all of them. What it does not
do: claim that the peak lies between the measured shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.experiments.noise import Noise, equal_work
from workbench.experiments.statistics import DRAWS, LEVEL, Interval

Array = NDArray[np.float64]
FEWEST_SEEDS = 3
"""Where no runs of equal work tell the noise, fewer seeds than these tell nothing of it either."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of every share: measured [shares] and drawn anew [draws, shares].

    pooled: the same from all runs of equal work together; seconds: of one of these runs.
    """

    shares: Array
    work: NDArray[np.int64]  # [shares]; equal numbers: equal work
    measured: Array
    drawn: Array
    pooled: Array
    pooled_drawn: Array
    seconds_drawn: Array
    problems: int
    tells_noise: bool  # False: neither equal work nor enough seeds, so nothing is certain

    @property
    def peak(self) -> Interval:
        """The share with the greatest rate; 95 % of the draws have theirs within the bounds.

        The whole axis where one problem, or two seeds without equal work, are all there is.
        """
        same = self.work == self.work[np.argmax(self.pooled)]
        estimate = float(self.shares[same][np.argmax(self.measured[same])])
        if not self._is_certain:
            return Interval(estimate, float(self.shares[0]), float(self.shares[-1]), self.problems)
        best = np.argmax(self.pooled_drawn, axis=1)
        ends = [self.plateau(share) for share in self.shares]
        low, high = (np.array([end[side] for end in ends])[best] for side in (0, 1))
        lowest = np.quantile(low, _tails()[0], method="nearest")
        highest = np.quantile(high, _tails()[1], method="nearest")
        return Interval(estimate, float(lowest), float(highest), self.problems)

    def plateau(self, share: float) -> tuple[float, float]:
        """The lowest and the highest share whose runs did the same work as those of `share`."""
        same = self.shares[self.work == self.work[self._at(share)]]
        return float(same[0]), float(same[-1])

    def at(self, share: float) -> Interval:
        """The rate of one share, of its own runs."""
        place = self._at(share)
        return self._interval(float(self.measured[place]), self.drawn[:, place])

    def difference(self, base: float, other: float) -> Interval:
        """The rate at `other` minus the rate at `base`; runs of equal work count together."""
        a, b = self._at(base), self._at(other)
        drawn = self.pooled_drawn[:, b] - self.pooled_drawn[:, a]
        estimate = float(self.pooled[b] - self.pooled[a])
        if not self._is_certain:
            return Interval(estimate, -np.inf, np.inf, self.problems)
        return self._interval(estimate, drawn)

    def part_of_slow_down(self, base: float, other: float, uses: tuple[float, float]) -> Interval:
        """What part of the seconds that `other` takes more than `base` goes to one use of them.

        uses: its part of the seconds at (base, other), in which a slow machine cancels. Draws in
        which `other` is not slower have no such part; the interval is unbounded if they are many.
        """
        places = [self._at(base), self._at(other)]
        seconds = self.seconds_drawn[:, places]
        more = seconds[:, 1] - seconds[:, 0]
        spent = seconds[:, 1] * uses[1] - seconds[:, 0] * uses[0]
        slower = more > 0
        if not self._is_certain or slower.mean() < LEVEL:
            return Interval(float("nan"), -np.inf, np.inf, self.problems)
        parts = spent[slower] / more[slower]
        return self._interval(float(np.median(parts)), parts)

    @property
    def _is_certain(self) -> bool:
        return self.problems > 1 and self.tells_noise

    def _at(self, share: float) -> int:
        return int(np.abs(self.shares - share).argmin())

    def _interval(self, estimate: float, drawn: Array) -> Interval:
        if self.problems == 1:
            return Interval(estimate, -np.inf, np.inf, 1)
        low, high = np.quantile(drawn, _tails())
        return Interval(estimate, float(low), float(high), self.problems)


def draw_rates(
    rows: pd.DataFrame,
    top: str,
    bottom: str,
    *,
    noise: Noise | None = None,
    runs: pd.DataFrame | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Rates:
    """Rates of `top` over `bottom`, seconds, from rows of a run and problem each.

    rows: run_id, llm_share, seed, problem_id and the two columns. Problems and seeds that some
    share lacks are left out. runs: their rows of the runs table, which tell equal work (default: no
    two shares have equal work).
    """
    noise = noise or Noise()
    runs_of, seeds, above, below = _by_run(rows, top, bottom)
    generator = np.random.default_rng(seed)
    problems = above.shape[1]
    each = generator.multinomial(problems, np.full(problems, 1 / problems), size=draws).T
    weights = _seed_weights(runs_of, seeds, noise.is_known, generator, draws)
    weighed = weights * (above @ each).T
    spent = weights * (below @ each).T * noise.factors(generator, weights.shape)
    shares = np.unique(runs_of["llm_share"].to_numpy(float))
    equal = equal_work(rows if runs is None else runs, seeds)
    work = np.array([equal[share] for share in shares])
    own = np.equal.outer(runs_of["llm_share"].to_numpy(float), shares).astype(float)
    together = own @ np.equal.outer(work, work)
    sums = above.sum(axis=1), below.sum(axis=1)
    return Rates(
        shares=shares,
        work=work,
        measured=(sums[0] @ own) / (sums[1] @ own),
        drawn=(weighed @ own) / (spent @ own),
        pooled=(sums[0] @ together) / (sums[1] @ together),
        pooled_drawn=(weighed @ together) / (spent @ together),
        seconds_drawn=(spent @ together) / (weights @ together),
        problems=problems,
        tells_noise=noise.is_known or len(seeds) >= FEWEST_SEEDS,
    )


def _by_run(
    rows: pd.DataFrame, top: str, bottom: str
) -> tuple[pd.DataFrame, list[int], Array, Array]:
    """Runs (llm_share, seed), the seeds of every share, and both columns [runs, problems].

    Where no seed is common to all shares every run counts, unpaired.
    """
    of_share = rows.groupby("llm_share")["seed"].agg(set)
    seeds = sorted(set.intersection(*of_share)) or sorted(rows["seed"].unique())
    wide = rows[rows["seed"].isin(seeds)].pivot_table(
        index=["llm_share", "seed"], columns="problem_id", values=[top, bottom], aggfunc="sum"
    )
    whole = wide[top].columns[wide[top].notna().all()]
    above, below = (wide[column][whole].to_numpy(float) for column in (top, bottom))
    return wide.index.to_frame(index=False), seeds, above, below


def _seed_weights(
    runs: pd.DataFrame, seeds: list[int], paired: bool, generator: np.random.Generator, draws: int
) -> Array:
    """How often each run counts in each draw [draws, runs]: its seed is drawn with replacement.

    paired: one draw of seeds for all shares. Else each share has its own, so that one slow run is
    not taken for the share's doing where nothing else tells the noise.
    """
    weights = np.zeros((draws, len(runs)))
    paired = paired and len(runs) == len(seeds) * runs["llm_share"].nunique()
    common = generator.multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), size=draws)
    for _, own in runs.groupby("llm_share"):
        count = len(own)
        anew = generator.multinomial(count, np.full(count, 1 / count), size=draws)
        weights[:, own.index] = common if paired else anew
    return weights


def _tails() -> tuple[float, float]:
    return (1 - LEVEL) / 2, (1 + LEVEL) / 2
