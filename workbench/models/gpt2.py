"""GPT-2 (Radford et al. 2019): what differs from Llama's forward pass, and its tensors' names.

Learned positions are added to the embeddings, a LayerNorm stands in place of each RMSNorm, GELU in
place of SwiGLU, and every product has a bias. All else is the code that runs a Llama, the kernels
of products and of attention included, so that a row's bits are its own in every batch here too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.kernels import Kernels, Part
from workbench.models.llama import Embedding, Layer, Linear, LlamaModel
from workbench.models.spec import ModelSpec

_PREFIX = "transformer."  # of all tensors but the head's, where a whole language model was saved


class GeluLinear(Linear):
    """A product that GELU follows, where a Llama has two and SwiGLU."""

    def gated(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = GELU(x @ weight + bias)."""
        assert self.bias is not None
        self.kernels.multiply(x, self.matrix, out)
        self.kernels.gelu(self.bias, out)


class GPT2Model(LlamaModel):
    """A LlamaModel whose norms are [2, hidden] each: weight and bias."""

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        embedding: Embedding,
        positions: torch.Tensor,  # [max_model_len, hidden], added to the embeddings
        layers: Sequence[Layer],
        final_norm: torch.Tensor,
        head: Linear,
    ) -> None:
        super().__init__(spec, kernels, embedding, layers, final_norm, head)
        self.positions = positions

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights and tables held, each counted once."""
        return super().weight_bytes + self.positions.nbytes

    def embed(self, tokens: torch.Tensor, positions: NDArray[np.int64], out: torch.Tensor) -> None:
        """out [T, hidden] = the tokens' embeddings, and those of their positions."""
        self.embedding(tokens, out)
        out += self.positions.index_select(0, torch.from_numpy(positions).to(self.device))

    def norm(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """A LayerNorm; weight: [2, hidden], its bias included."""
        self.kernels.layer_norm(x, weight, self.spec.rms_epsilon, out)


def build(
    spec: ModelSpec,
    kernels: Kernels,
    take: Callable[[str, tuple[int, ...]], Part],
    names: Collection[str],
    require_tied: Callable[[Part], None],
) -> GPT2Model:
    """The model out of named tensors, each taken on its device and in its dtype.

    names: those that there are; with or without the prefix of a whole language model. require_tied:
    raises where a head of its own is not this embedding. Matrices lie [inputs, outputs], as the
    `Conv1D` of the original has them.
    """
    prefix, hidden = _PREFIX if f"{_PREFIX}wte.weight" in names else "", spec.hidden

    def tensor(name: str, *shape: int) -> torch.Tensor:
        found = take(name, shape)
        assert isinstance(found, torch.Tensor), name
        return found

    def norm(name: str) -> torch.Tensor:
        return torch.stack(
            [tensor(f"{prefix}{name}.{part}", hidden) for part in ("weight", "bias")]
        )

    def linear(name: str, inputs: int, outputs: int, kind: type[Linear] = Linear) -> Linear:
        weight = tensor(f"{prefix}{name}.weight", inputs, outputs).t()
        return kind(kernels, [weight], tensor(f"{prefix}{name}.bias", outputs).contiguous())

    def layer(at: str) -> Layer:
        return Layer(
            attention_norm=norm(f"{at}.ln_1"),
            qkv=linear(f"{at}.attn.c_attn", hidden, spec.qkv_columns),
            output=linear(f"{at}.attn.c_proj", hidden, hidden),
            mlp_norm=norm(f"{at}.ln_2"),
            gate_up=linear(f"{at}.mlp.c_fc", hidden, spec.intermediate, GeluLinear),
            down=linear(f"{at}.mlp.c_proj", spec.intermediate, hidden),
        )

    vocabulary = tensor(f"{prefix}wte.weight", spec.vocab, hidden)
    if spec.tied:
        require_tied(vocabulary)
    head = vocabulary if spec.tied else tensor("lm_head.weight", spec.vocab, hidden)
    output = Linear(kernels, [head])
    return GPT2Model(
        spec,
        kernels,
        Embedding(output if spec.tied else vocabulary),
        tensor(f"{prefix}wpe.weight", spec.max_model_len, hidden).contiguous(),
        [layer(f"h.{number}") for number in range(spec.layers)],
        norm("ln_f"),
        output,
    )
