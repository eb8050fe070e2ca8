"""A model's shapes, and every formula of sizes and work that follows from them.

Plain numbers, no torch. Formulas take (tp, pp): the number of ranks that split a layer's heads and
columns (tensor parallel) and the layers (pipeline parallel); they return one rank's share, the
largest where ranks differ.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import ModelError

_LARGEST = 2**31 - 1  # no size and no token id of a model comes near it
_LARGEST_NUMBER = 3.4e38  # what float32 holds, in which most models compute


@dataclass(frozen=True, slots=True)
class Settings:
    """What a config.json or a GGUF file says of a model, and the file (`where`) that errors name.

    Each reader raises ModelError for a value of another kind, and for one that is absent and has no
    default; null counts as absent.
    """

    values: Mapping[str, Any]
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise ModelError(
                f"{self.where} holds {reprlib.repr(self.values)}; allowed: an object of settings."
            )

    def has(self, name: str) -> bool:
        """Whether a setting has a value."""
        return self.values.get(name) is not None

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number, `least` or more; true is no number, 4.0 is not whole."""
        allowed = f"a whole number from {least} to {_LARGEST:,}"
        found: int = self._found(name, default, allowed)
        if type(found) is not int or not least <= found <= _LARGEST:
            raise self.refusal(name, found, allowed)
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0, neither infinite nor undefined."""
        allowed = f"a number above 0, at most {_LARGEST_NUMBER}"
        found = self._found(name, default, allowed)
        if type(found) not in (int, float) or not 0 < found <= _LARGEST_NUMBER:
            raise self.refusal(name, found, allowed)
        return float(found)

    def text(self, name: str, default: str | None = None) -> str:
        """A text."""
        return str(self._found(name, default, "a text", str))

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false; 1 is neither."""
        return bool(self._found(name, default, "true or false", bool))

    def part(self, name: str) -> Settings:
        """The settings within one, none where it is absent."""
        found = self._found(name, {}, "an object of settings, or null", Mapping)
        return Settings(found, f"{self.where}: {name}")

    def refusal(self, name: str, found: Any, allowed: str) -> ModelError:
        """The error for a value that is not allowed."""
        count = f" ({len(found)} values)" if isinstance(found, list) else ""
        return ModelError(
            f"{self.where} says {name} = {reprlib.repr(found)}{count}; allowed: {allowed}."
        )

    def _found(self, name: str, default: Any, allowed: str, kind: type = object) -> Any:
        found = self.values[name] if self.has(name) else default
        if found is None:
            raise ModelError(f"{self.where} lacks {name!r}; needed: {allowed}.")
        if not isinstance(found, kind):
            raise self.refusal(name, found, allowed)
        return found


@dataclass(frozen=True, slots=True)
class ValueHead:
    """Values of a hidden state: linear layers with bias and ReLU between, the last to `outputs`.

    names: the layers' tensors, each with `.weight` and `.bias`; all but the last keep the width.
    """

    outputs: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What an architecture adds to Llama's layers (norm, rotary attention, SwiGLU)."""

    qkv_bias: bool = False
    value_head: ValueHead | None = None  # None: it has a vocabulary
    unused: tuple[str, ...] = ()  # endings of tensors its files may hold and no part of it reads
    gpt2: bool = False  # its own layers instead: learned positions, LayerNorm, GELU, all with bias


_UNUSED = ("lm_head.weight",)
_MASKS = (".attn.bias", ".attn.masked_bias")  # what an older torch module kept beside its weights
# The value heads are those of Qwen2.5-Math-PRM's modeling_qwen2_rm.py (`score`: Linear, ReLU,
# Linear to 2 labels) and of SkyworkAI/skywork-o1-prm-inference, prm_model.py (`v_head.summary`: one
# Linear to 1 value).
ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen2ForProcessRewardModel": Architecture(True, ValueHead(2, ("score.0", "score.2")), _UNUSED),
    "Qwen2ForPrmModel": Architecture(True, ValueHead(1, ("v_head.summary",)), _UNUSED),
    "GPT2LMHeadModel": Architecture(True, unused=_MASKS, gpt2=True),
}

# Other values make another model of a supported architecture.
_REQUIRED = {"hidden_act": "silu", "pretraining_tp": 1, "quantization_config": None}
_REQUIRED |= dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), False)
_REQUIRED |= {"is_causal": True, "partial_rotary_factor": 1.0}
_GPT2_REQUIRED = {"activation_function": "gelu_new", "scale_attn_weights": True}
_GPT2_REQUIRED |= {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
_GPT2_REQUIRED |= {"quantization_config": None, "is_causal": True}
_GPT2_NAMES = {  # what its config calls Llama's settings
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
}
# As many heads of keys as of queries where a config says nothing; of others it must say it.
_OWN_HEADS = ("LlamaForCausalLM", "GPT2LMHeadModel")
_LENGTH = "original_max_position_embeddings"
_ROPE = ("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
         _LENGTH)  # fmt: skip
_MISTRAL_WINDOW = 4096  # what `transformers` takes where a Mistral config is silent


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3's stretch of slow rotations; see models.llama.rotary_frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shapes of a model of Llama's layers, or GPT-2's. Invariant: heads is a multiple of
    kv_heads.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_model_len: int
    rms_epsilon: float  # of a LayerNorm, too
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied: bool  # the output matrix is the embedding's
    dtype: str  # of the file: "float32", "bfloat16", ...
    architecture: str = "LlamaForCausalLM"  # a key of ARCHITECTURES
    sliding_window: int | None = None  # longer requests would need attention to the latest only

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
        """The spec of a Hugging Face config; ModelError names what is missing or not supported."""
        settings = Settings(config, where)
        names = config.get("architectures")
        listed = names if isinstance(names, list | tuple) else ()
        supported = [name for name in listed if isinstance(name, str) and name in ARCHITECTURES]
        if not supported:
            known = ", ".join(ARCHITECTURES)
            raise ModelError(f"{where} says architectures {names}; supported: {known}.")
        architecture = supported[0]
        gpt2 = ARCHITECTURES[architecture].gpt2
        for key, only in (_GPT2_REQUIRED if gpt2 else _REQUIRED).items():
            if config.get(key, only) != only:
                raise ModelError(f"{where} says {key} = {config[key]!r}; supported: {only!r} only.")

        def named(name: str) -> str:
            return _GPT2_NAMES.get(name, name) if gpt2 else name

        hidden = settings.whole(named("hidden_size"))
        heads = settings.whole(named("num_attention_heads"))
        theta, scaling = _rope(settings)
        is_silent = "num_key_value_heads" not in config and architecture not in _OWN_HEADS
        window = None  # Qwen2's is refused if used
        if architecture == "MistralForCausalLM" and config.get("sliding_window", 0) is not None:
            window = settings.whole("sliding_window", _MISTRAL_WINDOW)
        spec = cls(
            layers=settings.whole(named("num_hidden_layers")),
            hidden=hidden,
            heads=heads,
            kv_heads=settings.whole("num_key_value_heads", None if is_silent else heads),
            head_dim=settings.whole("head_dim", hidden // heads),
            intermediate=settings.whole(named("intermediate_size"), 4 * hidden if gpt2 else None),
            vocab=settings.whole("vocab_size"),
            max_model_len=settings.whole(named("max_position_embeddings")),
            rms_epsilon=settings.number(named("rms_norm_eps"), 1e-5 if gpt2 else 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tied=settings.flag("tie_word_embeddings", gpt2),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            architecture=architecture,
            sliding_window=window,
        )
        _require_supported(spec, where)
        return spec

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return ARCHITECTURES[self.architecture].qkv_bias

    @property
    def gpt2(self) -> bool:
        """Whether its layers are GPT-2's."""
        return ARCHITECTURES[self.architecture].gpt2

    @property
    def value_head(self) -> ValueHead | None:
        """What stands in place of the vocabulary; None for a language model."""
        return ARCHITECTURES[self.architecture].value_head

    @property
    def outputs(self) -> int:
        """Columns of a position's output: the vocabulary's logits, or the head's values."""
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
        biases, norm = self.qkv_columns // tp if self.qkv_bias else 0, self.hidden
        embedding, head = self.vocab * self.hidden // tp, self._head_products() // tp
        if self.gpt2:
            biases, norm = biases + self.intermediate // tp + 2 * self.hidden, 2 * self.hidden
            embedding += self.max_model_len * self.hidden
        layer = self.layer_products() // tp + biases + 2 * norm
        if self.value_head is not None:
            head += self.hidden * (len(self.value_head.names) - 1) + self.outputs
        elif self.tied:
            head = 0
        ends = max(embedding, head) if pp > 1 else embedding + head
        return self._layers(pp) * layer + ends + norm

    def weight_bytes(self, dtype_bytes: int, tp: int = 1, pp: int = 1) -> int:
        """Bytes of the weights of a rank."""
        return self.parameters(tp, pp) * dtype_bytes

    def table_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the rotary tables (cosine and sine), which a rank holds beside its weights.

        GPT-2 has them, too: they turn nothing.
        """
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
        products = 2 * new_tokens * self.layer_products() // tp
        head = 2 * (1 if logits is None else logits) * self._head_products() // tp
        return self._layers(pp) * (attention + products) + head

    def _layers(self, pp: int) -> int:
        return math.ceil(self.layers / pp)

    def _head_products(self) -> int:
        """Elements of the head's matrices."""
        inner = 0 if self.value_head is None else len(self.value_head.names) - 1
        return self.hidden * (inner * self.hidden + self.outputs)

    def layer_products(self) -> int:
        """Elements of one layer's matrices."""
        attention = self.qkv_columns + self.heads * self.head_dim
        return self.hidden * (attention + (2 if self.gpt2 else 3) * self.intermediate)


def _rope(settings: Settings) -> tuple[float, RopeScaling | None]:
    """Base and scaling: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""
    new, old = settings.part("rope_parameters"), settings.part("rope_scaling")
    rope = new if new.values else old
    if new.values and old.values:
        kinds = {each.text("rope_type", each.text("type", "default")) for each in (new, old)}
        rest = {k: v for k, v in old.values.items() if k not in ("rope_type", "type")}
        if len(kinds) > 1 or not rest.items() <= new.values.items():
            told = f"{new.values} and rope_scaling {old.values}"
            raise ModelError(f"{settings.where} says rope_parameters {told}; remove one of them.")
    theta = rope.number("rope_theta", settings.number("rope_theta", 10000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ("default", "llama3"):
        where = settings.where
        raise ModelError(f"{where} says rope_type {kind!r}; supported: 'default', 'llama3'.")
    for name, value in rope.values.items():  # of one kind of layer, or of a part of each head
        if rope.has(name) and name not in _ROPE and (name, value) != ("partial_rotary_factor", 1):
            raise rope.refusal(name, value, f"none beside {', '.join(_ROPE)}")
    if kind == "default":
        return theta, None
    scaling = RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=(length := rope.whole(_LENGTH)),
    )
    if settings.whole(_LENGTH, length) != length:
        raise settings.refusal(_LENGTH, settings.values[_LENGTH], f"{length}, as its rotations say")
    return theta, scaling


def _require_supported(spec: ModelSpec, where: str) -> None:
    """ModelError for shapes and rotations that the forward pass has no code for."""
    kv_heads, scaling = spec.kv_heads, spec.rope_scaling
    many = f"a multiple of num_key_value_heads = {kv_heads}"
    checks = [
        ("num_attention_heads", spec.heads, spec.heads % kv_heads == 0, many),
        ("head_dim", spec.head_dim, spec.head_dim % 8 == 0, "a multiple of 8"),
        # a list of each layer's parts is made before any weight is read
        ("num_hidden_layers", spec.layers, spec.layers <= 10_000, "10,000 at most"),
        ("hidden_size", spec.hidden, spec.hidden >= 16, "16 or more"),
        (
            "n_embd",
            spec.hidden,
            not spec.gpt2 or spec.hidden == spec.heads * spec.head_dim,
            f"a multiple of n_head = {spec.heads}",
        ),
        ("intermediate_size", spec.intermediate, spec.intermediate >= 16, "16 or more"),
        # below 1, theta or factor may turn by more in one position than float32 can hold
        ("rope_theta", spec.rope_theta, spec.rope_theta >= 1, "1 or more"),
    ]
    if scaling is not None:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        above = f"more than low_freq_factor = {low}"
        checks.append(("factor", scaling.factor, scaling.factor >= 1, "1 or more"))
        checks.append(("high_freq_factor", high, high > low, above))
    for name, value, fine, allowed in checks:
        if not fine:
            raise ModelError(f"{where} says {name} = {value}; supported: {allowed}.")
