"""Answers to a position: estimated while a hand moves, replayed once it rests; both alike to draw.

`estimate`, `exact` and `share_curve` are what the widget calls, and what notebooks and tests call
without one. What it does not do: draw (what_if_figures.py), or wait for anybody.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.plots.timeline import decimated
from workbench.replay.answers import Answers
from workbench.replay.basis import Basis, make_basis
from workbench.replay.devices import load_device
from workbench.replay.estimate import Limits
from workbench.replay.estimate import estimate as estimate_search
from workbench.replay.simulator import Costs, Models
from workbench.replay.what_if import Budgets, WhatIfResult
from workbench.search.rounds import OnRound
from workbench.widgets.what_if_position import LIMITS, Kept, Position

ESTIMATE, EXACT = "estimate", "exact"
BLOCK_COLUMNS = ("blocks_active", "blocks_cached")
ROUNDING = 1e-9  # a smaller part of a sum is what adding floats leaves
DRAWN_STEPS = 150  # stretches that a model's blocks are thinned to


class ModelAnswer(NamedTuple):
    """One model. seconds: it is busy with a problem. thrash: events in 1,000 look-ups.

    fits: whether its cache holds the order of an unlimited one; None: nobody looked.
    """

    num_blocks: int
    kv_tokens: int
    seconds: float
    hit_rate: float
    thrash: float
    fits: bool | None


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a search would be like. kind: ESTIMATE or EXACT. took_s: to find out.

    seconds: of a problem, models' and the rest together. blocks: start_s, engine, blocks_active,
    blocks_cached, blocks_total; empty where nobody asked.
    """

    kind: str
    position: Position
    kv_share: float
    tokens_per_s: float
    seconds: float
    llm: ModelAnswer
    prm: ModelAnswer
    blocks: pd.DataFrame
    took_s: float

    @property
    def outside_s(self) -> float:
        """Seconds of a problem in which neither model is busy."""
        rest = self.seconds - self.llm.seconds - self.prm.seconds
        return rest if rest > ROUNDING * self.seconds else 0.0

    @property
    def fits(self) -> bool:
        """Whether both caches hold the order, where that is known."""
        return self.llm.fits is not False and self.prm.fits is not False

    def cost(self, price_per_hour: float) -> float:
        """Of a problem, in the price's currency."""
        return self.seconds / 3600 * price_per_hour

    def row(self) -> dict[str, Any]:
        """One flat row of a table."""
        shared = {
            "kind": self.kind,
            "llm_share": self.position.llm_share,
            "kv_share": self.kv_share,
            "tokens_per_s": self.tokens_per_s,
            "seconds_per_problem": self.seconds,
            "outside_s": self.outside_s,
        }
        models = {
            f"{name}_{column}": value
            for name, model in (("llm", self.llm), ("prm", self.prm))
            for column, value in model._asdict().items()
        }
        return shared | models


def recording_basis(
    kept: Kept, position: Position, answers: Answers, on_round: OnRound | None = None
) -> Basis:
    """What estimates at this position's limits start from; one replay, any memory and device."""
    limits = {name: getattr(position, name) for name in LIMITS}
    return make_basis(answers, limits, limits, on_round)


def estimate(kept: Kept, position: Position, basis: Basis, *, blocks: bool = True) -> Answer:
    """From curves and the cost model. blocks=False leaves the blocks over time out.

    Of a policy that lends pages it assumes that each model has all but the other's floor.
    """
    start = time.perf_counter()
    models, held = _memory(kept, position)
    sizes = _lent_blocks(kept, position, held)
    costs = Costs.on(models, load_device(position.device))
    ratio = position.block_size / basis.block_size  # where not 1, as many tokens are as many blocks
    found = estimate_search(
        basis,
        costs,
        *(
            Limits(
                max(round(size * ratio), 1), position.max_num_seqs, position.max_num_batched_tokens
            )
            for size in sizes
        ),
    )
    parts = [
        ModelAnswer(
            size,
            size * position.block_size,
            model.busy_s / basis.problems,
            model.hit_rate,
            model.thrash_per_1000,
            model.fits,
        )
        for size, model in zip(sizes, (found.llm, found.prm), strict=True)
    ]
    return Answer(
        kind=ESTIMATE,
        position=position,
        kv_share=held.share,
        tokens_per_s=found.tokens_per_s,
        seconds=found.wall_s / basis.problems,
        llm=parts[0],
        prm=parts[1],
        blocks=_thinned(_resized(found.blocks(), ratio) if blocks else None),
        took_s=time.perf_counter() - start,
    )


def _resized(blocks: pd.DataFrame, ratio: float) -> pd.DataFrame:
    """The same tokens in blocks of another size."""
    if ratio != 1:
        for column in (*BLOCK_COLUMNS, "blocks_total"):
            blocks[column] = (blocks[column] / ratio).round()
    return blocks


def _memory(kept: Kept, position: Position) -> tuple[Models, Budgets]:
    """Both models, and the bytes of KV that the position gives them."""
    models = position.question.models(kept.header)  # type: ignore[arg-type]
    held = position.question.budgets(models)
    assert held is not None, "a position names a memory"
    return models, held


def _own_blocks(kept: Kept, position: Position, held: Budgets) -> tuple[int, int]:
    """Blocks of each model's part."""
    needs = kept.feasible(position.bytes, position.block_size)
    return held.llm // needs.llm.block_bytes, held.prm // needs.prm.block_bytes


def _lent_blocks(kept: Kept, position: Position, held: Budgets) -> tuple[int, int]:
    """Blocks that each model may come to have: under a policy that lends, all but one request."""
    if position.policy in (None, "StaticSplit"):
        return _own_blocks(kept, position, held)
    needs = kept.feasible(position.bytes, position.block_size)
    floors = [need.blocks * need.block_bytes for need in (needs.llm, needs.prm)]
    most = Budgets(sum(held) - floors[1], sum(held) - floors[0])
    return _own_blocks(kept, position, most)


def exact(
    kept: Kept, position: Position, answers: Answers, on_round: OnRound | None = None
) -> Answer:
    """By replaying the recorded search. on_round: may raise to stop. Errors as what_if raises."""
    start = time.perf_counter()
    found = position.question.answer(answers, on_round)
    _, held = _memory(kept, position)
    sizes = _own_blocks(kept, position, held)
    parts = [
        _replayed(found, name, size, position.block_size, kept.num_problems)
        for name, size in zip(("llm", "prm"), sizes, strict=True)
    ]
    steps = found.trace.steps
    return Answer(
        kind=EXACT,
        position=position,
        kv_share=held.share,
        tokens_per_s=found.throughput.tokens_per_s,
        seconds=found.throughput.wall_s / kept.num_problems,
        llm=parts[0],
        prm=parts[1],
        blocks=_thinned(steps[["start_s", "engine", *BLOCK_COLUMNS, "blocks_total"]]),
        took_s=time.perf_counter() - start,
    )


def _replayed(
    found: WhatIfResult, name: str, num_blocks: int, block_size: int, problems: int
) -> ModelAnswer:
    steps, requests = (t[t["engine"] == name] for t in (found.trace.steps, found.trace.requests))
    admitted = requests[requests["scheduled_s"].notna()]
    look_ups = len(admitted) + int(admitted["preemptions"].sum())
    return ModelAnswer(
        num_blocks=num_blocks,
        kv_tokens=num_blocks * block_size,
        seconds=float(steps["duration_s"].sum()) / problems,
        hit_rate=float(steps["hit_tokens"].sum() / max(int(steps["query_tokens"].sum()), 1)),
        thrash=1000 * int(steps["thrash_events"].sum()) / max(look_ups, 1),
        fits=None,
    )


def _thinned(blocks: pd.DataFrame | None) -> pd.DataFrame:
    """Few enough rows of each model to be drawn while a slider moves; extremes stay."""
    if blocks is None:
        return pd.DataFrame(columns=["start_s", "engine", *BLOCK_COLUMNS, "blocks_total"])
    parts = [
        decimated(blocks[blocks["engine"] == name], BLOCK_COLUMNS, DRAWN_STEPS)
        for name in ("llm", "prm")
    ]
    return pd.concat(parts, ignore_index=True)


def share_curve(
    kept: Kept, position: Position, basis: Basis, shares: Iterable[float] | None = None
) -> pd.DataFrame:
    """Estimates over the shares that fit (or those given): rows of Answer.row, ascending."""
    offered = kept.shares(position.bytes, position.block_size) if shares is None else list(shares)
    found = [estimate(kept, moved(position, s), basis, blocks=False).row() for s in offered]
    return pd.DataFrame(found)


def moved(position: Position, llm_share: float) -> Position:
    """The same position at another share."""
    return Position(**{**position.to_dict(), "llm_share": float(llm_share)})


def spread_shares(shares: list[float], count: int) -> list[float]:
    """So many of the shares, evenly, the ends included."""
    places = np.linspace(0, len(shares) - 1, min(count, len(shares)))
    return [shares[i] for i in sorted({round(place) for place in places.tolist()})]
