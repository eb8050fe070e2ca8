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
from numpy.typing import NDArray

from workbench.errors import ModelError
from workbench.models.gguf_file import GGUFFile
from workbench.models.settings import Settings

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
_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}
# What stretches rotations without naming a scaling, and the values that change nothing.
_STRETCHES = {
    "rope.scale_linear": (0, 1),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.attn_factor": (1,),
}


def hub_name(name: str) -> str:
    """What Hugging Face calls a tensor; a name that means nothing here stays as it is."""
    found = _LAYER.fullmatch(name)
    if found and found[2] in _PARTS:
        return f"model.layers.{found[1]}.{_PARTS[found[2]]}.{found[3]}"
    return _ENDS.get(name, name)


def read_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json that this model would have. ModelError names what the file lacks."""
    said = file.settings
    kind = said.text("general.architecture")
    if kind not in ARCHITECTURES:
        known = ", ".join(map(repr, ARCHITECTURES))
        raise ModelError(f"{file.path} says architecture {kind!r}; supported: {known}.")
    if file.metadata.get(f"{kind}.expert_count"):
        raise ModelError(f"{file.path} is a mixture of experts, which is not supported.")
    sizes = {name: said.whole(f"{kind}.{key}") for name, key in _SIZES.items()}
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": _embedding_rows(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **sizes,
        "head_dim": _head_dim(said, kind, sizes),
        "rms_norm_eps": said.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": said.number(f"{kind}.rope.freq_base", 10000.0),
    }
    config |= _window(said, kind, config)
    return config | _rope_scaling(file, kind, config)


def _embedding_rows(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} lacks the tensor 'token_embd.weight'.")
    return file.tensors["token_embd.weight"].shape[0]


def _head_dim(said: Settings, kind: str, sizes: dict[str, int]) -> int:
    """Columns of a head, all of which must be rotated."""
    own = sizes["hidden_size"] // sizes["num_attention_heads"]
    head_dim = said.whole(f"{kind}.attention.key_length", own)
    for key in ("attention.value_length", "rope.dimension_count"):
        given = said.whole(f"{kind}.{key}", head_dim)
        if given != head_dim:
            raise ModelError(
                f"{said.where} says {kind}.{key} = {given}; supported: the head's {head_dim} only."
            )
    return head_dim


def _window(said: Settings, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """What a sliding window changes: a Llama file with one is a Mistral. 0 is none."""
    key = f"{kind}.attention.sliding_window"
    window = said.whole(key, 0, least=0)
    if window == 0 or (kind != "llama" and window >= config["max_position_embeddings"]):
        return {}
    if kind != "llama":
        raise ModelError(
            f"{said.where} says {key} = {window}; supported: none, or the whole context of "
            f"{config['max_position_embeddings']}."
        )
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window}


def _refuse_stretches(said: Settings, kind: str) -> None:
    """ModelError for a scaling of rotations that is given by name or by a factor."""
    named = said.text(f"{kind}.rope.scaling.type", "none")
    if named != "none":
        raise ModelError(
            f"{said.where} says {kind}.rope.scaling.type = {named!r}; supported: 'none', or "
            f"Llama 3's ({ROPE_FACTORS})."
        )
    for key, neutral in _STRETCHES.items():
        given = said.given.get(f"{kind}.{key}", 1)
        if given not in neutral:
            raise said.refusal(f"{kind}.{key}", given, "none, or 1, which stretches nothing")


def _rope_scaling(file: GGUFFile, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling, where the file holds its factors; every other one is refused."""
    _refuse_stretches(file.settings, kind)
    if ROPE_FACTORS not in file.tensors:
        return {}
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
    if not _are_llama3s(factors, scaling, config):
        raise ModelError(
            f"{file.path}: {ROPE_FACTORS} stretches rotations otherwise than Llama 3.1 to 3.3 do "
            "(low 1, high 4, original context 8192); supported: that one, or none."
        )
    return {"rope_scaling": scaling}


def _are_llama3s(
    factors: NDArray[np.float32], scaling: dict[str, Any], config: dict[str, Any]
) -> bool:
    """Whether stored factors are those of a scaling."""
    if not 1 <= scaling["factor"] < math.inf:
        return False
    expected = _llama3_factors(scaling, config["rope_theta"], config["head_dim"])
    return np.allclose(factors, expected, rtol=1e-5)


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
