"""What stands on the face of every figure: models, rung, budget, sample, machine.

Read from the rows of the runs drawn, never from this process, so that a run made elsewhere names
where it was made.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import pandas as pd

from workbench.config import SweepConfig, format_size
from workbench.experiments.health import unfinished
from workbench.experiments.machine import describe, machine_facts
from workbench.experiments.noise import noise_of

RUNGS = (("tiny", "measured tiny"), ("smollm2", "measured SmolLM2"), ("dummy:", "dummy weights"))
CARRIES_OVER = "Counts carry over at equal ratios of need to room; seconds do not."


class Study(Protocol):
    """What the face of a sweep's figure needs of it."""

    @property
    def config(self) -> SweepConfig:
        """Its settings."""
        ...

    @property
    def runs(self) -> pd.DataFrame: ...

    @property
    def all_runs(self) -> pd.DataFrame: ...


def sweep_face(sweep: Study, seed: int | None = None) -> str:
    """`face` of a sweep's runs, with how many of its runs there are and how noisy the machine was.

    seed: the one whose run is drawn, where the figure draws one.
    """
    *lines, last = face(sweep.runs, seed).splitlines()
    noise = str(noise_of(sweep.all_runs))
    return "\n".join([*lines, f"{completeness(sweep)}; {noise}.", last])


def completeness(sweep: Study) -> str:
    """How many of the sweep's runs are drawn, and why the others are not."""
    planned = len(sweep.config.shares) * len(sweep.config.seeds)
    text = f"{len(sweep.runs)} of {planned} runs"
    bad = unfinished(sweep.all_runs)
    reasons = [f"{row['status']}: {row['name']}" for row in bad.to_dict("records")]
    return f"{text} ({', '.join(reasons)})" if reasons else text


def face_here(llm: str, prm: str, what: str) -> str:
    """The face of what this process measures itself: `what` it was, with the models' names."""
    machine = describe(machine_facts())
    return f"LLM {llm}, PRM {prm} ({rung_of(llm)}); {what}; {machine}.\n{CARRIES_OVER}"


def face(runs: pd.DataFrame, seed: int | None = None) -> str:
    """Three lines about the runs drawn; several machines or profiles are all named.

    seed: the only one drawn, of those the runs have.
    """
    first = runs.iloc[0]
    budget = format_size(int(first["total_memory"]))
    outside = "" if first["activations_in_total"] else ", activations outside it"
    seeds = counted(runs["seed"].nunique(), "seed")
    drawn = seeds if seed is None or seeds == "1 seed" else f"seed {seed} of {seeds}"
    sample = f"{first['num_problems']} problems, {drawn}"
    search = f"n = {first['n']}, beam width {first['beam_width']}"
    lines = (
        f"LLM {first['llm']}, PRM {first['prm']} ({rung(runs)}); total memory {budget}{outside}.",
        f"Profile {_all(runs['profile'])}: {sample}, {search}; {_all(runs['machine'])}.",
        CARRIES_OVER,
    )
    return "\n".join(lines)


def rung(runs: pd.DataFrame) -> str:
    """Which rung of the study's ladder the runs stand on: as they say, else by their LLM's name."""
    if "rung" in runs.columns and isinstance(runs["rung"].iloc[0], str):
        return str(runs["rung"].iloc[0])
    return rung_of(str(runs["llm"].iloc[0]))


def rung_of(llm: str) -> str:
    """The rung of one LLM."""
    return next((text for start, text in RUNGS if llm.startswith(start)), "measured")


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


def counted(number: int, noun: str) -> str:
    """`1 seed`, `2 seeds`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
