"""What a memory would bring, without a replay: one replay with room for everything, bent to fit.

From the steps of a `Basis`: the miss-ratio curve of a cache's size says which tokens are computed
again, a step that holds more than there is room for, or that a limit allows, is cut into as many as
it takes, and the cost model gives the seconds. Good enough to follow a hand that drags a slider.
What it does not do: preempt, wait, or know what a policy lends to whom.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.errors import ConfigError
from workbench.replay.basis import Basis, ModelBasis, StepCounts
from workbench.replay.cost import StepCost
from workbench.replay.simulator import Costs

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Limits:
    """One model's cache and steps, as estimated for."""

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class EstimatedModel:
    """One model: seconds of its steps, and what its cache did.

    thrash_per_1000: events in so many look-ups. fits: whether the cache holds the order of calls;
    where not, the counts are those of the smallest that does.
    """

    seconds: Floats
    num_blocks: int
    hit_rate: float
    thrash_per_1000: float
    fits: bool

    @property
    def busy_s(self) -> float:
        """Seconds of all its steps."""
        return float(self.seconds.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """A search as it would be, in simulated seconds."""

    basis: Basis
    llm: EstimatedModel
    prm: EstimatedModel
    outside_s: float

    @property
    def wall_s(self) -> float:
        """From the first admission to the last answer."""
        return self.llm.busy_s + self.prm.busy_s + self.outside_s

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over wall time."""
        return self.basis.tokens / self.wall_s

    def blocks(self) -> pd.DataFrame:
        """start_s, engine, blocks_active, blocks_cached, blocks_total: a row a step of the basis.

        No more blocks than there are.
        """
        pairs = list(zip(self.basis.models, (self.llm, self.prm), strict=True))
        seconds = np.zeros(sum(len(model.order) for model, _ in pairs))
        for model, found in pairs:
            seconds[model.order] = found.seconds
        busy = self.llm.busy_s + self.prm.busy_s
        starts = (np.cumsum(seconds) - seconds) * (self.wall_s / busy)
        tables = [
            _blocks(name, model, starts[model.order], found.num_blocks)
            for name, (model, found) in zip(("llm", "prm"), pairs, strict=True)
        ]
        return pd.concat(tables, ignore_index=True)


def estimate(basis: Basis, costs: Costs, llm: Limits, prm: Limits) -> Estimate:
    """The search with these caches and limits; costs as Costs.on(models, device) gives them."""
    return Estimate(
        basis,
        _model(basis.llm, costs.llm, llm),
        _model(basis.prm, costs.prm, prm),
        outside_s=basis.requests * costs.request_s,
    )


def _model(model: ModelBasis, cost: object, limits: Limits) -> EstimatedModel:
    if not isinstance(cost, StepCost):
        raise ConfigError(
            f"An estimate cannot use {cost!r:.60} as a cost: it costs many steps at once. Give "
            "Costs.on(models, device)."
        )
    lost = max(model.most_hits - model.column("hit_tokens", limits.num_blocks), 0.0)
    work = _with_tokens(model.work, model.prefill * (lost / max(model.prefill.sum(), 1.0)))
    room = model.active / limits.num_blocks
    most = np.maximum(
        work.sequences / limits.max_num_seqs, work.tokens / limits.max_num_batched_tokens
    )
    parts = np.maximum(1.0, np.maximum(room, most))
    each = StepCounts(*(column / parts for column in work))
    return EstimatedModel(
        seconds=parts * seconds_of(cost, each),
        num_blocks=limits.num_blocks,
        hit_rate=model.column("hit_ratio", limits.num_blocks),
        thrash_per_1000=1000 * model.column("thrash_events", limits.num_blocks) / model.look_ups,
        fits=limits.num_blocks >= model.peak,
    )


def _with_tokens(work: StepCounts, more: Floats) -> StepCounts:
    """The steps with so many more tokens to compute, each attending to as much as the others."""
    tokens = work.tokens + more
    keys = work.keys * tokens / np.maximum(work.tokens, 1)
    return work._replace(tokens=tokens, keys=keys)


def seconds_of(cost: StepCost, work: StepCounts) -> Floats:
    """StepCost.seconds of many steps at once."""
    device, counts = cost.device, cast(Any, work)  # the formulas take arrays as they take numbers
    computed = cost.model.flops(counts) / device.flops_per_s
    moved = cost.model.bytes(counts) / device.bytes_per_s
    ones = np.ones(len(work.tokens))
    measures = np.stack(
        [np.maximum(computed, moved), ones, work.tokens, work.sequences, work.keys, work.logits]
    )
    return np.asarray(astuple(cost.terms)) @ measures


def _blocks(name: str, model: ModelBasis, starts: Floats, total: int) -> pd.DataFrame:
    active = np.minimum(model.active, total)
    cached = np.minimum(model.cached, total - active)
    columns = {"start_s": starts, "blocks_active": active, "blocks_cached": cached}
    return pd.DataFrame(columns | {"engine": name, "blocks_total": total})
