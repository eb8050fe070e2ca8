"""Random reward models as published ones are stored: `transformers`' base and a head beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.test_parity import peer_model

HEADS = {
    "Qwen2ForProcessRewardModel": ("score", (torch.nn.Linear, torch.nn.ReLU, torch.nn.Linear), 2),
    "Qwen2ForPrmModel": ("v_head.summary", (torch.nn.Linear,), 1),
}
Judge = Callable[[list[int]], torch.Tensor]  # token ids -> [positions, outputs]


def reward_model(folder: Path, architecture: str, **shape: object) -> Judge:
    """Save a model of this architecture in `folder`; answers how `transformers` judges tokens."""
    shape = {"num_key_value_heads": 2, **shape}
    if architecture.endswith("ForCausalLM"):
        peer = peer_model(folder, architecture.removesuffix("ForCausalLM"), **shape)
        return lambda ids: _run(peer, ids).logits[0]
    peer = peer_model(folder, "Qwen2", tie_word_embeddings=False, **shape)
    head = _head(peer.config.hidden_size, architecture)
    _store(folder, architecture, head)
    return lambda ids: _through(head, _run(peer.model, ids).last_hidden_state[0])


def _run(model: torch.nn.Module, ids: list[int]) -> transformers.utils.ModelOutput:
    with torch.inference_mode():
        return model(torch.tensor([ids]))


def _through(head: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return head(hidden)


def _head(hidden: int, architecture: str) -> torch.nn.Module:
    _, kinds, outputs = HEADS[architecture]
    layers = [
        kind(hidden, outputs if k == len(kinds) - 1 else hidden)
        if kind is torch.nn.Linear
        else kind()
        for k, kind in enumerate(kinds)
    ]
    return layers[0] if len(layers) == 1 else torch.nn.Sequential(*layers)


def _store(folder: Path, architecture: str, head: torch.nn.Module) -> None:
    """Beside the base's tensors the head's; the unused lm_head stays, as in published files."""
    name = HEADS[architecture][0]
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"{name}.{part}": weights for part, weights in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
