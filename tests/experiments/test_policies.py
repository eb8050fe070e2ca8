"""The study of policies: what it measures first, what it compares, and what its rows say."""

from dataclasses import replace

import pytest

from tests.experiments.fakes import fake_result
from workbench.errors import OutOfMemory, RunStoreError
from workbench.experiments import rows as views
from workbench.experiments.execute import COUNTS, one_by_one
from workbench.experiments.plans import (
    ALL,
    ELASTIC,
    NONE,
    STATIC,
    TECHNIQUES,
    PolicyPlan,
    setting_of,
    sweep_config,
)
from workbench.experiments.runs import RunResult
from workbench.experiments.settings import RunSpec
from workbench.experiments.study import policies_planned, preview, run_policies, working_set_of

BLOCK = {"llm": 8192, "prm": 32768}
PEAK = {"llm": 2**21, "prm": 2**23}  # bytes of active blocks
PLAN = PolicyPlan(3, 2, (0.5, 2.0), (0.08, 0.2, 0.3), 1, (0.2,), repeats=0)
CONFIG = sweep_config("quick", n=4, max_depth=3, seeds=(0, 1), warmup_problems=0)
FEW = replace(PLAN, budgets=(0.5,), kv_shares=(0.2,))


def misses(spec: RunSpec) -> int:
    """Tokens computed again: none with plenty of memory, least at a share of 0.2, else."""
    if spec.get("budget") is None or spec.get("budget") >= 2:
        return 0
    best = {"first_come": 900, "phase_aware": 700, "marginal_value": 320}
    missed = best.get(spec.get("policy")) or 300 + round(4000 * abs(spec.get("kv_share") - 0.2))
    return missed // 2 if spec.get("technique") == ALL else missed


@one_by_one
def execute(spec: RunSpec) -> RunResult:
    """A run of known speed. A share of 0.08 is infeasible at half of W."""
    if (spec.get("kv_share"), spec.get("budget")) == (0.08, 0.5):
        raise OutOfMemory("A split of [14, 169] pages leaves 'llm' below the 21 it needs.")
    result = fake_result(replace(spec, llm_share=0.3))
    again, techniques = misses(spec), spec.get("technique") != NONE
    wall = (2.0 - 0.2 * techniques + again / 1000) * (1.01 if spec.repeat else 1.0)
    problems = result.tables["problems"]
    parts = problems["tokens"] * wall / problems["tokens"].sum()
    cells = {"wall_s": wall, "longest": 600, "kv_pages": spec.get("kv_bytes") // 32768}
    for engine, block in BLOCK.items():
        own = dict.fromkeys(COUNTS, 0) | {"prefill_tokens": 1000 + again // 2, "steps": 40}
        own |= {"decode_tokens": 1000, "recomputed_tokens_evicted": again // 2}
        own |= {"recomputed_tokens_partial": 100, "busy_s": 0.4 * wall, "block_bytes": block}
        own |= {"active_bytes": PEAK[engine], "final_share": 0.5}
        cells |= {f"{engine}_{name}": value for name, value in own.items()}
    tables = {**result.tables, "problems": problems.assign(wall_part_s=parts)}
    return RunResult(dict(result.measured) | cells, tables)


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
        assert own[["low", "high"]].tolist() == pytest.approx([own["value"]] * 2)
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


@pytest.mark.parametrize("seeds", [CONFIG.seeds[:1], CONFIG.seeds], ids=["first", "all"])
def test_an_uncapped_search_that_failed_stops_the_study(seeds, tmp_path):
    """Guards runs sized by another working set than that of the first seed, or by none."""

    @one_by_one
    def fail(spec):
        if spec.seed in seeds:
            raise ValueError("no model")
        (outcome,) = (found for _, found in execute([spec]))
        return outcome

    failed = "searches with memory uncapped, .* did not finish: ValueError: no model"
    told = f"{len(seeds)} of 2 {failed}"
    with pytest.raises(RunStoreError, match=told):
        run_policies(CONFIG, PLAN, tmp_path, execute=fail, progress=False)
    specs = policies_planned(CONFIG, PLAN, tmp_path)
    assert preview(CONFIG, tmp_path, specs=specs, retry_failed=True).num_to_run
