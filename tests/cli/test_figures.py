"""`workbench figures`: what is refused before it runs, what failed is said, profiles never mix."""

import json
import os
import re
import shutil
from types import SimpleNamespace

import pandas as pd
import pytest

from tests.conftest import commit
from tests.experiments.fakes import fake_result
from workbench.cli import main
from workbench.cli.study import home_of, report
from workbench.experiments.backends import Backend
from workbench.experiments.execute import one_by_one
from workbench.experiments.notebooks import notebook_files
from workbench.experiments.plans import (
    AblationPlan,
    BatchPlan,
    ablation_runs,
    plan_of,
    replayed_config,
    sweep_config,
)
from workbench.experiments.provenance import project_root
from workbench.experiments.sensitivity import REACHED
from workbench.experiments.settings import RunSpec
from workbench.experiments.study import (
    Study,
    completeness,
    figures_home,
    provenance_of,
    run_replayed,
    run_study,
    run_sweep,
)


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """What `workbench figures` called, with everything slow replaced."""
    called = []
    runs = {"runs": pd.DataFrame({"run_id": ["r"]}), "all_runs": pd.DataFrame(columns=["status"])}
    swept = SimpleNamespace(config=sweep_config("quick"), plan=None, **runs)
    results = {
        "experiments.study.run_sweep": swept,
        "experiments.notebooks.run_notebooks": [tmp_path / "02.ipynb"],
        "experiments.notebooks.write_page": tmp_path / "02.html",
        "experiments.report.write_report": tmp_path / "study.html",
        "experiments.export.replot": [],
    }

    def remember(place):
        def call(*given, **named):
            called.append((place.rpartition(".")[2], (*given, *named.values())))
            return results[place]

        return call

    for place in results:
        monkeypatch.setattr(f"workbench.{place}", remember(place))
    monkeypatch.chdir(project_root())
    return called


@pytest.fixture
def broken(tmp_path):
    """A sweep of four runs of which one failed."""

    def execute(spec: RunSpec):
        if spec.llm_share == 0.3:
            raise RuntimeError("the cable was [pulled]")
        return fake_result(spec)

    config = sweep_config("quick", num_problems=3)
    return run_sweep(config, tmp_path / "runs", execute=one_by_one(execute), progress=False)


def test_figures_sweeps_executes_and_reports(calls, tmp_path, says):
    options = ["--profile", "quick", "-p", "num_problems=2", "--runs", str(tmp_path)]
    options += ["--backend", "processes", "--workers", "2"]
    assert "4 of 4 runs to do, about" in says("figures", *options)
    assert [name for name, _ in calls if name[:4] in ("run_", "writ")] == [
        "run_sweep", "run_notebooks", "write_page", "write_report",
    ]  # fmt: skip
    swept, executed = calls[0][1], calls[1][1]
    assert (swept[0].profile, swept[0].num_problems, swept[1]) == ("quick", 2, str(tmp_path))
    assert executed[:3] == (None, "quick", {"num_problems": 2, "runs_dir": str(tmp_path)})
    assert swept[-1] == Backend("processes", 2)
    assert executed[-1] == {"WORKBENCH_BACKEND": "processes", "WORKBENCH_WORKERS": "2"}


def test_a_sweep_that_cannot_fit_is_said_before_any_notebook_runs(tmp_path, says):
    options = ["--profile", "quick", "--runs", str(tmp_path)]
    said = says("figures", "-p", "shares=[0.01, 0.02]", *options, status=2)
    assert "llm_share 0.01 is infeasible: the LLM (tiny-solver) lacks" in said
    assert "infeasible: split-0.010-seed0" in says("sweep", "--shares", "0.01", *options)


def test_a_sweep_of_which_every_run_failed_is_no_bad_input(calls, monkeypatch, says):
    """Status 1, and no notebook runs."""
    every = pd.DataFrame({"status": ["failed", "infeasible"], "error": ["it broke", "no room"]})
    none = SimpleNamespace(runs=every[:0], all_runs=every)
    monkeypatch.setattr("workbench.cli.study._sweep", lambda *_: none)
    said = says("figures", "02", "--profile", "quick", status=1)
    assert "No run of the sweep finished: it broke; no room." in said and not calls


@pytest.mark.parametrize("names", [["00"], ["01", "07"]])
def test_figures_of_notebooks_that_read_no_sweep_need_none(calls, names):
    """The tour, memory and the ablation build or run what they draw themselves; the tour draws no
    figure that is kept.
    """
    assert main(["figures", *names]) == 0
    reported = [] if names == ["00"] else ["write_page", "write_report"]
    assert [name for name, _ in calls] == ["run_notebooks", *reported]


@pytest.mark.parametrize(
    ("options", "said", "unsaid"),
    [
        (["--profile", "full"], ["55 of 55 runs to do", "04_batching: ", "Together: ",
                                 "(02, 03, 05, 06): 293 of 293"], "nothing"),
        (["03"], ["is feasible in", "replayed SmolLM2 (03): nothing to replay"], "batching"),
        (["03", "-p", "lower_share=0.2"], ["replayed SmolLM2 (03): 7 of 7 replays to do"],
         "nothing"),
        (["02", "-p", "strategy=rebase"], ["a PRM that writes (02): nothing to replay"], "SmolLM2"),
        (["02", "04", "-p", "strategy=rebase", "--profile", "quick"],  # 4 + 4 of two sweeps, 28, 4
         ["The sweep of 02:", "The sweep of 04:", "Together: 40 runs and replays"], "SmolLM2"),
        (["03", "-p", "max_depth=9"], ["replayed SmolLM2 (03): 7 of 7 replays to do"], "nothing"),
        (["02", "06", "-p", "strategy=dvts"], ["1B + 8B (02, 06): 7 of 7 replays"], "SmolLM2"),
        (["07", "-p", "ablation_share=0.5"], ["replayed SmolLM2 (07): 5 of 5"], "nothing"),
        (["07"], ["07_modifications: 11 of 11 runs to do, about",
                  "replayed 1B + 8B (07): nothing"], "feasible"),
        (["11", "-p", "num_problems=[20, 10]", "-p", "beam_counts=[4, 8]"],
         ["11_strategies: 18 of 18 runs to do, about"], "feasible"),
        (["08"], ["replayed 1B + 8B (08): nothing to replay, the committed rows"], "(07)"),
        (["08", "-p", "budgets=[0.5]"],
         ["replayed 1B + 8B (08): 13 of 13 replays to do, about 0 min (rough)"], "nothing"),
        (["09"], ["09_missing_values: nothing to replay, the committed rows"], "to do"),
        (["09", "-p", "values=['n', 'dtype']"], ["09_missing_values: 60 of 60 replays"], "runs"),
        (["00"], [], "to do"),  # it reads no sweep
        (["11", "-p", "beam_counts=[2]", "--profile", "quick"], ["9 of 9 runs to do"], "nothing"),
    ],
)  # fmt: skip
def test_a_dry_run_says_what_would_take_how_long(options, said, unsaid, calls, tmp_path, says):
    """Runs and replays beside the sweep's are announced with its own; nothing is run."""
    shown = says("figures", *options, "--dry-run", "--runs", str(tmp_path))
    assert all(text in shown for text in said) and unsaid not in shown
    assert calls == [] and not list(tmp_path.iterdir())


def test_each_notebook_measures_with_those_settings_that_it_has(tmp_path, says):
    """One that has no beam width has the sweep of its profile, stored here."""
    run_sweep(sweep_config("quick"), tmp_path, execute=one_by_one(fake_result), progress=False)
    words = ["-p", "beam_width=2", "--profile", "quick", "--dry-run", "--runs", str(tmp_path)]
    shown = says("figures", "03", "11", *words)
    assert "0 of 4 runs to do" in shown and "11_strategies: 18 of 18 runs to do" in shown


@pytest.mark.parametrize("kind", ["dummy:", ""])
def test_a_dry_run_of_the_thesis_says_what_it_needs(kind, tmp_path, says, monkeypatch):
    """Bytes, hours, what the thesis leaves open, and where this differs; of three problems and
    random weights, or of weights that are not here, which are not fetched.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    file = project_root() / "tests" / "data" / "math500_sample.json"
    own = {"llm": f"{kind}llama-3.2-1b", "prm": f"{kind}llama-3.1-8b-prm", "num_problems": 3,
           "problems": file, "shares": [0.3, 0.5]}  # fmt: skip
    words = [word for name, value in own.items() for word in ("-p", f"{name}={value}")]
    words += ["--profile", "thesis", "--dry-run", "--runs", str(tmp_path)]
    alone = says("figures", "07", *words[:8], *words[10:])  # of its own, at no shares
    away = "llama-3.2-1b is not on this disk yet, and planned by its shapes."
    assert (away in " ".join(alone.split())) == (not kind)
    shown = " ".join(says("figures", "02", *words).split())
    assert f"2.3 GiB of {kind}llama-3.2-1b and 15.0 GiB of {kind}llama-3.1-8b-prm" in shown
    assert (away in shown) == (not kind)
    assert "10 runs of 3 problems: 0.0 hours by the roofline" in shown
    assert "problems in flight: a minimum batch, no number; taken: 12 (tiny), 48" in shown
    assert "split-0.500-seed4" in shown and "runs to do, about" in shown
    record = json.loads((project_root() / "reports" / "gpu" / "reenact.json").read_text())
    of = [row["ratio"] for row in record["rows"] if row["unit"] == "tokens/s"]
    assert (round(min(of), 2), round(max(of), 2)) == REACHED


def test_a_dry_run_counts_no_replay_that_is_stored(tmp_path, says):
    asked = {"shares": [0.3, 0.5], "num_problems": 2, "n": 4, "max_depth": 3}
    first = replayed_config("quick", **asked | {"shares": (0.3,)})
    run_replayed(first, tmp_path, progress=False)
    words = [word for name, value in asked.items() for word in ("-p", f"{name}={value}")]
    words += ["--dry-run", "--profile", "quick", "--runs", str(tmp_path)]
    shown = says("figures", "05", *words)
    assert "replayed 1B + 8B (05): 1 of 2 replays to do" in shown
    assert "Together: 5 runs and replays to do" in shown  # two shares measured, two of SmolLM2's


@pytest.mark.parametrize("how", [[], ["--dry-run"]], ids=["run", "dry"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-p", "sharess=[0.3]"], "Did you mean 'shares'"),
        (["77"], "no notebook '77'"),
        (["--profile", "quick", "-p", "num_problem=2"], "Did you mean 'num_problems'"),
        (["08", "-p", "budgets=[0]"], "budgets"),
        (["11", "-p", "beam_counts=16"], "beam_counts is 16"),
        (["09", "-p", 'asked={"in_flght": 24}'], "Did you mean 'in_flight'"),
        (["09", "-p", "asked=5"], "asked is 5"),
        (["02", "-p", "strategy=self_consistency"], "which asks no PRM"),
        (["09", "-p", "rounds=1"], "rounds is 1"),
        (["09", "-p", "values=GPU"], "values is 'GPU'; allowed: a list of names"),
    ],
)
def test_what_no_notebook_has_is_refused_before_anything_runs(words, said, how, calls, says):
    assert said in says("figures", *words, *how, status=2) and calls == []


def test_a_replot_runs_nothing_and_takes_no_parameter_of_a_run(calls, monkeypatch, says):
    monkeypatch.setenv("WORKBENCH_WORKERS", "4")  # of runs, wherever it was set
    assert main(["figures", "--replot", "memory_split"]) == 0
    assert [name for name, _ in calls] == ["replot", "write_report"]
    assert main(["figures", "--replot", "--dry-run"]) == 2
    assert "no parameter 'n'" in says("figures", "--replot", "-p", "n=4", status=2)


def test_a_failed_run_is_on_the_figures_and_on_the_terminal(broken, calls, monkeypatch, says):
    assert completeness(broken) == "3 of 4 runs (failed: split-0.300-seed0)"
    monkeypatch.setattr("workbench.experiments.study.run_sweep", lambda *_, **__: broken)
    shown = says("figures", "02", "--profile", "quick", status=1)
    assert "failed: split-0.300-seed0" in shown and "--retry-failed" in shown
    assert "RuntimeError: the cable was [pulled]" in shown
    assert dict(calls)["write_report"][0] == project_root() / "build/figures/quick"
    assert "3 of 4 runs (failed: split-0.300-seed0)" in provenance_of(broken)


def test_a_failed_run_of_another_study_is_named_and_repeated(calls, tmp_path, says):
    """Of the ablation, whose notebook is handed the wish to repeat it."""

    def execute(spec: RunSpec):
        if spec.setting == "score_cache":
            raise RuntimeError("no cable")
        return fake_result(spec)

    config, plan = sweep_config("quick"), plan_of(AblationPlan, "quick")
    runs, how = ablation_runs(config, plan), {"plan": plan, "progress": False}
    study = run_study(config, runs, tmp_path, execute=one_by_one(execute), **how)
    assert study.failures.startswith("failed: ")
    assert study.failures in provenance_of(study)
    words = ["figures", "07", "--profile", "quick", "--runs", str(tmp_path)]
    assert "failed: 07_modifications: " in says(*words, status=1)
    says(*words, "--retry-failed", status=1)
    passed = [given for name, given in calls if name == "run_notebooks"][-1][2]
    assert passed == {"runs_dir": str(tmp_path), "retry_failed": True}


def test_a_failed_replay_is_named_and_no_success(calls, monkeypatch, says):
    told = [("replayed 1B + 8B (05)", 2, 0, 0.0, "failed: split-0.300-seed0; ")]
    monkeypatch.setattr("workbench.cli.study._replays_left", lambda *_: told)
    shown = says("figures", "05", "--profile", "quick", status=1)
    assert "failed: split-0.300-seed0; replayed 1B + 8B (05)" in shown and "--retry-fail" in shown


def test_figures_of_ones_own_are_told_beside_committed_ones(monkeypatch, tmp_path, capsys):
    """Of the committed ones themselves nothing is, until others are drawn over them."""
    for place in ("figures", "mine"):
        (tmp_path / place).mkdir()
        for ending in (".parquet", ".json"):
            shutil.copy(project_root() / f"figures/memory_split{ending}", tmp_path / place)
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    monkeypatch.setattr("workbench.experiments.report.write_report", lambda folder: folder)
    report(tmp_path / "mine", [])
    shown = capsys.readouterr().out
    assert re.search(r"\(memory_split\): (\d+) of \1 agree\.", shown)
    assert "Settings that differ, here (committed): none." in shown
    report(tmp_path / "figures", [])
    assert "committed" not in capsys.readouterr().out
    commit(tmp_path)
    report(tmp_path / "figures", [])
    assert "committed" not in capsys.readouterr().out
    rows = pd.read_parquet(tmp_path / "figures/memory_split.parquet")
    rows[rows["llm_share"] < 0.5].to_parquet(tmp_path / "figures/memory_split.parquet")
    report(tmp_path / "figures", [])
    assert "only committed (share 0.5)" in capsys.readouterr().out


def test_stale_ok_reaches_the_sweep_and_every_notebook(calls, tmp_path):
    words = ["--profile", "quick", "--runs", str(tmp_path), "--stale", "ok"]
    assert main(["sweep", *words, "--retry-failed"]) == 0
    assert calls[0][1][1:4] == (str(tmp_path), True, True)
    assert main(["figures", *words]) == 0
    assert calls[1][1][1:4] == (str(tmp_path), False, True)
    assert calls[2][1][2] == {"runs_dir": str(tmp_path), "stale_ok": True}
    for file in notebook_files():
        text = file.read_text()
        kinds = "study|sweep|replayed|rungs|ablation_replayed|(?:batches|policies)(?:_replayed)?"
        studies = re.findall(rf" \*?run_(?:{kinds})\(", text)
        calls_with = re.findall(r"run_\w+\([^\n]*\*\*how", text)
        assert len(calls_with) == len(studies), file.name


@pytest.mark.parametrize(
    ("profile", "changed", "folder"),
    [
        ("default", {}, "figures"),
        ("full", {}, "build/figures/full"),
        ("default", {"seeds": (7,)}, "build/figures/default-changed"),
    ],
)
def test_figures_holds_the_default_profile_and_nothing_else(profile, changed, folder):
    """Of the sweep and of another study."""
    config = sweep_config(profile, **changed)
    for study in (Study(config, ()), Study(config, (), plan=plan_of(BatchPlan, profile))):
        assert figures_home(study) == project_root() / folder


def test_every_column_of_a_run_is_shown_whole(broken, tmp_path, says):
    shown = says("runs", "show", "split-0.500", "--runs", str(tmp_path / "runs"))
    (folder,) = (tmp_path / "runs").glob("split-0.500*")
    assert all(name in shown for name in pd.read_parquet(folder / "runs.parquet").columns)
    assert "…" not in shown


def test_a_report_is_of_the_folder_that_was_drawn_into(tmp_path, monkeypatch):
    """A parameter set to its usual value changes no figure, and so no folder; notebooks that lack
    it draw into the usual one, later.
    """
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    usual, changed = tmp_path / "figures", tmp_path / "build/figures/default-changed"
    given = {"depth_limits": [4]}
    assert home_of("default", given, 10) == usual
    for time, place in ((11, changed), (12, usual)):
        place.mkdir(parents=True)
        (place / "a.parquet").touch()
        os.utime(place / "a.parquet", (time, time))
    assert home_of("default", given, 10) == changed
    assert home_of("default", given, 11.5) == usual, "what an earlier run drew"
    assert home_of("default", {}, 10) == usual
