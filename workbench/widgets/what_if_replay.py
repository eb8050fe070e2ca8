"""Exact replays of a recorded search for the what-if widget, and what lies between two of them.

A `Position` names everything that a replay depends on, so equal ones have equal replays. n, beam
width and models are a recording's. `replay_elsewhere` replays in a process of its own, which loads
no torch, so that the notebook's stays free.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.config import parse_size
from workbench.errors import ConfigError, OutOfMemory, WorkbenchError
from workbench.experiments.memory import FeasibleShares, Need
from workbench.experiments.provenance import project_root
from workbench.plots.caching import decimated
from workbench.replay.advise import DEPTH
from workbench.replay.answers import Answers
from workbench.replay.cost import spec_of
from workbench.replay.devices import PRESETS, load_device
from workbench.replay.simulator import POLICIES
from workbench.replay.what_if import what_if
from workbench.replay.workload import (
    DRAWN_STRATEGIES,
    DTYPE_BYTES,
    recording_names,
    recording_path,
    thesis_search,
)
from workbench.search.recording import Recording, read_header, read_recording
from workbench.search.strategies import BestOfN
from workbench.search.variants import strategy_with

THESIS, TINY = "thesis-48", "tiny-16-n16"  # offered first and second
DRAWN = {THESIS: "beam_search"} | {f"{THESIS}-{name}": name for name in DRAWN_STRATEGIES[1:]}
"""Searches of the thesis's pair that are drawn, not recorded, and their strategies."""
THESIS_DEPTH = 10  # steps of its beams, so that it is drawn and replayed in about a second
THESIS_SIZES: dict[str, Any] = {"n": 16, "beam_width": 4, "max_depth": THESIS_DEPTH}
THESIS_SIZES["max_tokens"] = BestOfN().max_tokens * THESIS_DEPTH // DEPTH  # of whole samples
USUAL = {"device": "a100-40", "total_memory": 40 << 30}  # of what is drawn
LIMITS = {"block_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
BLOCK_COLUMNS = ("blocks_active", "blocks_cached")
DRAWN_STEPS = 150  # stretches that a model's blocks are thinned to
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Position:
    """One place of every control. recording: a name of the package's, or a file.

    total_memory: bytes of weights and KV of both models, of what is drawn also of activations;
    llm_share: the LLM's part of it. device: a preset, or a file of `workbench calibrate`. policy:
    of an arena that both models share; None: a cache of its own for each. What is no valid setting
    is refused by the replay.
    """

    recording: str
    device: str
    total_memory: int
    llm_share: float
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str | None = None

    def at(self, llm_share: float) -> Position:
        """The same at another share."""
        return replace(self, llm_share=float(llm_share))

    @property
    def keeps_split(self) -> bool:
        """Whether the share means anything: not to a policy that sets the split by itself."""
        kind = POLICIES.get(self.policy or "")
        return kind is None or kind().keeps_split

    @property
    def parameters(self) -> dict[str, Any]:
        """The notebook's; a file's name is absolute, it has no other."""
        is_file = Path(self.recording).suffix == ".parquet"
        name = str(Path(self.recording).resolve()) if is_file else self.recording
        return asdict(self) | {"recording": name}


class RecordingInfo(NamedTuple):
    """One recording: where it is, and what it says of itself."""

    name: str
    path: Path
    header: Recording

    def __str__(self) -> str:
        kind, settings = self.header.settings.strategy, self.header.settings.strategy_settings
        width = f", beam width {settings['beam_width']}" if settings.get("beam_width") else ""
        models = f"LLM {self.header.llm.name}, PRM {self.header.prm.name}"
        drawn = f", drawn to {THESIS_DEPTH} steps" if self.name in DRAWN else ""
        problems = f"{len(self.header.problems)} problems{drawn}"
        return f"{models}, {kind}, n = {settings.get('n', 1)}{width}, {problems}"

    def position(self, **given: Any) -> Position:
        """A position on it: what is None or not given is as recorded or USUAL, the device an H100.

        ConfigError for a size that is none.
        """
        llm, prm = (
            (each.weight_bytes or 0) + (each.num_blocks or 0) * (each.block_bytes or 0)
            for each in (self.header.llm, self.header.prm)
        )
        total = -(-(llm + prm) // MIB) * MIB
        recorded: dict[str, Any] = {
            "device": "h100",
            "total_memory": total,
            "llm_share": min(max(round(llm / max(total, 1), 2), 0.01), 0.99),
            **{k: (self.header.llm.config or {}).get(k, usual) for k, usual in LIMITS.items()},
        }
        recorded |= USUAL if self.name in DRAWN else {}
        found = recorded | {name: value for name, value in given.items() if value is not None}
        return Position(self.name, **found | {"total_memory": parse_size(found["total_memory"])})

    def feasible(self, position: Position) -> FeasibleShares:
        """The shares at which both models hold one request of their max_model_len."""
        needs, total = [], position.total_memory
        for engine in (self.header.llm, self.header.prm):
            recorded = (engine.config or {}).get("block_size", LIMITS["block_size"])
            block = (engine.block_bytes or 1) * position.block_size // recorded
            blocks = -(-engine.max_model_len // position.block_size)
            limits = position.max_num_batched_tokens, position.max_num_seqs, DTYPE_BYTES
            buffers = spec_of(engine).step_bytes(*limits) if self.name in DRAWN else 0
            needs.append(Need(engine.name, engine.weight_bytes or 0, buffers, block, blocks))
        return FeasibleShares(total, needs[0], needs[1])

    def memories(self, position: Position) -> tuple[int, int]:
        """The least memory that holds both models, in whole MiB, and four times the recorded one,
        or what the device has; the position's lies between them.
        """
        needs, asked = self.feasible(position), position.total_memory
        least = math.ceil(1.02 * (needs.llm.least + needs.prm.least) / MIB) * MIB
        most = 4 * self.position().total_memory
        with suppress(ConfigError):  # no device: the replay refuses it
            most = min(most, load_device(position.device).memory_bytes)
        return min(least, asked), max(most, asked, least)

    def grid(self, position: Position, count: int) -> list[Position]:
        """So many of the feasible hundredths of a share, evenly, the ends included."""
        found = self.feasible(position)
        shares = [k / 100 for k in range(1, 100) if found.low <= k / 100 <= found.high]
        places = np.linspace(0, len(shares) - 1, min(count, len(shares)))
        return [position.at(shares[round(place)]) for place in places.tolist()]


@cache
def thesis(name: str = THESIS) -> Recording:
    """The thesis's pair: Llama-3.2-1B and an 8B PRM on 48 problems, n = 16. name: of DRAWN."""
    return thesis_search(48, strategy=DRAWN[name], **THESIS_SIZES)


def thesis_header(name: str) -> Recording:
    """What it says of itself: but for the strategy all of DRAWN are alike, so that one is drawn to
    offer them, and each when it is replayed. Its problems' tries are that one's; none reads them.
    """
    chosen, held = strategy_with(DRAWN[name], THESIS_SIZES), thesis()
    own = {"strategy": type(chosen).__name__, "strategy_settings": asdict(chosen)}  # type: ignore[call-overload]
    return replace(held, settings=replace(held.settings, **own))


def find_recordings(given: Sequence[str | PathLike[str]] | None = None) -> dict[str, RecordingInfo]:
    """Recordings by name: files and names given, or those of DRAWN and all of the package's."""
    names = dict.fromkeys(map(str, given or (THESIS, TINY, *DRAWN, *recording_names())))
    found = {}
    for name in names:
        path = Path(name)
        if name not in DRAWN and path.suffix != ".parquet":
            path = recording_path(name)
        header = thesis_header(name) if name in DRAWN else read_header(path)
        found[name] = RecordingInfo(name, path, header)
    return found


def device_names() -> list[str]:
    """All presets, and this machine's where `workbench calibrate` left it in the project."""
    own = project_root() / "device.json"
    return [*PRESETS, *([str(own)] if own.is_file() else [])]


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What a search would be like at a position.

    row: kv_share, tokens_per_s, seconds_per_problem, outside_s (of them neither model's), is_fitted
    (1: seconds are of costs fitted to both models, 0: a roofline's, a bound), and of each model,
    with its role before: kv_tokens, seconds (of a problem), hit_rate, thrash (events in 1,000
    look-ups). blocks: start_s, engine, blocks_active, blocks_cached, blocks_total. took_s: to
    replay, None where it is interpolated.
    """

    position: Position
    row: dict[str, float]
    blocks: pd.DataFrame
    took_s: float | None

    @property
    def is_exact(self) -> bool:
        """Whether it was replayed, not interpolated between two replays."""
        return self.took_s is not None

    @property
    def kind(self) -> str:
        """How a sentence about it begins."""
        return "Exact replay" if self.is_exact else "Interpolated"


def recorded(path: Path) -> Answers:
    """A recording prepared for any number of replays; anew where its file has changed."""
    return _recorded(path, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=4)
def _recorded(path: Path, _changed: int) -> Answers:
    return Answers(thesis(str(path)) if str(path) in DRAWN else read_recording(path))


def replay(info: RecordingInfo, position: Position) -> Replay:
    """The recorded search at this position. Errors as what_if raises them."""
    start = time.perf_counter()
    settings = {name: value for name, value in asdict(position).items() if name != "recording"}
    room, share = info.feasible(position), position.llm_share
    if not position.keeps_split and room.low <= room.high:
        share = (room.low + room.high) / 2  # one that fits
    settings["llm_share"] = share
    if buffers := room.llm.activations + room.prm.activations:  # what_if's total has none
        if not (at := room.at(share)).fits:
            raise OutOfMemory(f"{at}.")
        total = position.total_memory - buffers
        llm = position.total_memory * share - room.llm.activations
        settings |= {"total_memory": total, "llm_share": llm / total}
    found, num_problems = what_if(recorded(info.path), **settings), len(info.header.problems)
    row = {
        "kv_share": found.memory[0].kv_bytes / sum(model.kv_bytes for model in found.memory),
        "tokens_per_s": found.throughput.tokens_per_s,
        "seconds_per_problem": found.throughput.wall_s / num_problems,
        "is_fitted": float(
            load_device(position.device).is_fitted_to(*(m.name for m in found.memory))
        ),
    }
    parts, tables = [], (found.trace.steps, found.trace.requests)
    for name, memory in zip(("llm", "prm"), found.memory, strict=True):
        steps, requests = (table[table["engine"] == name] for table in tables)
        admitted = requests[requests["scheduled_s"].notna()]
        look_ups = len(admitted) + int(admitted["preemptions"].sum())
        row[f"{name}_kv_tokens"] = memory.num_blocks * position.block_size
        row[f"{name}_seconds"] = float(steps["duration_s"].sum()) / num_problems
        row[f"{name}_hit_rate"] = steps["hit_tokens"].sum() / max(steps["query_tokens"].sum(), 1)
        row[f"{name}_thrash"] = 1000 * steps["thrash_events"].sum() / max(look_ups, 1)
        columns = ["start_s", "engine", *BLOCK_COLUMNS, "blocks_total"]
        parts.append(decimated(steps[columns], BLOCK_COLUMNS, DRAWN_STEPS))
    busy = row["llm_seconds"] + row["prm_seconds"]
    rest = row["seconds_per_problem"] - busy
    row["outside_s"] = rest if rest > 1e-9 * busy else 0.0  # less is what adding floats leaves
    blocks = pd.concat(parts, ignore_index=True)
    return Replay(position, row, blocks, time.perf_counter() - start)


def replay_rows(replays: Sequence[Replay]) -> pd.DataFrame:
    """One row a replay, by share: llm_share, exact, and its row."""
    cells = [{"llm_share": r.position.llm_share, "exact": r.is_exact, **r.row} for r in replays]
    table = pd.DataFrame(cells)
    return table.sort_values("llm_share", ignore_index=True) if len(table) else table


def interpolated(position: Position, replays: Sequence[Replay]) -> Replay | None:
    """Linearly between the replays of the two shares beside it, the blocks of the nearer one.

    replays: at the same position but for its share. None where the share lies outside of theirs.
    """
    rows, share = replay_rows(replays), position.llm_share
    if len(rows) < 2 or not rows["llm_share"].iloc[0] <= share <= rows["llm_share"].iloc[-1]:
        return None
    names = [name for name in rows.columns if name not in ("llm_share", "exact")]
    row = {name: float(np.interp(share, rows["llm_share"], rows[name])) for name in names}
    near = min(replays, key=lambda each: abs(each.position.llm_share - share))
    return Replay(position, row, near.blocks, None)


def interpolation_errors(replays: Sequence[Replay]) -> pd.DataFrame:
    """llm_share, error: throughput at each replay but the ends, had it been interpolated instead.

    error: against the replay, a fraction. So it is an upper guess of what the drawn line misses,
    whose replays stand half as far apart.
    """
    rows = []
    for one in replays:
        guess = interpolated(one.position, [other for other in replays if other is not one])
        if guess is not None:
            error = guess.row["tokens_per_s"] / one.row["tokens_per_s"] - 1
            rows.append({"llm_share": one.position.llm_share, "error": error})
    return pd.DataFrame(rows, columns=["llm_share", "error"])


@cache
def _process() -> ProcessPoolExecutor:
    """The one process in which replays run, however often a notebook's cell does."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


async def replay_elsewhere(info: RecordingInfo, position: Position) -> Replay:
    """`replay` in another process, which is started when first needed, or again when it was lost.

    Raises what `replay` raises, and WorkbenchError where the process is lost twice.
    """
    for _ in range(2):
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(_process(), replay, info, position)
        except BrokenProcessPool:
            _process.cache_clear()
    raise WorkbenchError("The replay process ended unexpectedly; move a control to try it again.")
