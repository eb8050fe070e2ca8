"""What of each model's memory moves with the split (thesis, section 6.1), and what does not.

Two sources: engines really built at the study's shares, whose profiling pass measured every part;
and the thesis's pair at its own size, computed from ModelSpec without a weight.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from workbench.config import EngineConfig, SweepConfig, format_size
from workbench.engine.engine import Engine
from workbench.errors import ConfigError, OutOfMemory
from workbench.experiments.execute import build_engine, memory_parts
from workbench.experiments.memory import DTYPE_BYTES, MODELS, FeasibleShares, feasibility, shares_of
from workbench.experiments.runs import machine_columns
from workbench.experiments.settings import RunSpec, thesis_pair
from workbench.experiments.study import CARRIES_OVER, rung
from workbench.models.registry import model_spec

MEASURED, COMPUTED = "measured", "computed"
PARTS = ("weights", "activations_longest", "activations_limits", "other", "kv")
GRID = tuple(np.round(np.arange(0.005, 0.7, 0.005), 3))
"""Shares at which the formula's line of blocks is drawn."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models in one memory. how: measured or computed; activations: bytes of (LLM, PRM).

    longest and limits: those of one step over the longest request, and over the batch limits.
    """

    how: str
    config: SweepConfig
    longest: tuple[int, int]
    limits: tuple[int, int]

    @property
    def shares(self) -> FeasibleShares:
        """The ends of the axis; activations count where the total pays for them."""
        in_total = self.config.activations_in_total
        return shares_of(self.config, self.limits if in_total else (0, 0))


@dataclass(frozen=True)
class MemoryStudy:
    """Engines built over the axis, and the thesis's pair beside them.

    runs: one row a share that was built, with every part of both engines' memory, as in the runs of
    a sweep. beyond: shares outside the feasible ones that are shown with what they lack.
    """

    config: SweepConfig
    runs: pd.DataFrame
    measured: Pair
    computed: Pair
    beyond: tuple[float, ...]
    plan: None = None

    @property
    def pairs(self) -> tuple[Pair, Pair]:
        """The measured and the computed one."""
        return self.measured, self.computed

    def __repr__(self) -> str:
        return f"MemoryStudy({self.config.profile}: engines built at {len(self.runs)} shares)"


def study_memory(config: SweepConfig, beyond: Sequence[float] = ()) -> MemoryStudy:
    """Build both engines at every feasible share of `config`; compute the thesis's pair.

    Raises what building an engine raises, and ConfigError where no share is feasible.
    """
    rows, reasons = [], []
    for share in sorted(config.shares):
        spec = RunSpec(config, share, config.seeds[0])
        possible = feasibility(spec)
        if not possible.fits:
            reasons.append(str(possible))
            continue
        row: dict[str, Any] = {"llm_share": share}
        row |= {"llm_bytes": spec.llm_bytes, "prm_bytes": spec.prm_bytes}
        try:
            for model in MODELS:
                parts = memory_parts(_build(spec.engine(model)))
                row |= {f"{model}_{name}": value for name, value in parts.items()}
        except OutOfMemory as problem:  # activations in the total are known to the engine alone
            reasons.append(str(problem))
        else:
            rows.append(row)
    if not rows:
        why = "; ".join(reasons)
        raise ConfigError(f"No engine can be built: {why}. Give other shares or more memory.")
    facts = {name: getattr(config, name) for name in ("profile", "llm", "prm")}
    runs = pd.DataFrame(rows).assign(**facts, total_memory=spec.total_bytes, **machine_columns())
    llm, prm = (_over_longest(spec.engine(model)) for model in MODELS)
    limits = rows[0]["llm_activations_bytes"], rows[0]["prm_activations_bytes"]
    measured = Pair(MEASURED, config, (llm, prm), limits)
    return MemoryStudy(config, runs, measured, computed_pair(), tuple(beyond))


def _over_longest(usual: EngineConfig) -> int:
    """Activations as a dry pass over one request of the greatest length finds them."""
    longest = usual.max_model_len or model_spec(usual.model).max_model_len
    blocks = math.ceil(longest / usual.block_size)
    one = replace(usual, memory=None, num_blocks=blocks, max_num_seqs=1)
    return int(_build(replace(one, max_num_batched_tokens=longest)).memory.activations)


def _build(config: EngineConfig) -> Engine:
    gc.collect()  # engines hold cycles; the last one must not stay beside this one
    return build_engine(config)


def computed_pair() -> Pair:
    """The thesis's pair at 40 GiB; activations are the buffers of one step, by formula."""
    config = thesis_pair()
    size, longest = DTYPE_BYTES[config.dtype], config.max_model_len
    assert longest is not None
    specs = [model_spec(name) for name in (config.llm, config.prm)]
    steps = ((longest, 1), (config.max_num_batched_tokens, config.max_num_seqs))
    first, second = ([spec.step_bytes(*step, size) for spec in specs] for step in steps)
    return Pair(COMPUTED, config, (first[0], first[1]), (second[0], second[1]))


def memory_part_rows(study: MemoryStudy) -> pd.DataFrame:
    """Rows of plots.memory_parts: bytes of every part of both models' memory over the share.

    Columns: how, model, name, llm_share, budget_bytes and lacks_bytes (of that model), part, bytes,
    fits (both models), in_total (whether the total pays for activations), llm_kv_tokens and
    prm_kv_tokens. Shares that were not built, and those of the computed pair, are by the formula.
    """
    built = {run["llm_share"]: run for run in study.runs.to_dict("records")}
    rows = []
    for pair, share in product(study.pairs, sorted({*study.config.shares, *study.beyond})):
        at = pair.shares.at(share)
        run = built.get(share) if pair.how == MEASURED else None
        if at.fits and pair.how == MEASURED and run is None:
            continue  # it fits by the formula alone
        both, tokens = [], {}
        for place, model in enumerate(MODELS):
            need, budget = at.of(model)
            parts = {"weights": need.weights, "other": 0, "kv": max(0, budget - need.fixed)}
            parts |= {"activations_limits": pair.limits[place]}
            if run is not None:
                limits = {"activations_limits": run[f"{model}_activations_bytes"]}
                parts = {name: run.get(f"{model}_{name}_bytes") for name in parts} | limits
            parts["activations_longest"] = pair.longest[place]
            row = {"how": pair.how, "model": model, "name": getattr(pair.config, model)}
            row |= {"llm_share": share, "budget_bytes": budget, "fits": at.fits}
            row |= {"lacks_bytes": at.lacks(model), "in_total": pair.config.activations_in_total}
            both += [row | {"part": part, "bytes": parts[part]} for part in PARTS]
            a_token = need.block_bytes // pair.config.block_size
            tokens[f"{model}_kv_tokens"] = parts["kv"] // a_token
        rows += [row | tokens for row in both]
    table = pd.DataFrame(rows)
    return table.sort_values(["how", "model", "llm_share"], ascending=[False, True, True])


def block_count_rows(study: MemoryStudy) -> pd.DataFrame:
    """Rows of plots.kv_blocks: blocks of both models over the share.

    Columns: how, model, name, llm_share, kind, blocks, lacks_bytes, low_end and high_end (of the
    feasible shares), block_size, formula_blocks. kind: formula (a line over the whole axis), built
    (an engine's own count) or lacking (a share that does not fit).
    """
    shares = sorted({*study.config.shares, *study.beyond})
    rows = [
        row | {"kind": kind}
        for kind, wanted in (("formula", GRID), ("lacking", shares))
        for pair, share in product(study.pairs, wanted)
        for row in _blocks(pair, share)
        if kind == "formula" or row["lacks_bytes"]
    ]
    for run in study.runs.to_dict("records"):
        for row in _blocks(study.measured, run["llm_share"]):
            blocks = int(run[f"{row['model']}_blocks"])
            rows.append(row | {"kind": "built", "blocks": blocks, "lacks_bytes": 0})
    return pd.DataFrame(rows)


def _blocks(pair: Pair, share: float) -> Iterator[dict[str, Any]]:
    ends, config = pair.shares, pair.config
    at = ends.at(share)
    for model in MODELS:
        row = {"how": pair.how, "model": model, "name": getattr(config, model), "llm_share": share}
        row |= {"blocks": at.blocks(model), "lacks_bytes": at.lacks(model)}
        row |= {"low_end": ends.low, "high_end": ends.high, "block_size": config.block_size}
        yield row | {"formula_blocks": at.blocks(model)}


def memory_provenance(study: MemoryStudy) -> str:
    """What stands on both figures: what was built where, and what was computed."""
    first, far = study.runs.iloc[0], study.computed.config
    outside, size = (
        "" if config.activations_in_total else ", activations outside it"
        for config in (study.config, far)
    )
    return "\n".join(
        (
            f"LLM {first['llm']}, PRM {first['prm']} ({rung(study.runs)}); total memory "
            f"{format_size(int(first['total_memory']))}{outside}; both engines built at "
            f"{len(study.runs)} shares; {first['machine']}.",
            f"Computed: {far.llm.removeprefix('dummy:')}, {far.prm.removeprefix('dummy:')}, "
            f"{far.dtype}, {format_size(RunSpec(far, 0.5, 0).total_bytes)}{size}, requests of up "
            f"to {far.max_model_len:,} tokens.",
            CARRIES_OVER,
        )
    )
