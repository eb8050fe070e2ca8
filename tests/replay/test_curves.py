"""Curves over sizes: LRU below the optimum, and full replays on them where the order stays."""

import pytest

from workbench.replay.cost import MeteredCost
from workbench.replay.curves import curve_sizes, search_calls
from workbench.replay.miss_ratio import miss_ratio
from workbench.replay.optimum import optimal_hits
from workbench.replay.simulator import Costs, replay

FREE = Costs(MeteredCost(0.001), MeteredCost(0.001))
ROOMY = {"llm": {"num_blocks": 500}, "prm": {"num_blocks": 500}}


@pytest.mark.parametrize("place", [0, 1])
def test_a_curve_lies_below_the_optimum_and_ends_there(measured, place) -> None:
    """Hit ratios rise to the largest size, where nothing is evicted and LRU is the optimum."""
    calls = search_calls(measured.answers, FREE, ROOMY)[place]
    table = miss_ratio(calls, curve_sizes(calls, 8)).set_index("num_blocks")
    best = optimal_hits(calls, table.index.tolist()).set_index("num_blocks")["hit_ratio"]
    assert not table["fits"].iloc[0]
    fitting = table[table["fits"]]
    assert len(fitting) >= 5
    gained = best.loc[fitting.index] - fitting["hit_ratio"]
    assert (gained[fitting["readmit_hit_tokens"] == 0] >= 0).all()
    last = fitting.iloc[-1]
    assert last["evicted"] == 0
    assert last["hit_ratio"] == best.iloc[-1] == fitting["hit_ratio"].max()


@pytest.mark.parametrize("num_blocks", [500, 700])
def test_full_replays_lie_on_the_curve_where_the_order_stays(measured, num_blocks) -> None:
    """With room for all, replay and curve agree to the last hit."""
    calls = search_calls(measured.answers, FREE, ROOMY)[0]
    own = {**ROOMY, "llm": {"num_blocks": num_blocks}}
    steps = replay(measured.answers, FREE, **own).trace.steps
    steps = steps[steps["engine"] == "llm"]
    found = steps["hit_tokens"].sum() / steps["query_tokens"].sum()
    assert miss_ratio(calls, [num_blocks])["hit_ratio"].tolist() == [found]
