"""Products with packed weights: right, exact in every form, and each row by itself."""

import numpy as np
import pytest
import torch

from workbench.kernels import Kernels, Quantised, load_kernels
from workbench.kernels.cpu import CpuKernels
from workbench.kernels.cpu.products import Beside, Panels
from workbench.kernels.quantised import FORMATS

CPU = torch.device("cpu")
KINDS = sorted(FORMATS)
OPERATIONS = ("multiply", "multiply_add", "multiply_gated")


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    """Two threads, whatever this machine has."""
    found = load_kernels(CPU, torch.float32, threads=2)
    assert isinstance(found, CpuKernels)
    return found


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> Quantised:
    """Random codes under small random scales."""
    draw, form = np.random.default_rng(seed), FORMATS[kind]
    blocks = draw.integers(0, 256, (rows, columns // form.columns, form.size), dtype=np.uint8)
    for first in form.halves:
        scales = (draw.standard_normal(blocks.shape[:2]) / 100).astype(np.float16)
        blocks[..., first : first + 2] = scales.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return Quantised(kind, blocks.reshape(rows, -1), (rows, columns))


def random_parts(operation: str, outputs: int, inputs: int) -> list[torch.Tensor]:
    """The matrices that an operation takes."""
    draw = torch.Generator().manual_seed(inputs)
    parts = 2 if operation == "multiply_gated" else 1
    return [torch.randn(outputs, inputs, generator=draw) / inputs**0.5 for _ in range(parts)]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("shape", [(72, 100), (128, 368), (300, 33), (1536, 64)])
def test_products_equal_reference(kernels, shape, operation) -> None:
    """Odd widths and depths, one row to more than a piece: as torch has it, up to rounding."""
    inputs, outputs = shape
    reference, parts = Kernels(CPU, torch.float32), random_parts(operation, *shape[::-1])
    ours, theirs = (each.pack(parts, len(parts) == 2) for each in (kernels, reference))
    assert ours.shape == theirs.shape == shape
    for rows in (1, 3, 14, 15, 29, 257):
        x, out = torch.randn(rows, inputs), torch.randn(rows, outputs)
        expected = out.clone()
        getattr(kernels, operation)(x, ours, out)
        getattr(reference, operation)(x, theirs, expected)
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_products_are_those_of_the_dequantised(kernels, kind, operation) -> None:
    """Kept quantised or as float32, equal weights give equal bits; and take fewer bytes."""
    gated = operation == "multiply_gated"
    parts = [random_blocks(kind, 80, 768, seed) for seed in range(2 if gated else 1)]
    small = kernels.pack(parts, gated)
    wide = kernels.pack([torch.from_numpy(part.dequantise()) for part in parts], gated)
    assert isinstance(small, Panels)
    assert small.form.bits < 32
    assert small.nbytes < wide.nbytes / 2.5
    for rows in (1, 2, 7, 40):
        x = torch.randn(rows, 768, generator=torch.Generator().manual_seed(rows))
        one = torch.ones(rows, 80)
        other = one.clone()
        getattr(kernels, operation)(x, small, one)
        getattr(kernels, operation)(x, wide, other)
        assert torch.equal(one, other)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_row_is_its_own(kernels: CpuKernels, operation: str) -> None:
    """A row's bits are the same alone, at any place, and among any number of rows."""
    parts = random_parts(operation, 100, 300)
    matrix = kernels.pack(parts, len(parts) == 2)
    x = torch.randn(530, 300, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros(530, 100)
    getattr(kernels, operation)(x, matrix, expected)
    for first, count in ((0, 1), (529, 1), (3, 2), (100, 13), (255, 3), (10, 64), (1, 300)):
        out = torch.zeros(count, 100)
        getattr(kernels, operation)(x[first : first + count], matrix, out)
        assert torch.equal(out, expected[first : first + count]), (first, count)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_columns_are_the_weights(kernels: CpuKernels, kind: str | None) -> None:
    """A tied embedding's rows come back exactly, in the order asked, repeated ones too."""
    chosen = torch.tensor([40, 0, 39, 40, 7])
    if kind is None:
        weight = torch.randn(41, 100)
        matrix = kernels.pack([weight])
    else:
        blocks = random_blocks(kind, 41, 256)
        weight, matrix = torch.from_numpy(blocks.dequantise()), kernels.pack([blocks])
    out = torch.empty(5, weight.shape[1])
    kernels.columns(matrix, chosen, out)
    assert torch.equal(out, weight[chosen])


def test_parts_of_unlike_kinds_keep_their_own(kernels: CpuKernels) -> None:
    """Each as small as it was, with equal bits; a gated pair of two kinds is held in float32."""
    blocks = [random_blocks(kind, 48, 256) for kind in ("Q4_K", "Q4_K", "Q6_K")]
    plain = torch.randn(20, 256, generator=torch.Generator().manual_seed(0))
    mixed = kernels.pack([*blocks, plain])
    wide = kernels.pack([*(torch.from_numpy(part.dequantise()) for part in blocks), plain])
    assert isinstance(mixed, Beside)
    assert [part.form.bits for part in mixed.parts] == [4, 8, 32]
    assert mixed.shape == wide.shape == (256, 164)
    assert mixed.nbytes == sum(part.nbytes for part in mixed.parts) < wide.nbytes / 2
    for rows in (1, 5, 40):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
        one, other = torch.ones(rows, 164), torch.zeros(rows, 164)
        kernels.multiply(x, mixed, one)
        kernels.multiply(x, wide, other)
        assert torch.equal(one, other)
    gated = kernels.pack([blocks[0], blocks[2]], gated=True)
    assert isinstance(gated, Panels)
    assert gated.form.bits == 32
