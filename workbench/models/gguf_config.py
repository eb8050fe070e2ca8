"""What a GGUF file says of its model, in the words of Hugging Face: config and tensor names.

So that ModelSpec.from_config stays the one place that decides what is supported. No torch. What it
does not do: read weights (gguf_weights.py) or the tokenizer (gguf_tokenizer.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.errors import ModelError
from workbench.models.gguf_file import GGUFFile

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}  # Mistral says llama
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's stretch of each rotation, folded into the config

_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hub_name(name: str) -> str:
    """What Hugging Face calls a tensor; a name that means nothing here stays as it is."""
    found = _LAYER.fullmatch(name)
    if found and found[2] in _PARTS:
        return f"model.layers.{found[1]}.{_PARTS[found[2]]}.{found[3]}"
    return _ENDS.get(name, name)


def read_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json that this model would have. ModelError names what the file lacks."""
    kind = file.metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        known = ", ".join(map(repr, ARCHITECTURES))
        raise ModelError(f"{file.path} says architecture {kind!r}; supported: {known}.")
    sizes = _sizes(file, kind)
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": _embedding_rows(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **sizes,
        "head_dim": _head_dim(file, kind, sizes),
        "rope_theta": float(file.metadata.get(f"{kind}.rope.freq_base", 10000.0)),
    }
    scaling = _rope_scaling(file, kind, config)
    return config if scaling is None else config | {"rope_scaling": scaling}


def _sizes(file: GGUFFile, kind: str) -> dict[str, Any]:
    keys = {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    }
    found = {name: file.metadata.get(f"{kind}.{key}") for name, key in keys.items()}
    for name, value in found.items():
        if not isinstance(value, int | float) or value <= 0:
            raise ModelError(
                f"{file.path} says {kind}.{keys[name]} = {value!r}; a number above 0 is needed "
                "(layers that differ in it are not supported)."
            )
    if file.metadata.get(f"{kind}.expert_count"):
        raise ModelError(f"{file.path} is a mixture of experts, which is not supported.")
    return found


def _embedding_rows(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} lacks the tensor 'token_embd.weight'.")
    return file.tensors["token_embd.weight"].shape[0]


def _head_dim(file: GGUFFile, kind: str, sizes: dict[str, Any]) -> int:
    """Columns of a head, all of which must be rotated."""
    own = sizes["hidden_size"] // sizes["num_attention_heads"]
    head_dim = int(file.metadata.get(f"{kind}.attention.key_length", own))
    for key in ("attention.value_length", "rope.dimension_count"):
        given = file.metadata.get(f"{kind}.{key}", head_dim)
        if given != head_dim:
            raise ModelError(
                f"{file.path} says {kind}.{key} = {given}; supported: the head's {head_dim} only."
            )
    return head_dim


def _rope_scaling(file: GGUFFile, kind: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """None, Llama 3's scaling, or one that ModelSpec will refuse by its name."""
    named = file.metadata.get(f"{kind}.rope.scaling.type", "none")
    if ROPE_FACTORS not in file.tensors:
        return None if named == "none" else {"rope_type": named}
    stored = file.tensors[ROPE_FACTORS]
    if (stored.kind, stored.shape) != ("F32", (config["head_dim"] // 2,)):
        raise ModelError(f"{file.path}: {ROPE_FACTORS} is {stored.kind} {list(stored.shape)}.")
    factors = file.data(ROPE_FACTORS).view(np.float32)
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_factors(scaling, config["rope_theta"], config["head_dim"])
    if not np.allclose(factors, expected, rtol=1e-5):
        raise ModelError(
            f"{file.path}: {ROPE_FACTORS} stretches rotations otherwise than Llama 3.1 to 3.3 do "
            "(low 1, high 4, original context 8192); supported: that one, or none."
        )
    return scaling


def _llama3_factors(scaling: dict[str, Any], theta: float, head_dim: int) -> Sequence[float]:
    """By what each rotation is slowed; see models.layers.rotary_frequencies."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for pair in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (pair / head_dim)
        turns = scaling["original_max_position_embeddings"] / wavelength
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / (kept + (1 - kept) / scaling["factor"]))
    return factors
