"""Tokens of a step chosen where its logits are: what leaves the device is a number a row.

For kernels that `selects`, and rows that want no filter and no log probabilities; other steps'
logits are copied to the host and sampled there (sampling/sampler.py), whose rules these are.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.core import SamplingRows
from workbench.engine.staging import staged
from workbench.kernels import Kernels
from workbench.sampling.noise import uniform
from workbench.sampling.sampler import require_finite_rows


def is_plain(rows: SamplingRows, vocab: int) -> bool:
    """Whether a softmax at the row's temperature is all that every row asks for."""
    filtered = ((rows.top_k > 0) & (rows.top_k < vocab)) | (rows.top_p < 1) | (rows.min_p > 0)
    return not (filtered | (rows.logprobs >= 0)).any()


def chosen_tokens(kernels: Kernels, logits: torch.Tensor, rows: SamplingRows) -> NDArray[np.int64]:
    """Tokens of logits [R, vocab]; waits for them. Raises StepError as the sampler does."""
    noise = uniform(rows.seeds, rows.positions)
    settings = np.stack([rows.temperature, noise])
    temperature, drawn = staged(settings, np.float64, logits.device)
    found: NDArray[np.int64] = kernels.choose(logits, temperature, drawn).cpu().numpy()
    require_finite_rows(found[1] != 0, rows.rows)
    return found[0]
