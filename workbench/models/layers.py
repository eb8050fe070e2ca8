"""Matrix products whose rows do not notice each other, and rotary position embedding.

A BLAS picks its code by the number of rows, and with the code the order of a row's sums. `Linear`
hands it row counts within which, on this machine and with this number of threads, a row's result
was seen not to change, and sums short enough that no thread takes a part of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from workbench.models.spec import ModelSpec

# Most work of one product in the check: no tile is larger than what was checked.
_CHECK_FLOPS = 2e10
# Row counts tried: all small ones, and some on either side of where a BLAS may change its code.
_LARGE = (40, 47, 48, 63, 64, 65, 96, 100, 128, 200, 256, 257, 512, 1000, 1024, 2048)
_COUNTS = (*range(1, 34), *_LARGE)


# Inputs summed in one product: a BLAS that splits longer sums among threads changes their order.
_DEPTH = 512
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class RowTiles:
    """How a product is cut: rows a multiple of `multiple` up to `largest`, sums of `depth` inputs.

    Invariant: largest is a multiple of multiple.
    """

    multiple: int
    largest: int
    depth: int

    def pad(self, rows: int) -> int:
        """`rows` rounded up to what may be computed."""
        return -(-rows // self.multiple) * self.multiple

    def spans(self, rows: int) -> Iterator[tuple[int, int]]:
        """[start, stop) of the products that together compute at least `rows` rows."""
        padded = self.pad(rows)
        for start in range(0, padded, self.largest):
            yield start, min(start + self.largest, padded)


UNTILED = RowTiles(1, _UNLIMITED, _UNLIMITED)


class Linear:
    """out = x @ weight + bias; weight [inputs, outputs], for few rows faster than transposed."""

    __slots__ = ("_parts", "bias", "tiles", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.cut(UNTILED)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Weight, and bias where there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def columns(self, chosen: torch.Tensor) -> Linear:
        """The product of some outputs only, in the given order."""
        bias = None if self.bias is None else self.bias.index_select(0, chosen)
        return Linear(self.weight.index_select(1, chosen).contiguous(), bias)

    def cut(self, tiles: RowTiles) -> None:
        """Computes in these tiles from now on."""
        self.tiles = tiles
        self._parts = self.weight.split(min(tiles.depth, len(self.weight)))

    def __call__(self, x: torch.Tensor, rows: int, out: torch.Tensor) -> None:
        """Fills out[:rows]; x and out have tiles.pad(rows) rows, the last ones hold anything."""
        tiles = self.tiles
        if rows <= tiles.largest:
            padded = tiles.pad(rows)
            self._multiply(x[:padded], out[:padded])
        else:
            for start, stop in tiles.spans(rows):
                self._multiply(x[start:stop], out[start:stop])
        if self.bias is not None:
            out[:rows].add_(self.bias)

    def _multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """One tile of rows; long sums are added up part by part, in order."""
        if len(self._parts) == 1:
            torch.mm(x, self.weight, out=out)
            return
        for number, (inputs, part) in enumerate(
            zip(x.split(len(self._parts[0]), dim=1), self._parts, strict=True)
        ):
            torch.addmm(out, inputs, part, beta=int(number > 0), out=out)


def find_row_tiles(weight: torch.Tensor) -> RowTiles:
    """The widest tiles within which a row of x @ weight is bit for bit the same, by trying.

    weight: [inputs, outputs]. The fallback, tiles of exactly 64 rows, needs no trial: every
    product then has the same shape.
    """
    inputs, outputs = weight.shape
    counts = [n for n in _COUNTS if n <= max(64, _CHECK_FLOPS / (2 * inputs * outputs))]
    rows = torch.randn(counts[-1], inputs, generator=torch.Generator().manual_seed(0)).to(weight)
    product = Linear(weight)
    product.cut(RowTiles(1, _UNLIMITED, _DEPTH))
    expected = _product(product, rows[:64])
    alike = {n: _alike(product, rows[:n], expected) for n in counts}
    for multiple in (2, 4, 8, 16, 32):
        tried = [n for n in counts if n % multiple == 0]
        fine = tried[: next((i for i, n in enumerate(tried) if not alike[n]), len(tried))]
        if fine and fine[-1] >= 64:
            return RowTiles(multiple, fine[-1], _DEPTH)
    return RowTiles(64, 64, _DEPTH)


def _product(product: Linear, rows: torch.Tensor) -> torch.Tensor:
    out = rows.new_empty(len(rows), product.weight.shape[1])
    product(rows, len(rows), out)
    return out


def _alike(product: Linear, rows: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the first 64 rows come out as expected, at their place and from the end backwards."""
    count = min(64, len(rows))
    straight, backwards = _product(product, rows), _product(product, rows.flip(0)).flip(0)
    return torch.equal(straight[:count], expected[:count]) and torch.equal(backwards, straight)


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
