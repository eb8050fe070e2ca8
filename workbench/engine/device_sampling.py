"""Tokens of a step chosen where its logits are: what leaves the device is a number a row.

For kernels that `selects`. The sums of the device and of the host's sampler (sampling.py)
are taken in another order, so who draws a row depends on that row alone, whatever its batch: the
device, unless it wants a filter. Logits of rows with filters or log probabilities are copied to the
host, a row at a time.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.core import SamplingRows
from workbench.engine.sampling import Logprobs, require_finite_rows, sample, uniform
from workbench.engine.staging import staged
from workbench.kernels import Kernels


def chosen_tokens(
    kernels: Kernels, logits: torch.Tensor, rows: SamplingRows
) -> tuple[NDArray[np.int64], Logprobs]:
    """Tokens of logits [R, vocab], and log probabilities of rows that want them; waits for both.

    Raises StepError as the sampler does.
    """
    tokens = _on_device(kernels, logits, rows)
    found: list[dict[int, float] | None] = [None] * len(rows)
    for at in np.flatnonzero(_filtered(rows, logits.shape[1]) | (rows.logprobs >= 0)):
        row = slice(at, at + 1)
        tokens[at], found[at] = _on_host(logits[row], _part(rows, row), tokens[row])
    return tokens, tuple(found) if (rows.logprobs >= 0).any() else ()


def _filtered(rows: SamplingRows, vocab: int) -> NDArray[np.bool_]:
    """[R] Whether a row leaves tokens out."""
    some = (rows.top_k > 0) & (rows.top_k < vocab)
    return some | (rows.top_p < 1) | (rows.min_p > 0)


def _on_device(kernels: Kernels, logits: torch.Tensor, rows: SamplingRows) -> NDArray[np.int64]:
    """Every row's token as if it had no filter."""
    noise = uniform(rows.seeds, rows.positions)
    settings = np.stack([rows.temperature, noise])
    temperature, drawn = staged(settings, np.float64, logits.device)
    found: NDArray[np.int64] = kernels.choose(logits, temperature, drawn).cpu().numpy()
    require_finite_rows(found[1] != 0, rows.rows)
    return found[0]


def _on_host(
    logits: torch.Tensor, row: SamplingRows, token: NDArray[np.int64]
) -> tuple[np.int64, dict[int, float] | None]:
    """One row's token and log probabilities; token [1]: the device's, kept where none filters."""
    tokens, found = sample(logits.float().cpu().numpy(), row, lambda *_: token)
    return tokens[0], found[0] if found else None


def _part(rows: SamplingRows, which: slice) -> SamplingRows:
    return SamplingRows(**{field.name: getattr(rows, field.name)[which] for field in fields(rows)})
