"""One question to a recorded search: what if device, models, memory or limits were others?

    found = what_if("search.parquet", device="a100-40", total_memory="40GiB", llm_share=0.3)
    found.throughput.tokens_per_s, found.trace.steps, found.tree

Everything is a keyword; what is not given is as recorded. `WhatIf` is the question as plain data,
for a worker process. What it does not do: know models by name, or draw.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

import pandas as pd

from workbench.errors import ConfigError, nearest
from workbench.models.spec import ModelSpec
from workbench.replay.answers import Answers
from workbench.replay.budgets import Budgets, budgets
from workbench.replay.devices import Device, load_device
from workbench.replay.engine import CacheSettings
from workbench.replay.memory import SharedMemory
from workbench.replay.simulator import UNTOLD, Models, Replayed, replay
from workbench.replay.work import DEFAULT_BLOCK_SIZE
from workbench.search.recording import RecordedEngine, Recording, read_recording
from workbench.search.result import Throughput
from workbench.search.rounds import OnRound
from workbench.trace import Trace

Source = Answers | Recording | str | os.PathLike[str]
BOTH = (
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "reuse_partial_blocks",
)
SEARCH = ("min_problem_batch", "score_cache")
SWITCHES = ("request_order", "problem_batching", *UNTOLD)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The question. None: as recorded.

    device: a preset's name, a file of `workbench calibrate`, or a Device. llm_spec, prm_spec: other
    shapes, whose weights and KV have dtype_bytes; llm_name, prm_name: what the device's fitted
    terms call them. Memory is one of total_memory (weights and KV of both models; divided by
    llm_share) and kv_memory (divided by kv_share), or the recorded one; a share that is not given
    is the recorded one. policy: None gives each model a cache of its own, else the name of an
    arena's (memory.POLICIES). llm, prm: fields of CacheSettings for one model alone. Of the fields
    of SearchSwitches forget_pruned may be False only.
    """

    device: Device | str
    llm_spec: ModelSpec | None = None
    prm_spec: ModelSpec | None = None
    llm_name: str | None = None
    prm_name: str | None = None
    dtype_bytes: int = 2
    total_memory: int | str | None = None
    kv_memory: int | str | None = None
    llm_share: float | None = None
    kv_share: float | None = None
    policy: str | None = None
    block_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool | None = None
    reuse_partial_blocks: bool | None = None
    min_problem_batch: int | None = None
    score_cache: bool | None = None
    request_order: str | None = None
    problem_batching: str | None = None
    forget_pruned: bool | None = None
    llm: Mapping[str, Any] = field(default_factory=dict)
    prm: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> WhatIf:
        """From keywords; ConfigError for one that is unknown."""
        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                raise ConfigError(
                    f"what_if has no setting {name!r}; known: {', '.join(known)}."
                    f"{nearest(name, known)}"
                )
        return cls(**settings)

    def answer(self, recording: Source, on_round: OnRound | None = None) -> WhatIfResult:
        """Replay the recording so; see what_if."""
        answers = as_answers(recording)
        models = self.models(answers.recording)
        given = self.budgets(models)
        device = load_device(self.device) if isinstance(self.device, str) else self.device
        if given is not None:
            weights = sum(model.weight_bytes or 0 for model in models)
            device.require_room(given.total + weights, "Weights and KV of both models")
        found = replay(
            answers,
            device,
            models=models,
            on_round=on_round,
            **self._memory(models, given),
            switches=self._given(SWITCHES),
            **self._given(SEARCH),
        )
        return WhatIfResult(self, found.trace, found.throughput, _held(models, found, given))

    def models(self, recording: Recording) -> Models:
        """The recorded engines, or others in their place."""
        llm = _other(recording.llm, self.llm_spec, self.llm_name, self.dtype_bytes)
        return llm, _other(recording.prm, self.prm_spec, self.prm_name, self.dtype_bytes)

    def budgets(self, models: Models) -> Budgets | None:
        """Bytes of KV of each model; None: the blocks that were recorded, or are given."""
        return budgets(
            models,
            total_memory=self.total_memory,
            kv_memory=self.kv_memory,
            llm_share=self.llm_share,
            kv_share=self.kv_share,
            needed=self.policy is not None,
        )

    def _given(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _memory(self, models: Models, given: Budgets | None) -> dict[str, Any]:
        both = self._given(BOTH)
        changes = [both | dict(own) for own in (self.llm, self.prm)]
        if given is not None and self.policy is not None:
            share = given.share if self.kv_share is None else self.kv_share
            shared = SharedMemory(given.total, self.policy, share)
            if self.kv_share is not None and not shared.keeps_split:
                raise ConfigError(
                    f"what_if got kv_share and policy={self.policy!r}, which keeps no split; give "
                    "one of them, or another policy."
                )
            return {"llm": changes[0], "prm": changes[1], "shared": shared}
        if given is not None:
            for model, own, kv in zip(models, changes, given, strict=True):
                own["num_blocks"] = kv // _block_bytes(model, own)
        return {"llm": changes[0], "prm": changes[1]}


class ModelMemory(NamedTuple):
    """One model's part. kv_bytes and num_blocks: at the start; an arena moves them."""

    name: str
    weight_bytes: int
    kv_bytes: int
    block_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class WhatIfResult:
    """The answer: tables as of a measured run, in simulated seconds."""

    question: WhatIf
    trace: Trace
    throughput: Throughput
    memory: tuple[ModelMemory, ModelMemory]  # LLM, PRM

    @property
    def tree(self) -> pd.DataFrame:
        """The `nodes` table."""
        return self.trace.nodes


def what_if(recording: Source, *, on_round: OnRound | None = None, **settings: Any) -> WhatIfResult:
    """Replay a recorded search with other settings: WhatIf's fields; device is needed.

    recording: a path, a Recording, or Answers(recording), which remembers hashes between replays.
    on_round: called after each round with its Progress; may raise to stop. Raises RecordingError
    for what was not recorded, OutOfMemory where a model has no room for one request or the device
    none for both models, ConfigError for settings that are unknown or contradict each other.
    """
    if "device" not in settings:
        raise ConfigError("what_if needs device=: a preset's name, a .json file, or a Device.")
    return WhatIf.of(settings).answer(recording, on_round)


def as_answers(recording: Source) -> Answers:
    """A recording, or the path of one, ready to be asked."""
    if isinstance(recording, Answers):
        return recording
    if isinstance(recording, str | os.PathLike):
        recording = read_recording(recording)
    return Answers(recording)


def _other(
    engine: RecordedEngine, spec: ModelSpec | None, name: str | None, dtype_bytes: int
) -> RecordedEngine:
    """The engine with another model's shapes; its limits, prompts and tokens stay."""
    if name is not None:
        engine = replace(engine, name=name)
    if spec is None:
        return engine
    size = (engine.config or {}).get("block_size", DEFAULT_BLOCK_SIZE)
    return replace(
        engine,
        name=f"another {engine.name}" if name is None else name,
        spec=asdict(spec),
        weight_bytes=spec.weight_bytes(dtype_bytes) + spec.table_bytes(dtype_bytes),
        block_bytes=spec.block_bytes(size, dtype_bytes),
    )


def _block_bytes(model: RecordedEngine, changes: Mapping[str, Any]) -> int:
    assert model.block_bytes is not None
    recorded = (model.config or {}).get("block_size", DEFAULT_BLOCK_SIZE)
    settings = CacheSettings.of(model, changes)
    return model.block_bytes // recorded * settings.block_size


def _held(
    models: Models, found: Replayed, given: Budgets | None
) -> tuple[ModelMemory, ModelMemory]:
    parts = []
    for place, (model, engine) in enumerate(zip(models, (found.llm, found.prm), strict=True)):
        each = _block_bytes(model, {"block_size": engine.settings.block_size})
        own = engine.settings.num_blocks
        kv = given[place] if own is None and given is not None else (own or 0) * each
        parts.append(ModelMemory(model.name, model.weight_bytes or 0, kv, each, kv // each))
    return parts[0], parts[1]
