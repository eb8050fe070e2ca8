"""A download that broke off is taken up again, and what stopped one is told apart."""

from __future__ import annotations

import errno
import json
import socket
import ssl
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from workbench.errors import ModelError
from workbench.models.hub import CONFIG_FILES, WEIGHT_FILES, from_hub, in_cache

FILES = CONFIG_FILES + WEIGHT_FILES
SHARDS = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
INDEX = json.dumps({"weight_map": {"a.weight": SHARDS[0], "b.weight": SHARDS[1]}})


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A snapshot in a cache as the hub's library lays it out, its config and first shard there."""
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
    """Whether or not the index was there before; the config alone is found all the while."""
    assert in_cache("owner/name", FILES) is None
    index = snapshot / "model.safetensors.index.json"
    index.write_text(INDEX)
    assert in_cache("owner/name", FILES) is None
    assert in_cache("owner/name", CONFIG_FILES) == snapshot
    (snapshot / SHARDS[1]).touch()
    assert in_cache("owner/name", FILES) == snapshot
    index.unlink()
    assert in_cache("owner/name", FILES) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_that_cannot_be_read_is_not_complete(snapshot: Path, text: str) -> None:
    (snapshot / SHARDS[1]).touch()
    (snapshot / "model.safetensors.index.json").write_text(text)
    assert in_cache("owner/name", FILES) is None


def test_a_single_file_is_complete_by_itself(snapshot: Path) -> None:
    """It is what would be read, whatever an index beside it says."""
    (snapshot / "model.safetensors").touch()
    (snapshot / "model.safetensors.index.json").write_text(INDEX)
    assert in_cache("owner/name", FILES) == snapshot


def answered(status: int) -> HfHubHTTPError:
    request = httpx.Request("GET", "https://huggingface.co/owner/name")
    response = httpx.Response(status, request=request)
    return HfHubHTTPError(f"{status} Client Error.", response=response)


def looked_up(cause: Exception) -> LocalEntryNotFoundError:
    """As the hub's library wraps what stopped it before the first file."""
    error = LocalEntryNotFoundError(f"Got: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


STORED = r"owner/name cannot be stored at {cache} .*Make room there, or set HF_HUB_CACHE"
REFUSED = r"The hub refuses owner/name .*Set HF_TOKEN .*settings/tokens.*licence accepted at"
UNREACHED = r"the hub cannot be reached .*hf download owner/name"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), STORED),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), STORED),
        (PermissionError(errno.EACCES, "Permission denied"), STORED),
        (OSError(errno.EROFS, "Read-only file system"), STORED),
        (RuntimeError("Data processing error: I/O error (os error 28)"), STORED),
        (answered(401), REFUSED),
        (answered(403), REFUSED),
        (looked_up(answered(403)), REFUSED),
        (answered(500), UNREACHED),
        (looked_up(answered(503)), UNREACHED),
        (looked_up(httpx.ConnectError("no route")), UNREACHED),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), UNREACHED),
        (TimeoutError("timed out"), UNREACHED),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), UNREACHED),
        (socket.gaierror(-2, "Name or service not known"), UNREACHED),
        (ssl.SSLError(1, "CERTIFICATE_VERIFY_FAILED"), UNREACHED),
        (RuntimeError("request failed: Connection reset by peer (os error 104)"), UNREACHED),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_stopped_a_download_is_named(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk, the account or the network: each has another remedy."""

    def snapshot_download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match=message.format(cache=tmp_path)):
        from_hub("owner/name", FILES)
