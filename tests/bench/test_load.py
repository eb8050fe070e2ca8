"""Notebook 12's rows: every request is served, and the server's own count is Little's law's."""

from dataclasses import replace

import pytest

from workbench.bench import load
from workbench.bench.serve import Answer
from workbench.config import ConfigError

TINY = {"prompt_tokens": 8, "new_tokens": 8, "clients": (1, 3), "offered": (0.5,), "requests": 6}
TINY |= {"shares": (0.4, 0.6), "split_clients": (3, 1), "rounds": 2}
PLAN = replace(load.PROFILES["quick"], **TINY)


@pytest.mark.slow
def test_a_closed_loop_is_full_and_arrivals_come_at_their_rate(monkeypatch) -> None:
    """As many inside as clients by Little's law, since each asks anew at once."""
    monkeypatch.setattr(load, "EVERY", 0.002)
    rows = load.load_rows(replace(PLAN, rounds=8))
    closed = rows[rows["arrivals"] == "closed"].set_index("clients")
    assert (rows["refused"] == 0).all()
    assert (closed["inside"] > 0).all(), "looks fell into both loads"
    assert (closed["inside"] <= closed.index).all(), "no more than clients, as the server counts"
    assert closed.loc[1, "inside"] < closed.loc[3, "inside"] == pytest.approx(3, abs=1.5)
    assert closed.loc[1, "little"] == pytest.approx(1, abs=0.3)
    assert 1 < closed.loc[3, "little"] <= 3.01
    assert (rows["tokens_per_s"] == 8 * rows["served"]).all()
    (chance,) = rows[rows["arrivals"] == "poisson"].to_dict("records")
    assert chance["offered"] == pytest.approx(closed["served"].max() / 2)


@pytest.mark.slow
def test_both_models_are_served_under_every_split() -> None:
    """None is refused where the memory holds less than all ask for."""
    rows = load.split_rows(PLAN)
    assert [*rows["share"]] == [0.4, 0.4, 0.6, 0.6]
    assert [*rows["model"].unique()] == ["tiny-solver", "dummy:tiny-solver"]
    assert (rows["refused"] == 0).all() and (rows["served"] > 0).all()


def test_rates_of_two_loads_are_of_the_time_in_which_both_last() -> None:
    """The longer has the machine to itself afterwards; of an answer the part counts that came."""
    short = [Answer(0.0, 200, [0.5, 1.0], 1.0)]
    long = [Answer(0.0, 200, [0.5], 0.5), Answer(0.5, 200, [1.0, 2.0], 2.0), Answer(2, 200, [3], 3)]
    (few, fast), (many, slow) = load.while_all_last([short, long], 10)
    assert (few, fast, many, slow) == (short, 10.0, long[:2], 15.0)


def test_plans_are_checked() -> None:
    """A value that is none is refused by name."""
    with pytest.raises(ConfigError, match="rounds"):
        replace(PLAN, rounds=0)
    for name, wrong in {"offered": (), "clients": (4, 0), "shares": (-0.1,)}.items():
        with pytest.raises(ConfigError, match=f"{name} is .*one or more, each above 0"):
            replace(PLAN, **{name: wrong})
