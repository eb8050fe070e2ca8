"""What the CPU does to rows one by one: norms, rotation, storing of keys and values, drawing.

Every sum has one order, written out, so a row's result does not depend on the batch it is in. A
piece of work is some rows. Tokens are drawn by the inverse CDF of a softmax in float64: weights are
added in eight interleaved sums a run of 256, runs one after the other; the run in which the noise
falls is then gone through token by token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from workbench.kernels.cpu.thread_pool import kernel, take
from workbench.kernels.cpu.vectors import (
    ADDRESS_BYTES,
    FLOAT_BYTES,
    LONG,
    WIDTH,
    add,
    at_least,
    called,
    div,
    doubles,
    exponential,
    floats,
    fma,
    greatest,
    inlined,
    instruction,
    integers,
    largest,
    load,
    lowest_bit,
    matrix,
    mul,
    same,
    store,
    sub,
    total,
)

_ROWS = 8  # of one piece
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_CUBIC, _SLOPE = np.float32(0.044715), np.float32(-2.0 * np.sqrt(2.0 / np.pi))  # of GELU
_UNBOUNDED = 1 << 60
_RUN = 256
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.6931471803691238, 1.9082149292705877e-10
_SMALLEST = -708.0  # exp of less is taken for 0: it is no normal number
_ONE_BITS, _BIN_BITS, _BINS, _QUARTERS = int(np.float64(1.0).view(np.int64)), 46, 2048, 256
_COLDEST = 1e-300  # of a temperature: its reciprocal is finite, and all but equal logits weigh 0


@inlined
def _norm(x: int, weight: int, width: int, epsilon: Any, out: int) -> None:
    """Squares are added in 16 interleaved sums, these in order, then what 16 does not divide."""
    squares, row = same(_ZERO), floats(x, width)
    for i in range(0, width - WIDTH + 1, WIDTH):
        part = load(x + i * FLOAT_BYTES)
        squares = fma(part, part, squares)
    square = total(squares)
    for i in range(width - width % WIDTH, width):
        square += row[i] * row[i]
    scale = same(_ONE / np.sqrt(square / np.float32(width) + epsilon))
    for i in range(0, width, WIDTH):
        at = min(i, width - WIDTH) * FLOAT_BYTES  # the last 16 overlap where 16 does not divide
        store(out + at, mul(mul(load(x + at), scale), load(weight + at)))


@kernel
def rms_norm(arguments: int, counter: int) -> None:
    """`Kernels.rms_norm`; arguments: rows, columns, x, out, weight, epsilon (its bits)."""
    a = integers(arguments, 6)
    count, width = a[0], a[1]
    epsilon, line = floats(arguments + 5 * ADDRESS_BYTES, 1)[0], width * FLOAT_BYTES
    piece = take(counter) * _ROWS
    while piece < count:
        for t in range(piece, min(piece + _ROWS, count)):
            _norm(a[2] + t * line, a[4], width, epsilon, a[3] + t * line)
        piece = take(counter) * _ROWS


@inlined
def _layer_norm(x: int, weight: int, bias: int, width: int, epsilon: Any, out: int) -> None:
    """Sums are added as in `_norm`: that of the numbers, then that of their squared distances."""
    sums, row = same(_ZERO), floats(x, width)
    for i in range(0, width - WIDTH + 1, WIDTH):
        sums = add(sums, load(x + i * FLOAT_BYTES))
    mean = total(sums)
    for i in range(width - width % WIDTH, width):
        mean += row[i]
    mean = mean / np.float32(width)
    middle, squares = same(mean), same(_ZERO)
    for i in range(0, width - WIDTH + 1, WIDTH):
        part = sub(load(x + i * FLOAT_BYTES), middle)
        squares = fma(part, part, squares)
    square = total(squares)
    for i in range(width - width % WIDTH, width):
        square += (row[i] - mean) * (row[i] - mean)
    scale = same(_ONE / np.sqrt(square / np.float32(width) + epsilon))
    for i in range(0, width, WIDTH):
        at = min(i, width - WIDTH) * FLOAT_BYTES
        normed = mul(sub(load(x + at), middle), scale)
        store(out + at, fma(normed, load(weight + at), load(bias + at)))


@kernel
def layer_norm(arguments: int, counter: int) -> None:
    """`Kernels.layer_norm`; arguments: as `rms_norm`'s, the bias behind the weight."""
    a = integers(arguments, 6)
    count, width, bias = a[0], a[1], a[4] + a[1] * FLOAT_BYTES
    epsilon, line = floats(arguments + 5 * ADDRESS_BYTES, 1)[0], width * FLOAT_BYTES
    piece = take(counter) * _ROWS
    while piece < count:
        for t in range(piece, min(piece + _ROWS, count)):
            _layer_norm(a[2] + t * line, a[4], bias, width, epsilon, a[3] + t * line)
        piece = take(counter) * _ROWS


@inlined
def _gelu(x: Any) -> Any:
    """x / (1 + exp(-2 z)), which is x (1 + tanh z) / 2, of z = sqrt(2 / pi) (x + 0.044715 x^3)."""
    z = fma(mul(mul(x, x), x), same(_CUBIC), x)
    return div(x, add(same(_ONE), exponential(mul(z, same(_SLOPE)))))


@kernel
def gelu(arguments: int, counter: int) -> None:
    """`Kernels.gelu`; arguments: rows, columns (16 or more), row, out."""
    a = integers(arguments, 4)
    count, width, bias = a[0], a[1], a[2]
    line, last = width * FLOAT_BYTES, (width - WIDTH) * FLOAT_BYTES
    piece = take(counter) * _ROWS
    while piece < count:
        for t in range(piece, min(piece + _ROWS, count)):
            out = a[3] + t * line
            end = _gelu(add(load(out + last), load(bias + last)))  # overlaps: 16 need not divide
            for at in range(0, last, WIDTH * FLOAT_BYTES):
                store(out + at, _gelu(add(load(out + at), load(bias + at))))
            store(out + last, end)
        piece = take(counter) * _ROWS


@kernel
def add_row(arguments: int, counter: int) -> None:
    """`Kernels.add_row`; arguments: rows, columns, row, out."""
    a = integers(arguments, 4)
    count, width = a[0], a[1]
    row, out = floats(a[2], width), matrix(a[3], count, width)
    piece = take(counter) * _ROWS
    while piece < count:
        for t in range(piece, min(piece + _ROWS, count)):
            for i in range(width):
                out[t, i] += row[i]
        piece = take(counter) * _ROWS


@inlined
def _rotate(row: Any, head: int, half: int, cosine: Any, sine: Any) -> None:
    """Pairs (i, i + half) of a head, by the angles of its position (Su et al. 2021)."""
    whole = half - half % WIDTH
    for i in range(0, whole, WIDTH):
        at, to = row[head + i :].ctypes.data, row[head + half + i :].ctypes.data
        first, second = load(at), load(to)
        c, s = load(cosine[i:].ctypes.data), load(sine[i:].ctypes.data)
        store(at, sub(mul(first, c), mul(second, s)))
        store(to, add(mul(second, c), mul(first, s)))
    for i in range(whole, half):
        one, other = row[head + i], row[head + half + i]
        row[head + i] = one * cosine[i] - other * sine[i]
        row[head + half + i] = other * cosine[i] + one * sine[i]


@inlined
def _store(row: Any, data: Any, block: int, slot: int, shape: Any) -> None:
    """The row's keys and values at a slot of a block (LayerCache)."""
    block_size, kv_heads, head_dim = shape
    width = kv_heads * head_dim
    keys, values = len(row) - 2 * width, len(row) - width
    for i in range(width):
        data[block + i * block_size + slot] = row[keys + i]
    for head in range(kv_heads):
        target = block + block_size * width + (head * block_size + slot) * head_dim
        for d in range(head_dim):
            data[target + d] = row[values + head * head_dim + d]


@kernel
def store_kv(arguments: int, counter: int) -> None:
    """`Kernels.store_kv`."""
    a = integers(arguments, 15)
    count, columns, head_dim, kv_heads, block_size = a[0], a[1], a[2], a[3], a[4]
    qkv, data, base = matrix(a[5], count, columns), floats(a[6], _UNBOUNDED), a[7]
    half, tables = head_dim // 2, a[14]
    cosine, sine = matrix(a[8], tables, half), matrix(a[9], tables, half)
    positions, sequence = integers(a[10], count), integers(a[11], count)
    shape = (block_size, kv_heads, head_dim)
    piece = take(counter) * _ROWS
    while piece < count:
        for t in range(piece, min(piece + _ROWS, count)):
            p = positions[t]
            for head in range(0, columns - kv_heads * head_dim, head_dim):
                _rotate(qkv[t], head, half, cosine[p], sine[p])
            table = integers(a[12] + sequence[t] * a[13] * ADDRESS_BYTES, a[13])
            _store(qkv[t], data, base + table[p // block_size], p % block_size, shape)
        piece = take(counter) * _ROWS


@instruction(types.float64(types.int64))
def _power_of_two(builder: ir.IRBuilder, exponent: Any) -> Any:
    """2.0 ** exponent, of -1022 to 1023."""
    biased = builder.add(exponent, LONG(1023))
    return builder.bitcast(builder.shl(biased, LONG(52)), ir.DoubleType())


@inlined
def _exponential(x: float) -> float:
    """exp(x) of x <= 0 within 2 units in the last place: 2^k times a Taylor series of 14 terms."""
    within = max(x, _SMALLEST)
    whole = np.int64(within * _LOG2_E - 0.5)  # cut off towards 0: rounded
    k = np.float64(whole)
    r = (within - k * _LN2_HIGH) - k * _LN2_LOW
    p = 1.0 / 6227020800
    p = p * r + 1.0 / 479001600
    p = p * r + 1.0 / 39916800
    p = p * r + 1.0 / 3628800
    p = p * r + 1.0 / 362880
    p = p * r + 1.0 / 40320
    p = p * r + 1.0 / 5040
    p = p * r + 1.0 / 720
    p = p * r + 1.0 / 120
    p = p * r + 1.0 / 24
    p = p * r + 1.0 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return p * _power_of_two(whole) if x >= _SMALLEST else 0.0


@inlined
def _weigh(logits: Any, begin: int, top: float, cooling: float, weights: Any) -> None:
    """Weights of a run of tokens; zeros behind the last token."""
    count = min(_RUN, len(logits) - begin)
    for i in range(count):
        weights[i] = _exponential((np.float64(logits[begin + i]) - top) * cooling)
    weights[count:_RUN] = 0.0


@inlined
def _top(logits: Any) -> float:
    """The largest logit; of sixteen at a time, the last sixteen once more."""
    if len(logits) < WIDTH:
        return np.float64(logits.max())
    at, last = logits.ctypes.data, (len(logits) - WIDTH) * FLOAT_BYTES
    top = load(at + last)
    for offset in range(0, last, WIDTH * FLOAT_BYTES):
        top = largest(top, load(at + offset))
    return np.float64(greatest(top))


@inlined
def _sum(weights: Any) -> float:
    a = b = c = d = e = f = g = h = 0.0
    whole = len(weights) - len(weights) % 8
    for i in range(0, whole, 8):
        a, b, c, d = a + weights[i], b + weights[i + 1], c + weights[i + 2], d + weights[i + 3]
        e, f = e + weights[i + 4], f + weights[i + 5]
        g, h = g + weights[i + 6], h + weights[i + 7]
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for i in range(whole, len(weights)):
        total += weights[i]
    return total


@inlined
def _tops(logits: Any, tops: Any) -> bool:
    """The largest logit of each run; whether one of the row is not a number."""
    broken = 0
    for i in range(len(logits)):
        broken += logits[i] != logits[i]
    for run in range(len(tops)):
        tops[run] = _top(logits[run * _RUN : (run + 1) * _RUN])
    return broken > 0


@called
def _at_least(logits: Any, tops: Any, lowest: float, ids: Any) -> int:
    """Writes the ids of logits of at least `lowest`, ascending; returns how many."""
    at, bound, count = logits.ctypes.data, same(lowest), 0
    for run in range(len(tops)):
        begin, end = run * _RUN, min((run + 1) * _RUN, len(logits))
        whole = end - (end - begin) % WIDTH if tops[run] >= lowest else begin
        for i in range(begin, whole, WIDTH):
            bits = at_least(load(at + i * FLOAT_BYTES), bound)
            for _ in range(3):  # there are seldom more, and a branch would often be mistaken
                ids[count] = i + lowest_bit(bits)
                count, bits = count + (bits != 0), bits & (bits - 1)
            while bits != 0:
                ids[count] = i + lowest_bit(bits)
                count, bits = count + 1, bits & (bits - 1)
        for i in range(whole, end if tops[run] >= lowest else begin):
            ids[count] = i
            count += logits[i] >= lowest
    return count


@inlined
def _first(logits: Any, top: float, tops: Any) -> int:
    """The lowest token that has the largest logit."""
    run = 0
    while tops[run] != top:
        run += 1
    token = run * _RUN
    while np.float64(logits[token]) != top:
        token += 1
    return token


@inlined
def _draw(logits: Any, top: float, cooling: float, noise: float, rooms: Any) -> int:
    """The first token whose weights up to and with it exceed noise times all of them."""
    sums, weights = rooms[:2]
    total, runs = 0.0, len(sums)
    for run in range(runs):
        _weigh(logits, run * _RUN, top, cooling, weights)
        sums[run] = _sum(weights)
        total += sums[run]
    target, before, run = noise * total, 0.0, 0
    while run < runs - 1 and before + sums[run] <= target:
        before += sums[run]
        run += 1
    _weigh(logits, run * _RUN, top, cooling, weights)
    last = 0
    for i in range(_RUN):
        if weights[i] > 0.0:
            before, last = before + weights[i], i
            if before > target:
                break
    return run * _RUN + last  # the last of any weight where these sums, rounded, fell short


@called
def _cut(weights: Any, ids: Any, count: int, most: int, mass: float) -> tuple[float, int]:
    """Weight and id of the last of the fewest tokens, likeliest first, that are `most` or reach
    `mass`; of equal ones the lowest ids come first. Overwrites both lists (quickselect, Hoare).
    """
    while True:
        one, two, three = weights[0], weights[count // 2], weights[count - 1]
        pivot = max(min(one, two), min(max(one, two), three))
        above, equal, heavier = 0, 0, 0.0
        for i in range(count):
            weight = weights[i]
            more = weight > pivot
            above, heavier = above + more, heavier + (weight if more else 0.0)
            equal += weight == pivot
        within = above > 0 and (above >= most or heavier >= mass)
        if not within:
            most, mass = most - above, mass - heavier
            if equal >= most or equal * pivot >= mass or above + equal == count:
                break
            most, mass = most - equal, mass - equal * pivot
        kept = 0
        for i in range(count):
            weight, token = weights[i], ids[i]
            weights[kept], ids[kept] = weight, token
            kept += weight > pivot if within else weight < pivot
        count = kept
    last = 0
    for i in range(count):
        if weights[i] == pivot:
            last, most, mass = ids[i], most - 1, mass - pivot
            if most <= 0 or mass <= 0:
                break
    return pivot, last


@called
def _last_kept(rooms: Any, count: int, most: int, mass: float) -> tuple[float, int]:
    """`_cut` of the tokens in `rooms`, which stay: of the one bin of weights in which it lies.

    A bin is a 64th of a power of two: what numbers from 1 downward have in the same leading bits.
    """
    weights, ids, others, other_ids, bin_mass, bin_count = rooms[2:]
    bits, most_bins = weights.view(np.int64), len(bin_mass) - 1
    bin_mass[:], bin_count[:] = 0.0, 0
    for i in range(count):
        place = min((_ONE_BITS - bits[i]) >> _BIN_BITS, most_bins)
        bin_mass[place] += weights[i]
        bin_count[place] += 1
    at = 0
    while at < most_bins and bin_count[at] < most and bin_mass[at] < mass:
        most, mass, at = most - bin_count[at], mass - bin_mass[at], at + 1
    inside = np.int64(0)  # else `_cut` is compiled for a literal 0, too
    for i in range(count):
        others[inside], other_ids[inside] = weights[i], ids[i]
        inside += min((_ONE_BITS - bits[i]) >> _BIN_BITS, most_bins) == at
    return _cut(others, other_ids, inside, most, mass) if inside else (0.0, len(weights))


@inlined
def _copy(numbers: Any, others: Any) -> None:
    """others[: len(numbers)] = numbers, whose check of shapes would take seconds to compile."""
    for i in range(len(numbers)):
        others[i] = numbers[i]


@called
def _guess(logits: Any, top: float, cooling: float, rooms: Any, lost: float, most: int) -> float:
    """A weight below which by some runs lie less than `lost` of all weights and all but twice
    `most` tokens; in steps of four between one power of two and the next.
    """
    run_weights, bin_mass, bin_count = rooms[1], rooms[6], rooms[7]
    bits, runs = run_weights.view(np.int64), len(rooms[0])
    step, quarter = max(1, runs // 8), _QUARTERS - 1
    bin_mass[:_QUARTERS], bin_count[:_QUARTERS] = 0.0, 0
    for run in range(0, runs, step):
        _weigh(logits, run * _RUN, top, cooling, run_weights)
        for i in range(_RUN):
            place = min((_ONE_BITS - bits[i]) >> 50, _QUARTERS - 1)
            bin_mass[place] += step * run_weights[i]
            bin_count[place] += step
    left = bin_count[:_QUARTERS].sum()
    while quarter > 0:
        lost, left = lost - bin_mass[quarter], left - bin_count[quarter]
        if lost < 0.0 or left < 2 * most:
            break
        quarter -= 1
    bits[0] = _ONE_BITS - ((quarter + 1) << 50)
    return run_weights[0]


@called
def _likely(logits: Any, top: float, cooling: float, filters: Any, rooms: Any) -> tuple[int, float]:
    """How many tokens may stay, in token order in `rooms`, and the weight of all if top_p needs it.

    What is left out here no filter keeps; so few are left of most rows that the rest is cheap.
    """
    (sums, run_weights), (weights, ids, others, other_ids) = rooms[:2], rooms[2:6]
    top_p, least, total, spare = filters[1], filters[2], 0.0, np.inf
    top_k = np.int64(filters[0]) if filters[0] < len(logits) else 0
    if top_k == 0 and top_p < 1.0:
        for run in range(len(sums)):
            _weigh(logits, run * _RUN, top, cooling, run_weights)
            total += _sum(run_weights)
        spare = 0.99 * (1.0 - top_p) * total
        least = _guess(logits, top, cooling, rooms, 0.7 * spare, np.int64(0))
    elif top_k > len(sums):
        least = _guess(logits, top, cooling, rooms, np.inf, top_k)
    elif top_k:  # as many runs have a token of at least this weight
        _copy(sums, others)
        kth, _ = _cut(others, other_ids, len(sums), top_k, np.inf)
        least = np.exp((kth - top) * cooling)
    while True:
        bound = top + np.log(max(least, 1e-300)) / cooling
        lowest = np.float32(bound - 1e-6 * (abs(top) + abs(bound) + 1.0 / cooling))
        count = _at_least(logits, sums, lowest, ids)
        for i in range(count):
            weights[i] = logits[ids[i]]
        for i in range(count):  # by itself, for LLVM to make vectors of it
            weights[i] = _exponential((weights[i] - top) * cooling)
        enough = count >= top_k and (total == 0.0 or total - _sum(weights[:count]) < spare)
        if enough or least == 0.0:
            return count, total
        least = least * 2.0**-4 if least > 1e-9 else 0.0  # it was a guess


@called
def _keep(rooms: Any, count: int, cut: float, last: int) -> int:
    """Leaves what weighs more than `cut`, or as much with an id up to `last`: so many."""
    weights, ids, kept = rooms[2], rooms[3], 0
    for i in range(count):
        weight, token = weights[i], ids[i]
        weights[kept], ids[kept] = weight, token
        kept += weight > cut or (weight == cut and token <= last)
    return kept


@called
def _draw_filtered(
    logits: Any, top: float, cooling: float, noise: float, filters: Any, rooms: Any
) -> int:
    """`_draw` of what top_k leaves, of that top_p, and of that min_p."""
    weights, ids, vocab = rooms[2], rooms[3], len(logits)
    top_k, top_p, min_p = np.int64(filters[0]), filters[1], filters[2]
    count, total = _likely(logits, top, cooling, filters, rooms)
    if 0 < top_k < vocab:
        cut, last = _last_kept(rooms, count, top_k, np.inf)
        count = _keep(rooms, count, cut, last)
        total = _sum(weights[:count])
    cut, last = _last_kept(rooms, count, vocab, top_p * total) if top_p < 1.0 else (0.0, vocab)
    count = _keep(rooms, count, min_p, vocab) if min_p > cut else _keep(rooms, count, cut, last)
    target, before, token = noise * _sum(weights[:count]), 0.0, 0
    for i in range(count):
        if weights[i] > 0.0:
            before, token = before + weights[i], ids[i]
            if before > target:
                break
    return token


@kernel
def choose(arguments: int, counter: int) -> None:
    """`Kernels.choose`; arguments: rows, vocab, logits, bytes from row to row, temperatures, noise,
    filters or 0, out.
    """
    a = integers(arguments, 8)
    count, width = a[0], a[1]
    temperature, noise = doubles(a[4], count), doubles(a[5], count)
    found = integers(a[7], 2 * count)
    runs = (width + _RUN - 1) // _RUN
    filters, room = doubles(a[6], 3 * count), runs * _RUN if a[6] else 0
    rooms = (
        *(np.empty(runs, np.float64), np.empty(_RUN, np.float64)),
        *(np.empty(room, np.float64), np.empty(room, np.int64)),
        *(np.empty(room, np.float64), np.empty(room, np.int64)),
        *(np.empty(min(room, 1) * _BINS, np.float64), np.empty(min(room, 1) * _BINS, np.int64)),
    )
    row = take(counter)
    while row < count:
        logits = floats(a[2] + row * a[3], width)
        broken = _tops(logits, rooms[0])
        top, warm = rooms[0].max(), temperature[row] > 0.0
        cooling, token = 1.0 / max(temperature[row], _COLDEST), 0
        finite = not broken and abs(top) < np.inf
        if finite and not warm:
            token = _first(logits, top, rooms[0])
        elif finite:
            own = filters[3 * row : 3 * row + 3]
            if room and (0 < own[0] < width or own[1] < 1.0 or own[2] > 0.0):
                token = _draw_filtered(logits, top, cooling, noise[row], own, rooms)
            else:
                token = _draw(logits, top, cooling, noise[row], rooms)
        found[row], found[count + row] = token, finite
        row = take(counter)


@kernel
def likely(arguments: int, counter: int) -> None:
    """`Kernels.likely`; arguments: rows, vocab, logits, row stride, most, ids, totals."""
    a = integers(arguments, 7)
    count, width, most = a[0], a[1], a[4]
    best, totals = integers(a[5], count * most), doubles(a[6], count)
    runs, whole = (width + _RUN - 1) // _RUN, width - width % WIDTH
    tops, ids = np.empty(runs, np.float64), np.empty(width, np.int64)
    others, other_ids = np.empty(runs, np.float64), np.empty(runs, np.int64)
    row = take(counter)
    while row < count:
        at = a[2] + row * a[3]
        logits, summed, bound = floats(at, width), 0.0, -np.inf
        for run in range(runs):
            tops[run] = _top(logits[run * _RUN : (run + 1) * _RUN])
        top = tops.max()
        for begin in range(0, whole, 4 * _RUN):  # of float32 sums: these are added in float64
            sums, largest_one = same(_ZERO), same(np.float32(top))
            for i in range(begin, min(begin + 4 * _RUN, whole), WIDTH):
                sums = add(sums, exponential(sub(load(at + i * FLOAT_BYTES), largest_one)))
            summed += np.float64(total(sums))
        for i in range(whole, width):
            summed += _exponential(np.float64(logits[i]) - top)
        totals[row] = top + np.log(summed)
        if 0 < most <= runs:  # as many runs have a token of at least this logit
            _copy(tops, others)
            bound, _ = _cut(others, other_ids, runs, most, np.inf)
        if most > 0:
            kept = ids[: _at_least(logits, tops, np.float32(bound), ids)]
            order = np.argsort(-logits[kept], kind="mergesort")
            for i in range(most):
                best[row * most + i] = kept[order[i]]
        row = take(counter)
