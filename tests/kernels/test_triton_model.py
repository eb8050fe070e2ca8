"""A whole model over the Triton kernels says what it says over the CPU's, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")

from workbench import Engine, SamplingParams
from workbench.errors import ConfigError
from workbench.kernels.triton.kernels import TritonKernels
from workbench.kernels.triton.taken import INTERPRETED

PROMPTS = ["Solve: 17 + 25 = 3", "7", "41 + 1"]  # three rows are launched as four
GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


def interpreted(device: torch.device, dtype: torch.dtype, **settings: Any) -> TritonKernels:
    return TritonKernels(device, dtype, **settings)


def engine(model: str, **settings: Any) -> Engine:
    return Engine(model, num_blocks=32, max_num_batched_tokens=16, max_num_seqs=4,
                  max_model_len=64, **settings)  # fmt: skip


def test_an_engine_samples_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, then decodes of a changing batch, recorded ones too; greedy and drawn."""
    params = [GREEDY, SamplingParams(temperature=0.8, max_tokens=4, seed=5), GREEDY]
    expected = [out.token_ids for out in engine("tiny-solver").generate(PROMPTS, params)]
    monkeypatch.setattr("workbench.models.building.load_kernels", interpreted)
    ours = engine("tiny-solver", batch_invariant=False)
    copied: list[int] = []
    monkeypatch.setattr("workbench.engine.executor.sample", lambda *_: copied.append(1))
    assert [out.token_ids for out in ours.generate(PROMPTS, params)] == expected
    assert not copied  # no logits left the device


def test_a_reward_model_computes_the_columns_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the kernel that reads them where they lie: no matrix of columns is packed."""
    tokens, positions, columns = list(range(5, 25)), [3, 19], [7, 2]
    expected = engine("tiny-prm").score(tokens, positions, columns).logits
    monkeypatch.setattr("workbench.models.building.load_kernels", interpreted)
    ours = engine("tiny-prm", batch_invariant=True)
    found = ours.score(tokens, positions, columns).logits
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert not ours.executor._columns


def test_blocks_that_kernels_cannot_read_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the engine is made, not when its first step fails."""
    monkeypatch.setattr("workbench.models.building.load_kernels", interpreted)
    with pytest.raises(ConfigError, match="block_size=24; the Triton kernels take powers of two"):
        engine("tiny-solver", block_size=24)
