"""Where results lie: reports/runs of the project, from whatever folder one starts.

The project is the nearest folder upwards that holds workbench/ and pyproject.toml, else the
checkout the package is imported from, else the current folder. WORKBENCH_HOME names another.
"""

from __future__ import annotations

import os
from pathlib import Path


def project_root() -> Path:
    """The folder that holds notebooks/, figures/ and reports/."""
    named = os.environ.get("WORKBENCH_HOME")
    if named:
        return Path(named)
    here = Path.cwd()
    checkout = Path(__file__).resolve().parents[2]
    found = (folder for folder in (here, *here.parents, checkout) if _is_project(folder))
    return next(found, here)


def runs_folder() -> Path:
    """Where run folders are kept unless told otherwise."""
    return project_root() / "reports" / "runs"


def _is_project(folder: Path) -> bool:
    return (folder / "pyproject.toml").is_file() and (folder / "workbench").is_dir()
