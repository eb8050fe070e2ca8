"""Launches of the products in fixed tiles: one program for all chunks, or one for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from workbench.kernels.triton.products import GATED, add_parts, parts_of, product

_ADDED_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class FixedTiles:
    """How every product is cut up; all but `enough` is part of the arithmetic.

    enough: programs that keep a GPU busy; with fewer, every chunk of inputs has its own.
    """

    rows: int = 64
    outputs: int = 64
    step: int = 64
    chunk: int = 512
    enough: int = 256
    warps: int = 4
    stages: int = 4

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, mode: int) -> None:
        """x [T, inputs] by weight [outputs, inputs] into out, as `mode` of `products` says."""
        rows, (total, size) = len(x), weight.shape
        count = out.shape[1]
        tile = {"ROWS": self.rows, "OUTPUTS": self.outputs, "STEP": self.step, "CHUNK": self.chunk}
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}
        tiles = triton.cdiv(rows, self.rows)
        if tiles * triton.cdiv(count, self.outputs) >= self.enough:
            product[(tiles, triton.cdiv(count, self.outputs))](
                *(x, x.stride(0), weight, out, out.stride(0), rows),
                SIZE=size,
                COUNT=count,
                MODE=mode,
                **tile,
                **options,
            )
            return
        assert total == count * (2 if mode == GATED.value else 1), "weight and out disagree"
        chunks = triton.cdiv(size, self.chunk)
        parts = x.new_empty((chunks, rows, total), dtype=torch.float32)
        parts_of[(tiles, triton.cdiv(total, self.outputs), chunks)](
            *(x, x.stride(0), weight, parts, rows), SIZE=size, COUNT=total, **tile, **options
        )
        add_parts[(rows, triton.cdiv(count, _ADDED_AT_ONCE))](
            *(parts, out, out.stride(0), rows),
            CHUNKS=chunks,
            COUNT=count,
            TAKEN=_ADDED_AT_ONCE,
            MODE=mode,
            enable_fp_fusion=False,
        )


def fixed_tiles(element_bytes: int) -> FixedTiles:
    """The tiles for a type: float32 has no tensor cores here, and wants smaller ones."""
    if element_bytes > 2:
        return FixedTiles(rows=32, outputs=32, step=32, stages=2)
    return FixedTiles()
