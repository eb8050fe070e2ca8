"""Figures: DataFrame in, plotly Figure out. Imports nothing else of the workbench.

FIGURES names every figure of the study by the name of its files, so that stored rows can be drawn
again. What it does not do: read runs, compute intervals, or write files (experiments does).
"""

from collections.abc import Callable

import plotly.graph_objects as go

from workbench.plots.balance import balance
from workbench.plots.batching import batch_limits
from workbench.plots.caching import prefix_hits, thrashing
from workbench.plots.capacity import kv_blocks
from workbench.plots.memory import memory_split
from workbench.plots.miss_ratio import miss_ratio
from workbench.plots.modifications import modifications
from workbench.plots.optimisation import optimisation
from workbench.plots.replayed import as_replayed, rungs
from workbench.plots.requirements import memory_parts
from workbench.plots.search import search_tree
from workbench.plots.timeline import lost_time, prm_blocks

FIGURES: dict[str, Callable[..., go.Figure]] = {
    "memory_parts": memory_parts,
    "kv_blocks": kv_blocks,
    "memory_split": memory_split,
    "prm_blocks_030": prm_blocks,
    "prm_blocks_050": prm_blocks,
    "prm_batch": batch_limits,
    "llm_batch": batch_limits,
    "balance": balance,
    "prefix_hits": prefix_hits,
    "thrashing": thrashing,
    "lost_time": lost_time,
    "miss_ratio": miss_ratio,
    "rungs": rungs,
    "memory_split_replayed": as_replayed(memory_split),
    "prm_blocks_030_replayed": as_replayed(prm_blocks),
    "prm_blocks_050_replayed": as_replayed(prm_blocks),
    "prefix_hits_replayed": as_replayed(prefix_hits),
    "thrashing_replayed": as_replayed(thrashing),
    "miss_ratio_replayed": as_replayed(miss_ratio),
    "modifications": modifications,
    "optimisation": optimisation,
}

__all__ = [
    "FIGURES",
    "balance",
    "batch_limits",
    "kv_blocks",
    "lost_time",
    "memory_parts",
    "memory_split",
    "miss_ratio",
    "modifications",
    "optimisation",
    "prefix_hits",
    "prm_blocks",
    "rungs",
    "search_tree",
    "thrashing",
]
