"""CPU kernels compute what the plain torch reference computes, each row by itself."""

from __future__ import annotations

from typing import Any

import numba.core.caching
import numpy as np
import pytest
import torch
from numba import types

from workbench.kernels import ForwardContext, LayerCache, load_kernels
from workbench.kernels.cpu.thread_pool import compiled
from workbench.kernels.reference import ReferenceKernels

cpu = load_kernels(torch.device("cpu"), torch.float32, threads=2)
reference = ReferenceKernels(torch.device("cpu"), torch.float32)
HEADS = {
    "mha": (4, 4, 16),
    "solver": (8, 1, 16),
    "prm": (5, 1, 64),
    "odd_group": (6, 2, 24),
    "smollm2": (9, 3, 64),
    "wide": (4, 4, 128),
}
# (tokens already cached, new tokens) of each sequence of the batch
BATCHES = {
    "decode": [(5, 1), (31, 1), (32, 1), (100, 1)],
    "prefill": [(0, 40), (0, 1), (0, 65)],
    "mixed": [(0, 33), (64, 1), (17, 20)],
}


def random_batch(
    shape: tuple[int, int, int], batch: list[tuple[int, int]], block_size: int
) -> tuple[torch.Tensor, LayerCache, ForwardContext]:
    """A fused qkv, a cache of random contents in scattered blocks, and their context."""
    heads, kv_heads, head_dim = shape
    draw = np.random.default_rng(0)
    new, ends = [n for _, n in batch], [sum(pair) for pair in batch]
    blocks = [-(-end // block_size) for end in ends]
    elements = 2 * block_size * kv_heads * head_dim
    names = iter(draw.permutation(sum(blocks)))
    offsets = np.zeros((len(batch), max(blocks)), np.int64)
    for s, count in enumerate(blocks):
        offsets[s, :count] = [next(names) * elements for _ in range(count)]
    context = ForwardContext(
        positions=np.concatenate([np.arange(cached, cached + n) for cached, n in batch]),
        sequence=np.repeat(np.arange(len(batch)), new),
        query_start=np.cumsum([0, *new]).astype(np.int32),
        context_len=np.array(ends, np.int32),
        block_offsets=offsets,
    )
    base = 7
    data = torch.from_numpy(draw.standard_normal(base + sum(blocks) * elements, np.float32))
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.from_numpy(draw.standard_normal((sum(new), width), np.float32))
    return qkv, LayerCache(data, base, block_size, kv_heads, head_dim), context


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", HEADS)
def test_attend_equals_reference(shape: str, batch: str, block_size: int) -> None:
    """Attention over scattered blocks agrees with softmax over gathered keys."""
    qkv, cache, context = random_batch(HEADS[shape], BATCHES[batch], block_size)
    ours = torch.full((len(qkv), HEADS[shape][0] * HEADS[shape][2]), torch.nan)
    theirs = torch.empty_like(ours)
    cpu.attend(qkv, ours, cache, context)
    reference.attend(qkv, theirs, cache, context)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("shape", HEADS)
def test_store_kv_equals_reference(shape: str, block_size: int) -> None:
    """Rotation and the place of every key and value agree; nothing else in the cache changes."""
    qkv, cache, context = random_batch(HEADS[shape], BATCHES["mixed"], block_size)
    half = HEADS[shape][2] // 2
    angles = torch.rand(128, half, generator=torch.Generator().manual_seed(1)) * 6
    other = LayerCache(cache.data.clone(), cache.base, block_size, cache.kv_heads, cache.head_dim)
    rotated = qkv.clone()
    cpu.store_kv(qkv, angles.cos(), angles.sin(), cache, context)
    reference.store_kv(rotated, angles.cos(), angles.sin(), other, context)
    torch.testing.assert_close(qkv, rotated, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cache.data, other.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [16, 33, 100, 544])
def test_norms_equal_reference(width: int) -> None:
    """Norms agree for widths that 16 divides and for others."""
    generator = torch.Generator().manual_seed(width)
    x, weight = torch.randn(5, width, generator=generator), torch.rand(width, generator=generator)
    out, expected = torch.empty(5, width), torch.empty(5, width)
    cpu.rms_norm(x, weight, 1e-5, out)
    reference.rms_norm(x, weight, 1e-5, expected)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", HEADS)
def test_attention_of_a_row_is_its_own(shape: str) -> None:
    """A row's bits are the same in one prefill, in chunks, alone, and for every block size."""
    seen = []
    heads, kv_heads, head_dim = HEADS[shape]
    draw = np.random.default_rng(2)
    keys = draw.standard_normal((2, 97, kv_heads * head_dim), np.float32)
    rows = torch.from_numpy(
        draw.standard_normal((97, (heads + 2 * kv_heads) * head_dim), np.float32)
    )
    for block_size in (1, 8, 16, 32):
        for chunk in (97, 40, 7, 1):
            out = torch.empty(97, heads * head_dim)
            for first in range(0, 97, chunk):
                new = min(chunk, 97 - first)
                _, cache, context = random_batch(HEADS[shape], [(first, new), (3, 2)], block_size)
                fill(cache, context, keys[:, : first + new])
                part = torch.cat([rows[first : first + new], rows[:2]])
                answer = torch.empty(new + 2, heads * head_dim)
                cpu.attend(part, answer, cache, context)
                out[first : first + new] = answer[:new]
            seen.append(out)
    assert all(torch.equal(seen[0], other) for other in seen[1:])


@pytest.mark.parametrize("vocab", [1, 7, 256, 300, 49_152])
def test_draw_takes_the_reference_s_tokens(vocab: int) -> None:
    """Logits as models give them, some of no weight at all, at cool and hot temperatures."""
    draw = np.random.default_rng(vocab)
    rows = 4_000_000 // (vocab + 10_000)
    logits = torch.from_numpy(draw.standard_normal((rows, vocab), np.float32) * 4)
    logits[:, vocab // 2] = -1e30
    temperature = torch.from_numpy(draw.choice([0.05, 0.8, 1.0, 3.0], rows))
    noise = torch.from_numpy(draw.random(rows))
    expected = reference.choose(logits, temperature, noise)[0]
    assert torch.equal(cpu.choose(logits, temperature, noise)[0], expected)
    assert vocab == 1 or len(set(expected.tolist())) > 1


def test_draw_at_the_ends_of_the_noise() -> None:
    """Noise 0 takes the first token of any weight, the largest noise the last, never none."""
    logits = torch.full((2, 700), -1e30)
    logits[:, 3:690] = torch.linspace(-1, 1, 687)
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    warm = torch.ones(2, dtype=torch.float64)
    assert cpu.choose(logits, warm, ends)[0].tolist() == [3, 689]


def test_draw_near_temperature_zero_is_greedy() -> None:
    """Temperatures whose reciprocal overflows: the largest logit, not whatever NaN makes of it."""
    logits = torch.randn(4, 600, generator=torch.Generator().manual_seed(1))
    cold = torch.tensor([5e-324, 1e-310, 1e-300, 1e-30], dtype=torch.float64)
    noise = torch.full((4,), 0.7, dtype=torch.float64)
    assert torch.equal(cpu.choose(logits, cold, noise)[0], logits.argmax(1))


def test_add_row_adds_to_every_row() -> None:
    """As torch does, for widths that no register divides."""
    out, row = torch.randn(19, 37), torch.randn(37)
    expected = out + row
    cpu.add_row(row, out)
    assert torch.equal(out, expected)


def fill(cache: LayerCache, context: ForwardContext, keys: np.ndarray) -> None:
    """Writes keys and values [2, positions, width] to the first sequence's blocks."""
    size, shape = cache.block_size, (cache.kv_heads, cache.head_dim)
    for p in range(keys.shape[1]):
        block, slot = divmod(p, size)
        at = cache.base + int(context.block_offsets[0, block])
        half = size * keys.shape[2]
        stored = cache.data[at : at + 2 * half]
        stored[:half].view(*shape, size)[:, :, slot] = torch.from_numpy(keys[0, p]).view(shape)
        stored[half:].view(shape[0], size, shape[1])[:, slot] = torch.from_numpy(keys[1, p]).view(
            shape
        )


def test_a_masked_key_of_the_same_tile_adds_nothing() -> None:
    """Huge keys and values after a row's own position leave its bits alone."""
    qkv, cache, context = random_batch((8, 1, 16), [(0, 20)], 16)
    before, after = torch.empty(20, 128), torch.empty(20, 128)
    cpu.attend(qkv, before, cache, context)
    tail = int(cache.base + context.block_offsets[0, 1])
    cache.data[tail : tail + 2 * 16 * 16] = 1e20
    cpu.attend(qkv, after, cache, context)
    assert torch.equal(before[:16], after[:16])
    assert not torch.equal(before[16:], after[16:])


def test_kernels_are_chosen_by_device_and_dtype() -> None:
    """float32 on a CPU is compiled and invariant; other dtypes take the reference."""
    assert load_kernels(torch.device("cpu"), torch.float32).batch_invariant
    assert load_kernels(torch.device("cpu"), torch.bfloat16).name == "reference"


def test_kernels_compile_where_no_cache_folder_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read-only installation and home: compiled in memory, with the same results."""
    locators = numba.core.caching.CacheImpl._locator_classes
    for locator in locators:
        monkeypatch.setattr(locator, "from_function", lambda *_: None)

    def double(x: Any) -> None:
        for i in range(len(x)):
            x[i] *= np.float32(2)

    values = np.ones(3, np.float32)
    with pytest.warns(RuntimeWarning, match="set NUMBA_CACHE_DIR"):
        compiled(types.float32[::1])(double)(values)
    assert values.tolist() == [2, 2, 2]


def test_selected_logits_are_columns_of_the_product() -> None:
    """The same of the CPU's kernels and the twin: some rows, some outputs."""
    draw = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 32, generator=draw) for n in (5, 40))
    rows, numbers = torch.tensor([4, 0]), torch.tensor([39, 7, 8])
    for kernels in (cpu, ReferenceKernels(torch.device("cpu"), torch.float32)):
        out = torch.empty(2, 3)
        kernels.selected_logits(hidden, rows, kernels.pack([weight]), numbers, out)
        torch.testing.assert_close(out, hidden[rows] @ weight[numbers].t())
