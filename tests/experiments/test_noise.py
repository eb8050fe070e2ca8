"""The machine's noise: told by runs of equal work alone, contained in all claims about time."""

import numpy as np
import pandas as pd
import pytest

from tests.experiments.fake_sweep import FakeSweep
from workbench.experiments import claims, sentences, views
from workbench.experiments.lost_time import lost_time_rows
from workbench.experiments.noise import WORK, Noise, equal_work, noise_of
from workbench.experiments.peak import draw_rates

SHARES = (0.08, 0.2, 0.3, 0.4, 0.5)
COSTS = {engine: lambda tokens, context, logits: tokens * 1.0 for engine in ("llm", "prm")}


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
    found = noise_of(runs.assign(wall_s=[10.0, 14.0, 50.0, 90.0], tokens_per_s=1.0))
    assert (found.runs, found.degrees) == (2, 1)
    assert found.spread == pytest.approx(1.4)
    assert found.sigma == pytest.approx(np.log(1.4) / np.sqrt(2))
    assert "2 runs of equal work differ by up to 1.40 times" in str(found)
    assert "the machine's noise is not known" in str(noise_of(runs.iloc[2:].assign(wall_s=1.0)))
    assert not noise_of(pd.DataFrame()).is_known


def test_few_repetitions_give_wide_factors_and_none_gives_one():
    generator = np.random.default_rng(0)
    few, many = (Noise(0.1, degrees).factors(generator, (5000,)) for degrees in (1, 30))
    assert np.quantile(few, 0.975) > 1.5 * np.quantile(many, 0.975)
    assert np.isfinite(few).all()
    assert (Noise().factors(generator, (3,)) == 1).all()


def test_shares_do_equal_work_where_every_seed_does():
    runs = Noisy().runs
    numbers = equal_work(runs, (0, 1))
    assert numbers[0.2] == numbers[0.3] == numbers[0.4]
    assert len(set(numbers.values())) == 3
    runs.loc[(runs["llm_share"] == 0.4) & (runs["seed"] == 1), WORK[0]] += 1
    assert equal_work(runs, (0, 1))[0.4] != numbers[0.3]


@pytest.mark.parametrize("seed", range(6))
def test_a_peak_never_tells_shares_of_equal_work_apart(seed):
    rows = views.memory_split_rows(Noisy(seed=seed))
    peak = rows[rows["metric"] == "peak_share"].iloc[0]
    if 0.2 <= peak["value"] <= 0.4:
        assert peak["low"] <= 0.2
        assert peak["high"] >= 0.4
        assert "From 0.20 to 0.40 both models do exactly the same work" in (
            sentences.peak_sentence(rows)
        )
        assert claims.peak_claim(rows).verdict == "depends on"


def test_a_slow_down_below_the_noise_is_no_finding_and_one_above_it_is():
    lost = lost_time_rows(FakeSweep(), COSTS)
    for noise, slow_end, certain in ((0.2, 1.2, False), (0.01, 1.6, True)):
        rates = views.throughput(Noisy(noise=noise, slow_end=slow_end, seed=3))
        assert (rates.difference(0.3, 0.5).high < 0) == certain
        claim = claims.eviction_claim(rates, lost)
        assert (claim.verdict != "depends on") == certain, claim


def test_the_part_of_a_slow_down_is_a_ratio_in_which_the_machine_cancels():
    rates = views.throughput(Noisy(noise=0.005, slow_end=1.5))
    part = rates.part_of_slow_down(0.3, 0.5, (0.0, 0.2))
    assert part.estimate == pytest.approx(0.2 * 1.5 / 0.5, rel=0.05)
    assert part.low < part.estimate < part.high
    none = views.throughput(Noisy(noise=0.005)).part_of_slow_down(0.3, 0.5, (0.0, 0.2))
    assert np.isnan(none.estimate)


def test_two_seeds_without_equal_work_make_nothing_certain():
    rows = views.problem_seconds(FakeSweep())
    rates = draw_rates(rows, "tokens", "wall_part_s")
    assert (rates.peak.low, rates.peak.high) == (SHARES[0], SHARES[-1])
    assert rates.difference(0.3, 0.5).low == -np.inf


def test_a_run_that_is_missing_takes_its_seed_from_the_comparison_and_no_other():
    sweep = FakeSweep()
    rows = views.problem_seconds(sweep)
    gone = rows[~((rows["llm_share"] == 0.08) & (rows["seed"] == 0))]
    shifted = gone.assign(wall_part_s=gone["wall_part_s"] * (1 + 9 * (gone["seed"] == 0)))
    both = [draw_rates(each, "tokens", "wall_part_s") for each in (gone, shifted)]
    np.testing.assert_allclose(both[0].measured, both[1].measured)


def test_bars_contain_the_noise():
    quiet, loud = (
        views.memory_split_rows(Noisy(noise=noise)).query("metric == 'tokens_per_s'")
        for noise in (0.001, 0.2)
    )
    wide = [((rows["high"] - rows["low"]) / rows["value"]).mean() for rows in (quiet, loud)]
    assert wide[1] > 1.5 * wide[0]


def test_what_a_difference_must_exceed_is_said():
    assert "**2 runs of equal work" in sentences.noise_sentence(Noise(0.1, 1, 2, 1.2))
    assert "fewer than three seeds" in sentences.noise_sentence(Noise())
    assert "sentinel -10% to +5% over 3" in str(Noise(0.1, 2, 3, 1.2, 3, (-0.1, 0.05)))
