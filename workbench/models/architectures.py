"""The architectures that the layers run, and what tells one from another.

All are Llama's layers (norm, rotary attention, SwiGLU): Qwen2 adds biases to queries, keys and
values; reward models end in a value head in place of the vocabulary. A plain table, no torch.

Sources: Qwen2.5-Math-PRM's modeling_qwen2_rm.py (`score`: Linear, ReLU, Linear to 2 labels);
SkyworkAI/skywork-o1-prm-inference, prm_model.py (`v_head.summary`: one Linear to 1 value). Both
publish weights beside which an unused `lm_head.weight` may lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import ModelError
from workbench.models.settings import Settings


@dataclass(frozen=True, slots=True)
class ValueHead:
    """Values of a hidden state: linear layers with bias and ReLU between, the last to `outputs`.

    names: the layers' tensors, each with `.weight` and `.bias`; all but the last keep the width.
    """

    outputs: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What an architecture adds to Llama's layers. value_head: None where it has a vocabulary."""

    qkv_bias: bool = False
    value_head: ValueHead | None = None
    unused: tuple[str, ...] = ()  # tensors its files may hold that no part of it reads


_UNUSED = ("lm_head.weight",)
ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen2ForProcessRewardModel": Architecture(True, ValueHead(2, ("score.0", "score.2")), _UNUSED),
    "Qwen2ForPrmModel": Architecture(True, ValueHead(1, ("v_head.summary",)), _UNUSED),
}

_REQUIRED = (
    ("hidden_act", "silu"),
    ("attention_bias", False),
    ("mlp_bias", False),
    ("pretraining_tp", 1),
    ("quantization_config", None),
    ("use_sliding_window", False),
)
_MISTRAL_WINDOW = 4096  # what `transformers` takes where a Mistral config is silent


def named_architecture(config: Mapping[str, Any], where: str) -> str:
    """The architecture a config names; ModelError lists the supported ones."""
    given = config.get("architectures")
    for name in given if isinstance(given, list | tuple) else ():
        if isinstance(name, str) and name in ARCHITECTURES:
            return name
    raise ModelError(f"{where} says architectures {given}; supported: {', '.join(ARCHITECTURES)}.")


def refuse_variants(config: Mapping[str, Any], where: str) -> None:
    """ModelError for a setting that makes another model of a supported architecture."""
    for key, allowed in _REQUIRED:
        if config.get(key, allowed) != allowed:
            raise ModelError(f"{where} says {key} = {config[key]!r}; supported: {allowed!r} only.")


def sliding_window(said: Settings, architecture: str) -> int | None:
    """Positions a query sees, where fewer than all: Mistral's only; Qwen2's is refused if used."""
    if architecture != "MistralForCausalLM":
        return None
    if "sliding_window" in said.given and not said.has("sliding_window"):
        return None
    return said.whole("sliding_window", _MISTRAL_WINDOW)
