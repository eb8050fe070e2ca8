"""The benchmark of the GPU's kernels runs through, with tiny sizes, where there is no GPU too."""

from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")

from workbench.bench.kernels import KernelBench, Sizes, Work, require_gpu
from workbench.bench.record import record
from workbench.errors import ConfigError, OutOfMemory

SHAPE = {"heads": 2, "kv_heads": 1, "head_dim": 16, "hidden": 32, "side": 16}
SHAPE |= {"decodes": (2, 40), "decode_layers": 1, "prompts": (1, 20)}
TINY = Sizes(**SHAPE, siblings=(2, 256, 8), sibling_layers=1, read_bytes=1 << 12)


def count(work: Work, repeats: int) -> list[float]:
    """A timer that does the work once and says a millisecond each time."""
    work()
    return [1e-3] * repeats


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_every_row_is_measured() -> None:
    """All rows come, named once, with their amounts and ceilings."""
    rows = {row["name"]: row for row in record("kernels", made().rows(), {})["rows"]}
    assert rows["cascade_attention"]["peer"] == "plain_decode"
    assert {"product_2_rows+invariant", "product_20_rows+invariant"} <= rows.keys()
    decode, prefill = rows["decode_attention"], rows["prefill_attention"]
    assert decode["value"] == pytest.approx(2 * 40 * 2 * 16 * 4 / 1e9 / 1e-3)
    assert prefill["value"] == pytest.approx(4 * 2 * 16 * sum(range(1, 21)) / 1e12 / 1e-3)
    assert rows["read_bytes_per_s"]["value"] == pytest.approx((1 << 12) / 1e-3)
    assert 1e9 * decode["ceiling"] == pytest.approx((1 << 12) / 1e-3)


def made() -> KernelBench:
    return KernelBench(torch.device("cpu"), torch.float32, TINY, count, repeats=2)


def test_siblings_share_the_first_blocks() -> None:
    """The shared prefix lies in the same blocks, and only that."""
    tables = made().step([(50, 1)] * 3, shared=32).context.block_offsets
    assert (tables[:, :2] == tables[0, :2]).all()
    assert len(set(tables[:, 2:].reshape(-1).tolist())) == tables[:, 2:].size


def test_a_machine_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA device, or too little of its memory: by name, with the numbers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        require_gpu(1)
    memory = Mock(return_value=(5_000, 9_000))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    with pytest.raises(OutOfMemory, match=r"needs 6,000 bytes.*5,000 of 9,000 are free"):
        require_gpu(6_000)
    assert require_gpu(5_000, "engine", "cuda:1") == torch.device("cuda:1")
    asked = [str(call.args[0]) for call in memory.call_args_list]
    assert asked == ["cuda", "cuda:1"], "the one that was named, not the first"
    with pytest.raises(ConfigError, match=r"device='cuda:2'.*finds 2 CUDA devices"):
        require_gpu(5_000, "engine", "cuda:2")
