"""A GPU's memory is divided as it is measured there, by what the driver and torch tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from workbench.config import EngineConfig
from workbench.engine import device_memory
from workbench.engine.memory import StepLimits, plan_memory, total_bytes
from workbench.errors import ConfigError, OutOfMemory
from workbench.models.loading import load_model

GPU = torch.device("cuda")
GIB = 1 << 30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, of which torch holds 5, 2 of them idle, and others 3."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (72 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 3 * GIB)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return f"dummy:{tmp_path}"


def test_other_is_what_is_not_torch_s(gpu: None) -> None:
    """And torch's idle memory can be had again."""
    assert device_memory.beside_torch(GPU) == 3 * GIB
    assert device_memory.free_of(GPU) == 74 * GIB
    assert total_bytes(0.5, GPU) == 40 * GIB
    cpu = torch.device("cpu")
    assert (device_memory.beside_torch(cpu), device_memory.free_of(cpu)) == (0, None)


def test_a_step_s_peak_is_torch_s_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above what was held before; the device is waited for on both sides."""
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: log.append("waited"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: log.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: GIB + (3 << 16) - 7)
    with device_memory.peak_on(GPU) as peak:
        log.append("step")
    assert peak.bytes == 3 << 16
    assert log == ["waited", "reset", "step", "waited"]


def test_parts_add_up_and_too_much_is_refused(
    gpu: None, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`memory` is the GPU's, and pays for what lies beside torch's; the message has the numbers."""
    model, limits = load_model(folder), StepLimits(64, 4, 32)
    monkeypatch.setattr("workbench.engine.memory.measure_activations", lambda *_: 1 << 20)
    model.device = GPU
    profile = plan_memory(model, limits, 16, memory="4GiB")
    assert profile.other == 3 * GIB
    assert profile.total == profile.weights + profile.activations + profile.other + profile.kv
    with pytest.raises(OutOfMemory, match=r"cuda has 80\.0 GiB, of which 74\.0 GiB are free"):
        plan_memory(model, limits, 16, kv_memory="75GiB")
    with pytest.raises(OutOfMemory, match=r"activations 1\.0 MiB, other 3\.0 GiB"):
        plan_memory(model, limits, 16, memory="3GiB")


def test_weights_larger_than_the_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any is drawn or read."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GIB, 24 * GIB))
    with pytest.raises(OutOfMemory, match=r"bfloat16 on cuda.*10\.0 GiB of memory are available"):
        load_model("dummy:llama-3.1-8b-prm", device="cuda")


@pytest.mark.parametrize(("name", "count"), [("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_that_is_not_there(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many are is said."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    found = "1 CUDA device here" if count else "no CUDA device here"
    with pytest.raises(ConfigError, match=f"device='{name}'.*finds {found}"):
        load_model("dummy:tiny-solver", device=name)


@pytest.mark.parametrize("name", ["GPU", "cuda:", "cuda:x", "mps"])
def test_other_names_of_devices_are_refused(name: str) -> None:
    """What is allowed is listed."""
    with pytest.raises(ConfigError, match=r"EngineConfig\.device is .*'cuda:1'"):
        EngineConfig(device=name)
