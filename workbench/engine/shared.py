"""Engines that share one memory: what an arena must know of a model, and what it then holds.

    arena = KVArena("32MiB", [block_shape("tiny-solver"), block_shape("tiny-prm")], kv_share=0.3)
    llm, prm = Engine("tiny-solver", arena=arena), Engine("tiny-prm", arena=arena)

What it does not do: move pages (kvcache/arena.py) or own bytes (kvcache/storage.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.config import EngineConfig
from workbench.errors import ConfigError
from workbench.kvcache.arena import BlockShape, KVArena
from workbench.kvcache.storage import ArenaStorage, BlockStorage
from workbench.models.llama import LlamaModel
from workbench.models.loading import arithmetic_dtype
from workbench.models.registry import model_spec

OWN_MEMORY = ("memory", "kv_memory", "num_blocks")


def block_shape(
    model: str,
    *,
    name: str | None = None,
    block_size: int = 16,
    max_model_len: int | None = None,
    dtype: str = "auto",
    device: str = "cpu",
) -> BlockShape:
    """A model's blocks as an arena must know them; reads its config, no weights.

    name: in the arena, default the model's; two engines of one model need two. Its floor is one
    request of max_model_len (default: the model's own), a block's cost the operations of computing
    its tokens. Raises ModelError or ConfigError as Engine does.
    """
    spec = model_spec(model)
    element = arithmetic_dtype(dtype, device, spec).itemsize
    longest = spec.max_model_len if max_model_len is None else max_model_len
    return BlockShape(
        name=name or model,
        layers=spec.layers,
        cell_bytes=spec.block_bytes(block_size, element) // spec.layers,
        element_bytes=element,
        floor_blocks=-(-longest // block_size),
        block_cost=float(spec.flops(block_size, 0)),
    )


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """An arena, and a model's name in it."""

    arena: KVArena
    name: str

    def storage(self, config: EngineConfig, model: LlamaModel) -> BlockStorage:
        """This model's view of the arena's bytes, which the first engine asks for.

        ConfigError while another engine has its blocks under the same name.
        """
        if self.arena.storage is None:
            self.arena.storage = ArenaStorage(self.arena, model.device)
        bytes_: ArenaStorage = self.arena.storage
        if self.name in bytes_.users:
            raise ConfigError(
                f"An engine has its blocks under {self.name!r} in this arena already; give each "
                "its own name: block_shape(..., name=...) and Engine(..., arena_name=...)."
            )
        shape = (config.block_size, model.spec.kv_heads, model.spec.head_dim)
        view = bytes_.model(self.name, *shape, model.dtype)
        bytes_.users[self.name] = model
        return view


def require_guaranteed(place: ArenaPlace, config: EngineConfig, max_model_len: int) -> None:
    """ConfigError unless the arena guarantees this engine's longest request."""
    given = [name for name in OWN_MEMORY if getattr(config, name) is not None]
    if given:
        raise ConfigError(
            f"Engine got arena and {' and '.join(given)}; an engine in an arena has no memory of "
            "its own: the arena's size and kv_share say what it may hold."
        )
    shape = place.arena.packing(place.name).shape
    needed = -(-max_model_len // config.block_size)
    if shape.floor_blocks < needed:
        raise ConfigError(
            f"The arena guarantees {place.name!r} {shape.floor_blocks} blocks, one request of "
            f"max_model_len={max_model_len} needs {needed} of {config.block_size} tokens; give "
            "block_shape() and Engine the same max_model_len and block_size."
        )
