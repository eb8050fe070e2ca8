"""A study: a list of runs, carried out where they are not stored yet, and all of them as tables.

Finished runs are found by fingerprint and not repeated, so the first notebook pays and the others
read. Interrupted at any moment a study resumes. A run that fails becomes a row and the rest go on.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from tqdm.auto import tqdm

from workbench.config import SweepConfig, format_size
from workbench.errors import RunStoreError
from workbench.experiments import execute as carry_out
from workbench.experiments import plans, settings
from workbench.experiments import runs as stored
from workbench.experiments.backends import Backend
from workbench.experiments.export import SavedFigure, read_figure, save_figure
from workbench.experiments.memory import ENGINES, FeasibleShares, feasibility, shares_of
from workbench.experiments.plans import NONE, Plan
from workbench.experiments.provenance import (
    counted,
    describe,
    machine_facts,
    project_root,
    runs_folder,
)
from workbench.experiments.runs import FINISHED, RunStore, held, load_runs, of_other_code
from workbench.experiments.settings import COUNTED, MEASURE, TIGHT, TIMED, Identity, RunSpec
from workbench.experiments.statistics import Noise, is_replayed, noise_of, sentinel_drift
from workbench.replay.cost import BOUND
from workbench.replay.devices import Device, load_device
from workbench.replay.workload import DRAWN_STRATEGIES

Folder = str | Path | None
TO_RUN = "to run"
PROBLEMS_PER_CELL = {TIMED: 0.45, COUNTED: 0.06}
"""Roughly what a cell takes of the time of searching its problems; measured on the tiny pair."""
DRIFT_WORTH_A_WORD = 0.1
AUXILIARY = (settings.SENTINEL, COUNTED, settings.DEPTH, settings.QUEUE, settings.REFERENCE)
"""Roles of runs that stand beside those that a study is about."""


@dataclass(frozen=True)
class Study(stored.RunTables):
    """The stored runs of one study, read once. `missing` names those that are not stored."""

    config: SweepConfig
    folders: tuple[Path, ...]
    missing: tuple[str, ...] = ()
    plan: Plan | None = None
    order: tuple[str, ...] = field(default=(), repr=False)  # of the settings

    @cached_property
    def all_runs(self) -> pd.DataFrame:
        """One row a run: those beside the study's own, failed and infeasible ones too."""
        return load_runs(self.folders)

    @cached_property
    def runs(self) -> pd.DataFrame:
        """The finished runs that the study is about, repetitions left out.

        By share and seed in a sweep, else in the study's own order. RunStoreError where another
        study than a sweep has none.
        """
        every = self.all_runs
        wanted = every.iloc[:0]
        if "repeat" in every:  # some run can be read
            once = (every["repeat"] == 0) & ~every["role"].isin(AUXILIARY)
            wanted = every[(every["status"] == FINISHED) & once]
        if wanted.empty and self.plan is not None:
            raise RunStoreError(f"No run of the study finished: {reasons(every)}.")
        if wanted.empty:
            return wanted
        runs = load_runs(list(wanted["folder"]))  # anew: beside failed runs, counts are floats
        place = {setting: number for number, setting in enumerate(self.order)}
        order = runs["llm_share"] if self.plan is None else runs["setting"].map(place)
        return runs.assign(place=order).sort_values(["place", "seed"], ignore_index=True)

    @cached_property
    def noise(self) -> Noise:
        """What runs of equal work differ by."""
        return noise_of(self.all_runs)

    @property
    def failures(self) -> str:
        """Names of the runs that failed, as the beginning of a sentence; empty where none did."""
        every = self.all_runs
        names = every.loc[every["status"] == stored.FAILED, "name"] if len(every) else ()
        return f"failed: {', '.join(names)}; " if len(names) else ""

    def having(self, **values: Any) -> pd.DataFrame:
        """The finished runs, of any role, with these values in their columns."""
        every = self.all_runs
        if "setting" not in every:  # no run can be read
            return every.iloc[:0]
        wanted = every["status"] == FINISHED
        for name, value in values.items():
            wanted &= every[name].isin(value) if isinstance(value, tuple) else every[name] == value
        return every[wanted]

    def has(self, setting: str) -> bool:
        """Whether every seed that the study's own runs have finished with this setting."""
        return set(self.having(setting=setting)["seed"]) >= set(self.runs["seed"])

    def __repr__(self) -> str:
        counts = f"{len(self.folders)} runs stored, {len(self.missing)} missing"
        return f"Study({self.config.profile}: {counts})"


def reasons(runs: pd.DataFrame) -> str:
    """Why runs did not finish, each reason once."""
    if runs.empty:
        return "none is stored"
    return "; ".join(sorted(set(runs["error"].dropna().astype(str))))


# -- carrying out --


def run_study(
    config: SweepConfig,
    specs: Sequence[RunSpec],
    runs_dir: Folder = None,
    *,
    plan: Plan | None = None,
    compute: bool = True,
    retry_failed: bool = False,
    stale_ok: bool = False,
    progress: bool = True,
    execute: carry_out.Execute | None = None,
    identity: Identity | None = None,
    backend: Backend | None = None,
) -> Study:
    """Carry out every run that is not stored yet, and return all of them.

    compute=False only looks; retry_failed repeats runs whose row says failed; stale_ok takes
    finished runs of other code where there are none of this. execute: None is execute.Searches.
    identity: what runs depend on; None: both models' files and the problems' texts. backend: where
    they are carried out; None: the usual. Raises ConfigError, ModelError and ProblemFileError
    before the first run; whatever one run raises becomes its row.
    """
    store = RunStore(Path(runs_folder() if runs_dir is None else runs_dir).absolute())
    known = _identities(specs, identity)

    def look() -> list[Path | None]:
        named = store.by_name() if stale_ok else None
        return [store.stored(spec, known(spec), named) for spec in specs]

    found = look()
    if compute:
        store.clear_leftovers()
        there = {spec: held(at, retry_failed) for spec, at in zip(specs, found)}
        done = {
            s: at for s, at in zip(specs, found) if at and there[s] in (FINISHED, stored.FAILED)
        }
        todo = {spec: known(spec) for spec in specs if not there[spec]}
        if todo:
            store.require_writable()
        for spec, room in [(spec, feasibility(spec)) for spec in todo]:
            if not room.fits:
                store.write(spec, todo.pop(spec), room)
        backend = backend or Backend.usual()
        groups = backend.groups(store, execute or carry_out.Searches(), todo, done)
        answered = Counter[RunSpec]()
        total, silent = sum(s.config.num_problems for s in todo), not progress or not todo
        with tqdm(total=total, desc=f"{len(todo)} runs", unit="problem", disable=silent) as bar:
            for spec, now in backend.carry_out(groups):
                bar.update(now - answered[spec])
                answered[spec] = now
                if now == spec.config.num_problems:
                    bar.set_postfix_str(spec.name)
        found = look()
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
    found = {each: stored.identify(config) for each, config in configs.items()}
    return lambda spec: identity or found[key(spec.config)]


# -- the studies; options: of run_study --


def run_sweep(config: SweepConfig, runs_dir: Folder = None, **options: Any) -> Study:
    """The memory split."""
    return run_study(config, plans.split_runs(config), runs_dir, **options)


def run_policies(
    config: SweepConfig, plan: plans.PolicyPlan, runs_dir: Folder = None, **options: Any
) -> Study:
    """Policies and techniques at budgets in multiples of the working set, which is measured first,
    with memory uncapped. RunStoreError where no such search finishes.
    """
    specs = policies_planned(config, plan, runs_dir, **{"compute": True} | options)
    return run_study(config, specs, runs_dir, plan=plan, **options)


def working_set_of(runs: pd.DataFrame) -> plans.WorkingSet:
    """Of the first seed's uncapped search; the longest sequence is that of all such searches."""
    own = runs[(runs["role"] == settings.REFERENCE) & (runs["technique"] == NONE)]
    done = own[own["status"] == FINISHED].sort_values("seed")
    if done.empty or len(done) < len(own):
        raise RunStoreError(
            f"{len(own) - len(done)} of {len(own)} searches with memory uncapped, which tell the "
            f"working set, did not finish: {reasons(own)}. --retry-failed repeats those that "
            "failed."
        )
    llm, prm = (int(done.iloc[0][f"{model}_active_bytes"]) for model in ENGINES)
    return plans.WorkingSet(llm, prm, longest=int(done["longest"].max()))


def run_replayed(
    config: SweepConfig,
    runs_dir: Folder = None,
    device: str = carry_out.DEVICE,
    surer: Mapping[float, int] | None = None,
    **options: Any,
) -> Study:
    """The memory split of a search that is recorded, or made of MATH-500's lengths, replayed on a
    device that is a table of numbers, as load_device takes it. surer: shares of the config's that
    have so many seeds.
    """
    more = {share: range(count) for share, count in (surer or {}).items() if share in config.shares}
    each = {*product(config.seeds, config.shares)}
    each |= {(seed, share) for share, seeds in more.items() for seed in seeds}
    specs = [RunSpec(config, share, seed, settings.REPLAY) for seed, share in sorted(each)]
    return run_study(config, specs, runs_dir, **_replays(config, load_device(device)) | options)


def _replays(config: SweepConfig, device: Device) -> dict[str, Any]:
    """Options of run_study that have its runs replayed."""
    execute = carry_out.one_by_one(partial(carry_out.replayed_run, device))
    return {"execute": execute, "identity": carry_out.replay_identity(device, config)}


def run_ablation_replayed(
    config: SweepConfig, plan: plans.AblationPlan, runs_dir: Folder = None, **options: Any
) -> Study:
    """The part of the ablation that a replay tells: speed alone, without sampling to the end."""
    specs = [
        replace(run, config=replace(run.config, finish_at_limit=False))
        for run in plans.ablation_runs(config, plan)
        if run.role != settings.DEPTH and run.setting != plans.LAST_TWO[1]
    ]
    options |= _replays(config, load_device(carry_out.DEVICE))
    return run_study(config, specs, runs_dir, plan=plan, **options)


def run_policies_replayed(
    config: SweepConfig, plan: plans.PolicyPlan, runs_dir: Folder = None, **options: Any
) -> Study:
    """The study of policies as a replay tells it: pruned beams are not forgotten, since a recording
    does not say what a cache then forgets. The uncapped search has a device of any size.
    """
    device = replace(load_device(carry_out.DEVICE), memory_bytes=1 << 50)
    options = {"compute": True} | options | _replays(config, device)
    specs = [
        replace(run, config=replace(run.config, forget_pruned=False))
        for run in policies_planned(config, plan, runs_dir, **options)
        if not run.config.forget_pruned or run.get("technique") == plans.ALL
    ]
    return run_study(config, specs, runs_dir, plan=plan, **options)


COMPARED_SHARES = (0.08, settings.THESIS_SHARE, 0.5)
"""At which rungs are compared: both ends of the axis, and the thesis's share."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A replayed rung as the committed figures have it: drawn again, nothing is replayed."""

    rung: str = settings.REPLAYED

    def figure(self, name: str) -> tuple[pd.DataFrame, dict[str, Any]]:
        """Its rows of a figure, whatever is drawn over that meanwhile, and the figure's record;
        RunStoreError where there are none.
        """
        rows, record = read_figure(name)
        if not (rows["rung"] == self.rung).any():
            raise RunStoreError(
                f"The committed figure {name} has no rows of {self.rung!r}, which this profile "
                "draws again; `--profile full` replays them."
            )
        return rows[rows["rung"] == self.rung], record

    def provenance(self, name: str) -> list[str]:
        """The figure's lines about it, and of which commit its rows are."""
        record = self.figure(name)[1]
        lines = record["parameters"]["provenance"].splitlines()
        first = next(number for number, line in enumerate(lines) if f"({self.rung})" in line)
        models, sample, note = lines[first : first + 3]
        again = f" Rows of commit {str(record['git']['commit'])[:9]}, drawn again."
        return [models, sample, note if note.endswith("drawn again.") else note + again]


def committed(profile: str, *given: Any) -> bool:
    """Whether a profile draws what is committed of replayed rungs: a short one that is given
    nothing (None) that bears on them.
    """
    return profile not in plans.SIZES and all(each is None for each in given)


def far_of(rungs: Sequence[Study | Committed]) -> Study | Committed:
    """The thesis's pair among rungs; what is committed of it where it could not be replayed."""
    for each in rungs:
        name = each.rung if isinstance(each, Committed) else rung(each.runs)
        if name == settings.REPLAYED:
            return each
    return Committed()


def rung_configs(
    profile: str, shares: Sequence[float] | None, **sizes: Any
) -> dict[str, SweepConfig | str]:
    """By rung what is replayed beside the embedded pair's sweep, or why nothing is."""
    recorded, strategy = plans.recorded_config(profile, shares=shares), sizes.get("strategy")
    found: dict[str, SweepConfig | str] = {settings.RECORDED: recorded}
    if strategy not in (None, recorded.strategy):
        why = f"its recording is of {recorded.strategy}, not of {strategy}"
        found[settings.RECORDED] = f"{rung_of(recorded.llm)}: {why}"
    if strategy in (None, *DRAWN_STRATEGIES):
        found[settings.REPLAYED] = plans.replayed_config(profile, shares=shares, **sizes)
    else:
        why = f"searches are drawn of {', '.join(DRAWN_STRATEGIES)}, not of {strategy}"
        found[settings.REPLAYED] = f"{settings.REPLAYED}: {why}"
    return found


def run_rungs(
    profile: str,
    runs_dir: Folder = None,
    shares: Sequence[float] | None = None,
    *,
    surer: bool = False,
    stale_ok: bool = False,
    retry_failed: bool = False,
    **sizes: Any,
) -> list[Study | Committed]:
    """The rungs beside the embedded pair's: SmolLM2 over its recording, replayed and in the full
    profile also measured at three shares; the thesis's pair, replayed. Short profiles draw what is
    committed of both.

    shares: default the profile's. surer: the thesis's pair with the profile's further seeds, for
    ratios of shares. sizes: settings of it; None: its own. What no recording, or no drawn search,
    has of a strategy is left out with a warning.
    """
    if committed(profile, shares, *sizes.values()):
        return [Committed(settings.RECORDED), Committed(settings.REPLAYED)]
    how: Any = {"stale_ok": stale_ok, "retry_failed": retry_failed}
    found = list[Study]()
    for rung, config in rung_configs(profile, shares, **sizes).items():
        if isinstance(config, str):
            warnings.warn(f"Not drawn, {config}.", stacklevel=2)
            continue
        if rung == settings.RECORDED and profile == "full":
            few = plans.recorded_config(profile, shares=COMPARED_SHARES)
            found.append(run_sweep(few, runs_dir, **how))
        more = plans.SURER.get(profile) if surer and rung == settings.REPLAYED else None
        found.append(run_replayed(config, runs_dir, surer=more, **how))
    for each in found:
        if each.runs.empty:
            why = f"{rung_of(each.config.llm)}: {reasons(each.all_runs)}"
            warnings.warn(f"Not drawn, {why}.", stacklevel=2)
    return [each for each in found if len(each.runs)]


# -- what a study would do, without doing it --


@dataclass(frozen=True, slots=True)
class Preview:
    """What is left to do. runs: one row a run, in order: name, role, llm_share, seed, status,
    llm_blocks, prm_blocks, lacks_bytes, expected_s, stale: where one of other code is stored.
    """

    runs: pd.DataFrame
    feasible: FeasibleShares
    measured_before: bool  # expected_s comes from this machine's own runs

    @property
    def num_to_run(self) -> int:
        """Runs that are still to be done."""
        return int((self.runs["status"] == TO_RUN).sum())

    def __str__(self) -> str:
        minutes = self.runs["expected_s"].sum() / 60
        source = "from this machine's runs" if self.measured_before else "rough: none finished here"
        time = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} hours"
        text = f"{self.num_to_run} of {len(self.runs)} runs to do, about {time} ({source})."
        stale = self.runs["stale"].dropna()
        if stale.empty:
            return text
        text += f" {len(stale)} of them are stored of other code: "
        first = stored.read_run(stale.iloc[0])
        if first["git_commit"] and not first["git_dirty"]:
            text += f"`--at {first['git_commit'][:12]}` goes on with that of {first['run_id']}, "
        return f"{text}`--stale ok` takes them beside runs of this."


def preview(
    config: SweepConfig,
    runs_dir: Folder = None,
    *,
    specs: Sequence[RunSpec] | None = None,
    retry_failed: bool = False,
    stale_ok: bool = False,
) -> Preview:
    """Look at runs (default: the sweep's) before they run; bad settings raise as they would then.

    Reads configs and stored rows only. Minutes are no promise.
    """
    store = RunStore(Path(runs_dir) if runs_dir is not None else runs_folder())
    specs = plans.split_runs(config) if specs is None else specs
    known, rows, named = _identities(specs, None), [], store.by_name()
    for spec in specs:
        own, fits = store.stored(spec, known(spec)), feasibility(spec)
        status = held(own, retry_failed)
        stale = None if status or not fits.fits else store.stale(spec, known(spec), named)
        if stale is not None and stale_ok and own is None:
            status, stale = f"{FINISHED}, other code", None
        status = status or (TO_RUN if fits.fits else stored.INFEASIBLE)
        cost = PROBLEMS_PER_CELL.get(spec.role) or plans.COST.get(spec.setting, 1.0)
        cost *= spec.config.n / config.n
        cost *= spec.config.num_problems * (status == TO_RUN)
        row = {name: getattr(spec, name) for name in ("name", "role", "llm_share", "seed")}
        row |= {f"{engine}_blocks": fits.blocks(engine) for engine in ENGINES}
        row |= {"status": status, "lacks_bytes": sum(fits.columns.values())}
        rows.append(row | {"expected_s": cost, "stale": stale})
    runs = pd.DataFrame(rows)
    seconds = seconds_per_problem(config, store) if runs["expected_s"].any() else None
    runs["expected_s"] *= seconds or plans.SECONDS_PER_PROBLEM.get(config.problems, 1.5)
    return Preview(runs, shares_of(config), seconds is not None or not runs["expected_s"].any())


def policies_planned(
    config: SweepConfig,
    plan: plans.PolicyPlan,
    runs_dir: Folder = None,
    compute: bool = False,
    **options: Any,
) -> list[RunSpec]:
    """Runs of the study of policies; before the working set is known as many, of other sizes.

    compute: run first what it is measured by. RunStoreError where none of these finishes.
    """
    first = plans.reference_runs(config, plan)
    study = run_study(config, first, runs_dir, plan=plan, compute=compute, **options)
    known = len(study.having(role=settings.REFERENCE, technique=NONE)) == len(first)
    size = int(first[0].get("kv_bytes")) // 2
    need = plans.WorkingSet(size, size, longest=256)
    if compute or known:
        need = working_set_of(study.all_runs)
    return [*first, *plans.policy_runs(config, plan, need)]


def seconds_per_problem(config: SweepConfig, store: RunStore) -> float | None:
    """Wall seconds a problem took in finished runs of this pair and n on this kind of machine."""
    runs = load_runs(store.root) if store.folders() else pd.DataFrame()
    if "wall_s" not in runs:  # cells of the batching study search nothing
        return None
    like = {"llm": config.llm, "prm": config.prm, "n": config.n, "status": FINISHED}
    like |= {"device": config.device, "machine_cpu": machine_facts()["cpu"]}
    own = (runs[list(like)] == like).all(axis=1) & runs["role"].isin((MEASURE, TIGHT))
    own &= runs.reindex(columns=["rung"])["rung"].isna()  # a replay's seconds are simulated
    runs = runs[own & runs["wall_s"].notna()]
    return float((runs["wall_s"] / runs["num_problems"]).median()) if len(runs) else None


# -- what stands on a figure: models, rung, budget, sample, machine; read from the runs drawn --

NOTHING_WAS_RUN = f"Nothing was run: {{}}, seconds a roofline's, {BOUND}."
DRAWN = "tokens are MATH-500's lengths with stated assumptions"
SEARCHED = "tokens and scores are a recorded search's"
RUNGS = {"tiny": "measured tiny", "smollm2": "measured SmolLM2", "dummy:": "dummy weights"}
"""How the names of LLMs begin, and the rung of the study that they stand on."""
CARRIES_OVER = "Counts carry over at equal ratios of need to room; seconds do not."


def provenance(
    runs: pd.DataFrame, seed: int | None = None, *notes: str, beside: pd.DataFrame | None = None
) -> str:
    """Three lines about the runs drawn, beside notes; they name the commits if there are several.

    seed: the only one drawn of several. beside: runs of another study in the same figure.
    """
    first, seeds = runs.iloc[0], counted(runs["seed"].nunique(), "seed")
    if len(counts := sorted(set(runs.groupby("llm_share")["seed"].nunique()))) > 1:
        seeds = f"{counts[0]} to {counts[-1]} seeds a share"
    outside = "" if first["activations_in_total"] else ", activations outside it"
    policies = list(runs["policy"].dropna().unique()) if "policy" in runs else []
    policy = f", shared by the policy {policies[0]}" if len(policies) == 1 else ""
    drawn = seeds if seed is None or seeds == "1 seed" else f"seed {seed} of {seeds}"
    columns = "profile", "machine", "num_problems", "n"
    profile, machine, problems, n = (" and ".join(runs[c].astype(str).unique()) for c in columns)
    searched = runs["strategy"].unique().tolist() if "strategy" in runs else []
    how = f"{searched[0]}, " if len(searched) == 1 and searched != [SweepConfig().strategy] else ""
    models = (
        f"LLM {first['llm']}, PRM {first['prm']} ({rung(runs)}); total memory "
        f"{format_size(int(first['total_memory']))}{outside}{policy}."
    )
    sample = (
        f"Profile {profile}: {problems} problems, {drawn}, {how}n = {n}, beam "
        f"width {first['beam_width']}; {machine}{commits_of(pd.concat([runs, beside]))}."
    )
    return "\n".join([models, sample, *notes, CARRIES_OVER])


def commits_of(runs: pd.DataFrame) -> str:
    """What a figure says where its runs are of several commits; `+` and the digest of the code
    stand after a commit that had been changed, or that is not known.
    """
    states = set()
    for commit, dirty, code in runs.reindex(columns=["git_commit", "git_dirty", "code"]).values:
        changed = not isinstance(commit, str) or (pd.notna(dirty) and dirty)
        states.add(f"{str(commit)[:9]}+{code}" if changed else commit[:9])
    text = f"; runs of {len(states)} commits: {', '.join(sorted(states))}"
    return text if len(states) > 1 else ""


def provenance_here(llm: str, prm: str, what: str, *notes: str, device: str = "cpu") -> str:
    """Of what this process measures itself, on a device: `what` it was."""
    machine = describe(machine_facts(device))
    measured = f"LLM {llm}, PRM {prm} ({rung_of(llm)}); {what}; {machine}."
    return "\n".join([measured, *notes, CARRIES_OVER])


def provenance_of(
    *studies: Any,
    figure: str = "",
    seed: int | None = None,
    beside: pd.DataFrame | None = None,
    told: Callable[[Any], str] | None = None,
) -> str:
    """Of a figure of one study, or with a panel for each of several: how many of a sweep's runs
    there are, how noisy the machine was, or that nothing was run. figure: its name, where a study
    is Committed. seed: the only one drawn. beside: as of `provenance`. told: what is said of one in
    place of its runs and their noise.
    """
    lines, last = list[str](), list[str]()
    for study in studies:
        if isinstance(study, Committed):
            lines += study.provenance(figure)
            continue
        at = rung(study.runs)
        is_sweep = getattr(study, "plan", None) is None
        note = f"{completeness(study)}; " if is_sweep else study.failures
        if is_replayed(at):
            said = NOTHING_WAS_RUN.format(SEARCHED if at == settings.RECORDED else DRAWN)
            note += f"{study.config.min_problem_batch} problems in flight. {said}"
            note = f"{study.failures}{told(study)} {said}" if told else note
        else:
            note = told(study) if told else f"{note}{noise_of(study.all_runs)}."
            last = [CARRIES_OVER]
        lines += provenance(study.runs, seed, note, beside=beside).splitlines()[:-1]
    own = [study.runs for study in studies if not isinstance(study, Committed)]
    together = commits_of(pd.concat(own)) if len(own) > 1 else ""
    if together:
        lines.append(f"All panels: {together[2:]}.")
    return "\n".join([*lines, *last])


def completeness(study: Any) -> str:
    """How many of a sweep's runs are drawn, and why the others are not."""
    bad = study.all_runs.query("status != @FINISHED").to_dict("records")
    planned = len(study.runs) + len(bad) + len(study.missing)
    reasons = ", ".join(f"{row['status']}: {row['name']}" for row in bad)
    return f"{len(study.runs)} of {planned} runs" + (f" ({reasons})" if reasons else "")


def rung(runs: pd.DataFrame) -> str:
    """Which rung of the study the runs stand on: as they say, else by their LLM's name."""
    first = runs.iloc[0]
    said = first.get("rung")
    return said if isinstance(said, str) else rung_of(first["llm"])


def rung_of(llm: str) -> str:
    """The rung of one LLM."""
    return next((text for start, text in RUNGS.items() if llm.startswith(start)), "measured")


def remarks(runs: pd.DataFrame) -> Iterator[str]:
    """What a reader of these runs must know: mixed machines or versions, other code, drift."""
    done = runs[runs["status"] == FINISHED] if len(runs) else runs
    if done.empty:
        return
    for column in ("machine", "versions"):
        values = sorted(set(map(str, done[column])))
        if len(values) > 1:
            yield f"The runs differ in {column}: {' / '.join(values)}; seconds do not compare."
    stale = done[of_other_code(done)]
    if len(stale):
        commits = ", ".join(sorted({str(commit)[:12] for commit in stale["git_commit"]}))
        yield (
            f"{counted(len(stale), 'stored run')} of other code, made at commit {commits}; without "
            "`--stale ok` it is measured anew."
        )
    drift = sentinel_drift(runs)
    if len(drift) and drift.abs().max() > DRIFT_WORTH_A_WORD:
        yield (
            f"The sentinel drifted by {drift.min():+.0%} to {drift.max():+.0%} over {len(drift)} "
            "repetitions: the machine was not equally free all the time."
        )


# -- figures kept under their fixed names --


def figures_home(study: Any, usual: bool = True) -> Path:
    """Where figures of a study are kept; where settings are its own, beside the profile's. usual:
    whether what is drawn of its runs is what the notebook draws by itself.
    """
    profile = study.config.profile
    own = usual and study.config == plans.sweep_config(profile)
    own &= study.plan is None or study.plan == plans.plan_of(type(study.plan), profile)
    return profile_figures(profile if own else f"{profile}-changed")


def profile_figures(name: str) -> Path:
    """figures/ of the default profile, build/figures/NAME of others."""
    return project_root() / ("figures" if name == "default" else f"build/figures/{name}")


def measured_of(run: pd.Series) -> dict[str, Any]:
    """With which versions, of which commit and on which machine a run of the table was measured."""
    first = json.loads(run.to_frame().T.to_json(orient="records", double_precision=15))[0]
    measured = {"versions": json.loads(first["versions"])}
    for about in ("machine_", "git_"):
        own = {n.removeprefix(about): v for n, v in first.items() if n.startswith(about)}
        measured[about[:-1]] = own
    return measured


def keep_figure(
    fig: go.Figure,
    rows: pd.DataFrame,
    name: str,
    study: Any,
    folder: Folder = None,
    *,
    beside: Any = None,
    usual: bool = True,
) -> SavedFigure:
    """Save a figure of the study in `folder` (default: its home, or that of the study `beside`)."""
    place = Path(folder or figures_home(study if beside is None else beside, usual))
    if isinstance(study, Committed):
        record = study.figure(name)[1]
        return save_figure(fig, rows, name, place, record["parameters"], measured=record)
    measured = measured_of(study.runs.iloc[0])
    plan = {"plan": asdict(study.plan)} if study.plan is not None else {}
    return save_figure(fig, rows, name, place, study.config.to_dict() | plan, measured=measured)
