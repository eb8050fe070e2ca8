"""Kernels that go row by row: norms, SwiGLU, rotation and storing, logits of columns, tokens.

The first compute in float32 and round once; a row's result depends on no other row. Rows of a
matrix are its stride in elements apart; SIZE: their length. Tokens are chosen where the logits are.
The vocabulary is cut into pieces of a constant length, a program each; what they find is put
together in order by one program a row. Sums in float64 have another order than `Kernels.choose`'s.

    logits [R, VOCAB], with its rows' stride in elements
    temperature float64 [R], 0: nothing is drawn; noise float64 [R] in [0, 1)
    tops float32 [R, pieces]: the largest logit of each piece of PIECE logits
    places int64 [R, pieces]: the first token that has it
    weights float64 [R, pieces]: sums of exp((logit - largest) / temperature)
    found int64 [2, R]: tokens; whether the largest logit is finite

What filters keep is what comes first when logits are put in order, the largest first and equal ones
by their ids: a row's cut is the last that top_k and top_p keep, its logit and its id. A row's
logits are counted in bins of equal width, and only the bin that the cut is in is looked into.
Nothing depends on an order of additions: all sums are of integers, as the reference has them.

    filters float64 [R, 3], as `Kernels.choose` has them
    floors float32 [R, pieces]: a piece's word on the least logit that may be the cut; `span_of`
    bins int64 [R, 2, BINS]: logits that are in each bin, and the sum of their units
    cut: filters, and logits float32 [R] and ids int64 [R]; None where nothing is left out
"""

import torch
import triton
import triton.language as tl

PIECE = tl.constexpr(4096)  # logits of one program
HEADS_AT_ONCE = tl.constexpr(8)  # queries' and keys', rotated by one program
OUTPUTS = tl.constexpr(1024)  # of SwiGLU, by one program
DIMENSIONS = tl.constexpr(512)  # of selected logits, summed up side by side
BINS = tl.constexpr(2048)  # the last one: logits too small to be the cut
FILLED = tl.constexpr(2048)  # logits that one program counts in bins
RUNS = tl.constexpr(128)  # parts of a piece; so many logits are no less than each part's largest
CHUNK = tl.constexpr(4096)  # logits that one program looks through at a time
LISTED = tl.constexpr(1024)  # of the cut's bin, at a time
ALL_ZERO = tl.constexpr(746.0)  # exp(-746) is 0 in float64


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

    rows int64 [R]; numbers int64 [C]: rows of weight, read where they lie. Each of DIMENSIONS
    partial sums adds every so manieth product in order; then they are added up.
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
    bounds: tl.tuple, VOCAB: tl.constexpr,
) -> None:  # fmt: skip
    """grid: (R, pieces). A piece with a NaN has that as its largest. bounds: filters, floors."""
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
    if bounds is not None:
        filters, floors = bounds
        top_k = tl.load(filters + row * 3)
        floor = tl.min(tl.where(values > float("-inf"), values, float("inf")), 0)
        if (top_k > 0.0) & (top_k <= RUNS):
            floor = tl.min(tl.max(tl.reshape(values, (PIECE // RUNS, RUNS)), 0), 0)
        tl.store(floors + row * PIECES + piece, floor)


@triton.jit
def before_cut(values: tl.tensor, token: tl.tensor, row: tl.tensor, cut: tl.tuple) -> tl.tensor:
    """Logits, -inf for those after the row's cut."""
    _, logits, ids = cut
    wide = values.to(tl.float32)
    logit = tl.load(logits + row)
    kept = (wide > logit) | ((wide == logit) & (token <= tl.load(ids + row)))
    return tl.where(kept, wide, float("-inf"))


@triton.jit
def weights_of(
    logits: tl.tensor, logits_stride: tl.tensor, temperature: tl.tensor, tops: tl.tensor,
    weights: tl.tensor, cut: tl.tuple, VOCAB: tl.constexpr,
) -> None:  # fmt: skip
    """grid: (R, pieces). Nothing is written for a row of which nothing is drawn."""
    PIECES: tl.constexpr = triton.cdiv(VOCAB, PIECE)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    heat = tl.load(temperature + row)
    if heat > 0.0:
        number = tl.arange(0, triton.next_power_of_2(PIECES))
        there = number < PIECES
        top = tl.max(tl.load(tops + row * PIECES + number, mask=there, other=float("-inf")), 0)
        token = piece * PIECE + tl.arange(0, PIECE)
        source = logits + row * logits_stride + token
        values = tl.load(source, mask=token < VOCAB, other=float("-inf"))
        if cut is not None:
            values = before_cut(values, token, row, cut)
        distance = values.to(tl.float64) - top.to(tl.float64)
        each = tl.where(token < VOCAB, tl.exp(distance / heat), 0.0)
        if cut is not None:
            each = tl.where(each >= tl.load(cut[0] + row * 3 + 2), each, 0.0)
        tl.store(weights + row * PIECES + piece, tl.sum(each, 0))


@triton.jit
def token_of(
    logits: tl.tensor, logits_stride: tl.tensor, temperature: tl.tensor, noise: tl.tensor,
    tops: tl.tensor, places: tl.tensor, weights: tl.tensor, found: tl.tensor, cut: tl.tuple,
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
        piece = tl.minimum(piece, tl.max(tl.where(part > 0.0, number, 0), 0))
        before = tl.max(tl.where(number < piece, up_to, 0.0), 0)
        at = tl.arange(0, PIECE)
        source = logits + row * logits_stride + piece * PIECE + at
        real = piece * PIECE + at < VOCAB
        values = tl.load(source, mask=real, other=float("-inf"))
        if cut is not None:
            values = before_cut(values, piece * PIECE + at, row, cut)
        distance = values.to(tl.float64) - largest.to(tl.float64)
        each = tl.where(real, tl.exp(distance / heat), 0.0)
        if cut is not None:
            each = tl.where(each >= tl.load(cut[0] + row * 3 + 2), each, 0.0)
        sums = before + tl.cumsum(each, 0)
        drawn = tl.sum((sums <= wanted).to(tl.int32), 0)
        # Rounding may leave nothing above: then the last token of any weight.
        last = tl.max(tl.where(each > 0.0, at, 0), 0)
        token = (piece * PIECE + tl.minimum(drawn, last)).to(tl.int64)
    rows = tl.num_programs(0)
    tl.store(found + row, token)
    tl.store(found + rows + row, finite.to(tl.int64))


@triton.jit
def span_of(
    row: tl.tensor, temperature: tl.tensor, bounds: tl.tuple, tops: tl.tensor, VOCAB: tl.constexpr
) -> tl.tuple:
    """top_k and top_p, 0 and 1 for none; the row's scale: largest, heat, floor, bins a logit.

    What is below the floor is not the cut. Of up to RUNS tokens each is at least as likely as what
    so many of any piece are; of top_p alone, what has less than its share of 1 - top_p all leave
    out, even where the rest are no likelier; and of what weighs 0 any may be left out.
    """
    PIECES: tl.constexpr = triton.cdiv(VOCAB, PIECE)
    filters, floors = bounds
    number = tl.arange(0, triton.next_power_of_2(PIECES))
    there = number < PIECES
    tops_here = tl.load(tops + row * PIECES + number, mask=there, other=float("-inf"))
    broken = tl.max((tops_here != tops_here).to(tl.int32), 0) > 0
    top = tl.max(tl.where(tops_here != tops_here, float("-inf"), tops_here), 0)
    heat = tl.load(temperature + row)
    drawn = (heat > 0.0) & (top < float("inf")) & (top > float("-inf")) & (broken == 0)
    top_k, top_p = tl.load(filters + row * 3), tl.load(filters + row * 3 + 1)
    top_k = tl.where(drawn & (top_k > 0.0) & (top_k < VOCAB), top_k, 0.0)
    top_p = tl.where(drawn, top_p, 1.0)
    bounded = tl.load(floors + row * PIECES + number, mask=there, other=float("inf"))
    floor = tl.min(bounded, 0)
    if (top_k > 0.0) & (top_k <= RUNS):
        floor = tl.max(tl.where(there, bounded, float("-inf")), 0)
    share = tl.maximum(0.5 * (1.0 - top_p) - 1e-12, 1e-300) / VOCAB
    reach = tl.where(top_k > 0.0, ALL_ZERO, -tl.log(share))
    top = top.to(tl.float64)
    floor = tl.maximum(floor.to(tl.float64), top - reach * heat)
    return top_k, top_p, (top, heat, floor, (BINS - 2) / tl.maximum(top - floor, 1e-300))


@triton.jit
def bin_of(values: tl.tensor, scale: tl.tuple) -> tl.tensor:
    """The larger a logit, the lower its bin."""
    top, _, floor, bins = scale
    number = tl.minimum((top - values) * bins, BINS - 2.0).to(tl.int32)
    return tl.where(values >= floor, number, BINS - 1)


@triton.jit
def units_of(values: tl.tensor, scale: tl.tuple, FINE: tl.constexpr) -> tl.tensor:
    """Weights as integers, the largest FINE."""
    return (tl.exp((values - scale[0]) / scale[1]) * FINE).to(tl.int64)


@triton.jit
def add_to_bins(bins: tl.tensor, number: tl.tensor, numbers: tl.tensor) -> None:
    """Those at either end, which may be most, are added up before; the others each by itself."""
    for k in tl.static_range(3):
        end = (BINS - 2 + k) % BINS
        amount = tl.sum(tl.where(number == end, numbers, 0), 0)
        tl.atomic_add(bins + end, amount, mask=amount > 0, sem="relaxed")
    inner = (number > 0) & (number < BINS - 2) & (numbers > 0)
    tl.atomic_add(bins + number, numbers, mask=inner, sem="relaxed")


@triton.jit
def fill_bins(
    logits: tl.tensor, logits_stride: tl.tensor, temperature: tl.tensor, bounds: tl.tuple,
    tops: tl.tensor, bins: tl.tensor, VOCAB: tl.constexpr, FINE: tl.constexpr,
) -> None:  # fmt: skip
    """grid: (R, VOCAB / FILLED rounded up). Bins are 0 before."""
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, scale = span_of(row, temperature, bounds, tops, VOCAB)
    if (top_k > 0.0) | (top_p < 1.0):
        token = tl.program_id(1) * FILLED + tl.arange(0, FILLED)
        source = logits + row * logits_stride + token
        real = token < VOCAB
        values = tl.load(source, mask=real, other=float("-inf")).to(tl.float64)
        number = bin_of(values, scale)
        if top_k > 0.0:
            add_to_bins(bins + row * (2 * BINS), number, real.to(tl.int64))
        if top_p < 1.0:
            add_to_bins(bins + row * (2 * BINS) + BINS, number, units_of(values, scale, FINE))


@triton.jit
def key_of(values: tl.tensor) -> tl.tensor:
    """int64 in the order of the logits, next to each other as float32 are."""
    plain = values.to(tl.float32)
    bits = tl.where(plain == 0.0, 0.0, plain).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def listed(
    source: tl.tensor, listing: tl.tensor, at: tl.tensor, count: tl.tensor, scale: tl.tuple,
    UNITS: tl.constexpr, FINE: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Of LISTED tokens, those beyond the last with no size: ids, logits, keys, sizes."""
    real = at < count
    token = tl.load(listing + at, mask=real, other=0)
    values = tl.load(source + token, mask=real, other=float("-inf")).to(tl.float64)
    size = real.to(tl.int64)
    if UNITS:
        size = units_of(values, scale, FINE)
    return token, values, key_of(values), size


@triton.jit
def last_kept(
    source: tl.tensor, listing: tl.tensor, scale: tl.tuple, before: tl.tuple, limit: tl.tensor,
    logit: tl.tensor, last: tl.tensor, VOCAB: tl.constexpr, UNITS: tl.constexpr,
    FINE: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Logit and id of the last token with less than `limit` before it; units kept of its bin.

    before: its bin, and what is before that; logit, last: a cut made before. Lists the bin's
    tokens in order, halves the range of their keys until it is one, and goes through those equal.
    """
    bin_number, base = before
    count = 0
    most, least = tl.full([], float("-inf"), tl.float32), tl.full([], float("inf"), tl.float32)
    for start in range(0, VOCAB, CHUNK):
        token = start + tl.arange(0, CHUNK)
        real = token < VOCAB
        values = tl.load(source + token, mask=real, other=float("-inf")).to(tl.float32)
        real &= (values > logit) | ((values == logit) & (token <= last))
        real &= bin_of(values.to(tl.float64), scale) == bin_number
        most = tl.maximum(most, tl.max(tl.where(real, values, float("-inf")), 0))
        least = tl.minimum(least, tl.min(tl.where(real, values, float("inf")), 0))
        up_to = count + tl.cumsum(real.to(tl.int32), 0)
        tl.store(listing + up_to - 1, token, mask=real)
        count += tl.sum(real.to(tl.int32), 0)
    tl.debug_barrier()

    low, high = key_of(least), key_of(most)
    over = base  # what is before all of key `high`
    while low < high:
        middle, above = (low + high) >> 1, base
        for start in range(0, count, LISTED):
            at = start + tl.arange(0, LISTED)
            _, _, keys, size = listed(source, listing, at, count, scale, UNITS, FINE)
            above += tl.sum(tl.where(keys > middle, size, 0), 0)
        fits = above.to(tl.float64) < limit
        over = tl.where(fits, above, over)
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)

    kept, final = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
    for start in range(0, count, LISTED):
        at = start + tl.arange(0, LISTED)
        token, values, keys, size = listed(source, listing, at, count, scale, UNITS, FINE)
        equal = (keys == low) & (at < count)
        ties = tl.where(equal, size, 0)
        stays = equal & ((over + tl.cumsum(ties, 0) - ties).to(tl.float64) < limit)
        over += tl.sum(ties, 0)
        final = tl.maximum(final, tl.max(tl.where(stays, token, 0), 0))
        stays |= (keys > low) & (at < count)
        kept += tl.sum(tl.where(stays, units_of(values, scale, FINE), 0), 0)
    bits = tl.where(low < 0, low ^ 0x7FFFFFFF, low).to(tl.int32)  # `key_of` undone
    return bits.to(tl.float32, bitcast=True), final, kept


@triton.jit
def bin_with(sizes: tl.tensor, end: tl.tensor, limit: tl.tensor) -> tl.tuple:
    """The last bin, up to `end`, that is begun with less than `limit`; what is before it."""
    number = tl.arange(0, BINS)
    before = tl.cumsum(sizes, 0) - sizes
    begun = (sizes > 0) & (before.to(tl.float64) < limit) & (number <= end)
    last = tl.max(tl.where(begun, number, 0), 0)
    return last, tl.max(tl.where(number == last, before, 0), 0)


@triton.jit
def find_cuts(
    logits: tl.tensor, logits_stride: tl.tensor, temperature: tl.tensor, bounds: tl.tuple,
    tops: tl.tensor, bins: tl.tensor, listing: tl.tensor, cut: tl.tuple, VOCAB: tl.constexpr,
    FINE: tl.constexpr,
) -> None:  # fmt: skip
    """The cut of top_k, and then that of top_p in what it left; grid: rows.

    listing int32 [R, VOCAB]: room.
    """
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, scale = span_of(row, temperature, bounds, tops, VOCAB)
    logit, last = tl.full([], float("-inf"), tl.float32), tl.full([], VOCAB, tl.int32)
    source, listing = logits + row * logits_stride, listing + row * VOCAB
    number = tl.arange(0, BINS)
    counts = bins + row * (2 * BINS) + number
    end = tl.full([], BINS - 1, tl.int32)  # the last bin of which anything is kept
    total = tl.sum(tl.load(counts + BINS), 0)
    if top_k > 0.0:
        place = bin_with(tl.load(counts), end, top_k)
        end = place[0]
        if end < BINS - 1:
            total = tl.sum(tl.where(number < end, tl.load(counts + BINS), 0), 0)
            logit, last, kept = last_kept(
                source, listing, scale, place, top_k, logit, last, VOCAB, False, FINE
            )
            total += kept
            tl.debug_barrier()
    if top_p < 1.0:
        limit = top_p * total.to(tl.float64)
        place = bin_with(tl.load(counts + BINS), end, limit)
        logit, last, _ = last_kept(
            source, listing, scale, place, limit, logit, last, VOCAB, True, FINE
        )
    _, cut_logits, cut_ids = cut
    tl.store(cut_logits + row, logit)
    tl.store(cut_ids + row, last.to(tl.int64))


@triton.jit
def total_of(tops: tl.tensor, weights: tl.tensor, totals: tl.tensor, VOCAB: tl.constexpr) -> None:
    """totals float64 [R]: the log of the summed exponentials, temperature 1; grid: rows."""
    PIECES: tl.constexpr = triton.cdiv(VOCAB, PIECE)
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, triton.next_power_of_2(PIECES))
    there = number < PIECES
    top = tl.max(tl.load(tops + row * PIECES + number, mask=there, other=float("-inf")), 0)
    weight = tl.sum(tl.load(weights + row * PIECES + number, mask=there, other=0.0), 0)
    tl.store(totals + row, top.to(tl.float64) + tl.log(weight))


def choose(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    noise: torch.Tensor,
    filters: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 [2, R]: tokens of logits [R, vocab], and whether each row's largest is finite."""
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE.value)
    tops = logits.new_empty((rows, pieces), dtype=torch.float32)
    places = logits.new_empty((rows, pieces), dtype=torch.int64)
    weights = logits.new_empty((rows, pieces), dtype=torch.float64)
    found = logits.new_empty((2, rows), dtype=torch.int64)
    source, bounds, cut = (logits, logits.stride(0)), None, None
    if filters is not None:
        bounds = filters, torch.empty_like(tops)
        cut = filters, tops.new_empty(rows), places.new_empty(rows)
    largest_of[(rows, pieces)](*source, tops, places, bounds, vocab)
    if filters is not None:
        sizes = vocab, 2.0 ** (62 - vocab.bit_length())
        bins = places.new_zeros((rows, 2, BINS.value))
        room = places.new_empty((rows, vocab), dtype=torch.int32)
        given = *source, temperature, bounds, tops, bins
        fill_bins[(rows, triton.cdiv(vocab, FILLED.value))](*given, *sizes)
        find_cuts[(rows,)](*given, room, cut, *sizes, num_warps=16)
    weights_of[(rows, pieces)](*source, temperature, tops, weights, cut, vocab)
    token_of[(rows,)](*source, temperature, noise, tops, places, weights, found, cut, vocab)
    return found


def log_totals(logits: torch.Tensor) -> torch.Tensor:
    """float64 [R]: each row's log of the summed exponentials; its bits depend on no other row."""
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE.value)
    tops = logits.new_empty((rows, pieces), dtype=torch.float32)
    places = logits.new_empty((rows, pieces), dtype=torch.int64)
    weights = logits.new_empty((rows, pieces), dtype=torch.float64)
    totals = logits.new_empty(rows, dtype=torch.float64)
    source = logits, logits.stride(0)
    largest_of[(rows, pieces)](*source, tops, places, None, vocab)
    weights_of[(rows, pieces)](*source, torch.ones_like(totals), tops, weights, None, vocab)
    total_of[(rows,)](tops, weights, totals, vocab)
    return totals
