"""The tiles of the attention kernels: a small table, not a clock.

`triton.autotune` would choose by timing, anew in every process, and tiles are part of the
arithmetic: the same seed could give other tokens in the next run. So the choice is written down
here. It is reasoned from sizes of tiles, registers and shared memory, and has not been timed yet:
`workbench bench kernels --profile full` times the `candidates` on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from workbench.errors import ConfigError

SMALLEST = 16  # lanes, positions and dimensions that one tensor-core product takes at least


@dataclass(frozen=True, slots=True)
class Tuning:
    """How attention is cut up; numbers of lanes and positions are powers of two.

    A *lane* is one query row of one head. span: positions that one program of a decode sums up,
    and the unit in which shared prefixes are shared. joined: prefill too is summed span by span.
    """

    tile: int = 64  # positions between two rescalings
    span: int = 256
    prefill_lanes: int = 128
    span_lanes: int = 16
    shared_lanes: int = 64
    prefill_warps: int = 8
    span_warps: int = 4
    stages: int = 3  # tiles under way at a time
    joined: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError when the kernels cannot be built so."""
        sizes = (self.tile, self.span, self.prefill_lanes, self.span_lanes, self.shared_lanes)
        if min(sizes) < SMALLEST or any(size & (size - 1) for size in sizes):
            raise ConfigError(
                f"Tiles of {sizes} positions and lanes; each is a power of two from {SMALLEST} on."
            )
        if self.span < self.tile:
            raise ConfigError(
                f"A span of {self.span} positions is shorter than a tile of {self.tile}; "
                "give a span of at least one tile."
            )

    def difference(self, other: Tuning) -> str:
        """What differs from another, as a name: "tile=32"."""
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
        return ",".join(f"{name}={getattr(self, name)}" for name in names)

    @property
    def same_bits(self) -> bool:
        """Whether a row's result is the same bits by whichever program it is computed."""
        lanes = {self.prefill_lanes, self.span_lanes, self.shared_lanes}
        return self.joined and len(lanes) == 1 and self.prefill_warps == self.span_warps


def chosen(head_dim: int, element_bytes: int, batch_invariant: bool) -> Tuning:
    """The table: tiles for a head size and element size, with or without same bits everywhere."""
    if element_bytes > 2:  # without tensor cores: larger tiles do not fit the registers
        tile, lanes, warps, stages = 16, 32, 8, 2
    else:
        tile, lanes, warps, stages = 64, 64, 4, 2 if head_dim > 64 else 3
    same = Tuning(
        tile=tile,
        prefill_lanes=lanes,
        span_lanes=lanes,
        shared_lanes=lanes,
        prefill_warps=warps,
        span_warps=warps,
        stages=stages,
        joined=True,
    )
    if batch_invariant:
        return same
    fast = replace(same, span_lanes=SMALLEST, joined=False)
    if element_bytes > 2:
        return fast
    return replace(fast, prefill_lanes=128, prefill_warps=8 if head_dim > 64 else 4, stages=3)


def candidates(base: Tuning) -> Iterator[Tuning]:
    """What is worth measuring beside the table's choice, one thing changed at a time."""
    for tile in (32, 64, 128):
        if tile <= base.span:
            yield replace(base, tile=tile)
    for span in (128, 256, 512):
        if span >= base.tile:
            yield replace(base, span=span)
    for stages in (2, 3, 4):
        yield replace(base, stages=stages)
    for warps in (4, 8):
        yield replace(base, prefill_warps=warps, span_warps=warps if base.joined else 4)
