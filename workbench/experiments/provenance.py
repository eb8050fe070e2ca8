"""Where results lie, and what they were measured with: machine, versions, commit.

Reads what is there and never imports torch by itself: where torch is already loaded its threads and
its GPU are named, else the environment's setting. No paths, user or host names: records are public.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from workbench.errors import RunStoreError
from workbench.host import total_memory, usable_cores

PACKAGES = ("torch", "numpy", "numba", "pandas", "pyarrow", "transformers", "tokenizers", "plotly")
FEATURES = ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_tile")
PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = tuple(PACKAGE / name for name in ("core.py", "config.py", "host.py", "tokenizer.py",
    "trace.py", "kernels", "kvcache", "models", "engine", "search", "experiments/batching.py",
    "experiments/execute.py", "experiments/memory.py", "experiments/settings.py"))  # fmt: skip
"""What makes a run; not what plans, keeps, draws or reports it."""
REPLAY_SOURCES = (*SOURCES, PACKAGE / "replay")


def project_root() -> Path:
    """The folder that holds notebooks/, figures/ and reports/.

    The nearest one upwards that holds workbench/ and pyproject.toml, else the checkout the package
    is imported from, else the current folder. WORKBENCH_HOME names another.
    """
    named = os.environ.get("WORKBENCH_HOME")
    if named:
        return Path(named)
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parents[2]):
        if (folder / "pyproject.toml").is_file() and (folder / "workbench").is_dir():
            return folder
    return here


def runs_folder() -> Path:
    """Where run folders are kept unless told otherwise."""
    return project_root() / "reports" / "runs"


@contextmanager
def committed_figures() -> Iterator[Path]:
    """The folder of the committed figures: the project's own, or, where other rows are drawn over
    them there, a copy from git while this lasts.
    """
    home = project_root() / "figures"
    if not git(home, "diff", "--name-only", "HEAD", "--", "*.parquet"):
        yield home
        return
    with unpacked(home, "HEAD", "*.parquet", "*.json") as copy:
        yield copy or home


@contextmanager
def unpacked(where: Path, commit: str, *files: str) -> Iterator[Path | None]:
    """A copy of what a folder held at a commit, while this lasts; None where git has none. files:
    patterns, as git takes them.
    """
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "files.tar")
        git(where, "archive", f"--output={archive}", commit, *files)
        if not archive.is_file() or not archive.stat().st_size:
            yield None
            return
        with tarfile.open(archive) as opened:
            opened.extraction_filter = getattr(tarfile, "data_filter", None)  # from 3.11.4 on
            opened.extractall(folder)
        yield Path(folder)


def machine_facts(device: str = "cuda") -> dict[str, Any]:
    """CPU model, cores usable by this process, memory in bytes, threads of torch; the GPU that
    `device` names as torch does, None where it is the CPU or there is none.
    """
    torch = sys.modules.get("torch")  # None, or being imported right now
    setting = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(setting) if setting.isdigit() and int(setting) > 0 else usable_cores()
    gpu = None
    if torch is not None and hasattr(torch, "get_num_threads") and hasattr(torch, "cuda"):
        threads = int(torch.get_num_threads())
        if device != "cpu" and torch.cuda.is_available():
            gpu = str(torch.cuda.get_device_name(device))
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "threads": threads,
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
    }


def describe(machine: dict[str, Any]) -> str:
    """One line for a figure: "AMD EPYC 9B14, 2 cores, 2 threads"."""
    where = machine.get("gpu") or machine["cpu"]
    cores, threads = counted(machine["cores"], "core"), counted(machine["threads"], "thread")
    return f"{where}, {cores}, {threads}"


def counted(number: int, noun: str) -> str:
    """`1 seed`, `2 seeds`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def number(value: float) -> str:
    """A number as tables show it: four digits, or whole with commas from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.4g}"


@cache
def versions() -> dict[str, str]:
    """Version of Python, of every package that takes part in a measurement, and of the workbench
    where no commit tells it: a checkout may have moved on since it was installed.
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES if git_state()["commit"] else ("workbench", *PACKAGES):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def git_state(folder: Path | None = None) -> dict[str, Any]:
    """The commit, and whether the package differs from it.

    Where no checkout tracks it, a copy, the commit that WORKBENCH_COMMIT names; or both None.
    """
    where = folder or PACKAGE
    commit = git(where, "rev-parse", "HEAD")
    if not commit or not git(where, "ls-files"):
        return {"commit": os.environ.get("WORKBENCH_COMMIT") or None, "dirty": None}
    changed = git(where, "status", "--porcelain", "--untracked-files=no", "--", str(where))
    return {"commit": commit, "dirty": bool(changed)}


def worktree_of(commit: str) -> Path:
    """The project as it was at a commit: a git worktree under build/at/, made where there is none.

    RunStoreError where the project is no git checkout, or has no such commit.
    """
    root = project_root()
    if not git(root, "ls-files"):  # as `git_state` asks: another project's checkout is none
        raise RunStoreError(
            f"--at {commit} needs git and a checkout of the project, and {root.name}/ is none; "
            "clone it, or leave --at out."
        )
    full = git(root, "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}")
    if not full:
        raise RunStoreError(
            f"There is no commit {commit!r} in this checkout; `git log --oneline` lists them, `git "
            "fetch` brings those made elsewhere."
        )
    place = root / "build" / "at" / full[:12]
    if not (place / "workbench").is_dir():  # --force: one that was deleted is known to git still
        git(root, "worktree", "add", "--force", "--detach", str(place), full)
    if not (place / "workbench" / "cli").is_dir() or git_state(place)["commit"] != full:
        raise RunStoreError(
            f"build/at/{place.name} is no worktree of commit {full[:12]} with the workbench in it; "
            "`git worktree remove --force` it and try again."
        )
    return place


def git(where: Path, *words: str) -> str:
    """What git prints; empty where it fails or is not there."""
    with suppress(OSError, subprocess.SubprocessError):
        call: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120}
        return subprocess.run(["git", *words], cwd=where, check=True, **call).stdout.strip()
    return ""


@cache
def this_code(replayed: bool = False) -> dict[str, Any]:
    """code (the digest of what makes a run), commit and dirty, as this process found them first:
    what is edited or checked out later does not run here.
    """
    return {**git_state(), "code": code_digest(*(REPLAY_SOURCES if replayed else SOURCES))}


def code_digest(*sources: Path) -> str:
    """12 hexadecimal digits over files and folders of Python and JSON, without comments, docstrings
    and blank lines; a run is made anew too often rather than too seldom.
    """
    digest = hashlib.sha256()
    for source in sources:
        for file in sorted(source.rglob("*.*")) if source.is_dir() else (source,):
            if file.suffix in (".py", ".json"):
                text = file.read_text(encoding="utf-8")
                text = _without_prose(text) if file.suffix == ".py" else text
                name = file.relative_to(source.parent).as_posix()
                digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()[:12]


_TEXT_OR_COMMENT = re.compile(  # as Python 3.11 has them: no quote of an f-string's own within it
    r"""(\"{3}|'{3})(?:\\.|.)*?\1|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*""", re.DOTALL
)


@cache
def _without_prose(source: str) -> str:
    lines, dropped, within = source.split("\n"), set[int](), set[int]()
    parts: list[ast.AST] = [ast.parse(source)]
    while parts:
        for node in ast.iter_child_nodes(parts.pop()):
            match node:
                case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                    dropped |= set(range(first - 1, last))
                case ast.stmt() | ast.excepthandler() | ast.match_case():
                    parts.append(node)
    row = place = 0
    for found in _TEXT_OR_COMMENT.finditer(source):
        row, place = row + source.count("\n", place, found.start()), found.start()
        if found[0].startswith("#"):
            lines[row] = lines[row][: -len(found[0])].rstrip()
        else:
            within |= set(range(row, row + found[0].count("\n")))
    dropped |= {row for row, line in enumerate(lines) if not line.strip()} - within
    kept = [line for row, line in enumerate(lines) if row not in dropped]
    return "\n".join([*kept, ""] if source.endswith("\n") else kept)


def cpu_model() -> str:
    """The processor's marketing name, as the system gives it."""
    names = [line.split(":", 1)[1].strip() for line in _cpu_lines() if line[:10] == "model name"]
    return names[0] if names else platform.processor() or platform.machine()


def cpu_features() -> tuple[str, ...]:
    """The vector instruction sets that matter to matrix products, of those the system names."""
    flags = {word for line in _cpu_lines() if line.startswith("flags") for word in line.split()}
    return tuple(name for name in FEATURES if name in flags)


def _cpu_lines() -> list[str]:
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def memory_bytes() -> int | None:
    """The machine's memory, or a container's limit if smaller; None where not told."""
    with suppress(AttributeError, ValueError, OSError):
        return total_memory()
    return None
