"""Matrix products whose rows have the same bits in whatever batch: fixed tiles, fixed order.

A row's sums are taken in chunks of inputs of a constant length, chunk by chunk; within a chunk
tensor cores add up `step` inputs at a time. Of a small product every chunk has programs of its own,
whose sums are then added in the same order; of a large one a program takes all. It is the same
arithmetic: the number of rows decides only which is faster.

    x [T, inputs] and out [T, outputs], each with its rows' stride in elements
    weight [outputs, inputs], of GATED both parts' outputs
    parts float32 [chunks, T, outputs], of GATED both parts' outputs
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

PLAIN = tl.constexpr(0)  # out = x @ weight
ADD = tl.constexpr(1)  # out += x @ weight
GATED = tl.constexpr(2)  # out = silu(x @ first part) * (x @ second part)
_ADDED_AT_ONCE = 256


@triton.jit
def _add_chunk(
    sums: tl.tensor, left: tl.tensor, right: tl.tensor, there: tl.tuple, begin: tl.tensor,
    SIZE: tl.constexpr, TILES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """sums float32 [rows, outputs] plus the sums over inputs begin .. begin + chunk - 1.

    left, right: where rows [rows, 1] of x and [outputs, 1] of weight begin; there: which exist.
    """
    rows, outputs = there
    STEP: tl.constexpr = TILES.step
    chunk = tl.zeros_like(sums)
    for start in range(0, TILES.chunk, STEP):
        at = (begin + start + tl.arange(0, STEP))[None, :]
        x = tl.load(left + at, mask=rows & (at < SIZE), other=0.0)
        weight = tl.load(right + at, mask=outputs & (at < SIZE), other=0.0)
        chunk = tl.dot(x, tl.trans(weight), chunk, input_precision="ieee")
    return sums + chunk


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
    x: tl.tuple, weight: tl.tensor, out: tl.tuple, rows: tl.tensor, SIZE: tl.constexpr,
    COUNT: tl.constexpr, CHUNKS: tl.constexpr, MODE: tl.constexpr, TILES: tl.constexpr,
) -> None:  # fmt: skip
    """Chunks by one program; grid: (T / rows, COUNT / outputs, chunks / CHUNKS), rounded up.

    SIZE: inputs; COUNT: outputs, of GATED of one part; CHUNKS: of one program, all of them or, of
    parts, one.
    """
    source, x_stride = x
    target, out_stride = out
    ROWS: tl.constexpr = TILES.rows
    OUTPUTS: tl.constexpr = TILES.outputs
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = ((row < rows)[:, None], (output < COUNT)[:, None])
    left, right = source + (row * x_stride)[:, None], weight + (output * SIZE)[:, None]
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    ups = sums
    part = tl.program_id(2)
    first = part * CHUNKS * TILES.chunk
    for begin in range(first, first + CHUNKS * TILES.chunk, TILES.chunk):
        sums = _add_chunk(sums, left, right, there, begin, SIZE, TILES)
        if MODE == GATED:
            ups = _add_chunk(ups, left, right + COUNT * SIZE, there, begin, SIZE, TILES)
    at = ((part.to(tl.int64) * rows + row) * out_stride)[:, None] + output[None, :]
    _finish(sums, ups, target + at, (row < rows)[:, None] & (output < COUNT)[None, :], MODE)


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


class FixedTiles(NamedTuple):
    """How every product is cut up, as timed on an H100; `step` and `chunk` are part of arithmetic.

    wide: outputs of a program where there are more rows than one takes; enough: programs that keep
    a GPU busy; with fewer, every chunk of inputs has its own.
    """

    rows: int = 64
    outputs: int = 64
    wide: int = 128
    step: int = 64
    chunk: int = 512
    warps: int = 4
    stages: int = 4
    enough: int = 100

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, mode: int) -> None:
        """x [T, inputs] by weight [outputs, inputs] into out, as `mode` says."""
        rows, (total, size), count = len(x), weight.shape, out.shape[1]
        assert total == count * (2 if mode == GATED.value else 1), "weight and out disagree"
        chunks = triton.cdiv(size, self.chunk)
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}
        tiles, given = triton.cdiv(rows, self.rows), ((x, x.stride(0)), weight)
        cut = self._replace(outputs=self.wide) if tiles > 1 and mode != GATED.value else self
        if tiles * triton.cdiv(count, cut.outputs) >= self.enough:
            product[(tiles, triton.cdiv(count, cut.outputs))](
                *(*given, (out, out.stride(0)), rows, size, count, chunks, mode, cut), **options
            )
            return
        parts = x.new_empty((chunks, rows, total), dtype=torch.float32)
        product[(tiles, triton.cdiv(total, cut.outputs), chunks)](
            *(*given, (parts, total), rows, size, total, 1, PLAIN.value, cut), **options
        )
        add_parts[(rows, triton.cdiv(count, _ADDED_AT_ONCE))](
            *(parts, out, out.stride(0), rows, chunks, count, _ADDED_AT_ONCE, mode),
            enable_fp_fusion=False,
        )


FULL_PRECISION = FixedTiles(32, 32, wide=32, step=32, stages=2)  # float32: no tensor cores
