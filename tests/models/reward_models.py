"""Random reward models as published ones are stored: `transformers`' base and a head beside it."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.models.test_parity import peer_model

HEADS = {"Qwen2ForProcessRewardModel": "score", "Qwen2ForPrmModel": "v_head.summary"}
Judge = Callable[[list[int]], torch.Tensor]  # token ids -> [positions, outputs]


def reward_model(folder: Path, architecture: str, **shape: object) -> Judge:
    """Save a model of this architecture in `folder`; returns how `transformers` judges tokens."""
    shape = {"num_key_value_heads": 2, **shape}
    if architecture.endswith("ForCausalLM"):
        peer = peer_model(folder, architecture.removesuffix("ForCausalLM"), **shape)
        return torch.inference_mode()(lambda ids: peer(torch.tensor([ids])).logits[0])
    peer = peer_model(folder, "Qwen2", tie_word_embeddings=False, **shape)
    head = _head(peer.config.hidden_size, architecture)
    _store(folder, architecture, head)
    return torch.inference_mode()(
        lambda ids: head(peer.model(torch.tensor([ids])).last_hidden_state[0])
    )


def _head(hidden: int, architecture: str) -> torch.nn.Module:
    if architecture == "Qwen2ForPrmModel":
        return torch.nn.Linear(hidden, 1)
    layers = torch.nn.Linear(hidden, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 2)
    return torch.nn.Sequential(*layers)


def _store(folder: Path, architecture: str, head: torch.nn.Module) -> None:
    """Beside the base's tensors the head's; the unused lm_head stays, as in published files."""
    file = folder / "model.safetensors"
    own = {f"{HEADS[architecture]}.{part}": weight for part, weight in head.state_dict().items()}
    save_file(load_file(file) | own, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
