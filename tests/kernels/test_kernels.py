"""Kernels compute what the plain torch reference computes; the CPU's each row by itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.synthetic import KINDS, TOLERANCES, Step, random_step
from workbench.errors import ConfigError
from workbench.kernels import Kernels, load_kernels

cpu = load_kernels(torch.device("cpu"), torch.float32, threads=2)
reference = Kernels(torch.device("cpu"), torch.float32)
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # there interpreted
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


def steps(shape: str, sequences: list[tuple[int, int]], block_size: int) -> Step:
    return random_step(HEADS[shape], sequences, block_size, by_position=False)


def attended(kernels: Kernels, step: Step) -> torch.Tensor:
    out = step.room()
    kernels.attend(step.qkv, out, step.cache, step.context)
    return out


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", HEADS)
def test_attend_equals_reference(shape: str, batch: str, block_size: int) -> None:
    """Attention over scattered blocks agrees with softmax over gathered keys."""
    step = steps(shape, BATCHES[batch], block_size)
    close = {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close(attended(cpu, step), attended(reference, step), **close)


def test_the_reference_attends_with_as_many_rows_as_little_memory_takes(monkeypatch) -> None:
    """However few scores it may hold at a time, it computes the same."""
    step = steps("odd_group", BATCHES["mixed"], 16)
    whole = attended(reference, step)
    for most in (1, 6 * 65 * 7):
        monkeypatch.setattr("workbench.kernels.reference._MOST_SCORES", most)
        torch.testing.assert_close(attended(reference, step), whole, rtol=1e-5, atol=2e-6)


@pytest.fixture(params=["cpu", *KINDS], ids=str)
def ours(request: pytest.FixtureRequest) -> tuple[Kernels, torch.dtype, torch.device]:
    """The CPU's kernels, and the GPU's in each type."""
    if request.param == "cpu":
        return cpu, torch.float32, torch.device("cpu")
    triton = pytest.importorskip("workbench.kernels.triton", exc_type=ConfigError)
    return triton.TritonKernels(GPU, request.param), request.param, GPU


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("shape", HEADS)
def test_store_kv_equals_reference(ours, shape, block_size) -> None:
    """Rotation and the place of every key and value agree; nothing else in the cache changes."""
    kernels, dtype, device = ours
    step = random_step(HEADS[shape], BATCHES["mixed"], block_size, kernels.keys_by_position)
    angles = torch.rand(128, HEADS[shape][2] // 2, generator=torch.Generator().manual_seed(1)) * 6
    given = [each.to(device, dtype) for each in (step.qkv, step.cache.data, angles)]
    twin, found = Kernels(device, torch.float32, kernels.keys_by_position), []
    for each, kind in ((kernels, dtype), (twin, torch.float32)):
        qkv, data, turned = (tensor.to(kind, copy=True) for tensor in given)
        tables = tuple(table.to(dtype).to(kind) for table in (turned.cos(), turned.sin()))
        each.store_kv(qkv, tables, replace(step.cache, data=data), step.context)
        found.append((qkv.float(), data.float()))
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    torch.testing.assert_close(*found, **close, equal_nan=True)


@pytest.mark.parametrize("width", [16, 37, 72, 100, 544])
def test_norms_gates_and_logits_equal_reference(ours, width) -> None:
    """At any width; far from zero a norm takes the mean out, and GELU is flat or straight."""
    kernels, dtype, device = ours
    draw = torch.Generator().manual_seed(width)
    sizes = [(19, width), (width,), (width,), *[(width, width)] * 2]
    given = [torch.randn(*size, generator=draw).to(device, dtype) for size in sizes]
    x, weight, bias, *parts = given
    rows, numbers = torch.tensor([2, 0], device=device), torch.tensor([5, 1, 11], device=device)
    far, found = 3 * x + 20, []
    for each, kind in ((kernels, dtype), (Kernels(device, torch.float32), torch.float32)):
        inputs, matrices = x.to(kind, copy=True), [part.to(kind) / width**0.5 for part in parts]
        normed, centred, gated = (torch.empty_like(inputs) for _ in range(3))
        logits = torch.empty(2, 3, dtype=kind, device=device)
        each.rms_norm(inputs, weight.to(kind), 1e-5, normed)
        each.layer_norm(far.to(kind), torch.stack([weight, bias]).to(kind), 1e-5, centred)
        each.multiply_gated(inputs, each.pack(matrices, gated=True), gated)
        each.selected_logits(inputs, rows, each.pack(matrices[:1]), numbers, logits)
        bent = (x * 30).to(kind)
        each.gelu(bias.to(kind), bent[:9])
        each.gelu(bias.to(kind), inputs)
        results = normed, centred, gated, logits, bent, inputs
        found.append(tuple(result.float() for result in results))
    torch.testing.assert_close(*found, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("shape", HEADS)
def test_attention_of_a_row_is_its_own(shape: str) -> None:
    """A row's bits are the same in one prefill, in chunks, alone, and for every block size."""
    seen = []
    for block_size in (1, 8, 16, 32):
        step = steps(shape, [(0, 97), (3, 2)], block_size)
        for size in (97, 40, 7, 1):
            starts = range(0, 97, size)
            chunks = [step.chunk(first, min(first + size, 97)) for first in starts]
            seen.append(torch.cat([attended(cpu, chunk)[:-2] for chunk in chunks]))
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
    for kernels in (cpu, reference):
        assert kernels.choose(logits, warm, ends)[0].tolist() == [3, 689]


def test_draw_near_temperature_zero_is_greedy() -> None:
    """Temperatures whose reciprocal overflows: the largest logit, not whatever NaN makes of it."""
    logits = torch.randn(4, 600, generator=torch.Generator().manual_seed(1))
    cold = torch.tensor([5e-324, 1e-310, 1e-300, 1e-30], dtype=torch.float64)
    noise = torch.full((4,), 0.7, dtype=torch.float64)
    assert torch.equal(cpu.choose(logits, cold, noise)[0], logits.argmax(1))


def test_a_masked_key_of_the_same_tile_adds_nothing() -> None:
    """Huge keys and values after a row's own position leave its bits alone."""
    step = steps("solver", [(0, 20)], 16)
    before = attended(cpu, step)
    tail = int(step.cache.base + step.context.block_offsets[0, 1])
    step.cache.data[tail : tail + 2 * 16 * 16] = 1e20
    after = attended(cpu, step)
    assert torch.equal(before[:16], after[:16])
    assert not torch.equal(before[16:], after[16:])


@pytest.mark.parametrize("shape", ["solver", "odd_group", "wide"])
@pytest.mark.parametrize("slot", [0, 1, 9])
def test_a_score_that_is_no_number_makes_its_rows_none(shape: str, slot: int) -> None:
    """Also where every value is one, in a prefill and alone: a damaged model is found out."""
    step = steps(shape, [(0, 20)], 16)
    size = 16 * step.cache.head_dim  # of a block's keys of one head
    first = int(step.cache.base + step.context.block_offsets[0, 0])
    keys = step.cache.data[first : first + size]
    keys[slot::16] = torch.nan
    assert keys.isnan().sum() in (step.cache.head_dim, size // 16)
    whole = attended(cpu, step)
    alone = torch.cat([attended(cpu, step.chunk(row, row + 1)) for row in range(20)])
    expected = attended(reference, step).isnan()
    assert expected[slot:].any(1).all() and not expected[:slot].any()
    assert torch.equal(whole.isnan(), expected) and torch.equal(alone.isnan(), expected)


def test_kernels_are_chosen_by_device_and_dtype() -> None:
    """float32 on a CPU is compiled and invariant; other dtypes take the reference."""
    assert load_kernels(torch.device("cpu"), torch.float32).batch_invariant
    with pytest.raises(ConfigError, match="batch_invariant=False"):
        load_kernels(torch.device("cpu"), torch.bfloat16)
    found = load_kernels(torch.device("cpu"), torch.bfloat16, batch_invariant=False)
    assert (found.name, found.batch_invariant) == ("reference", False)
