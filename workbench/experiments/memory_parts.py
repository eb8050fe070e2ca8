"""What of each model's memory moves with the split (thesis, section 6.1), and what does not.

Two sources: engines really built at the study's shares, whose profiling pass measured every part;
and the thesis's pair at its own size, computed from ModelSpec without a weight. Whoever needs the
first imports torch through memory_build.py. What it does not do: draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import pandas as pd

from workbench.config import SweepConfig, format_size
from workbench.experiments.face import CARRIES_OVER, rung
from workbench.experiments.feasible import DTYPE_BYTES, FeasibleShares, Need, feasible_shares
from workbench.experiments.plan import RunSpec
from workbench.experiments.pressure import thesis_pair
from workbench.experiments.record import provenance
from workbench.models.registry import model_spec

MODELS = ("llm", "prm")
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
        config = self.config
        return feasible_shares(
            config.llm,
            config.prm,
            config.total_memory,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            dtype=config.dtype,
            activations=self.limits if config.activations_in_total else (0, 0),
        )


@dataclass(frozen=True, slots=True)
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

    def __repr__(self) -> str:
        return f"MemoryStudy({self.config.profile}: engines built at {len(self.runs)} shares)"


def study_memory(config: SweepConfig, beyond: Sequence[float] = ()) -> MemoryStudy:
    """Build both engines at every feasible share of `config`; compute the thesis's pair.

    Raises what building an engine raises, and ConfigError where no share is feasible.
    """
    build = import_module("workbench.experiments.memory_build")
    built, longest = build.build_at_shares(config), build.longest_activations(config)
    limits = (
        int(built["llm_activations_bytes"].iloc[0]),
        int(built["prm_activations_bytes"].iloc[0]),
    )
    facts = {name: getattr(config, name) for name in ("profile", "llm", "prm")}
    facts |= {"total_memory": RunSpec(config, 0.5, 0).total_bytes}
    runs = built.assign(**facts, **provenance())
    measured = Pair(MEASURED, config, longest, limits)
    return MemoryStudy(config, runs, measured, computed_pair(), tuple(beyond))


def computed_pair() -> Pair:
    """The thesis's pair at 40 GiB; activations are the buffers of one step, by formula."""
    config = thesis_pair()
    size = DTYPE_BYTES[config.dtype]
    specs = [model_spec(name) for name in (config.llm, config.prm)]
    longest = config.max_model_len
    assert longest is not None
    steps = ((longest, 1), (config.max_num_batched_tokens, config.max_num_seqs))
    found = [tuple(spec.step_bytes(*step, size) for spec in specs) for step in steps]
    return Pair(COMPUTED, config, *found)  # type: ignore[arg-type]


# -- rows of the figures --


def memory_part_rows(study: MemoryStudy) -> pd.DataFrame:
    """Rows of plots.memory_parts: bytes of every part of both models' memory over the share.

    Columns: how, model, name, llm_share, budget_bytes and lacks_bytes (of that model), part, bytes,
    fits (both models), in_total (whether the total pays for activations), llm_kv_tokens and
    prm_kv_tokens.
    """
    shares = sorted({*study.config.shares, *study.beyond})
    rows = [*_measured_rows(study), *_refused_rows(study.measured, shares)]
    rows += [row for share in shares for row in _formula_rows(study.computed, share)]
    table = pd.DataFrame(rows)
    tokens = table[table["part"] == "kv"].pivot_table(
        index=["how", "llm_share"], columns="model", values="bytes"
    )
    for model in MODELS:
        per_token = table["how"].map(lambda how, m=model: _token_bytes(study, how, m))
        room = tokens[model].reindex(pd.MultiIndex.from_frame(table[["how", "llm_share"]]))
        table[f"{model}_kv_tokens"] = room.to_numpy() // per_token
    return table.sort_values(["how", "model", "llm_share"], ascending=[False, True, True])


def block_count_rows(study: MemoryStudy) -> pd.DataFrame:
    """Rows of plots.kv_blocks: blocks of both models over the share.

    Columns: how, model, name, llm_share, kind, blocks, lacks_bytes, low_end and high_end (of the
    feasible shares), block_size, formula_blocks. kind: formula (a line over the whole axis), built
    (an engine's own count) or lacking (a share that does not fit).
    """
    pairs, shares = (study.measured, study.computed), sorted({*study.config.shares, *study.beyond})
    lines = [row for pair in pairs for share in GRID for row in _at(pair, share)]
    built = [
        _block_row(study.measured, model, run["llm_share"], "built", run[f"{model}_blocks"])
        for run in study.runs.to_dict("records")
        for model in MODELS
    ]
    every = [row for pair in pairs for share in shares for row in _at(pair, share)]
    lacking = [row | {"kind": "lacking"} for row in every if row["lacks_bytes"]]
    return pd.DataFrame([*lines, *built, *lacking])


def _measured_rows(study: MemoryStudy) -> Iterable[dict[str, object]]:
    for run in study.runs.to_dict("records"):
        for place, model in enumerate(MODELS):
            parts = {name: run[f"{model}_{name}_bytes"] for name in ("weights", "other", "kv")}
            parts["activations_longest"] = study.measured.longest[place]
            parts["activations_limits"] = run[f"{model}_activations_bytes"]
            yield from _part_rows(study.measured, model, run["llm_share"], parts, 0, True)


def _refused_rows(pair: Pair, shares: Sequence[float]) -> Iterable[dict[str, object]]:
    """The shares no engine can be built at: what is asked for, and what lacks."""
    for share in shares:
        if not pair.shares.at(share).fits:
            yield from _formula_rows(pair, share)


def _formula_rows(pair: Pair, share: float) -> Iterable[dict[str, object]]:
    at = pair.shares.at(share)
    sides = ((at.llm, at.llm_bytes, at.llm_lacks), (at.prm, at.prm_bytes, at.prm_lacks))
    for place, (model, (need, budget, lacks)) in enumerate(zip(MODELS, sides, strict=True)):
        parts = {"weights": need.weights, "other": 0, "kv": max(0, budget - need.fixed)}
        parts["activations_longest"] = pair.longest[place]
        parts["activations_limits"] = pair.limits[place]
        yield from _part_rows(pair, model, share, parts, lacks, at.fits)


def _part_rows(
    pair: Pair, model: str, share: float, parts: dict[str, int], lacks: int, fits: bool
) -> Iterable[dict[str, object]]:
    shared = {"how": pair.how, "model": model, "name": getattr(pair.config, model)}
    shared |= {"llm_share": share, "lacks_bytes": lacks, "fits": fits}
    at = pair.shares.at(share)
    shared["budget_bytes"] = at.llm_bytes if model == "llm" else at.prm_bytes
    in_total = pair.config.activations_in_total
    return ({**shared, "part": p, "bytes": parts[p], "in_total": in_total} for p in PARTS)


def _token_bytes(study: MemoryStudy, how: str, model: str) -> int:
    pair = study.measured if how == MEASURED else study.computed
    need: Need = getattr(pair.shares, model)
    return need.block_bytes // pair.config.block_size


def _at(pair: Pair, share: float) -> Iterable[dict[str, object]]:
    at = pair.shares.at(share)
    sides = ((at.llm, at.llm_bytes), (at.prm, at.prm_bytes))
    for model, (need, budget) in zip(MODELS, sides, strict=True):
        row = _block_row(pair, model, share, "formula", need.num_blocks(budget))
        yield row | {"lacks_bytes": need.lacks(budget)}


def _block_row(pair: Pair, model: str, share: float, kind: str, blocks: int) -> dict[str, object]:
    name = getattr(pair.config, model)
    where = {"how": pair.how, "model": model, "name": name, "llm_share": share}
    ends = pair.shares
    limits = {"low_end": ends.low, "high_end": ends.high, "lacks_bytes": 0}
    limits["block_size"] = pair.config.block_size
    at = ends.at(share)
    needs = {"llm": (at.llm, at.llm_bytes), "prm": (at.prm, at.prm_bytes)}
    need, budget = needs[model]
    limits["formula_blocks"] = need.num_blocks(budget)
    return {**where, "kind": kind, "blocks": int(blocks), **limits}


# -- what the figures say of themselves, and in words --


def memory_face(study: MemoryStudy) -> str:
    """What stands on both figures: what was built where, and what was computed."""
    first, far = study.runs.iloc[0], study.computed.config
    outside = "" if study.config.activations_in_total else ", activations outside it"
    size = "" if far.activations_in_total else ", activations outside it"
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
