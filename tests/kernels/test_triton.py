"""Triton kernels compute what their plain torch twins compute; on a CPU under the interpreter."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")

from tests.kernels.synthetic import KINDS, TOLERANCES, Step, check_same, context_of, random_step
from workbench.kernels import Kernels, LayerCache
from workbench.kernels.triton import INTERPRETED, TritonKernels
from workbench.kernels.triton.attention import Tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Small tiles: few positions then have many edges.
SMALL = Tiles(queries=16, tile=16, span=32, warps=(4, 4), stages=(2, 2))
WIDER = Tiles(queries=32, tile=32, span=64)
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
    twin = Kernels(torch.device(DEVICE), torch.float32, keys_by_position=True)
    twin.attend(wide.qkv, out, wide.cache, wide.context)
    return out


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_its_twin(name: str, dtype: torch.dtype) -> None:
    """Prefill, decode and both in one step, over scattered blocks with NaN all around."""
    shape, sequences, block_size, tiles = CASES[name]
    step, tolerance = random_step(shape, sequences, block_size).to(dtype, DEVICE), TOLERANCES[dtype]
    found, close = attended(step, tiles).float(), {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(found, expected(step), **close)


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
        alone = context_of(sequences[s : s + 1], batch.context.block_offsets[s : s + 1])
        row = Step(batch.qkv[s : s + 1], batch.cache, alone)
        assert torch.equal(attended(row, SMALL)[0], out[s])


def test_a_prefill_is_the_bits_of_decoding() -> None:
    """Tiles of rows are summed span by span: a position prefilled is the position decoded."""
    whole = random_step((4, 2, 16), [(0, 41)], 16).to(torch.float32, DEVICE)
    out = attended(whole, SMALL)
    for p in (0, 15, 31, 32, 40):
        assert torch.equal(attended(whole.chunk(p, p + 1), SMALL)[0], out[p])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_prefill_is_the_bits_of_decoding_on_the_device(head_dim: int, dtype: torch.dtype) -> None:
    """By tensor cores, with the tiles as they are used where bits must not depend on the batch."""
    whole = random_step((32, 8, head_dim), [(0, 700)], 16).to(dtype, DEVICE)
    ours = TritonKernels(torch.device(DEVICE), dtype, batch_invariant=True)
    for first, last in ((0, 700), *((p, p + n) for p in (0, 63, 255, 500) for n in (1, 3, 40))):
        step = whole.chunk(first, last)
        out = step.room()
        ours.attend(step.qkv, out, step.cache, step.context)
        if last - first == 700:
            wanted = out
        assert torch.equal(out, wanted[first:last])


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
    angles = ones, 0 * ones
    for each in (step, moved):
        each.qkv.copy_(step.qkv)
        kernels(torch.float16, SMALL).store_kv(each.qkv, angles, each.cache, each.context)
    assert torch.equal(attended(moved, SMALL), attended(step, SMALL))
    assert torch.equal(data[far:].nan_to_num(7), step.cache.data.nan_to_num(7))
