"""The innermost loops of attention: some keys, or some dimensions of values, times some lanes.

A lane is a query row of one head (`bundles`); one to three vectors of them stand side by side in a
line, so that a number of a key or value that was fetched serves up to 48 lanes. Each product is
fused with its addition, one sum for each element that stays in a register, terms in ascending
order: an element's value does not depend on how many vectors there are. `isa` says how many keys
and vectors fill the registers. Addresses and strides are in bytes; nothing is checked.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from workbench.kernels.isa import ISA
from workbench.kernels.lanes import WIDTH, Lanes
from workbench.kernels.tiles import Sums, Tile

AT_ONCE, MOST_VECTORS = ISA.lanes  # keys, or dimensions of values; vectors of lanes
ROW_KEYS, ROW_DIMENSIONS = ISA.row_keys, ISA.row_dimensions  # vectors of them, for a single row
_LONG, _FLOAT_BYTES = ir.IntType(64), 4
_VECTOR = ir.VectorType(ir.FloatType(), WIDTH)


class LaneTile(Tile):
    """Some rows of lanes: a `Tile` whose panel is (a part of) lines of `vectors` vectors.

    shape: rows, and the most vectors of lanes, as `isa` has them.
    """

    def __init__(self, builder: ir.IRBuilder, vectors: int, shape: tuple[int, int]) -> None:
        super().__init__(builder, shape[0], min(vectors, shape[1]))
        self.line = vectors * WIDTH * _FLOAT_BYTES  # bytes

    def line_at(self, start: Any, number: Any) -> list[Any]:
        """The vectors of a line."""
        return self.vectors(self.builder.add(start, self.builder.mul(number, _LONG(self.line))))

    def lines(self, start: Any) -> list[Any]:
        """Addresses of successive lines."""
        return self.addresses(start, _LONG(self.line))


def scoring(vectors: int) -> Any:
    """`score` for lines of so many vectors."""

    @intrinsic
    def score(_: Any, keys: Any, stride: Any, queries: Any, depth: Any, scores: Any) -> Any:
        """scores [AT_ONCE, lanes] = keys . queries [depth, lanes].

        keys: of int64 [AT_ONCE], where each key's first number lies, `stride` before the next.
        Lanes: of up to MOST_VECTORS vectors of a line.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit_score(LaneTile(builder, vectors, ISA.lanes), *args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return score


def emit_score(
    tile: LaneTile, keys: Any, stride: Any, queries: Any, depth: Any, scores: Any
) -> None:
    """`score` of as many keys and lanes as the tile has."""
    sources = [tile.integer(keys, _LONG(number)) for number in range(tile.rows)]

    def one_dimension(d: Any, sums: Sums) -> Sums:
        offset = tile.builder.mul(d, stride)
        return tile.add_numbers(sums, sources, offset, tile.line_at(queries, d))

    tile.store(tile.lines(scores), tile.loop(tile.zeros(), depth, one_dimension))


def adding_values(vectors: int) -> Any:
    """`add_values` for lines of so many vectors."""

    @intrinsic
    def add_values(
        _: Any, values: Any, first: Any, count: Any, weights: Any, shrink: Any, sums: Any
    ) -> Any:
        """sums [AT_ONCE, lanes] = sums * shrink [lanes] + values . weights [count, lanes].

        values: of int64 [count], where each position's value lies; first: bytes before the first of
        its AT_ONCE numbers. count: at least 1. Lanes: as in `score`.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit_add_values(LaneTile(builder, vectors, ISA.lanes), *args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return add_values


def emit_add_values(
    tile: LaneTile, values: Any, first: Any, count: Any, weights: Any, shrink: Any, sums: Any
) -> None:
    """`add_values` of as many dimensions and lanes as the tile has."""
    b, target, factors = tile.builder, tile.lines(sums), tile.vectors(shrink)

    def one_position(j: Any, sums: Sums) -> Sums:
        numbers = tile.addresses(b.add(tile.integer(values, j), first), _LONG(_FLOAT_BYTES))
        return tile.add_numbers(sums, numbers, _LONG(0), tile.line_at(weights, j))

    start = tile.scaled(target, [factors] * tile.rows)
    tile.store(target, tile.loop(start, count, one_position))


@intrinsic
def score_row(_: Any, keys: Any, stride: Any, query: Any, depth: Any, scores: Any) -> Any:
    """scores [16 ROW_KEYS] = as many keys . query [depth].

    keys: of int64 [ROW_KEYS], where the first numbers of sixteen keys lie, `stride` before their
    next.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_score_row(Tile(builder, 1, ROW_KEYS), *args)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def emit_score_row(tile: Tile, keys: Any, stride: Any, query: Any, depth: Any, scores: Any) -> None:
    """`score_row` of as many vectors of keys as the tile has columns."""
    b = tile.builder
    sources = [tile.integer(keys, _LONG(number)) for number in range(tile.columns)]

    def one_dimension(d: Any, sums: Sums) -> Sums:
        offset = b.mul(d, stride)
        places = [tile.at(b.add(source, offset), 0, _VECTOR) for source in sources]
        return tile.add_input(sums, [query], d, [b.load(place, align=4) for place in places])

    tile.store([scores], tile.loop(tile.zeros(), depth, one_dimension))


@intrinsic
def add_row_values(
    _: Any,
    values: Any,
    first: Any,
    count: Any,
    one: Any,
    other: Any,
    shrink_one: Any,
    shrink_other: Any,
    sums_one: Any,
    sums_other: Any,
) -> Any:
    """sums [16 ROW_DIMENSIONS] = sums * shrink + values . weights [count], of each of two heads.

    values, first, count: as in `add_values`; one, other: the heads' weights.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_add_row_values(Tile(builder, 2, ROW_DIMENSIONS), *args)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(*[whole] * 5, Lanes, Lanes, whole, whole), generate


def emit_add_row_values(
    tile: Tile,
    values: Any,
    first: Any,
    count: Any,
    one: Any,
    other: Any,
    shrink_one: Any,
    shrink_other: Any,
    *sums: Any,
) -> None:
    """`add_row_values` of as many vectors of dimensions as the tile has columns."""
    target = list(sums)

    def one_position(j: Any, sums: Sums) -> Sums:
        numbers = tile.vectors(tile.builder.add(tile.integer(values, j), first))
        return tile.add_input(sums, [one, other], j, numbers)

    start = tile.scaled(target, [[shrink_one] * tile.columns, [shrink_other] * tile.columns])
    tile.store(target, tile.loop(start, count, one_position))
