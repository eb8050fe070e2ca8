"""What stands on the face of every figure: models, rung, budget, sample, machine.

Read from the rows of the runs drawn, never from this process, so that a run made elsewhere names
where it was made.
"""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from workbench.config import format_size

RUNGS = (("tiny", "measured tiny"), ("smollm2", "measured SmolLM2"), ("dummy:", "dummy weights"))
CARRIES_OVER = "Counts carry over at equal ratios of need to room; seconds do not."


def face(runs: pd.DataFrame) -> str:
    """Three lines about the runs drawn; several machines or profiles are all named."""
    first = runs.iloc[0]
    budget = format_size(int(first["total_memory"]))
    outside = "" if first["activations_in_total"] else ", activations outside it"
    sample = f"{first['num_problems']} problems, {_count(runs['seed'].nunique(), 'seed')}"
    search = f"n = {first['n']}, beam width {first['beam_width']}"
    lines = (
        f"LLM {first['llm']}, PRM {first['prm']} ({rung(runs)}); total memory {budget}{outside}.",
        f"Profile {_all(runs['profile'])}: {sample}, {search}; {_all(runs['machine'])}.",
        CARRIES_OVER,
    )
    return "\n".join(lines)


def rung(runs: pd.DataFrame) -> str:
    """Which rung of the study's ladder the runs stand on, by their LLM's name."""
    name = str(runs["llm"].iloc[0])
    return next((text for start, text in RUNGS if name.startswith(start)), "measured")


def measured(runs: pd.DataFrame) -> dict[str, Any]:
    """versions, git and machine of the runs drawn, for the JSON beside a figure."""
    first = runs.iloc[0]
    names = [str(name) for name in runs.columns if str(name).startswith("machine_")]
    machine = {name.removeprefix("machine_"): first[name] for name in names}
    return {
        "versions": json.loads(first["versions"]),
        "git": {"commit": first["git_commit"], "dirty": _plain(first["git_dirty"])},
        "machine": {name: _plain(value) for name, value in machine.items()},
    }


def _plain(value: Any) -> Any:
    """A value JSON knows: numpy's scalars unpacked, missing ones None."""
    value = value.item() if hasattr(value, "item") else value
    return None if pd.isna(value) else value


def _all(values: pd.Series) -> str:
    return " and ".join(map(str, values.drop_duplicates()))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
