"""Intervals for what a study claims: problems are drawn, the runs of one problem stay together.

Intervals are percentile bootstraps over problems (Efron, 1979), seeded; of a proportion alone they
are Wilson's, of what was never seen the rule of three's. The question is nearly always a ratio of
two settings that searched the same problems with the same seeds: what makes a problem slow
everywhere cancels, and each run's seconds are multiplied by a factor drawn from what runs of equal
work differ by. Settings whose runs did the same work are one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb, sqrt
from statistics import NormalDist, median
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from workbench.errors import ConfigError

if TYPE_CHECKING:
    from workbench.experiments.runs import RunTables

DRAWS = 2000
LEVEL = 0.95
TAILS = (1 - LEVEL) / 2, (1 + LEVEL) / 2
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % interval."""

    estimate: float
    low: float
    high: float

    @property
    def cells(self) -> dict[str, float]:
        """As columns value, low, high."""
        return {"value": self.estimate, "low": self.low, "high": self.high}

    def named(self, name: str) -> dict[str, float]:
        """As columns name, name_low, name_high."""
        return {name: self.estimate, f"{name}_low": self.low, f"{name}_high": self.high}


def bootstrap_mean(values: ArrayLike, units: Sequence[object]) -> Interval:
    """Interval of the mean of `values` [N]; `units` [N] says which problem each belongs to."""
    return bootstrap((values, np.ones(len(units))), units)


def bootstrap(
    columns: Sequence[ArrayLike], units: Sequence[object], statistic: Callable[..., Any] = np.divide
) -> Interval:
    """Interval of a statistic of the columns' [N] sums, problems `units` [N] drawn anew.

    One problem alone has no spread: its interval is (-inf, inf), never a point.
    """
    if any(np.shape(column) != (len(units),) for column in columns):
        shapes = " and ".join(str(np.shape(column)) for column in columns)
        raise ConfigError(f"Got {shapes} values for {len(units)} units; give one unit a value.")
    found, place = np.unique(np.asarray(list(units), dtype=str), return_inverse=True)
    sums = [np.bincount(place, np.asarray(c, float), len(found)) for c in columns]
    count = len(found)
    if count == 0:
        raise ConfigError("An interval of no values was asked for; give one or more rows.")
    with np.errstate(invalid="ignore", divide="ignore"):
        estimate = float(statistic(*(column.sum() for column in sums)))
        if count == 1:
            return Interval(estimate, -np.inf, np.inf)
        weights = _drawn_anew(np.random.default_rng(0), count).astype(float)
        drawn = statistic(*(weights @ column for column in sums))
    low, high = np.nanquantile(drawn, TAILS) if np.isfinite(drawn).any() else (np.nan, np.nan)
    return Interval(estimate, float(low), float(high))


def _drawn_anew(generator: np.random.Generator, count: int) -> NDArray[np.int64]:
    """How often each of so many is drawn, with replacement: [DRAWS, count]."""
    return generator.multinomial(count, np.full(count, 1 / count), size=DRAWS)


def wilson(share: float, trials: int) -> Interval:
    """Interval of a share of so many independent trials (Wilson 1927); never a point."""
    z = NormalDist().inv_cdf(TAILS[1])
    centre = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def median_interval(values: Sequence[float]) -> Interval:
    """Interval of the median of independent values of any distribution, between two of them
    (Conover, Practical Nonparametric Statistics); fewer than six values have none: (-inf, inf).
    """
    ordered, count = sorted(values), len(values)
    tail = np.cumsum([comb(count, below) / 2**count for below in range(count)])
    rank = int(np.searchsorted(tail, TAILS[0], "right"))  # values below the interval, + 1
    low, high = (ordered[rank - 1], ordered[-rank]) if rank else (-np.inf, np.inf)
    return Interval(median(ordered), low, high)


def upper_bound_of_none(trials: int) -> float:
    """Upper bound of the rate of what was not seen once in so many trials; exact."""
    return 1.0 - (1.0 - LEVEL) ** (1.0 / trials) if trials > 0 else 1.0


@cache
def student(degrees: int) -> float:
    """Where the upper tail of Student's t begins; inf without a degree of freedom."""
    if degrees < 1:
        return float("inf")
    drawn = np.random.default_rng(0).standard_t(degrees, size=1_000_000)
    return float(np.quantile(drawn, TAILS[1]))


def unlike_a_point(found: Interval, trials: int) -> Interval:
    """An interval of a fraction or of a difference of two; where all trials are alike, what was not
    seen once bounds it.
    """
    if found.low < found.high:
        return found
    bound = upper_bound_of_none(trials)
    return Interval(found.estimate, found.estimate - bound, found.estimate + bound)


# -- the machine's noise: how far runs of equal work differ in wall time --

WORK = (
    *("llm_prefill_tokens", "llm_decode_tokens", "llm_steps"),
    *("prm_prefill_tokens", "prm_decode_tokens", "prm_steps"),
)
"""Columns of the runs table that are equal where two runs of one seed and technique did the same
work."""
OTHER_MINUTES = ("depth", "reference")
"""Roles of runs that are carried out apart from those they are like."""
SIMULATED = "replayed"
"""How rungs and models of runs begin whose seconds are a cost model's, the same each time."""


def is_replayed(rung: str) -> bool:
    """Whether a rung, or a model of an identity, was replayed and not measured."""
    return rung.startswith(SIMULATED)


LARGEST = 2.0
"""Of the logarithm of a drawn factor: few repetitions have tails that no machine has."""
FEWEST_SEEDS = 3
"""Where no runs of equal work tell the noise, fewer seeds than these tell nothing of it either."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How wall times of equal work scatter. Nothing is known where `degrees` is 0."""

    sigma: float = 0.0  # standard deviation of the logarithm of wall seconds
    degrees: int = 0  # repetitions behind sigma: runs less groups of equal work
    runs: int = 0  # in groups of two and more
    spread: float = 1.0  # the slowest over the fastest of a group, of all groups the greatest
    drift: tuple[float, ...] = ()  # of the sentinel's repetitions from 1, their median

    @property
    def is_known(self) -> bool:
        """Whether equal work was done more than once."""
        return self.degrees > 0

    def factors(
        self, generator: np.random.Generator, shape: tuple[int, ...], times: Any = 1
    ) -> Array:
        """What seconds might be multiplied by, means of so many runs each: Student's t, since sigma
        is an estimate.
        """
        if not self.is_known:
            return np.ones(shape)
        drawn = self.sigma * generator.standard_t(self.degrees, size=shape) / np.sqrt(times)
        return np.exp(np.clip(drawn, -LARGEST, LARGEST))

    def __str__(self) -> str:
        if not self.is_known:
            return "no two runs did equal work, so the machine's noise is not known"
        if not self.runs:
            return "seconds are simulated and have no noise"
        spread = f"{self.spread:.2f} times in wall time"
        text = f"{self.runs} runs of equal work differ by up to {spread}"
        if len(self.drift) < 2:
            return text
        reach = f"{min(self.drift):+.0%} to {max(self.drift):+.0%}"
        return f"{text}; sentinel {reach} over {len(self.drift)} repetitions"


def noise_of(runs: pd.DataFrame) -> Noise:
    """The noise that these runs show, sentinels and repetitions among them."""
    if runs.empty or not set(WORK) <= set(runs.columns):
        return Noise()
    done = runs[(runs["status"] == "finished") & ~runs["role"].isin(OTHER_MINUTES)]
    if "rung" in done and len(done) and done["rung"].fillna("").str.startswith(SIMULATED).all():
        return Noise(degrees=1)
    logs = pd.Series(np.log(done["wall_s"].to_numpy(float)), index=done.index)
    machine = [done["machine"]] if "machine" in done else []  # seconds of two are not compared
    alike = logs.groupby([*(work for _, work in _work(done).items()), *machine])
    groups = alike.agg(["count", "var", "min", "max"]).query("count > 1")
    if groups.empty:
        return Noise()
    free = groups["count"] - 1
    sigma = float(np.sqrt((groups["var"] * free).sum() / free.sum()))
    spread = float(np.exp((groups["max"] - groups["min"]).max()))
    counts = int(free.sum()), int(groups["count"].sum())
    return Noise(sigma, *counts, spread, tuple(sentinel_drift(runs)))


def repeated(study: RunTables) -> pd.DataFrame:
    """The study's runs, and those of them carried out again: what a rate is pooled over."""
    runs, every, keys = study.runs, study.all_runs, ["llm_share", "seed", "setting"]
    if not {"repeat", *keys} <= set(every):
        return runs
    again = every[(every["status"] == "finished") & (every["repeat"] > 0)]
    again = again[~again["run_id"].isin(runs["run_id"])].merge(runs[keys].drop_duplicates())
    return pd.concat([runs, again], ignore_index=True) if len(again) else runs


def sentinel_drift(runs: pd.DataFrame) -> pd.Series:
    """Throughput of the sentinel's setting over its median less 1, by run id in the order the runs
    were carried out, the measured one among them.
    """
    if runs.empty or not (runs["role"] == "sentinel").any():
        return pd.Series(dtype=float)
    setting = runs.loc[runs["role"] == "sentinel", ["llm_share", "seed"]].iloc[0]
    same = (runs[["llm_share", "seed"]] == setting).all(axis=1) & (runs["status"] == "finished")
    found = runs[same].sort_values("written_at").set_index("run_id")["tokens_per_s"]
    return found / found.median() - 1


def _work(runs: pd.DataFrame) -> pd.DataFrame:
    """Columns that are equal where two runs did the same work."""
    technique = runs["technique"].fillna("") if "technique" in runs else ""
    return runs[["seed", *WORK]].assign(technique=technique)


def equal_work(runs: pd.DataFrame, by: str, seeds: Sequence[int]) -> dict[Any, int]:
    """A number for each value of `by`, the same where the runs of all `seeds` did the same work."""
    values = sorted(runs[by].unique())
    if not set(WORK) <= set(runs.columns):
        return {value: place for place, value in enumerate(values)}
    runs = runs[runs["seed"].isin(list(seeds))].sort_values("seed")
    works = [tuple(_work(runs[runs[by] == each]).itertuples(False, None)) for each in values]
    return {value: works.index(work) for value, work in zip(values, works)}


# -- settings compared --


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of every setting: measured [settings] and drawn anew [draws, settings].

    pooled: the same from all runs of equal work together.
    """

    settings: list[Any]
    work: NDArray[np.int64]  # [settings]; equal numbers: equal work
    measured: Array
    drawn: Array
    pooled: Array
    pooled_drawn: Array
    problems: int
    tells_noise: bool  # False: neither equal work of a seed nor seeds enough: nothing is certain

    @property
    def peak(self) -> Interval:
        """The share with the greatest rate; 95 % of the draws have theirs within the bounds.

        The whole axis where one problem, or two seeds without equal work, are all there is. Where
        equal work is fastest the peak is all of it.
        """
        shares = np.array(self.settings, float)
        same = self.work == self.work[np.argmax(self.pooled)]
        estimate, ends = float(shares[same][np.argmax(self.measured[same])]), shares[[0, -1]]
        if self.problems > 1 and self.tells_noise:
            drawn = np.array([self.plateau(s) for s in shares])[np.argmax(self.pooled_drawn, 1)]
            pairs = zip(drawn.T, TAILS)
            ends = np.array([np.quantile(end, tail, method="nearest") for end, tail in pairs])
        return Interval(estimate, float(ends[0]), float(ends[1]))

    def plateau(self, share: float) -> tuple[float, float]:
        """The lowest and the highest share whose runs did the same work as those of `share`."""
        same = np.array(self.settings, float)[self.work == self.work[self._at(share)]]
        return float(same[0]), float(same[-1])

    def at(self, setting: Any) -> Interval:
        """The rate of one setting, of its own runs."""
        place = self._at(setting)
        return self._interval(float(self.measured[place]), self.drawn[:, place])

    def ratio(self, base: Any, other: Any) -> Interval:
        """How many times the rate of `base` has `other`; of equal work exactly 1."""
        return self._compared(np.divide, base, other)

    def difference(self, base: Any, other: Any) -> Interval:
        """The rate of `other` minus the rate of `base`; runs of equal work count together."""
        return self._compared(np.subtract, base, other)

    def _compared(self, how: Callable[[Any, Any], Any], base: Any, other: Any) -> Interval:
        a, b = self._at(base), self._at(other)
        drawn = how(self.pooled_drawn[:, b], self.pooled_drawn[:, a])
        return self._interval(float(how(self.pooled[b], self.pooled[a])), drawn, self.tells_noise)

    def _at(self, setting: Any) -> int:
        if isinstance(setting, str):
            return self.settings.index(setting)
        return int(np.abs(np.array(self.settings, float) - setting).argmin())

    def _interval(self, estimate: float, drawn: Array, known: bool = True) -> Interval:
        low, high = (-np.inf, np.inf)
        if known and self.problems > 1:
            low, high = np.quantile(drawn, TAILS)
        return Interval(estimate, float(low), float(high))


def draw_rates(
    rows: pd.DataFrame, runs: pd.DataFrame, by: str, top: str = "tokens", noise: Noise | None = None
) -> Rates:
    """Rates of `top` over wall_part_s, seconds, of each value of `by`, a column of `runs`.

    rows: run_id, problem_id and the two columns, one row a run and problem. Problems and seeds that
    some setting lacks are left out; of a run that was repeated the mean counts.
    """
    noise = noise or Noise()
    keys = runs[["run_id", by, "seed"]]
    columns = [top, "wall_part_s"]
    rows = rows[["run_id", "problem_id", *columns]].merge(keys, on="run_id")
    common = set.intersection(*rows.groupby(by)["seed"].agg(set))
    seeds = sorted(common) or sorted(rows["seed"].unique())  # none in common: unpaired
    wide = rows[rows["seed"].isin(seeds)].pivot_table(
        index=[by, "seed"], columns="problem_id", values=columns, aggfunc="mean"
    )
    whole = wide[top].columns[wide[top].notna().all()]
    above, below = (wide[column][whole].to_numpy(float) for column in columns)
    index, times = wide.index.to_frame(index=False), keys.groupby([by, "seed"]).size()
    runs = runs.drop_duplicates([by, "seed"])
    generator = np.random.default_rng(0)

    problems = above.shape[1]
    each = _drawn_anew(generator, problems).T
    # Seeds are drawn too, once for all settings; each setting has draws of its own where nothing
    # tells the noise, so that one slow run is not taken for the setting's doing.
    weights = np.zeros((DRAWS, len(index)))
    paired = noise.is_known and len(index) == len(seeds) * index[by].nunique()
    drawn = _drawn_anew(generator, len(seeds))
    for _, its in index.groupby(by):
        its_own = _drawn_anew(generator, len(its))
        weights[:, its.index] = drawn if paired else its_own
    weighed = weights * (above @ each).T
    factors = noise.factors(generator, weights.shape, times[wide.index].to_numpy())
    spent = weights * (below @ each).T * factors
    settings = list(dict.fromkeys(index[by]))
    work = pd.Series(settings).map(equal_work(runs, by, seeds)).to_numpy()
    own = np.equal.outer(index[by].to_numpy(object), np.array(settings, object)).astype(float)
    together = own @ np.equal.outer(work, work)
    sums = above.sum(axis=1), below.sum(axis=1)
    return Rates(
        settings=settings,
        work=work,
        measured=(sums[0] @ own) / (sums[1] @ own),
        drawn=(weighed @ own) / (spent @ own),
        pooled=(sums[0] @ together) / (sums[1] @ together),
        pooled_drawn=(weighed @ together) / (spent @ together),
        problems=problems,
        tells_noise=bool(noise.is_known and common)
        or index.groupby(by).size().min() >= FEWEST_SEEDS,
    )


def paired_ratio(study: RunTables, by: str, against: Any) -> pd.DataFrame:
    """Throughput of every setting, a value of the runs' column `by`, over that of the setting
    `against`: columns `by`, ratio, ratio_low, ratio_high.
    """
    runs, noise, found = repeated(study), noise_of(study.all_runs), []
    rows = study.table("problems", runs=runs)
    for setting in runs[by].unique():
        pair = runs[runs[by].isin([setting, against])]  # the seeds and problems that both have
        ratio = draw_rates(rows, pair, by, noise=noise).ratio(against, setting)
        found.append({by: setting, **ratio.named("ratio")})
    return pd.DataFrame(found)
