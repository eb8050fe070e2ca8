"""How repeats become a row: medians, ratios of pairs, and what the spread is of."""

import pytest

from workbench.bench.rows import interval_row, middle_half, plain_row, rate_row
from workbench.experiments.statistics import Interval


def test_a_ratio_is_the_median_of_paired_ratios_not_the_ratio_of_medians():
    """Guards the pairing: a machine that is slow for one repeat is slow for both sides of it."""
    ours, peers = [10.0, 4.0, 30.0], [5.0, 1.0, 20.0]  # ratios 2, 4, 1.5
    row = rate_row("decode", ours, peers, "tokens/s", "peer", ceiling=40.0)
    assert (row.value, row.peer_value, row.ratio) == (10.0, 5.0, 2.0)
    assert (row.share_of_ceiling, row.repeats) == (0.25, 3)
    swapped = rate_row("decode", ours, [1.0, 5.0, 20.0], "tokens/s", "peer")
    assert (swapped.peer_value, swapped.ratio) == (5.0, 1.5)
    assert swapped.ceiling is None and swapped.share_of_ceiling is None


def test_the_spread_of_a_rate_is_of_its_ratios():
    """Guards that both sides' common drift is no spread, and that one repeat has none."""
    assert rate_row("decode", [1.0, 2.0, 9.0], [2.0, 4.0, 18.0], "x", "peer").spread == 0
    assert rate_row("decode", [1.0], [2.0], "x", "peer").spread is None
    assert middle_half([1.0, 2.0, 3.0, 4.0, 5.0]) == 1.0
    with pytest.raises(ValueError, match=r"shorter|longer"):
        rate_row("decode", [1.0], [1.0, 2.0], "x", "peer")


def test_plain_and_interval_rows_keep_value_unit_and_repeats():
    """Guards the median of even counts, and an interval's ends in order."""
    row = plain_row("bookkeeping", [0.4, 0.1, 0.2, 0.3], "fraction")
    assert row.value == pytest.approx(0.25) and row.repeats == 4
    assert row.spread == pytest.approx(0.075)
    found = interval_row("gain", Interval(0.3, 0.2, 0.5, 8), "fraction", 2)
    assert (found.value, found.spread, found.repeats) == (0.3, (0.2, 0.5), 2)
