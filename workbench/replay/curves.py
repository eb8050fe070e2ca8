"""One model's miss-ratio curve as a table to draw: LRU, the optimum, and what a replay would do.

Where a size cannot hold the order of calls (`fits` is false: draw it dashed), the scheduler would
change the order; there only a full replay tells, and `difference` says how far it is from the
curve wherever both were made. What it does not do: draw (plots/).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from workbench.errors import ConfigError
from workbench.replay.answers import Answers
from workbench.replay.calls import CacheCalls, logged_calls
from workbench.replay.devices import Device
from workbench.replay.miss_ratio import miss_ratio
from workbench.replay.optimum import optimal_hits
from workbench.replay.simulator import Changes, Costs, replay
from workbench.search.record import RecordedEngine

MODELS = ("llm", "prm")
BELOW = 3  # sizes below the order's peak that are replayed unless others are asked for
PRIVATE = 4096  # blocks more than there are contents: room for those that are nobody's content


def search_calls(
    answers: Answers, costs: Costs | Device, changes: Changes | None = None
) -> list[CacheCalls]:
    """The order of both models' cache calls in a replay. changes: keyword arguments of replay."""
    done = replay(answers, costs, log_calls=True, **(changes or {}))
    return [logged_calls(engine.cache) for engine in (done.llm, done.prm)]


def curve_sizes(calls: CacheCalls, count: int) -> list[int]:
    """Sizes from half the order's peak of active blocks to where nothing is ever evicted."""
    roomy = miss_ratio(calls, [calls.num_contents + PRIVATE]).iloc[0]
    peak = int(roomy["peak_active"])
    most = calls.num_contents + peak
    found = np.linspace(max(peak // 2, 1), most, count).astype(int)
    return sorted({*found.tolist(), peak})


def sizes_below_peak(
    answers: Answers, calls: CacheCalls, model: str, count: int = BELOW
) -> list[int]:
    """Sizes that the order does not fit and a search can run in: evenly from one request's."""
    recorded: RecordedEngine = getattr(answers.recording, model)
    least = calls.blocks_for(recorded.max_model_len)
    peak = int(miss_ratio(calls, [calls.num_contents + PRIVATE])["peak_active"].iloc[0])
    if least >= peak:
        return []
    return sorted({*np.linspace(least, peak, count, endpoint=False).astype(int).tolist()})


def curve_table(
    answers: Answers,
    costs: Costs | Device,
    model: str,
    sizes: Sequence[int],
    *,
    replay_at: Sequence[int] | None = None,
    changes: Changes | None = None,
) -> pd.DataFrame:
    """One row a size: miss_ratio's columns, optimal_hit_ratio, replayed_hit_ratio, difference.

    Where `fits` is false the curve is drawn dashed. replay_at: sizes, in blocks, at which the whole
    search is replayed, the other model as it is (None: some below the order's peak, where replay
    and curve differ). NaN where the optimum does not fit or nothing was replayed. Raises
    OutOfMemory for a replay in less than one request needs.
    """
    if model not in MODELS:
        raise ConfigError(f"model is {model!r}; allowed: {', '.join(MODELS)}.")
    calls = search_calls(answers, costs, changes)[MODELS.index(model)]
    if replay_at is None:
        replay_at = sizes_below_peak(answers, calls, model)
    table = miss_ratio(calls, sorted({*sizes, *replay_at}))
    best = optimal_hits(calls, table["num_blocks"].tolist()).set_index("num_blocks")["hit_ratio"]
    table["optimal_hit_ratio"] = table["num_blocks"].map(best)
    found = {size: _replayed(answers, costs, model, size, changes or {}) for size in replay_at}
    table["replayed_hit_ratio"] = table["num_blocks"].map(found).astype(float)
    table["difference"] = table["replayed_hit_ratio"] - table["hit_ratio"]
    return table


def _replayed(
    answers: Answers, costs: Costs | Device, model: str, num_blocks: int, changes: Changes
) -> float:
    """Hit ratio of first admissions when the search is replayed with so many blocks."""
    own = {**changes.get(model, {}), "num_blocks": num_blocks}
    steps = replay(answers, costs, **{**changes, model: own}).trace.steps
    steps = steps[steps["engine"] == model]
    return float(steps["hit_tokens"].sum() / max(int(steps["query_tokens"].sum()), 1))
