"""Tokens chosen where the logits are: only token ids leave the device.

The vocabulary is cut into pieces of a constant length, a program each; what they find is put
together in order by one program a row. So a row's token depends on its own logits only. The
reference is `Kernels.draw`, and its sums in float64 are added up in another order here.
"""

import torch
import triton
import triton.language as tl

PIECE = 4096  # logits of one program


@triton.jit
def largest_of(
    logits: tl.tensor,  # [R, VOCAB], rows logits_stride elements apart
    logits_stride: tl.tensor,
    tops: tl.tensor,  # float32 [R, PIECES]: the largest logit of each piece
    places: tl.tensor,  # int64 [R, PIECES]: the first token that has it
    VOCAB: tl.constexpr,
    PIECES: tl.constexpr,
    TAKEN: tl.constexpr,  # logits of one program
) -> None:
    """grid: (R, PIECES). A piece with a NaN has that as its largest."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    token = piece * TAKEN + tl.arange(0, TAKEN)
    source = logits + row * logits_stride + token
    values = tl.load(source, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    broken = tl.max((values != values).to(tl.int32), 0) > 0
    top = tl.max(tl.where(values != values, float("-inf"), values), 0)
    place = tl.min(tl.where(values == top, token, VOCAB), 0)
    tl.store(tops + row * PIECES + piece, tl.where(broken, float("nan"), top))
    tl.store(places + row * PIECES + piece, place.to(tl.int64))


@triton.jit
def weights_of(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    temperature: tl.tensor,  # float64 [R]; 0: nothing is drawn
    tops: tl.tensor,
    weights: tl.tensor,  # float64 [R, PIECES]: sums of exp((logit - largest) / temperature)
    VOCAB: tl.constexpr,
    PIECES: tl.constexpr,
    PADDED: tl.constexpr,  # PIECES rounded up to a power of two
    TAKEN: tl.constexpr,
) -> None:
    """grid: (R, PIECES)."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    number = tl.arange(0, PADDED)
    there = number < PIECES
    top = tl.max(tl.load(tops + row * PIECES + number, mask=there, other=float("-inf")), 0)
    heat = tl.load(temperature + row)
    heat = tl.where(heat > 0.0, heat, 1.0)
    token = piece * TAKEN + tl.arange(0, TAKEN)
    source = logits + row * logits_stride + token
    values = tl.load(source, mask=token < VOCAB, other=float("-inf")).to(tl.float64)
    each = tl.where(token < VOCAB, tl.exp((values - top.to(tl.float64)) / heat), 0.0)
    tl.store(weights + row * PIECES + piece, tl.sum(each, 0))


@triton.jit
def token_of(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    temperature: tl.tensor,
    noise: tl.tensor,  # float64 [R] in [0, 1)
    tops: tl.tensor,
    places: tl.tensor,
    weights: tl.tensor,
    found: tl.tensor,  # int64 [2, R]: tokens; whether the largest logit is finite
    VOCAB: tl.constexpr,
    PIECES: tl.constexpr,
    PADDED: tl.constexpr,
    TAKEN: tl.constexpr,
) -> None:
    """The first token whose weights up to it exceed noise times all of them; grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PADDED)
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
        at = tl.arange(0, TAKEN)
        source = logits + row * logits_stride + piece * TAKEN + at
        real = piece * TAKEN + at < VOCAB
        values = tl.load(source, mask=real, other=float("-inf")).to(tl.float64)
        each = tl.where(real, tl.exp((values - largest.to(tl.float64)) / heat), 0.0)
        sums = before + tl.cumsum(each, 0)
        drawn = tl.sum((sums <= wanted).to(tl.int32), 0)
        # Rounding may leave nothing above: then the last token of any weight.
        last = tl.max(tl.where(each > 0.0, at, 0), 0)
        token = (piece * TAKEN + tl.minimum(drawn, last)).to(tl.int64)
    rows = tl.num_programs(0)
    tl.store(found + row, token)
    tl.store(found + rows + row, finite.to(tl.int64))


def choose(logits: torch.Tensor, temperature: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """int64 [2, R]: tokens of logits [R, vocab], and whether each row's largest is finite."""
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE)
    sizes = {"VOCAB": vocab, "PIECES": pieces, "TAKEN": PIECE}
    padded = triton.next_power_of_2(pieces)
    tops = logits.new_empty((rows, pieces), dtype=torch.float32)
    places = logits.new_empty((rows, pieces), dtype=torch.int64)
    weights = logits.new_empty((rows, pieces), dtype=torch.float64)
    found = logits.new_empty((2, rows), dtype=torch.int64)
    given = (logits, logits.stride(0))
    largest_of[(rows, pieces)](*given, tops, places, **sizes)
    weights_of[(rows, pieces)](*given, temperature, tops, weights, **sizes, PADDED=padded)
    token_of[(rows,)](
        *(*given, temperature, noise, tops, places, weights, found), **sizes, PADDED=padded
    )
    return found
