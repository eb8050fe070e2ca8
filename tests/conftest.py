"""What every test run shares: threads that suit two cores, and tests that need a GPU or browser.

Tests keep to one thread: more, beside another busy process, cost 4 to 5 times per token.
"""

import atexit
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # before torch or numba is imported
if not any(map(os.path.exists, ("/proc/driver/nvidia/version", "/dev/nvidiactl"))):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def find_browser() -> str | None:
    """A Chromium or Chrome; None where there is none."""
    given = os.environ.get("BROWSER_PATH")
    return given or next(filter(None, map(shutil.which, BROWSERS)), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine cannot run; files with slow tests come first.

    `make test` gives each file to one worker, which makes the file's fixtures once.
    """
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in slow)
    needs = (
        ("gpu", _has_gpu, "no NVIDIA GPU on this machine"),
        ("browser", find_browser, "no Chromium on this machine (Debian: apt install chromium)"),
    )
    for marker, present, reason in needs:
        marked = [item for item in items if marker in item.keywords]
        if marked and not present():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def no_browser(monkeypatch):
    """A machine where kaleido finds none, whatever is installed here; images take seconds. A
    process keeps what it found, so what comes after looks again.
    """
    from workbench.experiments import export

    async def refuse(self):
        raise RuntimeError("no chrome here\nand a long story")

    monkeypatch.setattr(export.Browser, "_start", refuse)
    export.open_browser.cache_clear()
    yield
    export.open_browser.cache_clear()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all tests of a file, as tmp_path is one for each."""
    return tmp_path_factory.mktemp("root")


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints, which ends with this status; of 2 and more, what is wrong."""
    from workbench.cli import main

    def run(*words: str, status: int = 0) -> str:
        assert main([*words]) == status
        shown = capsys.readouterr()
        return shown.out if status < 2 else shown.err

    return run


def printed(program: str, **variables: str) -> str:
    """What a program prints in a process of its own, begun at the root of the tree."""
    root, command = Path(__file__).parent.parent, [sys.executable, "-c", program]
    variables = os.environ | variables
    done = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def commit(folder: Path, message: str = "all") -> None:
    """All that a folder holds, in git; made a checkout of its own where it is none."""
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", message]):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


@cache
def committed_tree() -> Path:
    """Holds figures/, reports/ and the README as last committed: `make figures` draws over those
    that lie here. Where there is no git it is the tree itself.
    """
    from workbench.experiments.provenance import unpacked

    root, kept = Path(__file__).parent.parent, ExitStack()
    atexit.register(kept.close)
    return kept.enter_context(unpacked(root, "HEAD", "figures", "reports", "README.md")) or root


def pytest_collection_finish() -> None:
    """What collection imported stays to the end: no later collection of garbage looks at it."""
    gc.collect()
    gc.freeze()
