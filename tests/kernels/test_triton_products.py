"""Products in fixed tiles are right, and a row's bits are its own whatever the batch."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")

from tests.kernels.synthetic import TOLERANCES, check_same
from workbench.kernels import Kernels
from workbench.kernels.triton import INTERPRETED, TritonKernels
from workbench.kernels.triton.products import FixedTiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = FixedTiles(rows=16, outputs=16, wide=32, step=16, chunk=32, enough=1000)


def kernels(dtype: torch.dtype, tiles: FixedTiles | None = SMALL) -> TritonKernels:
    ours = TritonKernels(DEVICE, dtype, batch_invariant=True)
    ours.products = tiles or ours.products
    return ours


def random(*size: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(sum(size))
    return (torch.randn(*size, generator=draw) / size[-1] ** 0.5).to(DEVICE, dtype)


def compare(rows: int, inputs: int, outputs: int, dtype: torch.dtype, tiles: FixedTiles | None):
    """Plain, added and gated, against the twin in float32 of the same numbers."""
    ours, twin = kernels(dtype, tiles), Kernels(DEVICE, torch.float32)
    x, first = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype)
    second = random(outputs, inputs, dtype=dtype).flip(0)
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    for name, parts in (("", [first]), ("_add", [first]), ("_gated", [first, second])):
        out = random(rows, outputs, dtype=dtype)
        expected = out.float()
        gated = len(parts) == 2
        getattr(ours, f"multiply{name}")(x, ours.pack(parts, gated), out)
        wide = twin.pack([part.float() for part in parts], gated)
        getattr(twin, f"multiply{name}")(x.float(), wide, expected)
        torch.testing.assert_close(out.float(), expected, **close)


@pytest.mark.parametrize("enough", [0, 1000], ids=["one_program", "parts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_products_equal_their_twins(dtype: torch.dtype, enough: int) -> None:
    """Sizes that no tile divides, chunk by chunk by one program or each by its own."""
    compare(19, 71, 37, dtype, SMALL._replace(enough=enough))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 64, 700])
def test_products_on_the_device(rows: int, dtype: torch.dtype) -> None:
    """The tiles as they are used."""
    compare(rows, 2048, 1544, dtype, None)


def check_rows(dtype: torch.dtype, tiles: FixedTiles, inputs: int, most: int = 40) -> None:
    x, weight = random(most, inputs, dtype=dtype), random(64, inputs, dtype=dtype)
    whole = torch.empty(most, 32, dtype=dtype, device=DEVICE)
    for enough in (0, 1000):
        ours = kernels(dtype, tiles._replace(enough=enough))
        matrix = ours.pack([weight[:32], weight[32:]], gated=True)
        for first, last in ((0, most), (0, 1), (17, 40), (39, 40)):
            out = torch.empty(last - first, 32, dtype=dtype, device=DEVICE)
            ours.multiply_gated(x[first:last], matrix, out)
            if (enough, first, last) == (0, 0, most):
                whole = out
            check_same(out, whole[first:last], INTERPRETED)


def test_a_row_s_products_are_its_own() -> None:
    """The same bits alone, in a batch, and by either kind of launch."""
    check_rows(torch.float32, SMALL, 70)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_row_s_products_are_its_own_on_the_device(dtype: torch.dtype) -> None:
    """By tensor cores, with the tiles as they are used."""
    check_rows(dtype, FixedTiles(), 2048, most=300)
