"""One question to a recorded search: what if device, models, memory or limits were others?

    found = what_if("search.parquet", device="a100-40", total_memory="40GiB", llm_share=0.3)
    found.throughput.tokens_per_s, found.trace.steps, found.tree

Everything is a keyword; what is not given is as recorded.

    total = llm weights + llm KV + prm weights + prm KV        llm_share: of total, weights included
    kv    =               llm KV +               prm KV        kv_share: of kv
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Integral
from typing import Any, NamedTuple

import pandas as pd

from workbench.config import format_size, parse_size, refused, require_known
from workbench.errors import ConfigError, OutOfMemory
from workbench.models.spec import ModelSpec
from workbench.replay.answers import Answers
from workbench.replay.cost import block_size_of, recorded
from workbench.replay.devices import Device, load_device
from workbench.replay.simulator import (
    CHANGEABLE,
    Models,
    SharedMemory,
    replay,
    require_blocks,
    settings_of,
)
from workbench.search.recording import RecordedEngine, Recording, read_recording
from workbench.search.result import Throughput
from workbench.search.rounds import OnRound
from workbench.trace import Trace

Source = Answers | Recording | str | os.PathLike[str]
SEARCH = ("min_problem_batch", "score_cache")
COUNTS = ("dtype_bytes", "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens",
          "min_problem_batch")  # fmt: skip
SWITCHES = ("request_order", "problem_batching", "forget_pruned")


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What is asked of a recording. None: as recorded.

    device: a preset's name, a file of `workbench calibrate`, or a Device. llm_spec, prm_spec: other
    shapes, whose weights and KV have dtype_bytes (2); llm_name, prm_name: what the device's fitted
    terms call them. Memory is one of total_memory (weights and KV of both models; divided by
    llm_share) and kv_memory (divided by kv_share), or the recorded one; without a share KV is
    divided as in the recording. max_model_len: of both models, at most what was recorded. policy:
    None gives each model a cache of its own, else the name of an arena's (simulator.POLICIES). llm,
    prm: simulator.CHANGEABLE settings of one model alone. request_order, problem_batching,
    forget_pruned (which may be False only): of SearchSwitches.
    """

    device: Device | str
    llm_spec: ModelSpec | None = None
    prm_spec: ModelSpec | None = None
    llm_name: str | None = None
    prm_name: str | None = None
    dtype_bytes: int | None = None
    total_memory: int | str | None = None
    kv_memory: int | str | None = None
    llm_share: float | None = None
    kv_share: float | None = None
    policy: str | None = None
    max_model_len: int | None = None
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

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Integral) and int(value) >= 1):
                raise refused(WhatIf, name, value, "a whole number from 1")
        engine, spec = (Mapping, "settings by name"), (ModelSpec | None, "a ModelSpec")
        device = (str | os.PathLike | Device, "a preset's name, a .json file, or a Device")
        kinds: dict[str, tuple[Any, str]] = {"device": device, "llm": engine, "prm": engine}
        for name, (kind, allowed) in (kinds | {"llm_spec": spec, "prm_spec": spec}).items():
            if not isinstance(getattr(self, name), kind):
                raise refused(WhatIf, name, getattr(self, name), allowed)

    def given(self, names: Iterable[str]) -> dict[str, Any]:
        """Of these names those that are fields here and were given."""
        return {n: value for n in names if (value := getattr(self, n, None)) is not None}

    def budgets(self, models: Models) -> tuple[int, int] | None:
        """Bytes of KV of each model; None: the blocks that were recorded, or are given. Activations
        are outside, as in every sweep of the embedded pair.

        Raises ConfigError for settings that exclude each other, OutOfMemory where weights leave a
        model nothing.
        """
        memories, shares = ("total_memory", "kv_memory"), ("llm_share", "kv_share")
        for both in (memories, shares, ("llm_share", "kv_memory")):
            if len(self.given(both)) == 2:
                raise ConfigError(f"what_if got {' and '.join(both)}; give one of them.")
        if self.llm_share is not None and self.total_memory is None:
            raise ConfigError(
                "what_if got llm_share alone; it is a share of total_memory: give both."
            )
        for name, share in self.given(shares).items():
            if not (isinstance(share, float) and 0 < share < 1):
                raise ConfigError(f"{name} is {share!r}; allowed: a number in (0, 1).")
        if not self.given(("total_memory", "kv_memory", "kv_share", "policy")):
            return None
        weights = [recorded(model, "weight_bytes") for model in models]
        if self.total_memory is not None:
            kv = parse_size(self.total_memory) - sum(weights)
        else:
            given = self.kv_memory
            kv = sum(_recorded_kv(models)) if given is None else parse_size(given)
        if self.llm_share is not None:
            llm = round((kv + sum(weights)) * self.llm_share) - weights[0]
        elif self.kv_share is not None:
            llm = round(max(kv, 0) * self.kv_share)
        else:
            known = _recorded_kv(models)
            llm = round(max(kv, 0) * (known[0] / sum(known)))
        for model, left in zip(models, (llm, kv - llm), strict=True):
            if left <= 0:
                raise OutOfMemory(
                    f"{model.name} is left {format_size(max(left, 0))} for its KV cache: its "
                    f"weights take {format_size(model.weight_bytes or 0)}"
                    + (f" and {format_size(-left)} are missing" if left < 0 else "")
                    + ". Give more memory, or another share."
                )
        return llm, kv - llm


class ModelMemory(NamedTuple):
    """One model's part. kv_bytes and num_blocks: at the start; an arena moves them."""

    name: str
    weight_bytes: int
    kv_bytes: int
    block_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class WhatIfResult:
    """The replay's tables as of a measured run, in simulated seconds."""

    trace: Trace
    throughput: Throughput
    memory: tuple[ModelMemory, ...]  # LLM, PRM

    @property
    def tree(self) -> pd.DataFrame:
        """The `nodes` table."""
        return self.trace.nodes


def what_if(recording: Source, *, on_round: OnRound | None = None, **settings: Any) -> WhatIfResult:
    """Replay a recorded search with other settings: WhatIf's fields; device is needed.

    recording: a path, a Recording, or Answers(recording), which keeps hashes between replays.
    on_round: called after each round with its Progress; may raise to stop. Raises RecordingError
    for what was not recorded, OutOfMemory where a model has no room for one request or the device
    none for both models, ConfigError for settings that are unknown or contradict each other.
    """
    if "device" not in settings:
        raise ConfigError("what_if needs device=: a preset's name, a .json file, or a Device.")
    require_known(settings, [f.name for f in fields(WhatIf)], "what_if")
    asked = WhatIf(**settings)
    if isinstance(recording, str | os.PathLike):
        recording = read_recording(recording)
    answers = recording if isinstance(recording, Answers) else Answers(recording)
    if asked.dtype_bytes is not None and asked.llm_spec is asked.prm_spec is None:
        raise ConfigError("what_if got dtype_bytes alone; it is that of llm_spec or prm_spec.")
    models = (
        _other(answers.recording.llm, asked.llm_spec, asked.llm_name, asked),
        _other(answers.recording.prm, asked.prm_spec, asked.prm_name, asked),
    )
    device = asked.device if isinstance(asked.device, Device) else load_device(asked.device)
    changes = [asked.given(CHANGEABLE) | dict(own) for own in (asked.llm, asked.prm)]
    budgets, shared = asked.budgets(models), None
    if budgets is not None and any("num_blocks" in own for own in changes):
        raise ConfigError("what_if got num_blocks beside a memory; give one of them.")
    if budgets is not None and asked.policy is not None:
        share = budgets[0] / sum(budgets) if asked.kv_share is None else asked.kv_share
        shared = SharedMemory(sum(budgets), asked.policy, share)
        if asked.kv_share is not None and not shared.keeps_split:
            raise ConfigError(
                f"what_if got kv_share and policy={asked.policy!r}, which keeps no split; give "
                "one of them, or another policy."
            )
    memory = []
    for model, own, given in zip(models, changes, budgets or (None, None), strict=True):
        config = settings_of(model, own)
        block = recorded(model, "block_bytes") // block_size_of(model) * config.block_size
        kv = (config.num_blocks or 0) * block if given is None else given  # as recorded, if not
        if given is not None and shared is None:
            own["num_blocks"] = kv // block
            if kv < block:
                raise OutOfMemory(
                    f"{model.name} is left {format_size(kv)} for its KV cache, whose blocks take "
                    f"{format_size(block)} each. Give more memory, or another share."
                )
            kv -= kv % block
        memory.append(ModelMemory(model.name, model.weight_bytes or 0, kv, block, kv // block))
    taken = sum(part.weight_bytes + part.kv_bytes for part in memory)
    device.require_room(taken, "Weights and KV of both models")
    llm, prm = changes
    search = asked.given(SEARCH) | {"switches": asked.given(SWITCHES), "on_round": on_round}
    found = replay(answers, device, llm=llm, prm=prm, shared=shared, models=models, **search)
    return WhatIfResult(found.trace, found.throughput, tuple(memory))


def _other(
    engine: RecordedEngine, spec: ModelSpec | None, name: str | None, asked: WhatIf
) -> RecordedEngine:
    """The engine with another model's shapes; its prompts, tokens and other limits stay."""
    dtype_bytes, most = asked.dtype_bytes or 2, engine.max_model_len
    if spec is not None:
        most = min(most, spec.max_model_len, spec.sliding_window or most)
    engine = replace(engine, max_model_len=min(asked.max_model_len or most, most))
    if spec is None:
        return engine if name is None else replace(engine, name=name)
    return replace(
        engine,
        name=name or f"another {engine.name}",
        spec=asdict(spec),
        weight_bytes=spec.weight_bytes(dtype_bytes) + spec.table_bytes(dtype_bytes),
        block_bytes=spec.block_bytes(block_size_of(engine), dtype_bytes),
    )


def _recorded_kv(models: Models) -> list[int]:
    return [require_blocks(m, m.num_blocks) * recorded(m, "block_bytes") for m in models]
