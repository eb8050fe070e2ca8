"""`.ci/gpu` tells what ran, what failed and what was skipped; here with a fake interpreter."""

import os
import subprocess
from pathlib import Path

import pytest

from workbench.experiments.provenance import git_state

ROOT = Path(__file__).parents[2]
FAKE = """#!/usr/bin/env bash
echo "$PYTHONPATH: $*" >>"$CALLS"
case "$1" in
-m) echo "so many passed"; exit "$TESTS" ;;
-)
    shift
    [ $# -gt 0 ] || { echo "a GPU or none"; exit "$GPU"; }
    for name; do [[ " $LACKING " != *" $name "* ]] || printf ' %s ' "$name"; done ;;
*) echo "{}" >"$3"; exit "$BENCH" ;;
esac
"""


def run_script(tmp_path: Path, **settings: object) -> tuple[int, str, list[str], set[str]]:
    """Status, standard error, calls and files of the script; its interpreter ends as it is told."""
    python, calls, out = (tmp_path / name for name in ("python", "calls", "out"))
    python.write_text(FAKE)
    python.chmod(0o755)
    told = {"TESTS": 0, "BENCH": 0, "GPU": 0, "LACKING": ""} | settings
    told |= {"PYTHON": python, "CALLS": calls, "PYTHONPATH": "own"}
    environment = os.environ | {name: str(value) for name, value in told.items()}
    command = [str(ROOT / ".ci" / "gpu"), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    files = {file.name for file in out.iterdir()} if out.exists() else set()
    return done.returncode, done.stderr, calls.read_text().splitlines(), files


def test_on_a_gpu_everything_runs(tmp_path: Path) -> None:
    """Five files; the re-enactment before the longest benchmark; our own packages first."""
    status, said, calls, files = run_script(tmp_path)
    assert status == 0, said
    records = ["kernels.json", "engine-1b.json", "reenact.json", "engine-8b.json"]
    assert files == {*records, "tests.log"}
    assert [Path(c.split()[3]).name for c in calls if "gpu_bench.py" in c] == records
    tests = [call.split(" -p no:cacheprovider ")[1] for call in calls if " -m pytest " in call]
    kernels, engines = sorted(tests)  # which of them starts first is open
    assert kernels.startswith("-n 10 --dist worksteal tests/kernels/test_triton.py ")
    assert engines.endswith(" -m gpu tests/engine/test_gpu.py tests/engine/test_shared.py")
    assert {call.split(": ")[0] for call in calls} == {f"{ROOT}:own"}


@pytest.mark.parametrize(
    ("settings", "status", "said"),
    [
        ({"BENCH": 1}, 1, "FAILED bench kernels"),
        ({"TESTS": 1}, 1, "FAILED tests, kernels"),
        ({"TESTS": 5}, 2, "SKIPPED tests, kernels: none can run here"),
        ({"LACKING": "pandas"}, 2, "SKIPPED bench reenact: pandas is missing"),
        ({"LACKING": "pandas"}, 2, "SKIPPED bench engine, dummy:llama-3.2-1b: pandas is"),
        ({"LACKING": "transformers"}, 2, "SKIPPED the peer of bench engine, dummy:llama-3.2-1b: "),
        ({"LACKING": "torch"}, 1, "torch is missing"),
        ({"DEADLINE": 10}, 2, "SKIPPED bench engine, engine-8b.json: no time is left of 10 s"),
        ({"GPU": 1}, 2, "SKIPPED bench kernels: torch finds no CUDA device"),
        ({"GPU": 1, "TESTS": 5}, 2, "SKIPPED tests, interpreted: none can run here"),
        ({"GPU": 1, "LACKING": "numba"}, 2, "SKIPPED tests, engines: numba is missing"),
    ],
    ids=str,
)
def test_what_did_not_run_is_named(settings, status, said, tmp_path) -> None:
    """The status tells a failure from a part that this machine cannot run, which is not begun."""
    found, told, calls, _ = run_script(tmp_path, **settings)
    if settings == {"LACKING": "pandas"}:
        assert not any("gpu_bench.py" in call for call in calls)
    assert (found, said in told) == (status, True), told


def test_packages_carried_along_come_last_and_only_where_pytest_is_missing(tmp_path: Path) -> None:
    """They were made by another Python, perhaps: what works here is not hidden by them."""
    paths = [call.split(": ")[0] for call in run_script(tmp_path, LACKING="pytest")[2]]
    assert paths[0] == f"{ROOT}:own"
    assert set(paths[1:]) == {f"{ROOT}:own:{ROOT}/build/gpu-packages"}


def test_a_copy_without_git_is_told_its_commit(tmp_path, monkeypatch) -> None:
    """By the environment; the tree's own git comes first, and no other checkout around it."""
    monkeypatch.delenv("WORKBENCH_COMMIT", raising=False)
    assert git_state(tmp_path) == {"commit": None, "dirty": None}
    monkeypatch.setenv("WORKBENCH_COMMIT", "abc")
    assert git_state(tmp_path) == {"commit": "abc", "dirty": None}
    own = "git init -q; mkdir b; touch a; git add a; git -c user.name=a -c user.email=a commit -qma"
    subprocess.run(["bash", "-c", own], cwd=tmp_path, check=True)
    assert git_state(tmp_path)["dirty"] is False
    assert git_state(tmp_path / "b") == {"commit": "abc", "dirty": None}
