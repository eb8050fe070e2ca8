"""Which matrices `quantization=` rounds, and how many bytes a model's tensors take once held.

All of it follows from kinds and shapes, before any weight is read: so a setting that would change
nothing is refused at once, and memory is asked for what will be held. What it does not do: round
numbers (loading.py).
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from workbench.config import QUANTIZATIONS
from workbench.errors import ConfigError, nearest
from workbench.kernels.quantised import FORMATS
from workbench.models.spec import ModelSpec

# Bytes of 32 weights in the panels of a CPU's kernels, for kinds that take more there than in a
# file: scales and offsets that float16 does not hold exactly become float32 (kernels/panels.py).
_WIDENED = {"Q4_0": 20, "Q4_K": 24, "Q6_K": 40}


class Listed(NamedTuple):
    """A tensor in a file's list. kind: a key of FORMATS, or what the file calls its numbers."""

    name: str
    kind: str
    shape: tuple[int, ...]


def kind_of(quantization: str | None) -> str | None:
    """The kind that matrices become; None where they stay as they are. Raises ConfigError."""
    if quantization is None:
        return None
    if quantization not in QUANTIZATIONS:
        raise ConfigError(
            f"quantization is {quantization!r}; allowed: {', '.join(QUANTIZATIONS)}, or None."
            f"{nearest(str(quantization), list(QUANTIZATIONS))}"
        )
    return QUANTIZATIONS[quantization]


def becomes(kind: str, shape: tuple[int, ...], wanted: str | None) -> str:
    """The kind a tensor is held in: `wanted` for a matrix of whole blocks that gets smaller so."""
    if wanted is None or len(shape) != 2 or shape[1] % FORMATS[wanted].columns:
        return kind
    return wanted if _bits(wanted) < _bits(kind) else kind


def held_bytes(tensors: Iterable[Listed], itemsize: int, wanted: str | None = None) -> int:
    """Bytes of all tensors as a CPU's kernels hold them, numbers in `itemsize` bytes each.

    wanted: the kind that matrices are rounded to.
    """
    return sum(_bytes(becomes(t.kind, t.shape, wanted), t.shape, itemsize) for t in tensors)


def require_rounding(tensors: Iterable[Listed], quantization: str, name: str) -> None:
    """ConfigError where `quantization` would round no matrix; a warning where it rounds a part."""
    wanted = kind_of(quantization)
    assert wanted is not None
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    kept = [t for t in matrices if becomes(t.kind, t.shape, wanted) == t.kind]
    if len(kept) == len(matrices):
        raise ConfigError(
            f"quantization={quantization!r} would round nothing: the {len(matrices)} matrices of "
            f"{name} are {_described(kept, wanted)}. Allowed here: {_allowed(matrices)}."
        )
    if kept:
        warnings.warn(
            f"quantization={quantization!r} rounds {len(matrices) - len(kept)} of the "
            f"{len(matrices)} matrices of {name}; {len(kept)} stay as they are: "
            f"{_described(kept, wanted)}.",
            RuntimeWarning,
            stacklevel=3,
        )


def listed(spec: ModelSpec) -> list[Listed]:
    """The tensors of a model of these shapes, as numbers: its matrices, and all vectors as one."""
    matrices = [Listed("matrix", "float32", shape) for shape in _matrices(spec)]
    vectors = spec.parameters() - sum(math.prod(matrix.shape) for matrix in matrices)
    return [*matrices, Listed("vectors", "float32", (vectors,))]


def _matrices(spec: ModelSpec) -> list[tuple[int, int]]:
    """Outputs and inputs of every matrix, as files have them."""
    hidden, inner = spec.hidden, spec.intermediate
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    layer = [*attention, (inner, hidden), (inner, hidden), (hidden, inner)]
    if spec.value_head is not None:
        head = [(hidden, hidden)] * (len(spec.value_head.names) - 1) + [(spec.outputs, hidden)]
    else:
        head = [] if spec.tied else [(spec.vocab, hidden)]
    return [(spec.vocab, hidden), *layer * spec.layers, *head]


def _bits(kind: str) -> float:
    """Bits of a weight; without end for numbers, which any quantised kind makes smaller."""
    form = FORMATS.get(kind)
    return math.inf if form is None else 8 * form.size / form.columns


def _bytes(kind: str, shape: tuple[int, ...], itemsize: int) -> int:
    form, numbers = FORMATS.get(kind), math.prod(shape)
    if form is None:
        return numbers * itemsize
    if kind in _WIDENED:
        return numbers // 32 * _WIDENED[kind]
    return numbers // form.columns * form.size


def _described(kept: Iterable[Listed], wanted: str) -> str:
    """Kinds that stay, how many of each, and why."""
    counts = Counter(tensor.kind for tensor in kept)
    small = f"of no more bits than {wanted}"
    wide = f"with inputs that {FORMATS[wanted].columns} does not divide"
    return ", ".join(
        f"{count} {kind} ({small if kind in FORMATS else wide})" for kind, count in counts.items()
    )


def _allowed(matrices: Iterable[Listed]) -> str:
    """The settings that change one of these matrices, and that which changes none."""
    tensors = list(matrices)
    changing = [
        repr(quantization)
        for quantization, wanted in QUANTIZATIONS.items()
        if any(becomes(t.kind, t.shape, wanted) != t.kind for t in tensors)
    ]
    return " or ".join([*changing, "None, which keeps weights as they are"])
