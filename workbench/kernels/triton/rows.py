"""Kernels that go row by row: norms, SwiGLU, rotation and storing, logits of columns, tokens.

The first compute in float32 and round once; a row's result depends on no other row. Rows of a
matrix are its stride in elements apart; SIZE: their length.

Tokens are chosen where the logits are: only token ids leave the device. The vocabulary is cut into
pieces of a constant length, a program each; what they find is put together in order by one program
a row. The reference is `Kernels.choose`, and sums in float64 are added up in another order here.

    logits [R, VOCAB], with its rows' stride in elements
    temperature float64 [R], 0: nothing is drawn; noise float64 [R] in [0, 1)
    tops float32 [R, pieces]: the largest logit of each piece of PIECE logits
    places int64 [R, pieces]: the first token that has it
    weights float64 [R, pieces]: sums of exp((logit - largest) / temperature)
    found int64 [2, R]: tokens; whether the largest logit is finite
"""

import torch
import triton
import triton.language as tl

PIECE = tl.constexpr(4096)  # logits of one program
HEADS_AT_ONCE = tl.constexpr(8)  # queries' and keys', rotated by one program
OUTPUTS = tl.constexpr(1024)  # of SwiGLU, by one program
DIMENSIONS = tl.constexpr(512)  # of selected logits, summed up side by side


@triton.jit
def rms_norm(
    x: tl.tensor, x_stride: tl.tensor, weight: tl.tensor, out: tl.tensor, out_stride: tl.tensor,
    epsilon: tl.tensor, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """out [T, SIZE] = x / rms(x), rounded, times weight [SIZE]; grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, triton.next_power_of_2(SIZE))
    mask = at < SIZE
    values = tl.load(x + row * x_stride + at, mask=mask, other=0.0)
    wide = values.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)
    factor = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    normed = (wide * scale).to(values.dtype).to(tl.float32) * factor
    tl.store(out + row * out_stride + at, normed.to(values.dtype), mask=mask)


@triton.jit
def layer_norm(
    x: tl.tensor, x_stride: tl.tensor, weight: tl.tensor, out: tl.tensor, out_stride: tl.tensor,
    epsilon: tl.tensor, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """out [T, SIZE] = (x - mean) / deviation * weight + bias, of weight [2, SIZE]; grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, triton.next_power_of_2(SIZE))
    mask = at < SIZE
    values = tl.load(x + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    apart = tl.where(mask, values - tl.sum(values, 0) / SIZE, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(apart * apart, 0) / SIZE + epsilon)
    factor = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    offset = tl.load(weight + SIZE + at, mask=mask, other=0.0).to(tl.float32)
    normed = apart * scale * factor + offset
    tl.store(out + row * out_stride + at, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gelu(row: tl.tensor, out: tl.tensor, out_stride: tl.tensor, SIZE: tl.constexpr) -> None:
    """out [T, SIZE] = GELU(out + row), by its tanh; grid: (T, SIZE / OUTPUTS rounded up)."""
    at = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = at < SIZE
    place = out + tl.program_id(0).to(tl.int64) * out_stride + at
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(row + at, mask=mask, other=0.0).to(tl.float32)
    z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    tl.store(place, (x / (1.0 + tl.exp(-2.0 * z))).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate(both: tl.tensor, out: tl.tensor, out_stride: tl.tensor, SIZE: tl.constexpr) -> None:
    """out [T, SIZE] = silu(gate) * up, both [T, 2 SIZE]; grid: (T, SIZE / OUTPUTS rounded up)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = at < SIZE
    source = both + row * (2 * SIZE) + at
    gates = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    ups = tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)
    result = gates / (1.0 + tl.exp(-gates)) * ups
    tl.store(out + row * out_stride + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["width"])
def rotate_and_store(
    qkv: tl.tensor, qkv_stride: tl.tensor, angles: tl.tuple, context: tl.tuple, width: tl.tensor,
    data: tl.tensor, SHAPE: tl.constexpr,
) -> None:  # fmt: skip
    """Rotates pairs (i, i + HALF) of queries and keys in place; stores keys and values.

    Pointers as in `attention`; angles: cosine, sine [positions, HALF]; context: positions,
    sequence, tables. grid: (T, queries' and keys' heads / HEADS_AT_ONCE rounded up). The program
    that rotates a key stores it and its value. Nothing is done for a row at position -1.
    """
    cosine, sine = angles
    positions, sequence, tables = context
    KV_HEADS: tl.constexpr = SHAPE.kv_heads
    HEADS: tl.constexpr = KV_HEADS * SHAPE.group
    HALF: tl.constexpr = SHAPE.head_dim // 2
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    pair = tl.arange(0, triton.next_power_of_2(HALF))
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
    key = block + slot * (2 * HALF) + pair[None, :]
    tl.store(key, first, mask=kept)
    tl.store(key + HALF, second, mask=kept)
    value = block + KV_HEADS * 2 * HALF * BLOCK_SIZE + slot * (2 * HALF) + pair[None, :]
    new = source + KV_HEADS * 2 * HALF
    tl.store(value, tl.load(new, mask=kept, other=0.0), mask=kept)
    tl.store(value + HALF, tl.load(new + HALF, mask=kept, other=0.0), mask=kept)


@triton.jit
def selected_logits(
    hidden: tl.tensor, hidden_stride: tl.tensor, rows: tl.tensor, weight: tl.tensor,
    numbers: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """out [R, C] = hidden[rows] . weight[numbers]; grid: (R, C / COLUMNS rounded up); COUNT: C.

    All that a process reward model is asked for: two columns of a vocabulary of 128,256 are read
    where they lie. rows int64 [R]; numbers int64 [C]: rows of weight. Each of DIMENSIONS partial
    sums adds every so manieth product in order; then they are added up.
    """
    at = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = column < COUNT
    row = hidden + tl.load(rows + at) * hidden_stride
    outputs = weight + (tl.load(numbers + column, mask=wanted, other=0) * SIZE)[:, None]
    sums = tl.zeros([COLUMNS, DIMENSIONS], tl.float32)
    for start in range(0, SIZE, DIMENSIONS):
        dimension = start + tl.arange(0, DIMENSIONS)
        real = dimension < SIZE
        state = tl.load(row + dimension, mask=real, other=0.0).to(tl.float32)
        mask = wanted[:, None] & real[None, :]
        weights = tl.load(outputs + dimension[None, :], mask=mask, other=0.0).to(tl.float32)
        sums += weights * state[None, :]
    logits = tl.sum(sums, 1).to(out.dtype.element_ty)
    tl.store(out + at * COUNT + column, logits, mask=wanted)


@triton.jit
def largest_of(
    logits: tl.tensor, logits_stride: tl.tensor, tops: tl.tensor, places: tl.tensor,
    VOCAB: tl.constexpr,
) -> None:  # fmt: skip
    """grid: (R, pieces). A piece with a NaN has that as its largest."""
    PIECES: tl.constexpr = triton.cdiv(VOCAB, PIECE)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    token = piece * PIECE + tl.arange(0, PIECE)
    source = logits + row * logits_stride + token
    values = tl.load(source, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    broken = tl.max((values != values).to(tl.int32), 0) > 0
    top = tl.max(tl.where(values != values, float("-inf"), values), 0)
    place = tl.min(tl.where(values == top, token, VOCAB), 0)
    tl.store(tops + row * PIECES + piece, tl.where(broken, float("nan"), top))
    tl.store(places + row * PIECES + piece, place.to(tl.int64))


@triton.jit
def weights_of(
    logits: tl.tensor, logits_stride: tl.tensor, temperature: tl.tensor, tops: tl.tensor,
    weights: tl.tensor, VOCAB: tl.constexpr,
) -> None:  # fmt: skip
    """grid: (R, pieces)."""
    PIECES: tl.constexpr = triton.cdiv(VOCAB, PIECE)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    number = tl.arange(0, triton.next_power_of_2(PIECES))
    there = number < PIECES
    top = tl.max(tl.load(tops + row * PIECES + number, mask=there, other=float("-inf")), 0)
    heat = tl.load(temperature + row)
    heat = tl.where(heat > 0.0, heat, 1.0)
    token = piece * PIECE + tl.arange(0, PIECE)
    source = logits + row * logits_stride + token
    values = tl.load(source, mask=token < VOCAB, other=float("-inf")).to(tl.float64)
    each = tl.where(token < VOCAB, tl.exp((values - top.to(tl.float64)) / heat), 0.0)
    tl.store(weights + row * PIECES + piece, tl.sum(each, 0))


@triton.jit
def token_of(
    logits: tl.tensor, logits_stride: tl.tensor, temperature: tl.tensor, noise: tl.tensor,
    tops: tl.tensor, places: tl.tensor, weights: tl.tensor, found: tl.tensor,
    VOCAB: tl.constexpr,
) -> None:  # fmt: skip
    """The first token whose weights up to it exceed noise times all of them; grid: rows."""
    PIECES: tl.constexpr = triton.cdiv(VOCAB, PIECE)
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, triton.next_power_of_2(PIECES))
    there = number < PIECES
    top = tl.load(tops + row * PIECES + number, mask=there, other=float("-inf"))
    broken = tl.max((top != top).to(tl.int32), 0) > 0
    largest = tl.max(tl.where(top != top, float("-inf"), top), 0)
    place = tl.load(places + row * PIECES + number, mask=there, other=VOCAB)
    token = tl.min(tl.where(top == largest, place, VOCAB), 0).to(tl.int64)
    finite = (largest < float("inf")) & (largest > float("-inf")) & (broken == 0)
    heat = tl.load(temperature + row)
    if (heat > 0.0) & finite:
        part = tl.load(weights + row * PIECES + number, mask=there, other=0.0)
        up_to = tl.cumsum(part, 0)
        wanted = tl.load(noise + row) * tl.max(up_to, 0)
        piece = tl.sum((there & (up_to <= wanted)).to(tl.int32), 0)
        piece = tl.minimum(piece, PIECES - 1)
        before = tl.max(tl.where(number < piece, up_to, 0.0), 0)
        at = tl.arange(0, PIECE)
        source = logits + row * logits_stride + piece * PIECE + at
        real = piece * PIECE + at < VOCAB
        values = tl.load(source, mask=real, other=float("-inf")).to(tl.float64)
        each = tl.where(real, tl.exp((values - largest.to(tl.float64)) / heat), 0.0)
        sums = before + tl.cumsum(each, 0)
        drawn = tl.sum((sums <= wanted).to(tl.int32), 0)
        # Rounding may leave nothing above: then the last token of any weight.
        last = tl.max(tl.where(each > 0.0, at, 0), 0)
        token = (piece * PIECE + tl.minimum(drawn, last)).to(tl.int64)
    rows = tl.num_programs(0)
    tl.store(found + row, token)
    tl.store(found + rows + row, finite.to(tl.int64))


def choose(logits: torch.Tensor, temperature: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """int64 [2, R]: tokens of logits [R, vocab], and whether each row's largest is finite."""
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE.value)
    tops = logits.new_empty((rows, pieces), dtype=torch.float32)
    places = logits.new_empty((rows, pieces), dtype=torch.int64)
    weights = logits.new_empty((rows, pieces), dtype=torch.float64)
    found = logits.new_empty((2, rows), dtype=torch.int64)
    source = (logits, logits.stride(0))
    largest_of[(rows, pieces)](*source, tops, places, vocab)
    weights_of[(rows, pieces)](*source, temperature, tops, weights, vocab)
    token_of[(rows,)](*source, temperature, noise, tops, places, weights, found, vocab)
    return found
