"""What a step computes and moves, from its plan and the model's shapes: ModelSpec's formulas.

Plain numbers for one step; what they cost on a device is cost.py's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from workbench.core import StepPlan
from workbench.errors import RecordingError
from workbench.models.spec import ModelSpec, RopeScaling
from workbench.search.recording import RecordedEngine

DEFAULT_BLOCK_SIZE = 16


class StepWork(NamedTuple):
    """One step. keys: pairs of a computed token and a position it attends to."""

    tokens: int
    sequences: int
    keys: int
    logits: int  # rows whose logits are computed
    sampled: int
    context: int  # positions of all sequences, whose KV is read


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Floating point operations and bytes of a model's steps.

    Linear in the counts of a step, so each coefficient is a difference of `spec.flops`.
    """

    spec: ModelSpec
    weight_bytes: int
    kv_bytes_per_token: int
    flops_of_one: tuple[int, int, int] = field(init=False)  # a token, a key, a row of logits

    def __post_init__(self) -> None:
        none, key, logit = (self.spec.flops(1, *more) for more in ((0, 0), (1, 0), (0, 1)))
        per_key = key - none
        object.__setattr__(self, "flops_of_one", (none - per_key, per_key, logit - none))

    @classmethod
    def of(cls, engine: RecordedEngine) -> ModelWork:
        """Of a recorded engine; RecordingError when it did not tell its shapes."""
        if engine.spec is None or engine.weight_bytes is None or engine.block_bytes is None:
            raise RecordingError(
                f"The recording does not hold the shapes of {engine.name}; record the search on an "
                "Engine of this workbench, or give the replay a cost."
            )
        kv_bytes = engine.block_bytes // block_size_of(engine)
        return cls(spec_of(engine), engine.weight_bytes, kv_bytes)

    @classmethod
    def of_spec(cls, spec: ModelSpec, dtype_bytes: int = 2) -> ModelWork:
        """Of a model whose weights and cache have this width."""
        return cls(spec, spec.weight_bytes(dtype_bytes), spec.kv_bytes_per_token(dtype_bytes))

    def flops(self, work: StepWork) -> int:
        """Operations of a step; a token attends to itself, which `keys` counts."""
        token, key, logit = self.flops_of_one
        return work.tokens * token + work.keys * key + work.logits * logit

    def bytes(self, work: StepWork) -> int:
        """Bytes of a step: all weights once, the KV of every context read, the new one written."""
        return self.weight_bytes + self.kv_bytes_per_token * (work.context + work.tokens)


def block_size_of(engine: RecordedEngine) -> int:
    """Tokens of a block of the recorded engine."""
    size: int = (engine.config or {}).get("block_size", DEFAULT_BLOCK_SIZE)
    return size


def spec_of(engine: RecordedEngine) -> ModelSpec:
    """The shapes that a recording holds."""
    given = dict(engine.spec or {})
    if given.get("rope_scaling") is not None:
        given["rope_scaling"] = RopeScaling(**given["rope_scaling"])
    try:
        return ModelSpec(**given)
    except TypeError as error:
        raise RecordingError(
            f"The shapes of {engine.name} are of another workbench ({error}); record again."
        ) from error


def work_of(plan: StepPlan) -> StepWork:
    """The counts of a step."""
    context = plan.context_len.astype(np.int64)
    total = int(context.sum())
    keys = total  # where each sequence computes one token
    if plan.num_tokens > plan.num_seqs:
        new = np.diff(plan.query_start).astype(np.int64)
        keys = int(np.sum(new * (context - new) + new * (new + 1) // 2))
    sampled = len(plan.sampling)
    logits = sampled + sum(len(wanted.rows) for wanted in plan.wanted)
    return StepWork(plan.num_tokens, plan.num_seqs, keys, logits, sampled, total)
