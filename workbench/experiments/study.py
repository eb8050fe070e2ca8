"""A study: a list of runs, carried out where they are not stored yet, and all of them as tables.

Finished runs are found by fingerprint and not repeated, so the first notebook pays and the others
read. Interrupted at any moment a study resumes. A run that fails becomes a row and the rest go on.
Importing this loads no torch: the code that runs models is imported when the first run starts.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from tqdm.auto import tqdm

from workbench.config import SweepConfig, format_size
from workbench.errors import OutOfMemory, RunStoreError
from workbench.experiments.execute import (
    DEVICE,
    NOTHING_WAS_RUN,
    Cells,
    Execute,
    Outcome,
    Replays,
    Searches,
    one_by_one,
    replay_identity,
)
from workbench.experiments.export import SavedFigure, save_figure
from workbench.experiments.memory import Feasibility, FeasibleShares, feasibility, shares_of
from workbench.experiments.provenance import (
    counted,
    describe,
    git_state,
    machine_facts,
    project_root,
    runs_folder,
)
from workbench.experiments.runs import (
    FAILED,
    FINISHED,
    INFEASIBLE,
    RunResult,
    RunStore,
    identify,
    load_runs,
    load_table,
    run_config,
    run_tables,
    status_of,
)
from workbench.experiments.settings import (
    ABLATION,
    COST,
    COUNTED,
    MEASURE,
    NONE,
    REFERENCE,
    REPLAY,
    SECONDS_PER_PROBLEM,
    TIGHT,
    TIMED,
    AblationPlan,
    BatchPlan,
    Identity,
    Plan,
    PolicyPlan,
    RunSpec,
    WorkingSet,
    ablation_runs,
    batch_runs,
    plan_of,
    policy_runs,
    reference_runs,
    split_runs,
    sweep_config,
)
from workbench.experiments.statistics import Noise, Tables, noise_of, sentinel_drift
from workbench.replay.devices import Device, load_device

TO_RUN = "to run"
PROBLEMS_PER_CELL = {TIMED: 0.45, COUNTED: 0.06}
"""Roughly what a cell takes of the time of searching its problems; measured on the tiny pair."""
DRIFT_WORTH_A_WORD = 0.1
MAIN = (MEASURE, REPLAY, TIMED, ABLATION, TIGHT)
"""Roles of the runs that a study is about; the others stand beside them."""


@dataclass(frozen=True)
class Study:
    """The stored runs of one study, read once. `missing` names those that are not stored."""

    config: SweepConfig
    folders: tuple[Path, ...]
    missing: tuple[str, ...] = ()
    plan: Plan | None = None
    order: tuple[str, ...] = field(default=(), repr=False)  # of the settings
    _read: dict[Any, pd.DataFrame] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def all_runs(self) -> pd.DataFrame:
        """One row a run: those beside the study's own, failed and infeasible ones too."""
        return load_runs(self.folders)

    @cached_property
    def runs(self) -> pd.DataFrame:
        """The finished runs that the study is about, repetitions left out (of cells kept).

        By share and seed in a sweep, else in the study's own order. RunStoreError where another
        study than a sweep has none.
        """
        every = wanted = self.all_runs
        if len(every):
            once = (every["repeat"] == 0) | (every["role"] == TIMED)
            wanted = every[(every["status"] == FINISHED) & every["role"].isin(MAIN) & once]
        if wanted.empty and self.plan is not None:
            reasons = sorted(set(every["error"].dropna())) if len(every) else ["none is stored"]
            raise RunStoreError(f"No run of the study finished: {'; '.join(reasons)}.")
        if wanted.empty:
            return wanted
        runs = load_runs(list(wanted["folder"]))  # anew: beside failed runs, counts are floats
        if self.plan is None:
            return runs.sort_values(["llm_share", "seed"], ignore_index=True)
        place = {setting: number for number, setting in enumerate(self.order)}
        order = runs["setting"].map(place).fillna(len(place))
        return runs.assign(place=order).sort_values(["place", "seed"], ignore_index=True)

    @cached_property
    def noise(self) -> Noise:
        """What runs of equal work differ by."""
        return noise_of(self.all_runs)

    def having(self, **values: Any) -> pd.DataFrame:
        """The finished runs, of any role, with these values in their columns."""
        every = self.all_runs
        wanted = every["status"] == FINISHED
        for name, value in values.items():
            wanted &= every[name].isin(value) if isinstance(value, tuple) else every[name] == value
        return every[wanted]

    def has(self, setting: str) -> bool:
        """Whether every seed that the study's own runs have finished with this setting."""
        return set(self.having(setting=setting)["seed"]) >= set(self.runs["seed"])

    def table(
        self,
        name: str,
        llm_share: float | None = None,
        seed: int | None = None,
        runs: pd.DataFrame | None = None,
    ) -> pd.DataFrame:
        """Rows of one trace table of `runs` (default: the study's own), with columns llm_share,
        run_seed, setting, role and repeat.
        """
        runs = self.runs if runs is None else runs
        for column, value in (("llm_share", llm_share), ("seed", seed)):
            if value is not None and len(runs):
                runs = runs[(runs[column] - value).abs() < 1e-9]
        if runs.empty:
            raise RunStoreError(
                f"The study has no finished run at llm_share={llm_share}, seed={seed}; "
                f"it has shares {sorted(self.config.shares)} and seeds {sorted(self.config.seeds)}."
            )
        keys = ["run_id", "llm_share", "seed", "setting", "role", "repeat"]
        own = runs[[key for key in keys if key in runs]].rename(columns={"seed": "run_seed"})
        key = name, tuple(runs["folder"])
        if key not in self._read:
            self._read[key] = load_table(key[1], name)
        return self._read[key].merge(own, on="run_id", how="left")

    def __repr__(self) -> str:
        counts = f"{len(self.folders)} runs stored, {len(self.missing)} missing"
        return f"Study({self.config.profile}: {counts})"


# -- carrying out --


def run_study(
    config: SweepConfig,
    specs: Sequence[RunSpec],
    runs_dir: str | Path | None = None,
    *,
    plan: Plan | None = None,
    compute: bool = True,
    retry_failed: bool = False,
    progress: bool = True,
    execute: Execute | None = None,
    identity: Identity | None = None,
) -> Study:
    """Carry out every run that is not stored yet and return all of them.

    compute=False only looks; retry_failed repeats runs whose row says failed. execute: None is
    searches in this process, those of a group interleaved (execute.searches). identity: what runs
    of another kind depend on; None: both models' files and the problems' texts. Raises ConfigError,
    ModelError and ProblemFileError before the first run; whatever one run raises becomes its row.
    """
    store = RunStore(Path(runs_dir) if runs_dir is not None else runs_folder())
    known = _identities(specs, identity)
    prints = [spec.fingerprint(known(spec)) for spec in specs]
    if compute:
        store.clear_leftovers()
        todo = [s for s, p in zip(specs, prints) if not store.holds(p, retry_failed)]
        bar = tqdm(total=len(todo), desc="runs", unit="run", disable=not progress or not todo)
        with bar:
            for spec, tables in _carried_out(todo, known, execute):
                store.write(spec.name, run_config(spec, known(spec)), tables)
                bar.set_postfix_str(spec.name)
                bar.update()
    found = [store.find(fingerprint) for fingerprint in prints]
    return Study(
        config,
        tuple(folder for folder in found if folder is not None),
        tuple(spec.name for spec, folder in zip(specs, found) if folder is None),
        plan,
        tuple(dict.fromkeys(spec.setting for spec in specs)),
    )


def _identities(
    specs: Sequence[RunSpec], identity: Identity | None
) -> Callable[[RunSpec], Identity]:
    """The identity of each run; those of equal models and problems are found once."""
    key = attrgetter("llm", "prm", "problems", "num_problems", "levels", "problem_seed")
    configs = {} if identity else {key(spec.config): spec.config for spec in specs}
    found = {each: identify(config) for each, config in configs.items()}
    return lambda spec: identity or found[key(spec.config)]


def _carried_out(
    todo: Sequence[RunSpec], known: Callable[[RunSpec], Identity], execute: Execute | None
) -> Iterator[tuple[RunSpec, dict[str, pd.DataFrame]]]:
    """The tables of every run, whatever becomes of it, group by group."""
    possible = {spec: feasibility(spec) for spec in todo}
    for spec, fits in possible.items():
        if not fits.fits:
            yield spec, _tables(spec, known(spec), fits, OutOfMemory(str(fits)))
    groups: dict[Any, list[RunSpec]] = {}
    for spec in todo:
        if possible[spec].fits:
            groups.setdefault(spec.group, []).append(spec)
    carry_out = execute or Searches()
    for group in groups.values():
        for spec, outcome in carry_out(group):
            yield spec, _tables(spec, known(spec), possible[spec], outcome)


def _tables(
    spec: RunSpec, identity: Identity, possible: Feasibility, outcome: Outcome
) -> dict[str, pd.DataFrame]:
    notes: dict[str, Any] = dict(possible.columns)
    if isinstance(outcome, RunResult):
        return run_tables(spec, identity, FINISHED, result=outcome, notes=notes)
    if isinstance(outcome, OutOfMemory):
        return run_tables(spec, identity, INFEASIBLE, error=str(outcome), notes=notes)
    notes["traceback"] = "".join(traceback.format_exception(outcome))
    error = f"{type(outcome).__name__}: {outcome}"
    return run_tables(spec, identity, FAILED, error=error, notes=notes)


# -- the studies --


def run_sweep(config: SweepConfig, runs_dir: str | Path | None = None, **options: Any) -> Study:
    """The memory split. options: of run_study."""
    return run_study(config, split_runs(config), runs_dir, **options)


def run_batches(
    config: SweepConfig, plan: BatchPlan, runs_dir: str | Path | None = None, **options: Any
) -> Study:
    """Each model alone over its batch limits. options: of run_study."""
    given = {"execute": one_by_one(Cells(config))} | options
    return run_study(config, batch_runs(config, plan), runs_dir, plan=plan, **given)


def run_ablation(
    config: SweepConfig, plan: AblationPlan, runs_dir: str | Path | None = None, **options: Any
) -> Study:
    """The thesis's modifications, one after another. options: of run_study."""
    return run_study(config, ablation_runs(config, plan), runs_dir, plan=plan, **options)


def run_policies(
    config: SweepConfig, plan: PolicyPlan, runs_dir: str | Path | None = None, **options: Any
) -> Study:
    """Policies and techniques at budgets in multiples of the working set, which is measured first,
    with memory uncapped. options: of run_study. RunStoreError where no such search finishes.
    """
    first = reference_runs(config, plan)
    uncapped = run_study(config, first, runs_dir, plan=plan, **options)
    runs = [*first, *policy_runs(config, plan, working_set_of(uncapped.all_runs))]
    return run_study(config, runs, runs_dir, plan=plan, **options)


def working_set_of(runs: pd.DataFrame) -> WorkingSet:
    """Of the first seed's uncapped search; the longest sequence is that of all such searches."""
    done = runs[(runs["status"] == FINISHED) & (runs["role"] == REFERENCE)].sort_values("seed")
    done = done[done["technique"] == NONE]
    if done.empty:
        reasons = "; ".join(sorted(set(runs["error"].dropna().astype(str))))
        raise RunStoreError(f"No search with memory uncapped finished: {reasons}.")
    llm, prm = (int(done.iloc[0][f"{model}_active_bytes"]) for model in ("llm", "prm"))
    return WorkingSet(llm, prm, longest=int(done["longest"].max()))


def run_replayed(
    config: SweepConfig,
    runs_dir: str | Path | None = None,
    device: Device | str = DEVICE,
    **options: Any,
) -> Study:
    """The memory split of a search made of MATH-500's lengths, replayed on a device that is a table
    of numbers. options: of run_study.
    """
    found = load_device(device) if isinstance(device, str) else device
    specs = [
        RunSpec(config, share, seed, REPLAY) for seed in config.seeds for share in config.shares
    ]
    execute, identity = one_by_one(Replays(found)), replay_identity(found)
    return run_study(config, specs, runs_dir, execute=execute, identity=identity, **options)


# -- what a study would do, without doing it --


@dataclass(frozen=True, slots=True)
class Preview:
    """What is left to do. runs: one row a run, in order.

    Columns: name, role, llm_share, seed, status, llm_blocks, prm_blocks, lacks_bytes, expected_s (0
    where nothing is left to do).
    """

    runs: pd.DataFrame
    feasible: FeasibleShares
    measured_before: bool  # expected_s comes from this machine's own runs

    @property
    def num_to_run(self) -> int:
        """Runs that are still to be done."""
        return int((self.runs["status"] == TO_RUN).sum())

    def __str__(self) -> str:
        minutes = float(self.runs["expected_s"].sum() / 60)
        source = "from this machine's runs" if self.measured_before else "rough: none finished here"
        time = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} hours"
        return f"{self.num_to_run} of {len(self.runs)} runs to do, about {time} ({source})."


def preview(
    config: SweepConfig,
    runs_dir: str | Path | None = None,
    *,
    specs: Sequence[RunSpec] | None = None,
    retry_failed: bool = False,
) -> Preview:
    """Look at runs (default: the sweep's) before they run; bad settings raise as they would then.

    Reads configs and stored rows only. Minutes are no promise.
    """
    store = RunStore(Path(runs_dir) if runs_dir is not None else runs_folder())
    specs = split_runs(config) if specs is None else specs
    known, seconds = _identities(specs, None), seconds_per_problem(config, store)
    each = seconds or SECONDS_PER_PROBLEM.get(config.profile, 1.5)
    rows = []
    for spec in specs:
        possible = feasibility(spec)
        folder = store.find(spec.fingerprint(known(spec)))
        status = TO_RUN if folder is None else status_of(folder)
        again = status == "unreadable" or (status == FAILED and retry_failed)
        status = TO_RUN if again else status if possible.fits else INFEASIBLE
        cost = PROBLEMS_PER_CELL.get(spec.role) or COST.get(spec.setting, 1.0)
        rows.append(
            {
                "name": spec.name,
                "role": spec.role,
                "llm_share": spec.llm_share,
                "seed": spec.seed,
                "status": status,
                "llm_blocks": possible.blocks("llm"),
                "prm_blocks": possible.blocks("prm"),
                "lacks_bytes": sum(possible.columns.values()),
                "expected_s": each * cost * spec.config.num_problems * (status == TO_RUN),
            }
        )
    ends = shares_of(config, None if config.activations_in_total else (0, 0))
    return Preview(pd.DataFrame(rows), ends, seconds is not None)


def policies_planned(
    config: SweepConfig, plan: PolicyPlan, runs_dir: str | Path | None = None
) -> list[RunSpec]:
    """Runs of the study of policies. Before the working set is known, as if it were the arena's
    uncapped memory: as many runs, of other sizes.
    """
    first = reference_runs(config, plan)
    study = run_study(config, first, runs_dir, plan=plan, compute=False)
    if study.missing:
        size = int(first[0].get("kv_bytes")) // 2
        need = WorkingSet(size, size, longest=256)
    else:
        need = working_set_of(study.all_runs)
    return [*first, *policy_runs(config, plan, need)]


def seconds_per_problem(config: SweepConfig, store: RunStore) -> float | None:
    """Wall seconds a problem took in finished runs of this pair and n on this kind of machine."""
    runs = load_runs(store.root) if store.folders() else pd.DataFrame()
    if "wall_s" not in runs:  # cells of the batching study search nothing
        return None
    own = (runs["status"] == FINISHED) & runs["role"].isin((MEASURE, TIGHT))
    own &= (runs["llm"] == config.llm) & (runs["prm"] == config.prm) & (runs["n"] == config.n)
    runs = runs[own & (runs["machine_cpu"] == machine_facts()["cpu"]) & runs["wall_s"].notna()]
    return float((runs["wall_s"] / runs["num_problems"]).median()) if len(runs) else None


# -- what stands on a figure: models, rung, budget, sample, machine; read from the runs drawn --

RUNGS = (("tiny", "measured tiny"), ("smollm2", "measured SmolLM2"), ("dummy:", "dummy weights"))
CARRIES_OVER = "Counts carry over at equal ratios of need to room; seconds do not."


def provenance(runs: pd.DataFrame, seed: int | None = None, *notes: str) -> str:
    """Three lines about the runs drawn, and one with notes; several machines are all named.

    seed: the only one drawn, of those the runs have.
    """
    first = runs.iloc[0]
    budget = format_size(int(first["total_memory"]))
    outside = "" if first["activations_in_total"] else ", activations outside it"
    seeds = counted(runs["seed"].nunique(), "seed")
    drawn = seeds if seed is None or seeds == "1 seed" else f"seed {seed} of {seeds}"
    sample = f"{first['num_problems']} problems, {drawn}"
    search = f"n = {first['n']}, beam width {first['beam_width']}"
    profile, machine = (
        " and ".join(map(str, runs[name].drop_duplicates())) for name in ("profile", "machine")
    )
    models = (
        f"LLM {first['llm']}, PRM {first['prm']} ({rung(runs)}); total memory {budget}{outside}."
    )
    searched = f"Profile {profile}: {sample}, {search}; {machine}."
    return "\n".join([models, searched, *notes, CARRIES_OVER])


def provenance_of(study: Tables, seed: int | None = None) -> str:
    """Of a sweep's runs, with how many of its runs there are and how noisy the machine was."""
    note = f"{completeness(study)}; {noise_of(study.all_runs)}."
    return provenance(study.runs, seed, note)


def provenance_here(llm: str, prm: str, what: str) -> str:
    """Of what this process measures itself: `what` it was, with the models' names."""
    machine = describe(machine_facts())
    return f"LLM {llm}, PRM {prm} ({rung_of(llm)}); {what}; {machine}.\n{CARRIES_OVER}"


def provenance_replayed(study: Study) -> str:
    """Of the replayed rung."""
    *lines, _ = provenance(study.runs).splitlines()
    flight = f"{study.config.min_problem_batch} problems in flight"
    return "\n".join([*lines, f"{completeness(study)}; {flight}. {NOTHING_WAS_RUN}"])


def completeness(study: Any) -> str:
    """How many of a sweep's runs are drawn, and why the others are not."""
    planned = len(study.config.shares) * len(study.config.seeds)
    text = f"{len(study.runs)} of {planned} runs"
    bad = unfinished(study.all_runs)
    reasons = [f"{row['status']}: {row['name']}" for row in bad.to_dict("records")]
    return f"{text} ({', '.join(reasons)})" if reasons else text


def rung(runs: pd.DataFrame) -> str:
    """Which rung of the study the runs stand on: as they say, else by their LLM's name."""
    if "rung" in runs.columns and isinstance(runs["rung"].iloc[0], str):
        return str(runs["rung"].iloc[0])
    return rung_of(str(runs["llm"].iloc[0]))


def rung_of(llm: str) -> str:
    """The rung of one LLM."""
    return next((text for start, text in RUNGS if llm.startswith(start)), "measured")


def unfinished(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs that no figure draws: failed, infeasible or unreadable ones, each with its error."""
    return runs[runs["status"] != FINISHED] if len(runs) else runs


def remarks(runs: pd.DataFrame) -> Iterator[str]:
    """What a reader of these runs must know: mixed machines or versions, other code, drift."""
    done = runs[runs["status"] == FINISHED] if len(runs) else runs
    if done.empty:
        return
    for column in ("machine", "versions"):
        values = sorted(set(map(str, done[column])))
        if len(values) > 1:
            yield f"The runs differ in {column}: {' / '.join(values)}; seconds do not compare."
    here = git_state()["commit"]
    others = sorted({str(c)[:12] for c in done["git_commit"].dropna() if c != here})
    if here and others:
        yield (
            f"Stored runs were made at commit {', '.join(others)}, this is {here[:12]}; where code "
            "that matters to them has changed, measure again into another folder (--runs DIR)."
        )
    drift = sentinel_drift(runs)["relative"] - 1
    if len(drift) and drift.abs().max() > DRIFT_WORTH_A_WORD:
        yield (
            f"The sentinel drifted by {drift.min():+.0%} to {drift.max():+.0%} over {len(drift)} "
            "repetitions: the machine was not equally free all the time."
        )


# -- figures kept under their fixed names --


def figures_home(study: Any) -> Path:
    """Where figures of a study are kept: figures/ never mixes profiles or parameters.

    It holds the default profile as it stands; another has build/figures/PROFILE, and one with
    settings of its own build/figures/PROFILE-changed, which version control ignores.
    """
    profile = study.config.profile
    own = study.config == sweep_config(profile)
    own &= study.plan is None or study.plan == plan_of(type(study.plan), profile)
    return profile_figures(profile if own else f"{profile}-changed")


def profile_figures(name: str) -> Path:
    """The folder of a profile's figures."""
    if name == "default":
        return project_root() / "figures"
    return project_root() / "build" / "figures" / name


def keep_figure(
    fig: go.Figure,
    rows: pd.DataFrame,
    name: str,
    study: Any,
    folder: str | Path | None = None,
    *,
    beside: Any = None,
) -> SavedFigure:
    """Save a figure of the study in `folder` (default: its home, or that of the study `beside`)."""
    place = Path(folder) if folder else figures_home(study if beside is None else beside)
    first = {str(name): _plain(value) for name, value in study.runs.iloc[0].items()}
    measured = {
        about: {
            n.removeprefix(f"{about}_"): v for n, v in first.items() if n.startswith(about + "_")
        }
        for about in ("machine", "git")
    }
    measured["versions"] = json.loads(first["versions"])
    plan = {"plan": asdict(study.plan)} if study.plan is not None else {}
    return save_figure(fig, rows, name, place, study.config.to_dict() | plan, measured=measured)


def _plain(value: Any) -> Any:
    """A value JSON knows: numpy's scalars unpacked, missing ones None."""
    value = value.item() if hasattr(value, "item") else value
    return None if pd.isna(value) else value
