"""What of each model's memory moves with the split (thesis, section 6.1), and what does not.

Two sources: engines really built at the study's shares, whose profiling pass measured every part;
and the thesis's pair at its own size, computed from ModelSpec without a weight.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from workbench.config import EngineConfig, SweepConfig, format_size, parse_size
from workbench.engine.engine import Engine
from workbench.errors import ConfigError, OutOfMemory
from workbench.experiments.execute import memory_parts
from workbench.experiments.memory import (
    DTYPE_BYTES,
    ENGINES,
    FeasibleShares,
    feasibility,
    shares_of,
)
from workbench.experiments.plans import sweep_config
from workbench.experiments.runs import machine_columns
from workbench.experiments.settings import RunSpec
from workbench.experiments.study import provenance_here
from workbench.models.registry import model_spec

Row = dict[str, Any]
MEASURED, COMPUTED = "measured", "computed"
PARTS = ("weights", "activations_longest", "activations_limits", "other", "kv")
BUILT = {name: name for name in ("weights", "other", "kv")} | {"activations_limits": "activations"}
"""Parts that the row of an engine that was built has, and what they are called there."""
GRID = tuple(np.round(np.arange(0.005, 0.7, 0.005), 3))  # shares of the formula's line of blocks


@dataclass(frozen=True, slots=True)
class PairMemory:
    """Two models in one memory. how: COMPUTED, MEASURED, or whose else that was built; bytes of
    activations of (LLM, PRM).

    longest and limits: those of one step over the longest request, and over the batch limits.
    """

    how: str
    config: SweepConfig
    longest: tuple[int, ...]
    limits: tuple[int, ...]

    @property
    def shares(self) -> FeasibleShares:
        """The ends of the axis; activations count where the total pays for them."""
        return shares_of(self.config, self.limits)


@dataclass(frozen=True)
class MemoryStudy:
    """Engines built over the axis, and (not of every pair) the thesis's computed beside them.

    runs: one row a share that was built, with every part of both engines' memory, as in the runs of
    a sweep. beyond: shares outside the feasible ones that are shown with what they lack.
    """

    runs: pd.DataFrame
    measured: PairMemory
    computed: PairMemory | None
    beyond: tuple[float, ...]
    plan: None = None

    @property
    def config(self) -> SweepConfig:
        """The settings that engines were built with."""
        return self.measured.config

    @property
    def pairs(self) -> tuple[PairMemory, ...]:
        """The measured and the computed one."""
        return tuple(filter(None, (self.measured, self.computed)))

    @property
    def shares(self) -> list[float]:
        """All that are shown."""
        return sorted({*self.config.shares, *self.beyond})

    def __repr__(self) -> str:
        return f"MemoryStudy({self.config.profile}: engines built at {len(self.runs)} shares)"


def study_memory(
    config: SweepConfig, beyond: Sequence[float] = (), how: str = MEASURED
) -> MemoryStudy:
    """Build both engines at every feasible share of `config`; compute the thesis's pair, unless the
    pair that is built stands beside another study's: how names it.

    Raises what building an engine raises, and ConfigError where no share is feasible.
    """
    rows, reasons = list[Row](), list[str]()
    for share in sorted(config.shares):
        spec = RunSpec(config, share, config.seeds[0])
        row: Row = {"llm_share": share}
        try:
            if not (possible := feasibility(spec)).fits:
                raise OutOfMemory(str(possible))
            for model in ENGINES:
                parts = _built(spec.engine(model))
                row |= {f"{model}_{name}": value for name, value in parts.items()}
            rows.append(row)
        except OutOfMemory as problem:  # what kernels take is known to the engine alone
            reasons.append(str(problem))
    if not rows:
        why = "; ".join(reasons)
        raise ConfigError(f"No engine can be built: {why}. Give other shares or more memory.")
    runs = pd.DataFrame(rows).assign(**machine_columns(config.device))
    longest = []
    for usual in map(spec.engine, ENGINES):  # a dry pass over one request of the greatest length
        length = usual.max_model_len or model_spec(usual.model).max_model_len
        one = replace(usual, memory=None, num_blocks=-(-length // usual.block_size))
        one = replace(one, max_num_seqs=1, max_num_batched_tokens=length)
        longest.append(int(_built(one)["activations_bytes"]))
    limits = tuple(rows[0][f"{model}_activations_bytes"] for model in ENGINES)
    measured = PairMemory(how, config, tuple(longest), limits)
    beside = computed_pair() if how == MEASURED else None
    return MemoryStudy(runs, measured, beside, tuple(beyond))


def _built(config: EngineConfig) -> dict[str, Any]:
    """The memory parts of an engine that is built for them alone."""
    gc.collect()  # engines hold cycles; the last one must not stay beside this one
    return memory_parts(Engine(**config.to_dict()))


def computed_pair() -> PairMemory:
    """The thesis's pair at 40 GiB; activations are the buffers of one step, by formula."""
    config = sweep_config("thesis")
    config = replace(config, llm=f"dummy:{config.llm}", prm=f"dummy:{config.prm}")
    size, longest = DTYPE_BYTES[config.dtype], config.max_model_len
    assert longest is not None
    specs = [model_spec(name) for name in (config.llm, config.prm)]
    steps = ((longest, 1), (config.max_num_batched_tokens, config.max_num_seqs))
    first, second = (tuple(spec.step_bytes(*step, size) for spec in specs) for step in steps)
    return PairMemory(COMPUTED, config, first, second)


def _by_formula(pair: PairMemory, share: float) -> list[Row]:
    """Both models at a share, as the formula has it."""
    ends, at, size = pair.shares, pair.shares.at(share), pair.config.block_size
    rows = []
    for model, longest, limits in zip(ENGINES, pair.longest, pair.limits):
        need, budget = at.of(model)
        row: Row = {"how": pair.how, "model": model, "name": need.model, "llm_share": share}
        row |= {"budget_bytes": budget, "lacks_bytes": at.lacks(model), "fits": at.fits}
        row |= {"low_end": ends.low, "high_end": ends.high, "block_size": size}
        row |= {"weights": need.weights, "other": 0, "kv": max(0, budget - need.fixed)}
        row |= {"activations_longest": longest, "activations_limits": limits}
        rows.append(row | {"blocks": at.blocks(model), "token": need.block_bytes // size})
    return rows


def memory_part_rows(study: MemoryStudy) -> pd.DataFrame:
    """Rows of plots.memory_parts; fits: both models; what was not built is by the formula."""
    built = study.runs.set_index("llm_share").to_dict("index")
    rows = []
    for pair, share in product(study.pairs, study.shares):
        run: Any = None if pair is study.computed else built.get(share)
        both = _by_formula(pair, share)
        if both[0]["fits"] and pair is study.measured and run is None:
            continue  # it fits by the formula alone
        for row in both if run is not None else ():
            row |= {part: run[f"{row['model']}_{name}_bytes"] for part, name in BUILT.items()}
        sizes = ((row, row["block_size"]) for row in both)  # what is cached is whole blocks
        tokens = {f"{r['model']}_kv_tokens": r["kv"] // r["token"] // b * b for r, b in sizes}
        rows += [row | tokens | {"part": p, "bytes": row[p]} for row in both for p in PARTS]
    own = ["token", "blocks", "block_size", "low_end", "high_end"]
    table = pd.DataFrame(rows).drop(columns=[*PARTS, *own])
    return table.sort_values(["how", "model", "llm_share"], ascending=[False, True, True])


def block_count_rows(study: MemoryStudy) -> pd.DataFrame:
    """Rows of plots.kv_blocks. kind: formula (a line over the whole axis), built (an engine's own
    count, beside formula_blocks) or lacking (a share that does not fit).
    """
    rows = [
        row | {"kind": kind, "formula_blocks": row["blocks"]}
        for kind, wanted in (("formula", GRID), ("lacking", study.shares))
        for pair, share in product(study.pairs, wanted)
        for row in _by_formula(pair, share)
        if kind == "formula" or row["lacks_bytes"]
    ]
    for run in study.runs.to_dict("records"):
        for row in _by_formula(study.measured, run["llm_share"]):
            counts = {"blocks": int(run[f"{row['model']}_blocks"]), "lacks_bytes": 0}
            rows.append(row | {"kind": "built", "formula_blocks": row["blocks"]} | counts)
    own = ["budget_bytes", "fits", "token"]
    return pd.DataFrame(rows).drop(columns=[*PARTS, *own])


def memory_provenance(study: MemoryStudy, *others: MemoryStudy) -> str:
    """What stands on both figures: what was built where, and what was computed."""
    here, far = study.config, computed_pair().config
    sizes = [format_size(parse_size(each.total_memory)) for each in (here, far)]
    outside = "" if here.activations_in_total else ", activations outside it"
    what = f"total memory {sizes[0]}{outside}; both engines built at {len(study.runs)} shares"
    for other in others:
        size = format_size(parse_size(other.config.total_memory))
        what += f"; {other.config.llm} in both roles, {size}, at {len(other.runs)} shares"
    names = ", ".join(name.removeprefix("dummy:") for name in (far.llm, far.prm))
    requests = f"requests of up to {far.max_model_len:,} tokens"
    computed = f"Computed: {names}, {far.dtype}, {sizes[1]}, {requests}."
    return provenance_here(here.llm, here.prm, what, computed, device=here.device)
