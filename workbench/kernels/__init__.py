"""What is worth a kernel: attention over blocks, storing keys and values, norms, SwiGLU.

`load_kernels` chooses one implementation for a device, once; all have the signatures of `Kernels`.
`reference` is plain torch and says what is meant; `cpu` is numba and is what runs. Matrix products
are not here: torch has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from workbench.kernels.context import ForwardContext, LayerCache

__all__ = ["ForwardContext", "Kernels", "LayerCache", "load_kernels"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """One device's kernels, for T rows of fused queries, keys and values.

    width = (heads + 2 * kv_heads) * head_dim of such a row.

    rms_norm(x [T, hidden], weight [hidden], epsilon, out [T, hidden]): out = x / rms(x) * weight.
    add_rms_norm(x, delta, weight, epsilon, out): x += delta, then out = rms_norm(x).
    store_kv(qkv [T, width], cosine, sine [positions, head_dim / 2], cache, context): rotates
        queries and keys in place by their positions, then writes keys and values to the cache.
    attend(qkv [T, width], out [T, heads * head_dim], cache, context): causal attention of each
        row's query over the cached keys of its sequence at positions <= its own, scaled by
        1 / sqrt(head_dim).
    silu_mul(gate_up [T, 2 * inner], out [T, inner]): silu(gate) * up.
    batch_invariant: whether each row's result is bit for bit the same in whatever batch.
    """

    name: str
    batch_invariant: bool
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor], None]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, torch.Tensor], None]
    store_kv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LayerCache, ForwardContext], None]
    attend: Callable[[torch.Tensor, torch.Tensor, LayerCache, ForwardContext], None]
    silu_mul: Callable[[torch.Tensor, torch.Tensor], None]


def load_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels for `dtype` on `device`: numba for float32 on a CPU, else plain torch."""
    if device.type == "cpu" and dtype == torch.float32:
        from workbench.kernels.cpu import kernels  # noqa: PLC0415 - compiles: only where it runs
    else:
        from workbench.kernels.reference import kernels  # noqa: PLC0415
    return kernels()
