"""Benchmarks: how fast, how good, how sameness holds; one module a question, one record a run.

Here is which sources a record is of, and so which records the code has changed under. A benchmark
is a module with `run(**options) -> Iterator[Row]` and how it was run, MODE or `mode_of(settings)`;
`workbench bench` (cli/tools.py) has its name and options, SOURCES what bears on its numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from workbench.experiments.provenance import (
    PACKAGE,
    code_digest,
    git_state,
    machine_facts,
    project_root,
    unpacked,
)

_GPU = "kernels/triton"  # of records made on a machine with a GPU only
_KERNELS = (*(f"kernels/{n}.py" for n in ("__init__", "isa", "quantised", "reference")),
            "kernels/cpu", _GPU)  # fmt: skip
_ENGINE = ("core.py", "config.py", "host.py", *_KERNELS, *(f"kvcache/{n}.py" for n in (
           "manager", "pool", "storage")), "models", "engine", "bench/record.py")  # fmt: skip
_SEARCH = (*_ENGINE, "kvcache", "tokenizer.py", "trace.py", "search", "experiments/execute.py",
           "experiments/memory.py", "experiments/settings.py", "experiments/statistics.py",
           "bench/search.py")  # fmt: skip
_BESIDE = ("beside", "engine", "peers", "serve")
_REPLAY = tuple(f"replay/{n}.py" for n in ("answers", "cost", "devices", "miss_ratio", "simulator",
                                           "what_if", "workload"))  # fmt: skip
_STUDY = ("experiments/study.py", "experiments/rows.py", "experiments/statistics.py")
SOURCES = {
    "engine": (*_ENGINE, *(f"bench/{n}.py" for n in ("engine", "kernels", "ceilings", "peers"))),
    "kernels": (*_ENGINE, "bench/kernels.py"),
    "search": (*_SEARCH, *(f"bench/{n}.py" for n in _BESIDE)),
    "identity": (*_SEARCH, "bench/identity.py"),
    "prm": (*_SEARCH, "training/corpus.py", "bench/prm.py"),
    "serve": (*_SEARCH, "serving", *(f"bench/{n}.py" for n in ("serve", "engine", "peers"))),
    "soak": (*_SEARCH, "bench/identity.py", "bench/soak.py"),
    "memory": (*_SEARCH, *_STUDY, "bench/memory.py"),
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
    sources = (package / name for name in SOURCES[bench] if gpu or name != _GPU)
    return code_digest(*(source for source in sources if source.exists()))


def doubts(record: Mapping[str, Any], commit: str | None = None) -> list[str]:
    """Why a record does not stand for the sources as they are (or were at `commit`): changed since,
    measured from changed files, rows of several commits. Empty: it stands.
    """
    bench, made, dirty = record["bench"], record["git"]["commit"], record["git"]["dirty"]
    gpu = record["machine"]["gpu"] is not None
    there = made and digest(bench, made, gpu)  # of what counts as its sources today
    known = there or record.get("code")
    if dirty is None:  # outside git, where WORKBENCH_COMMIT names the commit
        dirty = not there or record.get("code", there) != there
    commits = {made, *(each for times in record.get("again", {}).values() for each in times)}
    found = {
        "stale: its sources have changed since": known != digest(bench, commit, gpu),
        "dirty: measured with changes that no commit has": dirty,
        f"mixed: rows of {len(commits)} commits": len(commits) > 1,
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
