"""Kernels that go row by row: norms, SwiGLU, rotation and storing of keys and values.

All compute in float32 and round once; a row's result depends on no other row.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x: tl.tensor,  # [T, SIZE], rows x_stride elements apart
    x_stride: tl.tensor,
    weight: tl.tensor,  # [SIZE]
    out: tl.tensor,  # [T, SIZE], rows out_stride elements apart
    out_stride: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # SIZE rounded up to a power of two
) -> None:
    """out = x / rms(x), rounded, times weight; grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    mask = at < SIZE
    values = tl.load(x + row * x_stride + at, mask=mask, other=0.0)
    wide = values.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)
    factor = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    normed = (wide * scale).to(values.dtype).to(tl.float32) * factor
    tl.store(out + row * out_stride + at, normed.to(values.dtype), mask=mask)


@triton.jit
def gate(
    both: tl.tensor,  # [T, 2 SIZE]: gate, then up
    out: tl.tensor,  # [T, SIZE], rows out_stride elements apart
    out_stride: tl.tensor,
    SIZE: tl.constexpr,
    TAKEN: tl.constexpr,  # outputs of one program
) -> None:
    """out = silu(gate) * up; grid: (rows, SIZE / TAKEN rounded up)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TAKEN + tl.arange(0, TAKEN)
    mask = at < SIZE
    source = both + row * (2 * SIZE) + at
    gates = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    ups = tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)
    result = gates / (1.0 + tl.exp(-gates)) * ups
    tl.store(out + row * out_stride + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["width"])
def rotate_and_store(
    qkv: tl.tensor,  # [T, (HEADS + 2 KV_HEADS) 2 HALF], rows qkv_stride elements apart
    qkv_stride: tl.tensor,
    cosine: tl.tensor,  # [positions, HALF]
    sine: tl.tensor,  # [positions, HALF]
    positions: tl.tensor,  # int64 [T]
    sequence: tl.tensor,  # int64 [T]
    tables: tl.tensor,  # int64 [S, width]: block offsets in elements
    width: tl.tensor,
    data: tl.tensor,  # the layer's blocks, the one at offset 0 first
    HEADS: tl.constexpr,  # of queries
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # half of head_dim: the pairs that are rotated
    PADDED: tl.constexpr,  # HALF rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    TAKEN: tl.constexpr,  # heads of one program, queries' and keys'
    BY_POSITION: tl.constexpr,  # a head's keys are [BLOCK_SIZE, head_dim], not the transpose
) -> None:
    """Rotates pairs (i, i + HALF) of queries and keys in place; stores keys and values.

    grid: (T, (HEADS + KV_HEADS) / TAKEN rounded up); who rotates a key stores it and its value.
    Nothing is done for a row at position -1.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TAKEN + tl.arange(0, TAKEN)
    pair = tl.arange(0, PADDED)
    position = tl.load(positions + row)
    real = pair < tl.where(position >= 0, HALF, 0)  # rows beyond a step's own are at -1
    mask = (head < HEADS + KV_HEADS)[:, None] & real[None, :]
    angle = position * HALF + pair
    c = tl.load(cosine + angle, mask=real, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sine + angle, mask=real, other=0.0).to(tl.float32)[None, :]
    source = qkv + row * qkv_stride + (head * (2 * HALF))[:, None] + pair[None, :]
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    first = (a * c - b * s).to(qkv.dtype.element_ty)
    second = (b * c + a * s).to(qkv.dtype.element_ty)
    tl.store(source, first, mask=mask)
    tl.store(source + HALF, second, mask=mask)

    kept = mask & (head >= HEADS)[:, None]
    block_number = tl.maximum(position, 0) // BLOCK_SIZE
    offset = tl.load(tables + tl.load(sequence + row) * width + block_number)
    slot = position % BLOCK_SIZE
    block = data + offset + ((head - HEADS) * (2 * HALF * BLOCK_SIZE))[:, None]
    if BY_POSITION:
        key_at, stride = slot * (2 * HALF), 1
    else:
        key_at, stride = slot, BLOCK_SIZE
    key = block + key_at + (pair * stride)[None, :]
    tl.store(key, first, mask=kept)
    tl.store(key + HALF * stride, second, mask=kept)
    value = block + KV_HEADS * 2 * HALF * BLOCK_SIZE + slot * (2 * HALF) + pair[None, :]
    given = source + KV_HEADS * 2 * HALF
    tl.store(value, tl.load(given, mask=kept, other=0.0), mask=kept)
    tl.store(value + HALF, tl.load(given + HALF, mask=kept, other=0.0), mask=kept)
