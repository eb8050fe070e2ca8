"""Runs as they are kept: NAME-FINGERPRINT/ with Parquet tables and config.json, whole or not.

A folder is written under a temporary sibling name, flushed to disk and renamed in one step, so a
run killed at any moment leaves no half result under its own name; the next start removes what dead
processes left. A run that failed or could not be built is a row like any other, with its reason.
Archives carry run folders between machines; nothing in one is trusted. Stored runs are compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import socket
import tarfile
import tempfile
import traceback
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from html import escape
from itertools import product
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from workbench.config import SweepConfig, format_size, refused
from workbench.errors import DeviceOutOfMemory, OutOfMemory, RunStoreError, nearest
from workbench.experiments import settings, statistics
from workbench.experiments.memory import ENGINES, Feasibility, feasibility
from workbench.experiments.provenance import describe, machine_facts, number, this_code, versions
from workbench.experiments.settings import Identity, RunSpec, fingerprint_of, hash_of
from workbench.experiments.statistics import WORK, Interval, Noise
from workbench.models.registry import DUMMY, find_model
from workbench.replay.workload import load_recording, recording_names
from workbench.search.problems import Problem, load_problems
from workbench.trace import SCHEMA_VERSION, read_rows, read_table, write_table

FINISHED, FAILED, INFEASIBLE = "finished", "failed", "infeasible"
TABLES = ("runs", "problems", "steps", "requests", "nodes", "spans")
CONFIG = "config.json"
TEMPORARY = ".tmp-"
Row = dict[str, Any]
Folders = str | Path | Iterable[str | Path]
Named = dict[str, list[Path]]

# -- what a run depends on beside its settings --

WHOLE_UP_TO = 256 * 2**20
"""Bytes up to which a file is hashed as a whole; of larger ones size, header and samples."""
SAMPLE, SAMPLES = 2**20, 16
MODEL_FILES = ("*.json", "*.safetensors", "*.gguf", "*.jinja", "*.model")


def identify(config: SweepConfig) -> Identity:
    """The identity of a sweep's runs. Raises ModelError, ProblemFileError, or ConfigError for more
    problems than there are.
    """
    llm, prm = model_fingerprint(config.llm), model_fingerprint(config.prm)
    problems = [(p.id, p.problem, p.answer, p.level) for p in sweep_problems(config)]
    if (count := len(problems)) < config.num_problems:
        allowed = f"at most {count}, as {config.problems!r} has no more"
        allowed += " of these levels" if config.levels else ""
        raise refused(type(config), "num_problems", config.num_problems, allowed)
    return Identity(llm, prm, hash_of(problems), this_code()["code"], SCHEMA_VERSION)


def sweep_problems(config: SweepConfig) -> list[Problem]:
    """The problems that every run of the sweep searches, in the same order; `problems` may name a
    recording of the package, whose they then are.
    """
    if config.problems in recording_names():
        for name in ("levels", "problem_seed"):
            if given := getattr(config, name):
                raise refused(type(config), name, given, "none: a recording has its own problems")
        recorded = load_recording(config.problems).problems[: config.num_problems]
        return [each.problem for each in recorded]
    picked = config.num_problems, config.levels or None, config.problem_seed
    return load_problems(config.problems, *picked)


def model_fingerprint(model: str) -> str:
    """12 hexadecimal digits over the content of a model's files; of a dummy only its configs."""
    dummy, digest = model.startswith(DUMMY), hashlib.sha256()
    where = find_model(model.removeprefix(DUMMY), weights=not dummy)
    patterns = MODEL_FILES[:1] if dummy else MODEL_FILES
    for file in sorted(file for pattern in patterns for file in where.glob(pattern)) or [where]:
        size = file.stat().st_size
        digest.update(f"{file.name}\x1f{size}\x1f".encode())
        far = [k * (size - SAMPLE) // (SAMPLES - 1) for k in range(SAMPLES)]
        with file.open("rb") as content:
            # the first sample holds the header of a safetensors file
            for start in range(0, size, SAMPLE) if size <= WHOLE_UP_TO else far:
                content.seek(start)
                digest.update(content.read(SAMPLE))
    return ("dummy-" if dummy else "") + digest.hexdigest()[:12]


# -- the tables of one run --


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run brings: measured columns of its row; its tables without `runs`."""

    measured: Mapping[str, Any]
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)


Outcome = RunResult | Feasibility | Exception
"""What a run brought; what it lacks; or what building its engines or it raised."""


def _tables(spec: RunSpec, identity: Identity, outcome: Outcome) -> dict[str, pd.DataFrame]:
    """All tables of a run, `runs` included; every row carries the run's id."""
    status, error = FINISHED, None
    room = outcome if isinstance(outcome, Feasibility) else feasibility(spec)
    notes: Row = dict(room.columns)
    is_busy = isinstance(outcome, DeviceOutOfMemory)  # which --retry-failed may find otherwise
    if isinstance(outcome, Feasibility | OutOfMemory) and not is_busy:
        status, error = INFEASIBLE, str(outcome)
    elif isinstance(outcome, Exception):
        status, error = FAILED, f"{type(outcome).__name__}: {outcome}"
        notes["traceback"] = "".join(traceback.format_exception(outcome))
    result = outcome if isinstance(outcome, RunResult) else RunResult({})
    fingerprint = spec.fingerprint(identity)
    run_id = f"{spec.name}-{fingerprint}"
    row: Row = {"run_id": run_id, "name": spec.name, "fingerprint": fingerprint, "status": status}
    row |= {"error": error, "role": spec.role, "profile": spec.config.profile}
    row |= {"written_at": datetime.now(UTC).isoformat(timespec="seconds")}
    row |= {"llm_bytes": spec.llm_bytes, "prm_bytes": spec.prm_bytes}
    row |= {n: json.dumps(v) if isinstance(v, tuple) else v for n, v in spec.parameters.items()}
    row |= notes | machine_columns(spec.config.device) | {"code": identity.code}
    row |= result.measured
    tables = {name: frame.assign(run_id=run_id) for name, frame in result.tables.items()}
    return {"runs": pd.DataFrame([row])} | tables


def machine_columns(device: str) -> Row:
    """Columns that say on what a run was measured: machine, versions, commit."""
    machine = machine_facts(device)
    columns = {f"machine_{name}": value for name, value in machine.items()}
    columns |= {f"git_{name}": this_code()[name] for name in ("commit", "dirty")}
    columns["versions"] = json.dumps(versions(), sort_keys=True)
    return columns | {"machine": describe(machine)}


# -- the store --


@dataclass(frozen=True, slots=True)
class RunStore:
    """The folder of run folders; of several processes the first to finish a run wins."""

    root: Path

    def folder(self, spec: RunSpec, identity: Identity) -> Path:
        """Where a run is written."""
        return self.root / f"{spec.name}-{spec.fingerprint(identity)}"

    def stored(self, spec: RunSpec, identity: Identity, named: Named | None = None) -> Path | None:
        """The folder of a run. named: where there is none, that of its like of other code."""
        if (own := self.folder(spec, identity)).exists():
            return own
        return None if named is None else self.stale(spec, identity, named)

    def by_name(self) -> Named:
        """Every run folder by its run's name, for many to be looked up."""
        found: Named = {}
        for folder in self.folders():
            found.setdefault(folder.name.rpartition("-")[0], []).append(folder)
        return found

    def stale(self, spec: RunSpec, identity: Identity, named: Named) -> Path | None:
        """The finished run that differs from this one in its code alone; of several the newest.
        named: as of by_name.
        """

        def but_code(parameters: Row, role: str, identity: Row, **_: Any) -> str:
            """The fingerprint without the code, or what older runs have in its place."""
            parts = {n: v for n, v in identity.items() if n not in ("code", "version")}
            return fingerprint_of(parameters, role, parts)

        own, found = but_code(spec.parameters, spec.role, asdict(identity)), []
        for folder in named.get(spec.name, ()):
            row = _row_or_reason(folder)
            with suppress(RunStoreError, TypeError):  # its settings cannot be read
                if row["status"] == FINISHED and but_code(**read_config(folder)) == own:
                    found.append((row["written_at"], folder))
        return max(found)[1] if found else None

    def write(self, spec: RunSpec, identity: Identity, outcome: Outcome) -> Path:
        """Store a run atomically, whatever became of it; returns its folder.

        A failed run under the same name is replaced; a finished one is kept and ours is dropped,
        since equal fingerprints mean equal runs. config.json: enough to make the same run again.
        """
        fingerprint = spec.fingerprint(identity)
        config: Row = {"name": spec.name, "role": spec.role, "fingerprint": fingerprint}
        config |= {"parameters": spec.parameters, "identity": asdict(identity)}
        target = self.folder(spec, identity)
        temporary = self._temporary(target.name)
        temporary.mkdir(parents=True)
        for table, frame in _tables(spec, identity, outcome).items():
            write_table(frame, temporary / f"{table}.parquet")
        text = json.dumps(config, indent=2, sort_keys=True, default=str)
        (temporary / CONFIG).write_text(text + "\n", encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            _flush(path)
        self.publish(temporary, target)
        return target

    def publish(self, temporary: Path, target: Path) -> None:
        """Give a complete temporary folder its name, unless a finished run has it already."""
        if target.exists() and status_of(target) == FINISHED:
            shutil.rmtree(temporary)
            return
        if target.exists():
            aside = self._temporary(target.name)
            with suppress(FileNotFoundError):  # another process has moved it aside already
                os.replace(target, aside)
                if status_of(aside) == FINISHED:  # another process has finished it meanwhile
                    temporary, aside = aside, temporary
                shutil.rmtree(aside)
        try:
            os.replace(temporary, target)
        except OSError:  # another process published the same run in this very moment
            if not (target / CONFIG).is_file():
                raise
            self.publish(temporary, target)
        _flush(self.root)

    def require_writable(self) -> None:
        """RunStoreError where no run can be kept, before one is carried out."""
        probe = self._temporary("probe")
        try:
            probe.mkdir(parents=True)
            probe.rmdir()
        except OSError as problem:
            raise RunStoreError(
                f"No run can be kept in {str(self.root)!r} ({problem}); give another folder."
            ) from problem

    def clear_leftovers(self) -> None:
        """Remove temporary folders of this host's dead processes."""
        for folder in self.root.glob(f"{TEMPORARY}{_host()}+*"):
            with suppress(PermissionError, ValueError):  # another user's, or not ours
                try:
                    os.kill(int(folder.name.split("+")[1]), 0)
                except ProcessLookupError:
                    shutil.rmtree(folder, ignore_errors=True)

    def folders(self) -> list[Path]:
        """Every run folder, by name; an empty list where nothing was stored yet."""
        return sorted(file.parent for file in self.root.glob(f"[!.]*/{CONFIG}"))

    def _temporary(self, name: str) -> Path:
        return self.root / f"{TEMPORARY}{_host()}+{os.getpid()}+{name}+{uuid.uuid4().hex[:8]}"


def held(folder: Path | None, retry_failed: bool = False) -> str | None:
    """The status of a stored run that needs no repetition: finished, infeasible, or failed and not
    retried; None of any other.
    """
    status = None if folder is None else status_of(folder)
    return None if status == "unreadable" or (status == FAILED and retry_failed) else status


def of_other_code(runs: pd.DataFrame) -> pd.Series:
    """Which stored runs were made by other code than this process has."""
    told = runs.reindex(columns=["code", "role", "rung"])
    is_replay = (told["role"] == settings.REPLAY) | told["rung"].notna()  # a failed one has no rung
    return told["code"] != is_replay.map(lambda replayed: this_code(replayed)["code"])


def _flush(path: Path) -> None:
    """Make a file, or a folder's entries, durable, where the system can."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _host() -> str:
    return "".join(c if c.isalnum() else "-" for c in socket.gethostname()) or "host"


# -- reading --


def load_runs(path: Folders) -> pd.DataFrame:
    """One row a run: every parameter, memory part, throughput, status; `folder` says where it lies.

    path: the folder of run folders, one run folder, or several of either; RunStoreError where it is
    none. The status of a run that cannot be read is "unreadable", `error` says why.
    """
    rows = [_row_or_reason(folder) | {"folder": str(folder)} for folder in _run_folders(path)]
    return pd.DataFrame(rows, columns=None if rows else ["run_id", "status", "folder"])


class RunTables:
    """Tables of runs that are read once: a study's, or those of a pick. runs, all_runs: rows of
    load_runs.
    """

    if TYPE_CHECKING:  # a field may stand in their place

        @property
        def runs(self) -> pd.DataFrame: ...
        @property
        def all_runs(self) -> pd.DataFrame: ...

    @cached_property
    def _read(self) -> dict[Any, pd.DataFrame]:
        return {}

    def table(
        self,
        name: str,
        llm_share: float | None = None,
        seed: int | None = None,
        runs: pd.DataFrame | None = None,
    ) -> pd.DataFrame:
        """Rows of one trace table of `runs` (default: its own), with columns llm_share, run_seed,
        setting, role and repeat.
        """
        runs = known = self.runs if runs is None else runs
        for column, value in (("llm_share", llm_share), ("seed", seed)):
            if value is not None and len(runs):
                runs = runs[(runs[column] - value).abs() < 1e-9]
        if runs.empty:
            there = {name: sorted(set(known.get(name, ()))) for name in ("llm_share", "seed")}
            raise RunStoreError(
                f"There is no finished run at llm_share={llm_share}, seed={seed}, only at {there}."
            )
        keys = ["run_id", "llm_share", "seed", "setting", "role", "repeat"]
        own = runs[[key for key in keys if key in runs]].rename(columns={"seed": "run_seed"})
        key = name, tuple(runs["folder"])
        if key not in self._read:
            self._read[key] = load_table(key[1], name)
        return self._read[key].merge(own, on="run_id", how="left")


def load_table(path: Folders, table: str) -> pd.DataFrame:
    """Rows of one table of all runs at `path`; empty runs (failed, infeasible) add none.

    Raises RunStoreError where one came in a light archive, without this table.
    """
    if table not in TABLES:
        raise RunStoreError(
            f"There is no table {table!r}.{nearest(table, TABLES)} Tables: {', '.join(TABLES)}."
        )
    folders = _run_folders(path)
    files = [folder / f"{table}.parquet" for folder in folders]
    for folder, file in zip(folders, files, strict=True):
        if file.is_file() or not {each.name for each in folder.iterdir()} <= {*LIGHT}:
            continue
        row = read_run(folder)
        if row["status"] == FINISHED and row["role"] != settings.COUNTED:  # which has no table
            raise RunStoreError(
                f"{folder.name} has no {table}: it came in a light archive. Import a whole one "
                "elsewhere (--runs DIR), or delete the folder and run it again."
            )
    frames = [frame for file in files if file.is_file() and len(frame := read_table(file))]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({"run_id": []})


def _run_folders(path: Folders) -> list[Path]:
    """The run folders `path` stands for: itself, those within it, or those of several paths."""
    if not isinstance(path, str | Path):
        return [folder for each in path for folder in _run_folders(each)]
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
    rows = read_rows(folder / "runs.parquet")
    if len(rows) != 1:
        raise RunStoreError(f"{folder.name}/runs.parquet has {len(rows)} rows; a run has one.")
    return rows[0]


def status_of(folder: Path) -> str:
    """finished | failed | infeasible, or unreadable: damaged tables, or of another schema."""
    return str(_row_or_reason(folder)["status"])


def _row_or_reason(folder: Path) -> Row:
    try:
        return read_run(folder)
    except RunStoreError as problem:
        return {"run_id": folder.name, "status": "unreadable", "error": str(problem)}


def read_config(folder: Path) -> Row:
    """The settings and identity a run was made with."""
    try:
        return dict[str, Any](json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as problem:
        raise RunStoreError(
            f"{folder.name}/{CONFIG} cannot be read ({problem}); delete the folder, run it again."
        ) from problem


# -- archives: .tar, .tar.gz or .tgz --

LIGHT = (CONFIG, "runs.parquet", "problems.parquet")
FILES = frozenset({CONFIG, *(f"{table}.parquet" for table in TABLES)})
ENDINGS = (".tar", ".tar.gz", ".tgz")
DAMAGED = (tarfile.TarError, zlib.error, EOFError)
"""What reading an archive raises that is damaged or packed otherwise."""
LARGEST_ARCHIVE = 8 << 30  # bytes, unpacked: a thousand times a study of all figures


def export_runs(path: Folders, archive: str | Path, light: bool = False) -> list[str]:
    """Write the runs at `path` into a new file `archive`; returns their names. light: what each
    brought as a whole and problem by problem, without steps, requests, nodes and spans.
    """
    target, folders = _archive(archive), _run_folders(path)
    if target.exists():
        raise RunStoreError(f"{target.name} exists already; name another file or delete it first.")
    if not folders:
        raise RunStoreError(
            "There are no runs to export; `workbench runs list` shows what is stored."
        )
    taken = LIGHT if light else FILES
    files = [file for d in folders for file in sorted(d.iterdir()) if file.name in taken]
    target.parent.mkdir(parents=True, exist_ok=True)
    partly = target.with_name(f".{target.name}.partial")
    try:
        with tarfile.open(partly, "w:" if target.suffix == ".tar" else "w:gz") as tar:
            for file in files:
                tar.add(file, f"{file.parent.name}/{file.name}", filter=_of_nobody)
        partly.replace(target)
    finally:
        partly.unlink(missing_ok=True)
    return [folder.name for folder in folders]


def _of_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def import_runs(archive: str | Path, runs_dir: str | Path) -> tuple[list[str], list[str]]:
    """Store the runs of `archive`; returns the names stored, and those there already, equal.

    All are checked first, and a bad one stores none; nothing stored is overwritten.
    """
    source, store = _archive(archive), RunStore(Path(runs_dir))
    if not source.is_file():
        raise RunStoreError(
            f"There is no archive {str(source)!r}; give a file that `workbench runs export` wrote."
        )
    store.require_writable()
    own = store._temporary("import").name  # clear_leftovers knows it
    with tempfile.TemporaryDirectory(prefix=own, dir=store.root) as scratch:
        _unpack(source, Path(scratch))
        folders = sorted(folder for folder in Path(scratch).iterdir() if folder.is_dir())
        if not folders:
            raise RunStoreError(f"{source.name} holds no run folder; it is not a run archive.")
        for folder in folders:
            row, config = read_run(folder), read_config(folder)
            missing = {"parameters", "role", "identity", "fingerprint", "name"} - config.keys()
            if missing:
                raise RunStoreError(
                    f"{folder.name}/{CONFIG} lacks {', '.join(sorted(missing))}; it is no run."
                )
            made_of = fingerprint_of(config["parameters"], config["role"], config["identity"])
            names = [row.get("fingerprint"), config["fingerprint"]]
            if names != [made_of] * 2 or folder.name != f"{config['name']}-{made_of}":
                raise RunStoreError(
                    f"{folder.name} is not what it says: its settings have fingerprint {made_of}, "
                    f"its row {row.get('fingerprint')}. Export it anew where it was made."
                )

        def differ(one: Path, other: Path) -> bool:
            """Of the files that both have, as one of them may be light."""
            both = [file.name for file in one.iterdir() if (other / file.name).is_file()]
            return any((one / name).read_bytes() != (other / name).read_bytes() for name in both)

        there = [folder for folder in folders if (store.root / folder.name).exists()]
        other = [f.name for f in there if differ(f, store.root / f.name)]
        if other:
            raise RunStoreError(
                f"{', '.join(other)}: already stored with other content (measured elsewhere or "
                "again). Nothing was imported; import into another folder (--runs DIR) and compare "
                "the two."
            )
        fresh = [folder for folder in folders if folder not in there]
        for folder in fresh:
            store.publish(folder, store.root / folder.name)
    return [folder.name for folder in fresh], [folder.name for folder in there]


def _unpack(source: Path, target: Path) -> None:
    """All files of an archive; none is written where one is not a plain file RUN/FILE."""
    size, held = 0, list[tarfile.TarInfo]()
    try:
        with tarfile.open(source) as archive:
            for each in archive:
                if each.isdir():
                    continue
                size += each.size  # a packed tar is unpacked in passing, up to the limit
                if size > LARGEST_ARCHIVE:
                    raise RunStoreError(
                        f"{source.name} unpacks to more than {format_size(LARGEST_ARCHIVE)}, the "
                        "largest that is read; export fewer runs into each archive."
                    )
                if not each.isfile():
                    raise RunStoreError(
                        f"{source.name} holds {each.name!r}, which is no plain file."
                    )
                path = PurePosixPath(each.name)
                if len(path.parts) != 2 or path.parts[0][0] in "/." or path.name not in FILES:
                    raise RunStoreError(
                        f"The archive holds {each.name!r}; allowed: RUN/FILE, FILE of "
                        f"{', '.join(sorted(FILES))}."
                    )
                held.append(each)
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # from 3.11.4 on
            archive.extractall(target, held)
    except (*DAMAGED, OSError) as problem:
        raise RunStoreError(
            f"{source.name} cannot be unpacked ({problem}); it is damaged or no run archive. "
            "Copy it again."
        ) from problem


def _archive(path: str | Path) -> Path:
    if not Path(path).name.endswith(ENDINGS):
        raise RunStoreError(
            f"{Path(path).name!r} is no run archive; its name must end in {', '.join(ENDINGS)}."
        )
    return Path(path)


# -- two runs, or two groups of runs, side by side: differences are paired by problem and seed --

MEANS = {"accuracy": "correct", "tokens": "tokens", "iterations": "iterations"}
"""What is compared of a problem: a column of `problems`."""
RATES = {"tokens_per_s": "tokens", "problems_per_min": "sixty"}
"""What is compared over wall_part_s."""
COUNTS = {
    "hit_rate": ("hit_tokens", "query_tokens", 1),
    "thrash_per_1000": ("thrash_events", "look_ups", 1000),
    "recomputed_tokens": ("recomputed_tokens", "", 1),
}
"""Counts of each model: a column of `runs` over another, or the sum; times a number."""
OF_MEMORY = ("llm_share", "total_memory", "seed", "repeat", "setting", "kv_share", "kv_bytes",
             "budget")  # fmt: skip
"""Settings that say how much room there is, or which run it is."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found.

    parameters: every setting that differs; differences: b - a with intervals, those of rates with
    the machine's noise in them, exactly 0 where both did the same work; accuracy: by level, of both
    sides; has_nodes: whether both sampled nodes, which a replay does not; first_difference: the
    first whose tokens or score differ, None where all are equal; warnings: if not comparable, why.
    """

    parameters: pd.DataFrame
    differences: pd.DataFrame
    accuracy: pd.DataFrame
    has_nodes: bool
    first_difference: str | None
    same_work: bool
    noise: Noise
    warnings: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """Whether every node of every pair has equal tokens and scores."""
        return self.has_nodes and self.first_difference is None

    @property
    def findings(self) -> tuple[str, ...]:
        """What the two have in common, in sentences."""
        work = "The two differ in work, code, machine or settings other than those of memory."
        noise = f"{self.noise}."
        if self.same_work:
            work = "Both sides did the same work; their rates differ by the machine's noise alone."
        tokens = "identical" if self.identical else f"different; first: {self.first_difference}"
        if not self.has_nodes:
            tokens = "not compared, a light archive keeps none, a replay samples none"
        return work, noise[0].upper() + noise[1:], f"Tokens and scores: {tokens}."

    @property
    def tables(self) -> tuple[pd.DataFrame, ...]:
        """What is shown of it, in texts: what was measured of both sides, the difference and its
        interval; accuracy by level; settings that differ. Those without a row are left out.
        """
        measured = [
            {"metric": row["metric"], "A": number(row["a"]), "B": number(row["b"])}
            | {"B minus A": number(row["difference"]), "95 % interval": self._interval(row)}
            for row in self.differences.to_dict("records")
        ]
        levels = []
        for row in self.accuracy.to_dict("records"):
            levels.append({"level": row["level"], "problems": str(row["problems"])})
            for side in "ab":
                found = "{:.3f} ({:.3f} to {:.3f})".format(
                    *(row[f"{side}{end}"] for end in ("", "_low", "_high"))
                )
                levels[-1][f"accuracy of {side.upper()} (95 %)"] = found
        differ = self.parameters.rename(columns={"name": "setting", "a": "A", "b": "B"})
        frames = pd.DataFrame(measured), pd.DataFrame(levels), differ
        return tuple(frame for frame in frames if len(frame))

    def _interval(self, row: Mapping[Any, Any]) -> str:
        """The interval of a row of differences, or why it has none."""
        if row["metric"] in RATES and self.same_work:
            return "the same work"
        if row["metric"] not in RATES | MEANS:
            return "exact"
        ends = row["low"], row["high"]
        return " to ".join(map(number, ends)) if all(map(math.isfinite, ends)) else "not known"

    def _repr_html_(self) -> str:
        notes = "".join(f"<p><b>Warning:</b> {escape(text)}</p>" for text in self.warnings)
        tables = "".join(frame.to_html(index=False) for frame in self.tables)
        return notes + tables + "".join(f"<p>{escape(text)}</p>" for text in self.findings)


def compare(a: Folders, b: Folders) -> Comparison:
    """Compare two sides: each a run folder, several, or a folder of run folders.

    Runs pair by seed (and by llm_share, where a side holds several); problems pair within them. The
    machine's noise is that of all runs beside them that were made under the same conditions.
    Raises RunStoreError where a side holds no finished run or the two have no pair in common.
    """
    sides = _finished(a, "a"), _finished(b, "b")
    names = ["seed", "llm_share", "role", "repeat", "setting", "max_depth", "num_problems"]
    apart = (k for k in (1, 2, 4, 7) if not any(r.duplicated(names[:k]).any() for r in sides))
    keys = names[: next(apart, 0)]  # what tells the runs of a side apart
    if not keys:
        raise RunStoreError(
            "A side holds several runs of equal seed and share; name the folders to be compared."
        )
    sides = sides[0].merge(sides[1][keys]), sides[1].merge(sides[0][keys])

    def table(runs: pd.DataFrame, name: str) -> pd.DataFrame:
        """A trace table with the keys of its runs."""
        return load_table(list(runs["folder"]), name).merge(runs[["run_id", *keys]], on="run_id")

    on = [*keys, "problem_id"]
    if all(map(len, sides)):
        left, right = (table(runs, "problems") for runs in sides)
        problems = left.merge(right, on=on, suffixes=("_a", "_b"))
    if not all(map(len, sides)) or problems.empty:
        raise RunStoreError(
            f"The two have no problem in common with equal {' and '.join(keys)}; compare runs "
            "of the same problems and seeds."
        )
    alike = len(left) == len(right) == len(problems)
    both = pd.concat([left.assign(side="a"), right.assign(side="b")]).merge(problems[on])
    noise, same_work, rates = _rates(both, pd.concat(sides), keys)
    folders = [Path(folder) for runs in sides for folder in runs["folder"]]
    kept = all((folder / "nodes.parquet").is_file() for folder in folders)
    left, right = (table(runs, "nodes") if kept else runs[:0] for runs in sides)
    has_nodes = bool(len(left) and len(right))
    parameters = pd.DataFrame({side: _parameters(runs) for side, runs in zip("ab", sides)})
    parameters = parameters.fillna("-").rename_axis("name").sort_index().reset_index()
    first = _first_difference(left, right, problems[on]) if has_nodes else None
    means = _means(problems, identical=has_nodes and first is None)
    rows = [*means, *rates, *_counts(*sides, alike=alike)]
    return Comparison(
        parameters=parameters[parameters["a"] != parameters["b"]].reset_index(drop=True),
        differences=pd.DataFrame(rows),
        accuracy=_accuracy(problems),
        has_nodes=has_nodes,
        first_difference=first,
        same_work=same_work,
        noise=noise,
        warnings=tuple(_warnings(*sides, alike=alike)),
    )


def _finished(runs: Folders, side: str) -> pd.DataFrame:
    found = load_runs(runs)
    found = found[found["status"] == FINISHED]
    if "role" in found:  # cells ask, they search nothing
        found = found[~found["role"].isin((settings.TIMED, settings.COUNTED))]
    if found.empty:
        raise RunStoreError(
            f"Side {side} holds no finished search (cells of a batching study search nothing); "
            "`workbench runs list` shows status."
        )
    return found.reset_index(drop=True)


def _parameters(runs: pd.DataFrame) -> pd.Series:
    """Every setting as text; where the runs differ, all values."""
    rows = []
    for config in (read_config(Path(folder)) for folder in runs["folder"]):
        identity = {f"identity.{name}": value for name, value in config["identity"].items()}
        values = config["parameters"] | identity
        rows.append({name: json.dumps(value) for name, value in values.items()})
    return pd.DataFrame(rows).apply(lambda column: ", ".join(sorted(set(column.dropna()))))


def _means(problems: pd.DataFrame, identical: bool) -> Iterator[Row]:
    """Paired differences of what problems have, where it is known of both. identical: all nodes
    are; else no answer that changed does not say that none ever does.
    """
    for metric, column in MEANS.items():
        known = problems.reindex(columns=["problem_id", f"{column}_a", f"{column}_b"]).dropna()
        if len(known):
            a, b = (known[f"{column}_{side}"].astype(float) for side in "ab")
            found = statistics.bootstrap_mean(b - a, list(known["problem_id"]))
            if metric == "accuracy" and not identical:
                found = statistics.unlike_a_point(found, known["problem_id"].nunique())
            yield _row(metric, a.mean(), b.mean(), found)


def _row(metric: str, a: float, b: float, found: Interval) -> Row:
    ends = {"difference": found.estimate, "low": found.low, "high": found.high}
    return {"metric": metric, "a": a, "b": b} | ends


def _rates(
    problems: pd.DataFrame, runs: pd.DataFrame, keys: list[str]
) -> tuple[Noise, bool, list[Row]]:
    """The noise of runs made as these were, whether both sides did equal work, and their rates."""
    beside = load_runs({Path(folder).parent for folder in runs["folder"]})
    beside, runs = (_with_conditions(each[each["status"] == FINISHED]) for each in (beside, runs))
    noise = statistics.noise_of(beside[beside["technique"].isin(runs["technique"])])
    # a pair is what draw_rates calls a seed; pairs may be of other problems; a run may be on both
    rows = problems.sort_values("problem_id").assign(sixty=60.0)
    rows = rows.assign(seed=rows.groupby(keys).ngroup(), run_id=rows["side"] + rows["run_id"])
    rows["problem_id"] = rows.groupby("run_id").cumcount()
    told = runs.set_index("run_id")[["technique", *(name for name in WORK if name in runs)]]
    pairs = rows[["run_id", "side", "seed"]].drop_duplicates(ignore_index=True)
    own = told[~told.index.duplicated()].loc[list(pairs["run_id"].str[1:])]
    pairs = pairs.join(own.reset_index(drop=True))
    same_work, found = False, []
    for metric, top in RATES.items():
        rates = statistics.draw_rates(rows, pairs, "side", top, noise=noise)
        same_work = rates.work[0] == rates.work[1]
        difference = Interval(0.0, 0.0, 0.0) if same_work else rates.difference("a", "b")
        a, b = (rates.at(side).estimate for side in "ab")
        found.append(_row(metric, a, b, difference))
    return noise, bool(same_work), found


def _with_conditions(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with a `technique` that is equal where seconds of equal work compare: code, machine,
    versions and every setting but those of memory.
    """
    found = []
    for folder, *machine in runs[["folder", "machine", "versions"]].itertuples(index=False):
        config = read_config(Path(folder))
        own = {n: value for n, value in config["parameters"].items() if n not in OF_MEMORY}
        found.append(hash_of([own, config["identity"], *map(str, machine)]))
    return runs.assign(technique=found)


def _counts(*sides: pd.DataFrame, alike: bool) -> Iterator[Row]:
    """Counts of both models over the paired runs, whole ones; they have no interval. alike: whether
    both are of the same problems, else a sum compares with none.
    """
    totals = []
    for runs in sides:
        total = runs.sum(numeric_only=True)
        for model in ENGINES:
            again = total.filter(regex=f"^{model}_recomputed_tokens_")
            total[f"{model}_recomputed_tokens"] = again.sum()
            if (counted := f"{model}_look_ups") in runs:  # NaN: some are of code that did not
                total[counted] = runs[counted].sum(skipna=False)
        totals.append(total)
    for model, (name, (top, bottom, scale)) in product(ENGINES, COUNTS.items()):
        below = [each.get(f"{model}_{bottom}", 0) if bottom else alike for each in totals]
        if all(each > 0 for each in below) and all(f"{model}_{top}" in each for each in totals):
            a, b = (scale * each[f"{model}_{top}"] / of for each, of in zip(totals, below))
            yield _row(f"{model}_{name}", a, b, Interval(b - a, math.nan, math.nan))


def _accuracy(problems: pd.DataFrame) -> pd.DataFrame:
    """Accuracy of both sides over all levels and at each, with Wilson's intervals."""
    told = problems.reindex(columns=["problem_id", "level_a", "correct_a", "correct_b"])
    known, rows = told.dropna(subset=["correct_a", "correct_b"]), []
    levels = known["level_a"].map("{:.0f}".format, na_action="ignore").fillna("not given")
    for level, own in (("all", known), *known.groupby(levels)) if len(known) else ():
        count = own["problem_id"].nunique()
        row = {"level": level, "problems": count}
        for side in "ab":
            found = statistics.wilson(float(own[f"correct_{side}"].astype(float).mean()), count)
            row |= found.named(side)
        rows.append(row)
    return pd.DataFrame(rows)


def _first_difference(left: pd.DataFrame, right: pd.DataFrame, on: pd.DataFrame) -> str | None:
    """The first node of these problems that differs; a side that has no such node shows None."""
    keys = [str(name) for name in on]
    left, right = left.merge(on), right.merge(on)
    both = left.merge(right, on=[*keys, "node_id"], how="outer", suffixes=("_a", "_b"))
    both = both.assign(depth=both["depth_a"].fillna(both["depth_b"]))
    for row in both.sort_values([*keys, "depth", "node_id"]).to_dict("records"):
        a, b = ([*map(int, i)] if np.iterable(i := row[f"token_ids_{s}"]) else None for s in "ab")
        what = "tokens"
        if a == b:
            what, a, b = "scores", row["score_a"], row["score_b"]
        if a != b:
            where = f"problem {row['problem_id']}, seed {row['seed']}, node {row['node_id']}"
            return f"{where}: {what} differ, a has {a}, b has {b}"
    return None


def _warnings(left: pd.DataFrame, right: pd.DataFrame, alike: bool) -> Iterable[str]:
    if not alike:
        yield "the two searched different problems: compared are those of both, counts of all."
    for column in ("machine", "versions", "git_commit"):
        values = [sorted(map(str, set(runs[column]))) for runs in (left, right)]
        if values[0] != values[1] or len(values[0]) > 1:
            a, b = (" / ".join(each) for each in values)
            verb = "differ" if column == "versions" else "differs"
            yield f"{column} {verb}: a {a}; b {b}. Seconds and rates do not compare."
    for side, runs in (("a", left), ("b", right)):
        if runs["git_dirty"].astype("boolean").fillna(False).any():
            yield f"side {side} was measured with uncommitted changes."
