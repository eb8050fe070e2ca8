"""At which share throughput peaks, and how sure that is: a percentile bootstrap over problems of
the best share.

Every draw takes the same problems at all shares (the pairs of the study), so what makes one problem
slow everywhere cancels. What it does not do: claim that the peak lies between the measured shares.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.experiments.statistics import DRAWS, LEVEL, Interval


def peak_interval(
    rows: pd.DataFrame, top: str, bottom: str, *, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """The llm_share with the greatest sum(top) / sum(bottom), and the range of shares that were it.

    rows: llm_share, problem_id and the two columns. The bounds are measured shares: 95 % of the
    draws have their best share within them. One problem alone gives the whole axis.
    """
    shares, above, below = _matrices(rows, top, bottom)
    estimate = float(shares[np.argmax(above.sum(1) / below.sum(1))])
    problems = above.shape[1]
    if problems == 1:
        return Interval(estimate, float(shares[0]), float(shares[-1]), 1)
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(problems, np.full(problems, 1 / problems), size=draws)
    best = shares[np.argmax((weights @ above.T) / (weights @ below.T), axis=1)]
    low, high = np.quantile(best, ((1 - LEVEL) / 2, (1 + LEVEL) / 2), method="nearest")
    return Interval(estimate, float(low), float(high), problems)


def _matrices(
    rows: pd.DataFrame, top: str, bottom: str
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Shares [S] and both columns [S, problems], added up over seeds; problems that all shares
    have.
    """
    keys = ["llm_share", "problem_id"]
    sums = rows.groupby(keys)[[top, bottom]].sum().reset_index()
    above, below = (sums.pivot(index=keys[0], columns=keys[1], values=c) for c in (top, bottom))
    everywhere = above.columns[above.notna().all()]
    shares = above.index.to_numpy(float)
    return shares, above[everywhere].to_numpy(float), below[everywhere].to_numpy(float)
