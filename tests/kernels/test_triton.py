"""Triton kernels compute what their plain torch twins compute; on a CPU under the interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")

from tests.kernels.synthetic import Step, check_same, random_step
from workbench.kernels import LayerCache
from workbench.kernels.reference import ReferenceKernels
from workbench.kernels.triton import INTERPRETED, TritonKernels
from workbench.kernels.triton.attention import Tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Small tiles: few positions then have many edges.
SMALL = Tiles(queries=16, tile=16, span=32)
WIDER = Tiles(queries=32, tile=32, span=64)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
KINDS = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]

DECODE = [(5, 1), (15, 1), (31, 1), (32, 1), (0, 1)]
PREFILL = [(0, 17), (0, 1), (0, 5)]
MIXED = [(0, 19), (40, 1), (17, 3)]
# (heads, kv_heads, head_dim), sequences, block size, tiles
CASES = {
    "one_head_each": ((2, 2, 16), DECODE, 16, SMALL),
    "blocks_of_one": ((2, 1, 16), DECODE, 1, SMALL),
    "group_of_three": ((6, 2, 24), MIXED, 8, SMALL),
    "group_of_four": ((4, 1, 48), DECODE, 4, SMALL),
    "group_of_six": ((6, 1, 80), MIXED, 16, SMALL),
    "group_of_five": ((5, 1, 64), MIXED, 16, WIDER),
    "group_of_seven": ((7, 1, 16), PREFILL, 4, SMALL),
    "group_of_eight": ((8, 1, 32), MIXED, 32, SMALL),
    "wide": ((4, 2, 128), MIXED, 16, WIDER),
    "odd_width": ((3, 3, 40), PREFILL, 2, SMALL),
}


def kernels(dtype: torch.dtype, tiles: Tiles) -> TritonKernels:
    return TritonKernels(torch.device(DEVICE), dtype, tiles)


def attended(step: Step, tiles: Tiles) -> torch.Tensor:
    """Attention of every row, by our kernels."""
    out, ours = step.room(), kernels(step.qkv.dtype, tiles)
    ours.attend(step.qkv, out, step.cache, step.context)
    return out


def expected(step: Step) -> torch.Tensor:
    """The twin's, in float32 of the same numbers."""
    wide = step.to(torch.float32, DEVICE)
    out = wide.room()
    twin = ReferenceKernels(torch.device(DEVICE), torch.float32, keys_by_position=True)
    twin.attend(wide.qkv, out, wide.cache, wide.context)
    return out


def compare(name: str, dtype: torch.dtype) -> None:
    shape, sequences, block_size, tiles = CASES[name]
    step = random_step(shape, sequences, block_size).to(dtype, DEVICE)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        attended(step, tiles).float(),
        expected(step),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_its_twin(name: str) -> None:
    """Prefill, decode and both in one step, over scattered blocks with NaN all around."""
    compare(name, torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_attention_in_half_precision(name: str) -> None:
    """The same in float16: sums are float32."""
    compare(name, torch.float16)


@pytest.mark.parametrize("name", ["group_of_seven", "group_of_eight"])
def test_bytes_of_another_model_around_the_live_data(name: str) -> None:
    """A page of an arena may have held anything: float16 reads its bytes as all kinds of NaN."""
    shape, sequences, block_size, tiles = CASES[name]
    step = random_step(shape, sequences, block_size).to(torch.float16, DEVICE)
    wanted = expected(step)
    bits, live = step.cache.data.view(torch.int16), ~step.cache.data.isnan()
    patterns = torch.tensor([0x7C00, 0x7C01, 0x7E00, 0x7FFF, -1, -0x400, -0x3FF, 0x7BFF, -0x401])
    junk = patterns.repeat(len(bits) // len(patterns) + 1)[: len(bits)].to(bits)
    bits.copy_(torch.where(live, bits, junk))
    found = attended(step, tiles).float()
    torch.testing.assert_close(found, wanted, rtol=3e-3, atol=3e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_attention_on_the_device(name: str, dtype: torch.dtype) -> None:
    """Every case in both half precisions, compiled."""
    compare(name, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_table_s_tiles_on_the_device(head_dim: int, dtype: torch.dtype) -> None:
    """Tiles as they are used, over contexts of many spans, a shared prefix among them."""
    sequences = [(0, 700), (1300, 1), (1029, 1), (1111, 1), (1024, 40)]
    step = random_step((32, 8, head_dim), sequences, 16, shared=0).to(dtype, DEVICE)
    siblings = random_step((32, 8, head_dim), [(1100, 1)] * 9, 16, shared=1024).to(dtype, DEVICE)
    for each in (step, siblings):
        ours = TritonKernels(torch.device(DEVICE), dtype)
        out = each.room()
        ours.attend(each.qkv, out, each.cache, each.context)
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(out.float(), expected(each), rtol=tolerance, atol=tolerance)


def test_a_shared_prefix_is_the_same_bits() -> None:
    """Spans of siblings worked on once give what each sibling's own copy of them gives."""
    shape, sequences = (4, 2, 16), [(70, 1), (68, 1), (65, 2), (69, 1), (40, 1)]
    shared = random_step(shape, sequences, 16, shared=64).to(torch.float32, DEVICE)
    copied = random_step(shape, sequences, 16, shared=64, copied=True).to(torch.float32, DEVICE)
    out = attended(shared, SMALL)
    check_same(out, attended(copied, SMALL), INTERPRETED)
    torch.testing.assert_close(out, expected(shared), rtol=2e-5, atol=2e-5)


def test_a_decoded_row_is_its_own() -> None:
    """A row's bits are the same alone and in a batch, and for every block size."""
    sequences = [(50, 1), (7, 1), (33, 1)]
    batch = random_step((4, 2, 16), sequences, 8).to(torch.float32, DEVICE)
    out = attended(batch, SMALL)
    for block_size in (1, 32):
        other = random_step((4, 2, 16), sequences, block_size).to(torch.float32, DEVICE)
        assert torch.equal(attended(other, SMALL), out)
    for s in range(3):
        rows, context = slice(s, s + 1), batch.context
        alone = replace(
            context,
            positions=context.positions[rows],
            sequence=context.sequence[:1],
            query_start=context.query_start[:2],
            context_len=context.context_len[rows],
            block_offsets=context.block_offsets[rows],
        )
        assert torch.equal(attended(Step(batch.qkv[rows], batch.cache, alone), SMALL), out[rows])


def test_joined_prefill_is_the_bits_of_decoding() -> None:
    """With equal lanes and joined spans, a position prefilled is the position decoded."""
    whole = random_step((4, 2, 16), [(0, 41)], 16).to(torch.float32, DEVICE)
    out = attended(whole, SMALL)
    for p in (0, 15, 31, 32, 40):
        one = replace(
            whole.context,
            positions=whole.context.positions[p : p + 1],
            sequence=whole.context.sequence[:1],
            query_start=np.array([0, 1], np.int32),
            context_len=whole.context.positions[p : p + 1].astype("int32") + 1,
        )
        decoded = attended(Step(whole.qkv[p : p + 1], whole.cache, one), SMALL)
        assert torch.equal(decoded[0], out[p])


@pytest.mark.parametrize(
    ("shape", "block_size"),
    [((4, 2, 16), 8), ((9, 3, 64), 16), ((5, 1, 24), 1), ((2, 2, 128), 4)],
    ids=str,
)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_rotate_and_store_equals_its_twin(
    shape: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> None:
    """Queries and keys are rotated, keys and values are where they belong, NaN stays around."""
    step = random_step(shape, [(0, 4), (10, 1)], block_size).to(dtype, DEVICE)
    angles = torch.rand(16, shape[2] // 2, generator=torch.Generator().manual_seed(1)) * 6
    cosine, sine = angles.cos().to(step.qkv), angles.sin().to(step.qkv)
    wide = step.to(torch.float32, DEVICE)
    mine, theirs = step.qkv.clone(), wide.qkv.clone()
    cache = replace(step.cache, data=step.cache.data.clone())
    other = replace(wide.cache, data=wide.cache.data.clone())
    kernels(dtype, SMALL).store_kv(mine, cosine, sine, cache, step.context)
    twin = ReferenceKernels(torch.device(DEVICE), torch.float32, keys_by_position=True)
    twin.store_kv(theirs, cosine.float(), sine.float(), other, step.context)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(mine.float(), theirs, rtol=tolerance, atol=tolerance)
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(cache.data.float(), other.data, **close)


def test_offsets_pass_two_to_the_thirty_one() -> None:
    """A block beyond 2^31 elements is stored and read where it is."""
    step = random_step((2, 1, 16), [(3, 1), (0, 2)], 4).to(torch.float16, DEVICE)
    far = 2**31 + 64
    data = torch.empty(far + step.cache.data.numel(), dtype=torch.float16, device=DEVICE)
    data[far:] = step.cache.data
    offsets = step.context.block_offsets + far
    moved = Step(
        step.qkv,
        LayerCache(data, step.cache.base, 4, 1, 16),
        replace(step.context, block_offsets=offsets),
    )
    ones = torch.ones(8, 8, dtype=torch.float16, device=DEVICE)
    for each in (step, moved):
        each.qkv.copy_(step.qkv)
        kernels(torch.float16, SMALL).store_kv(each.qkv, ones, 0 * ones, each.cache, each.context)
    assert torch.equal(attended(moved, SMALL), attended(step, SMALL))
    assert torch.equal(data[far:].nan_to_num(7), step.cache.data.nan_to_num(7))


@pytest.mark.parametrize("width", [16, 100, 544])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_norm_gate_and_logits_equal_their_twins(width: int, dtype: torch.dtype) -> None:
    """Norms, SwiGLU and selected columns, for widths that are powers of two and others."""
    draw = torch.Generator().manual_seed(width)
    ours, twin = kernels(dtype, SMALL), ReferenceKernels(torch.device(DEVICE), torch.float32)
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw).to(DEVICE, dtype)

    x, weight = random(3, width), random(width)
    out, wanted = torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)
    ours.rms_norm(x, weight, 1e-5, out)
    twin.rms_norm(x.float(), weight.float(), 1e-5, wanted)
    torch.testing.assert_close(out.float(), wanted, **close)

    parts = [random(width, width) / width**0.5 for _ in range(2)]
    ours.multiply_gated(x, ours.pack(parts, gated=True), out)
    twin.multiply_gated(x.float(), twin.pack([p.float() for p in parts], gated=True), wanted)
    torch.testing.assert_close(out.float(), wanted, **close)

    rows, numbers = torch.tensor([2, 0], device=DEVICE), torch.tensor([5, 1, 11], device=DEVICE)
    logits = torch.empty(2, 3, dtype=dtype, device=DEVICE)
    ours.selected_logits(x, rows, ours.pack(parts[:1]), numbers, logits)
    wanted = torch.empty(2, 3, device=DEVICE)
    twin.selected_logits(x.float(), rows, twin.pack([parts[0].float()]), numbers, wanted)
    torch.testing.assert_close(logits.float(), wanted, **close)
