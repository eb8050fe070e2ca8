"""What is worth a kernel: products with packed weights, attention over blocks, norms.

`load_kernels` chooses one implementation for a device, once; all are `Kernels`, which is plain
torch and says what is meant. `cpu` is numba; `triton` is for GPUs. Kernels never see requests or
blocks as objects, only a `ForwardContext`, built once a step and passed down: positions and int64
element offsets.
"""

from __future__ import annotations

import warnings

import torch

from workbench.errors import ConfigError
from workbench.kernels.quantised import Quantised
from workbench.kernels.reference import Angles, ForwardContext, Kernels, LayerCache, Part

__all__ = [
    "Angles",
    "ForwardContext",
    "Kernels",
    "LayerCache",
    "Part",
    "Quantised",
    "load_kernels",
]


def load_kernels(
    device: torch.device,
    dtype: torch.dtype,
    threads: int | None = None,
    *,
    batch_invariant: bool = True,
    head_dim: int | None = None,
    block_size: int | None = None,
) -> Kernels:
    """The kernels for `dtype` on `device`: numba for float32 on a CPU, Triton for a GPU.

    ConfigError, with the cause, where these do not serve the type, the GPU, a head size or a block
    size: in plain torch a row's bits depend on its batch. With batch_invariant=False plain torch
    computes there, and a warning says why on a GPU; elsewhere it takes the fastest where kernels
    differ, as they do on a GPU. threads: of the CPU kernels; as many as torch has if not given.
    """
    if device.type == "cpu" and dtype == torch.float32:
        from workbench.kernels.cpu import CpuKernels  # noqa: PLC0415 - compiles: only where it runs

        return CpuKernels(threads or torch.get_num_threads())
    cause = f"Plain torch alone computes {dtype} on a CPU; kernels there take float32."
    if device.type == "cuda":
        try:
            from workbench.kernels import triton  # noqa: PLC0415 - an extra

            triton.require_served(device, dtype, head_dim, block_size)
            return triton.TritonKernels(device, dtype, batch_invariant=batch_invariant)
        except ConfigError as problem:
            cause = str(problem)
    if batch_invariant:
        raise ConfigError(
            f"{cause} In plain torch a row's bits depend on its batch: with batch_invariant=False "
            "it computes instead."
        )
    if device.type == "cuda":
        warnings.warn(f"{cause} Plain torch computes instead.", RuntimeWarning, stacklevel=2)
    return Kernels(device, dtype)
