"""The searches that are kept in the package for replays, and how each of them was made.

The embedded pair with the default profile's memory, batch limits and problems in flight, and
SmolLM2-135M on MATH problems as the real-search benchmark asks it: real text, and the shape of a
reward model whose scores mean nothing (workload.py). What it does not do: read them
(replay/workload).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.bench.real_search import KV_MEMORY
from workbench.bench.workload import TINY, TINY_SOURCE, Workload, real_workload
from workbench.engine.engine import Engine
from workbench.errors import RecordingError, nearest
from workbench.experiments.execute import build_engine
from workbench.experiments.settings import RunSpec, sweep_config
from workbench.search.problems import load_problems
from workbench.search.recording import require_destination
from workbench.search.result import SearchResult

SEED = 0
SMOLLM2, REAL_PROBLEMS = "smollm2-135m", 8


@dataclass(frozen=True, slots=True)
class Plan:
    """One recording: `problems` of the embedded pair's family, or MATH problems by SmolLM2."""

    real: bool
    problems: int
    n: int
    beam_width: int = 4

    def workload(self, source: str | None) -> Workload:
        """Its search. source: where its problems are, not the usual place."""
        sizes: dict[str, Any] = {"n": self.n, "beam_width": self.beam_width}
        if self.real:
            found = real_workload(SMOLLM2, None, source, self.problems)
            return Workload(
                found.llm, found.prm, found.problems, system_prompt=found.system_prompt, **sizes
            )
        (llm, prm), own = next(iter(TINY.items())), sweep_config("default").search()
        problems = tuple(load_problems(source or TINY_SOURCE, self.problems))
        limits: dict[str, Any] = {
            "max_depth": own.max_depth,
            "max_step_tokens": own.max_step_tokens,
        }
        return Workload(llm, prm, problems, in_flight=own.min_problem_batch, **limits, **sizes)

    def engines(self) -> tuple[Engine, Engine]:
        """LLM and PRM; neither memory nor limits change a token, they are where replays start."""
        if self.real:
            llm, prm = (Engine(SMOLLM2, kv_memory=KV_MEMORY) for _ in range(2))
            return llm, prm
        config = sweep_config("default")
        spec = RunSpec(config, config.sentinel_share, SEED)
        return build_engine(spec.engine("llm")), build_engine(spec.engine("prm"))


PLANS: Mapping[str, Plan] = {
    "tiny-128": Plan(False, 128, 16),
    "tiny-16-n4": Plan(False, 16, 4),
    "tiny-16-n16": Plan(False, 16, 16),
    "tiny-16-n16-w2": Plan(False, 16, 16, 2),
    "tiny-16-n16-w8": Plan(False, 16, 16, 8),
    "tiny-16-n64": Plan(False, 16, 64),
    "smollm2-n4": Plan(True, REAL_PROBLEMS, 4),
    "smollm2-n16": Plan(True, REAL_PROBLEMS, 16),
}


def make_recording(
    name: str, path: str | os.PathLike[str], source: str | None = None
) -> SearchResult:
    """Search as the recording's plan says and write it; answers the search.

    source: the problems' file where it is not the usual one (MATH-500 from the hub).
    """
    if name not in PLANS:
        raise RecordingError(
            f"There is no recording {name!r}; known: {', '.join(PLANS)}."
            f"{nearest(name, list(PLANS))}"
        )
    require_destination(path)
    plan = PLANS[name]
    workload, (llm, prm) = plan.workload(source), plan.engines()
    return workload.search(llm, workload.reward(prm), SEED, record=Path(path))
