"""`workbench run`, `bench`, `calibrate`, `record`, `train-tiny` and `doctor`: one search on the
terminal, what a benchmark measured, and what this machine has.
"""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from typer import Argument, Exit, Option

from workbench.cli.options import FAILED, Memory, Set, key_values, terminal
from workbench.errors import ConfigError, OutOfMemory, WorkbenchError

if TYPE_CHECKING:
    import pandas as pd
    from rich.tree import Tree

    from workbench.bench.record import Row
    from workbench.search.problems import Problem
    from workbench.search.result import SearchResult

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
EXTRAS = {  # package: (what needs it, how to get it)
    "math-verify": ("answers that are not whole numbers", "pip install math-verify"),
    "transformers": ("bench engine's peer, train-tiny", "pip install transformers"),
    "papermill": ("figures", "pip install 'workbench[notebooks]'"),
    "kaleido": ("figures as SVG and PDF", "pip install kaleido"),
    "jupyterlab": ("make lab", "pip install 'workbench[notebooks]'"),
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which problem is searched."""

    problem: str = Argument(None, help='as text ("Compute 7-3+12."); else one of --problems')
    problems: str = Option(None, help="tiny, math500, or a .json/.jsonl file (default: tiny)")
    index: int = Option(None, min=0, help="which of --problems, counted from 0 (default: 0)")
    level: int = Option(None, help="only problems of this level (1 to 5)")


@dataclass(frozen=True, slots=True)
class Searched:
    """Settings of SweepConfig that have options of their own."""

    llm: str = Option("tiny-solver", help="generator: a name, hub id, folder or .gguf")
    prm: str = Option("tiny-prm", help="process reward model")
    total_memory: Memory = "64MiB"
    strategy: Literal["beam_search", "best_of_n"] = Option("beam_search", help="how to search")
    n: int = Option(16, help="beams (or samples) of a problem")
    beam_width: int = Option(4, help="children of a survivor; n // beam_width survive")
    max_depth: int = Option(40, help="steps of a beam, at most")
    temperature: float = Option(0.8, help="of sampling; 0 is greedy")


def run(
    choice: Chosen,
    settings: Searched,
    prm_format: str = Option(None, help="how the PRM is asked (default: as its name tells)"),
    llm_share: float = Option(0.3, help="the LLM's share of the total memory, in (0, 1)"),
    seed: int = Option(0, help="equal seeds give equal trees"),
    tree_depth: int = Option(6, min=0, help="levels of the tree that are printed; 0: none"),
    more: Set = None,
) -> None:
    """Search one problem; print its answer and tree."""
    from workbench.config import SweepConfig, format_size, parse_size
    from workbench.engine.engine import Engine
    from workbench.experiments.execute import make_search
    from workbench.experiments.memory import shares_of
    from workbench.experiments.settings import RunSpec
    from workbench.search.problems import Problem, load_problems
    from workbench.search.search import as_problems

    problem, level = choice.problem, choice.level
    if problem is not None:
        for name in ("problems", "index", "level"):
            if getattr(choice, name) is not None:
                given = f"run got the problem {problem!r} and --{name}, which picks another"
                raise ConfigError(f"{given}; give one of them.")
        chosen = as_problems(Problem("given", problem))[0]
    else:
        source, place = choice.problems or "tiny", choice.index or 0
        found = load_problems(source, limit=place + 1, levels=None if level is None else (level,))
        if place >= len(found):
            raise ConfigError(f"--index is {place}; {source} has problems 0 to {len(found) - 1}.")
        chosen = found[place]
    if not 0 < llm_share < 1:
        raise ConfigError(f"--llm-share is {llm_share:g}; allowed: a share in (0, 1).")
    own = asdict(settings) | {"prm_format": prm_format}
    config = SweepConfig.from_dict(own | key_values(more, "--set"))
    spec = RunSpec(config, llm_share, seed)
    try:
        llm, prm = (Engine(**spec.engine(role).to_dict()) for role in ("llm", "prm"))
    except OutOfMemory as error:
        total, fit = format_size(parse_size(spec.config.total_memory)), ""
        if not spec.config.activations_in_total:  # activations are measured: no formula for shares
            fit = f" {shares_of(spec.config)}."
        raise OutOfMemory(
            f"llm_share {llm_share:g} of {total} is infeasible. {error}{fit}"
        ) from error
    result = make_search([chosen], llm, prm, config, seed).play()
    _show_search(result, chosen, tree_depth)


def _show_search(result: SearchResult, problem: Problem, depth: int) -> None:
    """Problem, tree, answer and speed."""
    import pandas as pd
    from rich.markup import escape

    console, row = terminal(), result.problems.iloc[0]
    console.print(f"[bold]problem[/]  {escape(problem.problem)}")
    if depth:
        console.print(_tree(result.tree, depth))
    verdict = ""
    if not pd.isna(row["correct"]):
        verdict = "  (right)" if row["correct"] else f"  (wrong; it is {row['answer']})"
    console.print(f"[bold]answer[/]   {escape(row['predicted'] or '(none)')}{verdict}")
    steps = [step.strip() for step in result.candidates.iloc[0]["text"].split("\n\n")]
    console.print(f"[bold]best[/]     {escape(' / '.join(filter(None, steps)))}")
    console.print(
        f"[bold]speed[/]    {result.throughput}; {len(result.tree)} nodes, {row['tokens']} tokens, "
        f"{row['iterations']} iterations"
    )


def _tree(nodes: pd.DataFrame, depth: int) -> Tree:
    """The nodes down to `depth`: kept ones bold, each with its score and the text of its step."""
    from rich.markup import escape
    from rich.tree import Tree

    drawn = Tree("tree  (score, step; bold: kept)")
    branches = {"": drawn}
    for node in nodes[nodes["depth"] <= depth].sort_values(["depth", "node_id"]).to_dict("records"):
        style = "bold" if node["kept"] else "dim"
        label = f"[{style}]{node['score']:.3f}  {escape(' '.join(node['text'].split()))}[/]"
        branches[node["node_id"]] = branches[node["parent_id"]].add(label)
    return drawn


@dataclass(frozen=True, slots=True)
class Measured:
    """Options of the benchmarks; each takes some."""

    profile: Literal["quick", "default", "full"] = Option("default", help="repeats or problems")
    model: str = Option(None, help="what is measured (default: tiny-solver)")
    llm: str = Option(None, help="search, identity, reenact: generator (default: tiny-solver)")
    prm: str = Option(None, help="search, identity, reenact: reward model (default: tiny-prm)")
    problems: str = Option(None, help="search, identity, memory: file (default: by the models)")
    seed: int = Option(None, help="where the bench takes one (default: 0)")
    seeds: int = Option(None, min=1, help="search, memory: how many, not the profile's number")
    repeats: int = Option(None, min=1, help="engine, memory, kernels, replay: how many")
    peers: str = Option(None, help="engine: installed (default), none, or names and commas")
    device: str = Option(None, help="engine, reenact: cpu (default), or a GPU: cuda, cuda:1")
    part: str = Option(None, help="memory: starts, beams, forks, arena or sharing alone")


def bench(
    options: Measured,
    name: Literal[
        "engine", "search", "identity", "memory", "kernels", "replay", "reenact"
    ] = Argument(help="what to measure"),
    json: str = Option(None, help="write the record (machine, versions, commit, rows) here"),
    isa: str = Option(None, help="avx512, avx2, neon: a lesser set than the host's, peers' too"),
) -> None:
    """Measure speed, search quality or sameness.

    Prints each row as it is measured; --json FILE also keeps those of a run that was interrupted.
    """
    if isa is not None:
        from workbench.kernels.isa import VARIABLE, environment

        if os.environ.get(VARIABLE) != isa:  # again, so that all it loads takes this set
            again = [sys.executable, *sys.orig_argv[1:]]
            os.execve(sys.executable, again, os.environ | environment(isa))
    from workbench.bench.record import record, write_record

    module, console = import_module(f"workbench.bench.{name}"), terminal()
    settings = accepted(name, module.run, asdict(options))
    part = options.part
    if part is not None and json and Path(json).exists():
        raise ConfigError(f"{json} exists, and --part {part} is not a whole record; name another.")
    rows: list[Row] = []
    complete = False
    # `timeout` sends SIGTERM: the benchmark ends as on Ctrl-C, its rows are written
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for row in module.run(**settings):
            rows.append(row)
            console.print(_line(row))
        complete = True
    finally:
        signal.signal(signal.SIGTERM, handler)
        if json and rows:
            content = record(name, rows, mode_of(module, settings) | {"complete": complete})
            console.print(f"written: {write_record(content, json)}")
    failed = [row.name for row in rows if row.failed]
    if failed:
        console.print(f"Failed: {', '.join(failed)}.", style="red")
        raise Exit(FAILED)


def accepted(name: str, measured: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options this benchmark takes, defaults filled in; one it does not take is refused."""
    known = inspect.signature(measured).parameters
    given = {option: value for option, value in options.items() if value is not None}
    if "model" in given and "model" not in known:  # searches name two models, this is the first
        given.setdefault("llm", given.pop("model"))
    for option in given:
        if option not in known:
            takes = ", ".join(f"--{n}" for n in options if n in known)
            raise ConfigError(f"bench {name} takes no --{option}; it takes {takes}.")
    return {n: given.get(n, known[n].default) for n in options if n in known}


def mode_of(module: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """How it was run: the settings, and the module's mode_of(settings) or MODE.

    A file is recorded by its name: records are public, and paths are of one machine.
    """
    own = module.mode_of(settings) if hasattr(module, "mode_of") else getattr(module, "MODE", {})
    told = settings | own
    for name, value in told.items():
        if isinstance(value, str) and (Path(value).is_absolute() or Path(value).exists()):
            told[name] = Path(value).name
    return told


def _line(row: Row) -> str:
    """One row as a line: name, value, peer and ratio, ceiling, spread."""
    parts = [f"{row.name:32} {row.value:>12,.4g} {row.unit}"]
    if row.ratio is not None:
        parts.append(f"{row.ratio:.2f}x {row.peer} ({row.peer_value:,.4g})")
    if row.share_of_ceiling is not None:
        parts.append(f"{row.share_of_ceiling:.0%} of the ceiling")
    if isinstance(row.spread, tuple):
        parts.append(f"\\[{row.spread[0]:.3g}, {row.spread[1]:.3g}]")
    elif row.spread is not None:
        parts.append(f"± {row.spread:.2g}")
    return "  ".join(parts)


def calibrate(
    out: str = Option("device.json", help="the .json file to be written"),
    num_problems: int = Option(4, min=1, help="problems of a search"),
    repeats: int = Option(3, min=1, help="searches of a setting; the fastest stands"),
    seed: int = Option(0, help="of the searches"),
) -> None:
    """Measure this machine as a device for replays.

    Searches the embedded pair; leave the machine to it meanwhile.
    """
    from workbench.bench import replay
    from workbench.replay.devices import write_device
    from workbench.search.recording import require_destination

    require_destination(out)
    device = replay.calibrate(num_problems, repeats, seed)
    terminal().print(
        f"{device.name}: {device.flops_per_s / 1e9:,.0f} GFLOP/s, "
        f"{device.bytes_per_s / 1e9:,.1f} GB/s, terms of {', '.join(device.terms)}\n"
        f"written: {write_device(device, out)}"
    )


def record(
    name: str = Argument(help="a recording of the package, e.g. tiny-128"),
    out: str = Option(None, help="the file to be written (default: NAME.parquet)"),
    problems: str = Option(None, help="file of MATH-500 for smollm2-* (default: the hub's)"),
) -> None:
    """Make a recorded search of the package anew.

    Names and what each holds: replay/data/README.md in the package.
    """
    from workbench.bench.search import make_recording

    path = Path(out or f"{name}.parquet")
    result = make_recording(name, path, problems)
    size = f"{len(result.tree):,} nodes, {path.stat().st_size / 1000:,.0f} kB"
    terminal().print(f"{path}: {len(result.problems)} problems, {size}")


class Embedded(StrEnum):
    """The models that come with the package."""

    solver = "tiny-solver"
    prm = "tiny-prm"


def train_tiny(
    out: str = Option("trained", help="folder the model folders are written to"),
    minutes: float = Option(60.0, help="training time of all models together"),
    seed: int = Option(0, help="of data and initial weights"),
    model: list[Embedded] = Option(None, help="only this one (repeatable)"),
    card: bool = Option(False, "--card", help="train nothing: print the table of the model card"),
    num_problems: int = Option(128, min=1, help="--card: fresh problems, uniform over levels"),
) -> None:
    """Train the embedded models anew."""
    if card:
        from workbench.training.card import as_markdown, embedded_card

        print(as_markdown(embedded_card(num_problems, seed)))
        return
    import logging

    from workbench.training import training

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    models = {"models": tuple(name.value for name in model)} if model else {}
    for folder in training.train_tiny(out, minutes=minutes, seed=seed, **models):
        print(f"written: {folder}")


class Finding(NamedTuple):
    """One line of the report. remedy: empty where all is well; needed: no run works without it."""

    topic: str
    found: str
    remedy: str = ""
    needed: bool = False


def doctor() -> None:
    """Print what this machine has and what is missing.

    Changes nothing. Exit status 1 when something is missing that every run needs.
    """
    from rich.table import Table

    findings = list(_examine())
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for heading in ("found", "what to do")[: 1 + any(finding.remedy for finding in findings)]:
        table.add_column(heading, overflow="fold")
    for finding in findings:
        style = "" if not finding.remedy else "red" if finding.needed else "yellow"
        cells = (finding.topic, finding.found, finding.remedy)
        table.add_row(*cells[: len(table.columns)], style=style)
    terminal().print(table)
    if any(finding.needed and finding.remedy for finding in findings):
        raise Exit(FAILED)


def _examine() -> Iterator[Finding]:
    """Every finding, cheapest first."""
    from workbench.config import format_size
    from workbench.experiments.provenance import (
        cpu_features,
        git_state,
        machine_facts,
        project_root,
        runs_folder,
        versions,
    )
    from workbench.models.loading import load_model  # brings torch: its threads and GPU are told
    from workbench.models.spec import ARCHITECTURES
    from workbench.search.prm_formats import FORMATS

    facts = machine_facts()
    features = " ".join(cpu_features())
    yield Finding("processor", f"{facts['cpu']}, {facts['cores']} cores usable, {features}")
    crowded = facts["threads"] > facts["cores"]
    slow = f"more threads than cores: set OMP_NUM_THREADS={facts['cores']}" if crowded else ""
    yield Finding("threads", f"{facts['threads']} a matrix product", slow)
    memory = facts["memory_bytes"]
    yield Finding("memory", format_size(memory) if memory else "not told by this system")
    yield Finding("GPU", facts["gpu"] or "none seen by torch")
    yield Finding("versions", ", ".join(f"{k} {v}" for k, v in versions().items()))
    git = git_state()
    changed = ", with changes" if git["dirty"] else ""
    yield Finding("commit", f"{git['commit'][:12]}{changed}" if git["commit"] else "no checkout")
    for name, (purpose, remedy) in EXTRAS.items():
        try:
            version(name)
        except PackageNotFoundError:
            yield Finding(name, f"not installed; needed by: {purpose}", remedy)
    yield Finding("architectures", ", ".join(ARCHITECTURES))
    yield Finding("PRM formats", ", ".join(FORMATS))
    for name in ("tiny-solver", "tiny-prm"):  # read and prepared as a run does it
        try:
            model: Any = load_model(name)
        except WorkbenchError as error:
            yield Finding(name, "cannot be loaded", str(error), needed=True)
            continue
        size, kernels = format_size(model.weight_bytes), model.kernels
        same = "tokens may differ between batches"
        if kernels.batch_invariant:
            same = f"equal tokens in any batch, {kernels.pool.threads} threads"
        found = f"{size} of weights; {kernels.name} kernels on {model.device}; {same}"
        yield Finding(name, found)
    browser = next(filter(None, (os.environ.get("BROWSER_PATH"), *map(shutil.which, BROWSERS))), "")
    remedy = "SVG and PDF need one (Debian: apt install chromium), or set BROWSER_PATH"
    yield Finding("browser", browser or "none", "" if browser else remedy)
    folder, free = runs_folder(), shutil.disk_usage(project_root()).free
    runs = sum(1 for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else 0
    full = "less than 1 GiB is left on this disk" if free < 2**30 else ""
    yield Finding("runs", f"{folder}: {runs} kept, {format_size(free)} free", full)
