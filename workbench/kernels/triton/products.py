"""Matrix products whose rows have the same bits in whatever batch: fixed tiles, fixed order.

A row's sums are taken in chunks of inputs of a constant length, chunk by chunk; within a chunk
tensor cores add up STEP inputs at a time. Of a small product every chunk has programs of its own,
whose sums are then added in the same order, or most of the GPU would wait; of a large one a program
takes all chunks. It is the same arithmetic: the number of rows decides only which is faster.

    x [T, SIZE], rows x_stride elements apart; weight [outputs, SIZE], of GATED both parts' outputs
    out [T, outputs], rows out_stride elements apart
    parts float32 [chunks, T, outputs], of GATED both parts' outputs
    COUNT: outputs, of GATED of one part in `product` and `add_parts`, of both in `parts_of`
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

PLAIN = tl.constexpr(0)  # out = x @ weight
ADD = tl.constexpr(1)  # out += x @ weight
GATED = tl.constexpr(2)  # out = silu(x @ first part) * (x @ second part)
_ADDED_AT_ONCE = 256


@triton.jit
def _chunk(
    x: tl.tensor, x_stride: tl.tensor, weight: tl.tensor, row: tl.tensor, rows: tl.tensor,
    output: tl.tensor, there: tl.tensor, begin: tl.tensor, SIZE: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sums float32 [ROWS, OUTPUTS] over inputs begin .. begin + CHUNK - 1.

    row int64 [ROWS]; output int64 [OUTPUTS]: rows of weight; there: which of them exist.
    """
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
    x: tl.tensor, x_stride: tl.tensor, weight: tl.tensor, out: tl.tensor, out_stride: tl.tensor,
    rows: tl.tensor, SIZE: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr, MODE: tl.constexpr,
) -> None:  # fmt: skip
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
    x: tl.tensor, x_stride: tl.tensor, weight: tl.tensor, parts: tl.tensor, rows: tl.tensor,
    SIZE: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    STEP: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
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
    parts: tl.tensor, out: tl.tensor, out_stride: tl.tensor, rows: tl.tensor,
    CHUNKS: tl.constexpr, COUNT: tl.constexpr, TAKEN: tl.constexpr, MODE: tl.constexpr,
) -> None:  # fmt: skip
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


@dataclass(frozen=True, slots=True)
class FixedTiles:
    """How every product is cut up; all but `enough` is part of the arithmetic.

    enough: programs that keep a GPU busy; with fewer, every chunk of inputs has its own.
    """

    rows: int = 64
    outputs: int = 64
    step: int = 64
    chunk: int = 512
    enough: int = 256
    warps: int = 4
    stages: int = 4

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, mode: int) -> None:
        """x [T, inputs] by weight [outputs, inputs] into out, as `mode` says."""
        rows, (total, size) = len(x), weight.shape
        count = out.shape[1]
        tile = {"ROWS": self.rows, "OUTPUTS": self.outputs, "STEP": self.step, "CHUNK": self.chunk}
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}
        tiles = triton.cdiv(rows, self.rows)
        if tiles * triton.cdiv(count, self.outputs) >= self.enough:
            product[(tiles, triton.cdiv(count, self.outputs))](
                *(x, x.stride(0), weight, out, out.stride(0), rows),
                SIZE=size,
                COUNT=count,
                MODE=mode,
                **tile,
                **options,
            )
            return
        assert total == count * (2 if mode == GATED.value else 1), "weight and out disagree"
        chunks = triton.cdiv(size, self.chunk)
        parts = x.new_empty((chunks, rows, total), dtype=torch.float32)
        parts_of[(tiles, triton.cdiv(total, self.outputs), chunks)](
            *(x, x.stride(0), weight, parts, rows), SIZE=size, COUNT=total, **tile, **options
        )
        add_parts[(rows, triton.cdiv(count, _ADDED_AT_ONCE))](
            *(parts, out, out.stride(0), rows),
            CHUNKS=chunks,
            COUNT=count,
            TAKEN=_ADDED_AT_ONCE,
            MODE=mode,
            enable_fp_fusion=False,
        )


def fixed_tiles(element_bytes: int) -> FixedTiles:
    """The tiles for a type: float32 has no tensor cores here, and wants smaller ones."""
    if element_bytes > 2:
        return FixedTiles(rows=32, outputs=32, step=32, stages=2)
    return FixedTiles()
