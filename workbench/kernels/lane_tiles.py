"""The innermost loops of attention: eight keys, or eight dimensions of values, times some lanes.

A lane is a query row of one head (`bundles`); one to three registers of them stand side by side, so
that a number of a key or value that was fetched serves up to 48 lanes. Each product is fused with
its addition, one sum for each element that stays in a register, terms in ascending order: an
element's value does not depend on how many registers there are. Addresses and strides are in bytes;
nothing is checked.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from workbench.kernels.lanes import WIDTH
from workbench.kernels.tiles import Sums, Tile

AT_ONCE = 8  # keys, or dimensions of values
_LONG, _FLOAT_BYTES = ir.IntType(64), 4
_VECTOR = ir.VectorType(ir.FloatType(), WIDTH)


class _LaneTile(Tile):
    """Eight rows of lanes: a `Tile` whose panel is a line of some registers."""

    def __init__(self, builder: ir.IRBuilder, registers: int) -> None:
        super().__init__(builder, AT_ONCE)
        self.columns = registers
        self.line = registers * WIDTH * _FLOAT_BYTES  # bytes

    def line_at(self, start: Any, number: Any) -> list[Any]:
        """The registers of a line."""
        return self.vectors(self.builder.add(start, self.builder.mul(number, _LONG(self.line))))

    def lines(self, start: Any) -> list[Any]:
        """Addresses of eight lines."""
        return self.addresses(start, _LONG(self.line))

    def entry(self, table: Any, number: Any) -> Any:
        """An int64 of a table."""
        b = self.builder
        return b.load(self.at(b.add(table, b.mul(number, _LONG(8))), 0, _LONG))


def scoring(registers: int) -> Any:
    """`score` for lines of so many registers."""

    @intrinsic
    def score(_: Any, keys: Any, stride: Any, queries: Any, depth: Any, scores: Any) -> Any:
        """scores [8, lanes] = eight keys . queries [depth, lanes].

        keys: of int64 [8], where each key's first number lies, `stride` before the next.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            keys, stride, queries, depth, scores = args
            tile = _LaneTile(builder, registers)
            sources = [tile.entry(keys, _LONG(number)) for number in range(AT_ONCE)]
            zero = ir.Constant(_VECTOR, [0.0] * WIDTH)

            def one_dimension(d: Any, sums: Sums) -> Sums:
                offset = builder.mul(d, stride)
                return tile.add_numbers(sums, sources, offset, tile.line_at(queries, d))

            start = [[zero] * registers for _ in sources]
            tile.store(tile.lines(scores), tile.loop(start, depth, one_dimension))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return score


def adding_values(registers: int) -> Any:
    """`add_values` for lines of so many registers."""

    @intrinsic
    def add_values(
        _: Any, values: Any, first: Any, count: Any, weights: Any, shrink: Any, sums: Any
    ) -> Any:
        """sums [8, lanes] = sums * shrink [lanes] + values [count, 8] . weights [count, lanes].

        values: of int64 [count], where each position's value lies; first: bytes before the first of
        its eight numbers. count: at least 1.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values, first, count, weights, shrink, sums = args
            tile = _LaneTile(builder, registers)
            target, factors = tile.lines(sums), tile.vectors(shrink)
            start = [
                [builder.fmul(total, factor) for total, factor in zip(tile.vectors(line), factors)]
                for line in target
            ]

            def one_position(j: Any, sums: Sums) -> Sums:
                eight = tile.addresses(
                    builder.add(tile.entry(values, j), first), _LONG(_FLOAT_BYTES)
                )
                return tile.add_numbers(sums, eight, _LONG(0), tile.line_at(weights, j))

            tile.store(target, tile.loop(start, count, one_position))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return add_values
