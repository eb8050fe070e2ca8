"""The search benchmark on the tiny pair: every row, its interval, and what its record says."""

import pytest

from workbench.bench import search
from workbench.bench.record import Row
from workbench.errors import ConfigError


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    """The smallest study: three problems, two seeds, four beams."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(search.PROFILES, "quick", (3, 2))
        for name, value in {"N": 4, "MAX_DEPTH": 3, "BLOCKS": 2048, "UNCACHED_PROBLEMS": 2}.items():
            patch.setattr(search, name, value)
        return {row.name: row for row in search.run("quick")}


def test_each_row_has_an_interval_over_problems_around_its_value(rows):
    """Guards that no number stands alone: two seeds' spread says nothing of other problems."""
    assert list(rows) == [
        *("problems_per_min", "tokens_per_s", "accuracy", "pass_at_1", "accuracy_gain"),
        *("gain_over_majority", "gain_over_shuffled", "prm_over_ideal", "prm_tokens_saved"),
    ]
    for row in rows.values():
        low, high = row.spread
        assert low <= row.value <= high
    assert rows["prm_tokens_saved"].value > 1
    assert rows["prm_over_ideal"].spread[0] > 0
    assert rows["tokens_per_s"].spread[0] < rows["tokens_per_s"].spread[1]


def test_the_record_says_how_many_problems_and_seeds_stand_behind_its_rows():
    """Guards against a row over fewer problems than its record tells."""
    settings = {"profile": "full", "llm": "tiny-solver", "prm": None, "seeds": None}
    mode = search.mode_of(settings)
    assert (mode["problems"], mode["seeds"], mode["uncached_problems"]) == (128, 5, 16)
    assert search.mode_of(settings | {"profile": "quick", "seeds": 3})["uncached_problems"] == 8


@pytest.mark.parametrize("seeds", [0, -1])
def test_no_seeds_are_refused(seeds):
    with pytest.raises(ConfigError, match=f"seeds is {seeds}; allowed: whole numbers >= 1"):
        next(search.run("quick", seeds=seeds))
