"""Shapes of a model for a replay, which runs none: of dense models whose layers are Llama's to
within norms and biases, quantised ones too, also where the engine here has no code for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import ModelError
from workbench.models.gguf import GGUFFile
from workbench.models.registry import DUMMY, find_model, hub_config, open_source, read_spec
from workbench.models.spec import ARCHITECTURES, ModelSpec, Settings

LIKE_LLAMA = {
    **{name: name for name, own in ARCHITECTURES.items() if not own.gpt2},
    **dict.fromkeys(("Qwen3ForCausalLM", "Phi3ForCausalLM", "GemmaForCausalLM", "Olmo2ForCausalLM",
                     "GraniteForCausalLM", "SmolLM3ForCausalLM"), "LlamaForCausalLM"),
    **dict.fromkeys((f"{kind}For{task}" for kind in ("Llama", "Mistral", "Qwen2", "Qwen3")
                     for task in ("TokenClassification", "SequenceClassification", "RewardModel")),
                    "Qwen2ForPrmModel"),
}  # fmt: skip
"""Architectures with attention over grouped heads and a gated product, and the one that is read in
their place. What they add (norms of queries and keys, a bias, a scale) is below 0.1 % of the bytes.
"""
TIED = ("GemmaForCausalLM",)  # where a config says nothing
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
         "head_dim", "intermediate_size", "vocab_size", "max_position_embeddings",
         "tie_word_embeddings", "dtype", "torch_dtype")  # fmt: skip
SCALE_BITS = 16  # of a group of quantised weights; where these have a zero point, theirs beside it


@dataclass(frozen=True, slots=True)
class Shapes:
    """bits: of a weight in the layers' matrices with its part of a scale, None: as all others.
    told: what a reader must know of a model that the engine here does not run; empty: it does.
    """

    spec: ModelSpec
    architecture: str
    bits: float | None = None
    told: str = ""

    def weight_bytes(self, width: int) -> int:
        """Of all weights, in numbers of `width` bytes but for quantised ones."""
        quantised = 0 if self.bits is None else self.spec.layers * self.spec.layer_products()
        rest = self.spec.weight_bytes(width) - quantised * width
        return rest + round(quantised * (self.bits or 0) / 8)


def shapes_of(name: str) -> Shapes:
    """By any name of a model; only its config is read. ModelError for what a replay has no shapes
    of: experts, latent or windowed attention, several kinds of layers, unknown architectures.
    """
    source = open_source(find_model(name.removeprefix(DUMMY), weights=False))
    if isinstance(source, GGUFFile):
        spec = read_spec(source)
        return Shapes(spec, spec.architecture)
    config, where = hub_config(source), str(source / "config.json")
    bits = _bits(config.get("quantization_config"), where)
    told = ""
    if bits is not None:
        told = (
            f"{name}: the matrices of its layers in {bits:.3g} bits a weight, scales included, the "
            "rest in 16; products as in 16 bits."
        )
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        spec = ModelSpec.from_config(plain, where)
        return Shapes(spec, spec.architecture, bits, told)
    except ModelError as problem:
        names = config.get("architectures")
        own = names[0] if isinstance(names, list) and names else None
        if own not in LIKE_LLAMA or _is_no_dense_one(plain):
            raise
        try:
            spec = _as_llama(plain, own, where)
        except ModelError as other:
            raise other from problem
    told = (
        f"{name} ({own}) has the shapes of Llama's layers; the engine here does not run it. {told}"
    )
    return Shapes(spec, own, bits, told.strip())


def _is_no_dense_one(config: Mapping[str, Any]) -> bool:
    """Whether its KV or its weights are others than sizes alone tell."""
    settings = Settings(config, "")
    parts = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "text_config")
    kinds = config.get("layer_types") or ()
    window = settings.has("sliding_window") and config.get("use_sliding_window", True)
    reach = config.get("max_position_embeddings") or 0
    windowed = bool(window) and config["sliding_window"] < reach
    return any(map(settings.has, parts)) or bool({*kinds} - {"full_attention"}) or windowed


def _as_llama(config: Mapping[str, Any], architecture: str, where: str) -> ModelSpec:
    sizes = {key: config[key] for key in SIZES if key in config}
    sizes.setdefault("tie_word_embeddings", architecture in TIED)
    Settings(sizes, where).whole("num_key_value_heads")  # of others than Llama no guess is right
    return ModelSpec.from_config(sizes | {"architectures": [LIKE_LLAMA[architecture]]}, where)


def _bits(quantised: Any, where: str) -> float | None:
    """Of a weight, by a config's quantization_config: AWQ, GPTQ, FP8, bitsandbytes, compressed
    tensors; None where there is none.
    """
    if quantised is None:
        return None
    asked = Settings(quantised, f"{where}: quantization_config")
    groups = [*asked.part("config_groups").values.values()]
    if groups:  # compressed tensors; one kind of weights in all of them
        asked = Settings(groups[0], asked.where).part("weights")
    method = asked.text("quant_method", "")
    if asked.has("bits") or asked.has("num_bits"):
        bits = asked.whole("bits" if asked.has("bits") else "num_bits")
        size = asked.values.get("group_size")
        zero = bits * (not asked.values.get("sym", asked.values.get("symmetric", method != "awq")))
        return bits + (SCALE_BITS + zero) / size if size and size > 0 else float(bits)
    if "fp8" in method or asked.values.get("load_in_8bit"):
        return 8.0
    if asked.values.get("load_in_4bit"):
        return 4.5  # a scale of 32 bits a block of 64
    raise ModelError(
        f"{asked.where} is {dict(asked.values)!r:.200}; sizes are known of awq, gptq, fp8, "
        "bitsandbytes and compressed-tensors with one kind of weights."
    )
