"""Intervals for what a sweep claims: problems are drawn, the runs of one problem stay together.

Every interval is a percentile bootstrap over problems (Efron, 1979): problems are drawn with
replacement, all seeds of a drawn problem come along, so that the many tokens of one problem are
never taken for independent evidence. Seeded and vectorised. What it does not do: decide which
quantities are worth an interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import NormalDist, median

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.errors import ConfigError

DRAWS = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its `level` interval; `units` problems stand behind it."""

    estimate: float
    low: float
    high: float
    units: int
    level: float = LEVEL

    def __str__(self) -> str:
        return f"{self.estimate:.4g} [{self.low:.4g}, {self.high:.4g}]"


def bootstrap_mean(
    values: ArrayLike, units: Sequence[object], *, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Interval of the mean of `values` [N]; `units` [N] says which problem each belongs to."""
    return bootstrap_ratio(values, np.ones(len(units)), units, draws=draws, seed=seed)


def median_interval(values: Sequence[float]) -> Interval:
    """Interval of the median of independent values, between two of them in order.

    Without assumption on their distribution, and at least as wide as `LEVEL` says (Conover,
    Practical Nonparametric Statistics); fewer than six values have none: (-inf, inf).
    """
    ordered, count = sorted(values), len(values)
    tail = np.cumsum([comb(count, below) / 2**count for below in range(count)])
    rank = int(np.searchsorted(tail, (1 - LEVEL) / 2, "right"))  # values below the interval, + 1
    low, high = (ordered[rank - 1], ordered[-rank]) if rank else (-np.inf, np.inf)
    return Interval(median(ordered), low, high, count)


def bootstrap_ratio(
    numerator: ArrayLike,
    denominator: ArrayLike,
    units: Sequence[object],
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """Interval of sum(numerator) / sum(denominator), both [N], over problems `units` [N].

    One problem alone has no spread: its interval is (-inf, inf), never a point.
    """
    top, bottom = _sums(numerator, units), _sums(denominator, units)
    if len(top) == 0:
        raise ConfigError("An interval of no values was asked for; give one or more rows.")
    estimate = float(top.sum() / bottom.sum()) if bottom.sum() else float("nan")
    if len(top) == 1:
        return Interval(estimate, -np.inf, np.inf, 1)
    weights = _weights(len(top), draws, seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = (weights @ top) / (weights @ bottom)
    low, high = np.nanquantile(drawn, _tails()) if np.isfinite(drawn).any() else (np.nan, np.nan)
    return Interval(estimate, float(low), float(high), len(top))


def paired_difference(
    a: ArrayLike, b: ArrayLike, units: Sequence[object], *, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Interval of mean(b - a); entry i of both is the same problem and seed."""
    first, second = np.asarray(a, float), np.asarray(b, float)
    if first.shape != second.shape:
        raise ConfigError(
            f"Pairs need equal lengths; got {len(first)} and {len(second)} values. "
            "Join them by problem and seed."
        )
    return bootstrap_mean(second - first, units, draws=draws, seed=seed)


def paired_ratio_difference(
    a: tuple[ArrayLike, ArrayLike],
    b: tuple[ArrayLike, ArrayLike],
    units: Sequence[object],
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """Interval of sum(b0) / sum(b1) - sum(a0) / sum(a1): a difference of throughputs."""
    sums = [_sums(column, units) for column in (*a, *b)]
    if len(sums[0]) == 0:
        raise ConfigError("A difference of no pairs was asked for; give one or more rows.")
    totals = [column.sum() for column in sums]
    estimate = float(totals[2] / totals[3] - totals[0] / totals[1])
    if len(sums[0]) == 1:
        return Interval(estimate, -np.inf, np.inf, 1)
    weights = _weights(len(sums[0]), draws, seed)
    drawn = [weights @ column for column in sums]
    low, high = np.quantile(drawn[2] / drawn[3] - drawn[0] / drawn[1], _tails())
    return Interval(estimate, float(low), float(high), len(sums[0]))


def proportion_upper_bound(events: int, trials: int, level: float = LEVEL) -> float:
    """Upper bound of a rate when `events` of `trials` were seen (none: exact).

    For events > 0 the Wilson bound. A zero is then drawn as zero with its upper bound.
    """
    if trials <= 0:
        return 1.0
    if events == 0:
        return 1.0 - (1.0 - level) ** (1.0 / trials)
    z = NormalDist().inv_cdf((1 + level) / 2)
    share = events / trials
    centre = share + z * z / (2 * trials)
    margin = z * np.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return float((centre + margin) / (1 + z * z / trials))


def _sums(values: ArrayLike, units: Sequence[object]) -> NDArray[np.float64]:
    """`values` [N] added up within each unit: [number of units], units in sorted order."""
    column = np.asarray(values, float)
    if column.shape != (len(units),):
        raise ConfigError(
            f"Got {column.shape} values for {len(units)} units; give one unit a value."
        )
    _, place = np.unique(np.asarray(list(units), dtype=str), return_inverse=True)
    return np.bincount(place, weights=column).astype(np.float64)


def _weights(units: int, draws: int, seed: int) -> NDArray[np.float64]:
    """How often each unit is drawn: [draws, units], every row adds up to `units`."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(units, np.full(units, 1 / units), size=draws).astype(float)


def _tails() -> tuple[float, float]:
    return (1 - LEVEL) / 2, (1 + LEVEL) / 2
