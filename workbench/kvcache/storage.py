"""The bytes of paged KV caches: flat tensors, and where each layer and block lies in them.

The only tensors in kvcache: one model's own memory, or the arena that several share. Kernels get
element offsets from here, and what a manager has to copy is copied here, before the next store.

    data:   | layer 0: block 0 | block 1 | ... | layer 1: block 0 | ... |   layer by layer
    block:  | keys [kv_heads, head_dim, block_size] | values [kv_heads, block_size, head_dim] |
    address of a block's keys in a layer = layer_base[layer] + offsets[block], in elements (int64)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.errors import OutOfMemory
from workbench.host import aligned_zeros
from workbench.kvcache.arena import KVArena
from workbench.kvcache.manager import KVCacheManager

Moves = list[tuple[int, int]]


class BlockStorage:
    """One model's blocks within a flat tensor of its dtype; kernels need nothing else of it.

    layer_base: [layers], offsets: [ids], both elements. arena: whose bytes they are, if it shares
    them.
    """

    def __init__(
        self,
        data: torch.Tensor,
        layer_base: NDArray[np.int64],
        offsets: NDArray[np.int64],
        block_size: int,
        kv_heads: int,
        head_dim: int,
        arena: ArenaStorage | None = None,
    ) -> None:
        self.data, self.layer_base, self.offsets = data, layer_base, offsets
        self.layers, self.num_blocks = len(layer_base), len(offsets)
        self.block_size, self.kv_heads, self.head_dim = block_size, kv_heads, head_dim
        at = np.concatenate([layer_base, offsets, [self.block_elements]])
        self._unit = int(np.gcd.reduce(at))  # blocks are copied in pieces of so many elements
        self._arena = arena

    @property
    def block_elements(self) -> int:
        """Elements of one block in one layer, keys and values."""
        return 2 * self.block_size * self.kv_heads * self.head_dim

    def settle(self, cache: KVCacheManager) -> None:
        """Copy what the cache has to copy; in an arena copy and zero for all of its models.

        Between planning a step and storing anything.
        """
        if self._arena is not None:
            if any(self._arena.arena.unsettled):
                self._arena.settle()
        elif moves := cache.take_moves():
            self.write(moves, self.read(moves))

    def read(self, moves: Moves) -> Iterator[torch.Tensor]:
        """What these (source, destination) copy, a layer at a time: [pieces, elements of one]."""
        for pieces in self._pieces_of([source for source, _ in moves]):
            yield self.data.view(-1, self._unit).index_select(0, pieces)

    def write(self, moves: Moves, contents: Iterable[torch.Tensor]) -> None:
        """What `read` returned for these moves becomes the content of their destinations.

        Of each layer all is read before any is written.
        """
        destinations = self._pieces_of([destination for _, destination in moves])
        for pieces, content in zip(destinations, contents, strict=True):
            self.data.view(-1, self._unit).index_copy_(0, pieces, content)

    def _pieces_of(self, blocks: list[int]) -> Iterator[torch.Tensor]:
        """Of each layer the pieces that these blocks are made of, on the device."""
        first = self.offsets[blocks] // self._unit
        pieces = np.arange(self.block_elements // self._unit)
        in_layer = torch.from_numpy((first[:, None] + pieces).ravel()).to(self.data.device)
        return (in_layer + int(base) // self._unit for base in self.layer_base)


class KVStorage(BlockStorage):
    """`num_blocks` blocks of `block_size` positions for every layer; zeros at first."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises OutOfMemory when the device has no room for it."""
        block = 2 * block_size * kv_heads * head_dim
        layer_base = np.arange(layers, dtype=np.int64) * (num_blocks * block)
        offsets = np.arange(num_blocks, dtype=np.int64) * block
        what = f"The KV cache of {num_blocks} blocks"
        data = _zeros(layers * num_blocks * block, dtype, torch.device(device), what)
        super().__init__(data, layer_base, offsets, block_size, kv_heads, head_dim)


class ArenaStorage:
    """The bytes of a KVArena, zeros at first, and a view for each model.

    A page leased to another model is zeroed before anything is stored in it, so that no kernel,
    whatever it reads beyond a sequence's end, meets a bit pattern that is no number in its type.
    """

    def __init__(self, arena: KVArena, device: torch.device | str = "cpu") -> None:
        """Raises OutOfMemory when the device has no room for it."""
        self.arena, self.bytes_zeroed = arena, 0
        what = f"The KV arena of {arena.num_pages} pages"
        size = arena.num_pages * arena.page.page_bytes
        self.bytes = _zeros(size, torch.uint8, torch.device(device), what)
        self._models: dict[str, BlockStorage] = {}
        # name -> the engine that computes
        self.users: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def model(
        self, name: str, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> BlockStorage:
        """This model's blocks: ids of all pages have an offset, leased or not.

        ConfigError unless they are as large as the arena was told.
        """
        packing, pages = self.arena.packing(name), self.arena.num_pages
        cell = 2 * block_size * kv_heads * head_dim * dtype.itemsize
        self.arena.require_cells(name, cell, dtype.itemsize)
        places = packing.layer_base(pages), packing.offsets(pages)
        sizes = block_size, kv_heads, head_dim
        view = BlockStorage(self.bytes.view(dtype), *places, *sizes, arena=self)
        self._models[name] = view
        return view

    def settle(self) -> None:
        """Carry out the moves of all models and zero pages that changed hands.

        A copy into a page that changed hands is read before, and written after it is zeroed.
        """
        with self.arena.lock:
            zeroed, moves = self.arena.take_retyped(), self.arena.take_moves()
            late: list[tuple[BlockStorage, Moves, list[torch.Tensor]]] = []
            if zeroed:
                pages = set(zeroed)
                for name, pairs in moves.items():
                    per_page, view = self.arena.packing(name).blocks, self._models[name]
                    waiting = [move for move in pairs if move[1] // per_page in pages]
                    moves[name] = [move for move in pairs if move[1] // per_page not in pages]
                    if waiting:
                        late.append((view, waiting, list(view.read(waiting))))
            for name, pairs in moves.items():
                if pairs:
                    view = self._models[name]
                    view.write(pairs, view.read(pairs))
            if zeroed:
                page = self.arena.page
                words = self.bytes.view(torch.int64).view(page.slabs, -1, page.stripe // 8)
                words.index_fill_(1, torch.tensor(zeroed, device=self.bytes.device), 0)
                self.bytes_zeroed += len(zeroed) * page.page_bytes
            for view, waiting, contents in late:
                view.write(waiting, contents)


def _zeros(elements: int, dtype: torch.dtype, device: torch.device, what: str) -> torch.Tensor:
    """On a CPU in large pages, if there are any: attention reads all over the cache."""
    try:
        if device.type != "cpu":
            return torch.zeros(elements, dtype=dtype, device=device)
        return torch.from_numpy(aligned_zeros(elements * dtype.itemsize)).view(dtype)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is one too
        raise OutOfMemory(
            f"{what} needs {elements * dtype.itemsize:,} bytes, which {device} does not have. "
            "Give less `memory`, `kv_memory` or `num_blocks`."
        ) from error
