"""What a run depends on is told apart by content: folders, .gguf files, sizes in the package."""

from __future__ import annotations

from pathlib import Path

from tests.models.gguf_making import random_tensors, write_gguf
from workbench.experiments.identity import model_fingerprint


def test_a_gguf_file_is_told_apart_by_its_content(tmp_path: Path) -> None:
    one, two = (
        write_gguf(tmp_path / f"{name}.gguf", random_tensors(), about={"general.name": name})
        for name in ("one", "two")
    )
    other = tmp_path / "there" / one.name
    other.parent.mkdir()
    other.write_bytes(one.read_bytes())
    assert model_fingerprint(str(one)) == model_fingerprint(str(other))
    assert model_fingerprint(str(one)) != model_fingerprint(str(two))


def test_dummies_of_known_sizes_have_fingerprints_without_a_network() -> None:
    names = ("llama-3.2-1b", "llama-3.1-8b-prm", "qwen2.5-1.5b-instruct")
    found = [model_fingerprint(f"dummy:{name}") for name in names]
    assert len(set(found)) == len(names)
    assert all(text.startswith("dummy-") for text in found)
