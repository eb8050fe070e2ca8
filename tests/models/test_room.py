"""A model larger than memory is refused with the numbers, before its weights are read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from tests.models.gguf_making import random_tensors, write_gguf
from tests.models.test_loading import folder, shapes
from workbench.errors import OutOfMemory
from workbench.models.folders import held_bytes, open_source
from workbench.models.loading import load_model, open_weights

__all__ = ["folder"]  # the fixture


def refuse_reading(*_: object) -> None:
    raise AssertionError("weights were read")


def test_a_model_larger_than_memory_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real or dummy; the message holds what is needed, what is there and what is missing."""
    monkeypatch.setattr("workbench.models.room.available_memory", lambda: 20_000)
    monkeypatch.setattr("workbench.models.weights.FolderWeights.read", refuse_reading)
    for name in (str(folder), f"dummy:{folder}"):
        with pytest.raises(OutOfMemory, match=r"weights take .* KiB \(torch.float32, .*missing"):
            load_model(name)


def test_the_published_sizes_are_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thesis's PRM as a dummy, in float32 on a machine with 24 GiB: no download, no wait."""
    monkeypatch.setattr("workbench.models.room.available_memory", lambda: 24 * 2**30)
    with pytest.raises(OutOfMemory, match=r"take 30\.0 GiB .* 24\.0 GiB .* are available"):
        load_model("dummy:llama-3.1-8b-prm")


def test_quantised_weights_count_as_they_are_stored(folder: Path, tmp_path: Path) -> None:
    """Numbers are counted in the type they will have, whatever the file's."""
    numbers = sum(t.size for t in random_tensors().values())
    matrices = sum(t.size for t in random_tensors().values() if t.ndim > 1)
    for kind, expected in (
        (Kind.F16, 4 * numbers),
        (Kind.Q4_0, matrices // 32 * 18 + 4 * (numbers - matrices)),
    ):
        path = write_gguf(tmp_path / f"{kind.name}.gguf", random_tensors(), kind)
        assert open_weights(open_source(path)).held_bytes(4) == held_bytes(str(path), 4) == expected
        assert held_bytes(f"dummy:{path}", 4) == 4 * numbers
    assert open_weights(folder).held_bytes(2) == held_bytes(str(folder), 2)
    assert held_bytes(str(folder), 2) == 2 * sum(map(math.prod, shapes().values()))
