"""Logits of some columns at some rows: all that a process reward model is asked for.

Two columns of a vocabulary of 128,256 are read where they lie; nothing else is computed or copied.
"""

import triton
import triton.language as tl


@triton.jit
def selected_logits(
    hidden: tl.tensor,  # [T, SIZE], rows hidden_stride elements apart
    hidden_stride: tl.tensor,
    rows: tl.tensor,  # int64 [R]
    weight: tl.tensor,  # [outputs, SIZE]
    numbers: tl.tensor,  # int64 [C]: outputs
    out: tl.tensor,  # [R, C]
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,  # C
    COLUMNS: tl.constexpr,  # columns of one program
    TAKEN: tl.constexpr,  # dimensions at a time
) -> None:
    """out = hidden[rows] . weight[numbers]; grid: (R, C / COLUMNS rounded up).

    Each of TAKEN partial sums adds every TAKEN-th product in order; then they are added up.
    """
    at = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = column < COUNT
    row = hidden + tl.load(rows + at) * hidden_stride
    outputs = weight + (tl.load(numbers + column, mask=wanted, other=0) * SIZE)[:, None]
    sums = tl.zeros([COLUMNS, TAKEN], tl.float32)
    for start in range(0, SIZE, TAKEN):
        dimension = start + tl.arange(0, TAKEN)
        real = dimension < SIZE
        state = tl.load(row + dimension, mask=real, other=0.0).to(tl.float32)
        mask = wanted[:, None] & real[None, :]
        weights = tl.load(outputs + dimension[None, :], mask=mask, other=0.0).to(tl.float32)
        sums += weights * state[None, :]
    logits = tl.sum(sums, 1).to(out.dtype.element_ty)
    tl.store(out + at * COUNT + column, logits, mask=wanted)
