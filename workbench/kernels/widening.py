"""Quantised panels in LLVM's own terms: widened in registers, for a product or into a cache.

A weight is scale * code + offset in float32, rounded once; `panels` says where each lies. For few
rows a product that widens on the way costs less than putting weights down in between (`few_rows`);
for many, `widen` puts them down once and `tile` reads them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from workbench.kernels.isa import ISA
from workbench.kernels.lanes import WIDTH
from workbench.kernels.tiles import PANEL, Sums, Tile, each_case

FEW_ROWS, _VECTORS = ISA.few
FEW_COLUMNS = _VECTORS * WIDTH
_FORMS = ((4, False), (8, False), (4, True), (8, True))  # bits of a code; whether scales are halves
_LONG, _FLOAT = ir.IntType(64), ir.FloatType()
_VECTOR, _HALVES = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(ir.HalfType(), WIDTH)
_WORDS = ir.VectorType(ir.IntType(32), WIDTH)
_WORD_BYTES = 4


def _whole(value: int) -> ir.Constant:
    return ir.Constant(_WORDS, [value] * WIDTH)


class _Group:
    """Emits the widening of a group of inputs, of one form: bits of a code, scales as halves.

    panel: the address of the first of the tile's columns among a panel's words, without the bytes
    of scales before it; the columns' scales are found from it, too.
    """

    def __init__(self, code: Tile, bits: int, half: bool, size: Any) -> None:
        self.code, self.builder, self.bits, self.half, self.size = (
            code,
            code.builder,
            bits,
            half,
            size,
        )
        self.at_once = 32 // bits  # inputs whose codes share a word
        self.scale_bytes = 2 if half else 4
        self.arrays = 2 if bits == 4 else 1  # of scales, and of offsets

    def open(self, panel: Any, number: Any, column: Any) -> None:
        """The group of this number: loads its scales."""
        b = self.builder
        before = self.arrays * self.scale_bytes * PANEL
        size = b.add(_LONG(before), b.mul(self.size, _LONG(PANEL * self.bits // 8)))
        at = b.add(panel, b.mul(number, size))
        scales = b.add(at, b.mul(column, _LONG(self.scale_bytes)))
        self.scales = self._floats(scales)
        self.offsets = self._floats(b.add(scales, _LONG(self.scale_bytes * PANEL)))
        self.words = b.add(b.add(at, _LONG(before)), b.mul(column, _LONG(_WORD_BYTES)))

    def words_of(self, number: Any) -> list[Any]:
        """The codes of `at_once` inputs, a word a column."""
        b = self.builder
        return self.code.vectors(
            b.add(self.words, b.mul(number, _LONG(PANEL * _WORD_BYTES))), _WORDS
        )

    def weights(self, words: list[Any], which: int) -> list[Any]:
        """The weights of one of these inputs."""
        return [self._weight(word, which, column) for column, word in enumerate(words)]

    def _floats(self, address: Any) -> list[Any]:
        if not self.half:
            return self.code.vectors(address)
        stored = self.code.vectors(address, _HALVES, 2)
        return [self.builder.fpext(vector, _VECTOR) for vector in stored]

    def _weight(self, word: Any, which: int, column: int) -> Any:
        b, scale = self.builder, self.scales[column]
        if self.bits == 4:
            code = b.and_(b.lshr(word, _whole(4 * which)), _whole(15))
            return self.code.fma(b.sitofp(code, _VECTOR), scale, self.offsets[column])
        code = b.ashr(b.shl(word, _whole(24 - 8 * which)), _whole(24))
        return b.fmul(b.sitofp(code, _VECTOR), scale)


def _form_number(builder: ir.IRBuilder, bits: Any, half: Any) -> Any:
    """Where (bits, half) stands in _FORMS."""
    return builder.add(builder.mul(half, _LONG(2)), builder.lshr(bits, _LONG(3)))


@intrinsic
def few_rows(
    _: Any,
    rows: Any,
    bits: Any,
    half: Any,
    group: Any,
    x: Any,
    x_stride: Any,
    panel: Any,
    column: Any,
    out: Any,
    out_stride: Any,
    groups: Any,
    fresh: Any,
) -> Any:
    """out [rows, FEW_COLUMNS] = x @ columns of a quantised panel from `column` on; see `tile`.

    rows: 1 to FEW_ROWS; groups: of inputs, in all; bits: of a code, 4 (with offsets) or 8; half: 1
    if scales are float16, else 0.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, bits, half, *rest = args
        form = builder.mul(_form_number(builder, bits, half), _LONG(FEW_ROWS))
        with each_case(builder, builder.add(form, rows), range(1, 4 * FEW_ROWS + 1)) as cases:
            for case in cases:
                number, few = divmod(case - 1, FEW_ROWS)
                emit_few_rows(Tile(builder, few + 1, _VECTORS), _FORMS[number], *rest)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 12), generate


def emit_few_rows(
    code: Tile,
    form: tuple[int, bool],
    size: Any,
    x: Any,
    x_stride: Any,
    panel: Any,
    column: Any,
    out: Any,
    out_stride: Any,
    groups: Any,
    fresh: Any,
) -> None:
    """`few_rows` of as many rows and columns as the tile has, for one form (bits, half)."""
    b, target = code.builder, code.addresses(out, out_stride)
    sources, group = code.addresses(x, x_stride), _Group(code, *form, size)
    words = b.sdiv(size, _LONG(group.at_once))

    def one_group(number: Any, sums: Sums) -> Sums:
        group.open(panel, number, column)
        first = b.mul(number, size)

        def one_word(k: Any, sums: Sums) -> Sums:
            codes = group.words_of(k)
            at = b.mul(b.add(first, b.mul(k, _LONG(group.at_once))), _LONG(_WORD_BYTES))
            for which in range(group.at_once):
                weights = group.weights(codes, which)
                sums = code.add_numbers(sums, sources, b.add(at, _LONG(4 * which)), weights)
            return sums

        return code.loop(sums, words, one_word)

    code.store(target, code.loop(code.start(target, fresh), groups, one_group))


@intrinsic
def widen(
    _: Any, bits: Any, half: Any, group: Any, panel: Any, first: Any, groups: Any, out: Any
) -> Any:
    """Groups first, first + 1, ... of a panel: float32 [groups * group, PANEL] at `out`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits, half, *rest = args
        with each_case(builder, _form_number(builder, bits, half), range(len(_FORMS))) as cases:
            for case in cases:
                for column in range(0, PANEL, FEW_COLUMNS):
                    emit_widen(Tile(builder, 1, _VECTORS), _FORMS[case], column, *rest)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def emit_widen(
    code: Tile,
    form: tuple[int, bool],
    column: int,
    size: Any,
    panel: Any,
    first: Any,
    groups: Any,
    out: Any,
) -> None:
    """`widen` of the tile's columns from `column` on, for one form (bits, half)."""
    b, group = code.builder, _Group(code, *form, size)
    words = b.sdiv(size, _LONG(group.at_once))

    def one_group(number: Any, _: Sums) -> Sums:
        group.open(panel, b.add(first, number), _LONG(column))
        before = b.mul(number, size)

        def one_word(k: Any, _: Sums) -> Sums:
            codes = group.words_of(k)
            line = b.add(before, b.mul(k, _LONG(group.at_once)))
            place = b.add(out, b.mul(line, _LONG(PANEL * 4)))
            for which in range(group.at_once):
                there = b.add(place, _LONG((which * PANEL + column) * 4))
                code.store([there], [group.weights(codes, which)])
            return []

        return code.loop([], words, one_word)

    code.loop([], groups, one_group)
