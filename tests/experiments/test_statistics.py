"""Intervals: they cover what they should, keep a problem's seeds together, never invent one."""

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from tests.experiments.fake_sweep import SHARES, FakeSweep
from workbench.errors import ConfigError
from workbench.experiments import claims, statistics
from workbench.experiments import rows as views
from workbench.experiments.statistics import WORK, Noise, bootstrap_mean, draw_rates, noise_of


def test_an_interval_of_95_percent_covers_the_truth_about_as_often():
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        sample = random.normal(3.0, 1.0, size=40)
        found = bootstrap_mean(sample, range(40))
        hits += found.low <= 3.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_seeds_of_one_problem_are_no_independent_evidence():
    values = np.repeat(np.arange(8.0), 10)  # ten equal seeds of eight problems
    by_problem = bootstrap_mean(values, np.repeat(np.arange(8), 10))
    by_row = bootstrap_mean(values, np.arange(80))
    assert by_problem.high - by_problem.low > 2 * (by_row.high - by_row.low)


def test_one_problem_has_no_interval_and_no_event_an_upper_bound():
    found = bootstrap_mean([1.0, 2.0], ["p", "p"])
    assert (found.estimate, found.low, found.high) == (1.5, -np.inf, np.inf)
    three = statistics.upper_bound_of_none(1000)  # the rule of three
    assert three == pytest.approx(3 / 1000, rel=0.01)
    assert statistics.upper_bound_of_none(0) == 1.0


def test_wilsons_interval_is_the_published_one_and_never_a_point():
    """5 of 10 and 0 of 10, as Newcombe's tables (1998) have them."""
    assert statistics.wilson(0.5, 10).low == pytest.approx(0.2366, abs=1e-4)
    assert statistics.wilson(0.5, 10).high == pytest.approx(0.7634, abs=1e-4)
    assert statistics.wilson(0.0, 10).high == pytest.approx(0.2775, abs=1e-4)
    assert statistics.wilson(1.0, 10).high == 1.0 > statistics.wilson(1.0, 10).low > 0.7


def test_a_statistic_is_that_of_the_sums_of_the_same_problems_and_the_same_every_time():
    first, again = (statistics.bootstrap(([10.0, 90, 20], [1.0, 3, 2]), "abc") for _ in range(2))
    assert first == again
    assert first.low <= first.estimate == 20.0 <= first.high
    tokens = np.array([100.0, 900.0, 300.0, 50.0])
    columns = (tokens, tokens / 100, tokens, tokens / 110)
    found = statistics.bootstrap(columns, "abcd", lambda a0, a1, b0, b1: b0 / b1 - a0 / a1)
    assert (found.estimate, found.low, found.high) == pytest.approx((10, 10, 10))


def test_empty_samples_and_values_without_units_are_refused():
    with pytest.raises(ConfigError, match="no values"):
        bootstrap_mean([], [])
    with pytest.raises(ConfigError, match="one unit a value"):
        bootstrap_mean([1.0, 2.0], ["a"])


def test_the_interval_of_a_median_is_that_of_the_tables_and_covers():
    """Ranks of Conover's tables; without six values there is none."""
    for count, low, high in ((6, 1, 6), (9, 2, 8), (15, 4, 12), (25, 8, 18)):
        found = statistics.median_interval(list(range(count, 0, -1)))
        assert (found.low, found.high) == (low, high)
    assert statistics.median_interval([1.0, 2.0, 3.0, 4.0, 5.0]).low == -np.inf
    draws = np.random.default_rng(0).exponential(size=(400, 25))  # the median is log 2
    found = map(statistics.median_interval, draws.tolist())
    covered = [interval.low <= np.log(2) <= interval.high for interval in found]
    assert 0.93 <= np.mean(covered) <= 1.0


# -- settings compared --


def test_one_problem_or_two_seeds_without_equal_work_make_nothing_certain():
    sweep = FakeSweep()
    rows = sweep.table("problems")
    seeds, problem = draw_rates(rows, sweep.runs, "llm_share"), rows[rows["problem_id"] == "a"]
    three = FakeSweep(seeds=(0, 1, 2))
    known = three.table("problems")
    assert draw_rates(known, three.runs, "llm_share").difference(0.3, 0.5).high < 0
    share = three.runs["llm_share"].rank(method="dense")
    alone = draw_rates(known, three.runs[three.runs["seed"] == share % 3], "llm_share")
    for rates in (seeds, draw_rates(problem, sweep.runs, "llm_share"), alone):
        assert (rates.peak.low, rates.peak.high) == (SHARES[0], SHARES[-1])
        assert rates.difference(0.3, 0.5).low == -np.inf


def test_a_slow_run_is_not_taken_for_the_shares_doing():
    """All problems of a run share its noise: drawing problems alone would call the peak certain."""
    sweep, noise = FakeSweep(seeds=(0, 1, 2)), np.random.default_rng(0)
    rows = sweep.table("problems")
    slower = {run: 1 + 0.2 * noise.random() for run in rows["run_id"].unique()}
    rows["wall_part_s"] = rows["run_id"].map(slower)
    rates = draw_rates(rows, sweep.runs, "llm_share")
    assert rates.peak.low < rates.peak.high
    assert rates.difference(0.3, 0.5).low < 0 < rates.difference(0.3, 0.5).high


# -- noise: told by runs of equal work alone, contained in all claims about time --


class Noisy(FakeSweep):
    """Equal work from 0.2 to 0.4; the machine makes each run slower by a factor of its own."""

    def __init__(self, seeds=(0, 1), noise=0.15, slow_end=1.0, seed=0):
        super().__init__(SHARES, seeds)
        rng = np.random.default_rng(seed)
        for run in self._runs:
            row = run["row"]
            middle = 0.2 <= row["llm_share"] <= 0.4
            work = 0 if middle else round(1000 * row["llm_share"])
            slower = float(np.exp(noise * rng.standard_normal()))
            seconds = 10.0 * (slow_end if row["llm_share"] == 0.5 else 1.0) * slower
            row |= dict.fromkeys(WORK, 100 + work) | {"wall_s": seconds}
            row["tokens_per_s"] = 400 / seconds
            run["problems"]["wall_part_s"] = seconds / len(run["problems"])

    @property
    def all_runs(self):
        return self.runs


def test_noise_is_the_spread_of_wall_times_within_groups_of_equal_work():
    row = {"status": "finished", "seed": 0, "llm_share": 0.3, "role": "measure"}
    runs = pd.DataFrame([row | dict.fromkeys(WORK, w) for w in (1, 1, 2, 3)])
    timed = runs.assign(wall_s=[10.0, 14.0, 50.0, 90.0], tokens_per_s=1.0)
    two = timed.assign(machine=["a", "b", "a", "a"])  # of two machines nothing is learnt
    assert not noise_of(two).is_known
    found = noise_of(timed.assign(machine="a"))
    assert noise_of(timed.assign(rung=pd.Series(np.nan, runs.index, object))) == found
    assert (found.runs, found.degrees) == (2, 1)
    assert found.spread == pytest.approx(1.4)
    assert found.sigma == pytest.approx(np.log(1.4) / np.sqrt(2))
    assert "2 runs of equal work differ by up to 1.40 times" in str(found)
    assert "the machine's noise is not known" in str(noise_of(runs.iloc[2:].assign(wall_s=1.0)))
    assert not noise_of(pd.DataFrame()).is_known
    assert "sentinel -10% to +5% over 3" in str(Noise(0.1, 2, 3, 1.2, (-0.1, 0.0, 0.05)))


def test_few_repetitions_give_wide_factors_and_none_gives_one():
    generator = np.random.default_rng(0)
    few, many = (Noise(0.1, degrees).factors(generator, (5000,)) for degrees in (1, 30))
    assert np.quantile(few, 0.975) > 1.5 * np.quantile(many, 0.975)
    assert np.isfinite(few).all()
    assert (Noise().factors(generator, (3,)) == 1).all()


def test_shares_do_equal_work_where_every_seed_does_with_one_technique():
    runs = Noisy().runs
    numbers = statistics.equal_work(runs, "llm_share", (0, 1))
    assert numbers[0.2] == numbers[0.3] == numbers[0.4]
    assert len(set(numbers.values())) == 3
    other = runs.assign(technique=np.where(runs["llm_share"] == 0.3, "adaptive", "none"))
    told = statistics.equal_work(other, "llm_share", (0, 1))
    assert told[0.2] == told[0.4] != told[0.3]
    runs.loc[(runs["llm_share"] == 0.4) & (runs["seed"] == 1), WORK[0]] += 1
    assert statistics.equal_work(runs, "llm_share", (0, 1))[0.4] != numbers[0.3]


@pytest.mark.parametrize("seed", range(3))
def test_a_peak_never_tells_shares_of_equal_work_apart(seed):
    rows = views.split_rows(Noisy(seed=seed))
    peak = rows[rows["metric"] == "peak_share"].iloc[0]
    assert peak["low"] not in (0.3, 0.4) and peak["high"] not in (0.2, 0.3)
    if 0.2 <= peak["value"] <= 0.4:
        assert claims.peak_claim(rows).verdict == "depends on"


@pytest.mark.parametrize(
    ("walls", "evicted", "verdict"),
    [
        ((10.0, 12.0, 13.0), 2.0, "holds"),
        ((10.0, 12.0, 13.0), 0.4, "fails"),
        ((10.0, 12.0, 13.0), 1.0, "depends on"),  # a third of the slow-down beside 0.2, all at 0.3
        ((10.0, 14.0, 13.0), 2.0, "depends on"),  # no slower than a share of equal work
    ],
)
def test_c4_is_a_rule_over_the_range_of_shares_that_may_be_the_fastest(walls, evicted, verdict):
    """Where there is but one, only a replay tells a slow-down from the machine's noise."""
    lost = pd.DataFrame({"llm_share": [0.2, 0.3, 0.5], "wall_s": walls, "seconds": [0, 0, evicted]})
    lost["part"] = "recomputed_evicted"
    split = pd.DataFrame({"metric": ["peak_share", "same_work"], "low": 0.2, "high": 0.3})

    def judged(rung="measured tiny", **ends):
        return claims.eviction_claim(lost, split.assign(rung=rung, **ends))

    assert (judged().key, judged().verdict) == ("C4", verdict)
    assert judged(low=0.3).number.endswith("it depends on the machine's noise")
    assert judged(high=0.5).number.endswith("it depends on the PRM's room at 0.50")
    told = judged(high=[0.5, 0.3]).number
    assert told.endswith("may be any from 0.20 to 0.50; it depends on the machine's noise")
    assert judged("replayed SmolLM2", high=0.2).verdict == ("holds" if evicted == 2.0 else "fails")


def test_c4_counts_what_is_computed_again_there_and_not_at_the_fastest():
    """Four of ten seconds at every share explain no slow-down; half a second of two a quarter."""
    lost = pd.DataFrame({"llm_share": [0.2, 0.3, 0.5], "wall_s": [10.0, 10.0, 12.0]})
    lost = lost.assign(part="recomputed_evicted", seconds=[4.0, 4.0, 4.5])
    split = pd.DataFrame({"metric": ["peak_share", "same_work", "tokens_per_s"], "low": 0.2})
    rate = {"llm_share": 0.5, "ratio": 0.8, "ratio_low": 0.75, "ratio_high": 0.9}
    claim = claims.eviction_claim(lost, split.assign(rung="measured tiny", high=0.3, **rate))
    assert claim.verdict == "fails" and "25% of the slow-down" in claim.number
    assert "which do the same work; against 0.50 +25% [+11%, +33%];" in claim.number


def test_a_run_that_is_missing_takes_its_seed_from_the_comparison_and_no_other():
    sweep = FakeSweep()
    runs = sweep.runs
    runs = runs[~((runs["llm_share"] == 0.08) & (runs["seed"] == 0))]
    rows, of_first = sweep.table("problems"), set(runs.loc[runs["seed"] == 0, "run_id"])
    shifted = rows.assign(wall_part_s=rows["wall_part_s"] * (1 + 9 * rows["run_id"].isin(of_first)))
    both = [draw_rates(each, runs, "llm_share") for each in (rows, shifted)]
    np.testing.assert_allclose(both[0].measured, both[1].measured)


def test_without_a_common_seed_one_run_each_makes_nothing_certain():
    """Though the machine's noise is known: nobody knows what another seed would have taken."""
    sweep = Noisy(noise=0.01, slow_end=2.0)
    seeds = {0.3: [0], 0.5: [1]}
    runs = sweep.runs[[row.seed in seeds.get(row.llm_share, ()) for row in sweep.runs.itertuples()]]
    noise = statistics.noise_of(sweep.all_runs)
    rates = draw_rates(sweep.table("problems"), runs, "llm_share", noise=noise)
    assert noise.is_known and len(runs) == 2
    found = rates.ratio(0.3, 0.5)
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_a_paired_ratio_is_one_of_equal_work_and_else_of_its_seconds():
    """The study's main comparison: the same problems and seeds on both sides; to the nearest share
    that was run where 0.3 was not.
    """
    rows = views.split_rows(Noisy(noise=0.01, slow_end=2.0))
    columns = ["ratio", "ratio_low", "ratio_high"]
    ratios = rows[["llm_share", *columns]].drop_duplicates().set_index("llm_share")
    assert list(ratios.index) == list(SHARES)
    assert ratios.loc[0.2].tolist() == ratios.loc[0.3].tolist() == [1.0, 1.0, 1.0]
    ratio, low, high = ratios.loc[0.5]
    assert ratio == pytest.approx(0.5, rel=0.05) and low < ratio < high < 0.6
    without = FakeSweep(shares=(0.08, 0.2, 0.5))
    assert set(views.split_rows(without).query("llm_share == 0.2")["ratio"]) == {1.0}


def test_a_run_that_was_repeated_counts_once_as_its_mean_and_is_the_surer():
    """Twice 0.3 beside once 0.5: repetitions are of the study's settings, and of no other."""
    seconds = {"first": 10.0, "again": 14.0, "other": 12.0}
    every = pd.DataFrame({"run_id": list(seconds), "llm_share": [0.3, 0.3, 0.5], "seed": 0})
    every = every.assign(setting="", status="finished", repeat=[0, 1, 0])
    deeper = every[:1].assign(run_id="deeper", setting="deeper", repeat=1)
    once = every[every["repeat"] == 0]
    study = SimpleNamespace(runs=once, all_runs=pd.concat([every, deeper]))
    runs = statistics.repeated(study)
    assert set(runs["run_id"]) == set(seconds)
    rows = pd.DataFrame([
        {"run_id": run, "problem_id": problem, "tokens": 100, "wall_part_s": wall / 2}
        for (run, wall), problem in product(seconds.items(), "ab")
    ])  # fmt: skip
    noise = statistics.Noise(sigma=0.02, degrees=5)
    rates = (draw_rates(rows, each, "llm_share", noise=noise) for each in (runs, once))
    pooled, alone = (each.ratio(0.5, 0.3) for each in rates)
    assert (pooled.estimate, alone.estimate) == (pytest.approx(1.0), pytest.approx(1.2))
    assert (pooled.high - pooled.low) / 1.0 < (alone.high - alone.low) / 1.2
