"""The study of policies: which runs it has, what it compares, and what it tells, without models."""

from dataclasses import replace

import pytest

from tests.experiments.policy_fakes import CONFIG, PEAK, PLAN, execute, misses
from workbench.errors import ConfigError, RunStoreError
from workbench.experiments.policy_ceiling import bound_seconds, ceiling_tokens_per_s
from workbench.experiments.policy_plan import (
    ELASTIC,
    PLANS,
    POLICIES,
    STATIC,
    PolicyPlan,
    WorkingSet,
    policy_config,
    policy_plan,
    reference_runs,
    settings_at,
    tight_runs,
)
from workbench.experiments.policy_rows import (
    best_static,
    differing,
    elastic_gain,
    optimisation_rows,
    technique_gains,
)
from workbench.experiments.policy_study import (
    policies_face,
    policies_left,
    run_policies,
    setting_of,
    speed,
    speed_up,
)
from workbench.experiments.policy_techniques import ALL, ALONE, NONE, TECHNIQUES

NEED = WorkingSet(PEAK["llm"], PEAK["prm"], 600)
OWN = policy_config(CONFIG, PLAN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def study(folder):
    return run_policies(CONFIG, PLAN, folder, execute=execute, progress=False)


def test_every_policy_and_share_is_measured_at_every_budget_and_techniques_where_asked():
    """Guards the grid: nothing twice, nothing missing, all settings of a seed paired."""
    specs = tight_runs(replace(OWN, seeds=(0, 1)), PLAN, NEED)
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names)
    for budget in PLAN.budgets:
        settings = list(settings_at(budget, PLAN))
        assert {policy for policy, *_ in settings} == set(POLICIES)
        alone = {technique for policy, _, technique in settings if policy == STATIC}
        assert alone == (set(TECHNIQUES) if budget in PLAN.alone_at else {NONE})
    seeds = [[s.name.rsplit("-", 1)[0] for s in specs if s.seed == seed] for seed in (0, 1)]
    assert sorted(seeds[0]) == sorted(seeds[1])
    assert seeds[0] != sorted(seeds[0]), "shuffled"


def test_a_run_names_both_shares_and_its_engines_have_no_memory_of_their_own():
    """Guards the reading of the split: of KV as given, of the whole memory as it comes out."""
    spec = next(s for s in tight_runs(OWN, PLAN, NEED) if s.kv_share == 0.2 and s.budget == 2.0)
    assert spec.kv_bytes == 2 * NEED.total
    assert spec.llm_share == pytest.approx(spec.llm_bytes / spec.total_bytes, abs=1e-5)
    assert spec.llm_share < spec.kv_share, "the PRM's weights are most of the memory"
    assert spec.engine("llm").memory is None
    assert spec.engine("llm").max_model_len == 608, "the longest sequence and a token, in blocks"
    assert spec.parameters["kv_share"] == 0.2


def test_techniques_are_switches_of_search_and_engine():
    """Guards that each technique turns on what its name says, and `all` those that gain."""
    specs = {s.technique: s for s in tight_runs(OWN, PLAN, NEED) if s.kv_share == 0.2}
    assert specs["prefix_order"].search.request_order == "prefix"
    assert specs["partial_blocks"].engine("prm").reuse_partial_blocks
    everything = specs[ALL]
    for name in ALONE:
        assert TECHNIQUES[name].search.items() <= TECHNIQUES[ALL].search.items()
        assert TECHNIQUES[name].engine.items() <= TECHNIQUES[ALL].engine.items()
    assert everything.search.problem_batching == "adaptive"
    assert not specs[NONE].engine("llm").reuse_partial_blocks


def test_uncapped_runs_come_first_and_tell_the_working_set(study):
    """Guards W: each model's own peak with memory uncapped."""
    assert {spec.budget for spec in reference_runs(OWN)} == {None}
    assert study.working_set == NEED
    assert study.working_set.total == sum(PEAK.values())
    assert study.working_set.at_once == PEAK["prm"], "the models take turns"


def test_an_infeasible_share_is_a_row_and_no_setting_is_lost(study):
    """Guards that what does not fit is told, with its reason."""
    bad = study.all_runs[study.all_runs["status"] == "infeasible"]
    assert set(bad["setting"]) == {setting_of(0.5, STATIC, 0.08, t) for t in TECHNIQUES}
    assert bad["error"].str.contains("lacks|below").all()
    rows = optimisation_rows(study)
    assert set(rows.loc[rows["metric"] == "infeasible", "setting"]) == set(bad["setting"])


def test_the_best_static_share_and_what_a_policy_gains_over_it(study):
    """Guards the comparison that the chapter rests on."""
    assert best_static(study, 0.5) == setting_of(0.5, STATIC, 0.2, NONE)
    gain = elastic_gain(study, 0.5)
    assert gain["best static"].estimate == pytest.approx(2.3 / 2.32)
    assert gain["thesis"].estimate == pytest.approx(2.7 / 2.32)
    plenty = elastic_gain(study, 2.0)["thesis"]
    assert (plenty.estimate, plenty.low, plenty.high) == (1, 1, 1), "equal work is one"
    assert technique_gains(study, 0.5, 0.2)[ALL].estimate > 1


def test_bars_are_of_the_ratio_to_the_elastic_policy(study):
    """Guards bars that tell how problems differ, where settings are compared."""
    rows = optimisation_rows(study)
    speeds = rows[rows["metric"] == "tokens_per_s"].set_index("setting")
    for budget in PLAN.budgets:
        ours, peer = (setting_of(budget, *each, NONE) for each in ((ELASTIC, None), (STATIC, 0.3)))
        own, other = speeds.loc[ours], speeds.loc[peer]
        assert own["low"] == own["value"] == own["high"]
        ratio = speed_up(study, ours, peer)
        assert other["low"] == pytest.approx(own["value"] * ratio.low)
        assert other["high"] == pytest.approx(own["value"] * ratio.high)


def test_a_finished_study_is_found_again(study, folder):
    """Guards that nothing finished is repeated, and that what is left is counted."""

    def refuse(spec):
        raise AssertionError(f"{spec.name} was stored")

    again = run_policies(CONFIG, PLAN, folder, execute=refuse, progress=False)
    assert len(again.all_runs) == len(study.all_runs)
    assert policies_left(CONFIG, PLAN, folder).startswith("0 of")
    assert "0 of" not in policies_left(CONFIG, PLAN, folder / "elsewhere")[:4]


def test_the_bound_leaves_out_what_was_computed_twice(study):
    """Guards the measured bound: uncapped time, each distinct token once."""
    runs = study.runs_of(setting_of(None, "first_come", None, NONE))
    row = runs.iloc[0]
    part = 1900 / 2000  # of 2,000 tokens 100 were computed before, in both models
    assert bound_seconds(row) == pytest.approx(row["wall_s"] * (0.2 + 0.8 * part))
    fastest = max(speed(study, setting).estimate for setting in study.runs["setting"].unique())
    assert ceiling_tokens_per_s(study) > fastest


def test_repeats_of_the_default_policy_tell_the_noise(tmp_path):
    """Guards the intervals of a study of one seed, and that no repeat is drawn as a setting."""
    again = run_policies(CONFIG, replace(PLAN, repeats=2), tmp_path, execute=execute)
    repeated = again.all_runs[again.all_runs["repeat"] > 0]
    assert set(repeated["setting"]) == {f"{b:g}W/marginal_value/none" for b in PLAN.budgets}
    assert len(repeated) == 2 * len(PLAN.budgets) * len(again.config.seeds)
    assert again.noise.is_known
    assert not again.runs["repeat"].any()
    assert policies_left(CONFIG, replace(PLAN, repeats=2), tmp_path).startswith("0 of")


def test_rows_of_the_figure(study):
    """Guards that every setting has its speed, accuracy, sameness and recomputed tokens."""
    rows = optimisation_rows(study)
    settings = set(study.runs["setting"])
    for metric in ("tokens_per_s", "accuracy", "same", "recomputed"):
        assert set(rows.loc[rows["metric"] == metric, "setting"]) == settings
    assert (rows.loc[rows["metric"] == "same", "value"] == 1).all()
    assert differing(study, setting_of(0.5, ELASTIC, None, NONE))[0] == 0
    held = rows[rows["metric"] == "held"]
    assert set(held["model"]) == {"llm", "prm"}
    assert set(held["policy"]) == {STATIC, ELASTIC}
    again = rows[(rows["metric"] == "recomputed") & (rows["kv_share"] == 0.3)]
    assert again["value"].max() == misses_of(0.3)


def misses_of(kv_share):
    specs = [spec for spec in tight_runs(OWN, PLAN, NEED) if spec.kv_share == kv_share]
    return max(2 * (misses(spec) // 2) for spec in specs)


def test_the_face_says_what_w_is(study):
    """Guards that a reader knows the unit of the budgets and the sample."""
    face = policies_face(study)
    assert "W = 10.0 MiB (LLM 2.0 MiB, PRM 8.0 MiB)" in face
    assert "3 problems, 1 seed" in face
    assert "max_model_len 608" in face


@pytest.mark.parametrize(
    "wrong",
    [{"num_problems": 0}, {"budgets": (0.0,)}, {"alone_at": (3.0,)}, {"kv_shares": (1.0,)}],
)
def test_a_plan_that_cannot_be_is_refused(wrong):
    """Guards against a study that would run for hours and draw nothing."""
    with pytest.raises(ConfigError, match="PolicyPlan"):
        policy_plan("quick", **wrong)


def test_plans_have_the_thesis_baseline():
    """Guards that the share everything is compared with is measured in every profile."""
    assert all(0.3 in plan.kv_shares for plan in PLANS.values())
    assert isinstance(policy_plan("default", kv_shares=[0.3]), PolicyPlan)


def test_searches_that_fail_even_without_a_limit_are_told(tmp_path):
    """Guards the message where no working set could be measured."""

    def fail(spec):
        raise ValueError("no model")

    with pytest.raises(RunStoreError, match=r"memory uncapped finished: ValueError: no model"):
        run_policies(CONFIG, PLAN, tmp_path, execute=fail, progress=False)
