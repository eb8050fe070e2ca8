"""The search benchmark: every row, its interval, what its record says, and who is searched."""

from pathlib import Path

import pandas as pd
import pytest

from workbench.bench import search
from workbench.bench.record import Row
from workbench.bench.search import make_workload, tiny_rows

MATH = Path(__file__).parent.parent / "data" / "math500_sample.json"


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    """The smallest study: three problems, two seeds, four beams."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "BLOCKS", 2048)
        patch.setattr(search, "UNCACHED_PROBLEMS", 2)
        workload = make_workload("tiny-solver", limit=3, n=4, max_depth=3)
        return {row.name: row for row in tiny_rows(workload, 2)}


def test_what_is_alike_of_every_problem_is_no_certainty() -> None:
    """Guards an accuracy of 1 [1, 1] of three problems."""
    ones, three = pd.Series([1.0] * 3), pd.Series(list("abc"))
    row = search.ratio_row("accuracy", "fraction", ones, ones, three)
    assert (row.value, row.spread[1]) == (1, 1) and row.spread[0] == pytest.approx(0.4385, abs=1e-3)
    none = search.ratio_row("accuracy_gain", "fraction", 0 * ones, ones, three)
    assert none.spread == pytest.approx((-0.6316, 0.6316), abs=1e-3), "nothing of three"
    assert search.ratio_row("tokens_a_problem", "tokens", ones, ones, three).spread == (1, 1)


def test_each_row_has_an_interval_over_problems_around_its_value(rows):
    """Guards that no number stands alone: two seeds' spread says nothing of other problems."""
    assert list(rows) == [
        *("problems_per_min", "tokens_per_s", "accuracy", "pass_at_1", "accuracy_gain"),
        *("gain_over_majority", "gain_over_shuffled", "best_of_n", "gain_over_best_of_n"),
        *("equal_tokens_accuracy", "gain_at_equal_tokens", "tokens_a_problem"),
        *("equal_tokens_a_problem", "prm_over_ideal", "equal_tokens_n", "prm_tokens_saved"),
    ]
    for row in rows.values():
        if row.name == "equal_tokens_n":
            continue  # chosen, not measured
        low, high = row.spread
        assert low <= row.value <= high
    assert rows["prm_tokens_saved"].value > 1
    assert rows["prm_over_ideal"].spread[0] > 0
    assert rows["tokens_per_s"].spread[0] < rows["tokens_per_s"].spread[1]


def test_beam_search_stands_beside_samples_that_cost_as_many_tokens(rows):
    """Guards the fair baseline: N samples are beam search's tokens, and gains are over them."""
    value = {name: row.value for name, row in rows.items()}
    count, used = value["equal_tokens_n"], value["equal_tokens_a_problem"]
    assert count == int(count) >= 1
    # N is whole, and of the first seed; here one sample more or less is much
    assert used == pytest.approx(value["tokens_a_problem"], abs=used / count)
    gains = {"best_of_n": "gain_over_best_of_n", "equal_tokens_accuracy": "gain_at_equal_tokens"}
    for own, gain in gains.items():
        assert value[gain] == pytest.approx(value["accuracy"] - value[own])


def test_a_model_of_true_size_searches_math_problems_with_itself_as_reward():
    """Guards the size that the record is defined by: n = 16, 10 iterations of 128 tokens."""
    found = make_workload("smollm2-135m", None, str(MATH), 8)
    assert (found.num_problems, found.prm) == (8, "smollm2-135m")
    mode = search.sizes_of(found)
    assert [mode[name] for name in ("n", "max_depth", "max_step_tokens")] == [16, 10, 128]
    assert (mode["system_prompt"], found.prm_format) == (search.PROMPT, "rlhflow")
    assert make_workload("tiny-solver").prm == "tiny-prm"
    assert make_workload("smollm2-135m", "tiny-prm").prm == "tiny-prm"
