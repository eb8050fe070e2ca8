"""Tables of miss-ratio curves: LRU below the optimum, and full replays beside both."""

import numpy as np
import pytest

from workbench.errors import ConfigError
from workbench.replay.cost import MeteredCost
from workbench.replay.curves import curve_sizes, curve_table, search_calls
from workbench.replay.simulator import Costs

FREE = Costs(MeteredCost(0.001), MeteredCost(0.001))
ROOMY = {"llm": {"num_blocks": 500}, "prm": {"num_blocks": 500}}


@pytest.mark.parametrize(("model", "place"), [("llm", 0), ("prm", 1)])
def test_a_curve_lies_below_the_optimum_and_ends_there(measured, model, place) -> None:
    """Hit ratios rise to the largest size, where nothing is evicted and LRU is the optimum."""
    calls = search_calls(measured.answers, FREE, ROOMY)[place]
    table = curve_table(
        measured.answers, FREE, model, curve_sizes(calls, 8), replay_at=(), changes=ROOMY
    )
    assert not table["fits"].iloc[0]
    fitting = table[table["fits"]]
    assert len(fitting) >= 5
    total = fitting["optimal_hit_ratio"] - fitting["hit_ratio"]
    assert (total[fitting["readmit_hit_tokens"] == 0] >= 0).all()
    last = fitting.iloc[-1]
    assert last["evicted"] == 0
    assert last["hit_ratio"] == last["optimal_hit_ratio"] == fitting["hit_ratio"].max()


def test_full_replays_lie_on_the_curve_where_the_order_stays(measured) -> None:
    """With room for all, replay and curve agree to the last hit; below the peak they need not."""
    table = curve_table(
        measured.answers, FREE, "llm", [600], replay_at=[34, 500, 700], changes=ROOMY
    ).set_index("num_blocks")
    assert table.loc[[500, 700], "difference"].abs().max() == 0
    assert np.isnan(table.loc[600, "difference"])
    assert not table.loc[34, "fits"]
    assert np.isfinite(table.loc[34, "difference"])


@pytest.mark.parametrize("model", ["llm", "prm"])
def test_below_the_peak_the_difference_from_full_replays_is_told(measured, model) -> None:
    """Unless asked otherwise: sizes that do not fit the order, from one request's upwards."""
    table = curve_table(measured.answers, FREE, model, [500], changes=ROOMY)
    told = table[table["difference"].notna()]
    assert 0 < len(told) <= 3
    assert told["num_blocks"].min() == 32
    assert not told["fits"].any()
    assert (told["difference"] == told["replayed_hit_ratio"] - told["hit_ratio"]).all()


def test_a_model_that_is_none_is_refused(measured) -> None:
    """Curves are of the LLM or the PRM."""
    with pytest.raises(ConfigError, match="model is 'both'; allowed: llm, prm"):
        curve_table(measured.answers, FREE, "both", [100])
