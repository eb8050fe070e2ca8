"""`--at COMMIT`: a study goes on with the code that it began with, whatever is checked out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import commit

CODE = """import json, os, sys
def main():
    told = {"version": VERSION, "words": sys.argv[1:], "home": os.environ["WORKBENCH_HOME"]}
    print(json.dumps(told))
    return 3
"""


def git(where, *words):
    done = subprocess.run(["git", *words], cwd=where, check=True, capture_output=True)
    return done.stdout.decode().strip()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A checkout of two commits whose command line says of which it is, and what it was given."""
    place = tmp_path / "project"
    (place / "workbench" / "cli").mkdir(parents=True)
    (place / "workbench" / "__init__.py").touch()
    for version in (1, 2):
        (place / "workbench/cli/__init__.py").write_text(CODE.replace("VERSION", str(version)))
        commit(place, str(version))
    monkeypatch.setenv("WORKBENCH_HOME", str(place))
    return place


def at(verb, *words):
    """Another process, since --at puts the other code in its place."""
    call = "import sys; from workbench.cli import main; sys.exit(main(sys.argv[1:]))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", call, verb, *words], cwd=root, capture_output=True)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("verb", ["sweep", "figures"])
def test_the_same_command_goes_on_with_the_code_of_the_commit(project, verb):
    first, second = git(project, "rev-parse", "HEAD~1", "HEAD").split()
    runs = ["--runs", str(project / "reports" / "runs")]
    status, told = at(verb, "--at", first[:10], "--profile", "quick")
    assert status == 3, "the exit status is that of the command at the commit"
    tree = project / "build" / "at" / first[:12]
    assert told == {"version": 1, "words": [verb, "--profile", "quick", *runs], "home": str(tree)}
    assert git(tree, "rev-parse", "HEAD") == first
    if verb == "figures":  # which draws from committed rows and takes no runs
        assert at(verb, "--replot", "--at", second)[1]["words"] == [verb, "--replot"]
    _, told = at(verb, f"--at={second}", "--runs", "elsewhere", "--stale", "ok")
    assert (told["version"], told["words"][1:]) == (2, ["--runs", "elsewhere", "--stale", "ok"])
    subprocess.run(["rm", "-r", str(tree)], check=True)
    assert at(verb, "--at", first)[1]["version"] == 1, "a deleted worktree is made anew"
    assert git(project, "status", "--porcelain") == "?? build/", "the checkout itself is as it was"


def test_an_unknown_commit_and_no_checkout_are_named(project, tmp_path, monkeypatch, says):
    for unknown in ("0123456", "--help", "HEAD:workbench"):
        shown = says("sweep", f"--at={unknown}", "--dry-run", status=2)
        assert f"no commit {unknown!r}" in shown and "git log --oneline" in shown
    for copy in (tmp_path / "copy", project / "copy"):
        copy.mkdir()
        monkeypatch.setenv("WORKBENCH_HOME", str(copy))
        told = says("sweep", "--at", "HEAD", "--dry-run", status=2)
        assert "needs git and a checkout of the project" in told
    monkeypatch.setenv("WORKBENCH_HOME", str(project))
    monkeypatch.setenv("PATH", "")
    assert "needs git" in says("sweep", "--at", "HEAD", "--dry-run", status=2)
