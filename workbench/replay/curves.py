"""What a miss-ratio curve is made of: the order of cache calls of a replay, and sizes to run it at.

Where a size cannot hold the order (`fits` is false), the scheduler would change it: there only a
full replay tells (experiments/size_curves.py). What it does not do: run the order (miss_ratio.py),
or draw.
"""

from __future__ import annotations

import numpy as np

from workbench.replay.answers import Answers
from workbench.replay.calls import CacheCalls, logged_calls
from workbench.replay.devices import Device
from workbench.replay.miss_ratio import miss_ratio
from workbench.replay.simulator import Changes, Costs, replay

MODELS = ("llm", "prm")
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
