"""`workbench figures`: run what is missing, execute the notebooks, write the report.

With --replot it only redraws figures from their stored rows, with --dry-run it only looks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from workbench.cli.settings import (
    expectation,
    key_values,
    print_preview,
    print_unfinished,
    terminal,
)
from workbench.config import SweepConfig
from workbench.errors import ConfigError, RunStoreError
from workbench.experiments.batch_plan import BatchGrid
from workbench.experiments.batch_study import GRID_PARAMETERS, batch_grid, left_to_do
from workbench.experiments.claims import Claim, claims_of
from workbench.experiments.export import replot
from workbench.experiments.face import rung, sweep_face
from workbench.experiments.health import remarks
from workbench.experiments.ladder import ladder_left, run_ladder
from workbench.experiments.ladder_claims import ladder_claims
from workbench.experiments.ladder_plan import LADDER_PARAMETERS, LadderPlan, ladder_plan
from workbench.experiments.notebooks import (
    known_parameters,
    notebook_files,
    refuse_unknown,
    run_notebooks,
)
from workbench.experiments.paths import project_root
from workbench.experiments.policy_plan import POLICY_PARAMETERS, PolicyPlan, policy_plan
from workbench.experiments.policy_study import policies_left
from workbench.experiments.preview import preview
from workbench.experiments.profiles import sweep_config
from workbench.experiments.report import write_report
from workbench.experiments.study import figures_home, profile_figures
from workbench.experiments.sweep import Sweep, run_sweep
from workbench.plots import FIGURES

BATCHING = "04_batching"  # the notebook with runs beside the sweep's
LADDER = "07_modifications"
POLICIES = "08_optimisation"
OWN_RUNS = ("01_memory_requirements", LADDER, POLICIES)
"""Notebooks of a profile that build or run what they draw themselves, and read no sweep."""


def run(given: argparse.Namespace) -> int:
    """One of three: redraw, look, or do it all. Exit status 1 when a run failed."""
    console, parameters = terminal(), key_values(given.parameter, "-p")
    if given.replot:
        return _redraw(given, parameters, console)
    check_names(given.names or None, parameters)
    config = sweep_config(given.profile, **sweep_settings(parameters))
    if given.dry_run:
        stems = _stems(given.names or None)
        if set(stems) - set(OWN_RUNS):
            print_preview(config, given.runs_dir, given.retry_failed)
        if BATCHING in stems:
            console.print(left_to_do(config, _grid(given.profile, parameters), given.runs_dir))
        if LADDER in stems:
            console.print(ladder_left(config, _plan(given.profile, parameters), given.runs_dir))
        if POLICIES in stems:
            policies = _policies(given.profile, parameters)
            console.print(policies_left(config, policies, given.runs_dir))
        return 0
    return _everything(given, config, parameters, console)


def _redraw(given: argparse.Namespace, parameters: dict[str, Any], console: Console) -> int:
    """Figures from their stored rows: those of the profile, or of the parameter figures_folder."""
    folder = _folder(parameters.pop("figures_folder", None), profile_figures(given.profile))
    if parameters:
        raise ConfigError(
            f"--replot draws stored rows and takes no -p {', '.join(parameters)}; allowed: "
            "-p figures_folder=DIR. Leave it out, or leave --replot out to measure."
        )
    for saved in replot(folder, FIGURES, given.names or None):
        console.print(repr(saved))
    return 0


def _everything(
    given: argparse.Namespace, config: SweepConfig, parameters: dict[str, Any], console: Console
) -> int:
    """The sweep first, so that its progress is seen here; the notebooks then find its runs."""
    names = given.names or None
    if given.runs_dir:
        parameters = parameters | {"runs_dir": str(Path(given.runs_dir).resolve())}
    sweep = _sweep(config, given, console) if _reads_sweep(names) else None
    executed = run_notebooks(names, given.profile, parameters, given.out)
    if sweep is None:
        return 0
    further = _ladder_claims(config, given, parameters) if LADDER in _stems(names) else []
    return _report(sweep, executed, parameters, console, further)


def _ladder_claims(
    config: SweepConfig, given: argparse.Namespace, parameters: dict[str, Any]
) -> list[Claim]:
    """C7 and C8, from the runs that the ladder's notebook has just stored."""
    plan = _plan(given.profile, parameters)
    return ladder_claims(run_ladder(config, plan, parameters.get("runs_dir"), compute=False))


def _report(
    sweep: Sweep,
    executed: list[Path],
    parameters: dict[str, Any],
    console: Console,
    further: Sequence[Claim] = (),
) -> int:
    """The first page, and on the terminal what a reader of the figures must know.

    further: claims that other runs than the sweep's answer.
    """
    figures = _folder(parameters.get("figures_folder"), figures_home(sweep))
    claims = sorted([*claims_of(sweep, rung(sweep.runs)), *further], key=lambda claim: claim.key)
    reports = project_root() / "reports"
    index = write_report(executed, claims, sweep_face(sweep), reports, figures)
    failed = print_unfinished(sweep.all_runs, console)
    for remark in remarks(sweep.all_runs):
        console.print(remark, style="yellow")
    console.print(f"figures: {figures}\nreport:  {index}")
    if failed:
        console.print("`workbench figures --retry-failed` repeats what failed.", style="yellow")
    return int(failed)


def _folder(given: str | None, own: Path) -> Path:
    """Where figures lie; what is given counts from the project's root, as in a notebook."""
    return project_root() / given if given else own


def _grid(profile: str, parameters: dict[str, Any]) -> BatchGrid:
    """The grid of the batching notebook with these parameters."""
    fields_ = {name: parameters.get(key) for key, name in GRID_PARAMETERS.items()}
    return batch_grid(profile, **fields_)


def _plan(profile: str, parameters: dict[str, Any]) -> LadderPlan:
    """The plan of the ladder's notebook with these parameters."""
    fields_ = {name: parameters.get(key) for key, name in LADDER_PARAMETERS.items()}
    return ladder_plan(profile, **fields_)


def _policies(profile: str, parameters: dict[str, Any]) -> PolicyPlan:
    """The plan of the optimisation notebook with these parameters."""
    fields_ = {name: parameters.get(key) for key, name in POLICY_PARAMETERS.items()}
    return policy_plan(profile, **fields_)


def _stems(names: list[str] | None) -> list[str]:
    """Names of the notebooks asked for."""
    return [file.stem for file in notebook_files(names)]


def _sweep(config: SweepConfig, given: argparse.Namespace, console: Console) -> Sweep:
    found = preview(config, given.runs_dir, retry_failed=given.retry_failed)
    if found.num_to_run:
        console.print(expectation(found))
    sweep = run_sweep(config, given.runs_dir, retry_failed=given.retry_failed)
    if sweep.runs.empty:
        reasons = "; ".join(sweep.all_runs["error"].dropna().astype(str).unique())
        raise RunStoreError(f"No run of the sweep finished: {reasons}. There is nothing to draw.")
    return sweep


def check_names(names: list[str] | None, parameters: dict[str, Any]) -> None:
    """Refuse a notebook or a parameter that does not exist before the sweep starts."""
    files = notebook_files(names)
    known = {name: None for file in files for name in known_parameters(file)}
    where = " and ".join(file.stem for file in files)
    refuse_unknown(parameters, known, where)


def sweep_settings(parameters: dict[str, Any]) -> dict[str, Any]:
    """Those notebook parameters that are settings of the sweep the notebooks ask for."""
    known = {field.name for field in fields(SweepConfig)} - {"profile"}
    return {k: v for k, v in parameters.items() if k in known and v is not None}


def _reads_sweep(names: list[str] | None) -> bool:
    """Whether any of these notebooks looks at the sweep; the tour does not."""
    files = [file for file in notebook_files(names) if file.stem not in OWN_RUNS]
    return any("profile" in known_parameters(file) for file in files)
