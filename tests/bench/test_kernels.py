"""The benchmark of the GPU's kernels runs through, with tiny sizes, where there is no GPU too."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")

from workbench.bench.ceilings import CeilingSizes, Work, require_gpu
from workbench.bench.kernels import KernelBench, Shape, Sizes, timed_step
from workbench.bench.record import record
from workbench.errors import ConfigError, OutOfMemory

TINY = Sizes(
    shape=Shape(heads=2, kv_heads=1, head_dim=16, block_size=16),
    decodes=(2, 40),
    decode_layers=1,
    prompts=(1, 20),
    siblings=(2, 256, 8),
    sibling_layers=1,
    hidden=32,
    vocabulary=64,
    ceiling=CeilingSizes(read_bytes=1 << 12, side=16),
)


def count(work: Work, repeats: int) -> list[float]:
    """A timer that does the work once and says a millisecond each time."""
    work()
    return [1e-3] * repeats


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_every_row_is_measured_and_right() -> None:
    """All rows come, named once, with their ceilings; errors are those of rounding."""
    bench = KernelBench(torch.device("cpu"), torch.float32, TINY, count, repeats=2)
    rows = {row["name"]: row for row in record("kernels", bench.rows(), {})["rows"]}
    kernels = {"decode_attention", "prefill_attention", "cascade_attention"}
    assert {"store_kv", "rms_norm", "selected_logits", "read_ceiling", *kernels} <= rows.keys()
    assert all(rows[f"{name}_error"]["value"] < 1e-5 for name in kernels)
    assert rows["cascade_attention"]["peer"] == "plain_decode"
    assert rows["decode_attention+invariant"]["peer"] == "fast_tiles"
    assert {"product_2_rows+invariant", "product_20_rows+invariant"} <= rows.keys()
    assert rows["decode_attention"]["value"] == pytest.approx(2 * 40 * 2 * 16 * 4 / 1e9 / 1e-3)
    ceiling = rows["read_ceiling"]["value"]
    assert rows["decode_attention"]["ceiling"] == ceiling == pytest.approx((1 << 12) / 1e-3 / 1e9)


def test_work_is_counted_as_it_is_done() -> None:
    """Operations of the causal half, keys and values of every sequence."""
    step = timed_step(TINY.shape, [(3, 2), (0, 1)], torch.device("cpu"), torch.float32)
    assert step.flops == 4 * 2 * 16 * (4 + 5 + 1)
    assert step.kv_bytes == (5 + 1) * 2 * 16 * 4


def test_siblings_share_the_first_blocks() -> None:
    """The shared prefix lies in the same blocks, and only that."""
    step = timed_step(TINY.shape, [(50, 1)] * 3, torch.device("cpu"), torch.float32, shared=32)
    tables = step.context.block_offsets
    assert (tables[:, :2] == tables[0, :2]).all()
    assert len(set(tables[:, 2:].reshape(-1).tolist())) == tables[:, 2:].size


def test_a_machine_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA device, or too little of its memory: by name, with the numbers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        require_gpu(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5_000, 9_000))
    with pytest.raises(OutOfMemory, match=r"needs 6,000 bytes.*5,000 of 9,000 are free"):
        require_gpu(6_000)
