"""Rows of the miss_ratio figure: one recorded order of cache calls, run at every size.

LRU and Belady's optimum from the order, whole searches replayed at some sizes beside them, and the
sizes that shares of a memory give. What it does not do: draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from workbench.errors import OutOfMemory
from workbench.experiments.execute import DEVICE, ENGINES, thesis_answers
from workbench.experiments.rows import rooms
from workbench.experiments.study import CARRIES_OVER, Study, rung_of
from workbench.replay.answers import Answers
from workbench.replay.devices import Device, load_device
from workbench.replay.miss_ratio import CacheCalls, miss_ratio, optimal_hits
from workbench.replay.simulator import Changes, replay, search_calls
from workbench.replay.workload import load_recording

SIZES, OPTIMA = 40, 8
REPLAYS = (0.6, 0.8, 1.0, 1.3, 2.0)
"""Sizes at which whole searches are replayed, over the order's own peak of active blocks."""
FEW_REPLAYS = (0.75,)  # of a search of true size
Row = dict[str, Any]


def size_rows(
    answers: Answers,
    device: Device,
    *,
    changes: Changes | None = None,
    replays: Sequence[float] = REPLAYS,
    shares: Mapping[float, tuple[int, int]] | None = None,
) -> pd.DataFrame:
    """Rows of plots.miss_ratio. changes: of the replay that makes the order.

    replays: at which sizes of each cache, over the order's peak, the whole search is replayed; one
    too small for a single request is left out. shares: KV tokens of (LLM, PRM) at an LLM share.
    """
    rows: list[Row] = []
    for place, calls in enumerate(search_calls(answers, device, changes)):
        engine = ENGINES[place]
        peak = _peak(calls)
        mine = [*_curves(calls, peak)]
        for size in (round(peak * each) for each in replays):
            mine += _replayed(answers, device, changes or {}, engine, size)
        for share, tokens in (shares or {}).items():
            mine.append({"kind": "share", "llm_share": share, "num_blocks": None,
                         "tokens": tokens[place]})  # fmt: skip
        rows += [{"engine": engine, "tokens": None} | row for row in _sized(mine, calls)]
    columns = ["engine", "kind", "num_blocks", "tokens", "fits", "hit_ratio", "thrashed_per_1000"]
    return pd.DataFrame(rows).reindex(columns=[*columns, "llm_share"])


def _peak(calls: CacheCalls) -> int:
    """The most blocks of the order that are in use, or asked for, at once."""
    return int(miss_ratio(calls, [1]).iloc[0]["peak_active"])


def _curves(calls: CacheCalls, peak: int) -> Iterator[Row]:
    """LRU at many sizes, the optimum at some of them; near the peak they lie closest."""
    most = max(calls.num_contents + peak, 2 * peak)
    found = np.geomspace(max(peak // 2, 1), most, SIZES).astype(int).tolist()
    sizes = sorted({*found, *(round(peak * each) for each in REPLAYS)})
    table = miss_ratio(calls, sizes)
    for row in table[table["fits"]].to_dict("records"):  # the others are of no order that happens
        per_1000 = 1000 * row["thrashed"] / max(calls.look_ups, 1)
        yield {"kind": "lru", "num_blocks": row["num_blocks"], "fits": bool(row["fits"]),
               "hit_ratio": row["hit_ratio"], "thrashed_per_1000": per_1000}  # fmt: skip
    tight = [size for size in sizes if peak < size <= 3 * peak]  # beyond, both find the same
    some = [peak, *tight[:: max(1, len(tight) // OPTIMA)], sizes[-1]]
    for row in optimal_hits(calls, some).to_dict("records"):
        yield {"kind": "optimum", "num_blocks": row["num_blocks"], "fits": True,
               "hit_ratio": row["hit_ratio"]}  # fmt: skip


def _replayed(
    answers: Answers, device: Device, changes: Changes, engine: str, num_blocks: int
) -> list[Row]:
    """The whole search at this size of one cache; nothing where one request would not fit."""
    own = {**changes.get(engine, {}), "num_blocks": num_blocks}
    try:
        trace = replay(answers, device, **{**changes, engine: own}).trace
    except OutOfMemory:
        return []
    steps = trace.steps[trace.steps["engine"] == engine]
    requests = trace.requests[trace.requests["engine"] == engine]
    look_ups = len(requests) + int(requests["preemptions"].sum())
    hits = steps["hit_tokens"].sum() / max(int(steps["query_tokens"].sum()), 1)
    thrashed = 1000 * steps["thrashed"].sum() / max(look_ups, 1)
    row = {"kind": "replay", "num_blocks": num_blocks, "fits": True}
    return [row | {"hit_ratio": hits, "thrashed_per_1000": thrashed}]


def _sized(rows: Iterable[Row], calls: CacheCalls) -> Iterator[Row]:
    """The rows with the size in tokens."""
    for row in rows:
        blocks = row["num_blocks"]
        yield row if blocks is None else row | {"tokens": int(blocks) * calls.block_size}


def size_tables(sweep: Study, recording: str | None = None, device: str = DEVICE) -> pd.DataFrame:
    """Rows of a recording of the package, or else of the replayed rung's own search, in the order
    it has at a share of about 0.3. The sizes that the sweep's shares give are marked.
    """
    found = load_device(device)
    if recording is not None:
        return size_rows(Answers(load_recording(recording)), found, shares=_rooms(sweep))
    config = sweep.config
    changes = {"min_problem_batch": config.min_problem_batch}
    answers = thesis_answers(config, config.seeds[0])
    return size_rows(answers, found, changes=changes, replays=FEW_REPLAYS, shares=_rooms(sweep))


def provenance_recorded(recording: str) -> str:
    """What stands below the figure of a recording."""
    found = load_recording(recording)
    sizes = found.settings.strategy_settings
    return (
        f"LLM {found.llm.name}, PRM {found.prm.name} ({rung_of(found.llm.name)}); the order of "
        f"cache calls of the recording {recording}, replayed: {len(found.problems)} problems, "
        f"1 seed, n = {sizes['n']}, beam width {sizes['beam_width']}.\n{CARRIES_OVER}"
    )


def _rooms(sweep: Study) -> dict[float, tuple[int, int]]:
    """KV tokens of both models at the ends and in the middle of the axis."""
    table = rooms(sweep).drop_duplicates("llm_share")
    found = {s: (int(llm), int(prm)) for s, llm, prm in table.itertuples(index=False)}
    shares = list(found)
    kept = {shares[0], shares[len(shares) // 2], shares[-1]}
    return {share: found[share] for share in shares if share in kept}
