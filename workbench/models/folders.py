"""Where a model's files lie on this disk, and its shapes: what can be known of a model without
torch.

A short name, a folder, a hub id, or `dummy:` and one of them. The hub is asked only when no local
copy exists. What it does not do: read weights (loading.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from workbench.errors import ModelError
from workbench.models.names import resolve
from workbench.models.spec import ModelSpec

CONFIG_FILES = ("config.json", "tokenizer*", "generation_config.json")
WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")
DUMMY = "dummy:"


def model_spec(name: str) -> ModelSpec:
    """The shapes of a model by any of its names; only its config is read."""
    return read_spec(find_folder(name.removeprefix(DUMMY), weights=False))


def find_folder(name: str, *, weights: bool = True) -> Path:
    """The local folder of a model, brought from the hub when it is on no disk here.

    weights=False asks for the config and the tokenizer only. Raises ModelError.
    """
    where = resolve(name)
    if isinstance(where, str):
        return _from_hub(where, CONFIG_FILES + (WEIGHT_FILES if weights else ()))
    if not (where / "config.json").is_file():
        raise ModelError(
            f"{where} has no config.json; a model folder holds config.json and *.safetensors."
        )
    return where


def read_spec(folder: Path) -> ModelSpec:
    """The ModelSpec of a folder's config.json."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from error
    return ModelSpec.from_config(config, str(path))


def _from_hub(hub_id: str, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415  slow; hub models only
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=list(files), local_files_only=True))
        if _complete(folder, files):
            return folder
    except (LocalEntryNotFoundError, ValueError):
        pass  # not in the cache
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(files)))
    except GatedRepoError as error:
        raise ModelError(
            f"{hub_id} is gated: accept its licence at https://huggingface.co/{hub_id}, then set "
            "HF_TOKEN to a token of that account (https://huggingface.co/settings/tokens)."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"The hub has no model {hub_id!r} (or it is private: set HF_TOKEN)."
        ) from error
    except Exception as error:  # whatever the network raised: no route, no name, time-out
        raise ModelError(
            f"{hub_id} is not in the local cache and the hub cannot be reached "
            f"({type(error).__name__}: {error}). Give a local folder, or fetch it once where there "
            f"is a network: `hf download {hub_id}`."
        ) from error


def _complete(folder: Path, files: tuple[str, ...]) -> bool:
    """Whether a cached snapshot has its config, and its weights where they are wanted."""
    wants_weights = any("safetensors" in pattern for pattern in files)
    has_weights = any(folder.glob("*.safetensors"))
    return (folder / "config.json").is_file() and (has_weights or not wants_weights)
