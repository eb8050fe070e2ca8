"""Re-enactments are set against the roofline of the device they ran on."""

from __future__ import annotations

import pytest
import torch

from workbench.bench import reenact
from workbench.bench.ceilings import Ceiling
from workbench.errors import ConfigError
from workbench.replay.devices import PRESETS

GIB = 1 << 30


@pytest.mark.parametrize(
    ("gpu", "gib", "preset"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", 23.6, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6, None),
        ("NVIDIA L4", 22.0, None),
        ("NVIDIA GH200 480GB", 95.0, None),
        ("NVIDIA H100 PCIe", 79.1, None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.5, None),
    ],
)
def test_a_preset_is_taken_by_its_whole_name_and_memory(
    gpu: str, gib: float, preset: str | None
) -> None:
    """Another GPU, a slower build or a slice of one is none of them."""
    assert reenact.preset_of(gpu, int(gib * GIB)) == (PRESETS[preset] if preset else None)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is foretold."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"device='cuda', and torch .* finds no CUDA device"):
        next(reenact.run(device="cuda"))


def test_an_unknown_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own ceilings and memory, not this CPU's."""
    measured: list[str] = []

    def ceiling(place: torch.device, _: torch.dtype) -> Ceiling:
        measured.append(str(place))
        return Ceiling(3e14, 1e12)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA B999")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * GIB, 64 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(reenact, "measure_gpu_ceiling", ceiling)
    entered: list[str] = []

    class Entered:
        def __init__(self, place: torch.device) -> None:
            entered.append(str(place))

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Entered)
    found = reenact.known_device("cuda:1")
    assert (found.name, found.flops_per_s, found.bytes_per_s) == ("NVIDIA B999", 3e14, 1e12)
    assert (found.memory_bytes, found.source) == (64 * GIB, "measured")
    assert measured == entered == ["cuda:1"]
