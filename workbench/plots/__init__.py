"""Figures: DataFrame in, plotly Figure out. Imports nothing else of the workbench.

FIGURES names every figure of the study by the name of its files, so that stored rows can be drawn
again.
"""

from collections.abc import Callable

import plotly.graph_objects as go

from workbench.plots.caching import lost_time, miss_ratio, prefix_hits, prm_blocks, thrashing
from workbench.plots.generation import (
    balance,
    batch_limits,
    engine_batch,
    engine_cache,
    engine_memory,
    serving_load,
    serving_split,
)
from workbench.plots.memory import kv_blocks, memory_parts
from workbench.plots.modifications import modifications, optimisation, sensitivity
from workbench.plots.panels import by_rung
from workbench.plots.search import critiques, memory_split, search_strategies
from workbench.plots.search import search_tree as search_tree

FIGURES: dict[str, Callable[..., go.Figure]] = {
    "memory_parts": memory_parts,
    "kv_blocks": kv_blocks,
    "memory_split": by_rung(memory_split),
    "prm_blocks_030": by_rung(prm_blocks),
    "prm_blocks_050": by_rung(prm_blocks),
    "prm_batch": by_rung(batch_limits),
    "llm_batch": by_rung(batch_limits),
    "balance": balance,
    "prefix_hits": by_rung(prefix_hits),
    "thrashing": by_rung(thrashing),
    "lost_time": by_rung(lost_time),
    "miss_ratio": miss_ratio,
    "sensitivity": sensitivity,
    "miss_ratio_replayed": by_rung(miss_ratio),
    "modifications": modifications,
    "optimisation": optimisation,
    "optimisation_replayed": by_rung(optimisation),
    "search_strategies": search_strategies,
    "engine_cache": engine_cache,
    "engine_batch": engine_batch,
    "engine_memory": engine_memory,
    "critiques_replayed": by_rung(critiques),
    "serving_load": serving_load,
    "serving_split": serving_split,
}
