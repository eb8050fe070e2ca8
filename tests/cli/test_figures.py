"""`workbench figures`: what is refused before it runs, what failed is said, profiles never mix."""

from pathlib import Path

import pandas as pd
import pytest

from tests.experiments.fakes import fake_result
from workbench.cli import main, study
from workbench.experiments.execute import one_by_one
from workbench.experiments.provenance import project_root
from workbench.experiments.settings import PLANS, PROFILES, BatchPlan, RunSpec, sweep_config
from workbench.experiments.study import Study, completeness, figures_home, run_sweep

ROOT = Path(__file__).parents[2]


def fails_at(share):
    def execute(spec: RunSpec):
        if spec.llm_share == share:
            raise RuntimeError("the cable was [pulled]")
        return fake_result(spec)

    return one_by_one(execute)


@pytest.fixture
def broken(tmp_path):
    """A sweep of four runs of which one failed."""
    config = sweep_config("quick", num_problems=3)
    return run_sweep(config, tmp_path / "runs", execute=fails_at(0.3), progress=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-p", "sharess=[0.3]"], "Did you mean 'shares'"),
        (["77"], "no notebook '77'"),
        (["--profile", "quick", "-p", "num_problem=2"], "Did you mean 'num_problems'"),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(words, said, capsys):
    assert main(["figures", *words, "--dry-run"]) == 2
    assert said in capsys.readouterr().err


def test_a_replot_takes_no_parameter_that_only_a_run_could_use(tmp_path, capsys):
    assert main(["figures", "--replot", "-p", "n=4"]) == 2
    assert "takes no -p n" in capsys.readouterr().err
    assert main(["figures", "--replot", "prefix_hits", "-p", f"figures_folder={tmp_path}"]) == 2
    assert "has no stored rows" in capsys.readouterr().err


def test_a_failed_run_is_on_the_face_and_on_the_terminal(broken, tmp_path, monkeypatch, capsys):
    assert completeness(broken) == "3 of 4 runs (failed: split-0.300-seed0)"
    faces = []
    claims, report = "workbench.experiments.claims.claims_of", "workbench.experiments.notebooks"
    monkeypatch.setattr(claims, lambda *_: [])
    monkeypatch.setattr(f"{report}.write_report", lambda *given: faces.append(given[2]))
    assert study.report(broken, [], {}, [])
    shown = capsys.readouterr().out
    assert "failed: split-0.300-seed0" in shown
    assert "RuntimeError: the cable was [pulled]" in shown
    assert "--retry-failed" in shown
    assert "3 of 4 runs (failed: split-0.300-seed0)" in faces[0]


def test_failed_runs_are_repeated_when_asked(broken, tmp_path, monkeypatch):
    seen = []

    def remember(config, runs_dir, **named):
        seen.append((runs_dir, named))
        return run_sweep(
            broken.config, runs_dir, execute=one_by_one(fake_result), progress=False, **named
        )

    monkeypatch.setattr("workbench.experiments.study.run_sweep", remember)
    folder = str(tmp_path / "runs")
    assert main(["sweep", "--profile", "quick", "--runs", folder, "--retry-failed"]) == 0
    assert seen == [(folder, {"retry_failed": True})]


def batches(profile, **overrides):
    """The batching study of a profile, without its runs."""
    return Study(sweep_config(profile, **overrides), (), plan=PLANS[BatchPlan][profile])


@pytest.mark.parametrize("profile", PROFILES)
def test_figures_holds_the_default_profile_and_nothing_else(profile):
    home = figures_home(Study(sweep_config(profile), ()))
    assert home == figures_home(batches(profile))
    if profile == "default":
        assert home == project_root() / "figures"
        return
    assert home == project_root() / "build" / "figures" / profile


def test_changed_settings_draw_elsewhere():
    elsewhere = project_root() / "build" / "figures" / "default-changed"
    for overrides in ({"num_problems": 2}, {"seeds": (7,)}, {"shares": (0.3,)}, {"n": 4}):
        assert figures_home(Study(sweep_config("default", **overrides), ())) == elsewhere
    assert figures_home(batches("default", n=4)) == elsewhere


def test_every_column_of_a_run_is_shown_whole(broken, tmp_path, capsys):
    where = ["--runs", str(tmp_path / "runs")]
    assert main(["runs", "show", "split-0.500", *where]) == 0
    shown = capsys.readouterr().out
    (folder,) = (tmp_path / "runs").glob("split-0.500*")
    for name in pd.read_parquet(folder / "runs.parquet").columns:
        assert name in shown, name
    assert "…" not in shown
