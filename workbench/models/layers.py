"""The parts of a forward pass that hold weights, and rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from workbench.kernels import Kernels, Part, Quantised
from workbench.models.spec import ModelSpec


class Linear:
    """out = x @ weight + bias, weight [inputs, outputs] packed for the kernels of its device."""

    __slots__ = ("bias", "kernels", "matrix")

    def __init__(
        self,
        kernels: Kernels,
        parts: Sequence[Part],  # each [outputs, inputs], as files have them
        bias: torch.Tensor | None = None,
        gated: bool = False,
    ) -> None:
        self.kernels, self.bias = kernels, bias
        self.matrix: Any = kernels.pack(parts, gated)

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs."""
        shape: tuple[int, int] = self.matrix.shape
        return shape

    @property
    def nbytes(self) -> int:
        """Bytes of weights held."""
        return int(self.matrix.nbytes) + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.kernels.multiply(x, self.matrix, out)
        if self.bias is not None:
            self.kernels.add_row(self.bias, out)

    def add_to(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out += the product; of a layer without bias."""
        assert self.bias is None
        self.kernels.multiply_add(x, self.matrix, out)

    def gated(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = silu(x @ first part) * (x @ second part); of a layer packed so."""
        self.kernels.multiply_gated(x, self.matrix, out)

    def columns(self, numbers: torch.Tensor, like: torch.Tensor) -> Linear:
        """The product for some outputs only, int64 [C]; like: a tensor of the weights' dtype."""
        weight = like.new_empty(len(numbers), self.shape[0])
        self.kernels.columns(self.matrix, numbers, weight)
        return Linear(self.kernels, [weight], None if self.bias is None else self.bias[numbers])


class Embedding:
    """Rows of a matrix [vocab, hidden] by token: as the file has it, or out of a tied output."""

    __slots__ = ("_source",)

    def __init__(self, source: torch.Tensor | Quantised | Linear) -> None:
        self._source = source

    @property
    def nbytes(self) -> int:
        """Bytes held beside the output's."""
        return 0 if isinstance(self._source, Linear) else self._source.nbytes

    def __call__(self, tokens: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, hidden] = the tokens' (int64 [T]) rows."""
        source = self._source
        if isinstance(source, Linear):
            source.kernels.columns(source.matrix, tokens, out)
        elif isinstance(source, Quantised):
            out.copy_(torch.from_numpy(source.pick(tokens.cpu().numpy()).dequantise()))
        else:
            torch.index_select(source, 0, tokens, out=out)


def rotary_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Radians a position of each pair of dimensions: float32 [head_dim / 2].

    Su et al. 2021; with `rope_scaling` Llama 3.1's: slow rotations are divided by `factor`, fast
    ones kept, those between blended, by how often each turns within the original context.
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequency = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return frequency
    turns = scaling.original_max_position * frequency / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def rotary_tables(spec: ModelSpec, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each position's angles: two float32 [positions, head_dim / 2]."""
    angles = torch.arange(positions).float()[:, None] * rotary_frequencies(spec)
    return angles.cos(), angles.sin()
