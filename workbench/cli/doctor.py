"""`workbench doctor`: what this machine has, what will be used, what is missing and how to get it.

Looks, and changes nothing; asks no network. Exit status 1 when something is missing that every run
needs; what only some commands need is named with its remedy and changes no exit status.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.table import Table

from workbench.config import format_size
from workbench.errors import WorkbenchError
from workbench.experiments.machine import cpu_features, git_state, machine_facts, versions
from workbench.experiments.paths import project_root, runs_folder
from workbench.models.architectures import ARCHITECTURES
from workbench.search.prm_formats import FORMATS

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
EXTRAS = {
    "math-verify": ("answers that are not whole numbers", "pip install math-verify"),
    "transformers": ("bench engine's peer, train-tiny", "pip install transformers"),
    "papermill": ("figures", "pip install 'workbench[notebooks]'"),
    "kaleido": ("figures as SVG and PDF", "pip install kaleido"),
    "jupyterlab": ("make lab", "pip install 'workbench[notebooks]'"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. remedy: empty where all is well; needed: no run works without it."""

    topic: str
    found: str
    remedy: str = ""
    needed: bool = False


def run(console: Console | None = None) -> int:
    """Print the report; 1 when something needed is missing, else 0."""
    findings = list(examine())
    (console or Console()).print(as_table(findings))
    return int(any(finding.needed and finding.remedy for finding in findings))


def examine() -> Iterator[Finding]:
    """Every finding, cheapest first."""
    yield from machine()
    yield from software()
    yield from supported()
    yield from embedded_models()
    yield browser()
    yield store()


def as_table(findings: list[Finding]) -> Table:
    """Topic, what was found, and the remedy where one is wanted."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    remedies = any(finding.remedy for finding in findings)
    if remedies:
        table.add_column("what to do", overflow="fold")
    for finding in findings:
        style = "" if not finding.remedy else "red" if finding.needed else "yellow"
        cells = (finding.topic, finding.found, finding.remedy)
        table.add_row(*cells[: 2 + remedies], style=style)
    return table


def machine() -> Iterator[Finding]:
    """Processor, memory and GPU; the threads a matrix product takes."""
    import_module("torch")  # so that its own thread count and GPU are told
    facts = machine_facts()
    features = " ".join(cpu_features())
    yield Finding("processor", f"{facts['cpu']}, {facts['cores']} cores usable, {features}")
    crowded = facts["threads"] > facts["cores"]
    slow = f"more threads than cores: set OMP_NUM_THREADS={facts['cores']}" if crowded else ""
    yield Finding("threads", f"{facts['threads']} a matrix product", slow)
    memory = facts["memory_bytes"]
    yield Finding("memory", format_size(memory) if memory else "not told by this system")
    yield Finding("GPU", facts["gpu"] or "none seen by torch")


def software() -> Iterator[Finding]:
    """Versions of what takes part in a measurement, the commit, and the extras that lack."""
    yield Finding("versions", ", ".join(f"{k} {v}" for k, v in versions().items()))
    git = git_state()
    changed = ", with changes" if git["dirty"] else ""
    yield Finding("commit", f"{git['commit'][:12]}{changed}" if git["commit"] else "no checkout")
    for name, (purpose, remedy) in EXTRAS.items():
        if not _installed(name):
            yield Finding(name, f"not installed; wanted by: {purpose}", remedy)


def supported() -> Iterator[Finding]:
    """What may be asked for by name."""
    yield Finding("architectures", ", ".join(ARCHITECTURES))
    yield Finding("PRM formats", ", ".join(FORMATS))


def embedded_models() -> Iterator[Finding]:
    """The two models that come with the package, read and prepared as a run does it."""
    loading = import_module("workbench.models.loading")
    for name in ("tiny-solver", "tiny-prm"):
        try:
            model = loading.load_model(name)
        except WorkbenchError as error:
            yield Finding(name, "cannot be loaded", str(error), needed=True)
            continue
        size = format_size(model.weight_bytes)
        found = f"{size} of weights; {model.kernels.name} kernels on {model.device}"
        yield Finding(name, f"{found}; {sameness(model)}")


def sameness(model: Any) -> str:
    """Whether a row's result depends on the other rows."""
    if not model.kernels.batch_invariant:
        return "tokens may differ between batches"
    return f"equal tokens in any batch, {model.kernels.team.threads} threads"


def browser() -> Finding:
    """Chromium or Chrome, for SVG and PDF."""
    places = (os.environ.get("BROWSER_PATH"), *map(shutil.which, BROWSERS))
    found = next(filter(None, places), None)
    remedy = "SVG and PDF need one (Debian: apt install chromium), or set BROWSER_PATH"
    return Finding("browser", found or "none", "" if found else remedy)


def store() -> Finding:
    """Where runs are kept, and the room left there."""
    folder = runs_folder()
    free = shutil.disk_usage(project_root()).free
    runs = sum(1 for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else 0
    remedy = "less than 1 GiB is left on this disk" if free < 2**30 else ""
    return Finding("runs", f"{folder}: {runs} kept, {format_size(free)} free", remedy)


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False
