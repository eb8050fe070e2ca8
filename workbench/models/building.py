"""A LlamaModel out of named tensors: which of them make up which layer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from workbench.kernels import Kernels, Part, Quantised, load_kernels
from workbench.models.layers import Embedding, Linear
from workbench.models.llama import Layer, LlamaModel
from workbench.models.spec import ModelSpec

Take = Callable[[str, tuple[int, ...]], Part]


def build(
    spec: ModelSpec,
    take: Take,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = True,
    block_size: int | None = None,
) -> LlamaModel:
    """The model; take(name, shape) gives the tensor that Hugging Face calls so.

    batch_invariant, block_size: of `load_kernels`.
    """
    kernels = load_kernels(
        device,
        dtype,
        batch_invariant=batch_invariant,
        head_dim=spec.head_dim,
        block_size=block_size,
    )
    return _Builder(spec, take, dtype, device, kernels).model()


class _Builder:
    def __init__(
        self,
        spec: ModelSpec,
        take: Take,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self.spec, self.take, self.dtype, self.device = spec, take, dtype, device
        self.kernels = kernels

    def model(self) -> LlamaModel:
        spec = self.spec
        vocabulary = self._place(self.take("model.embed_tokens.weight", (spec.vocab, spec.hidden)))
        layers = [self._layer(f"model.layers.{i}.") for i in range(spec.layers)]
        final_norm = self._vector("model.norm.weight", spec.hidden)
        inner: list[Linear] = []
        if spec.value_head is not None:
            *inner, head = self._value_head()
        elif spec.tied:
            head = Linear(self.kernels, [vocabulary])
        else:
            head = self._linear(spec.hidden, {"lm_head": spec.vocab})
        shared = spec.tied and spec.value_head is None
        embedding = Embedding(head if shared else self._rows(vocabulary))
        return LlamaModel(spec, self.kernels, embedding, layers, final_norm, head, inner)

    def _layer(self, prefix: str) -> Layer:
        spec = self.spec
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        attention = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        mlp = {"gate_proj": spec.intermediate, "up_proj": spec.intermediate}
        self_attn, in_mlp = prefix + "self_attn.", prefix + "mlp."
        return Layer(
            attention_norm=self._vector(prefix + "input_layernorm.weight", spec.hidden),
            qkv=self._linear(spec.hidden, attention, self_attn, bias=spec.qkv_bias),
            output=self._linear(queries, {"o_proj": spec.hidden}, self_attn),
            mlp_norm=self._vector(prefix + "post_attention_layernorm.weight", spec.hidden),
            gate_up=self._linear(spec.hidden, mlp, in_mlp, gated=True),
            down=self._linear(spec.intermediate, {"down_proj": spec.hidden}, in_mlp),
        )

    def _value_head(self) -> list[Linear]:
        """The products of a value head, in order."""
        spec = self.spec
        assert spec.value_head is not None
        *inner, last = spec.value_head.names
        widths = dict.fromkeys(inner, spec.hidden) | {last: spec.outputs}
        return [self._linear(spec.hidden, {n: rows}, bias=True) for n, rows in widths.items()]

    def _linear(
        self,
        inputs: int,
        outputs: dict[str, int],
        prefix: str = "",
        bias: bool = False,
        gated: bool = False,
    ) -> Linear:
        """The fused product of these tensors, by their names and numbers of outputs."""
        parts = [
            self._place(self.take(f"{prefix}{name}.weight", (rows, inputs)))
            for name, rows in outputs.items()
        ]
        biases = [self._vector(f"{prefix}{n}.bias", rows) for n, rows in outputs.items() if bias]
        return Linear(self.kernels, parts, torch.cat(biases) if biases else None, gated)

    def _vector(self, name: str, size: int) -> torch.Tensor:
        vector = self._place(self.take(name, (size,)))
        assert isinstance(vector, torch.Tensor), name
        return vector.contiguous()

    def _rows(self, vocabulary: Part) -> Part:
        """What embeddings are looked up in: a quantised one stays so on a CPU only."""
        if self.device.type == "cpu" or not isinstance(vocabulary, Quantised):
            return vocabulary
        return torch.from_numpy(vocabulary.dequantise()).to(self.device, self.dtype)

    def _place(self, part: Part) -> Part:
        return part if isinstance(part, Quantised) else part.to(self.device, self.dtype)
