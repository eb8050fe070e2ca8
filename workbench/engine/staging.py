"""Plain arrays of a plan on the device: on a GPU through pinned memory, so that nobody waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def staged(array: NDArray[Any], dtype: type[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device: on a CPU the same memory where it may be, else a copy under way."""
    tensor = torch.from_numpy(np.require(array, dtype, ("C", "W")))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
