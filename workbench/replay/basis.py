"""One replay with room for everything, kept as arrays: what estimates are made of.

Each step's work and blocks, and both models' miss-ratio curves over the sizes that hold the order.
Neither device nor memory is in it, so one basis serves every place of those sliders. What it does
not do: estimate (estimate.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.replay.answers import Answers
from workbench.replay.cost import DEFAULT_BLOCK_SIZE, MeteredCost
from workbench.replay.miss_ratio import CacheCalls, logged_calls, miss_ratio
from workbench.replay.simulator import Changes, Costs, ReplayEngine, replay
from workbench.search.rounds import OnRound

CURVE_POINTS = 24
MODELS = ("llm", "prm")
PRIVATE = 4096  # blocks more than there are contents
Floats = NDArray[np.float64]


class StepCounts(NamedTuple):
    """work.StepWork of many steps, one array entry each."""

    tokens: Floats
    sequences: Floats
    keys: Floats
    logits: Floats
    sampled: Floats
    context: Floats


class ModelBasis(NamedTuple):
    """One model's steps, one array entry each, where nothing was ever evicted.

    prefill: the work's tokens that are no decoding. active, cached: blocks.
    order: places of its steps among those of both. curve: columns of miss_ratio, as arrays over
    ascending sizes, all of which hold the order.
    """

    work: StepCounts
    prefill: Floats
    active: Floats
    cached: Floats
    order: NDArray[np.int64]
    curve: Mapping[str, Floats]
    look_ups: int

    @property
    def peak(self) -> int:
        """Most blocks in use at once: a smaller cache changes the order of the steps."""
        return int(self.curve["num_blocks"][0])

    @property
    def most_hits(self) -> int:
        """Tokens found cached where nothing is ever evicted."""
        return int(self.curve["hit_tokens"][-1])

    def column(self, name: str, num_blocks: int) -> float:
        """A column of the curve at a size, between its points; below the peak, the peak's."""
        return float(np.interp(num_blocks, self.curve["num_blocks"], self.curve[name]))


class Basis(NamedTuple):
    """Both models. tokens: generated; problems, requests: of the search; block_size: of both."""

    llm: ModelBasis
    prm: ModelBasis
    tokens: int
    problems: int
    requests: int
    block_size: int

    @property
    def models(self) -> tuple[ModelBasis, ModelBasis]:
        """LLM, PRM."""
        return self.llm, self.prm


def make_basis(
    answers: Answers,
    llm: Changes | None = None,
    prm: Changes | None = None,
    on_round: OnRound | None = None,
) -> Basis:
    """Of a recording with these limits; num_blocks gives way to room for everything.

    Replays the search once and sweeps both models' curves. on_round: as replay.
    """
    meters = MeteredCost(), MeteredCost()
    given = {"llm": dict(llm or {}), "prm": dict(prm or {})}
    for name, changes in given.items():
        changes["num_blocks"] = _room(answers, name, changes.get("block_size", DEFAULT_BLOCK_SIZE))
    costs = Costs(*meters)
    done = replay(
        answers, costs, llm=given["llm"], prm=given["prm"], on_round=on_round, log_calls=True
    )
    engines = (done.llm, done.prm)
    models = [_model(done.trace.steps, *one) for one in zip(MODELS, meters, engines, strict=True)]
    return Basis(
        llm=models[0],
        prm=models[1],
        tokens=int(done.trace.nodes["step_tokens"].sum()),
        problems=len(answers.recording.problems),
        requests=len(done.trace.requests),
        block_size=done.llm.settings.block_size,
    )


def _room(answers: Answers, model: str, block_size: int) -> int:
    """Blocks for every token of the recording, each entry's last block its own."""
    problems = answers.recording.problems
    tokens = [len(problem.prompt) for problem in problems]
    for problem in problems:
        entries = problem.steps if model == "llm" else problem.solutions
        tokens += [len(entry.tokens) for entry in entries]
    return sum(tokens) // block_size + len(tokens) + PRIVATE


def _model(steps: pd.DataFrame, name: str, meter: MeteredCost, engine: ReplayEngine) -> ModelBasis:
    mine = (steps["engine"] == name).to_numpy()
    counts = np.array(meter.works, np.float64).reshape(-1, len(StepCounts._fields))
    columns = ("prefill_tokens", "blocks_active", "blocks_cached")
    prefill, active, cached = (steps.loc[mine, c].to_numpy(np.float64) for c in columns)
    calls = logged_calls(engine.cache)
    return ModelBasis(
        work=StepCounts(*counts.T),
        prefill=prefill,
        active=active,
        cached=cached,
        order=np.flatnonzero(mine),
        curve=_curve(calls),
        look_ups=calls.look_ups,
    )


def _curve(calls: CacheCalls) -> dict[str, Floats]:
    """Sizes from the order's peak to where nothing is evicted, denser at the lower end."""
    roomy = calls.num_contents + PRIVATE
    peak = int(miss_ratio(calls, [roomy])["peak_active"].iloc[0])
    sizes = np.geomspace(peak, peak + calls.num_contents, CURVE_POINTS).round().astype(int)
    table = miss_ratio(calls, sorted({*sizes.tolist(), roomy}))
    return {str(name): table[name].to_numpy(np.float64) for name in table.columns}
