"""Rows of the miss_ratio figure: the curves' laws, and whole searches beside them."""

import pytest

from workbench.experiments.size_curves import REPLAYS, size_rows
from workbench.replay.answers import Answers
from workbench.replay.devices import PRESETS
from workbench.replay.workload import thesis_search


@pytest.fixture(scope="module")
def rows():
    answers = Answers(thesis_search(12, n=16, max_depth=3))
    return size_rows(answers, PRESETS["h100"], shares={0.3: (300, 200)})


@pytest.mark.parametrize("engine", ["llm", "prm"])
def test_the_optimum_is_nowhere_below_lru(rows, engine) -> None:
    """Hits grow with the size, the optimum's are at least LRU's, and with room they are equal."""
    own = rows[rows["engine"] == engine]
    lru, best = (
        own[own["kind"] == kind].set_index("num_blocks")["hit_ratio"] for kind in ("lru", "optimum")
    )
    gap = (best - lru).dropna()
    assert len(gap) > 1
    assert (gap >= -1e-12).all()
    assert gap.iloc[-1] == pytest.approx(0)
    assert lru.iloc[-1] == lru.max()


def test_whole_searches_agree_where_the_order_fits(rows) -> None:
    """Replayed at sizes of the curve, a search hits what the curve says, or nearly."""
    keys = ["engine", "num_blocks"]
    lru, whole = (rows[rows["kind"] == kind].set_index(keys) for kind in ("lru", "replay"))
    apart = (whole["hit_ratio"] - lru["hit_ratio"]).dropna().abs()
    assert len(apart) >= sum(each >= 1 for each in REPLAYS)
    assert apart.max() < 0.1


@pytest.mark.parametrize("engine", ["llm", "prm"])
def test_below_the_peak_there_are_whole_searches_and_no_curve(rows, engine) -> None:
    """Where the order does not fit no curve is told, so nothing is set against one."""
    own = rows[rows["engine"] == engine]
    least = own[own["kind"].isin(["lru", "optimum"])]["num_blocks"].min()
    whole = own[(own["kind"] == "replay") & (own["num_blocks"] < least)]
    assert len(whole) > 0
    assert whole[["hit_ratio", "thrashed_per_1000"]].notna().all(axis=None)


def test_shares_are_marked_and_sizes_are_tokens(rows) -> None:
    """A share's size is given in tokens; every other row's is its blocks'."""
    marked = rows[rows["kind"] == "share"].set_index("engine")["tokens"]
    assert marked.to_dict() == {"llm": 300, "prm": 200}
    sized = rows[rows["num_blocks"].notna()]
    assert (sized["tokens"] == 16 * sized["num_blocks"]).all()
