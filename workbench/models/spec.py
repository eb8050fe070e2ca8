"""A model's shapes, and every formula of sizes and work that follows from them.

Plain numbers, no torch. Formulas take (tp, pp): the number of ranks that split a layer's heads and
columns (tensor parallel) and the layers (pipeline parallel); they answer for one rank, the largest
where ranks differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import ModelError

SUPPORTED = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3's stretch of slow rotations; see models.layers.rotary_frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shapes of a Llama-architecture model. Invariant: heads is a multiple of kv_heads."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_model_len: int
    rms_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied: bool  # the output matrix is the embedding's
    dtype: str  # of the file: "float32", "bfloat16", ...

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
        """The spec of a Hugging Face config; ModelError names what is missing or not supported."""
        _refuse_unsupported(config, where)
        try:
            heads = int(config["num_attention_heads"])
            theta, scaling = _rope(config, where)
            spec = cls(
                layers=int(config["num_hidden_layers"]),
                hidden=int(config["hidden_size"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
                intermediate=int(config["intermediate_size"]),
                vocab=int(config["vocab_size"]),
                max_model_len=int(config["max_position_embeddings"]),
                rms_epsilon=float(config.get("rms_norm_eps", 1e-6)),
                rope_theta=theta,
                rope_scaling=scaling,
                tied=bool(config.get("tie_word_embeddings", False)),
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            )
        except KeyError as missing:
            raise ModelError(f"{where} lacks {missing}, which a Llama model needs.") from None
        except (TypeError, ValueError) as error:
            raise ModelError(f"{where} has a size that is no number: {error}.") from error
        spec._refuse_shapes(where)
        return spec

    @property
    def qkv_columns(self) -> int:
        """Columns of the fused query-key-value product."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def kv_bytes_per_token(self, dtype_bytes: int, tp: int = 1, pp: int = 1) -> int:
        """Bytes of keys and values of one token on one rank (KV heads are never split)."""
        return 2 * self._layers(pp) * math.ceil(self.kv_heads / tp) * self.head_dim * dtype_bytes

    def block_bytes(self, block_size: int, dtype_bytes: int, tp: int = 1, pp: int = 1) -> int:
        """Bytes of one KV block of block_size tokens on one rank."""
        return block_size * self.kv_bytes_per_token(dtype_bytes, tp, pp)

    def parameters(self, tp: int = 1, pp: int = 1) -> int:
        """Weights of one rank: its layers, and at the pipeline's larger end embedding or output."""
        matrices = self._layer_products() // tp + 2 * self.hidden
        ends = 1 if self.tied or pp > 1 else 2
        return self._layers(pp) * matrices + ends * self.vocab * self.hidden // tp + self.hidden

    def weight_bytes(self, dtype_bytes: int, tp: int = 1, pp: int = 1) -> int:
        return self.parameters(tp, pp) * dtype_bytes

    def table_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the rotary tables (cosine and sine), which a rank holds beside its weights."""
        return self.max_model_len * self.head_dim * dtype_bytes

    def flops(
        self, new_tokens: int, context: int, logits: int | None = None, tp: int = 1, pp: int = 1
    ) -> int:
        """Floating point operations of one sequence's forward on one rank; a multiply-add is two.

        context: tokens in the cache before; logits: rows whose logits are computed (None: the last
            one).
        """
        keys = new_tokens * context + new_tokens * (new_tokens + 1) // 2
        attention = 4 * keys * self.heads * self.head_dim // tp
        products = 2 * new_tokens * self._layer_products() // tp
        head = 2 * (1 if logits is None else logits) * self.hidden * self.vocab // tp
        return self._layers(pp) * (attention + products) + head

    def _refuse_shapes(self, where: str) -> None:
        """ModelError for shapes that the forward pass has no code for."""
        checks = (
            (
                "num_attention_heads",
                self.heads,
                self.heads % self.kv_heads == 0,
                f"a multiple of num_key_value_heads = {self.kv_heads}",
            ),
            ("head_dim", self.head_dim, self.head_dim % 8 == 0, "a multiple of 8"),
            ("hidden_size", self.hidden, self.hidden >= 16, "16 or more"),
            ("intermediate_size", self.intermediate, self.intermediate >= 16, "16 or more"),
            ("num_hidden_layers", self.layers, self.layers >= 1, "1 or more"),
        )
        for name, given, fine, allowed in checks:
            if not fine:
                raise ModelError(f"{where} says {name} = {given}; supported: {allowed}.")

    def _layers(self, pp: int) -> int:
        return math.ceil(self.layers / pp)

    def _layer_products(self) -> int:
        """Elements of one layer's matrices."""
        attention = self.qkv_columns + self.heads * self.head_dim
        return self.hidden * (attention + 3 * self.intermediate)


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    architectures = config.get("architectures") or []
    if not any(name in SUPPORTED for name in architectures):
        raise ModelError(
            f"{where} says architectures {architectures}; supported: {', '.join(SUPPORTED)}."
        )
    for key, allowed in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("pretraining_tp", 1),
        ("quantization_config", None),
    ):
        if config.get(key, allowed) != allowed:
            raise ModelError(f"{where} says {key} = {config[key]!r}; supported: {allowed!r} only.")


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(f"{where} says rope_type {kind!r}; supported: 'default', 'llama3'.")
    return theta, RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position=int(rope["original_max_position_embeddings"]),
    )
