"""Short names of models, and where each is found. A plain table: no network, no torch."""

from __future__ import annotations

from pathlib import Path

from workbench.errors import ModelError, nearest

EMBEDDED = Path(__file__).parent / "embedded"

# Short name -> hub id, or a folder inside the package.
REGISTRY: dict[str, str | Path] = {
    "tiny-solver": EMBEDDED / "tiny-solver",
    "tiny-prm": EMBEDDED / "tiny-prm",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.1-8b-prm": "RLHFlow/Llama3.1-8B-PRM-Deepseek-Data",
}


def resolve(name: str) -> str | Path:
    """A local folder (Path) or a hub id (text) for a short name, a path or a hub id.

    Raises ModelError when it is none of them, naming the nearest short name.
    """
    if name in REGISTRY:
        return REGISTRY[name]
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return name
    raise ModelError(
        f"There is no model {name!r}: no folder of that name, no short name."
        f"{nearest(name, list(REGISTRY))} Short names: {', '.join(REGISTRY)}; a hub id is "
        "'owner/name'; 'dummy:NAME' takes random weights."
    )
