"""Small GGUF files for tests, written by the `gguf` package as llama.cpp's converter would."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import quants

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, VOCAB = 2, 64, 4, 2, 96, 320
HEAD_DIM = HIDDEN // HEADS
CONFIG = {  # of the folder that the small model would be
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "hidden_size": HIDDEN,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": INNER,
    "vocab_size": VOCAB, "max_position_embeddings": 128, "rms_norm_eps": float(np.float32(1e-5)),
}  # fmt: skip
PARTS = {
    "input_layernorm": ("attn_norm", (HIDDEN,)),
    "self_attn.q_proj": ("attn_q", (HIDDEN, HIDDEN)),
    "self_attn.k_proj": ("attn_k", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.v_proj": ("attn_v", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.o_proj": ("attn_output", (HIDDEN, HIDDEN)),
    "post_attention_layernorm": ("ffn_norm", (HIDDEN,)),
    "mlp.gate_proj": ("ffn_gate", (INNER, HIDDEN)),
    "mlp.up_proj": ("ffn_up", (INNER, HIDDEN)),
    "mlp.down_proj": ("ffn_down", (HIDDEN, INNER)),
}
ENDS = {
    "model.embed_tokens": ("token_embd", (VOCAB, HIDDEN)),
    "model.norm": ("output_norm", (HIDDEN,)),
    "lm_head": ("output", (VOCAB, HIDDEN)),
}
NAMES = {f"{hub}.weight": (f"{own}.weight", shape) for hub, (own, shape) in ENDS.items()} | {
    f"model.layers.{i}.{hub}.weight": (f"blk.{i}.{own}.weight", shape)
    for i in range(LAYERS)
    for hub, (own, shape) in PARTS.items()
}
BIASES = {
    f"model.layers.{i}.self_attn.{part}_proj.bias": (f"blk.{i}.attn_{part}.bias", (rows,))
    for i in range(LAYERS)
    for part, rows in (("q", HIDDEN), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM))
}

TOKENS = {  # what a file says of a small tokenizer
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": ["<bos>", "<eos>", "h", "i", "Ġ", "hi", "Ġhi", "<t>", "x"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1, 4, 1],
    "tokenizer.ggml.merges": ["h i", "Ġ hi"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ bos_token }}{{ date_string }}{{ messages[0]['content'] }}",
}


SIZES = {
    "block_count": LAYERS, "embedding_length": HIDDEN, "feed_forward_length": INNER,
    "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "context_length": 128,
    "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
}  # fmt: skip
ADDERS = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}


def random_tensors(names: Mapping[str, tuple[str, Any]] = NAMES) -> dict[str, np.ndarray]:
    """A small model's tensors by their Hugging Face names."""
    draw = np.random.default_rng(0)
    return {n: draw.normal(size=s).astype(np.float32) for n, (_, s) in names.items()}


def own_tensors(tensors: Mapping[str, np.ndarray], arch: str) -> dict[str, np.ndarray]:
    """The tensors under a GGUF file's names; for Llama a head's two halves row by row in turn."""
    found = {}
    for name, tensor in tensors.items():
        own = (NAMES | BIASES)[name][0]
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(own.split(".")[-2])
        if heads and arch == "llama":
            halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2)
            tensor = np.ascontiguousarray(halves).reshape(tensor.shape)
        found[own] = tensor
    return found


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    kind: Kind = Kind.F32,
    arch: str = "llama",
    extra: Mapping[str, np.ndarray] | None = None,
    about: Mapping[str, Any] | None = None,
    kinds: Mapping[str, Kind] | None = None,
) -> Path:
    """A file of these tensors (Hugging Face's names), matrices stored as `kind`.

    kinds: of tensors, by their own names, that are stored otherwise; extra: further tensors by
    their own names, uint8 ones as rows of `kind`; about: metadata, added or (None) left out.
    """
    writer = gguf.GGUFWriter(path, arch)
    metadata = {f"{arch}.{key}": value for key, value in SIZES.items()} | dict(about or {})
    for key, value in metadata.items():
        if value is not None:
            getattr(writer, ADDERS.get(type(value), "add_array"))(key, value)
    for name, tensor in (own_tensors(tensors, arch) | dict(extra or {})).items():
        chosen = (kinds or {}).get(name, kind)
        if tensor.dtype == np.uint8:
            writer.add_tensor(name, tensor, raw_dtype=chosen)
        elif tensor.ndim == 1 or chosen == Kind.F32:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, quants.quantize(tensor, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
