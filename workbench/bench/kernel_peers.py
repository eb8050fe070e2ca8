"""Torch's own attention, by each of its backends, over keys and values that lie in one piece.

What it does not do: read blocks; a paged cache would first have to be gathered for it.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from workbench.bench.gpu_timing import Work
from workbench.bench.kernel_steps import Shape

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def torch_attention(
    shape: Shape,
    sequences: tuple[int, int],
    new: int,
    layers: int,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Work]:
    """The backends that take this: (sequences, positions), of which the last `new` are rows.

    One row sees all positions, several are a whole prompt, causal.
    """
    count, positions = sequences
    query = torch.randn(count, shape.heads, new, shape.head_dim, device=device, dtype=dtype)
    kept = (2, count, shape.kv_heads, positions, shape.head_dim)
    keys = [torch.randn(kept, device=device, dtype=dtype) for _ in range(layers)]
    works = {name: _attend(each, query, keys, new > 1) for name, each in BACKENDS.items()}
    return {name: work for name, work in works.items() if _runs(work)}


def _attend(
    backend: SDPBackend, query: torch.Tensor, layers: list[torch.Tensor], causal: bool
) -> Work:
    """Grouped-query attention of every layer by one of torch's backends."""

    def work() -> None:
        with sdpa_kernel(backend):
            for key, value in layers:
                scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)

    return work


def _runs(work: Work) -> bool:
    """Whether a backend takes these shapes on this device."""
    try:
        work()
    except RuntimeError:
        return False
    return True
