"""The bytes of paged KV caches: flat tensors, and where each layer and block lies in them.

The only tensors in kvcache: one model's own memory, or the arena that several share. Who owns a
block is the manager's business; kernels get element offsets from here, and what a manager wants
copied is copied here, before the next store.

    data:   | layer 0: block 0 | block 1 | ... | layer 1: block 0 | ... |   layer by layer
    block:  | keys [kv_heads, head_dim, block_size] | values [kv_heads, block_size, head_dim] |
    address of a block's keys in a layer = layer_base[layer] + offsets[block], in elements (int64)
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import compress
from operator import not_
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.errors import ConfigError, OutOfMemory
from workbench.kvcache.arena import KVArena
from workbench.kvcache.resizing import Resizable

Pairs = list[tuple[int, int]]
Moves = Sequence[tuple[int, int]]
Late = tuple["ModelStorage", int, torch.Tensor, torch.Tensor]


class BlockStorage:
    """One model's blocks within a flat tensor of its dtype; kernels need nothing else of it.

    layer_base: [layers], offsets: [ids], both elements.
    """

    def __init__(
        self,
        data: torch.Tensor,
        layer_base: NDArray[np.int64],
        offsets: NDArray[np.int64],
        block_size: int,
        kv_heads: int,
        head_dim: int,
    ) -> None:
        self.data, self.layer_base, self.offsets = data, layer_base, offsets
        self.layers, self.num_blocks = len(layer_base), len(offsets)
        self.block_size, self.kv_heads, self.head_dim = block_size, kv_heads, head_dim
        at = np.concatenate([layer_base, offsets, [self.block_elements]])
        self._unit = int(np.gcd.reduce(at))  # blocks are copied in pieces of so many elements
        self.bytes_copied = 0

    @property
    def block_elements(self) -> int:
        """Elements of one block in one layer, keys and values."""
        return 2 * self.block_size * self.kv_heads * self.head_dim

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def settle(self, cache: Resizable) -> None:
        """Copy what the cache wants copied; between planning a step and storing anything."""
        self.carry_out(cache.take_moves())

    def carry_out(self, moves: Moves) -> None:
        """Copy (source, destination) blocks; each layer's sources are read before it is written."""
        if moves:
            sources, destinations = (self.pieces_of(blocks) for blocks in zip(*moves))
            for layer in range(self.layers):
                self.write(layer, destinations, self.read(layer, sources))

    def pieces_of(self, blocks: Sequence[int]) -> torch.Tensor:
        """The pieces that these blocks are made of, counted from a layer's base; on the device."""
        first = self.offsets[list(blocks)] // self._unit
        pieces = np.arange(self.block_elements // self._unit)
        return torch.from_numpy((first[:, None] + pieces).ravel()).to(self.data.device)

    def read(self, layer: int, pieces: torch.Tensor) -> torch.Tensor:
        """A copy of these pieces in one layer: [pieces, elements of a piece]."""
        return self._pieces.index_select(0, pieces + self._base_of(layer))

    def write(self, layer: int, pieces: torch.Tensor, content: torch.Tensor) -> None:
        """What `read` answered becomes the content of these pieces."""
        self._pieces.index_copy_(0, pieces + self._base_of(layer), content)
        self.bytes_copied += content.numel() * content.element_size()

    @property
    def _pieces(self) -> torch.Tensor:
        return self.data.view(-1, self._unit)

    def _base_of(self, layer: int) -> int:
        return int(self.layer_base[layer]) // self._unit


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
        self._models: dict[str, ModelStorage] = {}
        self.users: WeakValueDictionary[str, Any] = WeakValueDictionary()  # name -> who computes

    def model(
        self, name: str, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> ModelStorage:
        """This model's blocks. ConfigError unless they are as large as the arena was told."""
        shape = self.arena.packing(name).shape
        cell_bytes = 2 * block_size * kv_heads * head_dim * dtype.itemsize
        if (cell_bytes, dtype.itemsize) != (shape.cell_bytes, shape.element_bytes):
            raise ConfigError(
                f"{name!r} has {cell_bytes:,} bytes a block and layer, {dtype.itemsize} an element;"
                f" the arena was made for {shape.cell_bytes:,} and {shape.element_bytes}. Make it "
                "with this model's BlockShape."
            )
        base, offsets = self.arena.layer_base(name), self.arena.offsets(name)
        data = self.bytes.view(dtype)
        view = ModelStorage(self, data, base, offsets, block_size, kv_heads, head_dim)
        self._models[name] = view
        return view

    @property
    def bytes_copied(self) -> int:
        """Since creation, of all models."""
        return sum(view.bytes_copied for view in self._models.values())

    def settle(self) -> None:
        """Carry out the moves of all models and zero pages that changed hands.

        A copy into a page that changed hands is read before, and written after it is zeroed.
        """
        with self.arena.lock:
            zeroed, moves = self.arena.take_retyped(), self.arena.take_moves()
            late: list[Late] = []
            if zeroed:
                for name, pairs in moves.items():
                    moves[name], waiting = self._divide(name, pairs, set(zeroed))
                    late += self._read(name, waiting)
            for name, pairs in moves.items():
                self._models[name].carry_out(pairs)
            self._zero(zeroed)
            for view, layer, pieces, content in late:
                view.write(layer, pieces, content)

    def _divide(self, name: str, pairs: Moves, zeroed: Container[int]) -> tuple[Pairs, Pairs]:
        """Moves to be carried out now, and those that go to pages still to be zeroed."""
        page_of = self.arena.packing(name).page_of
        waits = [page_of(destination) in zeroed for _, destination in pairs]
        return list(compress(pairs, map(not_, waits))), list(compress(pairs, waits))

    def _read(self, name: str, pairs: Moves) -> Iterator[Late]:
        """What these moves copy, layer by layer."""
        view = self._models[name]
        if pairs:
            sources, destinations = (view.pieces_of(blocks) for blocks in zip(*pairs))
            for layer in range(view.layers):
                yield view, layer, destinations, view.read(layer, sources)

    def _zero(self, pages: Sequence[int]) -> None:
        if pages:
            page = self.arena.page
            which = torch.tensor(pages, device=self.bytes.device)
            words = self.bytes.view(torch.int64)
            words.view(page.slabs, -1, page.stripe // 8).index_fill_(1, which, 0)
            self.bytes_zeroed += len(pages) * page.page_bytes


class ModelStorage(BlockStorage):
    """One model's blocks in an arena: block ids of all pages have an offset, leased or not."""

    def __init__(
        self,
        arena: ArenaStorage,
        data: torch.Tensor,
        layer_base: NDArray[np.int64],
        offsets: NDArray[np.int64],
        block_size: int,
        kv_heads: int,
        head_dim: int,
    ) -> None:
        super().__init__(data, layer_base, offsets, block_size, kv_heads, head_dim)
        self._arena = arena

    def settle(self, cache: Resizable) -> None:
        """Copy and zero whatever the arena wants copied and zeroed, of all models."""
        self._arena.settle()


def _zeros(elements: int, dtype: torch.dtype, device: torch.device, what: str) -> torch.Tensor:
    """On a CPU by numpy, which asks for large pages: attention reads all over the cache."""
    try:
        if device.type != "cpu":
            return torch.zeros(elements, dtype=dtype, device=device)
        return torch.from_numpy(np.zeros(elements * dtype.itemsize, np.uint8)).view(dtype)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is one too
        raise OutOfMemory(
            f"{what} needs {elements * dtype.itemsize:,} bytes, which {device} does not have. "
            "Give less `memory`, `kv_memory` or `num_blocks`."
        ) from error
