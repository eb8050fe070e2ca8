"""Run folders: NAME-FINGERPRINT/ with Parquet tables and config.json, whole or not there at all.

A folder is written under a temporary sibling name, flushed to disk and renamed in one step, so a
run killed at any moment leaves no half result under its own name. The temporary name carries host
and process; the next start removes those whose process is gone. What it does not do: decide what is
run.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.errors import RunStoreError, nearest
from workbench.trace import read_table, write_table

TABLES = ("runs", "problems", "steps", "requests", "nodes", "spans")
CONFIG = "config.json"
TEMPORARY = ".tmp-"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunStore:
    """The folder of run folders; of several processes the first to finish a run wins."""

    root: Path

    def folder(self, name: str, fingerprint: str) -> Path:
        """Where a run of this name and fingerprint is kept."""
        return self.root / f"{name}-{fingerprint}"

    def find(self, fingerprint: str) -> Path | None:
        """The run folder of a fingerprint, whatever its name and status."""
        found = sorted(self.root.glob(f"[!.]*-{fingerprint}"))
        return found[0] if found else None

    def write(self, name: str, config: Row, tables: Mapping[str, pd.DataFrame]) -> Path:
        """Store a run atomically; `tables` holds at least `runs` with one row. Answers its folder.

        A failed run under the same name is replaced; a finished one is kept and ours is dropped,
        since equal fingerprints mean equal runs.
        """
        row = tables["runs"].iloc[0]
        target = self.folder(name, str(row["fingerprint"]))
        temporary = self._temporary(target.name)
        temporary.mkdir(parents=True)
        for table, frame in tables.items():
            _write_table(temporary / f"{table}.parquet", frame)
        _write_text(temporary / CONFIG, json.dumps(config, indent=2, sort_keys=True, default=str))
        _flush_folder(temporary)
        self.publish(temporary, target)
        return target

    def publish(self, temporary: Path, target: Path) -> None:
        """Give a complete temporary folder its name; what did not finish makes room, what did
        stays.
        """
        if target.exists() and status_of(target) == "finished":
            shutil.rmtree(temporary)
            return
        if target.exists():
            aside = self._temporary(target.name)
            os.replace(target, aside)
            shutil.rmtree(aside)
        try:
            os.replace(temporary, target)
        except OSError:  # another process published the same run in this very moment
            if not (target / CONFIG).is_file():
                raise
            shutil.rmtree(temporary)
        _flush_folder(self.root)

    def clear_leftovers(self) -> list[Path]:
        """Remove temporary folders of this host's dead processes; answers what was removed."""
        removed = []
        for folder in self.root.glob(f"{TEMPORARY}*"):
            host, process = folder.name.removeprefix(TEMPORARY).split("+")[:2]
            if host == _host() and process.isdigit() and not _is_alive(int(process)):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
        return removed

    def folders(self) -> list[Path]:
        """Every run folder, by name; an empty list where nothing was stored yet."""
        if not self.root.is_dir():
            return []
        visible = (p for p in self.root.iterdir() if not p.name.startswith("."))
        return sorted(folder for folder in visible if (folder / CONFIG).is_file())

    def _temporary(self, name: str) -> Path:
        owner = f"{_host()}+{os.getpid()}"
        return self.root / f"{TEMPORARY}{owner}+{name}+{uuid.uuid4().hex[:8]}"


def load_runs(path: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """One row a run: every parameter, memory part, throughput, status; `folder` says where it lies.

    path: the folder of run folders, one run folder, or several of either. Raises RunStoreError
    where `path` is no such folder; one run that cannot be read does not hide the others: its status
    is "unreadable", `error` says why.
    """
    rows = [_row_or_reason(folder) | {"folder": str(folder)} for folder in run_folders(path)]
    return pd.DataFrame(rows, columns=None if rows else ["run_id", "status", "folder"])


def load_table(path: str | Path | Iterable[str | Path], table: str) -> pd.DataFrame:
    """Rows of one table of all runs at `path`; empty runs (failed, infeasible) add none."""
    if table not in TABLES:
        raise RunStoreError(
            f"There is no table {table!r}.{nearest(table, TABLES)} Tables: {', '.join(TABLES)}."
        )
    files = [folder / f"{table}.parquet" for folder in run_folders(path)]
    frames = [frame for file in files if file.is_file() and len(frame := read_table(file))]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({"run_id": []})


def run_folders(path: str | Path | Iterable[str | Path]) -> list[Path]:
    """The run folders `path` stands for: itself, those within it, or those of several paths."""
    if not isinstance(path, str | Path):
        return [folder for each in path for folder in run_folders(each)]
    folder = Path(path)
    if (folder / CONFIG).is_file():
        return [folder]
    if not folder.is_dir():
        raise RunStoreError(
            f"There is no run folder {str(folder)!r}; `workbench runs list` names those there are."
        )
    return RunStore(folder).folders()


def read_run(folder: Path) -> Row:
    """The one row of a run's `runs` table."""
    frame = read_table(folder / "runs.parquet")
    if len(frame) != 1:
        raise RunStoreError(
            f"{folder.name}/runs.parquet has {len(frame)} rows; a run has exactly one."
        )
    return {str(name): value for name, value in frame.to_dict("records")[0].items()}


def status_of(folder: Path) -> str:
    """finished | failed | infeasible, or unreadable when its tables are damaged or of another
    schema.
    """
    return str(_row_or_reason(folder)["status"])


def _row_or_reason(folder: Path) -> Row:
    try:
        return read_run(folder)
    except RunStoreError as problem:
        return {"run_id": folder.name, "status": "unreadable", "error": str(problem)}


def read_config(folder: Path) -> Row:
    """The settings and identity a run was made with."""
    try:
        return json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise RunStoreError(
            f"{folder.name}/{CONFIG} cannot be read ({problem}); delete the folder, run it again."
        ) from problem


def _write_table(file: Path, frame: pd.DataFrame) -> None:
    write_table(frame, file)
    with file.open("rb") as written:
        os.fsync(written.fileno())


def _write_text(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8") as out:
        out.write(text + "\n")
        out.flush()
        os.fsync(out.fileno())


def _flush_folder(folder: Path) -> None:
    """Make the folder's own entries durable, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def _host() -> str:
    return "".join(c if c.isalnum() else "-" for c in socket.gethostname()) or "host"


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OSError):
        return True
    return True
