"""The rows that say what reuse of partial blocks saves, over a search small enough for a test."""

import pytest

from workbench.bench import reuse, search
from workbench.errors import WorkbenchError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"N": 4, "MAX_DEPTH": 4, "BLOCKS": 512, "BEAM_WIDTH": 2}.items():
        monkeypatch.setattr(search, name, value)


def test_with_reuse_the_prm_computes_what_is_distinct_and_the_generator_nothing_twice() -> None:
    """Guards the target of the record: at most 1.1 distinct tokens, and less than without."""
    rows = {row.name: row for row in reuse.rows(limit=2)}
    prm, llm = rows["fork_prm_over_ideal"], rows["fork_llm_recomputed"]
    assert prm.value <= 1.1
    assert prm.value < prm.peer_value
    assert prm.ratio == pytest.approx(prm.peer_value / prm.value)
    assert prm.spread[0] <= prm.value <= prm.spread[1]
    assert llm.value == 0 < llm.peer_value


def test_two_different_searches_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the rows: tokens saved mean nothing if the search has become another."""
    searched, seeds = reuse.searched, iter((0, 1))
    monkeypatch.setattr(reuse, "searched", lambda p, r, seed: searched(p, r, next(seeds)))
    with pytest.raises(WorkbenchError, match="samples other tokens"):
        next(reuse.rows(limit=1))
