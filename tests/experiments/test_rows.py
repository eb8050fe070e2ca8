"""The rows figures draw, counted again by hand on a small sweep without models."""

import json
import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from tests.conftest import committed_tree
from tests.experiments.fake_sweep import PROBLEMS, SHARES, FakeSweep, wall
from tests.experiments.fakes import fake_result
from tests.plots.synthetic import critique_rows
from workbench import plots
from workbench.config import STRATEGIES
from workbench.errors import RunStoreError
from workbench.experiments import claims, plans, report, statistics
from workbench.experiments import rows as views
from workbench.experiments.execute import one_by_one
from workbench.experiments.plans import StrategyPlan, strategy_runs, sweep_config
from workbench.experiments.settings import REPLAYED
from workbench.experiments.study import run_study

ROOT = committed_tree()
COSTS = {
    "llm": lambda tokens, context, logits: tokens * 100.0,
    "prm": lambda tokens, context, logits: tokens * 700.0,
}


@pytest.fixture(scope="module")
def sweep():
    return FakeSweep()


@pytest.fixture(scope="module")
def lost(sweep):
    return views.lost_time_rows(sweep, COSTS)


def accounted(lost):
    """What part of its wall time each share's uses add up to."""
    return claims.time_spent(lost, *lost["part"].unique())


def at(rows, share, **where):
    found = rows[(rows["llm_share"] == share)]
    for column, value in where.items():
        found = found[found[column] == value]
    assert len(found) == 1
    return found.iloc[0]


def test_throughput_is_tokens_and_problems_over_wall_time(sweep):
    rows = views.split_rows(sweep)
    row = at(rows, 0.3, metric="tokens_per_s")
    assert row["value"] == pytest.approx(400 / wall(0.3))
    assert row["low"] < row["value"] < row["high"]
    problems = at(rows, 0.3, metric="problems_per_min")
    assert problems["value"] == pytest.approx(60 * len(PROBLEMS) / wall(0.3))
    peak = rows[rows["metric"] == "peak_share"].iloc[0]
    assert peak["value"] == 0.3


def test_counts_at_fitted_prices_make_the_seconds_that_these_prices_made():
    """Of steps whose seconds are such sums, of each engine by prices of its own."""
    draw, prices = np.random.default_rng(0), {"llm": (2e-3, 1e-4, 1e-3, 1e-6), "prm": (1e-3,) * 4}
    parts = []
    for share, (engine, own) in product((0.2, 0.3), prices.items()):
        counts = draw.integers(1, 900, (50, 3))
        part = pd.DataFrame(counts, columns=["prefill_tokens", "decode_tokens", "tokens_held"])
        part["duration_s"] = own[0] + counts @ own[1:]
        parts.append(part.assign(llm_share=share, engine=engine))
    steps = pd.concat(parts, ignore_index=True)
    inside = steps.groupby("llm_share")["duration_s"].sum()
    runs = pd.DataFrame({"llm_share": [0.2, 0.3], "sampled_tokens": [900, 900]})
    runs["wall_s"] = inside.to_numpy() + 3.0
    assert (900 / (inside + 3.0)).to_list() == pytest.approx(views.counted_rate(runs, steps))


def test_marks_say_from_where_on_a_model_computes_again_what_it_gave_up(sweep, monkeypatch):
    monkeypatch.setattr(views, "counted_rate", lambda runs, _: pd.Series({0.3: 9.0, 0.5: 6.0}))
    rows = views.counted_rows(sweep)
    assert at(rows, 0.5, metric="counted")["ratio"] == pytest.approx(2 / 3)
    more = {"llm_recomputed_tokens_evicted": 0.25 - sweep.runs["llm_share"]}
    more |= {"prm_recomputed_tokens_preempted": sweep.runs["llm_share"] - 0.35}
    short = sweep.runs.assign(**{name: (each > 0) * 7 for name, each in more.items()})
    monkeypatch.setattr(type(sweep), "runs", short)
    rows = views.counted_rows(sweep)
    assert at(rows, 0.2, metric="llm_short")["value"] == 0.2
    assert at(rows, 0.4, metric="prm_short")["value"] == 0.4
    plots.memory_split(rows)


def counted(spec):
    """Half the blocks are active at most; self-consistency asks no PRM."""
    run, cells = fake_result(spec), dict[str, int]()
    for engine, look_ups in (("llm", 2), ("prm", 4)):
        scale = engine == "llm" or spec.config.strategy != "self_consistency"
        own = {"hit_tokens": 480, "query_tokens": 600, "thrash_events": 6, "look_ups": look_ups}
        own["blocks_peak"] = run.measured[f"{engine}_blocks"] // 2
        cells |= {f"{engine}_{name}": scale * value for name, value in own.items()}
    return replace(run, measured={**run.measured, **cells})


def carried_out(config, plan, place, run):
    """Every strategy, with a function in place of searches."""
    execute, runs = one_by_one(run), strategy_runs(config, plan)
    return run_study(config, runs, place, plan=plan, execute=execute, progress=False)


def test_strategies_are_compared_over_all_levels_and_over_the_easier_and_the_hard_ones(tmp_path):
    """Accuracy and tokens of each strategy and number of beams; problems, not seeds, are trials."""
    config, plan = sweep_config("quick", n=4, seeds=(0, 1)), StrategyPlan(10, (4, 8), 2)
    study = carried_out(config, plan, tmp_path, counted)
    rows = views.strategy_rows(study)
    assert len(rows) == 3 * 2 * len(STRATEGIES) == rows.drop_duplicates().shape[0]
    found = rows[(rows["strategy"] == "dvts") & (rows["n"] == 8)].set_index("levels")
    assert list(found.index) == ["all levels", "levels to 3", "levels from 4"]
    assert found["value"].tolist() == [0.5] * 3  # of the fake every other problem is right
    assert found["low"].tolist() == [statistics.wilson(0.5, trials).low for trials in (10, 6, 4)]
    tokens = [100 + 10 * k + 0.5 for k in range(10)]  # 0.5: the mean of both seeds
    own = tokens, [tokens[k] for k in (0, 1, 2, 5, 6, 7)], [tokens[k] for k in (3, 4, 8, 9)]
    means = [sum(each) / len(each) for each in own]
    assert found["tokens"].tolist() == pytest.approx(means)
    assert found["prm_tokens"].tolist() == pytest.approx([5 * mean for mean in means])
    assert found["seconds"].tolist() == pytest.approx([mean / 1000 for mean in means])
    assert (found[["more", "more_low", "more_high"]] == 0).all(axis=None), "as best of n, each"
    plots.search_strategies(rows)


def test_without_best_of_n_nothing_stands_beside_it(tmp_path) -> None:
    """A run that failed takes its columns, not the rows."""

    def run(spec):
        if spec.config.strategy == "best_of_n":
            raise MemoryError("no room")
        return counted(spec)

    config, plan = sweep_config("quick", n=4, seeds=(0,)), StrategyPlan(4, (4,), 1)
    rows = views.strategy_rows(carried_out(config, plan, tmp_path, run))
    assert rows[["more", "more_low", "more_high", "times"]].isna().all(axis=None)
    assert len(rows) == 3 * (len(STRATEGIES) - 1) and rows["value"].notna().all()


def test_the_best_split_moves_where_both_intervals_of_it_are_apart() -> None:
    """And not where they overlap, whatever the best of the shares tried is."""
    rows = critique_rows()
    assert "5.0 times slower" in claims.critiques_in_words(rows)
    assert "no move is shown" in claims.critiques_in_words(rows)
    is_peak = (rows["metric"] == "peak_share") & (rows["kind"] == "critiques")
    apart = rows.assign(high=rows["high"].mask(is_peak, 0.15), low=rows["low"].mask(is_peak, 0.1))
    told = claims.critiques_in_words(apart)
    assert "0.30 (95 %: 0.10 to 0.15) with critiques and 0.30 (95 %: 0.20 to 0.40)" in told
    assert "so it moves." in told
    lowest = rows.assign(value=rows["value"].mask(is_peak, rows["llm_share"].min()))
    told = claims.critiques_in_words(lowest)
    assert told.count("the lowest share tried) with critiques and 0.30 (95 %: 0.20 to 0.40)") == 1


def searched(spec):
    """With 8 beams all is right; with 4 of DVTS all, else all but 1 (beam), 4 (ETS), or half."""
    run, k = counted(spec), np.arange(spec.config.num_problems)
    some = {"dvts": k >= 0, "beam_search": k > 0, "ets": k > 3}
    right = some.get(spec.config.strategy, k % 2 == 0)
    problems = run.tables["problems"].assign(correct=right | (spec.config.n == 8))
    problems["wall_part_s"] *= 1 + (spec.config.strategy == "dvts")
    return replace(run, tables={**run.tables, "problems": problems})


@pytest.fixture(scope="module")
def strategies(tmp_path_factory):
    """Of 40 problems with 4 beams, of the first 20 with 8."""
    config, plan = sweep_config("quick", seeds=(0,)), StrategyPlan((40, 20), (4, 8), 1)
    return carried_out(config, plan, tmp_path_factory.mktemp("strategies"), searched)


def test_a_strategy_is_told_from_the_best_by_their_difference_problem_by_problem(strategies):
    """One problem of 40 tells nothing, four but to the bootstrap (McNemar: 0.125), twenty do."""
    rows = views.strategy_rows(strategies)
    of = rows[rows["levels"] == "all levels"].set_index(["n", "strategy"])
    assert set(of.loc[4, "best"]) == {"dvts"}
    gaps = of.loc[4, ["gap", "gap_low", "gap_high"]]
    assert gaps.loc["dvts"].tolist() == [0, 0, 0]
    assert gaps.loc["beam_search", ["gap", "gap_low"]].tolist() == [1 / 40, 0]
    assert gaps.loc["rebase", "gap"] == 0.5 and gaps.loc["rebase", "gap_low"] > 0.3
    assert (of.loc[8, "gap_high"] == 0).all()
    assert of.loc[(4, "ets"), "gap_low"] > 0
    assert of.loc[(4, "dvts"), "more"] == 0.5 and of.loc[(4, "dvts"), "more_low"] > 0.3
    assert of.loc[(4, "dvts"), "times"] == pytest.approx(2), "twice the seconds of best of n"
    assert rows.loc[rows["levels"] != "all levels", "times"].isna().all()
    rows = claims.judge_strategies(strategies, rows)
    best = rows[rows["strategy"] == rows["best"]].set_index(["levels", "n"])
    found = best.loc[("all levels", 4)]
    assert (found["strategy"], found["alike"]) == ("dvts", "beam_search, ets")
    assert best.loc[("all levels", 8), "alike"].count(",") == len(STRATEGIES) - 2
    assert len(best) == 3 * 2
    told = claims.ranked_strategies(rows)
    assert told["all levels", 4] == "dvts (1.000), not shown to beat beam_search, ets"
    alone = claims.ranked_strategies(rows.assign(alike=""))["all levels", 4]
    assert alone == f"dvts (1.000), shown to beat all {len(STRATEGIES) - 1} others"


def test_more_compute_where_it_is_hard_is_told_with_where_both_begin(strategies):
    """Not shown of these; shown where both tests agree; not told where one kind is missing."""
    rows = claims.judge_strategies(strategies, views.strategy_rows(strategies))
    words, easier = claims.harder_in_words(rows), rows[rows["levels"] == views.EASIER]
    easy = views.by_levels(strategies)[views.EASIER]
    many = easy[(easy["n"] == 8) & (easy["strategy"] == "dvts")]
    both = set(many["problem_id"])  # of those with 4 beams what all have with 8
    first = easy[(easy["n"] == 4) & easy["problem_id"].isin(both)]
    begin = first.groupby("strategy")["correct"].mean().mean()
    assert len(both) < easy["problem_id"].nunique()
    assert begin == pytest.approx(easier["gain_from"].iloc[0])
    assert "hard? Not shown: from n = 4 to 8" in words
    assert f"at levels to 3, from {begin:.2f}, and" in words
    righted = 100 * easier["gain"].iloc[0] / (1 - begin)
    assert f"wrong about {righted:.0f} % are right then at levels to 3 and " in words
    shown = rows.assign(chance=0.01, gain_low=0.1)
    assert "hard? Yes: from" in claims.harder_in_words(shown)
    less = claims.harder_in_words(shown.assign(gain_low=-1.0, gain_high=-0.1))
    assert "hard? No, less: from" in less
    assert "Not told" in claims.harder_in_words(rows[rows["levels"] != views.HARDER])


def test_a_sign_test_is_exact():
    """Against the binomial distribution's own sums; of nothing it tells nothing."""
    assert [views.sign_test(k, 0) for k in (0, 1, 4, 5)] == [1, 1, 0.125, 0.0625]
    assert views.sign_test(3, 3) == 1 and views.sign_test(0, 4) == 0.125
    assert views.sign_test(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 2**10)
    assert 0 < views.sign_test(900, 600) < 1e-10


def test_what_a_strategy_does_to_both_caches_is_counted_over_its_runs(strategies):
    rows = views.strategy_rows(strategies)
    row = rows.iloc[0]
    assert row[["llm_hits", "prm_hits"]].tolist() == [0.8, 0.8]
    assert row[["llm_peak", "prm_peak"]].tolist() == pytest.approx([0.5, 0.5], rel=0.01)
    assert row["llm_thrash"] == 1000 * 6 / 2
    assert row["prm_thrash"] == 1000 * 6 / 4
    alone = rows[rows["strategy"] == "self_consistency"].iloc[0]
    assert alone["llm_hits"] == 0.8 and alone[["prm_peak", "prm_hits", "prm_thrash"]].isna().all()


def test_gains_of_hard_and_easier_levels_are_those_of_the_problems_both_budgets_have(strategies):
    """Of the 20: six strategies of nine gain every odd problem, beam search the first, ETS four."""
    gains, chance = views.gains_by_level(strategies)
    easier, hard = (6 * 6 + 1 + 3) / 9 / 12, (4 * 6 + 1) / 9 / 8
    assert list(gains.index) == [views.EASIER, views.HARDER, "all levels"]
    assert gains["gain"].tolist() == pytest.approx([easier, hard, hard - easier])
    _, low, high, _ = gains.loc["all levels"]
    assert low < 0 < high and chance > 0.5
    runs = strategies.all_runs
    failed = (runs["strategy"] == "beam_search") & (runs["n"] == runs["n"].max())
    kept = tuple(runs.loc[~failed, "folder"])
    fewer, _ = views.gains_by_level(replace(strategies, folders=kept))
    gain = fewer.loc[views.EASIER, "gain"]
    assert gain > 0, "a strategy that lacks a run leaves the others theirs"


def test_problems_without_a_level_have_no_part_in_what_levels_gain(strategies, monkeypatch):
    """Of a file of one's own: they count among all levels alone."""
    problems = views.by_levels(strategies)["all levels"]
    problems["level"] = problems["level"].astype("Int64").where(problems["problem_id"] != "p3")
    monkeypatch.setattr(views, "by_levels", lambda study: {"all levels": problems})
    gains, chance = views.gains_by_level(strategies)
    assert gains.loc[views.EASIER, "gain"] > 0 and chance > 0.5


def test_hit_rates_are_those_of_first_admissions(sweep):
    rows = views.prefix_hit_rows(sweep)
    assert at(rows, 0.2, engine="llm")["value"] == pytest.approx(0.90)
    assert at(rows, 0.2, engine="prm")["value"] == pytest.approx(0.95)


def test_thrashing_counts_per_look_up_and_bounds_a_zero(sweep):
    rows = views.thrashing_rows(sweep)
    events = at(rows, 0.5, engine="prm", metric="events_per_1000")
    assert events["value"] == pytest.approx(1000 * 40 / 20)  # 40 events, 20 look-ups a run
    blocks = at(rows, 0.5, engine="prm", metric="blocks")
    assert blocks["value"] == pytest.approx(40 * 4)
    zero = at(rows, 0.3, engine="prm", metric="events_per_1000")
    assert (zero["value"], zero["low"]) == (0, 0)
    assert zero["high"] == pytest.approx(1000 * 3 / 40, rel=0.06), "the rule of three"


def test_a_request_that_was_never_admitted_is_no_look_up():
    def waiting(rows):
        return rows.assign(scheduled_s=rows["scheduled_s"].where(rows["problem_id"] != "a"))

    rows = views.thrashing_rows(FakeSweep(requests=waiting))
    assert at(rows, 0.5, engine="prm", metric="events_per_1000")["value"] == 1000 * 40 / 15


def test_block_figures_get_every_step_and_common_axes(sweep):
    a, b = views.block_rows(sweep, 0.3, beside=(0.5,)), views.block_rows(sweep, 0.5, beside=(0.3,))
    assert len(a) == 40
    assert (a["engine"] == "prm").all()
    assert list(a["step"]) == list(range(40))
    for limit in ("axis_steps", "axis_blocks", "axis_events"):
        assert a[limit].iloc[0] == b[limit].iloc[0]
    assert b["evicted"].sum() == 200
    plots.prm_blocks(a)
    short = FakeSweep()
    lost = {"llm_share": 0.5, "seed": 0}
    short._runs = [run for run in short._runs if not lost.items() <= run["row"].items()]
    both = [views.block_rows(short, *pair) for pair in ((0.3, (0.5,)), (0.5, (0.3,)))]
    assert [set(rows["run_seed"]) for rows in both] == [{1}, {1}], "a seed that both shares have"
    with pytest.raises(ValueError):
        views.block_rows(sweep, 0.99)


def test_parts_of_the_wall_time_add_up_to_it(lost):
    assert accounted(lost).between(0.99, 1.01).all()
    uses = ("llm_decode", "llm_prefill", "prm_prefill", "bookkeeping")
    assert set(lost["part"]) <= {*uses, *views.AGAIN}
    plots.lost_time(lost)


def test_a_mixed_step_is_divided_by_operations(lost):
    parts = lost[lost["llm_share"] == 0.5].groupby("part")["seconds"].sum()
    prm_forward = 0.45 * wall(0.5) * 0.9
    llm_forward = prm_forward
    again = prm_forward * 40 / 60
    assert parts["recomputed_evicted"] == pytest.approx(again)
    assert parts["prm_prefill"] == pytest.approx(prm_forward * 16 / 60)
    assert parts["llm_decode"] == pytest.approx(llm_forward * 16 / 24)
    assert parts["llm_prefill"] == pytest.approx(llm_forward * 7 / 24)
    assert parts["bookkeeping"] == pytest.approx(0.09 * wall(0.5) + 0.1 * wall(0.5), rel=0.01)


def test_a_gap_in_the_record_shows():
    rows = views.lost_time_rows(FakeSweep(spans=lambda rows: rows.iloc[::2]), COSTS)
    assert (accounted(rows) < 0.97).all()


def test_claims_are_judged_by_their_rules(sweep, lost):
    judged = [claims.peak_claim(views.split_rows(sweep))]
    judged += [claims.hits_claim(views.prefix_hit_rows(sweep))]
    judged += [claims.sameness_claim(sweep.table("nodes"))]
    assert {claim.verdict for claim in judged} == {"holds"}
    thrash = claims.thrash_claim(views.thrashing_rows(sweep))
    split = views.split_rows(sweep).assign(rung="measured tiny")
    eviction = claims.eviction_claim(lost, split)
    assert eviction.number.endswith("it depends on the machine's noise"), "no two did equal work"
    assert thrash.verdict == "depends on"
    nothing = "0.08, 0.20, 0.30 and 0.40"  # thrashed, of too few look-ups to say that it never does
    told = f"it is rare at none and common at 0.50; too few events tell at {nothing}"
    assert thrash.number.endswith(told)
    assert all(claim.number and claim.figure in plots.FIGURES for claim in [*judged, thrash])
    few = views.thrashing_rows(sweep).replace({"llm_share": {0.08: 0.0}})
    few.loc[few["value"] == 0, "high"] = 9.9
    few.loc[few["llm_share"] == 0, ["value", "low", "high"]] = (13.1, 0.0, 33.9)
    assert claims.thrash_claim(few).number.endswith("; too few events tell at 0.00")


def test_a_writing_prm_that_does_not_fit_is_said_by_name():
    every = pd.DataFrame({"status": ["infeasible"], "error": ["the PRM lacks 7 GiB"]})
    none = SimpleNamespace(runs=every[:0], all_runs=every)
    with pytest.raises(RunStoreError, match="lacks 7 GiB"):
        views.critique_rows(none, none)


def test_the_sentence_on_thrashing_takes_the_ends_that_its_claim_takes():
    """The model with most events may be sure to be rare, while the other's are too few to tell."""
    ends = {"value": [2.0, 0.5], "low": [1.0, 0.0], "high": [4.0, 30.0]}
    rows = pd.DataFrame({"metric": "events_per_1000", "engine": ["llm", "prm"], **ends})
    rows["llm_share"] = 0.3
    lost = pd.DataFrame({"llm_share": [0.3], "part": "bookkeeping", "seconds": 1.0, "wall_s": 2.0})
    assert "at 0.30 too few events tell" in claims.thrashing_in_words(rows, lost)


def test_claims_can_fail(sweep):
    nodes = sweep.table("nodes")
    nodes.at[5, "token_ids"] = [9, 9, 9]
    assert claims.sameness_claim(nodes).verdict == "fails"
    assert claims.sameness_claim(nodes.drop(index=5)).verdict == "fails"
    hits = views.prefix_hit_rows(sweep).assign(value=0.4, low=0.3, high=0.5)
    assert claims.hits_claim(hits).verdict == "fails"
    peak = views.split_rows(sweep)
    at_the_end = peak.assign(low=peak["low"].where(peak["metric"] != "peak_share", 0.08))
    assert claims.peak_claim(at_the_end).verdict == "depends on"


def test_what_was_not_run_is_not_judged(sweep):
    """No share of 0.3 between those that ran; no run of one way of batching."""
    rows = views.split_rows(FakeSweep(shares=(0.4, 0.5)))
    assert claims.peak_claim(rows).verdict == claims.UNTESTED
    lacking = pd.DataFrame({"metric": ["problems_per_min"], "setting": ["score_cache"]})
    assert claims.batching_claim(lacking).verdict == claims.UNTESTED


def test_a_study_without_a_finished_run_has_no_rows_and_says_why():
    empty = SimpleNamespace(runs=pd.DataFrame(), all_runs=pd.DataFrame({"error": ["no room"]}))
    with pytest.raises(RunStoreError, match="No run of thrashing finished: no room"):
        views.on_rungs(views.thrashing_rows, [empty], "thrashing")


def test_shares_of_equal_work_are_not_ranked_and_no_peak_is_claimed_where_none_is_shown():
    """One plateau is one; where the interval or the plateau is the whole axis there is no peak."""

    def told(low, high, same, reach=(float("nan"), float("nan"))):
        rows = [(0.08, 90.0), (0.2, 100.0), (0.3, 102.0), (0.5, 80.0)]
        table = pd.DataFrame(rows, columns=["llm_share", "value"]).assign(metric="tokens_per_s")
        bounds = dict(zip(("ratio_low", "ratio_high"), reach))
        table = table.assign(ratio=table["value"] / 102.0, **bounds)
        ends = [("peak_share", low, high), ("same_work", *same)]
        found = pd.DataFrame(ends, columns=["metric", "low", "high"])
        rows = pd.concat([table, found.assign(llm_share=0.3, value=0.3)])
        return claims.split_in_words(rows), claims.peak_claim(rows)

    words, claim = told(0.2, 0.3, (0.2, 0.3))
    assert words == (
        "Throughput is highest from 0.20 to 0.30, which do the same work (95 %: 0.20 to 0.30): 101 "
        "generated tokens/s; it is 90 at 0.08 (-11.8% against 0.30) and 80 at 0.50 (-21.6% against "
        "0.30)."
    )
    bounded, _ = told(0.2, 0.3, (0.2, 0.3), (0.88, 0.9))
    assert "90 at 0.08 (-11.8% [-12.0%, -10.0%] against 0.30)" in bounded
    assert claim.number == (
        "fastest from 0.20 to 0.30, which do the same work [0.20, 0.30]; against 0.30 -11.8% at "
        "0.08 and -21.6% at 0.50"
    )
    words, claim = told(0.2, 0.5, (0.3, 0.3))
    assert words.startswith("Throughput is highest from 0.20 to 0.50, which are not told apart (9")
    assert claim.number.startswith("fastest from 0.20 to 0.50, which are not told apart [0.20, ")
    assert "highest at 0.30 (95 %" in told(0.3, 0.3, (0.3, 0.3))[0]
    words, claim = told(0.08, 0.5, (0.3, 0.3))
    assert words.endswith("its interval is the whole axis: 80 to 102 generated tokens/s.")
    assert claim.number.startswith("no peak is shown [0.08, 0.50]; it depends on whether a model")
    words, _ = told(0.08, 0.5, (0.08, 0.5))
    assert words == "No peak is shown: every share from 0.08 to 0.50 does the same work."


def test_the_committed_ratios_are_those_of_their_rates_and_bounded_everywhere():
    """Half an interval is at most 0.02 but for two; what does 0.3's work is 1. Ratios of more seeds
    than the rates have lie where these bound them.
    """
    wide = {("measured SmolLM2", 0.08): 0.06}  # eight problems, one seed
    wide[REPLAYED, 0.4] = 0.03  # of 128 seeds: problems differ
    rows = pd.read_parquet(ROOT / "figures" / "memory_split.parquet")
    for rung, own in rows[rows["metric"] == "tokens_per_s"].groupby("rung"):
        own = own.set_index("llm_share")
        (same,) = rows[(rows["rung"] == rung) & (rows["metric"] == "same_work")].itertuples()
        as_thesis = (own.index >= same.low) & (own.index <= same.high)
        as_thesis = as_thesis if same.low <= 0.3 <= same.high else own.index == 0.3
        known = own.loc[as_thesis, ["ratio", "ratio_low", "ratio_high"]]
        assert len(known) and (known == 1).all(axis=None)
        off = own[~as_thesis]
        of_rates = off["value"] / own["value"][0.3]
        alike = ~off.index.isin([*plans.SURER["full"]]) if rung == REPLAYED else off.index > 0
        assert list(off["ratio"][alike]) == pytest.approx(list(of_rates[alike]))
        assert of_rates.between(off["ratio_low"], off["ratio_high"]).all()
        half = (off["ratio_high"] - off["ratio_low"]) / 2
        assert all(found <= wide.get((rung, share), 0.02) for share, found in half.items())
        assert off["ratio"].between(off["ratio_low"], off["ratio_high"]).all()


def test_a_claim_is_judged_of_each_pair_of_models_by_its_own_rows():
    rows = pd.DataFrame({"rung": ["measured tiny", REPLAYED], "value": [0.9, 0.7]})
    rows = rows.assign(low=rows["value"], high=rows["value"], engine="prm", llm_share=0.5)
    head, _, first, second = claims.verdicts(claims.hits_claim, rows).splitlines()
    assert head == f"{claims.CLAIMS['C5'][0]}:"
    assert first.startswith(f"- {claims.PAIRS['measured tiny']}: **holds** (") and "90.0%" in first
    assert second.startswith(f"- {claims.PAIRS[REPLAYED]}: **fails** (") and "70.0%" in second


def test_what_thrashing_costs_is_one_sentence(sweep, lost):
    """Guards an answer that ranks shares where nothing thrashes."""
    rows = views.thrashing_rows(sweep)
    told = claims.thrashing_in_words(rows, lost)
    assert told.count(". ") == 0
    most = rows[rows["metric"] == "events_per_1000"]["value"].max()
    assert f"it is common at 0.50 (the PRM up to {most:.0f} in 1,000 look-ups, " in told
    rare = rows.assign(value=0.0, low=0.0, high=3.0)
    found = claims.thrashing_in_words(rare, lost.assign(seconds=0.0))
    shares = claims.listed(SHARES)
    assert found.startswith(f"Thrashing is rare at LLM shares of {shares}, with at most 0.0 events")


def test_sameness_of_the_recorded_pair_is_its_records(tmp_path) -> None:
    """Of the committed record; one setting that differs fails; without policies it is untested."""
    claim = claims.identical_claim()
    assert claim.verdict == claims.HOLDS
    assert "under 8 of 8 further settings" in claim.number
    assert ", 3 of them of a policy and 1 with all techniques, with" in claim.number
    names = ("identical@share", "identical@phase_aware,1200MiB,techniques")
    rows = [{"name": name, "value": 1.0} for name in (*names, f"preemptions{names[1][9:]}")]
    (tmp_path / "record.json").write_text(json.dumps({"rows": rows}))
    claim = claims.identical_claim(tmp_path / "record.json")
    assert claim.verdict == claims.HOLDS and "1 of them of a policy and 1 with all" in claim.number
    rows = [{"name": f"identical@{k}", "value": value} for k, value in enumerate((1.0, 0.99))]
    (tmp_path / "record.json").write_text(json.dumps({"rows": rows}))
    claim = claims.identical_claim(tmp_path / "record.json")
    assert claim.verdict == claims.FAILS and "under 1 of 2" in claim.number
    (tmp_path / "record.json").write_text(json.dumps({"rows": rows[:1]}))
    for name in ("record", "none"):
        assert claims.identical_claim(tmp_path / f"{name}.json").verdict == claims.UNTESTED


def test_the_page_of_claims_is_what_the_committed_rows_say():
    """Nine claims on four rungs, each with a verdict, and figures that are there."""
    page = (ROOT / "reports" / "claims.md").read_text()
    drawn = report.Drawn(ROOT / "figures")
    assert page == report.claims_page(drawn, report.claim_numbers(drawn))
    table = (ROOT / "reports" / "claims.tex").read_text()
    assert table.count("\nC") == 36 and "all nodes are equal under all" in table
    assert "| block size | 16 (vLLM) | 16 |" in page
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| C")]
    rungs = list(dict.fromkeys(cell[-1] for cell in cells))
    assert [(key, at) for key, *_, at in cells] == [*product(claims.CLAIMS, rungs)]
    assert rungs == list(claims.PAIRS.values())
    verdicts = {claims.HOLDS, claims.FAILS, claims.DEPENDS, claims.UNTESTED}
    assert {cell[2].strip("*") for cell in cells} <= verdicts
    untested = {(key, at) for key, _, verdict, *_, at in cells if claims.UNTESTED in verdict}
    built, replayed = rungs[:2], rungs[2:]
    assert {*product(("C2", "C3"), replayed)} <= untested, "a replay builds no engine"
    assert not {*product(("C2", "C3"), built)} & untested
    for _, _, verdict, number, *_ in cells:
        assert ("depends on" in number) is (claims.DEPENDS in verdict), "of what, with the number"
        assert number != claims.NO_ROWS, "why a claim was not tested is said"
    for file in re.findall(r"\(\.\./(figures/\w+\.svg)\)", page):
        assert (ROOT / file).is_file()


def test_pairs_agree_by_the_interval_of_the_peak_and_by_the_order_of_shares():
    """Guards the sentence of the page of claims: shares that do the same work are of one rank."""
    rows = []
    for pair, rates, peak, same in (
        ("measured tiny", (1, 5, 4, 2), (0.2, 0.4), (0.2, 0.3)),
        ("replayed SmolLM2", (5, 4, 2, 1), (0.08, 0.1), (0.08, 0.08)),
        (REPLAYED, (1, 4, 5, 2), (0.3, 0.5), (0.2, 0.3)),
    ):
        rows += [
            *((pair, "tokens_per_s", *cell, 0, 0) for cell in zip((0.08, 0.2, 0.3, 0.5), rates)),
            *((pair, "peak_share", 0, 0, *peak), (pair, "same_work", 0, 0, *same)),
        ]
    columns = ["rung", "metric", "llm_share", "value", "low", "high"]
    first, other, last = claims.rungs_in_words(pd.DataFrame(rows, columns=columns)).split("; ")
    assert first.endswith("0.20 to 0.40 measured") and "on SmolLM2, replayed, 0.08 to" in other
    assert "which does not overlap, and the order of shares differs (Spear" in other
    assert "which overlaps, and the order of shares agrees (Spear" in last and "n 1.00)" in last
    alike = pd.DataFrame(rows, columns=columns).replace({"value": dict.fromkeys((4, 5, 2, 1), 1.0)})
    assert "agrees" not in (said := claims.rungs_in_words(alike)) and "differs" not in said
    assert said.count("the shares have no order to compare") == 2
    few = [row for row in rows if row[2] != 0.2 or row[0] == REPLAYED]
    lacks = pd.DataFrame(few, columns=columns)
    assert claims.rungs_in_words(lacks).count("too few shares were tried there for an order") == 1


def test_how_far_the_agreement_was_chosen_stands_beside_it():
    """Which problems in flight leave the upper end no loss, and how short each PRM is there."""
    page = (ROOT / "reports" / "claims.md").read_text()
    said = claims.chosen_in_words(ROOT / "figures")
    assert said in page
    lost = dict(part.split(": ", 1) for part in said.partition("8B, ")[2].split("; "))
    rows = pd.read_parquet(ROOT / "figures" / "sensitivity.parquet")
    rows = rows[(rows["kind"] == "setting") & (rows["value"] == "problems in flight")]
    for setting, loss in rows[["setting", "loss_high"]].to_numpy():
        assert ("nothing is lost at" in lost.get(f"with {setting}", "")) is (loss < 5e-5)
    low, high = (pd.read_parquet(ROOT / f"figures/prm_blocks_0{at}.parquet") for at in (30, 50))
    for rung in claims.PAIRS:
        own, room = (each[each["rung"] == rung] for each in (low, high))
        ratio = own["blocks_active"].max() / room["blocks_total"].max()
        assert f"{ratio:.2f} on {claims.pair_in_words(rung)}" in page


def test_a_working_set_is_that_of_the_most_room_over_the_room_of_each_share():
    def capped(steps):
        """Less is in use where there is less room: the working set is taken elsewhere."""
        steps.loc[steps["llm_share"] == 0.08, ["blocks_total", "blocks_active"]] = (120, 120)
        return steps

    sweep = FakeSweep(steps=capped)
    sweep.config = sweep_config("default")
    rows = views.pressure_rows(sweep)
    assert list(rows["llm_share"]) == [0.08, 0.08, 0.3, 0.3, 0.5, 0.5]
    assert set(rows["need"]) == {1600}
    prm = rows[rows["model"] == "prm"].set_index("llm_share")
    assert prm["room"].to_dict() == {0.08: 236864, 0.3: 179200, 0.5: 126768}, "as the runs had it"
    assert prm["ratio"][0.5] == pytest.approx(1600 / 126768)


# -- sizes of a cache --


def test_whole_searches_agree_where_the_order_fits_and_shares_are_marked():
    """Replayed at sizes of the curve, a search hits what the curve says, or nearly."""
    sizes, keys = views.size_rows(FakeSweep(), "tiny-16-n4"), ["engine", "num_blocks"]
    marked = sizes[(sizes["kind"] == "share") & (sizes["engine"] == "prm")]
    room = {0.08: 236864, 0.3: 179200, 0.5: 126768}
    assert marked.set_index("llm_share")["tokens"].to_dict() == room
    lru, whole = (sizes[sizes["kind"] == kind].set_index(keys) for kind in ("lru", "replay"))
    assert (lru["tokens"] == 16 * lru.index.get_level_values("num_blocks")).all()
    apart = (whole["hit_ratio"] - lru["hit_ratio"]).dropna().abs()
    assert len(apart) >= sum(each >= 1 for each in views.REPLAYS)
    assert apart.max() < 0.1
