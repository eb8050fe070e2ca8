"""Missing values, each set otherwise: replays, what they come to, what the table says of them."""

from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest

from workbench.errors import ConfigError
from workbench.experiments import sensitivity
from workbench.experiments.plans import sweep_config
from workbench.experiments.sensitivity import DEPENDS, UNTRIED, Base, Setting, missing_values

SMALL = Base.of({"n": 4, "in_flight": 2, "max_num_seqs": 16}, rounds=4, replays=3)


@pytest.fixture(scope="module")
def small() -> pd.DataFrame:
    """Of a search of seconds, in memory that is tight for neither model."""
    return SMALL.rows(["block size", "GPU", "total memory", sensitivity.SWAP])


def test_every_setting_is_asked_the_same_and_its_row_is_what_its_replays_come_to(small) -> None:
    """Both ends and 0.3 are replayed; what is lost is against the best of them."""
    own = small[small["kind"] == "setting"].set_index("setting")
    assert list(own.index[:4]) == ["taken", "8", "32", "l40s, the same memory"]
    (none,) = SMALL.replayed("GPU", Setting("16 GiB", {"total": "16GiB"})).to_dict("records")
    assert "lack 2.7 GiB" in none["lacks"] and "best" not in none
    replays = small[small["what"] == sensitivity.SHARE]
    problems = SMALL.pair(Setting("")).answers.recording.problems
    whole = sum(len(step.tokens) for problem in problems for step in problem.steps)
    assert replays["tokens"].between(1, whole / 2).all(), "a part of the search was replayed"
    for setting, rows in replays.groupby("setting"):
        row = own.loc[setting]
        assert {row["low"], 0.3, row["high"]} == set(rows["llm_share"])
        rate = rows.set_index("llm_share")["tokens_per_s"]
        assert row["loss_high"] == pytest.approx(1 - rate[row["high"]] / rate.max())
        assert row["plateau_low"] <= row["best"] <= row["plateau_high"]
    assert set(own.loc["taken", ["low", "high"]]) == {0.08, 0.5}
    assert own.loc["rtx-4090, 23.5 GiB", "feasible_high"] < own.loc["taken", "feasible_high"]


def test_swapping_takes_back_what_computing_again_cost_and_no_more() -> None:
    """Of a token's seconds: those to compute it, and those to move it there and back."""
    taken = pd.DataFrame({"what": "share", "llm_share": [0.08, 0.3, 0.5], "tokens_per_s": 100.0})
    taken["tokens"] = 5_000  # of the rounds that were replayed
    again = {"llm_computed_again": [0, 0, 0], "prm_computed_again": [0, 0, 10_000]}
    found = SMALL.swapped(taken.assign(**again)).iloc[0]
    times = sensitivity.token_times(SMALL.asked).set_index(["model", "device"])
    saved = 1e4 * -np.diff(times.loc[("prm", "a100-40")][["recompute_us", "swap_us"]])[0] / 1e6
    faster = 5_000 / (5_000 / 100.0 - saved)
    assert saved > 0 and found["loss_low"] == pytest.approx(1 - 100.0 / faster)
    assert found["best"] == 0.5
    own = replace(SMALL, asked=replace(SMALL.asked, device="mine.json")).swapped(taken)
    assert own["lacks"].tolist() == ["no bus to the host is known of mine.json"]


def test_what_does_not_fit_is_a_row_that_says_so_and_ends_no_study() -> None:
    """A PRM that half of the memory cannot hold, and a pair that fits at no share that is asked."""
    small = replace(SMALL, asked=replace(SMALL.asked, device="rtx-4090", total="22GiB"))
    half = Setting("always 0.5", pair=sensitivity.FixedPRM)
    (prm,) = small.replayed("the PRM's remainder", half)["lacks"]
    assert "leaves llama-3.1-8b-prm 11.0 GiB" in prm
    other = {"llm": "llama-3.1-8b-prm", "prm": "llama-3.2-1b"}
    (none,) = small.replayed("GPU", Setting("turned", other))["lacks"]
    assert none.endswith("fit, none of 0.08 to 0.5")


def test_reasons_are_true_of_other_questions_too() -> None:
    """Where only what is replayed is set otherwise, and where nothing would fit turned round."""
    why = {value.name: value.why for value in sensitivity.values()}["problems in flight"]
    assert why == "their beams are 3 times max_num_seqs on both scales"
    own = Base(replace(Base().asked, n=8, in_flight=24))
    why = {value.name: value.why for value in sensitivity.values(own)}["problems in flight"]
    assert why == "their beams are 3 (tiny) and 0.75 times max_num_seqs"


def test_a_conclusion_depends_on_a_value_where_a_setting_breaks_one_of_its_three_parts() -> None:
    """0.3 on the plateau and both ends below it; losses next to 2 % are told to the hundredth."""
    good = {"best": 0.3, "low": 0.08, "high": 0.5, "plateau_low": 0.2, "plateau_high": 0.4}
    good |= {"loss_low": 0.05, "loss_mid": 0.0, "loss_high": 0.3, "kind": "setting"}
    good |= {"feasible_low": 0.07, "feasible_high": 0.6, "lacks": "", "tokens_per_s": 75.0}
    free = {"value": "block size", "setting": "1", "what": "no limit", "tokens_per_s": 100.0}
    cells = [
        {"value": "taken", "setting": "taken"},
        {"value": "n", "setting": "4", "loss_high": 0.0199},
        {"value": "n", "setting": "8", "loss_low": 0.0, "loss_high": 1e-5},
        {"value": "n", "setting": "64"},
        {"value": "seeds", "setting": "seed 1", "loss_low": 0.07},
        {"value": "block size", "setting": "1", "loss_high": 0.0},
        free | {"kind": "replay"},
        {"value": "beam width", "setting": "2", "loss_mid": 0.1},
        {"value": "dtype", "setting": "float32", "best": None, "lacks": "lack 4.0 GiB"},
    ]
    rows, record = pd.DataFrame([good | each for each in cells]), {"parameters": asdict(Base())}
    table = missing_values(rows, record).set_index("value")
    found = table["conclusion"].to_dict()
    assert found == {
        "n": DEPENDS, "seeds": sensitivity.SURVIVES, "block size": DEPENDS, "beam width": DEPENDS,
        "dtype": UNTRIED, sensitivity.WHOSE: UNTRIED,
    }  # fmt: skip
    assert table["told"]["n"].startswith(
        "with 4: only 1.99 % is lost at 0.50; with 8: nothing is lost at 0.08 or 0.50; plateau 0.20"
    )
    lost = "at 0.50 (at the best share, too, 25 % is lost to memory without limit); plateau"
    assert table["told"]["block size"].startswith(f"with 1: nothing more is lost {lost}")
    assert table["told"]["beam width"].startswith("with 2: 10 % is lost at 0.3;")
    assert "0.40 to 0.50 of 0.08 to 0.5" in table["told"][sensitivity.WHOSE]


def test_every_missing_value_has_a_conclusion_with_its_numbers_and_none_is_open() -> None:
    """Of the committed rows; what is taken is what the profiles set."""
    table = missing_values(*sensitivity.stored())
    assert list(table["value"]) == [value.name for value in sensitivity.values()]
    assert set(table["conclusion"]) <= {sensitivity.SURVIVES, DEPENDS, UNTRIED}
    assert table["told"].str.contains(r"\d").all()
    assert not table.map(lambda cell: "open" in cell.lower().split()).any(axis=None)
    taken, tiny = table.set_index("value")["taken"], sweep_config("default")
    assert taken["max_num_seqs"].startswith(f"{tiny.max_num_seqs} (tiny)")
    assert taken["n"] == str(tiny.n)
    assert taken["max_model_len"] == "2,048 (tiny), 4,096 (thesis scale)"
    assert taken["dtype"] == "float32 (tiny), bfloat16 (thesis scale)"


def test_the_committed_rows_hold_every_setting_and_a_figure_of_them_replays_nothing() -> None:
    """Guards rows that lack what the table of values names, and a dry run that tells no time."""
    rows = sensitivity.stored()[0]
    own = rows.loc[rows["kind"] == "setting", ["value", "setting"]]
    tried = [(value.name, each.label) for value in sensitivity.values() for each in value.tried]
    swap = (sensitivity.SWAP, "swap (arithmetic)")
    assert list(own.itertuples(index=False, name=None)) == [
        (sensitivity.TAKEN, sensitivity.TAKEN), *tried, swap,
    ]  # fmt: skip
    shares = rows[rows["what"] == sensitivity.SHARE].groupby(["value", "setting"])["llm_share"]
    for row in rows[rows["kind"] == "setting"].dropna(subset="plateau_low").to_dict("records"):
        if row["value"] != sensitivity.SWAP:
            at = shares.get_group((row["value"], row["setting"]))
            below, above = at[at < row["plateau_low"]], at[at > row["plateau_high"]]
            assert row["plateau_low"] - below.max() < sensitivity.APART + 1e-9 or below.empty
            assert above.min() - row["plateau_high"] < sensitivity.APART + 1e-9 or above.empty
    assert Base().replays_left("default") == []
    every = Base().replays_left("full")
    assert len(every) == 10 * (1 + len(tried))
    took = rows["replay_s"].median()
    assert took / 4 < sorted(every)[len(every) // 2] < 4 * took, "seconds of one core, roughly"
    some = Base.of({"n": 4, "in_flight": 2}, rounds=4, replays=3).replays_left("default", ["n"])
    assert len(some) == 7 * 4 and max(some) == some[-1] > some[0]


def test_the_committed_rows_are_what_a_replay_says() -> None:
    """Of the cheapest setting, at two shares."""
    rows = sensitivity.stored()[0]
    own = rows[(rows["value"] == "n") & (rows["setting"] == "4") & (rows["what"] == "share")]
    pair = Base().pair(Setting("", {"n": 4}))
    for share in (0.08, 0.5):
        pair.at(share)
        expected = own[own["llm_share"] == share].iloc[0]
        for column in ("tokens_per_s", "llm_computed_again", "prm_computed_again"):
            assert pair.rows[-1][column] == pytest.approx(expected[column])


def test_what_is_asked_otherwise_is_what_is_told_to_be_taken() -> None:
    """And a setting that cannot be asked beside it is a row that says so."""
    base = Base.of({"n": 64, "in_flight": 24, "device": "h100"}, rounds=32, replays=None)
    taken = {value.name: value.taken for value in sensitivity.values(base)}
    assert taken["n"] == "16 (tiny), 64 (thesis scale)"
    assert taken["problems in flight"].endswith("24 (thesis scale)")
    assert taken["depth of the search"] == "the first 32 rounds, two a step"
    assert "h100 (thesis" in taken["GPU"]
    (lacks,) = base.replayed("problems in flight", Setting("96", {"in_flight": 96}))["lacks"]
    assert lacks.startswith("n = 64 with 96 problems in flight are 6,144 beams")
    assert len(base.replays_left("default", ["problems in flight"])) == 10 * 3, "12, 24, as taken"


def test_a_value_that_the_thesis_does_not_leave_open_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'beam width'"):
        SMALL.rows(["beam widht"])
