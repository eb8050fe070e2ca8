"""Sweeps with a fake run: nothing is repeated, nothing lost, whatever fails becomes a row."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest

from tests.conftest import commit, committed_tree
from tests.experiments.fake_sweep import FakeSweep
from tests.experiments.fakes import fake_result
from workbench.errors import ConfigError, ModelError, OutOfMemory, RunStoreError
from workbench.experiments import study
from workbench.experiments.execute import one_by_one
from workbench.experiments.export import read_figure, tex
from workbench.experiments.plans import split_runs, sweep_config
from workbench.experiments.provenance import machine_facts, this_code
from workbench.experiments.rows import on_rungs, split_rows
from workbench.experiments.settings import RECORDED, REPLAYED
from workbench.experiments.statistics import sentinel_drift
from workbench.experiments.study import preview, provenance, provenance_of, remarks
from workbench.plots import FIGURES, memory_split
from workbench.trace import write_table

CONFIG = sweep_config("quick", num_problems=3, warmup_problems=0)


class Counting:
    """Carries out fake runs and remembers which."""

    def __init__(self, fail=()):
        self.done, self.fail = [], dict(fail)

    def __call__(self, spec):
        self.done.append(spec.name)
        if spec.llm_share in self.fail:
            raise self.fail[spec.llm_share]
        return fake_result(spec)


def sweep(tmp_path, execute, config=CONFIG, **options):
    return study.run_sweep(config, tmp_path, execute=one_by_one(execute), progress=False, **options)


def test_a_place_where_no_run_can_be_kept_is_refused_before_one_is_carried_out(tmp_path):
    (tmp_path / "file").write_text("")
    never = one_by_one(lambda spec: pytest.fail("it ran"))
    with pytest.raises(RunStoreError, match="No run can be kept"):
        study.run_sweep(sweep_config("quick"), tmp_path / "file", execute=never, progress=False)


def test_the_thesis_s_pair_is_found_by_its_name_not_by_its_place():
    smol, far = study.Committed(RECORDED), study.Committed(REPLAYED)
    assert study.far_of([smol]) == study.far_of([far, smol]) == far


def test_every_run_once_and_never_again(tmp_path):
    execute = Counting()
    first = sweep(tmp_path, execute)
    assert sorted(execute.done) == sorted(spec.name for spec in split_runs(CONFIG))
    assert list(first.runs["llm_share"]) == [0.08, 0.2, 0.3, 0.5]
    assert first.missing == ()
    again = Counting()
    assert sweep(tmp_path, again).folders == first.folders
    assert again.done == []
    assert "4 runs stored, 0 missing" in repr(first)


def test_a_failing_run_is_kept_as_a_row_and_retried_only_when_asked(tmp_path):
    broken = Counting({0.3: RuntimeError("the forward broke")})
    found = sweep(tmp_path, broken)
    assert len(broken.done) == 4
    row = found.all_runs.set_index("llm_share").loc[0.3]
    assert row["status"] == "failed"
    assert row["error"] == "RuntimeError: the forward broke"
    assert "Traceback" in row["traceback"]
    assert row["machine_cores"] > 0
    assert list(found.runs["llm_share"]) == [0.08, 0.2, 0.5]
    patient, retrying = Counting(), Counting()
    sweep(tmp_path, patient)
    assert patient.done == []
    assert len(sweep(tmp_path, retrying, retry_failed=True).runs) == 4
    assert retrying.done == ["split-0.300-seed0"]


def test_an_interrupted_repetition_loses_nothing_of_what_is_known(tmp_path):
    """Neither of the failed run that was begun again nor of those that were to follow."""
    known = sweep(tmp_path, Counting({0.2: RuntimeError("one"), 0.3: RuntimeError("two")}))
    stopped = Counting(dict.fromkeys(CONFIG.shares, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, stopped, retry_failed=True)
    assert len(stopped.done) == 1
    found = sweep(tmp_path, stopped, compute=False)
    assert found.missing == ()
    pd.testing.assert_frame_equal(found.all_runs, known.all_runs)


@pytest.mark.parametrize("failed", [False, True])
def test_what_another_process_stores_meanwhile_is_not_begun(tmp_path, failed):
    """Nor begun again, where it had failed before."""
    first = Counting(dict.fromkeys(CONFIG.shares, RuntimeError("it broke")))
    if failed:
        sweep(tmp_path, first)
    execute, another = Counting(), Counting()

    def beside(spec):
        if not another.done:
            sweep(tmp_path, another, retry_failed=True)
        return execute(spec)

    found = sweep(tmp_path, beside, retry_failed=True)
    assert (len(execute.done), len(another.done)) == (1, 4)
    assert list(found.all_runs["status"]) == ["finished"] * 4


def test_an_infeasible_share_is_a_row_with_the_bytes_that_lack(tmp_path):
    config = sweep_config("quick", num_problems=3, warmup_problems=0, shares=(0.02, 0.3, 0.4, 0.8))
    assert len(sweep(tmp_path, Counting(), config, compute=False).missing) == 4, "only looked at"
    execute = Counting({0.4: OutOfMemory("2 blocks lack")})  # as the engine finds it
    found = sweep(tmp_path, execute, config)
    rows = found.all_runs.set_index("llm_share").sort_index()
    assert sorted(execute.done) == ["split-0.300-seed0", "split-0.400-seed0"]
    assert list(rows["status"]) == ["infeasible", "finished", "infeasible", "infeasible"]
    assert rows.loc[0.4, "error"] == "2 blocks lack"
    assert (found.missing, len(found.runs)) == ((), 1)
    assert rows.loc[0.02, "llm_lacks_bytes"] > 0
    assert rows.loc[0.02, "prm_lacks_bytes"] == 0
    assert rows.loc[0.8, "prm_lacks_bytes"] > 0
    assert "the LLM (tiny-solver) lacks" in rows.loc[0.02, "error"]


def test_tables_carry_share_and_seed_and_can_be_narrowed(tmp_path):
    config = sweep_config("quick", num_problems=3, warmup_problems=0, seeds=(0, 1))
    found = sweep(tmp_path, Counting(), config)
    steps = found.table("steps")
    assert set(steps["llm_share"]) == {0.08, 0.2, 0.3, 0.5}
    assert set(steps["run_seed"]) == {0, 1}
    assert len(found.table("steps", llm_share=0.3, seed=1)) == len(steps) / 8
    assert found.table("nodes")["run_id"].nunique() == 8
    with pytest.raises(RunStoreError, match=r"no finished run at llm_share=0\.31"):
        found.table("steps", llm_share=0.31)


def test_bad_settings_stop_before_the_first_run(tmp_path):
    execute = Counting()
    with pytest.raises(ModelError, match="Did you mean 'tiny-solver'"):
        sweep(tmp_path, execute, sweep_config("quick", llm="tiny-solvr"))
    with pytest.raises(ConfigError, match="each share once"):
        sweep_config("quick", shares=(0.3, 0.3))
    assert execute.done == []
    assert not any(tmp_path.iterdir())


def test_a_sweep_stopped_while_writing_resumes_without_repeating_or_losing(tmp_path, monkeypatch):
    """The third run is caught with half its tables written, by what no run's row records."""
    execute = Counting()

    def stopped(table, file):
        write_table(table, file)
        if len(execute.done) == 3 and file.stem == "nodes":
            raise KeyboardInterrupt

    monkeypatch.setattr("workbench.experiments.runs.write_table", stopped)
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, execute)
    monkeypatch.undo()
    whole = [folder for folder in tmp_path.iterdir() if folder.name[0] != "."]
    before = {folder: (folder / "runs.parquet").read_bytes() for folder in whole}
    assert len(before) == 2
    found = sweep(tmp_path, execute)
    assert len(execute.done) == 5  # three before, the interrupted one and the last after
    assert execute.done.count(execute.done[2]) == 2
    assert list(found.all_runs["status"]) == ["finished"] * 4
    assert all((p / "runs.parquet").read_bytes() == content for p, content in before.items())


def test_a_preview_lists_runs_ends_and_minutes_and_runs_nothing(tmp_path):
    config = sweep_config("quick", num_problems=3, warmup_problems=0, shares=(0.02, 0.3, 0.5))
    seen = preview(config, tmp_path)
    assert set(seen.runs["status"]) == {"to run", "infeasible"}
    assert seen.num_to_run == 2
    assert seen.runs["expected_s"].sum() > 0
    assert str(seen).startswith("2 of 3 runs to do, about")
    assert not seen.measured_before
    assert 0.05 < seen.feasible.low < 0.1 < 0.5 < seen.feasible.high < 0.7
    sweep(tmp_path, Counting(), config)
    after = preview(config, tmp_path)
    assert (after.num_to_run, after.runs["expected_s"].sum()) == (0, 0)
    assert after.measured_before
    assert "activations" not in str(after.feasible)
    again = preview(replace(config, seeds=(7,)), tmp_path)
    assert again.num_to_run == 2 and again.measured_before
    other = preview(replace(config, seeds=(7,), device="cuda"), tmp_path)
    assert not other.measured_before, "another device's seconds foretell nothing"
    inside = preview(replace(config, activations_in_total=True, dtype="bfloat16"), tmp_path)
    assert "activations" in str(inside.feasible)
    assert inside.feasible.llm.weights * 2 == seen.feasible.llm.weights


# -- what a reader is told --


def rows_of(speeds, **columns):
    """A sweep's rows: the sentinel's setting in three places, another setting beside it."""
    row = {"status": "finished", "machine": "m", "versions": "v", "seed": 0}
    row |= {"git_commit": this_code()["commit"], "code": this_code()["code"]}
    rows = [
        row
        | {"run_id": f"r{k}", "role": role, "llm_share": share, "written_at": f"2026-01-01T0{k}"}
        for k, (role, share) in enumerate(
            [("sentinel", 0.3), ("measure", 0.5), ("measure", 0.3), ("sentinel", 0.3)]
        )
    ]
    return pd.DataFrame(rows).assign(tokens_per_s=speeds, **columns)


def test_drift_is_seen_on_the_sentinel_s_setting_alone():
    found = sentinel_drift(rows_of([100.0, 5.0, 100.0, 80.0]))
    assert found.to_dict() == pytest.approx({"r0": 0.0, "r2": 0.0, "r3": -0.2})
    assert "drifted by -20% to +0% over 3" in " ".join(remarks(rows_of([100.0, 5.0, 100.0, 80.0])))
    assert list(remarks(rows_of([100.0, 5.0, 100.0, 98.0]))) == []
    plain = rows_of([1.0, 2.0, 3.0, 4.0], role="measure")
    assert sentinel_drift(plain).empty
    assert sentinel_drift(pd.DataFrame()).empty
    assert list(remarks(plain)) == list(remarks(pd.DataFrame())) == []


def test_mixed_machines_and_other_code_are_said():
    mixed = rows_of([1.0] * 4, machine=["laptop", "laptop", "laptop", "H200"])
    assert "differ in machine: H200 / laptop" in " ".join(remarks(mixed))
    assert list(remarks(rows_of([1.0] * 4, git_commit="0123456789abcdef"))) == []
    old = rows_of([1.0] * 4, git_commit="0123456789abcdef", code="another")
    assert "4 stored runs of other code, made at commit 0123456789ab;" in " ".join(remarks(old))


def test_a_figure_of_runs_of_several_commits_says_so_on_its_face(tmp_path):
    """Of one study or of two; a commit with changes is told from the commit itself."""
    one = FakeSweep()
    assert "commits" not in provenance_of(one)
    clean = one.runs.assign(git_commit="a" * 40, git_dirty=False, code="c0de")
    other = clean.assign(git_commit="b" * 40)
    assert "commits" not in provenance(clean)
    assert "; runs of 2 commits: aaaaaaaaa, bbbbbbbbb." in provenance(pd.concat([clean, other]))
    assert "; runs of 2 commits: aaaaaaaaa, bbbbbbbbb." in provenance(clean, beside=other)
    text = provenance(pd.concat([clean, clean.assign(git_dirty=True)]))
    assert "; runs of 2 commits: aaaaaaaaa, aaaaaaaaa+c0de." in text
    beside = {"all_runs": one.all_runs, "missing": ()}
    first, second = (SimpleNamespace(runs=runs, **beside) for runs in (clean, other))
    assert "commits" not in provenance_of(first, first)
    together = provenance_of(first, second)
    assert "All panels: runs of 2 commits: aaaaaaaaa, bbbbbbbbb." in together
    fig = memory_split(split_rows(one), text)
    lines = [each.text for each in fig.layout.annotations if each.name == "provenance"]
    assert "aaaaaaaaa+c0de" in lines[0]
    assert "aaaaaaaaa+c0de" in tex(fig, "memory_split")


def test_runs_of_other_code_are_made_anew_unless_stale_is_ok(tmp_path, monkeypatch):
    first, again = Counting(), Counting()
    before = sweep(tmp_path, first)
    now = this_code() | {"code": "0123456789ab"}
    monkeypatch.setattr("workbench.experiments.runs.this_code", lambda *_: now)
    seen = preview(CONFIG, tmp_path)
    assert seen.num_to_run == 4
    at = str(before.runs["git_commit"][0])[:12]
    assert "4 of them are stored of other code: `--" in str(seen)
    at = f"`--at {at}` goes on with that of {seen.runs['stale'][0].name}, `--stale ok`"
    assert (at in str(seen)) == (not before.runs["git_dirty"][0])
    stale = preview(CONFIG, tmp_path, stale_ok=True)
    assert (stale.num_to_run, set(stale.runs["status"])) == (0, {"finished, other code"})
    used = sweep(tmp_path, again, stale_ok=True)
    assert (used.folders, again.done) == (before.folders, [])
    assert "4 stored runs of other code" in " ".join(remarks(used.all_runs))
    anew = sweep(tmp_path, again)
    assert len(again.done) == 4 and not set(anew.folders) & set(before.folders)
    assert list(remarks(anew.all_runs)) == []
    assert sweep(tmp_path, again, stale_ok=True).folders == anew.folders, "this code comes first"
    few = sweep(tmp_path, again, replace(CONFIG, temperature=0.5), stale_ok=True)
    assert len(again.done) == 8 and len(few.folders) == 4, "other settings are other runs"


def test_the_commit_of_a_run_is_that_of_the_code_in_use(tmp_path, monkeypatch):
    """What is committed or checked out while a study runs is not what runs."""
    states = iter([{"commit": letter * 40, "dirty": False} for letter in "abcdefgh"])
    monkeypatch.setattr("workbench.experiments.provenance.git_state", lambda: next(states))
    this_code.cache_clear()
    try:
        assert set(sweep(tmp_path, Counting()).runs["git_commit"]) == {"a" * 40}
    finally:
        this_code.cache_clear()


def test_a_figure_names_the_machine_the_rung_and_the_one_seed_that_is_drawn():
    other = study.provenance_here("dummy:llama-3.2-1b", "tiny-prm", "one problem")
    assert "(dummy weights); one problem; " in other
    assert machine_facts()["cpu"] in other
    assert "4 problems, seed 0 of 2 seeds" in provenance_of(FakeSweep(), seed=0)
    assert "4 problems, 1 seed," in provenance_of(FakeSweep(seeds=(0,)), seed=0)
    text = provenance_of(FakeSweep())
    for part in ("tiny-solver", "tiny-prm", "measured tiny", "64.0 MiB", "4 problems, 2 seeds"):
        assert part in text
    assert "A CPU" in text and "Counts carry over" in text
    assert "10 of 10 runs; 4 runs of equal work differ by up to 1.02 times" in text


@pytest.mark.parametrize("name", ["memory_split", "prm_blocks_050", "prefix_hits", "lost_time"])
def test_short_profiles_draw_what_is_committed_of_replayed_rungs(name, monkeypatch):
    monkeypatch.setattr(study, "run_replayed", None)  # nothing is replayed
    rungs = study.run_rungs("default", shares=None, n=None)
    own, record = read_figure(name, committed_tree() / "figures")
    own = own[own["rung"].isin([RECORDED, REPLAYED])].reset_index(drop=True)
    pd.testing.assert_frame_equal(on_rungs(None, rungs, name), own)
    said = provenance_of(*rungs, figure=name)
    again = f"Rows of commit {record['git']['commit'][:9]}, drawn again."
    assert said.count("Nothing was run") == said.count(again) == 2
    assert said.index("smollm2-135m") < said.index("llama-3.2-1b")
    assert not study.committed("full", None) and not study.committed("default", None, 4)


def test_pairs_that_no_search_of_a_strategy_is_recorded_or_drawn_of_are_left_out(monkeypatch):
    """And the reason is said; before, each of their replays failed, and so did the command."""
    monkeypatch.setattr(study, "run_replayed", None)  # nothing is replayed
    with pytest.warns(UserWarning, match="^Not drawn, ") as told:
        assert study.run_rungs("default", strategy="dora") == []
    said = " ".join(str(each.message) for each in told)
    assert "recording is of beam_search, not of dora" in said and "rebase, ets, not of dora" in said


@pytest.mark.parametrize("name", ["critiques_replayed", "optimisation_replayed", "llm_batch"])
def test_what_is_committed_is_kept_with_its_own_origin(name, tmp_path, no_browser):
    """Of a figure of one rung; where a rung is missing the error says what brings it back."""
    drawn, record = read_figure(name, committed_tree() / "figures")
    far = study.Committed(drawn["rung"].iloc[-1])
    own, _ = far.figure(name)
    study.keep_figure(FIGURES[name](own, provenance_of(far, figure=name)), own, name, far, tmp_path)
    rows, kept = read_figure(name, tmp_path)
    pd.testing.assert_frame_equal(rows, own.reset_index(drop=True))
    assert kept["git"] == record["git"] and kept["machine"] == record["machine"]
    with pytest.raises(RunStoreError, match=r"of 'of Mars'.* `--profile full` replays"):
        study.Committed("of Mars").figure(name)


def test_what_is_drawn_over_the_committed_figures_is_never_drawn_again(tmp_path, monkeypatch):
    """A run of other sizes drew over them, or they are gone: git has them."""
    home = shutil.copytree(committed_tree() / "figures", tmp_path / "figures")
    commit(tmp_path)
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    before, record = study.Committed().figure("prefix_hits")
    changed = before.assign(value=0.5)
    changed.to_parquet(home / "prefix_hits.parquet")
    (home / "prefix_hits.json").write_text("{}")
    for _ in range(2):
        again, kept = study.Committed().figure("prefix_hits")
        pd.testing.assert_frame_equal(again, before)
        assert kept == record
        (home / "prefix_hits.parquet").unlink(missing_ok=True)
