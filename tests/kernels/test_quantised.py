"""Blocks of every kind mean what the `gguf` package says they mean."""

import gguf
import numpy as np
import pytest
from gguf import quants

from workbench.kernels.quantised import FORMATS, Quantised, join

ROWS, COLUMNS = 37, 768

# Random bytes are scales too, infinite ones and NaN among them.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")


def random_blocks(kind: str, seed: int = 0) -> Quantised:
    """A matrix whose bytes are any: infinite and denormal scales among them."""
    form = FORMATS[kind]
    size = COLUMNS // form.columns * form.size
    rows = np.random.default_rng(seed).integers(0, 256, (ROWS, size), dtype=np.uint8)
    rows.flags.writeable = False  # as a mapped file is
    return Quantised(kind, rows, (ROWS, COLUMNS))


@pytest.mark.parametrize("kind", FORMATS)
def test_values_are_those_of_the_gguf_package(kind: str) -> None:
    """Equal, but for the sign of a zero, so that the tokens of a model do not depend on who
    dequantised it.
    """
    matrix = random_blocks(kind)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = quants.dequantize(matrix.rows, gguf.GGMLQuantizationType[kind])
    given = matrix.dequantise()
    assert given.dtype == np.float32
    assert np.array_equal(given, expected, equal_nan=True)
    assert np.isfinite(given).mean() > 0.9


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_are_picked_and_joined_without_a_change(kind: str) -> None:
    """What fusing projections and undoing a permutation of rows rely on."""
    one, two = random_blocks(kind), random_blocks(kind, 1)
    order = np.random.default_rng(2).permutation(ROWS)
    joined = join([one.pick(order), two])
    expected = np.concatenate([one.dequantise()[order], two.dequantise()])
    assert joined.shape == (2 * ROWS, COLUMNS)
    assert joined.nbytes == one.nbytes + two.nbytes
    assert np.array_equal(joined.dequantise(), expected, equal_nan=True)


def test_bytes_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(AssertionError):
        Quantised("Q4_0", np.zeros((2, 17), np.uint8), (2, 32))
