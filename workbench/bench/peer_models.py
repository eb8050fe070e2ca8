"""The files that peers read: a Hugging Face folder, and the GGUF file where the model is one.

A model that is a .gguf file is written once as a folder with the same values in float32, because
`transformers` and vLLM are to compute with what our engine computes with. What it does not do: run
a peer.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from workbench.models.gguf import GGUFFile, read_config
from workbench.models.loading import GGUFWeights
from workbench.models.registry import find_model


@dataclass(frozen=True, slots=True)
class PeerFiles:
    """One model as files. gguf is None for a model that is no GGUF file."""

    folder: Path
    gguf: Path | None


def peer_files(model: str, written: Path) -> PeerFiles:
    """The files of a model by name; a folder made of a .gguf file is kept under `written`."""
    where = find_model(model)
    if not where.is_file():
        return PeerFiles(where, None)
    return PeerFiles(_as_folder(where, written), where)


def _as_folder(file: Path, written: Path) -> Path:
    """config.json and model.safetensors in float32, named by the file's content, made once."""
    opened = GGUFFile(file)
    weights = GGUFWeights(opened)
    folder = written / f"{file.stem}-{weights.digest()[:12]}"
    if folder.is_dir():
        return folder
    partial = written / f".{folder.name}.{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {name: _float32(weights, name) for name in sorted(weights.names)}
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    kind = opened.metadata["general.architecture"]
    config = read_config(opened) | {"model_type": kind, "dtype": "float32"}
    (partial / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    partial.replace(folder)
    return folder


def _float32(weights: GGUFWeights, name: str) -> torch.Tensor:
    stored = weights.read(name)
    found = stored if isinstance(stored, torch.Tensor) else torch.from_numpy(stored.dequantise())
    return found.float().contiguous()
