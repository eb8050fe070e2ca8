"""`workbench bench`: a benchmark's rows as they are measured, and its record."""

from __future__ import annotations

import argparse
import inspect
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from workbench.bench.record import Row, read_record, record, renewed, require_alike, write_record
from workbench.cli.settings import terminal
from workbench.errors import ConfigError

MODELS = ("model", "llm", "prm")
OPTIONS = ("profile", *MODELS, "problems", "seed", "seeds", "repeats", "peers", "device", "part")


def run(given: argparse.Namespace) -> int:
    """Measure, print each row, write the record when asked: also of a run that was broken off.

    Exit status 1 when what a row was to measure failed.
    """
    module, console = import_module(f"workbench.bench.{given.name}"), terminal()
    settings = accepted(module.run, given)
    before = read_record(given.json) if _is_again(settings, given.json) else None
    if before is not None:  # before anything is measured
        require_alike(before, record(given.name, [], mode_of(module, settings)))
    rows: list[Row] = []
    complete = False
    try:
        with _termination_interrupts():
            for row in module.run(**settings):
                rows.append(row)
                console.print(line(row))
        complete = True
    finally:
        if given.json and rows:
            mode = mode_of(module, settings) | {"complete": complete}
            content = record(given.name, rows, mode)
            if before is not None:
                content = renewed(before, content)
            console.print(f"written: {write_record(content, given.json)}")
    failed = [row.name for row in rows if row.failed]
    if failed:
        console.print(f"Failed: {', '.join(failed)}.", style="red")
    return int(bool(failed))


def _is_again(settings: dict[str, Any], file: str | None) -> bool:
    """Whether a part is measured whose rows have their place in a record that is there."""
    return settings.get("part") is not None and file is not None and Path(file).exists()


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM, which `timeout` sends, ends a benchmark as Ctrl-C does: its rows are written."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def mode_of(module: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """How it was run: the settings, and the module's mode_of(settings) or MODE.

    A file is recorded by its name: records are public, and paths are of one machine.
    """
    own = module.mode_of(settings) if hasattr(module, "mode_of") else getattr(module, "MODE", {})
    mode = settings | own
    return {k: Path(v).name if _is_path(v) else v for k, v in mode.items()}


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and (Path(value).is_absolute() or Path(value).exists())


def accepted(measure: Any, given: argparse.Namespace) -> dict[str, Any]:
    """The options this benchmark takes, defaults filled in; one it does not take is refused."""
    known = inspect.signature(measure).parameters
    named = {n: getattr(given, n) for n in OPTIONS if getattr(given, n) is not None}
    if "model" in named and "model" not in known:  # searches name two models, this is the first
        named.setdefault("llm", named.pop("model"))
    for name in named:
        if name not in known:
            takes = ", ".join(f"--{n}" for n in OPTIONS if n in known)
            raise ConfigError(f"bench {given.name} takes no --{name}; it takes {takes}.")
    return {n: named.get(n, known[n].default) for n in OPTIONS if n in known}


def line(row: Row) -> str:
    """One row as a line: name, value, peer and ratio, ceiling, spread."""
    parts = [f"{row.name:32} {row.value:>12,.4g} {row.unit}"]
    if row.ratio is not None:
        parts.append(f"{row.ratio:.2f}x {row.peer} ({row.peer_value:,.4g})")
    if row.share_of_ceiling is not None:
        parts.append(f"{row.share_of_ceiling:.0%} of the ceiling")
    if isinstance(row.spread, tuple):
        parts.append(f"[{row.spread[0]:.3g}, {row.spread[1]:.3g}]".replace("[", "\\["))
    elif row.spread is not None:
        parts.append(f"± {row.spread:.2g}")
    return "  ".join(parts)
