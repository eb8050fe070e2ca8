"""The innermost loops of products and attention: rows times columns, in LLVM's own terms.

    out[r, c] (+)= x[r, 0] w[0, c] + x[r, 1] w[1, c] + ...

Each product is fused with its addition, inputs in ascending order, one sum for each element that
stays in a register: an element's value does not depend on how many rows or columns there are, nor
on where a sum is interrupted and taken up again. `isa` says how many fill the registers. Of a
product w is a panel of weights, of attention's scores the keys, and of its sums the values.
Addresses and strides are in bytes; nothing is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from workbench.kernels.cpu.vectors import (
    ADDRESS_BYTES,
    FLOAT,
    FLOAT_BYTES,
    INT,
    LONG,
    VECTOR,
    VECTOR_BYTES,
    WIDTH,
    called,
    emit_fma,
    emit_prefetch,
    emit_spread,
    pointer,
)
from workbench.kernels.isa import ISA

PANEL = 2 * WIDTH  # columns of packed weights side by side
MOST_ROWS, _VECTORS = ISA.tile
COLUMNS = _VECTORS * WIDTH
_WIDE_ROWS = min(rows for rows in ISA.attention if rows > 1)  # of attention with few queries
# vectors at most of its tile of so many rows
_WIDEST = tuple(sum(rows <= most for most in ISA.attention) for rows in range(MOST_ROWS + 1))
FEW_ROWS, _FEW_VECTORS = ISA.few
FEW_COLUMNS = _FEW_VECTORS * WIDTH
FORMS = ((4, False), (8, False), (4, True), (8, True))  # bits of a code; whether scales are halves
_HALVES, _WORDS = ir.VectorType(ir.HalfType(), WIDTH), ir.VectorType(INT, WIDTH)
_WORD_BYTES = 4
_AHEAD = 4096  # bytes: codes are asked for while those before them are multiplied
Sums = list[list[Any]]  # vectors of each row
Vectors = Callable[[Any], list[Any]]  # of a number: the vectors of weights that it multiplies


class Tile:
    """Emits the code of rows x columns vectors. Rows are addresses; numbers are LLVM values."""

    def __init__(self, builder: ir.IRBuilder, rows: int, columns: int) -> None:
        self.builder, self.rows, self.columns = builder, rows, columns

    def addresses(self, base: Any, stride: Any) -> list[Any]:
        """Of the rows, `stride` bytes apart."""
        b = self.builder
        return [b.add(base, b.mul(LONG(row), stride)) for row in range(self.rows)]

    def sources(self, base: Any, stride: Any) -> Callable[[Any], list[Any]]:
        """Of an offset in bytes: where a product's rows go on, so far behind their beginning.

        Every fourth row's address is made anew in a pass of the loop, in a way hidden from LLVM: it
        would keep an address of each row, and add to every one of them in every pass.
        """
        b, kind = self.builder, ir.FunctionType(LONG, [LONG])

        def hidden(number: Any) -> Any:
            return b.asm(kind, "", "=r,0", [number], False)

        apart = [LONG(0), *(hidden(b.mul(LONG(k), stride)) for k in (1, 2, 3))]
        starts = [b.add(base, b.mul(LONG(row), stride)) for row in range(0, self.rows, 4)]

        def rows(offset: Any) -> list[Any]:
            fourths = [hidden(b.add(start, offset)) for start in starts]
            return [b.add(fourths[row // 4], apart[row % 4]) for row in range(self.rows)]

        return rows

    def vectors(self, address: Any, kind: ir.Type = VECTOR, align: int = 4) -> list[Any]:
        """The vectors side by side from an address; align: bytes of one element."""
        return [
            self.load(address, c * WIDTH * align, kind, align=align) for c in range(self.columns)
        ]

    def load(self, address: Any, offset: int, kind: ir.Type, align: int = 4) -> Any:
        """A `kind`, so many bytes behind an address."""
        b = self.builder
        return b.load(pointer(b, b.add(address, LONG(offset)), kind), align=align)

    def store(self, rows: list[Any], sums: Sums) -> None:
        """Writes the sums back."""
        b = self.builder
        for row, line in zip(rows, sums):
            for c, value in enumerate(line):
                b.store(value, pointer(b, b.add(row, LONG(c * VECTOR_BYTES)), VECTOR), align=4)

    def zeros(self) -> Sums:
        """Sums of nothing."""
        zero = ir.Constant(VECTOR, [0.0] * WIDTH)
        return [[zero] * self.columns for _ in range(self.rows)]

    def start(self, rows: list[Any], fresh: Any) -> Sums:
        """Zeros if fresh, else what is in `rows`: a branch, so that zeros wait for no memory."""
        b, zero = self.builder, ir.Constant(VECTOR, [0.0] * WIDTH)
        with b.if_else(b.icmp_signed("!=", fresh, LONG(0))) as (then, otherwise):
            with then:
                new = b.block
            with otherwise:
                loaded, old = [self.vectors(row) for row in rows], b.block
        return [[self.either(zero, value, new, old) for value in values] for values in loaded]

    def either(self, one: Any, other: Any, block: Any, other_block: Any) -> Any:
        """The one vector or the other, by the block that this one was come to from."""
        phi = self.builder.phi(VECTOR)
        phi.add_incoming(one, block)
        phi.add_incoming(other, other_block)
        return phi

    def loop(
        self, sums: Sums, count: Any, body: Callable[[Any, Sums], Sums], first: Any = None
    ) -> Sums:
        """sums = body(i, sums) for i = 0 .. count - 1, at least one; or from `first` on, if any."""
        b = self.builder
        before, inside, behind = b.block, b.append_basic_block("loop"), b.append_basic_block("end")
        if first is None:
            b.branch(inside)
        else:
            b.cbranch(b.icmp_signed("<", first, count), inside, behind)
        b.position_at_end(inside)
        i = b.phi(LONG)
        running = [[b.phi(VECTOR) for _ in line] for line in sums]
        new = body(i, running)
        following, last = b.add(i, LONG(1)), b.block
        i.add_incoming(LONG(0) if first is None else first, before)
        i.add_incoming(following, last)
        for line, values, later in zip(running, sums, new):
            for phi, value, other in zip(line, values, later):
                phi.add_incoming(value, before)
                phi.add_incoming(other, last)
        b.cbranch(b.icmp_signed("<", following, count), inside, behind)
        b.position_at_end(behind)
        if first is None:
            return new
        return [
            [self.either(*pair, before, last) for pair in zip(*lines)] for lines in zip(sums, new)
        ]

    def add_numbers(self, sums: Sums, x: list[Any], offset: Any, weights: list[Any]) -> Sums:
        """Each row's number, so many bytes behind its address, times weights, added to its sums."""
        b, new = self.builder, []
        for row, line in zip(x, sums):
            number = self.spread(b.add(row, offset))
            new.append([emit_fma(b, number, weight, value) for weight, value in zip(weights, line)])
        return new

    def multiply(self, sums: Sums, x: list[Any], step: Any, weights: Vectors, count: Any) -> Sums:
        """sums plus each row's numbers, `step` bytes apart, times weights(0), weights(1), ..."""
        b = self.builder

        def one(i: Any, sums: Sums) -> Sums:
            vectors = weights(i)
            return self.add_numbers(sums, x, b.mul(i, step), vectors)

        return self.loop(sums, count, one)

    def lines(self, address: Any, stride: Any) -> Vectors:
        """Weights that lie `stride` bytes apart."""
        b = self.builder
        return lambda i: self.vectors(b.add(address, b.mul(i, stride)))

    def spread(self, address: Any) -> Any:
        """The float32 at an address, in every element."""
        b = self.builder
        return emit_spread(b, b.load(pointer(b, address, FLOAT)))


def _function(emit: Callable[..., None], cases: dict[int, tuple[Any, ...]]) -> Any:
    """A numba function of a tuple of integers: the first one chooses among the cases' codes.

    A case: rows and vectors of a tile, and what `emit` gets between it and the other integers.
    """

    @intrinsic
    def function(_: Any, integers: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds, values = signature.args[0], cgutils.unpack_tuple(builder, args[0])
            number, *rest = (
                context.cast(builder, value, kind, types.int64)
                for value, kind in zip(values, kinds)
            )
            done, none = builder.append_basic_block("done"), builder.append_basic_block("none")
            choice = builder.switch(number, none)
            for case, (rows, columns, *form) in cases.items():
                block = builder.append_basic_block(f"case_{case}")
                choice.add_case(LONG(case), block)
                builder.position_at_end(block)
                emit(Tile(builder, rows, columns), *form, *rest)
                builder.branch(done)
            builder.position_at_end(none)
            builder.unreachable()
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(integers), generate

    return function


def emit_tile(code: Tile, at_once: int, *arguments: Any) -> None:
    """out [rows, columns] = x [rows, depth] @ panel, or += it if `fresh` is 0; float32.

    panel: as many of its PANEL columns, [depth, PANEL]. `at_once` inputs are taken in a pass of the
    loop, and what is then left one by one.
    """
    x, x_stride, panel, out, out_stride, depth, fresh = arguments
    b, target, sources = code.builder, code.addresses(out, out_stride), code.sources(x, x_stride)
    weights = code.lines(panel, LONG(PANEL * FLOAT_BYTES))

    def inputs(count: int, i: Any, sums: Sums) -> Sums:
        rows = sources(b.mul(i, LONG(count * FLOAT_BYTES)))
        for k in range(count):
            vectors = weights(b.add(b.mul(i, LONG(count)), LONG(k)))
            sums = code.add_numbers(sums, rows, LONG(k * FLOAT_BYTES), vectors)
        return sums

    passes = b.sdiv(depth, LONG(at_once))
    sums = code.loop(code.start(target, fresh), passes, partial(inputs, at_once), LONG(0))
    sums = code.loop(sums, depth, partial(inputs, 1), b.mul(passes, LONG(at_once)))
    code.store(target, sums)


tile = _function(
    emit_tile, {rows: (rows, _VECTORS, ISA.at_once) for rows in range(1, MOST_ROWS + 1)}
)


@called
def tile_rows(left: int) -> int:
    """How many rows the next tile of attention takes of so many that are left."""
    if left < 2 * _WIDE_ROWS:
        return min(left, _WIDE_ROWS)
    tiles = (left + MOST_ROWS - 1) // MOST_ROWS
    return (left + tiles - 1) // tiles


@called
def tile_vectors(left: int, rows: int) -> int:
    """How many vectors a tile of attention of so many rows takes of so many that are left."""
    most = _WIDEST[rows]
    return most if left >= 2 * most else left if left <= most else (left + 1) // 2


_ATTENTION = {  # 64 times a tile's vectors (`tile_vectors`) plus its rows
    64 * vectors + rows: (rows, vectors)
    for vectors, most in enumerate(ISA.attention, 1)
    for rows in range(1, most + 1)
}


def emit_score(code: Tile, *arguments: Any) -> None:
    """scores [rows, columns] = queries [rows, depth] . keys.

    keys: int64 [vectors], where the first numbers of sixteen keys lie, `key_stride` before their
    next. `apart` behind it lie the addresses of their values, and again of the keys that come next:
    both are asked for meanwhile, since a block lies in a page of its own, where a processor's own
    prefetching begins anew.
    """
    queries, query_stride, keys, key_stride, depth, scores, score_stride, apart = arguments
    b, x = code.builder, code.addresses(queries, query_stride)
    sources, values, later = (
        [code.load(where, c * ADDRESS_BYTES, LONG, align=8) for c in range(code.columns)]
        for where in (keys, b.add(keys, apart), b.add(keys, b.add(apart, apart)))
    )

    def weights(d: Any) -> list[Any]:
        offset, line = b.mul(d, key_stride), b.mul(d, LONG(VECTOR_BYTES))
        for value, key in zip(values, later):
            emit_prefetch(b, b.add(value, line))
            emit_prefetch(b, b.add(key, offset), 2)
        return [code.load(b.add(source, offset), 0, VECTOR) for source in sources]

    sums = code.multiply(code.zeros(), x, LONG(FLOAT_BYTES), weights, depth)
    code.store(code.addresses(scores, score_stride), sums)


def emit_score_turned(code: Tile, *arguments: Any) -> None:
    """scores [rows, columns] = keys . queries [depth, columns]: keys are the rows here.

    keys: where the first numbers of some keys lie side by side, `key_stride` before their next.
    """
    keys, key_stride, queries, query_stride, depth, scores, score_stride = arguments
    x, weights = code.addresses(keys, LONG(FLOAT_BYTES)), code.lines(queries, query_stride)
    sums = code.multiply(code.zeros(), x, key_stride, weights, depth)
    code.store(code.addresses(scores, score_stride), sums)


score = _function(emit_score, _ATTENTION)
score_turned = _function(emit_score_turned, _ATTENTION)


def emit_add_values(code: Tile, *arguments: Any) -> None:
    """sums [rows, columns] = sums * shrink [rows] + weights [rows, count] . values.

    values: int64 [count], where each position's value lies; first: bytes before the first of the
    dimensions that are summed. count: at least 1. weight_step: from one position's weight to the
    next one's.
    """
    weights, weight_stride, weight_step, values, first, count, shrink, sums, sum_stride = arguments
    b, x = code.builder, code.addresses(weights, weight_stride)
    target = code.addresses(sums, sum_stride)
    factors = [code.spread(at) for at in code.addresses(shrink, LONG(FLOAT_BYTES))]
    start = [
        [b.fmul(value, factor) for value in code.vectors(row)]
        for row, factor in zip(target, factors)
    ]

    def numbers(j: Any) -> list[Any]:
        value = code.load(b.add(values, b.mul(j, LONG(ADDRESS_BYTES))), 0, LONG, align=8)
        return code.vectors(b.add(value, first))

    code.store(target, code.multiply(start, x, weight_step, numbers, count))


add_values = _function(emit_add_values, _ATTENTION)


def _whole(value: int) -> ir.Constant:
    return ir.Constant(_WORDS, [value] * WIDTH)


class _Panel:
    """Emits the widening of a quantised panel's inputs, for a tile's columns from `column` on.

    form: bits of a code, and whether scales are float16; size: inputs of a group.
    """

    def __init__(
        self, code: Tile, form: tuple[int, bool], size: Any, panel: Any, column: Any
    ) -> None:
        self.code, self.size, self.panel, self.column = code, size, panel, column
        (self.bits, self.half), self.at_once = form, 32 // form[0]  # inputs that share a word

    def loop(self, sums: Sums, first: Any, groups: Any, body: Callable[..., Sums]) -> Sums:
        """sums = body(i, j, weights, sums) for each input i + j of groups first, first + 1, ..."""
        b, code = self.code.builder, self.code
        words = b.sdiv(self.size, LONG(self.at_once))

        def one_group(number: Any, sums: Sums) -> Sums:
            scales, offsets, at = self._open(b.add(first, number))
            before = b.mul(number, self.size)

            def one_word(k: Any, sums: Sums) -> Sums:
                words_at = b.add(at, b.mul(k, LONG(PANEL * _WORD_BYTES)))
                for c in range(code.columns):
                    emit_prefetch(b, b.add(words_at, LONG(_AHEAD + c * WIDTH * _WORD_BYTES)))
                codes = code.vectors(words_at, _WORDS)
                line = b.add(before, b.mul(k, LONG(self.at_once)))
                for which in range(self.at_once):
                    weights = self._weights(codes, which, scales, offsets)
                    sums = body(line, which, weights, sums)
                return sums

            return code.loop(sums, words, one_word)

        return code.loop(sums, groups, one_group)

    def _open(self, number: Any) -> tuple[list[Any], list[Any], Any]:
        """Scales and offsets of the group of this number, and the address of its words."""
        b, scale_bytes = self.code.builder, 2 if self.half else 4
        before = (2 if self.bits == 4 else 1) * scale_bytes * PANEL
        size = b.add(LONG(before), b.mul(self.size, LONG(PANEL * self.bits // 8)))
        at = b.add(self.panel, b.mul(number, size))
        scales = b.add(at, b.mul(self.column, LONG(scale_bytes)))
        offsets = b.add(scales, LONG(scale_bytes * PANEL))
        words = b.add(b.add(at, LONG(before)), b.mul(self.column, LONG(_WORD_BYTES)))
        return self._floats(scales), self._floats(offsets) if self.bits == 4 else [], words

    def _floats(self, address: Any) -> list[Any]:
        if not self.half:
            return self.code.vectors(address)
        stored = self.code.vectors(address, _HALVES, 2)
        return [self.code.builder.fpext(vector, VECTOR) for vector in stored]

    def _weights(
        self, words: list[Any], which: int, scales: list[Any], offsets: list[Any]
    ) -> list[Any]:
        """The weights of one of the inputs whose codes share words."""
        b, shift = self.code.builder, self.bits * which
        if self.bits == 4:
            codes = [b.and_(b.lshr(word, _whole(shift)), _whole(15)) for word in words]
            floats = [b.sitofp(code, VECTOR) for code in codes]
            return [emit_fma(b, *numbers) for numbers in zip(floats, scales, offsets)]
        codes = [b.ashr(b.shl(word, _whole(24 - shift)), _whole(24)) for word in words]
        return [b.fmul(b.sitofp(code, VECTOR), scale) for code, scale in zip(codes, scales)]


def emit_few_rows(code: Tile, form: tuple[int, bool], *arguments: Any) -> None:
    """out [rows, columns] = x @ columns of a quantised panel from `column` on; see `emit_tile`.

    form: bits of a code, and whether scales are float16; size: inputs of a group; groups: in all.
    """
    size, x, x_stride, panel, column, out, out_stride, groups, fresh = arguments
    b, target, sources = code.builder, code.addresses(out, out_stride), code.sources(x, x_stride)
    rows: list[Any] = []

    def multiply(i: Any, j: int, weights: list[Any], sums: Sums) -> Sums:
        if j == 0:
            rows[:] = sources(b.mul(i, LONG(FLOAT_BYTES)))
        return code.add_numbers(sums, rows, LONG(j * FLOAT_BYTES), weights)

    sums = code.start(target, fresh)
    widened = _Panel(code, form, size, panel, column)
    code.store(target, widened.loop(sums, LONG(0), groups, multiply))


@called
def form_number(bits: int, half: int) -> int:
    """Where a form stands in FORMS."""
    return 2 * half + bits // 8


few_rows = _function(
    emit_few_rows,
    {
        FEW_ROWS * number + rows: (rows, _FEW_VECTORS, form)
        for number, form in enumerate(FORMS)
        for rows in range(1, FEW_ROWS + 1)
    },
)


def emit_widen(code: Tile, form: tuple[int, bool], *arguments: Any) -> None:
    """Groups first, first + 1, ... of a quantised panel: float32 [groups * size, PANEL] at `out`.

    form, size: see `emit_few_rows`. As many columns at a time as the tile has.
    """
    size, panel, first, groups, out = arguments
    b = code.builder

    def keep(start: Any, i: Any, j: int, weights: list[Any], sums: Sums) -> Sums:
        line = b.add(start, b.mul(i, LONG(PANEL * FLOAT_BYTES)))
        code.store([b.add(line, LONG(j * PANEL * FLOAT_BYTES))], [weights])
        return sums

    for column in range(0, PANEL, code.columns * WIDTH):
        start = b.add(out, LONG(column * FLOAT_BYTES))
        widened = _Panel(code, form, size, panel, LONG(column))
        widened.loop([], first, groups, partial(keep, start))


widen = _function(emit_widen, {n: (1, _FEW_VECTORS, form) for n, form in enumerate(FORMS)})
