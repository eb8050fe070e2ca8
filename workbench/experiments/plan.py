"""Which runs a sweep consists of, in which order, and what names each of them.

A run is one search over all problems at one share with one seed. Its fingerprint is a hash of
everything that determines its tokens and its speed apart from the machine, so that a finished run
is found again by whoever needs it, under whatever profile. Nothing here loads a model.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from workbench.config import EngineConfig, StrategyConfig, SweepConfig, parse_size

HOW_IT_IS_CARRIED_OUT = frozenset(
    {
        "profile",
        "shares",
        "seeds",
        "warmup_problems",
        "sentinel_every",
        "sentinel_share",
        "order_seed",
    }
)
"""Settings of a sweep that do not change what any one run does."""
MEASURE, SENTINEL, WARMUP, REPLAY = "measure", "sentinel", "warmup", "replay"
SENTINELS_FROM = 10
"""Sweeps of so few runs have no room for drift to show, and no sentinel."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a run depends on beside its settings: weights, problems, code, schema."""

    llm: str
    prm: str
    problems: str
    version: str
    schema: int

    def to_dict(self) -> dict[str, Any]:
        """As config.json holds it."""
        return asdict(self)


def fingerprint_of(parameters: dict[str, Any], role: str, identity: dict[str, Any]) -> str:
    """The fingerprint of what config.json holds; stored runs are checked against it."""
    content = {"parameters": parameters, "role": role, "identity": identity}
    text = json.dumps(content, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run of a sweep; `repeat` counts the sentinel's repetitions, else it is 0."""

    config: SweepConfig
    llm_share: float
    seed: int
    role: str = MEASURE
    repeat: int = 0

    @property
    def name(self) -> str:
        """Readable half of the run folder's name."""
        base = f"split-{self.llm_share:.3f}-seed{self.seed}"
        return base if self.role == MEASURE else f"{self.role}{self.repeat or ''}-{base}"

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything the user set that determines this run, one column each of the `runs` table."""
        shared = {k: v for k, v in self.config.to_dict().items() if k not in HOW_IT_IS_CARRIED_OUT}
        shared["total_memory"] = self.total_bytes
        return shared | {"llm_share": self.llm_share, "seed": self.seed, "repeat": self.repeat}

    def fingerprint(self, identity: Identity) -> str:
        """12 hexadecimal digits of sha256 over parameters and identity."""
        return fingerprint_of(self.parameters, self.role, identity.to_dict())

    @property
    def total_bytes(self) -> int:
        """Memory of both models."""
        return parse_size(self.config.total_memory)

    @property
    def llm_bytes(self) -> int:
        """The LLM's part of it."""
        return round(self.total_bytes * self.llm_share)

    @property
    def prm_bytes(self) -> int:
        """The PRM's part: what the LLM leaves."""
        return self.total_bytes - self.llm_bytes

    @property
    def search(self) -> StrategyConfig:
        """The search that the run carries out."""
        return self.config.search()

    def engine(self, role: str) -> EngineConfig:
        """Settings of one engine; role is "llm" or "prm"."""
        names = {f.name for f in fields(EngineConfig)} & {f.name for f in fields(self.config)}
        shared = {name: getattr(self.config, name) for name in names}
        sizes = {"llm": self.llm_bytes, "prm": self.prm_bytes}
        return EngineConfig(model=getattr(self.config, role), memory=sizes[role], **shared)


def measured_runs(config: SweepConfig) -> list[RunSpec]:
    """Every share with every seed, once, in shuffled order."""
    runs = [RunSpec(config, share, seed) for share in config.shares for seed in config.seeds]
    random.Random(config.order_seed).shuffle(runs)
    return runs


def planned_runs(config: SweepConfig) -> list[RunSpec]:
    """The measured runs, the sentinel before the first and after every so many."""
    measured = measured_runs(config)
    every = config.sentinel_every
    if not every or len(measured) <= SENTINELS_FROM:
        return measured
    sentinel = RunSpec(config, config.sentinel_share, config.seeds[0], SENTINEL)
    planned: list[RunSpec] = []
    for repeat, start in enumerate(range(0, len(measured), every)):
        planned += [replace(sentinel, repeat=repeat + 1), *measured[start : start + every]]
    return planned


def warmup_run(config: SweepConfig) -> RunSpec | None:
    """The run that is thrown away: it compiles kernels and warms caches; None: none."""
    if not config.warmup_problems:
        return None
    few = replace(config, num_problems=min(config.num_problems, config.warmup_problems))
    return RunSpec(few, config.sentinel_share, config.seeds[0], WARMUP)
