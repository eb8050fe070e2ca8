"""Figures: DataFrame in, plotly Figure out. Imports nothing else of the workbench.

FIGURES names every figure of the study by the name of its files, so that stored rows can be drawn
again.
"""

from collections.abc import Callable

import plotly.graph_objects as go

from workbench.plots.batching import balance, batch_limits
from workbench.plots.caching import miss_ratio, prefix_hits, thrashing
from workbench.plots.generation import engine_batch, engine_cache, engine_memory
from workbench.plots.memory import kv_blocks, memory_parts
from workbench.plots.modifications import modifications
from workbench.plots.optimisation import optimisation
from workbench.plots.search import as_replayed, memory_split, rungs, search_strategies
from workbench.plots.search import search_tree as search_tree
from workbench.plots.sensitivity import sensitivity
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
    "sensitivity": sensitivity,
    "modifications": modifications,
    "optimisation": optimisation,
    "search_strategies": search_strategies,
    "engine_cache": engine_cache,
    "engine_batch": engine_batch,
    "engine_memory": engine_memory,
}
_REPLAYED = ("memory_split", "prm_blocks_030", "prm_blocks_050", "prefix_hits", "thrashing")
FIGURES |= {f"{n}_replayed": as_replayed(FIGURES[n]) for n in (*_REPLAYED, "miss_ratio")}
