"""Matrix products whose rows have the same bits in whatever batch: fixed tiles, fixed order.

A row's sums are taken in chunks of inputs of a constant length, chunk by chunk; within a chunk
tensor cores add up STEP inputs at a time. Of a small product every chunk has programs of its own,
whose sums are then added in the same order, or most of the GPU would wait; of a large one a program
takes all chunks. It is the same arithmetic: the number of rows decides only which is faster.

    x [T, SIZE], rows x_stride elements apart; weight [outputs, SIZE], of GATED both parts' outputs
    out [T, outputs], rows out_stride elements apart
    parts float32 [chunks, T, outputs], of GATED both parts' outputs
"""

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)  # out = x @ weight
ADD = tl.constexpr(1)  # out += x @ weight
GATED = tl.constexpr(2)  # out = silu(x @ first part) * (x @ second part)


@triton.jit
def _chunk(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    row: tl.tensor,  # int64 [ROWS]
    rows: tl.tensor,
    output: tl.tensor,  # int64 [OUTPUTS]: rows of weight
    there: tl.tensor,  # [OUTPUTS]: which of them exist
    begin: tl.tensor,  # inputs begin .. begin + CHUNK - 1
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Sums float32 [ROWS, OUTPUTS] over one chunk of inputs."""
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, CHUNK, STEP):
        at = begin + start + tl.arange(0, STEP)
        real = (at < SIZE)[None, :]
        left = tl.load(
            x + (row * x_stride)[:, None] + at[None, :],
            mask=(row < rows)[:, None] & real,
            other=0.0,
        )
        right = tl.load(
            weight + (output * SIZE)[:, None] + at[None, :], mask=there[:, None] & real, other=0.0
        )
        sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
    return sums


@triton.jit
def _finish(
    sums: tl.tensor, ups: tl.tensor, out: tl.tensor, mask: tl.tensor, MODE: tl.constexpr
) -> None:
    """Writes sums to where `out` points; ups: sums of the second part, of GATED."""
    if MODE == ADD:
        sums += tl.load(out, mask=mask, other=0.0).to(tl.float32)
    if MODE == GATED:
        sums = sums / (1.0 + tl.exp(-sums)) * ups
    tl.store(out, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def product(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    rows: tl.tensor,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,  # outputs, of GATED of one part
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    MODE: tl.constexpr,
) -> None:
    """All chunks by one program; grid: (rows / ROWS, COUNT / OUTPUTS), rounded up."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = output < COUNT
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    ups = sums
    for begin in range(0, SIZE, CHUNK):
        sums += _chunk(
            x, x_stride, weight, row, rows, output, there, begin, SIZE, ROWS, OUTPUTS, STEP, CHUNK
        )
        if MODE == GATED:
            ups += _chunk(
                x, x_stride, weight, row, rows, output + COUNT, there, begin,
                SIZE, ROWS, OUTPUTS, STEP, CHUNK,
            )  # fmt: skip
    target = out + (row * out_stride)[:, None] + output[None, :]
    _finish(sums, ups, target, (row < rows)[:, None] & there[None, :], MODE)


@triton.jit(do_not_specialize=["rows"])
def parts_of(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    parts: tl.tensor,
    rows: tl.tensor,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,  # outputs, of GATED of both parts
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """One chunk by one program; grid: (rows / ROWS, COUNT / OUTPUTS, SIZE / CHUNK), rounded up."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = output < COUNT
    chunk = tl.program_id(2)
    sums = _chunk(
        x, x_stride, weight, row, rows, output, there, chunk * CHUNK,
        SIZE, ROWS, OUTPUTS, STEP, CHUNK,
    )  # fmt: skip
    at = ((chunk.to(tl.int64) * rows + row) * COUNT)[:, None] + output[None, :]
    tl.store(parts + at, sums, mask=(row < rows)[:, None] & there[None, :])


@triton.jit(do_not_specialize=["rows"])
def add_parts(
    parts: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    rows: tl.tensor,
    CHUNKS: tl.constexpr,
    COUNT: tl.constexpr,  # outputs, of GATED of one part
    TAKEN: tl.constexpr,  # outputs of one program
    MODE: tl.constexpr,
) -> None:
    """Adds the chunks of one row in order; grid: (rows, COUNT / TAKEN rounded up)."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * TAKEN + tl.arange(0, TAKEN)
    there = output < COUNT
    WIDTH: tl.constexpr = COUNT * (2 if MODE == GATED else 1)
    sums = tl.zeros([TAKEN], tl.float32)
    ups = sums
    for chunk in range(CHUNKS):
        source = parts + (chunk * rows + row) * WIDTH + output
        sums += tl.load(source, mask=there, other=0.0)
        if MODE == GATED:
            ups += tl.load(source + COUNT, mask=there, other=0.0)
    _finish(sums, ups, out + row * out_stride + output, there, MODE)
