"""A whole model over the Triton kernels says what it says over the CPU's, step by step."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")

from workbench import Engine, SamplingParams
from workbench.kernels.triton.kernels import INTERPRETED, TritonKernels

PROMPTS = ["Solve: 17 + 25 = 3", "7"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here, for another device")
def test_an_engine_samples_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, then decodes of a changing batch, recorded ones too; greedy."""

    def engine() -> Engine:
        return Engine("tiny-solver", num_blocks=32, max_num_batched_tokens=16, max_num_seqs=4,
                      max_model_len=64, batch_invariant=False)  # fmt: skip

    expected = [out.token_ids for out in engine().generate(PROMPTS, GREEDY)]

    def interpreted(device: torch.device, dtype: torch.dtype) -> TritonKernels:
        return TritonKernels(device, dtype)

    monkeypatch.setattr("workbench.models.building.load_kernels", interpreted)
    ours = engine()
    assert [out.token_ids for out in ours.generate(PROMPTS, GREEDY)] == expected
