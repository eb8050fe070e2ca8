"""Intervals: they cover what they should, keep a problem's seeds together, never invent one."""

import numpy as np
import pytest

from workbench.errors import ConfigError
from workbench.experiments.statistics import (
    bootstrap_mean,
    bootstrap_ratio,
    median_interval,
    paired_difference,
    paired_ratio_difference,
    proportion_upper_bound,
)


def test_an_interval_of_95_percent_covers_the_truth_about_as_often():
    random = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        sample = random.normal(3.0, 1.0, size=40)
        found = bootstrap_mean(sample, range(40), draws=400, seed=trial)
        hits += found.low <= 3.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_seeds_of_one_problem_are_no_independent_evidence():
    values = np.repeat(np.arange(8.0), 10)  # ten equal seeds of eight problems
    by_problem = bootstrap_mean(values, np.repeat(np.arange(8), 10))
    by_row = bootstrap_mean(values, np.arange(80))
    assert by_problem.units == 8
    assert by_problem.high - by_problem.low > 2 * (by_row.high - by_row.low)


def test_one_problem_has_no_interval():
    found = bootstrap_mean([1.0, 2.0], ["p", "p"])
    assert found.estimate == 1.5
    assert (found.low, found.high) == (-np.inf, np.inf)


def test_a_ratio_is_that_of_the_sums_and_the_same_for_the_same_seed():
    top, bottom, units = [10.0, 90.0, 20.0], [1.0, 3.0, 2.0], "abc"
    first, again = (bootstrap_ratio(top, bottom, units, seed=5) for _ in range(2))
    assert first == again
    assert first.estimate == 20.0
    assert first.low <= 20.0 <= first.high


def test_pairs_cancel_what_problems_have_in_common():
    random = np.random.default_rng(0)
    level = random.normal(0, 100, size=30)
    better = level + 1 + random.normal(0, 0.1, size=30)
    found = paired_difference(level, better, range(30))
    assert found.low > 0
    assert found.estimate == pytest.approx(1, abs=0.1)
    assert found.high - found.low < 0.2


def test_a_throughput_difference_draws_the_same_problems_on_both_sides():
    tokens = np.array([100.0, 900.0, 300.0, 50.0])
    slow, fast = tokens / 100, tokens / 110
    found = paired_ratio_difference((tokens, slow), (tokens, fast), "abcd")
    assert found.estimate == pytest.approx(10)
    assert (found.low, found.high) == (pytest.approx(10), pytest.approx(10))


def test_zero_events_have_an_upper_bound():
    assert proportion_upper_bound(0, 1000) == pytest.approx(3 / 1000, rel=0.01)  # rule of three
    assert 0.1 < proportion_upper_bound(10, 100) < 0.2
    assert proportion_upper_bound(0, 0) == 1.0


def test_unequal_pairs_and_empty_samples_are_refused():
    with pytest.raises(ConfigError, match="equal lengths"):
        paired_difference([1.0], [1.0, 2.0], "ab")
    with pytest.raises(ConfigError, match="no values"):
        bootstrap_mean([], [])
    with pytest.raises(ConfigError, match="one unit a value"):
        bootstrap_mean([1.0, 2.0], ["a"])


def test_the_interval_of_a_median_is_that_of_the_tables_and_covers():
    """Ranks of Conover's tables; without six values there is none."""
    for count, low, high in ((6, 1, 6), (9, 2, 8), (15, 4, 12), (25, 8, 18)):
        found = median_interval(list(range(count, 0, -1)))
        assert (found.low, found.high) == (low, high)
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0]).low == -np.inf
    draws = np.random.default_rng(0).exponential(size=(400, 25))  # the median is log 2
    covered = [(i := median_interval(row)).low <= np.log(2) <= i.high for row in draws.tolist()]
    assert 0.93 <= np.mean(covered) <= 1.0
