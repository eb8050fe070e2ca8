"""Prefill and decode in one launch, so that one computes while the other waits for memory.

In the manner of POD-Attention (Kamath et al. 2025): programs of both kinds share a multiprocessor.
There a program asks which multiprocessor it runs on and picks its kind by a ticket; here the kinds
alternate evenly in launch order, which needs neither atomics nor assembly and keeps every program's
work known beforehand. Sums are those of `prefill` and `decode`; so are the pointers.
"""

import triton
import triton.language as tl

from workbench.kernels.triton.decode import one_span
from workbench.kernels.triton.prefill import prefill_tile


@triton.jit(do_not_specialize=["prefills", "programs", "width", "spans"])
def both(
    prefill_items: tl.tensor,
    prefills: tl.tensor,  # programs that prefill
    programs: tl.tensor,  # all programs
    items: tl.tensor,
    members: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    tables: tl.tensor,
    width: tl.tensor,
    qkv: tl.tensor,
    qkv_stride: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    sums: tl.tensor,
    totals: tl.tensor,
    tops: tl.tensor,
    spans: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMENSIONS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PREFILL_LANES: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    JOINED: tl.constexpr,
    BY_POSITION: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Prefill and decode in one launch, evenly mixed; grid: (P + Q) * KV_HEADS.

    Of the first i programs, i * prefills // programs prefill, rounded down.
    """
    number = tl.program_id(0).to(tl.int64)
    before = number * prefills // programs
    if (number + 1) * prefills // programs > before:
        prefill_tile(
            before, prefill_items, positions, tables, width, qkv, qkv_stride, out, out_stride,
            data, scale, KV_HEADS, GROUP, HEAD_DIM, DIMENSIONS, BLOCK_SIZE, PREFILL_LANES, TILE,
            SPAN, JOINED, BY_POSITION, ALIGNED,
        )  # fmt: skip
    else:
        one_span(
            number - before, items, members, slots, positions, tables, width, qkv, qkv_stride,
            data, scale, sums, totals, tops, spans, KV_HEADS, GROUP, HEAD_DIM, DIMENSIONS,
            BLOCK_SIZE, LANES, TILE, SPAN, BY_POSITION, ALIGNED,
        )  # fmt: skip
