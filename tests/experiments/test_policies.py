"""The study of policies: what it measures first, what it compares, and what its rows say."""

from dataclasses import replace

import pytest

from tests.experiments.policy_fakes import CONFIG, PEAK, PLAN, execute
from workbench.errors import RunStoreError
from workbench.experiments import rows as views
from workbench.experiments.execute import one_by_one
from workbench.experiments.plans import ELASTIC, NONE, STATIC, TECHNIQUES, setting_of
from workbench.experiments.study import policies_planned, preview, run_policies, working_set_of

FEW = replace(PLAN, budgets=(0.5,), kv_shares=(0.2,))


@pytest.fixture(scope="module")
def study(root):
    return run_policies(CONFIG, PLAN, root, execute=execute, progress=False)


@pytest.fixture(scope="module")
def rows(study):
    return views.optimisation_rows(study)


def test_uncapped_runs_come_first_and_tell_the_working_set(study):
    """Guards W: each model's own peak with memory uncapped."""
    need = working_set_of(study.all_runs)
    assert (need.llm, need.prm, need.longest) == (PEAK["llm"], PEAK["prm"], 600)
    assert need.total == sum(PEAK.values())


def test_the_best_static_share_and_what_a_policy_gains_over_it(study):
    """Guards the comparison that the chapter rests on."""
    best, ours = views.best_static(study, 0.5), setting_of(0.5, ELASTIC, None, NONE)
    assert best == setting_of(0.5, STATIC, 0.2, NONE)
    assert views.speed_up(study, best, ours).estimate == pytest.approx(2.3 / 2.32)
    thesis = setting_of(0.5, STATIC, 0.3, NONE)
    assert views.speed_up(study, thesis, ours).estimate == pytest.approx(2.7 / 2.32)
    plenty = (setting_of(2.0, *each, NONE) for each in ((STATIC, 0.3), (ELASTIC, None)))
    gain = views.speed_up(study, *plenty)
    assert (gain.estimate, gain.low, gain.high) == (1, 1, 1), "equal work is one"


def test_rows_of_the_figure(study, rows):
    """Guards that every setting has its speed, accuracy, sameness and recomputed tokens."""
    settings = set(study.runs["setting"])
    for metric in ("tokens_per_s", "accuracy", "same", "recomputed"):
        assert set(rows.loc[rows["metric"] == metric, "setting"]) == settings
    assert (rows.loc[rows["metric"] == "same", "value"] == 1).all()
    held = rows[rows["metric"] == "held"]
    assert set(held["model"]) == {"llm", "prm"}
    assert set(held["policy"]) == {ELASTIC}
    again = rows[(rows["metric"] == "recomputed") & (rows["kv_share"] == 0.3)]
    assert again["value"].max() == 700
    assert set(rows["technique"].dropna()) == set(TECHNIQUES)
    bad = study.all_runs[study.all_runs["status"] == "infeasible"]
    assert set(bad["setting"]) == {setting_of(0.5, STATIC, 0.08, NONE)}
    assert bad["error"].str.contains("lacks|below").all()
    assert set(rows.loc[rows["metric"] == "infeasible", "setting"]) == set(bad["setting"])


def test_bars_are_of_the_ratio_to_the_best_static_split(study, rows):
    """Guards bars that tell how problems differ, where settings are compared."""
    speeds = rows[rows["metric"] == "tokens_per_s"].set_index("setting")
    for budget in PLAN.budgets:
        best, ours = views.best_static(study, budget), setting_of(budget, ELASTIC, None, NONE)
        own, other = speeds.loc[best], speeds.loc[ours]
        assert own["low"] == pytest.approx(own["value"]) and own["high"] == pytest.approx(
            own["low"]
        )
        ratio = views.speed_up(study, best, ours)
        assert other["low"] == pytest.approx(own["value"] * ratio.low)
        assert other["high"] == pytest.approx(own["value"] * ratio.high)


def test_the_bound_leaves_out_what_was_computed_twice(study):
    """Guards the measured bound: uncapped time, each distinct token once."""
    runs = study.having(setting=views.UNCAPPED_SETTING)
    part = 1900 / 2000  # of 2,000 tokens 100 were computed before, in both models
    seconds = (runs["wall_s"] * (0.2 + 0.8 * part)).sum()
    assert views.bound_tokens_per_s(runs) == pytest.approx(runs["sampled_tokens"].sum() / seconds)
    everything = study.having(role="reference", technique="all")
    assert set(everything["beside"]) == set(PLAN.budgets)
    fastest = max(views.speed_of(study, setting) for setting in study.runs["setting"].unique())
    assert views.bound_tokens_per_s(everything) > fastest


def test_repeats_of_the_default_policy_tell_the_noise(tmp_path):
    """Guards the intervals of a study of one seed, and that no repeat is drawn as a setting."""
    again = run_policies(CONFIG, replace(FEW, repeats=2), tmp_path, execute=execute, progress=False)
    repeated = again.all_runs[again.all_runs["repeat"] > 0]
    assert set(repeated["setting"]) == {"0.5W/marginal_value/none"}
    assert len(repeated) == 2 * len(CONFIG.seeds)
    assert again.noise.spread == pytest.approx(1.01)
    assert not again.runs["repeat"].any()


def test_what_is_left_of_the_study_is_counted(study, root, tmp_path):
    for place, left in ((root, "0 of"), (tmp_path, f"{len(study.all_runs)} of")):
        specs = policies_planned(CONFIG, PLAN, place)
        assert str(preview(CONFIG, place, specs=specs)).startswith(left)


def test_one_uncapped_search_that_failed_stops_the_study(tmp_path):
    """Guards runs sized by another working set than that of the first seed."""

    @one_by_one
    def fail(spec):
        if spec.seed == CONFIG.seeds[0]:
            raise ValueError("no model")
        (outcome,) = (found for _, found in execute([spec]))
        return outcome

    with pytest.raises(RunStoreError, match="1 of 2 searches with memory uncapped"):
        run_policies(CONFIG, PLAN, tmp_path, execute=fail, progress=False)


def test_searches_that_fail_even_without_a_limit_are_told(tmp_path):
    """Guards the message where no working set could be measured."""

    @one_by_one
    def fail(spec):
        raise ValueError("no model")

    with pytest.raises(RunStoreError, match=r"uncapped, .* did not finish: ValueError: no model"):
        run_policies(CONFIG, PLAN, tmp_path, execute=fail, progress=False)
