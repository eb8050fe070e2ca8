"""Attention of one layer on a GPU: which kernels are launched, over which lists, with which tiles.

Shared spans first, then own spans and prefills (in one launch where a step has both), then the
join.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from workbench.kernels.context import LayerCache
from workbench.kernels.triton.decode import HEADS, join, spans_of
from workbench.kernels.triton.fused import both
from workbench.kernels.triton.placing import DeviceWork
from workbench.kernels.triton.prefill import prefill
from workbench.kernels.triton.spans import LOG2_E
from workbench.kernels.triton.tuning import SMALLEST, Tuning

JOIN_WARPS = 4


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """The launches of one layer's attention; fuse: prefill and decode in one, where both are."""

    tuning: Tuning
    keys_by_position: bool
    fuse: bool = True

    def __call__(
        self, qkv: torch.Tensor, out: torch.Tensor, cache: LayerCache, work: DeviceWork
    ) -> None:
        """out [T, heads head_dim] of every row of the step."""
        shape = self._shape(out, cache, work)
        rows = (work.positions, work.tables, work.tables.shape[1], qkv, qkv.stride(0))
        layer = (cache.data[cache.base :], LOG2_E.value / math.sqrt(cache.head_dim))
        written = (out, out.stride(0))
        scratch = self._scratch(out, cache, work)
        tables = (work.members, work.slots, *rows, *layer, *scratch)
        fused = self.fuse and len(work.prefill) > 0 and len(work.own) > 0
        if len(work.shared):
            self._spans(work.shared, tables, shape, self.tuning.shared_lanes)
        if len(work.own) and not fused:
            self._spans(work.own, tables, shape, self.tuning.span_lanes)
        if len(work.prefill) and not fused:
            prefill[(len(work.prefill) * cache.kv_heads,)](
                *(work.prefill, *rows, *written, *layer),
                **shape,
                **self._tile(self.tuning.prefill_lanes),
                JOINED=self.tuning.joined,
                **self._options(self.tuning.prefill_warps),
            )
        if fused:
            self._both(work, rows, written, layer, scratch, shape)
        if len(work.slots):
            self._join(out, cache, work, scratch, shape["DIMENSIONS"])

    def _spans(
        self, items: torch.Tensor, tables: tuple[Any, ...], shape: dict[str, Any], lanes: int
    ) -> None:
        spans_of[(len(items) * shape["KV_HEADS"],)](
            items, *tables, **shape, **self._tile(lanes), **self._options(self.tuning.span_warps)
        )

    def _both(
        self,
        work: DeviceWork,
        rows: tuple[Any, ...],
        written: tuple[Any, ...],
        layer: tuple[Any, ...],
        scratch: tuple[Any, ...],
        shape: dict[str, Any],
    ) -> None:
        prefills, spans = (len(items) * shape["KV_HEADS"] for items in (work.prefill, work.own))
        both[(prefills + spans,)](
            *(work.prefill, prefills, prefills + spans, work.own, work.members, work.slots),
            *(*rows, *written, *layer, *scratch),
            **shape,
            **self._tile(self.tuning.span_lanes),
            PREFILL_LANES=self.tuning.prefill_lanes,
            JOINED=self.tuning.joined,
            **self._options(self.tuning.prefill_warps),
        )

    def _join(
        self,
        out: torch.Tensor,
        cache: LayerCache,
        work: DeviceWork,
        scratch: tuple[Any, ...],
        dimensions: int,
    ) -> None:
        heads = out.shape[1] // cache.head_dim
        join[(len(work.slots), triton.cdiv(heads, HEADS.value))](
            *(work.slots, work.positions, *scratch, out, out.stride(0)),
            QUERY_HEADS=heads,
            HEAD_DIM=cache.head_dim,
            DIMENSIONS=dimensions,
            SPAN=self.tuning.span,
            **self._options(JOIN_WARPS),
        )

    def _shape(self, out: torch.Tensor, cache: LayerCache, work: DeviceWork) -> dict[str, Any]:
        return {
            "KV_HEADS": cache.kv_heads,
            "GROUP": out.shape[1] // cache.head_dim // cache.kv_heads,
            "HEAD_DIM": cache.head_dim,
            "DIMENSIONS": max(SMALLEST, triton.next_power_of_2(cache.head_dim)),
            "BLOCK_SIZE": cache.block_size,
            "BY_POSITION": self.keys_by_position,
            "ALIGNED": work.aligned,
        }

    def _scratch(self, out: torch.Tensor, cache: LayerCache, work: DeviceWork) -> tuple[Any, ...]:
        """Sums, totals and tops of the decoded rows' spans, and how many spans."""
        shape = (len(work.slots), work.spans, out.shape[1] // cache.head_dim)
        sums = out.new_empty((*shape, cache.head_dim), dtype=torch.float32)
        totals, tops = out.new_empty((2, *shape), dtype=torch.float32)
        return sums, totals, tops, work.spans

    def _tile(self, lanes: int) -> dict[str, int]:
        return {"LANES": lanes, "TILE": self.tuning.tile, "SPAN": self.tuning.span}

    def _options(self, warps: int) -> dict[str, Any]:
        """Products and sums are fused where the compiler sees fit, unless bits must agree."""
        fusion = not self.tuning.joined
        return {
            "num_warps": warps,
            "num_stages": self.tuning.stages,
            "enable_fp_fusion": fusion,
        }
