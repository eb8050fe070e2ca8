"""The package stays small: lines and files of each room against its budget in pyproject.toml.

`python -m pytest tests/test_size.py -s` prints the table.
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SIZE = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["workbench"]["size"]


def measured(folder: Path, pattern: str = "**/*.py") -> tuple[int, int]:
    """Lines, as `wc -l` counts them, and files of Python."""
    files = list(folder.glob(pattern))
    return sum(file.read_bytes().count(b"\n") for file in files), len(files)


def rooms() -> dict[str, tuple[int, int]]:
    """Each folder of the package by its name; modules at its top with no budget are "root"."""
    package = ROOT / "workbench"
    folders = sorted(p for p in package.iterdir() if p.is_dir() and any(p.glob("**/*.py")))
    found = {"root": measured(package, "*.py")} | {p.name: measured(p) for p in folders}
    for name in (path.stem for path in package.glob("*.py") if path.stem in SIZE["rooms"]):
        found[name] = measured(package, f"{name}.py")
        found["root"] = tuple(a - b for a, b in zip(found["root"], found[name]))
    return found


def test_no_room_passes_its_budget() -> None:
    """Every room has a budget of lines and files, and keeps it; so do the package and its tests."""
    found, budgets = rooms(), SIZE["rooms"]
    found["package"] = tuple(map(sum, zip(*found.values())))
    found["tests"] = measured(ROOT / "tests")
    lines = [f"{'room':12} {'lines':>7} {'budget':>7} {'files':>6} {'budget':>7}"]
    for name, (now, files) in found.items():
        budget = budgets.get(name, {"lines": 0, "files": 0})
        lines.append(f"{name:12} {now:7,} {budget['lines']:7,} {files:6} {budget['files']:7}")
    print("\n" + "\n".join(lines))
    assert set(found) == set(budgets), "rooms and budgets differ"
    for name, (now, files) in found.items():
        assert now <= budgets[name]["lines"], f"{name} has {now} lines: delete some"
        assert files <= budgets[name]["files"], f"{name} has {files} files: join some"


def test_the_spine_is_read_in_an_afternoon() -> None:
    """The files a newcomer reads first are few and short."""
    spine = [ROOT / "workbench" / name for name in SIZE["spine"]["modules"]]
    now = sum(file.read_bytes().count(b"\n") for file in spine)
    print(f"\nspine: {now:,} lines in {len(spine)} files")
    assert now <= SIZE["spine"]["lines"] and len(spine) <= SIZE["spine"]["files"]
