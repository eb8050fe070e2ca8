"""The house rules, as a reviewer would check them: tools pass, files are what they say."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import workbench

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
LAYERS = "from importlinter.cli import lint_imports_command as main; main()"
TEXT = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".ipynb", ".json", ".html", ".jinja",
        ".svg", ".tex"}  # fmt: skip


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def tracked(*patterns: str) -> list[Path]:
    """The files git knows of, or all below the root where this is no checkout."""
    listed = run("git", "ls-files", "-z", "--", *patterns)
    if listed.returncode == 0:
        return [p for name in listed.stdout.split("\0") if name and (p := ROOT / name).is_file()]
    return [path for pattern in patterns for path in ROOT.rglob(pattern)]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["-m", "ruff", "check", "--output-format=concise"], id="ruff"),
        pytest.param(["-m", "ruff", "format", "--check"], id="format"),
        pytest.param(["-m", "mypy"], id="types", marks=pytest.mark.slow),
        pytest.param(["-c", LAYERS], id="layers"),
    ],
)
def test_tools_have_nothing_to_say(command: list[str]) -> None:
    """Lint, format, types and layers hold for the whole tree."""
    done = run(sys.executable, *command)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_public_name_is_explained() -> None:
    """A public class or function has a docstring, or implements a method that has one elsewhere."""
    found = [
        (path.relative_to(ROOT), node, ast.get_docstring(node))
        for path in tracked("workbench/**/*.py", "workbench/*.py")
        for node in public_names(ast.parse(path.read_text()))
    ]
    explained = {node.name for _, node, text in found if text}
    missing = [f"{path}:{n.lineno} {n.name}" for path, n, _ in found if n.name not in explained]
    assert len(found) > 500
    assert not missing


def public_names(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Classes and functions of a module that others may use, methods and properties included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_names(node)


def test_notebooks_carry_no_outputs() -> None:
    """A committed notebook has neither outputs nor execution counts, nor a widget's state."""
    for path in tracked("*.ipynb"):
        book = json.loads(path.read_text())
        assert "widgets" not in book["metadata"], path.name
        run = [c.get("outputs") or c.get("execution_count") for c in book["cells"]]
        left = [number for number, has in enumerate(run) if has]
        assert not left, f"{path.relative_to(ROOT)}: cells {left} have outputs; run nbstripout"


def test_no_path_of_one_machine() -> None:
    """Nothing committed names a folder that exists on the author's machine only."""
    personal = {str(ROOT), str(Path.home()), tempfile.gettempdir()} - {"/"}
    folders = "|".join(("home", "root", "Users", "tmp", "opt", "work"))
    pattern = re.compile(
        rf"(?<![\w.}}/])/(?:{folders})/\w|" + "|".join(re.escape(p) + r"\b" for p in personal)
    )
    for path in tracked():
        if path.suffix in TEXT and path.stat().st_size < 2_000_000:
            found = pattern.search(path.read_text(encoding="utf-8"))
            assert found is None, f"{path.relative_to(ROOT)} names {found and found[0]!r}"


def test_nothing_is_left_unfinished() -> None:
    """No reminder, stub or expected failure stands in the code."""
    words = ("TO" + "DO", "FIX" + "ME", "X" * 3, "NotImplemented" + "Error", "mark." + "xfail")
    for path in tracked("workbench/*.py", "tests/*.py", "notebooks/*.ipynb"):
        found = [word for word in words if word in path.read_text()]
        assert not found, f"{path.relative_to(ROOT)}: {found}"


def requirements(names: list[str]) -> list[Requirement]:
    """The requirements of a list, with `workbench[a,b]` replaced by what those extras hold."""
    found: list[Requirement] = []
    for name in names:
        item = Requirement(name)
        inner = [more for extra in item.extras for more in EXTRAS[extra]]
        found += requirements(inner) if item.name == "workbench" else [item]
    return found


def test_everything_named_is_installed_and_pinned() -> None:
    """What `.[all]` names is here, within its range, in the version that constraints.txt pins."""
    (everything,) = map(Requirement, EXTRAS["all"])
    assert everything.extras == EXTRAS.keys() - {"all", "ray", "slurm"}, "an extra is left out"
    named = requirements([*PYPROJECT["project"]["dependencies"], *EXTRAS["all"]])
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    pins = {canonicalize_name(item.name): item.specifier for item in pinned}
    ranges = [str(item) for item in pinned if not str(item.specifier).startswith("==")]
    assert ranges == ["triton<=3.9.0,>=3.7.1"]  # torch with CUDA requires 3.7.1
    for item in named:
        if item.marker is not None and not item.marker.evaluate():
            continue  # not for this platform
        here = version(item.name)
        assert item.specifier.contains(here), f"{item} is not met by {here}"
        pin = pins.get(canonicalize_name(item.name))
        assert pin is not None, f"constraints.txt does not pin {item.name}"
        pinned_versions = [found.version for found in pin]
        assert all(map(item.specifier.contains, pinned_versions)), f"{item}: pinned {pin}"


def test_the_version_is_of_git_and_an_archive_has_one_too(tmp_path: Path) -> None:
    """Installed: what git told; a source tree that is not: what a build without git would say."""
    assert any(item.startswith("setuptools-scm") for item in PYPROJECT["build-system"]["requires"])
    assert workbench.__version__ == version("workbench")
    (tmp_path / "workbench").mkdir()
    shutil.copy(ROOT / "workbench" / "__init__.py", tmp_path / "workbench")
    here = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    told = run(sys.executable, "-ISc", f"{here}; import workbench; print(workbench.__version__)")
    assert told.stdout.strip() == PYPROJECT["tool"]["setuptools_scm"]["fallback_version"]


def test_conda_environment_is_thin() -> None:
    """environment.yml brings Python and pip; pip takes pyproject.toml's packages as pinned."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    *conda, last = environment["dependencies"]
    assert [re.match(r"[\w.-]+", item)[0] for item in conda] == ["python", "pip"]
    assert last["pip"] == ["-c constraints.txt", "-e .[all]"]


def test_make_knows_its_targets_and_passes_its_variables_on() -> None:
    """Those that the README and CI call; PROFILE, ARGS and parameters reach `workbench figures`."""
    own = ("env", "-u", "MAKEFLAGS", "-u", "MAKELEVEL")  # whatever make started these tests
    targets = ("figures", "test", "lab", "bench", "clean", "setup", "help")
    given = ("PROFILE=quick", "seeds=[0, 1]", "ARGS=--dry-run")
    done = run(*own, "make", "--dry-run", *targets, *given)
    assert done.returncode == 0, done.stderr
    assert "figures --profile quick -p 'seeds=[0, 1]' --dry-run" in done.stdout


def test_scripts_are_executable_bash() -> None:
    """CI calls .ci/run, make calls .ci/setup."""
    for name in ("run", "setup"):
        path = ROOT / ".ci" / name
        assert path.stat().st_mode & 0o111
        assert run("bash", "-n", str(path)).returncode == 0
