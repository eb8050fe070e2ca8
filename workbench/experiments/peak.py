"""At which share throughput peaks, how sure that is, and how two shares differ.

A draw takes the same problems at all shares (the study's pairs), so what makes one problem slow
everywhere cancels, and at each share the seeds' runs anew, so that one slow run is not taken for
the share's doing. With one seed the runs' own noise stays unseen. What it does not do: claim that
the peak lies between the measured shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.experiments.statistics import DRAWS, LEVEL, Interval

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rates:
    """sum(top) / sum(bottom) at each share: measured [shares], drawn anew [draws, shares]."""

    shares: Array
    measured: Array
    drawn: Array
    problems: int

    @property
    def peak(self) -> Interval:
        """The share with the greatest rate; 95 % of the draws have theirs within the bounds.

        One problem alone gives the whole axis.
        """
        estimate = float(self.shares[np.argmax(self.measured)])
        if self.problems == 1:
            return Interval(estimate, float(self.shares[0]), float(self.shares[-1]), 1)
        best = self.shares[np.argmax(self.drawn, axis=1)]
        low, high = np.quantile(best, _tails(), method="nearest")
        return Interval(estimate, float(low), float(high), self.problems)

    def difference(self, base: float, other: float) -> Interval:
        """The rate at `other` minus the rate at `base`, two of the shares."""
        a, b = (int(np.abs(self.shares - share).argmin()) for share in (base, other))
        estimate = float(self.measured[b] - self.measured[a])
        if self.problems == 1:
            return Interval(estimate, -np.inf, np.inf, 1)
        low, high = np.quantile(self.drawn[:, b] - self.drawn[:, a], _tails())
        return Interval(estimate, float(low), float(high), self.problems)


def draw_rates(
    rows: pd.DataFrame, top: str, bottom: str, *, draws: int = DRAWS, seed: int = 0
) -> Rates:
    """Rates of `top` over `bottom` from rows of a run and problem each.

    rows: run_id, llm_share, problem_id and the two columns. Problems and seeds that some share
    lacks are left out.
    """
    shares, above, below = _cubes(rows, top, bottom)
    count, runs, problems = above.shape
    generator = np.random.default_rng(seed)
    each = generator.multinomial(problems, np.full(problems, 1 / problems), size=draws)
    seeds = generator.multinomial(runs, np.full(runs, 1 / runs), size=(draws, count))
    sums = [np.einsum("dsr,srd->ds", seeds, cube @ each.T) for cube in (above, below)]
    measured = above.sum(axis=(1, 2)) / below.sum(axis=(1, 2))
    return Rates(shares, measured, sums[0] / sums[1], problems)


def _cubes(rows: pd.DataFrame, top: str, bottom: str) -> tuple[Array, Array, Array]:
    """Shares [S] and both columns [S, runs of a share, problems]."""
    order = rows.groupby("llm_share")["run_id"].rank(method="dense").astype(int)
    wide = rows.assign(run=order).pivot_table(
        index=["llm_share", "run"], columns="problem_id", values=[top, bottom], aggfunc="sum"
    )
    whole = wide[top].columns[wide[top].notna().all()]
    shares = np.unique(rows["llm_share"].to_numpy(float))
    runs = int(rows.assign(run=order).groupby("llm_share")["run"].max().min())
    kept = wide[wide.index.get_level_values("run") <= runs]
    shape = (len(shares), runs, len(whole))
    cubes = (kept[column][whole].to_numpy(float).reshape(shape) for column in (top, bottom))
    return shares, *cubes


def _tails() -> tuple[float, float]:
    return (1 - LEVEL) / 2, (1 + LEVEL) / 2
