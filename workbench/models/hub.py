"""A model from the Hugging Face hub: whether its cache has it whole, and why it did not come.

The hub's library is slow to import, so that is done when a hub model is asked for. What it does not
do: say which names are hub models (folders.py).
"""

from __future__ import annotations

import errno
import json
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

from workbench.errors import ModelError

CONFIG_FILES = ("config.json", "tokenizer*", "generation_config.json", "*.jinja")
INDEX = "model.safetensors.index.json"
WEIGHT_FILES = ("*.safetensors", INDEX)

# What a network's OSErrors say; all other numbers are of files.
_NETWORK = frozenset(
    {
        errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT,
        errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.EHOSTUNREACH, errno.EHOSTDOWN,
        errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENOTCONN,
    }
)  # fmt: skip


def in_cache(hub_id: str, files: tuple[str, ...]) -> Path | None:
    """A snapshot in the hub's cache that is complete; the network is not asked."""
    from huggingface_hub import constants  # noqa: PLC0415

    try:
        if not (Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}").is_dir():
            return None
        from huggingface_hub import snapshot_download  # noqa: PLC0415  slower still

        folder = Path(snapshot_download(hub_id, allow_patterns=list(files), local_files_only=True))
        return folder if _complete(folder, files) else None
    except (OSError, ValueError):
        return None  # a download that was broken off, or a cache that cannot be read


def from_hub(hub_id: str, files: tuple[str, ...]) -> Path:
    """The folder of a model that is downloaded, or whose download goes on. Raises ModelError."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(files)))
    except Exception as error:  # whatever the hub's library, the network or the disk raised
        raise ModelError(_what_failed(hub_id, error)) from error


def _complete(folder: Path, files: tuple[str, ...]) -> bool:
    """Whether a cached snapshot has its config, and its weights where they are wanted."""
    wants_weights = any("safetensors" in pattern for pattern in files)
    return (folder / "config.json").is_file() and (not wants_weights or _has_weights(folder))


def _has_weights(folder: Path) -> bool:
    """Whether the single file is there, which is read where it is, or every shard of the index.

    Shards without an index, and an index without all of its shards, are a download broken off.
    """
    if (folder / "model.safetensors").is_file():
        return True
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        shards = {str(file) for file in index["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(shards) and all((folder / shard).is_file() for shard in shards)


def _what_failed(hub_id: str, error: Exception) -> str:
    """Why a model did not come from the hub, and what to do."""
    from huggingface_hub import constants  # noqa: PLC0415
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError  # noqa: PLC0415

    page, tokens = f"https://huggingface.co/{hub_id}", "https://huggingface.co/settings/tokens"
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, GatedRepoError):
        return (
            f"{hub_id} is gated: accept its licence at {page}, then set HF_TOKEN to a token of "
            f"that account ({tokens})."
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"The hub has no model {hub_id!r}, or it is private: then set HF_TOKEN to a token of "
            f"an account that may read it ({tokens})."
        )
    if _is_refusal(error):
        return (
            f"The hub refuses {hub_id} ({said}). Set HF_TOKEN to a token that is valid ({tokens}), "
            f"or to none for a public model; a gated one wants its licence accepted at {page}."
        )
    if _is_storage(error):
        return (
            f"{hub_id} cannot be stored at {constants.HF_HUB_CACHE} ({said}). Make room there, or "
            "set HF_HUB_CACHE to a folder that has some and can be written."
        )
    return (
        f"{hub_id} is not, or not whole, in the local cache and the hub cannot be reached "
        f"({said}). Give a local folder, or fetch it once where there is a network: "
        f"`hf download {hub_id}`."
    )


def _is_refusal(error: Exception) -> bool:
    """Whether the hub answered that this account, or its token, may not."""
    answers = (getattr(cause, "response", None) for cause in _causes(error))
    return any(getattr(answer, "status_code", None) in (401, 403) for answer in answers)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def _is_storage(error: Exception) -> bool:
    """Whether it is the disk that failed; the network's errors can be OSErrors as well.

    The hub's compiled downloader raises RuntimeErrors that only say "(os error 28)".
    """
    if isinstance(error, socket.gaierror | ssl.SSLError):  # with numbers of their own
        return False
    number = error.errno if isinstance(error, OSError) else None
    told = re.search(r"\(os error (\d+)\)", str(error))
    if number is None and told:
        number = int(told[1])
    return number is not None and number not in _NETWORK
