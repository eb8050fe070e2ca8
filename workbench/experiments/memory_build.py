"""Engines built over the split for what they say of their memory; nothing is generated.

The module of this study that loads models. What it does not do: choose shares.
"""

from __future__ import annotations

import gc
import math
from dataclasses import replace

import pandas as pd

from workbench.config import EngineConfig, SweepConfig
from workbench.engine.engine import Engine
from workbench.errors import ConfigError, OutOfMemory
from workbench.experiments.feasible import feasibility
from workbench.experiments.plan import RunSpec
from workbench.experiments.run import ENGINES, build_engine, memory_parts
from workbench.models.registry import model_spec


def build_at_shares(config: SweepConfig) -> pd.DataFrame:
    """One row a feasible share: llm_share, and of both engines every part of their memory.

    Raises ConfigError where no share is feasible.
    """
    specs = [RunSpec(config, share, config.seeds[0]) for share in sorted(config.shares)]
    rows, reasons = [], []
    for spec in specs:
        possible = feasibility(spec)
        try:
            if possible.fits:
                rows.append(_row(spec))
            else:
                reasons.append(str(possible))
        except OutOfMemory as problem:  # activations in the total are known to the engine alone
            reasons.append(str(problem))
    if not rows:
        why = "; ".join(reasons)
        raise ConfigError(f"No engine can be built: {why}. Give other shares or more memory.")
    return pd.DataFrame(rows)


def longest_activations(config: SweepConfig) -> tuple[int, int]:
    """Activations of (LLM, PRM) as a dry pass over one request of the greatest length finds."""
    spec = RunSpec(config, 0.5, config.seeds[0])
    llm, prm = (_over_longest(spec.engine(role)) for role in ENGINES)
    return llm, prm


def _over_longest(usual: EngineConfig) -> int:
    longest = usual.max_model_len or model_spec(usual.model).max_model_len
    one = replace(
        usual,
        memory=None,
        num_blocks=math.ceil(longest / usual.block_size),
        max_num_seqs=1,
        max_num_batched_tokens=longest,
    )
    return _build(one).memory.activations


def _row(spec: RunSpec) -> dict[str, object]:
    row: dict[str, object] = {"llm_share": spec.llm_share}
    budgets = {"llm": spec.llm_bytes, "prm": spec.prm_bytes}
    for role in ENGINES:
        row[f"{role}_bytes"] = budgets[role]
        parts = memory_parts(_build(spec.engine(role)))
        row |= {f"{role}_{name}": value for name, value in parts.items()}
    return row


def _build(config: EngineConfig) -> Engine:
    gc.collect()  # engines hold cycles; the last one must not stay beside this one
    return build_engine(config)
