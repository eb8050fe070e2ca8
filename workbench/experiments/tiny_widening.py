"""A wider Llama that begins where a narrow one stands (after Net2Net, Chen et al. 2015).

A process reward model is usually fine-tuned from a language model; tiny-prm, too, begins as
tiny-solver. The narrow model's weights fill the first rows and columns of each matrix, its query
heads are dealt out over the wider model's KV groups, and whatever is new starts small and writes
nothing into the old channels, so the wide model first computes nearly what the narrow one did.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

NEW_SCALE = 0.5
"""New weights relative to the usual initialisation."""


@torch.no_grad()
def widened(narrow: LlamaForCausalLM, config: LlamaConfig) -> LlamaForCausalLM:
    """A model of `config` that computes nearly what `narrow` does.

    It has as many layers and the same head size, and its groups take turns in getting the narrow
    model's query heads; the narrow model has one KV head, which every group gets.
    """
    wide = LlamaForCausalLM(config)
    assert narrow.config.num_hidden_layers == config.num_hidden_layers
    assert narrow.config.head_dim == config.head_dim
    assert narrow.config.num_key_value_heads == 1
    old = narrow.config.hidden_size
    shrink = (old / config.hidden_size) ** 0.5
    for parameter in wide.parameters():
        if parameter.dim() == 2:
            parameter.mul_(NEW_SCALE)
    wide.model.embed_tokens.weight[:, :old] = narrow.model.embed_tokens.weight
    _widen_norm(wide.model.norm.weight, narrow.model.norm.weight, shrink)
    for target, source in zip(wide.model.layers, narrow.model.layers, strict=True):
        _widen_norm(target.input_layernorm.weight, source.input_layernorm.weight, shrink)
        _widen_norm(
            target.post_attention_layernorm.weight, source.post_attention_layernorm.weight, shrink
        )
        _widen_attention(target, source, config, old)
        _widen_mlp(target, source, old)
    return wide


def _widen_norm(wide: torch.Tensor, narrow: torch.Tensor, shrink: float) -> None:
    """The new channels are near zero, so the root mean square falls by `shrink`."""
    wide.fill_(float(narrow.mean()) * shrink)
    wide[: len(narrow)] = narrow * shrink


def query_slots(narrow_heads: int, config: LlamaConfig) -> list[int]:
    """The wide model's query head that each narrow query head becomes."""
    groups = config.num_key_value_heads
    heads_of_group = config.num_attention_heads // groups
    return [head % groups * heads_of_group + head // groups for head in range(narrow_heads)]


def _widen_attention(
    target: LlamaDecoderLayer, source: LlamaDecoderLayer, config: LlamaConfig, old: int
) -> None:
    size, wide, narrow = config.head_dim, target.self_attn, source.self_attn
    wide.o_proj.weight[:old] = 0
    slots = query_slots(narrow.config.num_attention_heads, config)
    for head, slot in enumerate(slots):
        to, frm = slice(slot * size, (slot + 1) * size), slice(head * size, (head + 1) * size)
        wide.q_proj.weight[to, :old] = narrow.q_proj.weight[frm]
        wide.o_proj.weight[:old, to] = narrow.o_proj.weight[:, frm]
    for group in range(config.num_key_value_heads):
        to = slice(group * size, (group + 1) * size)
        wide.k_proj.weight[to, :old] = narrow.k_proj.weight
        wide.v_proj.weight[to, :old] = narrow.v_proj.weight


def _widen_mlp(target: LlamaDecoderLayer, source: LlamaDecoderLayer, old: int) -> None:
    width = source.mlp.gate_proj.weight.shape[0]
    for name in ("gate_proj", "up_proj"):
        getattr(target.mlp, name).weight[:width, :old] = getattr(source.mlp, name).weight
    target.mlp.down_proj.weight[:old] = 0
    target.mlp.down_proj.weight[:old, :width] = source.mlp.down_proj.weight
