"""Benchmarks: how fast, how good, how sameness holds; one module a question, one record a run.

A benchmark is a module with `run(**options) -> Iterator[Row]` and how it was run, MODE or
`mode_of(settings)`; `workbench bench` (cli/tools.py) has its name and options, SOURCES what bears
on its numbers: by them a record is told from one that the code has changed under.
"""

from __future__ import annotations

import inspect
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError
from workbench.experiments.provenance import (
    PACKAGE,
    code_digest,
    git_state,
    machine_facts,
    project_root,
    unpacked,
)

if TYPE_CHECKING:
    from workbench.bench.record import Row

_GPU = "kernels/triton"  # of records made on a machine with a GPU only
_KERNELS = (*(f"kernels/{n}.py" for n in ("__init__", "isa", "quantised", "reference")),
            "kernels/cpu", _GPU)  # fmt: skip
_ENGINE = ("core.py", "config.py", "host.py", *_KERNELS, *(f"kvcache/{n}.py" for n in (
           "manager", "pool", "storage")), "models", "engine", "bench/record.py")  # fmt: skip
_SEARCH = (*_ENGINE, "kvcache", "tokenizer.py", "trace.py", "search", "experiments/execute.py",
           "experiments/memory.py", "experiments/settings.py", "experiments/statistics.py",
           "bench/search.py")  # fmt: skip
_FOREIGN = ("engine/foreign.py", "engine/remote.py")  # in the folder, and no part of our engine
_BESIDE = (*_FOREIGN, *(f"bench/{n}.py" for n in ("beside", "engine", "peers", "serve")))
_REPLAY = tuple(f"replay/{n}.py" for n in ("answers", "cost", "devices", "miss_ratio", "simulator",
                                           "what_if", "workload"))  # fmt: skip
SOURCES = {
    "engine": (*_ENGINE, *(f"bench/{n}.py" for n in ("engine", "kernels", "ceilings", "peers"))),
    "kernels": (*_ENGINE, "bench/kernels.py"),
    "search": (*_SEARCH, *_BESIDE, "training/corpus.py"),
    "identity": (*_SEARCH, "engine/foreign.py", "experiments/plans.py", "bench/identity.py"),
    "prm": (*_SEARCH, "training/corpus.py", "bench/prm.py"),
    "serve": (*_SEARCH, "serving", *(f"bench/{n}.py" for n in ("serve", "engine", "peers"))),
    "soak": (*_SEARCH, "bench/identity.py", "bench/soak.py"),
    "memory": (*_ENGINE, "kvcache", "experiments/statistics.py", "bench/memory.py"),
    "replay": (*_SEARCH, *_REPLAY, "bench/kernels.py", "bench/replay.py"),
    "reenact": (*_SEARCH, *_REPLAY, *(f"bench/{n}.py" for n in ("kernels", "replay", "reenact"))),
}
"""What bears on each benchmark's numbers."""


@cache
def code_of(bench: str) -> dict[str, Any]:
    """commit and dirty, and the digest of the benchmark's sources, as this process found them."""
    gpu = machine_facts()["gpu"] is not None
    return {"git": git_state(), "code": digest(bench, gpu=gpu)}


@cache
def digest(bench: str, commit: str | None = None, gpu: bool = False) -> str | None:
    """Of the benchmark's sources as they are, or were at a commit; None without that commit.

    gpu: with what runs on one only.
    """
    if commit is None:
        return _digest(bench, PACKAGE, gpu)
    texts = (f":(glob)workbench/**/*.{kind}" for kind in ("py", "json"))
    with unpacked(PACKAGE.parent, commit, *texts) as folder:
        return _digest(bench, folder / PACKAGE.name, gpu) if folder else None


def _digest(bench: str, package: Path, gpu: bool) -> str:
    sources = [package / name for name in SOURCES[bench] if gpu or name != _GPU]
    if not gpu:  # records of a GPU were made outside git, with a digest of the whole folder
        at, own = sources.index(package / "engine"), sorted((package / "engine").glob("*.py"))
        sources[at : at + 1] = [each for each in own if f"engine/{each.name}" not in _FOREIGN]
    return code_digest(*(source for source in sources if source.exists()))


def doubts(record: Mapping[str, Any], commit: str | None = None) -> list[str]:
    """Why a record does not stand for the sources as they are (or were at `commit`): changed since,
    measured from changed files. Empty: it stands.
    """
    bench, made, dirty = record["bench"], record["git"]["commit"], record["git"]["dirty"]
    gpu = record["machine"]["gpu"] is not None
    there = made and digest(bench, made, gpu)  # of what counts as its sources today
    known = there or record.get("code")
    if dirty is None:  # outside git, where WORKBENCH_COMMIT names the commit
        dirty = not there or record.get("code", there) != there
    found = {
        "stale: its sources have changed since": known != digest(bench, commit, gpu),
        "dirty: measured with changes that no commit has": dirty,
    }
    return [doubt for doubt, holds in found.items() if holds]


def doubted() -> Iterator[str]:
    """A line for each committed record that does not stand."""
    reports = project_root() / "reports"
    for file in sorted((*reports.glob("bench/*.json"), *reports.glob("gpu/*.json"))):
        record = json.loads(file.read_text(encoding="utf-8"))
        if found := doubts(record):
            at = (record["git"]["commit"] or "no commit")[:12]
            yield f"{file.relative_to(reports)} ({at}): {'; '.join(found)}"


def measure(
    name: str, given: Mapping[str, Any], file: str | None, tell: Callable[[str], None]
) -> list[Row]:
    """Run a benchmark with these options: its rows, each told in a line as soon as it is measured.

    The record is written to the file also of a run that fails, or that Ctrl-C or SIGTERM breaks
    off; beside it, as .partial.json, where the file has one of a whole run. Raises ConfigError,
    before it begins, for an option that it does not take and for no place of a file.
    """
    from workbench.bench.record import record, write_record  # noqa: PLC0415 - takes code_of
    from workbench.search.recording import require_destination  # noqa: PLC0415

    if file:
        require_destination(file)
    module = import_module(f"workbench.bench.{name}")
    rows: list[Row] = []
    settings = accepted(name, module.run, given)
    mode, complete = mode_of(module, settings), False
    there: dict[str, Any] = {}
    with suppress(OSError, ValueError, LookupError, TypeError):  # no record is there
        held = json.loads(Path(file or "").read_text(encoding="utf-8"))
        there |= held["mode"] | {"bench": held["bench"]}
    for what in ("bench", "model", "llm", "prm", "part"):
        own = (mode | {"bench": name}).get(what)
        if there.get(what, own) != own:
            told = what if what == "bench" else f"--{what}"
            raise ConfigError(f"{file} is of {told} {there[what]}; name another file.")
    code_of(name)  # read before it begins
    # `timeout` sends SIGTERM: the benchmark ends as on Ctrl-C, its rows are written
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for row in module.run(**settings):
            rows.append(row)
            tell(line_of(row))
        complete = True
    finally:
        signal.signal(signal.SIGTERM, handler)
        if file and rows:
            place = Path(file)
            if there.get("complete") and not complete:
                place = place.with_suffix(".partial.json")
            content = record(name, rows, mode | {"complete": complete})
            tell(f"written: {write_record(content, place)}")
    return rows


def accepted(name: str, measured: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options this benchmark takes, defaults filled in; one it does not take is refused."""
    known = {name: each.default for name, each in inspect.signature(measured).parameters.items()}
    given = dict(given)
    if "model" in given and {"model", "llm"} & known.keys() == {"llm"}:  # the first of two
        if "llm" in given:
            raise ConfigError(f"bench {name} takes --model or --llm, which are one, not both.")
        given["llm"] = given.pop("model")
    for each in given:
        if each not in known:
            no, *takes = (f"--{own.replace('_', '-')}" for own in (each, *known))
            raise ConfigError(f"bench {name} takes no {no}; it takes {', '.join(takes)}.")
    return known | given


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


def line_of(row: Row) -> str:
    """One row as a line: name, value, peer and ratio, ceiling, spread."""
    parts = [f"{row.name:32} {row.value:>12,.4g} {row.unit}"]
    if row.ratio is not None:
        parts.append(f"{row.ratio:.2f}x {row.peer} ({row.peer_value:,.4g})")
    if row.share_of_ceiling is not None:
        parts.append(f"{row.share_of_ceiling:.0%} of the ceiling")
    if isinstance(row.spread, tuple):
        parts.append(f"[{row.spread[0]:.3g}, {row.spread[1]:.3g}]")
    elif row.spread is not None:
        parts.append(f"± {row.spread:.2g}")
    return "  ".join(parts)
