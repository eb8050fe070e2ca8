"""The bytes of a paged KV cache: one flat tensor, and where each layer and block lies in it.

The only tensors in kvcache. Who owns a block is the manager's business; kernels get element offsets
from here.

    data:   | layer 0: block 0 | block 1 | ... | layer 1: block 0 | ... |   layer by layer
    block:  | keys [kv_heads, head_dim, block_size] | values [kv_heads, block_size, head_dim] |
    address of a block's keys in a layer = layer_base[layer] + offsets[block], in elements (int64)
"""

from __future__ import annotations

import numpy as np
import torch

from workbench.errors import OutOfMemory


class KVStorage:
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
        self.num_blocks, self.block_size, self.layers = num_blocks, block_size, layers
        self.kv_heads, self.head_dim = kv_heads, head_dim
        elements = num_blocks * self.block_elements
        self.layer_base = np.arange(layers, dtype=np.int64) * elements
        self.offsets = np.arange(num_blocks, dtype=np.int64) * self.block_elements
        try:
            self.data = _zeros(layers * elements, dtype, torch.device(device))
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is one too
            raise OutOfMemory(
                f"The KV cache of {num_blocks} blocks needs {layers * elements * dtype.itemsize:,} "
                f"bytes, which {device} does not have. Give less `memory`, `kv_memory` or "
                f"`num_blocks`."
            ) from error

    @property
    def block_elements(self) -> int:
        """Elements of one block in one layer, keys and values."""
        return 2 * self.block_size * self.kv_heads * self.head_dim

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()


def _zeros(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU by numpy, which asks for large pages: attention reads all over the cache."""
    if device.type != "cpu":
        return torch.zeros(elements, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(elements * dtype.itemsize, np.uint8)).view(dtype)
