"""A widget's state as a command: the same notebook, run without a mouse, with these parameters."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any


def papermill_command(notebook: str, parameters: Mapping[str, Any]) -> str:
    """The papermill command that runs `notebook` (a name in notebooks/) with these parameters.

    Values are given as YAML, which keeps texts, numbers, lists, true and null apart.
    """
    pairs = (f"{name}: {json.dumps(value)}" for name, value in parameters.items())
    settings = " ".join(f"-y {shlex.quote(pair)}" for pair in pairs)
    out = f"{notebook}.run.ipynb"
    return f"papermill notebooks/{notebook}.ipynb {out} {settings}".rstrip()
