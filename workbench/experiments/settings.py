"""Settings: what one run is made of. Which runs a study is, plans.py says.

A run is one flat row: settings of its sweep, share and seed, and settings of its own, whatever is
studied. Its fingerprint is a hash of the row and of what it depends on, so that a finished run is
found again. Nothing here loads a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from workbench.config import EngineConfig, SweepConfig, parse_size

HOW_IT_IS_CARRIED_OUT = frozenset(("profile", "shares", "seeds", "order_seed", "warmup_problems",
                                   "sentinel_every", "sentinel_share"))  # fmt: skip
"""Settings of a sweep that do not change what any one run does."""
LATER = {"policy": None, "critiques": None, "critique_tokens": None,
         "critique_temperature": None}  # fmt: skip
"""Settings that older runs lack, as these were made; there they do not enter a fingerprint."""
MEASURE, SENTINEL, REPLAY = "measure", "sentinel", "replay"
TIMED, COUNTED = "batch", "blocks"
ABLATION, DEPTH, QUEUE = "ablation", "depth", "queue"
REFERENCE, TIGHT = "reference", "policy"
"""Roles. TIMED, COUNTED: a batch cell whose engine computes, or whose blocks are only counted.
ABLATION, DEPTH, QUEUE: a modification at the profile's depth limit, at a lower one, and over a
longer queue. REFERENCE, TIGHT: memory uncapped, or a budget of the study of policies.
"""
CONTINUOUS, UNCACHED, STATIC_BATCH = "continuous", "continuous, no prefix cache", "static, padded"
"""Kinds of batching."""
REPLAYED, RECORDED, RECORDING = "replayed 1B + 8B", "replayed SmolLM2", "smollm2-n16"
"""Rungs that are replayed, and what the second of them is a replay of."""
THESIS_SHARE = 0.3


def nearest_to_thesis(shares: Iterable[float]) -> float:
    """Of these shares the one nearest to THESIS_SHARE."""
    return float(min(shares, key=lambda share: abs(share - THESIS_SHARE)))


def with_width(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a search; where n is less than the usual beam width and none is given, n."""
    n, usual = given.get("n"), SweepConfig().beam_width
    few = isinstance(n, int) and 1 <= n < usual and given.get("beam_width") is None
    return {**given, "beam_width": n} if few else {**given}


def overridden(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides that are not None, as notebooks give them."""
    return {name: value for name, value in overrides.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Identity:
    """What a run depends on beside its settings: weights, problems, code, schema."""

    llm: str
    prm: str
    problems: str
    code: str
    schema: int


def fingerprint_of(parameters: dict[str, Any], role: str, identity: dict[str, Any]) -> str:
    """The fingerprint of what config.json holds; stored runs are checked against it."""
    return hash_of({"parameters": parameters, "role": role, "identity": identity})


def hash_of(content: Any) -> str:
    """12 hexadecimal digits of sha256 over plain data."""
    text = json.dumps(content, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run. setting: what its study calls it; repeat: which of its repetitions it is.

    own: settings that no sweep has: llm_NAME and prm_NAME are those of one engine; kv_bytes and
    kv_share are the arena's that a policy divides; the others say what is studied.
    """

    config: SweepConfig
    llm_share: float
    seed: int
    role: str = MEASURE
    repeat: int = 0
    setting: str = ""
    own: tuple[tuple[str, Any], ...] = ()

    def get(self, name: str) -> Any:
        """One of the run's own settings, or of its sweep's; None where there is none such."""
        return dict(self.own).get(name, getattr(self.config, name, None))

    @property
    def name(self) -> str:
        """Readable half of the run folder's name."""
        what = (
            self.setting.replace("/", "-")
            or f"{self.config.policy or 'split'}-{self.llm_share:.3f}"
        )
        sizes = {DEPTH: f"-{self.config.max_depth}", QUEUE: f"-{self.config.num_problems}"}
        role = "" if self.role == MEASURE else f"{self.role}{self.repeat or ''}-"
        return f"{role}{what}{sizes.get(self.role, '')}-seed{self.seed}"

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything the user set that determines this run, one column each of the `runs` table."""
        shared = {k: v for k, v in self.config.to_dict().items() if k not in HOW_IT_IS_CARRIED_OUT}
        for name, before in LATER.items():
            if shared[name] == before:
                del shared[name]
        at: dict[str, Any] = {"llm_share": self.llm_share, "seed": self.seed, "repeat": self.repeat}
        at |= {"total_memory": self.total_bytes, "setting": self.setting}
        return shared | at | dict(self.own)

    @property
    def group(self) -> tuple[Any, ...]:
        """What the runs have in common that are interleaved: the same problems, compared."""
        beside = self.get("beside")
        role = TIGHT if beside else MEASURE if self.role == SENTINEL else self.role
        return role, self.seed, self.config.num_problems, beside or self.get("budget")

    def fingerprint(self, identity: Identity) -> str:
        """12 hexadecimal digits of sha256 over parameters and identity."""
        return fingerprint_of(self.parameters, self.role, asdict(identity))

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

    def engine(self, role: str) -> EngineConfig:
        """Settings of one engine, "llm" or "prm"; in an arena the memory is the arena's."""
        names = [field.name for field in fields(EngineConfig)]
        settings = {n: getattr(self.config, n) for n in names if hasattr(self.config, n)}
        memory = self.llm_bytes if role == "llm" else self.prm_bytes
        settings["model"] = getattr(self.config, role)
        settings["memory"] = None if self.config.policy else memory
        own = {k.removeprefix(f"{role}_"): v for k, v in self.own if k.startswith(f"{role}_")}
        return EngineConfig(**settings | own)


def make_run(
    config: SweepConfig,
    llm_share: float,
    seed: int,
    role: str = MEASURE,
    setting: str = "",
    repeat: int = 0,
    **settings: Any,
) -> RunSpec:
    """A run with `settings` in place of the sweep's; those that no sweep has are its own."""
    changed = {name: value for name, value in settings.items() if hasattr(config, name)}
    own = tuple((n, v) for n, v in sorted(settings.items()) if n not in changed and v is not None)
    return RunSpec(replace(config, **changed), llm_share, seed, role, repeat, setting, own)
