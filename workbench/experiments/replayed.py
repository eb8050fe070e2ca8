"""The thesis's pair over the memory split, replayed: the study's rung of true size without a GPU.

Runs are stored and read as measured ones are, so the same views and figures show them; their
seconds are a cost model's, on the device that stands in the machine's place. Weights and KV share
the total, activations are outside. What it does not do: run a model, or draw.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from workbench import __version__
from workbench.config import SweepConfig
from workbench.experiments.face import completeness, face
from workbench.experiments.plan import REPLAY, Identity, RunSpec, measured_runs
from workbench.experiments.profiles import PROFILES, overridden, sweep_config
from workbench.experiments.record import RunResult
from workbench.experiments.run import ENGINES, new_prm_tokens, step_sums
from workbench.experiments.sweep import Sweep, run_sweep
from workbench.models.registry import CONFIGS
from workbench.replay import workload
from workbench.replay.answers import Answers
from workbench.replay.devices import Device, load_device
from workbench.replay.what_if import WhatIfResult, what_if
from workbench.replay.workload import IN_FLIGHT, MATH500, Assumptions, thesis_search
from workbench.trace import SCHEMA_VERSION

RUNG = "replayed 1B + 8B"
DEVICE = "a100-40"
PROBLEMS = {"quick": 48, "default": 64, "full": 128, "thesis": 128}
SEEDS = {"quick": (0,), "default": (0,), "full": (0, 1, 2), "thesis": (0, 1, 2)}
NOTHING_WAS_RUN = (
    "Nothing was run: tokens are MATH-500's lengths with stated assumptions, seconds a roofline's, "
    "a bound from below."
)
REPLAY_CODE = Path(workload.__file__).parent
SOURCES = (REPLAY_CODE, CONFIGS)
LIMITS = ("block_size", "max_num_seqs", "max_num_batched_tokens", "min_problem_batch")


def replayed_config(profile: str = "default", **overrides: Any) -> SweepConfig:
    """The rung's sweep: the thesis profile's models and limits, the profile's shares.

    overrides: fields of SweepConfig; what is None is the rung's own.
    """
    own = {
        "num_problems": PROBLEMS[profile],
        "seeds": SEEDS[profile],
        "shares": sweep_config(profile).shares,
        "activations_in_total": False,
        "min_problem_batch": IN_FLIGHT,
        "warmup_problems": 0,
        "sentinel_every": 0,
        "profile": profile,
    }
    return SweepConfig.from_dict(PROFILES["thesis"] | own | overridden(overrides))


def replayed_sweep(
    profile: str = "default",
    runs_dir: str | Path | None = None,
    *,
    device: Device | str = DEVICE,
    **overrides: Any,
) -> Sweep:
    """Every share of the rung, replayed now or found as it was stored."""
    config = replayed_config(profile, **overrides)
    found = load_device(device) if isinstance(device, str) else device
    specs = [replace(spec, role=REPLAY) for spec in measured_runs(config)]
    execute, identity = Replays(found), identity_on(found)
    return run_sweep(config, runs_dir, execute=execute, identity=identity, specs=specs)


def identity_on(device: Device) -> Identity:
    """What these runs depend on beside their settings: lengths, assumptions, code, the device."""
    lengths = hashlib.sha256(MATH500.read_bytes()).hexdigest()
    made_of = [lengths, asdict(Assumptions()), asdict(device), code_digest()]
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]
    return Identity("replayed", "replayed", digest, __version__, SCHEMA_VERSION)


def code_digest(*folders: Path) -> str:
    """Of every source that makes the search or its seconds, and of what they take numbers from.

    folders: SOURCES unless given, all of workbench/replay and the models' sizes: a run is made
    anew too often rather than too seldom.
    """
    digest = hashlib.sha256()
    for file in (f for folder in folders or SOURCES for f in sorted(folder.rglob("*.*"))):
        if file.suffix not in (".py", ".json"):
            continue
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


class Replays:
    """Carries out a sweep's runs on a device that is a table of numbers."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._answers: dict[tuple[int, ...], Answers] = {}

    def __call__(self, spec: RunSpec) -> RunResult:
        """One share: the same search as at every other, replayed."""
        answers, config = self._answers_of(spec), spec.config
        found = what_if(
            answers,
            device=self._device,
            total_memory=spec.total_bytes,
            llm_share=spec.llm_share,
            **{name: getattr(config, name) for name in LIMITS},
        )
        measured = columns_of(found, config.block_size) | {
            "rung": RUNG,
            "machine": f"simulated {self._device.name}",
        }
        return RunResult(measured, tables_of(found, answers))

    def _answers_of(self, spec: RunSpec) -> Answers:
        config = spec.config
        key = (config.num_problems, config.n, config.beam_width, config.max_depth, spec.seed)
        if key not in self._answers:
            self._answers = {key: Answers(thesis_search(*key))}  # seeds take turns: one is kept
        return self._answers[key]


def columns_of(found: WhatIfResult, block_size: int) -> dict[str, Any]:
    """Cells of the `runs` row, as of a measured run."""
    speed: dict[str, Any] = found.throughput.to_dict()
    speed["sampled_tokens"], speed["answered_problems"] = speed.pop("tokens"), speed.pop("problems")
    for role, memory in zip(ENGINES, found.memory, strict=True):
        parts = {
            "weights_bytes": memory.weight_bytes,
            "kv_bytes": memory.kv_bytes,
            "block_bytes": memory.block_bytes,
            "blocks": memory.num_blocks,
            "kv_tokens": memory.num_blocks * block_size,
        }
        cells = parts | step_sums(found.trace.steps, role)
        speed |= {f"{role}_{name}": value for name, value in cells.items()}
    speed["llm_tokens_per_busy_s"] = speed["sampled_tokens"] / speed["llm_busy_s"]
    speed["prm_tokens_per_busy_s"] = new_prm_tokens(speed) / speed["prm_busy_s"]
    return speed


def tables_of(found: WhatIfResult, answers: Answers) -> dict[str, pd.DataFrame]:
    """Steps, requests, spans and problems; the tree is the recording's at every share."""
    trace = found.trace
    levels = {p.problem.id: p.problem.level for p in answers.recording.problems}
    problems = problem_rows(found, levels)
    return {
        "problems": problems,
        "steps": trace.steps,
        "requests": trace.requests,
        "spans": trace.spans,
    }


def problem_rows(found: WhatIfResult, levels: Mapping[str, int | None]) -> pd.DataFrame:
    """One row a problem, with its part of wall time: by its seconds from first to last request."""
    requests = found.trace.requests
    by_problem = requests.groupby("problem_id")
    seconds = by_problem["finished_s"].max() - by_problem["arrival_s"].min()
    prm = requests[requests["engine"] == "prm"]
    computed = (prm["prompt_tokens"] - prm["cached_tokens"]).groupby(prm["problem_id"]).sum()
    tokens = found.trace.nodes.groupby("problem_id")["step_tokens"].sum()
    rows = pd.DataFrame({"tokens": tokens, "seconds": seconds, "prm_tokens_computed": computed})
    rows = rows.rename_axis("problem_id").reset_index()
    scale = found.throughput.wall_s / rows["seconds"].sum()
    level = rows["problem_id"].map(levels)
    return rows.assign(level=level, wall_part_s=rows["seconds"] * scale)


def replayed_face(sweep: Sweep) -> str:
    """What stands on the figures of this rung."""
    *lines, _ = face(sweep.runs).splitlines()
    flight = f"{sweep.config.min_problem_batch} problems in flight"
    return "\n".join([*lines, f"{completeness(sweep)}; {flight}. {NOTHING_WAS_RUN}"])
