"""What the Triton kernels take, and the words in which they refuse the rest."""

from __future__ import annotations

import torch
import triton

from workbench.errors import ConfigError
from workbench.kernels import LayerCache
from workbench.kernels.triton import rows
from workbench.kernels.triton.tuning import Tuning, chosen

INTERPRETED = not isinstance(rows.rms_norm, triton.JITFunction)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = range(16, 129, 8)
OLDEST = (8, 0)  # compute capability: tensor cores that take bfloat16


def require_runs(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError unless kernels of this type run on this device."""
    if dtype not in DTYPES:
        allowed = ", ".join(str(each) for each in DTYPES)
        raise ConfigError(f"Triton kernels of {dtype}; they take {allowed}.")
    if INTERPRETED and dtype == torch.bfloat16:
        raise ConfigError(
            "Triton's interpreter multiplies torch.bfloat16 wrongly; under TRITON_INTERPRET=1 "
            "take torch.float32 or torch.float16."
        )
    if not INTERPRETED and device.type != "cuda":
        raise ConfigError(
            f"Triton kernels on {device}; they run on a CUDA device, or anywhere, slowly, with "
            "TRITON_INTERPRET=1 set before triton is first imported."
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise ConfigError(
            f"Triton kernels on a GPU of compute capability {found}; they need 8.0 (Ampere) or "
            "later."
        )


def require_blocks(size: int, head_dim: int, dtype: torch.dtype, batch_invariant: bool) -> None:
    """Raises ConfigError for blocks that the table's spans are not made of."""
    require_block_size(size, chosen(head_dim, dtype.itemsize, batch_invariant))


def require_takes(cache: LayerCache, dtype: torch.dtype, tuning: Tuning) -> None:
    """Raises ConfigError for a cache that the kernels cannot read."""
    if cache.data.dtype != dtype:
        raise ConfigError(f"Kernels of {dtype} over a cache of {cache.data.dtype}; make them one.")
    require_head_dim(cache.head_dim)
    require_block_size(cache.block_size, tuning)


def require_block_size(size: int, tuning: Tuning) -> None:
    """Raises ConfigError for blocks that spans are not made of."""
    if size < 1 or size & (size - 1) or size > tuning.span:
        raise ConfigError(
            f"block_size={size}; the Triton kernels take powers of two up to {tuning.span}."
        )


def require_head_dim(head_dim: int) -> None:
    """Raises ConfigError for heads that no tile has room for."""
    if head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"head_dim={head_dim}; the Triton kernels take multiples of {HEAD_DIMS.step} "
            f"from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}."
        )
