"""`workbench figures`, `sweep` and `runs`: the study, its measurements, and what is stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Exit, Option

from workbench.cli import options
from workbench.cli.options import DryRun, Memory, Profile, RetryFailed, Runs, Set, terminal
from workbench.errors import ConfigError, RunStoreError, nearest

if TYPE_CHECKING:
    import pandas as pd

    from workbench.config import SweepConfig
    from workbench.experiments.claims import Claim
    from workbench.experiments.runs import RunStore
    from workbench.experiments.study import Study

SWEEP_COLUMNS = ("llm_share", "seed", "tokens_per_s", "problems_per_min", "accuracy",
                 "llm_kv_tokens", "prm_kv_tokens", "llm_hit_rate", "prm_hit_rate", "llm_preempted",
                 "prm_evicted")  # fmt: skip
RUN_COLUMNS = ("run_id", "status", "llm_share", "seed", "num_problems", "tokens_per_s", "accuracy",
               "written_at")  # fmt: skip
BATCHING, ABLATION, POLICIES = "04_batching", "07_modifications", "08_optimisation"
OWN_RUNS = ("01_memory_requirements", ABLATION, POLICIES)
"""Notebooks of a profile that build or run what they draw themselves, and read no sweep."""


def figures(
    names: list[str] = Argument(
        None, help="notebooks (02 or 02_memory_split); with --replot figures; all if none"
    ),
    profile: Profile = "default",
    replot: bool = Option(False, "--replot", help="redraw figures from stored rows; runs nothing"),
    retry_failed: RetryFailed = False,
    dry_run: DryRun = False,
    parameter: list[str] = Option(
        None, "--parameter", "-p", metavar="NAME=VALUE", help="of the notebooks (repeatable)"
    ),
    out: str = Option(None, help="folder of notebooks (default: reports/notebooks/PROFILE)"),
    runs: Runs = None,
) -> None:
    """Run what is missing, draw all figures, report."""
    from workbench.experiments.notebooks import known_parameters, notebook_files, run_notebooks

    parameters = options.key_values(parameter, "-p")
    if replot:
        redraw(names, profile, parameters)
        return
    config = figures_config(names, profile, parameters)
    files = notebook_files(names or None)
    stems = [file.stem for file in files]
    if dry_run:
        _print_left(config, stems, parameters, runs, retry_failed)
        return
    if runs:
        parameters["runs_dir"] = str(Path(runs).resolve())
    # first the sweep, so that its progress is seen here; the notebooks then find its runs
    reading = [
        file for file in files if file.stem not in OWN_RUNS and "profile" in known_parameters(file)
    ]
    sweep = _sweep(config, runs, retry_failed) if reading else None
    executed = run_notebooks(names or None, profile, parameters, out)
    if sweep is not None:
        further = stored_ablation_claims(config, parameters) if ABLATION in stems else []
        if report(sweep, executed, parameters, further):
            raise Exit(options.FAILED)


def redraw(names: list[str] | None, profile: str, parameters: dict[str, Any]) -> None:
    """Figures from their stored rows: those of the profile, or of the parameter figures_folder."""
    from workbench.experiments.export import replot
    from workbench.experiments.study import profile_figures
    from workbench.plots import FIGURES

    folder = _folder(parameters.pop("figures_folder", None), profile_figures(profile))
    if parameters:
        raise ConfigError(
            f"--replot draws stored rows and takes no -p {', '.join(parameters)}; allowed: "
            "-p figures_folder=DIR. Leave it out, or leave --replot out to measure."
        )
    for saved in replot(folder, FIGURES, names or None):
        terminal().print(repr(saved))


def figures_config(
    names: list[str] | None, profile: str, parameters: Mapping[str, Any]
) -> SweepConfig:
    """The sweep these notebooks draw; refuses a notebook or a parameter that does not exist."""
    from workbench.config import SweepConfig
    from workbench.experiments.notebooks import known_together, notebook_files
    from workbench.experiments.settings import sweep_config

    known_together(notebook_files(names or None), parameters)
    own = {field.name for field in fields(SweepConfig)} - {"profile"}
    given = {k: v for k, v in parameters.items() if k in own and v is not None}
    return sweep_config(profile, **given)


def _print_left(
    config: SweepConfig, stems: list[str], parameters: Mapping[str, Any], runs: Any, retry: bool
) -> None:
    """What `figures` would run, for the sweep and for each notebook with runs of its own."""
    from workbench.experiments.settings import (
        AblationPlan,
        BatchPlan,
        PolicyPlan,
        ablation_runs,
        batch_runs,
        plan_of,
    )
    from workbench.experiments.study import policies_planned, preview

    if set(stems) - set(OWN_RUNS):
        _print_preview(config, runs, retry)
    studies: tuple[tuple[str, Any, Any], ...] = (
        (BATCHING, BatchPlan, batch_runs),
        (ABLATION, AblationPlan, ablation_runs),
        (POLICIES, PolicyPlan, partial(policies_planned, runs_dir=runs)),
    )
    for stem, kind, runs_of in studies:
        plan = plan_of(kind, config.profile, parameters)
        if stem in stems:
            terminal().print(f"{stem}: {preview(config, runs, specs=runs_of(config, plan))}")


def stored_ablation_claims(config: SweepConfig, parameters: Mapping[str, Any]) -> list[Claim]:
    """C7 and C8, from the runs that the ablation's notebook has stored."""
    from workbench.experiments.claims import ablation_claims
    from workbench.experiments.settings import AblationPlan, plan_of
    from workbench.experiments.study import run_ablation

    plan = plan_of(AblationPlan, config.profile, parameters)
    return ablation_claims(run_ablation(config, plan, parameters.get("runs_dir"), compute=False))


def report(
    sweep: Study, executed: list[Path], parameters: Mapping[str, Any], further: list[Claim]
) -> bool:
    """Write the first page; print what a reader of the figures must know; whether a run failed."""
    from workbench.experiments.claims import claims_of
    from workbench.experiments.notebooks import write_report
    from workbench.experiments.provenance import project_root
    from workbench.experiments.study import figures_home, provenance_of

    folder = _folder(parameters.get("figures_folder"), figures_home(sweep))
    claims = sorted([*claims_of(sweep), *further], key=lambda claim: claim.key)
    measured, reports = provenance_of(sweep), project_root() / "reports"
    index = write_report(executed, claims, measured, reports, folder)
    failed = _print_problems(sweep.all_runs)
    terminal().print(f"figures: {folder}\nreport:  {index}")
    if failed:
        terminal().print("`workbench figures --retry-failed` repeats what failed.", style="yellow")
    return failed


def _folder(given: str | None, own: Path) -> Path:
    """Where figures lie; what is given counts from the project's root, as in a notebook."""
    from workbench.experiments.provenance import project_root

    return project_root() / given if given else own


def _sweep(config: SweepConfig, runs: str | None, retry: bool) -> Study:
    from workbench.experiments.study import preview, run_sweep

    found = preview(config, runs, retry_failed=retry)
    if found.num_to_run:
        terminal().print(str(found))
    sweep = run_sweep(config, runs, retry_failed=retry)
    if sweep.runs.empty:
        reasons = "; ".join(sweep.all_runs["error"].dropna().astype(str).unique())
        raise RunStoreError(f"No run of the sweep finished: {reasons}. There is nothing to draw.")
    return sweep


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Settings of SweepConfig that have options of their own; None: the profile's."""

    shares: str = Option(None, metavar="S,S,...", help="the LLM's shares of total memory")
    seeds: str = Option(None, metavar="K,K,...", help="one run a share and seed")
    num_problems: int = Option(None, help="problems of a run")
    total_memory: Memory = None


def sweep(
    own: SweepOptions,
    profile: Profile = "default",
    config: str = Option(None, metavar="FILE", help="JSON file of settings, over the profile's"),
    more: Set = None,
    retry_failed: RetryFailed = False,
    dry_run: DryRun = False,
    runs: Runs = None,
) -> None:
    """Measure the memory split over its shares.

    Finished runs are kept and not repeated. Settings: the profile, then --config, then options,
    then --set.
    """
    from workbench.experiments.settings import sweep_config
    from workbench.experiments.study import run_sweep

    settings: dict[str, Any] = {}
    if config:
        try:
            settings = dict(json.loads(Path(config).read_text(encoding="utf-8")).items())
        except (OSError, ValueError) as problem:
            raise ConfigError(f"{config} cannot be read as JSON settings: {problem}.") from problem
        except AttributeError as problem:
            holds = f'{config} holds no object of settings, e.g. {{"n": 16}}.'
            raise ConfigError(holds) from problem
    lists = {"shares": options.numbers(own.shares, float), "seeds": options.numbers(own.seeds, int)}
    given = (asdict(own) | lists).items()
    settings |= {name: value for name, value in given if value is not None}
    settings |= options.key_values(more, "--set")
    wanted = sweep_config(settings.pop("profile", profile), **settings)
    if dry_run:
        _print_preview(wanted, runs, retry_failed)
        return
    found = run_sweep(wanted, runs, retry_failed=retry_failed)
    shown = found.runs[[name for name in SWEEP_COLUMNS if name in found.runs]]
    _print_frame(shown.rename(columns=lambda name: name.replace("_", " ")))
    if _print_problems(found.all_runs):
        raise Exit(options.FAILED)


def _print_preview(config: SweepConfig, runs: str | None, retry: bool) -> None:
    """The dry run of a sweep: its runs, the shares that fit, the expected time."""
    from workbench.config import format_size
    from workbench.experiments.study import preview

    found, console = preview(config, runs, retry_failed=retry), terminal()
    lines = []
    for row in found.runs.to_dict("records"):
        lacks = row["lacks_bytes"]
        status = f"lacks {format_size(lacks)}" if lacks else row["status"]
        blocks = f"{row['llm_blocks']:,}", f"{row['prm_blocks']:,}"
        split = row["name"], f"{row['llm_share']:g}", str(row["seed"])
        lines.append((*split, *blocks, status, f"{row['expected_s'] / 60:.1f}"))
    headings = ("run", "llm_share", "seed", "LLM blocks", "PRM blocks", "status", "minutes")
    console.print(options.table(headings, lines))
    console.print(f"{found.feasible}.\n{found}")


def _print_problems(runs: pd.DataFrame) -> bool:
    """A line for each run that failed, does not fit or cannot be read, then remarks on the rest;
    returns whether any run failed.
    """
    from workbench.experiments import runs as stored_runs
    from workbench.experiments.study import remarks, unfinished

    console, bad = terminal(), unfinished(runs).to_dict("records")
    for row in bad:
        reason = row["error"] if isinstance(row["error"], str) else "no reason was kept"
        console.print(f"{row['status']}: {row['run_id']}: {reason}", style="yellow", markup=False)
    for remark in remarks(runs):
        console.print(remark, style="yellow")
    return any(row["status"] == stored_runs.FAILED for row in bad)


# -- stored runs: nothing here loads torch --

Run = Annotated[str, Argument(help="run folder, its name, or the start of its fingerprint")]
Status = Literal["finished", "failed", "infeasible", "unreadable"]


def list_runs(
    status: Annotated[Status | None, Option(help="only these")] = None,
    runs: Runs = None,
) -> None:
    """Print one line for each stored run."""
    from workbench.experiments.runs import load_runs

    found = load_runs(_store(runs).folders())
    if status:
        found = found[found["status"] == status]
    if len(found):
        _print_frame(found[[name for name in RUN_COLUMNS if name in found]])
    else:
        hint = "`workbench sweep --profile quick` makes some."
        terminal().print(f"No runs are stored here yet; {hint}")


def show(run: Run, runs: Runs = None) -> None:
    """Print everything about one run."""
    from workbench.experiments.runs import read_run

    row = read_run(find_run(run, _store(runs)))
    cells = [(name, _cell(row[name])) for name in row]
    terminal().print(options.table(("column", "value"), cells, fold=True))


def compare(a: Run, b: Run, runs: Runs = None) -> None:
    """Print what differs between two runs.

    Or between two folders of runs: b - a, with 95 % intervals.
    """
    from workbench.experiments import runs as stored_runs

    console, store = terminal(), _store(runs)
    found = stored_runs.compare(find_run(a, store), find_run(b, store))
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow")
    for frame in (found.parameters, found.differences):
        if len(frame):
            _print_frame(frame)
            console.print()
    same = "identical" if found.identical else f"different; first: {found.first_difference}"
    console.print(f"tokens and scores: {same}")


def export(
    archive: Annotated[str, Argument(help="file to write: .tar, .tar.gz, .tgz or .zip")],
    run: Annotated[list[str] | None, Argument(help="runs to take; all if none is named")] = None,
    runs: Runs = None,
) -> None:
    """Write runs into one archive."""
    from workbench.experiments.runs import export_runs

    store = _store(runs)
    names = export_runs([find_run(name, store) for name in run or ()] or store.folders(), archive)
    terminal().print(f"{len(names)} runs written to {archive}")


def import_runs(
    archive: Annotated[str, Argument(help="file that `workbench runs export` wrote")],
    runs: Runs = None,
) -> None:
    """Check an archive and store its runs."""
    from workbench.experiments import runs as store

    new, there = store.import_runs(archive, _store(runs).root)
    terminal().print(f"{len(new)} runs stored, {len(there)} were there already")


STORED: dict[str, options.Verb] = {"list": list_runs}
STORED |= {verb.__name__: verb for verb in (show, compare, export)} | {"import": import_runs}


def _store(runs: str | None) -> RunStore:
    from workbench.experiments.provenance import runs_folder
    from workbench.experiments.runs import RunStore

    return RunStore(Path(runs) if runs else runs_folder())


def find_run(name: str, store: RunStore) -> Path:
    """A run by its folder, its name, or the beginning of its name or fingerprint."""
    if Path(name).is_dir():
        return Path(name)
    folders = store.folders()
    found = [f for f in folders if f.name == name] or [
        f for f in folders if f.name.startswith(name) or f.name.rsplit("-", 1)[1].startswith(name)
    ]
    if len(found) == 1:
        return found[0]
    hint = nearest(name, [f.name for f in folders])
    many = f" {len(found)} runs begin so: {', '.join(f.name for f in found)}." if found else hint
    raise RunStoreError(f"No single run is called {name!r}.{many} See `workbench runs list`.")


def _print_frame(frame: pd.DataFrame) -> None:
    rows = ([_cell(value) for value in row] for row in frame.astype(object).to_numpy())
    terminal().print(options.table(list(map(str, frame)), rows))


def _cell(value: Any) -> str:
    import pandas as pd

    if value is None or (pd.api.types.is_scalar(value) and pd.isna(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
