"""The GPU's engine benchmark runs through, with a small model, where there is no GPU too."""

from __future__ import annotations

import pytest
import torch

from workbench.bench import engine, reenact
from workbench.bench.gpu_engine import EngineBench, StepSizes
from workbench.bench.machine_ceiling import Ceiling
from workbench.bench.record import record
from workbench.errors import ConfigError

SMALL = StepSizes(batches=(1, 3), prompt=8, new=4, prefills=(16,))
CEILING = Ceiling(flops_per_s=1e12, bytes_per_s=1e9)


@pytest.fixture(scope="module")
def bench() -> EngineBench:
    return EngineBench("dummy:tiny-solver", "cpu", "float32", CEILING, SMALL, repeats=2)


def test_steps_are_held_against_their_memory_floor(bench: EngineBench) -> None:
    """Every row comes once, `transformers` beside it, shares of the ceilings given."""
    rows = {row["name"]: row for row in record("engine", bench.rows(), {})["rows"]}
    for batch in SMALL.batches:
        step, decode = rows[f"step_b{batch}"], rows[f"decode_b{batch}+invariant"]
        assert step["ceiling"] == pytest.approx(1e3 * bench.floor_s(batch))
        assert step["share_of_ceiling"] == pytest.approx(step["ceiling"] / step["value"])
        assert decode["peer"] == "transformers" and decode["ratio"] > 0
        assert rows[f"invariant_cost_b{batch}"]["repeats"] == 2
        assert 0 <= rows[f"bookkeeping_share_b{batch}"]["value"] <= 1
    ideal = 16 / (bench.spec.flops(16, 0) / CEILING.flops_per_s)
    assert rows["prefill_16"]["ceiling"] == pytest.approx(ideal)
    assert rows["memory_weights"]["value"] > rows["memory_other"]["value"] == 0


def test_the_floor_is_weights_and_contexts(bench: EngineBench) -> None:
    """What a step reads: every matrix once, keys and values of half grown contexts."""
    spec = bench.spec
    token = spec.kv_bytes_per_token(4)
    assert bench.floor_s(3) - bench.floor_s(1) == pytest.approx(2 * (8 + 2) * token / 1e9)
    read = spec.parameters() - (2 * spec.layers + 1) * spec.hidden
    read -= 0 if spec.tied else spec.vocab * spec.hidden
    assert bench.floor_s(1) == pytest.approx((4 * read + 10 * token) / 1e9, rel=0.05)


def test_without_a_gpu_it_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By name, with what to do instead; the record would say which type was used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"bench engine --device cuda measures a GPU.*--device"):
        next(engine.run("dummy:tiny-solver", device="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"device='cuda', and torch .* finds no CUDA device"):
        next(reenact.run(device="cuda"))
    assert engine.mode_of({"device": "cuda"})["dtype"] == "bfloat16"
    assert engine.mode_of({"device": "cpu"})["dtype"] == "float32"
