"""The ablation of the modifications: gains, depth limits, sameness and claims follow from runs."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tests.experiments.fakes import fake_result
from workbench.experiments import plans
from workbench.experiments import rows as views
from workbench.experiments.claims import batching_claim, finishing_claim
from workbench.experiments.execute import one_by_one
from workbench.experiments.plans import BATCHED, LAST_TWO, sweep_config
from workbench.experiments.runs import RunResult, compare
from workbench.experiments.settings import ABLATION
from workbench.experiments.statistics import WORK
from workbench.experiments.study import figures_home, preview, profile_figures, run_study

CONFIG = sweep_config("quick", n=4, max_depth=2, seeds=(0, 1))
PLAN = plans.AblationPlan(4, (1,), num_seeds=2, queue_problems=5)
RUNS, HOW = plans.ablation_runs(CONFIG, PLAN), {"plan": PLAN, "progress": False}
SLOWER = dict(zip(plans.MODIFICATIONS, (8.0, 4.0, 2.0, 1.0, 1.0, 3.0)))
"""How many times the seconds of the last each fake takes; the last two do one work."""


def fake_run(spec):
    """A setting of known speed; at depth 1 only searches that sample to the end are correct."""
    found = fake_result(spec)
    key, slower = spec.setting, SLOWER[spec.setting] * (1.02 if spec.repeat else 1.0)
    problems = found.tables["problems"].copy()
    problems["wall_part_s"] *= slower
    right = spec.config.finish_at_limit or spec.role == ABLATION
    problems["correct"] = pd.array([right] * len(problems), "boolean")
    nodes = found.tables["nodes"]
    nodes = nodes[nodes["depth"] <= spec.config.max_depth]
    work = 5 if key in LAST_TWO else 10 + list(SLOWER).index(key)
    measured = dict(found.measured) | dict.fromkeys(WORK, work)
    measured["wall_s"] = float(problems["wall_part_s"].sum())
    return RunResult(measured, dict(found.tables) | {"problems": problems, "nodes": nodes})


@pytest.fixture(scope="module")
def study(root):
    return run_study(CONFIG, RUNS, root, execute=one_by_one(fake_run), **HOW)


@pytest.fixture(scope="module")
def rows(study):
    return views.ablation_rows(study)


def test_gains_are_ratios_of_paired_problems_and_equal_work_is_one(study, rows):
    """The fake's speeds are known, so every gain is."""
    gains = rows[rows["metric"] == "gain"].set_index("setting")
    for key in ("one_runtime", "score_cache", "continuous_problems"):
        assert gains.loc[key, "value"] == pytest.approx(2.0)
        assert gains.loc[key, "low"] < 2.0 < gains.loc[key, "high"]
    same = gains.loc["stop_at_limit"]
    assert (same["value"], same["low"], same["high"]) == pytest.approx((1.0, 1.0, 1.0))
    assert gains.loc[plans.BESIDE, "value"] == pytest.approx(1.005 / 3, rel=1e-4)
    whole = rows[rows["metric"] == "whole"].iloc[0]
    assert whole["value"] == pytest.approx(8.0 / 1.01), "the last is the mean of two runs"
    assert views.steps_up(study)[-1] == (LAST_TWO[1], plans.BESIDE)


def test_rates_are_of_both_seeds_and_problem_batching_of_the_longer_queue(study, rows):
    rate = rows[(rows["metric"] == "problems_per_min") & (rows["setting"] == "score_cache")].iloc[0]
    runs = study.runs[study.runs["setting"] == "score_cache"]
    assert len(runs) == 2
    assert rate["value"] == pytest.approx(60 * 8 / runs["wall_s"].sum())
    gain, queued = views.gain_of(study, "score_cache", LAST_TWO[0])
    assert queued
    assert gain.low < 2.0 < gain.high < np.inf
    assert gain != views.speed_up(study, "score_cache", LAST_TWO[0], "sixty"), "of the queue"
    queued = rows.loc[rows["queued"], ["setting", "metric"]].to_numpy().tolist()
    assert queued == [[LAST_TWO[0], "gain"]]


def test_a_setting_without_a_run_has_no_gain_and_its_neighbours_are_not_compared(study, tmp_path):
    """Else the gains of two modifications would be told as one's."""
    kept = [spec for spec in RUNS if spec.setting != "score_cache"]
    found = run_study(CONFIG, kept, tmp_path, execute=one_by_one(fake_run), **HOW)
    gap = replace(found, order=study.order)
    assert not {"score_cache", "continuous_problems"} & {after for _, after in views.steps_up(gap)}
    rows = views.ablation_rows(gap)
    assert not rows["queued"].any()
    assert rows.query("metric == 'whole'")["value"].tolist() == pytest.approx([8.0 / 1.01])


def test_sampling_to_the_end_is_paired_at_every_limit(study):
    """At depth 1 the fake is right only where it samples on; at its own limit always."""
    pairs = views.depth_pairs(study)
    assert sorted(pairs["max_depth"].unique()) == [1, 2]
    assert len(pairs) == (1 + 2) * 4
    low = pairs[pairs["max_depth"] == 1]
    assert low["reached_finishes"].all()
    assert (low["correct_finishes"] - low["correct_stops"] == 1).all()


def test_nodes_are_compared_token_by_token(study, tmp_path):
    """A changed token and score are found twice each: against the settings before and after."""

    def changed(spec):
        found = fake_run(spec)
        if (spec.setting, spec.role, spec.seed) != ("score_cache", ABLATION, 0):
            return found
        nodes = found.tables["nodes"].copy()
        nodes.at[nodes.index[0], "token_ids"] = [1, 2]
        nodes.loc[nodes.index[1], "score"] = 7.0
        return RunResult(found.measured, dict(found.tables) | {"nodes": nodes})

    other = run_study(CONFIG, RUNS, tmp_path, execute=one_by_one(changed), **HOW)
    for one, expected in ((study, 0), (other, 4)):
        pairs = [pair for pair in views.steps_up(one) if pair[1] != LAST_TWO[1]]
        found = views.differing_nodes(one, pairs)
        assert sum(differ for differ, _ in found.values()) == expected
        assert sum(total for _, total in found.values()) == 12 + 12 + 24 + 24


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [
        ((1.9, 1.6, 2.1), "holds"),
        ((1.2, 1.1, 1.4), "fails"),
        ((0.9, 0.8, 0.99), "fails"),
        ((1.5, 1.3, 1.8), "depends on"),
        ((1.0, 1.0, 1.0), "not testable here"),  # the same work
    ],
)
def test_c7_is_a_rule_over_the_interval_of_the_gain(gain, verdict):
    row = dict(zip(("value", "low", "high"), gain)) | {"metric": "gain", "setting": BATCHED[1]}
    claim = batching_claim(pd.DataFrame([row]))
    assert (claim.key, claim.verdict) == ("C7", verdict)
    assert ("ended together" if gain[1] == 1 else f"{gain[0]:.2f} times") in claim.number
    assert ("slower, since" in claim.number) is (gain[2] < 1)


def test_c8_is_a_rule_over_the_accuracy_gained_at_the_greatest_limit():
    """No change proves nothing; where a beam came to the limit is not told."""
    rows = pd.DataFrame({"metric": "finishing", "max_depth": [40, 4], "num_problems": 5})
    same = finishing_claim(rows.assign(value=[0.0, 0.7], low=[-0.45, 0.5], high=[0.45, 0.9]))
    assert same.verdict == "depends on"
    assert "+0.70 at a limit of 4 steps; +0.00 at a limit of 40 steps [-0.45, 0.45]" in same.number
    assert same.number.endswith("limit, and on more problems than were searched")
    unfinished = finishing_claim(rows.assign(metric="gain", value=1.0))
    assert unfinished.verdict == "not testable here"
    more = finishing_claim(rows.assign(value=0.1, low=[0.06, -0.1], high=0.2))
    assert more.verdict == "fails"
    little = finishing_claim(rows.assign(value=0.0, low=-0.02, high=0.02))
    assert little.verdict == "holds"
    perhaps = finishing_claim(rows.assign(value=0.1, low=[0.04, 0.06], high=0.2))
    assert perhaps.verdict == "depends on"


def test_slow_settings_disturb_neither_comparison_nor_forecast_and_its_home_is_its_own(study, root):
    assert compare(root, root).identical
    assert not preview(CONFIG, root).measured_before
    assert figures_home(study) == profile_figures("quick-changed")
