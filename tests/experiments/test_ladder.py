"""The ladder of modifications: what its rungs are, and that what it says follows from its runs."""

import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from tests.experiments.fakes import fake_result
from workbench.cli.study import stored_ladder_claims
from workbench.errors import ConfigError, RunStoreError
from workbench.experiments import ladder_sentences
from workbench.experiments.compare import compare
from workbench.experiments.identity import identify
from workbench.experiments.ladder import _seeds_left, ladder_face, ladder_left, run_ladder
from workbench.experiments.ladder_claims import batching_claim, finishing_claim, ladder_claims
from workbench.experiments.ladder_plan import (
    BESIDE,
    BY_KEY,
    COST,
    DEPTH,
    LADDER,
    LAST_TWO,
    RUNGS,
    LadderPlan,
    LadderSpec,
    ladder_config,
    ladder_plan,
    ladder_runs,
    queue_runs,
)
from workbench.experiments.ladder_rows import (
    depth_pairs,
    differing_nodes,
    ladder_rows,
    speed_up,
    steps_up,
)
from workbench.experiments.ladder_turns import LadderInTurns, rounds_of
from workbench.experiments.noise import WORK
from workbench.experiments.preview import seconds_per_problem
from workbench.experiments.profiles import PROFILES, sweep_config
from workbench.experiments.record import RunResult
from workbench.experiments.statistics import Interval
from workbench.experiments.store import RunStore
from workbench.experiments.study import figures_home, profile_figures
from workbench.experiments.sweep import Sweep
from workbench.experiments.turns import Timed
from workbench.plots import FIGURES, modifications

CONFIG = sweep_config("quick", n=4, max_depth=2, seeds=(0, 1))
PLAN = LadderPlan(4, 2, depth_limits=(1,), queue_problems=5, queue_in_flight=2)
SLOWER = dict(zip((*(r.key for r in RUNGS), BESIDE.key), (8.0, 4.0, 2.0, 1.0, 1.0, 3.0)))
"""How many times the seconds of the last rung each fake rung takes; the last two do one work."""


def fake_run(spec):
    """A rung of known speed; at depth 1 only searches that sample to the end are correct."""
    found = fake_result(spec)
    key, slower = spec.rung.key, SLOWER[spec.rung.key] * (1.02 if spec.repeat else 1.0)
    problems = found.tables["problems"].copy()
    problems["wall_part_s"] *= slower
    finishes = spec.rung.switches.finish_at_limit
    problems["correct"] = pd.array([finishes or spec.role == LADDER] * len(problems), "boolean")
    nodes = found.tables["nodes"]
    nodes = nodes[nodes["depth"] <= spec.config.max_depth]
    work = 5 if key in LAST_TWO else 10 + list(SLOWER).index(key)
    measured = dict(found.measured) | dict.fromkeys(WORK, work)
    measured |= {"llm_steps": 50 if key == "score_cache" else 40, "llm_decode_tokens": 400}
    measured["wall_s"] = float(problems["wall_part_s"].sum())
    return RunResult(measured, dict(found.tables) | {"problems": problems, "nodes": nodes})


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("ladder")


@pytest.fixture(scope="module")
def study(root):
    return run_ladder(CONFIG, PLAN, root / "runs", execute=fake_run)


@pytest.fixture(scope="module")
def rows(study):
    return ladder_rows(study)


def spec(rung, share=0.3):
    return LadderSpec(ladder_config(CONFIG, PLAN), share, 0, LADDER, 0, rung)


def test_each_rung_adds_one_switch_to_the_one_before():
    """The ladder measures one modification at a time, in the thesis's order."""
    for before, after in pairwise(RUNGS):
        a, b = before.switches, after.switches
        changed = [name for name in type(a).__slots__ if getattr(a, name) != getattr(b, name)]
        assert len(changed) == 1
    assert BESIDE.switches == replace(RUNGS[-1].switches, llm_batching="static")
    assert len(BY_KEY) == 6


def test_a_rung_differs_from_the_sweep_s_run_in_its_switches_only():
    """Engines and searches of the top are the study's own; those of the foot lack the switches."""
    top, foot, beside = spec(RUNGS[-1]), spec(RUNGS[0]), spec(BESIDE)
    usual = ladder_config(CONFIG, PLAN)
    assert top.search == usual.search()
    assert top.engine("prm").enable_prefix_caching
    assert not foot.engine("prm").enable_prefix_caching
    assert foot.engine("llm") == top.engine("llm") == spec(RUNGS[2]).engine("llm")
    off = (foot.search.score_cache, foot.search.problem_batching, foot.search.finish_at_limit)
    assert off == (False, "static", True)
    assert (beside.engine("llm").batching, beside.engine("prm")) == ("static", top.engine("prm"))
    assert beside.search == top.search


@pytest.mark.parametrize(("share", "seqs"), [(0.08, 1), (0.3, 8), (0.5, 16)])
def test_padded_batches_are_as_large_as_surely_fit(share, seqs):
    """Every member may become max_model_len long: 128 blocks of the tiny solver's."""
    assert spec(BESIDE, share).engine("llm").max_num_seqs == seqs
    assert spec(RUNGS[0], share).static_seqs is None


def test_every_run_has_its_own_name_and_fingerprint_and_dear_rungs_fewer_seeds():
    """A run that shares a fingerprint with another would be read in its place."""
    runs = ladder_runs(CONFIG, PLAN)
    identity = identify(runs[0].config)
    assert len({run.name for run in runs}) == len({run.fingerprint(identity) for run in runs})
    assert len({run.fingerprint(identity) for run in runs}) == len(runs) == 6 + 2 + 1 + 4
    queue = queue_runs(CONFIG, PLAN)
    assert [run.rung.key for run in queue] == ["score_cache", "continuous_problems"]
    assert {run.config.num_problems for run in queue} == {5}
    assert not queue_runs(CONFIG, replace(PLAN, queue_problems=0))
    dear = {run.seed for run in runs if not run.rung.switches.score_cache}
    assert dear == {0}
    assert {run.config.max_depth for run in runs if run.role == DEPTH} == {1}
    deep = ladder_runs(CONFIG, replace(PLAN, depth_limits=(1, 2, 40)))
    assert len(deep) == len(runs), "limits that the search's own does not reach are left out"


def test_runs_take_turns_by_whole_seeds_and_each_outcome_is_its_own():
    """What is not timed, and what a sweep warms up with, is carried out alone."""
    runs = [*ladder_runs(CONFIG, PLAN), *queue_runs(CONFIG, PLAN)]
    rounds = rounds_of(runs)
    assert [len(each) for each in rounds] == [6 + 1 + 4, 2]
    assert {spec.role for spec in rounds[0]} == {LADDER}
    many = replace(CONFIG, seeds=(0, 1, 2, 3))
    assert [len(each) for each in rounds_of(ladder_runs(many, PLAN))] == [6 + 1 + 4 + 4, 4]
    asked = []

    def turns(specs, costs):
        asked.append((specs, costs))
        return [Timed(1.0, RunResult({"name": spec.name}, {})) for spec in specs]

    carried_out = LadderInTurns(runs, turns, fake_result)
    found = {spec: carried_out(spec) for spec in runs}
    assert [specs for specs, _ in asked] == rounds
    for specs, costs in asked:
        dear = {spec.rung.key: cost for spec, cost in zip(specs, costs, strict=True) if cost > 1}
        assert dear == (COST if specs[0].role == LADDER else {})
        assert [found[spec].measured["name"] for spec in specs] == [spec.name for spec in specs]
    failing = LadderInTurns(
        runs, lambda specs, costs: [ConfigError("no")] * len(specs), fake_result
    )
    with pytest.raises(ConfigError, match="no"):
        failing(rounds[1][0])


def test_only_seeds_of_which_something_is_missing_take_turns(root):
    """A seed more is measured by itself; a run that is lost, beside the others of its seed."""
    runs = [ladder_runs(CONFIG, PLAN)]
    folder = root / "seeds"
    run_ladder(replace(CONFIG, seeds=(0,)), PLAN, folder, execute=fake_run)
    assert {spec.seed for spec in _seeds_left(runs, RunStore(folder))} == {1}
    shutil.rmtree(next(folder.glob("ladder-two_runtimes-seed0*")))
    assert _seeds_left(runs, RunStore(folder)) == runs[0]


def test_a_plan_takes_lists_and_refuses_nonsense():
    """A mistyped parameter is named with what is allowed."""
    assert ladder_plan("quick", depth_limits=[3, 5], in_flight=None).depth_limits == (3, 5)
    assert all(ladder_plan(name).in_flight < ladder_plan(name).num_problems for name in PROFILES)
    with pytest.raises(ConfigError, match="in_flight=0"):
        ladder_plan("quick", in_flight=0)
    with pytest.raises(ConfigError, match=r"depth_limits is \(0,\)"):
        LadderPlan(depth_limits=(0,))


def test_gains_are_ratios_of_paired_problems_and_equal_work_is_one(study, rows):
    """The fake's speeds are known, so every gain is."""
    gains = rows[rows["metric"] == "gain"].set_index("rung")
    expected = {"one_runtime": 2.0, "score_cache": 2.0, "continuous_problems": 2.0}
    for key, factor in expected.items():
        assert gains.loc[key, "value"] == pytest.approx(factor)
        assert gains.loc[key, "low"] < factor < gains.loc[key, "high"]
    same = gains.loc["stop_at_limit"]
    assert (same["value"], same["low"], same["high"]) == pytest.approx((1.0, 1.0, 1.0))
    assert gains.loc[BESIDE.key, "value"] == pytest.approx(1 / 3)
    whole = rows[rows["metric"] == "whole"].iloc[0]
    assert whole["value"] == pytest.approx(8.0)
    assert steps_up(study.rungs)[-1] == (LAST_TWO[1], BESIDE.key)


def test_a_rung_s_rate_is_problems_over_its_wall_time(study, rows):
    """Both seeds count where a rung has both."""
    rate = rows[(rows["metric"] == "problems_per_min") & (rows["rung"] == "score_cache")].iloc[0]
    runs = study.runs[study.runs["ladder"] == "score_cache"]
    assert len(runs) == 2
    assert rate["value"] == pytest.approx(60 * 8 / runs["wall_s"].sum())


def test_without_noise_or_with_one_problem_no_gain_is_certain(study):
    """An interval needs problems to draw and runs of equal work."""
    lone = replace(study, problems=study.problems[study.problems["problem_id"] == "p0"])
    assert len(study.queued) == 2
    gain = speed_up(lone, "score_cache", LAST_TWO[0])
    assert gain.estimate == pytest.approx(2.0)
    assert (gain.low, gain.high) == (-np.inf, np.inf)


def test_sampling_to_the_end_is_paired_at_every_limit(study):
    """At depth 1 the fake is right only where it samples on; at its own limit always."""
    pairs = depth_pairs(study)
    assert sorted(pairs["max_depth"].unique()) == [1, 2]
    assert len(pairs) == (1 + 2) * 4
    low = pairs[pairs["max_depth"] == 1]
    assert low["reached_finishes"].all()
    assert (low["correct_finishes"] - low["correct_stops"] == 1).all()
    assert "changes accuracy by **+1.00**" in ladder_sentences.finishing_sentence(pairs)


def test_nodes_of_all_rungs_are_compared_token_by_token(study):
    """One changed token on one rung is found twice: against the rung before and the one after."""
    differ, total = differing_nodes(study)
    assert (differ, total) == (0, 12 + 12 + 24 + 24)
    nodes = study.nodes.copy()
    place = nodes.index[(nodes["rung"] == "score_cache") & (nodes["role"] == LADDER)][0]
    nodes.at[place, "token_ids"] = [1, 2]
    assert differing_nodes(replace(study, nodes=nodes))[0] == 2
    nodes = study.nodes.copy()
    nodes.loc[place, "score"] += 0.5
    assert differing_nodes(replace(study, nodes=nodes))[0] == 2, "a score is compared too"
    dropped = study.nodes.drop(index=study.nodes.index[study.nodes["rung"] == BESIDE.key][0])
    assert differing_nodes(replace(study, nodes=dropped))[0] == 1


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [((1.9, 1.6, 2.1), "holds"), ((1.2, 1.1, 1.4), "fails"), ((1.5, 1.3, 1.8), "depends on")],
)
def test_c7_is_a_rule_over_the_interval_of_the_gain(gain, verdict):
    claim = batching_claim(Interval(*gain, 8))
    assert (claim.key, claim.verdict) == ("C7", verdict)
    assert f"{gain[0]:.2f} times" in claim.number


def answers(stops, finishes, reached=True):
    """Rows of depth_pairs of as many problems, all at a limit of 40."""
    frame = {"correct_stops": stops, "correct_finishes": finishes}
    frame |= {"problem_id": [f"p{k}" for k in range(len(stops))], "max_depth": 40}
    return pd.DataFrame(frame).assign(reached_finishes=reached)


def test_c8_is_a_rule_over_the_accuracy_gained():
    """No change among few problems proves little, none among many proves the claim."""
    few, many = answers([1.0] * 4, [1.0] * 4), answers([1.0] * 100, [1.0] * 100)
    assert finishing_claim(few, 40).verdict == "depends on"
    assert finishing_claim(many, 40).verdict == "holds"
    assert finishing_claim(answers([0.0] * 50, [1.0] * 50), 40).verdict == "fails"
    untested = finishing_claim(answers([1.0] * 100, [1.0] * 100, reached=False), 40)
    assert untested.verdict == "depends on"
    assert "0 of 100 searches reached" in untested.number


def test_claims_and_sentences_come_with_their_numbers(study, rows):
    pairs = depth_pairs(study)
    claims = ladder_claims(study)
    assert [claim.key for claim in claims] == ["C7", "C8"]
    assert {claim.figure for claim in claims} == {"modifications"}
    assert "**8.00** times" in ladder_sentences.gains_sentence(rows)
    assert "**0.33** times" in ladder_sentences.static_sentence(rows)
    assert "batches of 8" in ladder_sentences.setting_sentence(study)
    assert "generated tokens/s" in ladder_sentences.tokens_sentence(rows, pairs)
    steps = ladder_sentences.steps_sentence(study)
    assert "**0.80** times the steps (50 to 40)" in steps
    assert "10.0 decoding sequences instead of 8.0" in steps
    assert "0 of 72" in ladder_sentences.sameness_sentence(differing_nodes(study))
    assert "no sampling to the end least (1.00)" in ladder_sentences.order_sentence(rows)


def test_the_face_names_the_seeds_the_split_and_the_noise(study):
    text = ladder_face(study)
    assert "4 problems, 2 seeds (without a score cache 1), n = 4" in text
    assert "LLM share 0.3, at most 2 of the problems in flight" in text
    assert "runs of equal work differ" in text
    assert "(measured tiny)" in text


def test_stored_runs_are_found_again_and_none_is_an_error(study, root, tmp_path):
    def refuse(spec):
        raise AssertionError(spec.name)

    again = run_ladder(CONFIG, PLAN, root / "runs", execute=refuse)
    assert len(again.runs) == len(study.runs) == 2 + 4 * 2
    assert ladder_left(CONFIG, PLAN, root / "runs").startswith("0 of 15 runs")
    nothing = run_ladder(CONFIG, PLAN, tmp_path, compute=False)
    with pytest.raises(RunStoreError, match="No run of the ladder finished"):
        _ = nothing.runs


def test_the_figure_is_drawn_again_from_its_file_and_lies_with_its_profile(study, rows, tmp_path):
    """figures/ holds the default profile as it stands, never a changed ladder."""
    rows.to_parquet(tmp_path / "rows.parquet", index=False)
    first = modifications(rows, ladder_face(study))
    again = FIGURES["modifications"](pd.read_parquet(tmp_path / "rows.parquet"), ladder_face(study))
    assert first.to_json() == again.to_json()
    assert figures_home(study) == profile_figures("quick-changed")
    own = sweep_config("default")
    usual = replace(study, plan=ladder_plan(), config=ladder_config(own, ladder_plan()))
    assert figures_home(usual) == figures_home(Sweep(own, ()))


def test_a_ladder_beside_a_sweep_disturbs_neither_comparison_nor_the_minutes(study, root):
    """A store with a ladder compares with itself; its slow rungs do not enter the forecast."""
    same = compare(root / "runs", root / "runs")
    assert same.identical
    assert seconds_per_problem(CONFIG, RunStore(root / "runs")) is None


def test_the_report_takes_both_claims_from_the_stored_ladder(study, root):
    """The first page judges the very runs that the notebook drew, by its parameters."""
    parameters = {"num_problems": 4, "in_flight": 2, "depth_limits": [1], "queue_problems": 5}
    parameters["runs_dir"] = str(root / "runs")
    found = stored_ladder_claims(CONFIG, parameters)
    assert found == ladder_claims(study)
