"""The GPU's engine benchmark runs through, with a small model, where there is no GPU too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from workbench.bench import engine, gpu_engine, reenact
from workbench.bench.contenders import Prompts
from workbench.bench.gpu_contenders import TransformersOnDevice
from workbench.bench.gpu_engine import EngineBench, StepSizes
from workbench.bench.gpu_timing import require_gpu
from workbench.bench.machine_ceiling import Ceiling
from workbench.bench.peer_process import PeerError
from workbench.bench.record import record
from workbench.errors import ConfigError
from workbench.models.registry import CONFIGS, read_spec

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


@pytest.mark.parametrize("folder", sorted(CONFIGS.iterdir()), ids=lambda folder: folder.name)
def test_transformers_reads_every_config_of_the_package(folder: Path) -> None:
    """Else a model of true size would have no peer on a GPU."""
    transformers = pytest.importorskip("transformers")
    found, spec = transformers.AutoConfig.from_pretrained(folder), read_spec(folder)
    assert (found.num_hidden_layers, found.hidden_size) == (spec.layers, spec.hidden)
    assert found.rope_parameters["rope_theta"] == spec.rope_theta


def test_a_peer_that_cannot_be_made_is_told_with_its_reason(tmp_path: Path) -> None:
    """Here a config that does not say which family it is of."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(PeerError, match=r"ValueError: .*model_type"):
        TransformersOnDevice(str(tmp_path), torch.device("cpu"), "float32")


def test_rows_say_why_they_have_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a peer that fails while it is measured, too: our rows come all the same."""

    class Failing:
        def __init__(self, *_: object) -> None: ...

        def decode(self, prompts: Prompts, new_tokens: int) -> float:
            raise PeerError("OutOfMemoryError: 3 GiB")

    monkeypatch.setattr(gpu_engine, "TransformersOnDevice", Failing)
    short = StepSizes(batches=(1,), prompt=4, new=2, prefills=(8,))
    made = EngineBench("dummy:tiny-solver", "cpu", "float32", CEILING, short, repeats=1)
    with pytest.warns(UserWarning, match="no transformers: OutOfMemoryError: 3 GiB"):
        rows = {row.name: row for row in made.rows()}
    for name in ("decode_b1", "decode_b1+invariant", "prefill_8"):
        assert rows[name].peer == "no transformers: OutOfMemoryError: 3 GiB"
        assert (rows[name].peer_value, rows[name].ratio) == (None, None)


def test_the_gpu_that_was_named_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the first; one that is not there is refused."""
    asked: list[str] = []

    def memory(device: torch.device) -> tuple[int, int]:
        asked.append(str(device))
        return 10, 20

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    assert require_gpu(5, "engine", "cuda:1") == torch.device("cuda:1")
    assert asked == ["cuda:1"]
    with pytest.raises(ConfigError, match=r"device='cuda:2'.*finds 2 CUDA devices"):
        require_gpu(5, "engine", "cuda:2")
