"""Whether two rungs agree on the split: peaks, order, and the sentence that says so."""

import pandas as pd
import pytest

from workbench.experiments.rungs import agreement, agreement_sentence


def rows(first: list[float], second: list[float]) -> pd.DataFrame:
    """Two rungs over three shares; the second has one share more."""
    parts = [
        pd.DataFrame(
            {"rung": name, "llm_share": [0.1, 0.3, 0.5, 0.6][: len(rates)], "value": rates}
        )
        for name, rates in (("measured tiny", first), ("replayed 1B + 8B", [*second, 0.1]))
    ]
    return pd.concat(parts, ignore_index=True)


def test_equal_orders_agree_and_opposite_ones_do_not() -> None:
    """Rank correlation over the common shares; each rung's peak by its own rates."""
    alike = agreement(rows([0.7, 1.0, 0.5], [0.9, 1.0, 0.8]))
    assert alike == {
        "peaks": {"measured tiny": 0.3, "replayed 1B + 8B": 0.3},
        "order": pytest.approx(1.0),
        "shares": 3,
    }
    assert agreement(rows([0.5, 0.7, 1.0], [1.0, 0.7, 0.5]))["order"] == pytest.approx(-1.0)


def test_rates_that_are_all_equal_have_no_order() -> None:
    """A rung that the split does not touch is said to be such, not to agree."""
    assert "cannot be compared" in agreement_sentence(rows([1.0, 1.0, 1.0], [0.9, 1.0, 0.8]))
    assert "**1.00**" in agreement_sentence(rows([0.7, 1.0, 0.5], [0.9, 1.0, 0.8]))
