"""`workbench figures`, `sweep` and `runs`: the study, its measurements, and what is stored."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Exit, Option

from workbench.cli import options
from workbench.cli.options import DryRun, Profile, RetryFailed, Runs, Set, Stale, table, terminal
from workbench.config import SweepConfig, format_size, require_known
from workbench.errors import ConfigError, RunStoreError, nearest

if TYPE_CHECKING:
    import pandas as pd

    from workbench.experiments.backends import Backend
    from workbench.experiments.runs import RunStore
    from workbench.experiments.study import Preview, Study

SWEEP_COLUMNS = ("llm_share", "seed", "tokens_per_s", "problems_per_min", "accuracy",
                 "llm_kv_tokens", "prm_kv_tokens", "llm_hit_rate", "prm_hit_rate", "llm_preempted",
                 "prm_evicted", "joules_per_token")  # fmt: skip
RUN_COLUMNS = ("run_id", "status", "llm_share", "seed", "num_problems", "tokens_per_s", "accuracy",
               "written_at")  # fmt: skip
BATCHING, ABLATION, OPTIMISATION = "04_batching", "07_modifications", "08_optimisation"
COMPARED, MISSING, SPLIT = "11_strategies", "09_missing_values", "02_memory_split"
ON_RUNGS = (SPLIT, "03_block_occupancy", "05_prefix_cache", "06_cache_thrashing")
"""Notebooks that draw the same replayed rungs beside the sweep."""
OF_SWEEP = {*ON_RUNGS, BATCHING}
"""Notebooks that read the sweep; others build or run themselves what they draw."""
MEASURING = (*OF_SWEEP, ABLATION, OPTIMISATION, COMPARED)
"""Notebooks of measured searches."""
OPTIONS = {"profile": "--profile NAME", "runs_dir": "--runs DIR", "stale_ok": "--stale ok",
           "retry_failed": "--retry-failed"}  # fmt: skip
"""Parameters of notebooks that the command has options for, since its own sweep needs them, too."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What `figures` is asked for: parameters of each notebook, settings of each that measures;
    where runs are, and which of those there are taken (`how`, of run_study).
    """

    profile: str
    given: Mapping[str, Mapping[str, Any]]
    configs: Mapping[str, SweepConfig]
    runs: str | None
    how: Mapping[str, Any]


def figures(
    names: list[str] = Argument(
        None, help="notebooks (02 or 02_memory_split); with --replot figures; all if none"
    ),
    profile: Profile = "default",
    replot: bool = Option(False, "--replot", help="redraw figures from stored rows; runs nothing"),
    retry_failed: RetryFailed = False,
    stale: Stale = None,
    dry_run: DryRun = False,
    backend: options.On = "here",
    workers: options.Workers = None,
    parameter: list[str] = Option(
        None, "--parameter", "-p", metavar="NAME=VALUE", help="of the notebooks (repeatable)"
    ),
    out: str = Option(None, help="folder of notebooks (default: reports/notebooks/PROFILE)"),
    runs: Runs = None,
) -> None:
    """Run what is missing, draw all figures, report."""
    from workbench.experiments import notebooks
    from workbench.experiments.backends import HERE, PROCESSES, Backend
    from workbench.experiments.plans import sweep_config
    from workbench.host import usable_cores

    parameters = options.key_values(parameter, "-p")
    if folder := parameters.get("figures_folder"):  # `2024` is a name, too
        parameters["figures_folder"] = str(folder)
    if replot:
        if dry_run or retry_failed or stale or out or runs:
            raise ConfigError("figures --replot runs nothing: it takes names, --profile and -p.")
        redraw(names, profile, parameters)
        return
    on = Backend(backend, workers or (usable_cores() if backend == HERE else None))
    for name in parameters.keys() & OPTIONS.keys():
        raise ConfigError(f"figures takes {name} as {OPTIONS[name]}, not as -p {name}=...")
    known = notebooks.parameters_of(notebooks.notebook_files(names or None), parameters)
    how: dict[str, Any] = {"retry_failed": retry_failed, "stale_ok": bool(stale)}
    given = {
        file.stem: {name: parameters.get(name, value) for name, value in own.items()}
        for file, own in known.items()
    }
    configs = {stem: config_of(stem, profile, given[stem]) for stem in given if stem in MEASURING}
    reads = [configs[stem] for stem in given if stem in OF_SWEEP]
    config = reads[0] if reads else sweep_config(profile)
    asked = Asked(config.profile, given, configs, runs, how)
    _plans(asked)  # what one does not allow is refused before the first run
    _missing(asked)
    if dry_run:
        _print_left(asked, config, on.workers or (usable_cores() if on.name == PROCESSES else 1))
        return
    own = {name for each in known.values() for name in each}
    more = how | {"runs_dir": runs and str(Path(runs).resolve())}
    passed = parameters | {k: v for k, v in more.items() if v and k in own}
    # first the sweep, so that its progress is seen here; the notebooks then find its runs
    sweep = _sweep(config, runs, how, on) if reads else None
    if sweep is not None and sweep.runs.empty:
        reasons = "; ".join(sweep.all_runs["error"].dropna().astype(str).unique())
        text = f"No run of the sweep finished: {reasons}. There is nothing to draw."
        if (sweep.all_runs["status"] != "failed").all():
            raise RunStoreError(text)
        terminal().print(text, style="red", markup=False)
        raise Exit(options.FAILED)
    began = time.time()
    problems = sweep is not None and _print_problems(sweep.all_runs)
    executed = notebooks.run_notebooks(
        names or None, profile, passed, out, environment=on.environment
    )
    for line in _failed(replace(asked, how=how | {"retry_failed": False})):
        terminal().print(line, style="yellow", markup=False)
        problems = True
    if "figures_folder" in own:
        report(home_of(profile, parameters, began), executed)
    if problems:
        terminal().print("`workbench figures --retry-failed` repeats what failed.", style="yellow")
        raise Exit(options.FAILED)


def _failed(asked: Asked) -> Iterator[str]:
    """A line for each run beside the sweep's that failed, and each study with failed replays."""
    for stem, found in _previews(asked):
        for name in found.runs.loc[found.runs["status"] == "failed", "name"]:
            yield f"failed: {stem}: {name}"
    for stem, *_, failed in _replays_left(asked):
        if failed:
            yield f"{failed}{stem}"


def redraw(names: list[str] | None, profile: str, parameters: dict[str, Any]) -> None:
    """Figures from their stored rows: those of the profile, or of the parameter figures_folder, and
    with PDFs of the parameter width_mm.
    """
    from workbench.experiments.export import replot
    from workbench.experiments.provenance import project_root
    from workbench.experiments.report import write_report
    from workbench.experiments.study import profile_figures
    from workbench.plots import FIGURES

    require_known(parameters, ["figures_folder", "width_mm"], "figures --replot", "parameter")
    folder = project_root() / (parameters.pop("figures_folder", None) or profile_figures(profile))
    for each in replot(folder, FIGURES, names or None, **parameters):
        terminal().print(repr(each))
    terminal().print(f"report: {write_report(folder)}")


def config_of(stem: str, profile: str, given: Mapping[str, Any]) -> SweepConfig:
    """The settings of what a notebook measures; given: its parameters, None: the profile's own.
    ConfigError for a strategy that asks no PRM, where a split between both is studied.
    """
    from workbench.experiments.plans import VOTE_ONLY, sweep_config

    names = {field.name for field in fields(SweepConfig)} - {"profile"}
    own = {name: value for name, value in given.items() if name in names}
    if own.get("strategy") in VOTE_ONLY:
        raise ConfigError(
            f"strategy is {own['strategy']!r}, which asks no PRM, so there is no split to study; "
            "give another, or look at notebook 11."
        )
    if stem == COMPARED:  # whose plan says how many problems each number of beams has
        own["num_problems"] = None
    return sweep_config(profile, **own)


def _plans(asked: Asked) -> dict[str, Any]:
    """The plans of those notebooks that have one; ConfigError for what it does not allow."""
    from workbench.experiments import plans

    kinds = {BATCHING: plans.BatchPlan, ABLATION: plans.AblationPlan,
             COMPARED: plans.StrategyPlan, OPTIMISATION: plans.PolicyPlan}  # fmt: skip
    return {stem: plans.plan_of(kind, asked.profile, asked.given[stem])
            for stem, kind in kinds.items() if stem in asked.given}  # fmt: skip


def _missing(asked: Asked) -> list[float]:
    """Rough seconds of each replay of missing values; ConfigError for what cannot be asked."""
    from workbench.experiments.sensitivity import Base

    if (own := asked.given.get(MISSING)) is None:
        return []
    base = Base.of(own["asked"], own["rounds"], own["replays"])
    return base.replays_left(asked.profile, own["values"])


def _print_left(asked: Asked, config: SweepConfig, workers: int) -> None:
    """What `figures` would run and replay, for the sweep, for each notebook with runs of its own,
    and for what is replayed. config: of the sweep, as given; workers: those that replay.
    """
    if config.profile == "thesis":
        from workbench.experiments.sensitivity import of_the_thesis

        for line in of_the_thesis(config):
            terminal().print(line, markup=False)
    own = _planned(*asked.configs.values())
    asked = replace(asked, configs=dict(zip(asked.configs, own)))
    reads, left = dict[SweepConfig, list[str]](), []
    for stem, each in asked.configs.items():
        if stem in OF_SWEEP:
            reads.setdefault(each, []).append(stem[:2])
    for each, numbers in reads.items():
        if len(reads) > 1:
            terminal().print(f"The sweep of {', '.join(numbers)}:")
        left.append(_print_preview(each, asked.runs, asked.how))
    for stem, found in _previews(asked):
        left.append(found)
        terminal().print(f"{stem}: {found}")
    counts = [(each.num_to_run, float(each.runs["expected_s"].sum())) for each in left]
    for name, total, count, seconds, _ in _replays_left(asked):
        seconds /= min(workers, max(1, count))
        counts.append((count, seconds))
        text = f"{count} of {total} replays to do, about {_time(seconds)} (rough)"
        text = text if total else "nothing to replay, the committed rows are drawn again"
        terminal().print(f"{name}: {text}.")
    if len(counts) > 1:
        number, seconds = map(sum, zip(*counts))
        told = f"Together: {number} runs and replays to do, about {_time(seconds)}"
        terminal().print(f"{told}, and some minutes to draw.")


def _previews(asked: Asked) -> Iterator[tuple[str, Preview]]:
    """The measured runs beside the sweep's, by the notebook that draws them."""
    from workbench.experiments import plans, study
    from workbench.experiments.settings import RECORDED

    given, runs, how = asked.given, asked.runs, asked.how
    policies = partial(study.policies_planned, runs_dir=runs, stale_ok=how["stale_ok"])
    runs_of: dict[str, Any] = {BATCHING: plans.batch_runs, ABLATION: plans.ablation_runs,
                               COMPARED: plans.strategy_runs, OPTIMISATION: policies}  # fmt: skip
    same = [stem for stem in ON_RUNGS if stem in given]
    if same and asked.profile == "full" and RECORDED in dict(_rungs("full", given[same[0]])):
        few = plans.recorded_config("full", shares=study.COMPARED_SHARES)
        name = f"measured SmolLM2 ({', '.join(stem[:2] for stem in same)})"
        yield name, study.preview(few, runs, **how)
    for stem, plan in _plans(asked).items():
        config = asked.configs[stem]
        yield stem, study.preview(config, runs, specs=runs_of[stem](config, plan), **how)


def _time(seconds: float) -> str:
    """Minutes, or hours where these are many."""
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _sizes(given: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """What a notebook is given of the sizes of a search, and more; None where nothing."""
    names = "strategy", "num_problems", "n", "max_depth"
    return {name: given.get(name) for name in (*names, *more)}


def _rungs(profile: str, given: Mapping[str, Any]) -> Iterator[tuple[str, SweepConfig]]:
    """What the sweep's notebooks replay beside it."""
    from workbench.experiments.study import rung_configs

    for rung, config in rung_configs(profile, **_sizes(given, "shares")).items():
        if not isinstance(config, str):
            yield rung, config


def _replays_left(asked: Asked) -> Iterator[tuple[str, int, int, float, str]]:
    """What the notebooks replay: a name, how many replays it is, how many of them are not stored,
    the rough seconds of these, and the names of those that failed.
    """
    from workbench.experiments import plans, study
    from workbench.experiments.batching import run_batches_replayed
    from workbench.experiments.sensitivity import replay_seconds
    from workbench.experiments.settings import RECORDED, REPLAYED

    profile, given, planned = asked.profile, asked.given, _plans(asked)

    def far(stem: str, rung: Any = plans.replayed_config, **more: Any) -> SweepConfig:
        """The thesis's pair with the sizes that a notebook is given."""
        return rung(profile, **_sizes(given[stem]) | more)

    def left(
        bear: Mapping[str, Any], replay: Callable[..., Study], *what: Any, each: int = 0
    ) -> tuple[int, int, float, str]:
        """bear: what is given that bears on it; each: problems of one replay, where they are not
        the study's.
        """
        if study.committed(profile, *bear.values()):
            return 0, 0, 0.0, ""
        found = replay(*what, asked.runs, compute=False, stale_ok=asked.how["stale_ok"])
        count, one = len(found.missing), found.config
        seconds = count * replay_seconds(each or one.num_problems, one.n, one.max_depth)
        return count + len(found.folders), count, seconds, found.failures

    if same := [stem for stem in ON_RUNGS if stem in given]:
        notebooks = ", ".join(stem[:2] for stem in same)
        at = given.get("03_block_occupancy", {})
        moved = (at.get("lower_share", 0.3), at.get("upper_share", 0.5)) != (0.3, 0.5)
        bear = _sizes(given[same[0]], "shares") | {"moved": moved or None}  # from what is committed
        for rung, config in _rungs(profile, given[same[0]]):
            surer = plans.SURER.get(profile) if rung == REPLAYED and SPLIT in given else None
            replay = partial(study.run_replayed, surer=surer)
            yield f"{rung} ({notebooks})", *left(bear, replay, config)
    if SPLIT in given:
        names = ("prm", "total_memory", "shares", "num_problems")
        writing = {name: given[SPLIT][f"writing_{name}"] for name in names}
        writing["strategy"] = None  # the notebook's is of the other pairs alone
        bear = _sizes(given[SPLIT]) | writing
        for name, more in (("a PRM that scores", {}), ("a PRM that writes", plans.WRITES)):
            config = far(SPLIT, plans.writing_config, **writing, **more)
            found = left(bear, study.run_replayed, config)
            yield f"replayed, {name} ({SPLIT[:2]})", *found
    if BATCHING in given:
        grid = plans.changed(plans.REPLAYED_GRID, given[BATCHING])
        bear = _sizes(given[BATCHING], *(name for name in asdict(grid) if name != "num_seeds"))
        what: tuple[Any, ...] = run_batches_replayed, far(BATCHING), grid
        yield f"{REPLAYED} ({BATCHING[:2]})", *left(bear, *what, each=grid.batch_problems)
    recorded = plans.recorded_config(profile, min_problem_batch=4)
    ablated = {RECORDED: recorded, REPLAYED: far(ABLATION)} if ABLATION in given else {}
    for rung, config in ablated.items():
        bear = _sizes(given[ABLATION], "ablation_share")
        plan = plans.replayed_ablation(config, planned[ABLATION])
        found = left(bear, study.run_ablation_replayed, config, plan)
        yield f"{rung} ({ABLATION[:2]})", *found
    if OPTIMISATION in given:
        config = far(OPTIMISATION)
        policies = plans.replayed_policies(config, planned[OPTIMISATION])
        what = study.run_policies_replayed, config, policies
        bear = _sizes(given[OPTIMISATION], "budgets", "kv_shares")
        yield f"{REPLAYED} ({OPTIMISATION[:2]})", *left(bear, *what)
    if MISSING in given:
        todo = _missing(asked)
        yield MISSING, len(todo), len(todo), sum(todo), ""


def home_of(profile: str, parameters: Mapping[str, Any], since: float) -> Path:
    """Where notebooks drew what is given, in seconds since the epoch since they began; else the
    profile's folder. A folder that is given counts from the project.
    """
    from workbench.experiments.provenance import project_root
    from workbench.experiments.study import profile_figures

    if folder := parameters.get("figures_folder"):
        return project_root() / folder
    usual, changed = map(profile_figures, (profile, f"{profile}-changed"))

    def drawn(place: Path) -> float:
        return max((file.stat().st_mtime for file in place.glob("*.parquet")), default=0.0)

    return changed if parameters and drawn(changed) >= since else usual


def report(folder: Path, executed: list[Path]) -> None:
    """Write the notebooks' pages and the folder's report; print what readers of it must know."""
    from workbench.experiments.claims import against
    from workbench.experiments.notebooks import write_page
    from workbench.experiments.provenance import committed_figures
    from workbench.experiments.report import write_report

    for notebook in executed:
        write_page(notebook)
    terminal().print(f"figures: {folder}\nreport:  {write_report(folder)}")
    with committed_figures() as committed:
        for line in against(folder, committed):
            terminal().print(line, markup=False)


def _sweep(config: SweepConfig, runs: str | None, how: Mapping[str, Any], on: Backend) -> Study:
    from workbench.experiments.study import preview, run_sweep

    if (found := preview(config, runs, **how)).num_to_run:
        terminal().print(str(found))
    return run_sweep(config, runs, **how, backend=on)


OfProfile = Annotated[dict[str, Any], options.options_of(SweepConfig, {
    "shares": "the LLM's shares of total memory",
    "seeds": "one run a share and seed",
    "num_problems": "problems of a run",
    "total_memory": "of both models together, e.g. 64MiB",
    "policy": "how both models share one memory (default: each has its own)",
}, defaults=False)]  # fmt: skip


def sweep(
    settings: OfProfile,
    profile: Profile = "default",
    config: str = Option(None, metavar="FILE", help="JSON file of settings, over the profile's"),
    more: Set = None,
    retry_failed: RetryFailed = False,
    stale: Stale = None,
    dry_run: DryRun = False,
    backend: options.On = "here",
    workers: options.Workers = None,
    runs: Runs = None,
) -> None:
    """Measure the memory split over its shares.

    Finished runs are kept and not repeated. Settings: the profile, then --config, then options,
    then --set.
    """
    from workbench.experiments.backends import Backend
    from workbench.experiments.plans import sweep_config

    given: Any = {"profile": profile}
    if config:
        try:
            stored = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            raise ConfigError(f"{config} cannot be read as JSON settings: {problem}.") from problem
        if not isinstance(stored, dict):
            raise ConfigError(f'{config} holds no object of settings, e.g. {{"n": 16}}.')
        if (own := stored.get("profile", profile)) != profile != "default":
            raise ConfigError(f"--profile is {profile}, {config} has {own}: leave one of them out.")
        given |= stored
    own = options.key_values(more, "--set")
    for name in own.keys() & {*settings, "profile"}:
        raise ConfigError(f"--set {name} and --{name.replace('_', '-')} are one: give either.")
    given |= settings | own
    none = {name: None for name in given.keys() - settings.keys() if given[name] is None}
    wanted = SweepConfig.from_dict(sweep_config(**given).to_dict() | none)
    how: dict[str, Any] = {"retry_failed": retry_failed, "stale_ok": bool(stale)}
    if dry_run:
        (planned,) = _planned(wanted)
        _print_preview(planned, runs, how)
        return
    found = _sweep(wanted, runs, how, Backend(backend, workers))
    shown = found.runs.filter(items=SWEEP_COLUMNS)
    _print_frame(shown.rename(columns=lambda name: name.replace("_", " ")))
    if _print_problems(found.all_runs):
        raise Exit(options.FAILED)


def _planned(*configs: SweepConfig) -> list[SweepConfig]:
    """For a dry run: models whose weights are not here are planned by their shapes, which is told,
    and not fetched.
    """
    from workbench.models.registry import DUMMY, is_here

    names = dict.fromkeys(name for each in configs for name in (each.llm, each.prm))
    plan_by = {name: name for name in names}
    for name in names:
        if not name.startswith(DUMMY) and not is_here(name):
            plan_by[name] = f"{DUMMY}{name}"
            told = f"{name} is not on this disk yet, and planned by its shapes."
            terminal().print(told, markup=False)
    return [replace(each, llm=plan_by[each.llm], prm=plan_by[each.prm]) for each in configs]


def _print_preview(config: SweepConfig, runs: str | None, how: Mapping[str, Any]) -> Preview:
    """The dry run of a sweep: its runs, the shares that fit, the expected time."""
    from workbench.experiments.study import preview

    found = preview(config, runs, **how)
    rows = found.runs.assign(minutes=(found.runs["expected_s"] / 60).round(1))
    pairs = zip(rows["lacks_bytes"], rows["status"])
    rows["status"] = [f"lacks {format_size(n)}" if n else status for n, status in pairs]
    columns = ["name", "llm_share", "seed", "llm_blocks", "prm_blocks", "status", "minutes"]
    _print_frame(rows[columns])
    terminal().print(f"{found.feasible}.\n{found}")
    return found


def _print_problems(runs: pd.DataFrame) -> bool:
    """A line for each run that failed, does not fit or cannot be read, then remarks on the rest;
    returns whether any run failed.
    """
    from workbench.experiments.runs import FAILED, FINISHED
    from workbench.experiments.study import remarks

    console, bad = terminal(), runs[runs["status"] != FINISHED].to_dict("records")
    for row in bad:
        reason = row["error"] if isinstance(row["error"], str) else "no reason was kept"
        console.print(f"{row['status']}: {row['run_id']}: {reason}", style="yellow", markup=False)
    for remark in remarks(runs):
        console.print(remark, style="yellow")
    return any(row["status"] == FAILED for row in bad)


# -- stored runs: nothing here loads torch --

Run = Annotated[str, Argument(help="run folder, its name, or the start of its fingerprint")]
Status = Literal["finished", "failed", "infeasible", "unreadable"]


def list_runs(
    status: Annotated[Status | None, Option(help="only these")] = None, runs: Runs = None
) -> None:
    """Print one line for each stored run."""
    from workbench.experiments.runs import load_runs, of_other_code

    found = load_runs(_store(runs).folders())
    if found.empty:
        terminal().print("No runs are stored here; `workbench sweep --profile quick` makes some.")
        return
    if status and (found := found[found["status"] == status]).empty:
        terminal().print(f"No stored run is {status}.")
        return
    found.loc[of_other_code(found) & (found["status"] != "unreadable"), "status"] += ", other code"
    _print_frame(found.filter(items=RUN_COLUMNS))


def show(run: Run, runs: Runs = None) -> None:
    """Print everything about one run."""
    from workbench.experiments.runs import read_run

    row = read_run(find_run(run, _store(runs)))
    terminal().print(table(("column", "value"), row.items(), texts=True))


def compare(a: Run, b: Run, runs: Runs = None) -> None:
    """Print what differs between two runs.

    Or between two folders of runs: B minus A, with 95 % intervals; those of rates hold the
    machine's noise. Counts are exact; accuracy is given for each level.
    """
    from workbench.experiments import runs as stored_runs

    console, store = terminal(), _store(runs)
    found = stored_runs.compare(find_run(a, store), find_run(b, store))
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    for frame in found.tables:
        _print_frame(frame)
        console.print()
    console.print("\n".join(found.findings), markup=False)


def export(
    archive: Annotated[str, Argument(help="file to write: .tar, .tar.gz or .tgz")],
    run: Annotated[list[str] | None, Argument(help="runs to take; all if none is named")] = None,
    runs: Runs = None,
    light: Annotated[
        bool, Option("--light", help="without steps, requests, nodes and spans")
    ] = False,
) -> None:
    """Write runs into one archive."""
    from workbench.experiments.runs import export_runs

    store = _store(runs)
    chosen = [find_run(name, store) for name in run or ()] or store.folders()
    names = export_runs(chosen, archive, light)
    terminal().print(f"{len(names)} runs written to {archive}")


def import_runs(
    archive: Annotated[str, Argument(help="file that `workbench runs export` wrote")],
    runs: Runs = None,
) -> None:
    """Check an archive and store its runs."""
    from workbench.experiments import runs as store

    new, there = store.import_runs(archive, _store(runs).root)
    terminal().print(f"{len(new)} runs stored, {len(there)} were there already")


def _store(runs: str | None) -> RunStore:
    from workbench.experiments.provenance import runs_folder
    from workbench.experiments.runs import RunStore

    return RunStore(Path(runs) if runs else runs_folder())


def find_run(name: str, store: RunStore) -> Path:
    """A run by its folder, its name, or the beginning of its name or fingerprint."""
    if Path(name).is_dir():
        return Path(name)
    folders = store.folders()
    begins = (f for f in folders if f.name.startswith(name) or f.name[-12:].startswith(name))
    found = [f for f in folders if f.name == name] or [*begins]
    if len(found) == 1:
        return found[0]
    hint = nearest(name, [f.name for f in folders])
    many = f" {len(found)} runs begin so: {', '.join(f.name for f in found)}." if found else hint
    raise RunStoreError(f"No single run is called {name!r}.{many} See `workbench runs list`.")


def _print_frame(frame: pd.DataFrame) -> None:
    terminal().print(table(list(map(str, frame)), frame.astype(object).to_numpy()))
