"""What part of the KV memory the LLM has when a run of the study of policies begins.

The same rule as the arena's, from configs alone. What it does not do: say what a policy makes of
it later.
"""

from __future__ import annotations

from functools import cache

from workbench.config import SweepConfig
from workbench.experiments.feasible import DTYPE_BYTES, feasible_shares
from workbench.kvcache.arena import BlockShape, choose_page, pack
from workbench.kvcache.policies import pages_above_floors
from workbench.models.registry import model_spec


def starting_share(config: SweepConfig, kv_bytes: int, kv_share: float | None) -> float:
    """The LLM's part as given, else that of the pages an arena starts with.

    Where the memory does not hold both floors, there is no arena: the floors' own parts.
    """
    if kv_share is not None:
        return kv_share
    models = (config.llm, config.prm)
    page_bytes, floors = _floors(models, config.block_size, config.max_model_len, config.dtype)
    num_pages = max(kv_bytes // page_bytes, sum(floors))
    return pages_above_floors(floors, num_pages)[0] / num_pages


@cache
def _floors(
    models: tuple[str, str], block_size: int, max_model_len: int | None, dtype: str
) -> tuple[int, tuple[int, int]]:
    """Bytes of a page, and the pages that one request of the longest length of each model needs."""
    room = feasible_shares(
        *models, "1TiB", block_size=block_size, max_model_len=max_model_len, dtype=dtype
    )
    layers = [model_spec(model).layers for model in models]
    llm, prm = (
        BlockShape(
            name,
            depth,
            need.block_bytes // depth,
            element_bytes=DTYPE_BYTES.get(dtype, 4),
            floor_blocks=need.blocks,
        )
        for name, depth, need in zip(("llm", "prm"), layers, (room.llm, room.prm), strict=True)
    )
    page = choose_page((llm, prm))
    first, second = (-(-shape.floor_blocks // pack(shape, page).blocks) for shape in (llm, prm))
    return page.page_bytes, (first, second)
