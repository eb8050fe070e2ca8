"""Single rows that begin with the same blocks attend to them together, and nobody can tell."""

import numpy as np
import pytest
import torch

from tests.kernels.synthetic import context_of, random_step
from tests.kernels.test_kernels import HEADS, attended, cpu
from workbench.kernels import ForwardContext
from workbench.kernels.cpu.attention import find_siblings

SHAPES = {name: HEADS[name] for name in ("solver", "odd_group", "smollm2", "mha")}
SHAPES |= {"llama_1b": (8, 2, 64), "more_heads_than_a_tile": (50, 1, 16)}


@pytest.mark.parametrize("siblings", [2, 5, 20])
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_siblings_attend_as_if_alone(shape: str, block_size: int, siblings: int) -> None:
    """Blocks read once for all siblings give the bits of each one's own copy of them."""
    sequences = [(96 + 7 * number % 50, 1) for number in range(siblings)]
    how = {"by_position": False, "shared": 96}
    together = random_step(SHAPES[shape], sequences, block_size, **how)
    alone = random_step(SHAPES[shape], sequences, block_size, **how, copied=True)
    assert torch.equal(attended(cpu, together), attended(cpu, alone))


def groups_of(context: ForwardContext, group: int = 2) -> list[tuple[int, int, int]]:
    """(first row, row behind the last, shared positions) of each group."""
    bounds, table = context.pieces.copy(), context.block_offsets
    shared = np.empty(len(bounds) - 1, np.int64)
    where = table.ctypes.data, table.shape[1], BLOCK, group
    count = find_siblings(bounds, context.positions, context.sequence, *where, shared)
    return [(int(bounds[i]), int(bounds[i + 1]), int(shared[i])) for i in range(count)]


def families(*tables: list[int], cached: int = 200) -> ForwardContext:
    """Single rows whose tables of blocks begin as given and go on with blocks of their own."""
    blocks = cached // BLOCK + 1
    own = iter(range(1000, 10_000))
    offsets = [[*table, *(next(own) for _ in range(blocks - len(table)))] for table in tables]
    return context_of([(cached, 1)] * len(tables), offsets)


BLOCK, A, B = 16, [1, 2, 3, 4, 5, 6, 7, 8], [21, 22, 23, 24, 25, 26]


@pytest.mark.parametrize(
    ("tables", "group", "expected"),
    [
        ([A[:4]] * 3 + [[], B, B], 2, [(0, 3, 64), (3, 4, 0), (4, 6, 96)]),  # two, and a stranger
        ([A[:5]] * 2, 2, [(0, 2, 64)]),  # five blocks are two whole tiles of 32
        ([A[:3]] * 2, 2, [(0, 1, 0), (1, 2, 0)]),  # three are too few
        ([A, A, A[:3]], 2, [(0, 2, 128), (2, 3, 0)]),  # most of what is shared is not given up
        ([A, A, A[:4], A[:4]], 2, [(0, 4, 64)]),  # half of it is
        ([A[:4]] * 30, 3, [(0, 16, 64), (16, 30, 64)]),  # 48 queries are a group's most
    ],
)
def test_rows_are_grouped_by_the_blocks_they_begin_with(tables, group, expected) -> None:
    """Guards speed: what siblings have in common is read once; no result depends on it."""
    assert groups_of(families(*tables), group) == expected


def test_rows_see_no_shared_block_past_their_own_position() -> None:
    """A table's stale entries beyond a sequence's end are not taken for something shared."""
    context = families(B, B)
    context.positions[1] = 70
    assert groups_of(context) == [(0, 2, 64)]


def test_pieces_of_a_prefill_stay_as_they_are() -> None:
    """Rows of one sequence are no siblings; a single row behind them joins nobody."""
    step = random_step(SHAPES["smollm2"], [(0, 40), (70, 1), (70, 1)], 16, shared=64)
    assert groups_of(step.context) == [(0, 32, 0), (32, 40, 0), (40, 42, 64)]
