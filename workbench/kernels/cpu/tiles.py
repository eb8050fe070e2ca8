"""The innermost loops of products and attention: rows times columns, in LLVM's own terms.

    out[r, c] (+)= x[r, 0] w[0, c] + x[r, 1] w[1, c] + ...

Each product is fused with its addition, inputs in ascending order, one sum for each element that
stays in a register: an element's value does not depend on how many rows or columns there are, nor
on where a sum is interrupted and taken up again. `isa` says how many fill the registers. Of a
product w is a panel of weights, of attention's scores the keys, and of its sums the values.
Addresses and strides are in bytes; nothing is checked.

A quantised weight is scale * code + offset in float32, rounded once; `products` says where each
lies. For few rows a product that widens weights in registers costs less than one that puts them
down in between (`few_rows`); for many, `widen` puts them down once and `tile` reads them.
"""

from __future__ import annotations

from collections.abc import Callable
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
    emit_spread,
    pointer,
)
from workbench.kernels.isa import ISA

PANEL = 2 * WIDTH  # columns of packed weights side by side
MOST_ROWS, _VECTORS = ISA.tile
COLUMNS = _VECTORS * WIDTH
_WIDE_ROWS, _WIDE_VECTORS = ISA.wide
_SINGLE = ISA.single
FEW_ROWS, _FEW_VECTORS = ISA.few
FEW_COLUMNS = _FEW_VECTORS * WIDTH
_FORMS = ((4, False), (8, False), (4, True), (8, True))  # bits of a code; whether scales are halves
_HALVES, _WORDS = ir.VectorType(ir.HalfType(), WIDTH), ir.VectorType(INT, WIDTH)
_WORD_BYTES = 4
Sums = list[list[Any]]  # vectors of each row


class Tile:
    """Emits the code of rows x columns vectors. Rows are addresses; numbers are LLVM values."""

    def __init__(self, builder: ir.IRBuilder, rows: int, columns: int) -> None:
        self.builder, self.rows, self.columns = builder, rows, columns

    def addresses(self, base: Any, stride: Any) -> list[Any]:
        """Of the rows, `stride` bytes apart."""
        b = self.builder
        return [b.add(base, b.mul(LONG(row), stride)) for row in range(self.rows)]

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
        sums = [[b.phi(VECTOR) for _ in line] for line in loaded]
        for line, values in zip(sums, loaded):
            for phi, value in zip(line, values):
                phi.add_incoming(zero, new)
                phi.add_incoming(value, old)
        return sums

    def loop(self, sums: Sums, count: Any, body: Callable[[Any, Sums], Sums]) -> Sums:
        """sums = body(i, sums) for i = 0 .. count - 1; count is at least 1."""
        b = self.builder
        before, inside, behind = b.block, b.append_basic_block("loop"), b.append_basic_block("end")
        b.branch(inside)
        b.position_at_end(inside)
        i = b.phi(LONG)
        running = [[b.phi(VECTOR) for _ in line] for line in sums]
        new = body(i, running)
        following, last = b.add(i, LONG(1)), b.block
        i.add_incoming(LONG(0), before)
        i.add_incoming(following, last)
        for line, values, later in zip(running, sums, new):
            for phi, value, other in zip(line, values, later):
                phi.add_incoming(value, before)
                phi.add_incoming(other, last)
        b.cbranch(b.icmp_signed("<", following, count), inside, behind)
        b.position_at_end(behind)
        return new

    def add_numbers(self, sums: Sums, x: list[Any], offset: Any, weights: list[Any]) -> Sums:
        """Each row's number, so many bytes behind its address, times weights, added to its sums."""
        b, new = self.builder, []
        for row, line in zip(x, sums):
            number = self.spread(b.add(row, offset))
            new.append([emit_fma(b, number, weight, value) for weight, value in zip(weights, line)])
        return new

    def spread(self, address: Any) -> Any:
        """The float32 at an address, in every element."""
        b = self.builder
        return emit_spread(b, b.load(pointer(b, address, FLOAT)))


Cases = dict[int, Callable[..., None]]  # of a number: what emits code from a builder and values


def _function(cases: Cases) -> Any:
    """A numba function of a tuple of integers: the first one chooses among the cases' codes."""

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
            for case, emit in cases.items():
                block = builder.append_basic_block(f"case_{case}")
                choice.add_case(LONG(case), block)
                builder.position_at_end(block)
                emit(builder, *rest)
                builder.branch(done)
            builder.position_at_end(none)
            builder.unreachable()
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(integers), generate

    return function


def _shaped(emit: Callable[..., None], *rest: Any) -> Callable[[int, int], Callable[..., None]]:
    """What emits a tile's code, by its rows and vectors."""
    return lambda rows, vectors: lambda b, *values: emit(Tile(b, rows, vectors), *rest, *values)


def emit_tile(code: Tile, *arguments: Any) -> None:
    """out [rows, columns] = x [rows, depth] @ panel, or += it if `fresh` is 0; float32.

    panel: as many of its PANEL columns, [depth, PANEL]; depth: at least 1.
    """
    x, x_stride, panel, out, out_stride, depth, fresh = arguments
    b, target = code.builder, code.addresses(out, out_stride)
    sources = code.addresses(x, x_stride)

    def one_input(k: Any, sums: Sums) -> Sums:
        weights = code.vectors(b.add(panel, b.mul(k, LONG(PANEL * FLOAT_BYTES))))
        return code.add_numbers(sums, sources, b.mul(k, LONG(FLOAT_BYTES)), weights)

    code.store(target, code.loop(code.start(target, fresh), depth, one_input))


tile = _function({n: _shaped(emit_tile)(n, _VECTORS) for n in range(1, MOST_ROWS + 1)})


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
    vectors = _SINGLE if rows == 1 else _WIDE_VECTORS if rows <= _WIDE_ROWS else _VECTORS
    while vectors > left:
        vectors //= 2
    return vectors


def _attention(emit: Callable[..., None]) -> Any:
    """A function; its first integer is 64 times a tile's vectors (`tile_vectors`) plus its rows."""
    most = {_SINGLE: 1, 1: MOST_ROWS, 2: _WIDE_ROWS}
    most |= {_WIDE_VECTORS: _WIDE_ROWS, _VECTORS: MOST_ROWS}
    return _function(
        {
            64 * vectors + rows: _shaped(emit)(rows, vectors)
            for vectors in most
            for rows in range(1, most[vectors] + 1)
        }
    )


def emit_score(code: Tile, *arguments: Any) -> None:
    """scores [rows, columns] = queries [rows, depth] . keys.

    keys: int64 [vectors], where the first numbers of sixteen keys lie, `key_stride` before their
    next.
    """
    queries, query_stride, keys, key_stride, depth, scores, score_stride = arguments
    b, x = code.builder, code.addresses(queries, query_stride)
    sources = [code.load(keys, c * ADDRESS_BYTES, LONG, align=8) for c in range(code.columns)]

    def one_dimension(d: Any, sums: Sums) -> Sums:
        offset = b.mul(d, key_stride)
        weights = [code.load(b.add(source, offset), 0, VECTOR) for source in sources]
        return code.add_numbers(sums, x, b.mul(d, LONG(FLOAT_BYTES)), weights)

    code.store(code.addresses(scores, score_stride), code.loop(code.zeros(), depth, one_dimension))


def emit_score_turned(code: Tile, *arguments: Any) -> None:
    """scores [rows, columns] = keys . queries [depth, columns]: keys are the rows here.

    keys: where the first numbers of some keys lie side by side, `key_stride` before their next.
    """
    keys, key_stride, queries, query_stride, depth, scores, score_stride = arguments
    b, x = code.builder, code.addresses(keys, LONG(FLOAT_BYTES))

    def one_dimension(d: Any, sums: Sums) -> Sums:
        weights = code.vectors(b.add(queries, b.mul(d, query_stride)))
        return code.add_numbers(sums, x, b.mul(d, key_stride), weights)

    code.store(code.addresses(scores, score_stride), code.loop(code.zeros(), depth, one_dimension))


score, score_turned = _attention(emit_score), _attention(emit_score_turned)


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

    def one_position(j: Any, sums: Sums) -> Sums:
        value = code.load(b.add(values, b.mul(j, LONG(ADDRESS_BYTES))), 0, LONG, align=8)
        numbers = code.vectors(b.add(value, first))
        return code.add_numbers(sums, x, b.mul(j, weight_step), numbers)

    code.store(target, code.loop(start, count, one_position))


add_values = _attention(emit_add_values)


def _whole(value: int) -> ir.Constant:
    return ir.Constant(_WORDS, [value] * WIDTH)


class _Group:
    """Emits the widening of a group of inputs, of one form: bits of a code, scales as halves.

    panel: the address of the first of the tile's columns among a panel's words, without the bytes
    of scales before it; the columns' scales are found from it, too.
    """

    def __init__(self, code: Tile, bits: int, half: bool, size: Any) -> None:
        self.code, self.builder, self.size = code, code.builder, size
        self.bits, self.half = bits, half
        self.at_once = 32 // bits  # inputs whose codes share a word
        self.scale_bytes = 2 if half else 4
        self.arrays = 2 if bits == 4 else 1  # of scales, and of offsets

    def open(self, panel: Any, number: Any, column: Any) -> None:
        """The group of this number: loads its scales."""
        b = self.builder
        before = self.arrays * self.scale_bytes * PANEL
        size = b.add(LONG(before), b.mul(self.size, LONG(PANEL * self.bits // 8)))
        at = b.add(panel, b.mul(number, size))
        scales = b.add(at, b.mul(column, LONG(self.scale_bytes)))
        self.scales = self._floats(scales)
        self.offsets = self._floats(b.add(scales, LONG(self.scale_bytes * PANEL)))
        self.words = b.add(b.add(at, LONG(before)), b.mul(column, LONG(_WORD_BYTES)))

    def words_of(self, number: Any) -> list[Any]:
        """The codes of `at_once` inputs, a word a column."""
        b = self.builder
        at = b.add(self.words, b.mul(number, LONG(PANEL * _WORD_BYTES)))
        return self.code.vectors(at, _WORDS)

    def weights(self, words: list[Any], which: int) -> list[Any]:
        """The weights of one of these inputs."""
        return [self._weight(word, which, column) for column, word in enumerate(words)]

    def _floats(self, address: Any) -> list[Any]:
        if not self.half:
            return self.code.vectors(address)
        stored = self.code.vectors(address, _HALVES, 2)
        return [self.builder.fpext(vector, VECTOR) for vector in stored]

    def _weight(self, word: Any, which: int, column: int) -> Any:
        b, scale = self.builder, self.scales[column]
        if self.bits == 4:
            code = b.and_(b.lshr(word, _whole(4 * which)), _whole(15))
            return emit_fma(b, b.sitofp(code, VECTOR), scale, self.offsets[column])
        code = b.ashr(b.shl(word, _whole(24 - 8 * which)), _whole(24))
        return b.fmul(b.sitofp(code, VECTOR), scale)


def emit_few_rows(code: Tile, form: tuple[int, bool], *arguments: Any) -> None:
    """out [rows, columns] = x @ columns of a quantised panel from `column` on; see `emit_tile`.

    form: bits of a code, and whether scales are float16; size: inputs of a group; groups: in all.
    """
    size, x, x_stride, panel, column, out, out_stride, groups, fresh = arguments
    b, target = code.builder, code.addresses(out, out_stride)
    sources, group = code.addresses(x, x_stride), _Group(code, *form, size)
    words = b.sdiv(size, LONG(group.at_once))

    def one_group(number: Any, sums: Sums) -> Sums:
        group.open(panel, number, column)
        first = b.mul(number, size)

        def one_word(k: Any, sums: Sums) -> Sums:
            codes = group.words_of(k)
            at = b.mul(b.add(first, b.mul(k, LONG(group.at_once))), LONG(_WORD_BYTES))
            for which in range(group.at_once):
                weights = group.weights(codes, which)
                sums = code.add_numbers(sums, sources, b.add(at, LONG(4 * which)), weights)
            return sums

        return code.loop(sums, words, one_word)

    code.store(target, code.loop(code.start(target, fresh), groups, one_group))


@called
def form_number(bits: int, half: int) -> int:
    """Where a form stands in _FORMS."""
    return 2 * half + bits // 8


few_rows = _function(
    {
        FEW_ROWS * number + rows: _shaped(emit_few_rows, form)(rows, _FEW_VECTORS)
        for number, form in enumerate(_FORMS)
        for rows in range(1, FEW_ROWS + 1)
    }
)


def emit_widen(code: Tile, form: tuple[int, bool], column: int, *arguments: Any) -> None:
    """The tile's columns from `column` on of groups first, first + 1, ...: float32 at `out`.

    out: [groups * size, PANEL]; form, size: see `emit_few_rows`.
    """
    size, panel, first, groups, out = arguments
    b, group = code.builder, _Group(code, *form, size)
    words = b.sdiv(size, LONG(group.at_once))

    def one_group(number: Any, _: Sums) -> Sums:
        group.open(panel, b.add(first, number), LONG(column))
        before = b.mul(number, size)

        def one_word(k: Any, _: Sums) -> Sums:
            codes = group.words_of(k)
            line = b.add(before, b.mul(k, LONG(group.at_once)))
            place = b.add(out, b.mul(line, LONG(PANEL * 4)))
            for which in range(group.at_once):
                there = b.add(place, LONG((which * PANEL + column) * 4))
                code.store([there], [group.weights(codes, which)])
            return []

        return code.loop([], words, one_word)

    code.loop([], groups, one_group)


def _widen_all(form: tuple[int, bool]) -> Callable[..., None]:
    def emit(builder: ir.IRBuilder, *values: Any) -> None:
        for column in range(0, PANEL, FEW_COLUMNS):
            emit_widen(Tile(builder, 1, _FEW_VECTORS), form, column, *values)

    return emit


widen = _function({number: _widen_all(form) for number, form in enumerate(_FORMS)})
