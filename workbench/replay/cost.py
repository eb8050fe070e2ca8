"""How long a step lasts: what it computes and moves, and a roofline or fitted terms.

    seconds = roofline * max(flops / flops_per_s, bytes / bytes_per_s)
            + step + token * tokens + sequence * sequences + key * keys + logit * logits

Of a data sheet only the first line is known: its factor is 1 and the rest 0, so it is a bound from
below, but for KV that siblings share, which attention may read once and is charged to each. `fit`
finds all factors, none negative, by least squares over measured steps, each weighted by 1 / the
duration that the fit expects: long steps do not decide alone, and all steps together last as long
as they were measured to. (Weights of measured durations would favour the steps that were not held
up, and so promise too much.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations
from operator import mul
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.config import require_known
from workbench.core import StepPlan
from workbench.errors import ConfigError, RecordingError
from workbench.models.spec import ModelSpec, RopeScaling
from workbench.replay.devices import Device
from workbench.search.recording import RecordedEngine

BOUND = "a bound from below where each sequence reads its own KV"
ROUNDS = 8  # of weights and factors in turn; they settle in three or four
LEAST_SHARE = 1e-3  # of the mean duration: no step is weighted as if it took less
Floats = NDArray[np.float64]


# -- what a step computes and moves --


class StepWork(NamedTuple):
    """One step. keys: pairs of a computed token and a position it attends to.

    Of rows that nothing is asked of, the last layer computes keys and values only.
    """

    tokens: int
    sequences: int
    keys: int
    logits: int  # rows whose logits are computed
    sampled: int  # of these, rows with those of the whole vocabulary
    context: int  # positions of all sequences, whose KV is read
    asked: int  # rows that leave the last layer
    asked_keys: int  # positions these attend to
    columns: int  # logits of rows that are scored


def work_of(plan: StepPlan, logit_rows: int) -> StepWork:
    """The counts of a step, as `Executor` computes it: where more rows than logit_rows (an engine's
    max_num_seqs) are asked for, the last layer is computed of all.
    """
    context = plan.context_len.astype(np.int64)
    total = int(context.sum())
    sampled, scored = len(plan.sampling), sum(len(wanted.rows) for wanted in plan.wanted)
    columns = sum(len(wanted.rows) * len(wanted.columns) for wanted in plan.wanted)
    keys, asked, asked_keys = total, plan.num_seqs, total  # where each computes one token
    if plan.num_tokens > plan.num_seqs:
        new = np.diff(plan.query_start).astype(np.int64)
        keys = int(np.sum(new * (context - new) + new * (new + 1) // 2))
        rows = np.unique(np.concatenate([plan.sampling.rows, *(w.rows for w in plan.wanted)]))
        asked, asked_keys = plan.num_tokens, keys
        if len(rows) <= logit_rows:
            asked, asked_keys = len(rows), int(np.sum(plan.positions[rows] + 1))
    counts = plan.num_tokens, plan.num_seqs, keys, sampled + scored, sampled, total
    return StepWork(*counts, asked, asked_keys, columns)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Floating point operations and bytes of a model's steps, linear in the counts of a step."""

    spec: ModelSpec
    weight_bytes: int
    kv_bytes_per_token: int
    flops_of: StepWork = field(init=False)  # operations of one of each count

    def __post_init__(self) -> None:
        spec = self.spec
        none, seen, headed = (spec.flops(1, *more) for more in ((0, 0), (1, 0), (0, 1)))
        key, column = seen - none, 2 * spec.hidden
        rest = 2 * (spec.layer_products() - spec.hidden * spec.qkv_columns)  # after keys and values
        last_key, inner = key // spec.layers, headed - none - column * spec.outputs
        token, lower_key = none - key - rest, key - last_key
        whole = column * spec.outputs  # logits of a row
        ones = (token, 0, lower_key, inner, whole, 0, rest, last_key, column)
        object.__setattr__(self, "flops_of", StepWork(*ones))

    @classmethod
    def of(cls, engine: RecordedEngine) -> ModelWork:
        """Of a recorded engine; RecordingError when it did not tell its shapes."""
        kv_bytes = recorded(engine, "block_bytes") // block_size_of(engine)
        return cls(spec_of(engine), recorded(engine, "weight_bytes"), kv_bytes)

    def flops(self, work: StepWork) -> int:
        """Operations of a step; a token attends to itself, which `keys` counts."""
        return sum(map(mul, self.flops_of, work))

    def bytes(self, work: StepWork) -> int:
        """Bytes of a step: all weights once, the KV of every context read, the new one written. An
        embedding, or an output of which few columns are asked, counts whole (each 7 % of an 8B).
        """
        return self.weight_bytes + self.kv_bytes_per_token * (work.context + work.tokens)


def block_size_of(engine: RecordedEngine) -> int:
    """Tokens of a block of the recorded engine, the default's where it did not tell."""
    size: int = (engine.config or {}).get("block_size", 16)
    return size


def recorded(engine: RecordedEngine, name: str) -> Any:
    """A field of a recorded engine; RecordingError where the engine did not tell it."""
    value = getattr(engine, name)
    if value is None:
        raise RecordingError(
            f"The recording does not hold the {name} of {engine.name}; record the search on an "
            "Engine of this workbench, or give the replay num_blocks and a cost."
        )
    return value


def spec_of(engine: RecordedEngine) -> ModelSpec:
    """The shapes that a recording holds; RecordingError where there are none, or unknown ones."""
    shapes = dict(recorded(engine, "spec"))
    if shapes.get("rope_scaling") is not None:
        shapes["rope_scaling"] = RopeScaling(**shapes["rope_scaling"])
    try:
        return ModelSpec(**shapes)
    except TypeError as error:
        raise RecordingError(
            f"The shapes of {engine.name} are of another workbench ({error}); record again."
        ) from error


# -- what that costs on a device --


@dataclass(frozen=True, slots=True)
class Terms:
    """The factors above: roofline without a unit, the others in seconds."""

    roofline: float = 1.0
    step: float = 0.0
    token: float = 0.0
    sequence: float = 0.0
    key: float = 0.0
    logit: float = 0.0

    @classmethod
    def on(cls, device: Device, model: str) -> Terms:
        """The model's on this device: fitted ones where there are any, else the roofline alone."""
        terms, known = device.terms.get(model, {}), [f.name for f in fields(cls)]
        require_known(terms, known, f"The cost of {model} on {device.name!r}")
        return cls(**terms)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a model's steps on a device."""

    model: ModelWork
    device: Device
    terms: Terms = Terms()

    def __call__(self, work: StepWork) -> float:
        terms, (tokens, sequences, keys, logits, *_) = self.terms, work
        beside = terms.step + terms.token * tokens + terms.sequence * sequences
        beside += terms.key * keys + terms.logit * logits
        return terms.roofline * self.roofline(work) + beside

    def roofline(self, work: StepWork) -> float:
        """Seconds below which the device cannot do it, as far as `bytes` counts what it must."""
        compute = self.model.flops(work) / self.device.flops_per_s
        return max(compute, self.model.bytes(work) / self.device.bytes_per_s)


class MeteredCost(list[StepWork]):
    """A cost of no time that keeps the counts of every step."""

    def __call__(self, work: StepWork) -> float:
        self.append(work)
        return 0.0


def fit(
    model: ModelWork, device: Device, works: Sequence[StepWork], seconds: Sequence[float]
) -> Terms:
    """The terms that explain measured steps best. ConfigError without a step that took time."""
    measured = np.asarray(seconds, np.float64)
    if len(works) != len(measured) or not len(works) or not (measured > 0).all():
        raise ConfigError(
            f"A cost is fitted to {len(works)} steps and {len(measured)} durations; give as many, "
            "at least one, each above 0."
        )
    roofline = StepCost(model, device).roofline
    columns = [(roofline(w), 1.0, w.tokens, w.sequences, w.keys, w.logits) for w in works]
    table = np.array(columns, np.float64)  # what the terms multiply, in their order
    expected = np.full(len(measured), measured.mean())
    for _ in range(ROUNDS):
        weight = 1.0 / np.sqrt(np.maximum(expected, LEAST_SHARE * measured.mean()))
        found = non_negative_least_squares(table * weight[:, None], measured * weight)
        expected = table @ found
    return Terms(*found.tolist())


def non_negative_least_squares(table: Floats, wanted: Floats) -> Floats:
    """x >= 0 with the least |table x - wanted|: the best of all subsets of columns whose solution
    is not negative, which is where the optimum lies. For a few columns.
    """
    scale = np.linalg.norm(table, axis=0)
    columns = table / np.where(scale > 0, scale, 1.0)
    best, least = np.zeros(table.shape[1]), float(wanted @ wanted)
    for size in range(1, table.shape[1] + 1):
        for chosen in combinations(range(table.shape[1]), size):
            part, *_ = np.linalg.lstsq(columns[:, chosen], wanted, rcond=1e-10)
            left = wanted - columns[:, chosen] @ part
            if part.min() >= 0 and float(left @ left) < least:
                least = float(left @ left)
                best = np.zeros(table.shape[1])
                best[list(chosen)] = part
    return best / np.where(scale > 0, scale, 1.0)
