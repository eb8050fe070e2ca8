"""Run folders carried from one machine to another: one archive out, checked on the way in.

An archive is a tar (.tar, .tar.gz, .tgz) or a .zip of run folders. Nothing in it is trusted: names,
file kinds, schema and fingerprints are checked in a temporary folder before anything is stored, and
a run that is already there with other content is never overwritten.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from workbench.errors import RunStoreError
from workbench.experiments.plan import fingerprint_of
from workbench.experiments.store import CONFIG, TABLES, RunStore, read_config, read_run, run_folders

FILES = frozenset({CONFIG, *(f"{table}.parquet" for table in TABLES)})
ENDINGS = (".tar", ".tar.gz", ".tgz", ".zip")


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did: names of the runs stored, and of those there already, equal."""

    stored: tuple[str, ...]
    already_there: tuple[str, ...]


def export_runs(path: str | Path | Iterable[str | Path], archive: str | Path) -> list[str]:
    """Write the runs at `path` into a new file `archive`; answers their names."""
    target, folders = Path(archive), run_folders(path)
    _check_ending(target)
    if target.exists():
        raise RunStoreError(f"{target.name} exists already; name another file or delete it first.")
    if not folders:
        raise RunStoreError(
            "There are no runs to export; `workbench runs list` shows what is stored."
        )
    members = [
        (file, f"{d.name}/{file.name}")
        for d in folders
        for file in sorted(d.iterdir())
        if file.name in FILES
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".zip":
        with zipfile.ZipFile(target, "x", zipfile.ZIP_DEFLATED) as out:
            for file, name in members:
                out.write(file, name)
    else:
        with tarfile.open(target, "x:gz" if target.suffix in (".gz", ".tgz") else "x:") as out:
            for file, name in members:
                out.add(file, name, recursive=False, filter=_without_owner)
    return [folder.name for folder in folders]


def import_runs(archive: str | Path, runs_dir: str | Path) -> Imported:
    """Store the runs of `archive`; all are checked first, and a bad one stores none."""
    source, store = Path(archive), RunStore(Path(runs_dir))
    _check_ending(source)
    if not source.is_file():
        raise RunStoreError(
            f"There is no archive {str(source)!r}; give a file that `workbench runs export` wrote."
        )
    store.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".import-", dir=store.root) as scratch:
        unpacked = Path(scratch)
        _unpack(source, unpacked)
        folders = sorted(folder for folder in unpacked.iterdir() if folder.is_dir())
        if not folders:
            raise RunStoreError(f"{source.name} holds no run folder; it is not a run archive.")
        for folder in folders:
            check_run(folder)
        fresh, equal = _sort_out(folders, store)
        for folder in fresh:
            store.publish(folder, store.root / folder.name)
    return Imported(tuple(folder.name for folder in fresh), tuple(folder.name for folder in equal))


def check_run(folder: Path) -> None:
    """Raise RunStoreError unless the folder is a whole run whose name, row and settings agree."""
    row, config = read_run(folder), read_config(folder)
    missing = {"parameters", "role", "identity", "fingerprint", "name"} - config.keys()
    if missing:
        raise RunStoreError(
            f"{folder.name}/{CONFIG} lacks {', '.join(sorted(missing))}; it is no run folder."
        )
    made_of = fingerprint_of(config["parameters"], config["role"], config["identity"])
    names = {row.get("fingerprint"), config["fingerprint"], made_of}
    if len(names) > 1 or folder.name != f"{config['name']}-{made_of}":
        raise RunStoreError(
            f"{folder.name} is not what it says: its settings have fingerprint {made_of}, its row "
            f"says {row.get('fingerprint')}. Export it anew from the machine that made it."
        )


def _sort_out(folders: list[Path], store: RunStore) -> tuple[list[Path], list[Path]]:
    """Which runs are new and which are there already; raises where one has other content."""
    there = [folder for folder in folders if (store.root / folder.name).exists()]
    other = [
        folder.name for folder in there if _content(folder) != _content(store.root / folder.name)
    ]
    if other:
        raise RunStoreError(
            f"{', '.join(other)}: already stored with other content (measured elsewhere or again). "
            "Nothing was imported; import into another folder (--runs DIR) and compare the two."
        )
    return [folder for folder in folders if folder not in there], there


def _content(folder: Path) -> dict[str, str]:
    files = [file for file in folder.iterdir() if file.name in FILES]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _unpack(source: Path, target: Path) -> None:
    try:
        if source.suffix == ".zip":
            _unpack_zip(source, target)
        else:
            _unpack_tar(source, target)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as problem:
        raise RunStoreError(
            f"{source.name} cannot be unpacked ({problem}); it is damaged or no run archive. "
            "Copy it again."
        ) from problem


def _unpack_zip(source: Path, target: Path) -> None:
    with zipfile.ZipFile(source) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                with (
                    archive.open(member) as content,
                    _place(target, member.filename).open("xb") as out,
                ):
                    shutil.copyfileobj(content, out)


def _unpack_tar(source: Path, target: Path) -> None:
    with tarfile.open(source) as archive:
        for member in archive:
            if member.isdir():
                continue
            content = archive.extractfile(member) if member.isfile() else None
            if content is None:
                raise RunStoreError(
                    f"{source.name} holds {member.name!r}, which is no plain file: refused."
                )
            with content, _place(target, member.name).open("xb") as out:
                shutil.copyfileobj(content, out)


def _place(target: Path, name: str) -> Path:
    """Where a member goes: RUN/FILE with a known FILE, nothing else and never outside."""
    parts = PurePosixPath(name).parts
    if (
        len(parts) != 2
        or parts[0] in ("..", "/")
        or parts[0].startswith(".")
        or parts[1] not in FILES
    ):
        raise RunStoreError(
            f"The archive holds {name!r}; allowed: RUN/FILE, FILE of {', '.join(sorted(FILES))}."
        )
    folder = target / parts[0]
    folder.mkdir(exist_ok=True)
    return folder / parts[1]


def _check_ending(archive: Path) -> None:
    if not archive.name.endswith(ENDINGS):
        raise RunStoreError(
            f"{archive.name!r} is no run archive; its name must end in {', '.join(ENDINGS)}."
        )


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """The archive says nothing of the user who wrote it."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
