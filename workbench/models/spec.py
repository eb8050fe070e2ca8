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
from workbench.models.architectures import (
    ARCHITECTURES,
    ValueHead,
    named_architecture,
    refuse_variants,
    sliding_window,
)
from workbench.models.settings import Settings

_Allowed = tuple[str, float, bool, str]  # setting, its value, whether that is fine, what is
_MOST_LAYERS = 10_000  # a list of each layer's parts is made before any weight is read


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3's stretch of slow rotations; see models.layers.rotary_frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shapes of a model of Llama's layers. Invariant: heads is a multiple of kv_heads."""

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
    architecture: str = "LlamaForCausalLM"  # a key of ARCHITECTURES
    sliding_window: int | None = None  # longer requests would need attention to the latest only

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
        """The spec of a Hugging Face config; ModelError names what is missing or not supported."""
        said = Settings(config, where)
        architecture = named_architecture(config, where)
        refuse_variants(config, where)
        hidden, heads = said.whole("hidden_size"), said.whole("num_attention_heads")
        theta, scaling = _rope(said)
        spec = cls(
            layers=said.whole("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=said.whole("num_key_value_heads", heads),
            head_dim=said.whole("head_dim", hidden // heads),
            intermediate=said.whole("intermediate_size"),
            vocab=said.whole("vocab_size"),
            max_model_len=said.whole("max_position_embeddings"),
            rms_epsilon=said.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tied=bool(config.get("tie_word_embeddings", False)),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            architecture=architecture,
            sliding_window=sliding_window(said, architecture),
        )
        spec._refuse_shapes(where)
        return spec

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return ARCHITECTURES[self.architecture].qkv_bias

    @property
    def value_head(self) -> ValueHead | None:
        """What stands in place of the vocabulary; None for a language model."""
        return ARCHITECTURES[self.architecture].value_head

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        """Names that a file of this architecture may hold and no part of the model reads."""
        return ARCHITECTURES[self.architecture].unused

    @property
    def outputs(self) -> int:
        """Columns of what a position is given: the vocabulary's logits, or the head's values."""
        return self.vocab if self.value_head is None else self.value_head.outputs

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
        biases = self.qkv_columns // tp if self.qkv_bias else 0
        layer = self._layer_products() // tp + biases + 2 * self.hidden
        return self._layers(pp) * layer + self._ends(tp, pp) + self.hidden

    def weight_bytes(self, dtype_bytes: int, tp: int = 1, pp: int = 1) -> int:
        """Bytes of the weights of a rank."""
        return self.parameters(tp, pp) * dtype_bytes

    def table_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the rotary tables (cosine and sine), which a rank holds beside its weights."""
        return self.max_model_len * self.head_dim * dtype_bytes

    def step_bytes(self, tokens: int, rows: int, dtype_bytes: int, tp: int = 1) -> int:
        """Bytes of the buffers that a step of `tokens` works in, `rows` of them at the output.

        What a kernel takes for a moment beside them only the profiling pass knows.
        """
        inner = self.qkv_columns + self.heads * self.head_dim + self.intermediate
        wide = tokens * (2 * self.hidden + inner // tp)
        return dtype_bytes * (wide + rows * (self.hidden + self.outputs // tp))

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
        head = 2 * (1 if logits is None else logits) * self._head_products() // tp
        return self._layers(pp) * (attention + products) + head

    def _refuse_shapes(self, where: str) -> None:
        """ModelError for shapes and rotations that the forward pass has no code for."""
        for name, given, fine, allowed in (*self._shapes_allowed(), *self._rotations_allowed()):
            if not fine:
                raise ModelError(f"{where} says {name} = {given}; supported: {allowed}.")

    def _shapes_allowed(self) -> tuple[_Allowed, ...]:
        many = f"a multiple of num_key_value_heads = {self.kv_heads}"
        return (
            ("num_attention_heads", self.heads, self.heads % self.kv_heads == 0, many),
            ("head_dim", self.head_dim, self.head_dim % 8 == 0, "a multiple of 8"),
            ("num_hidden_layers", self.layers, self.layers <= _MOST_LAYERS, "10,000 at most"),
            ("hidden_size", self.hidden, self.hidden >= 16, "16 or more"),
            ("intermediate_size", self.intermediate, self.intermediate >= 16, "16 or more"),
        )

    def _rotations_allowed(self) -> tuple[_Allowed, ...]:
        """Below 1, theta or factor may turn by more in one position than float32 can hold."""
        theta: _Allowed = ("rope_theta", self.rope_theta, self.rope_theta >= 1, "1 or more")
        scaling = self.rope_scaling
        if scaling is None:
            return (theta,)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return (
            theta,
            ("factor", scaling.factor, scaling.factor >= 1, "1 or more"),
            ("high_freq_factor", high, high > low, f"more than low_freq_factor = {low}"),
        )

    def _layers(self, pp: int) -> int:
        return math.ceil(self.layers / pp)

    def _ends(self, tp: int, pp: int) -> int:
        """Embedding and head; where they lie on two ranks, the larger one."""
        embedding = self.vocab * self.hidden // tp
        if self.value_head is None:
            return embedding * (1 if self.tied or pp > 1 else 2)
        biases = self.hidden * (len(self.value_head.names) - 1) + self.outputs
        head = self._head_products() // tp + biases
        return max(embedding, head) if pp > 1 else embedding + head

    def _head_products(self) -> int:
        """Elements of the head's matrices."""
        inner = 0 if self.value_head is None else len(self.value_head.names) - 1
        return self.hidden * (inner * self.hidden + self.outputs)

    def _layer_products(self) -> int:
        """Elements of one layer's matrices."""
        attention = self.qkv_columns + self.heads * self.head_dim
        return self.hidden * (attention + 3 * self.intermediate)


def _rope(said: Settings) -> tuple[float, RopeScaling | None]:
    """Base and scaling: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""
    new, old = said.part("rope_parameters"), said.part("rope_scaling")
    rope = new if new.given else old
    theta = rope.number("rope_theta", said.number("rope_theta", 10000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(f"{said.where} says rope_type {kind!r}; supported: 'default', 'llama3'.")
    return theta, RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=rope.whole("original_max_position_embeddings"),
    )
