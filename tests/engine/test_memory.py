"""Budgets become blocks by the published formula; too small ones are refused with numbers."""

import gc
import tracemalloc
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from workbench.config import EngineConfig
from workbench.core import SamplingParams, StepPlan, StepResult
from workbench.engine import memory
from workbench.engine.engine import Engine
from workbench.engine.memory import MemoryProfile, plan_memory, total_bytes
from workbench.errors import ConfigError, OutOfMemory, StepError
from workbench.host import collection_paused
from workbench.models.llama import Buffers, LlamaModel
from workbench.models.loading import load_model

LIMITS: dict[str, Any] = {"max_num_batched_tokens": 256, "max_num_seqs": 16}
GPU = torch.device("cuda")
GIB = 1 << 30
BLOCK = 16 * 2 * 2 * 2 * 8 * 4  # tokens, K and V, layers, KV heads, dimensions, bytes


def plan(model: LlamaModel, max_model_len: int = 64, **settings: Any) -> MemoryProfile:
    config = EngineConfig(**{**LIMITS, **settings})
    return plan_memory(model, config, max_model_len, config.num_blocks)


def test_the_parts_add_up(model: LlamaModel) -> None:
    profile = plan(model, memory="8MiB")
    assert profile.total == 8 * 2**20
    assert profile.total == profile.weights + profile.activations + profile.other + profile.kv
    assert profile.block_bytes == BLOCK
    assert profile.num_blocks == profile.kv // BLOCK
    table = profile.table.set_index("part")
    assert table.loc["total", "bytes"] == 8 * 2**20
    assert table.drop("total").share.sum() == pytest.approx(1)


def test_activations_cover_buffers_and_grow_with_the_step(model: LlamaModel) -> None:
    """At least what the executor holds, little more, and the same each time it is measured."""
    few = {"max_num_batched_tokens": 4096, "max_num_seqs": 2}  # more tokens than positions
    assert plan(model, 128, num_blocks=8, **few).activations > 0
    small = plan(model, num_blocks=8).activations
    large = plan(model, num_blocks=8, max_num_batched_tokens=1024).activations
    held = model.buffers(1024, 16).nbytes
    assert held < large < held + 2**20
    assert small < large == plan(model, num_blocks=8, max_num_batched_tokens=1024).activations


def test_a_user_s_own_trace_of_allocations_goes_on(model: LlamaModel) -> None:
    """And what it has seen so far is not taken for the step's."""
    alone = plan(model, num_blocks=8).activations
    tracemalloc.start()
    try:
        held = bytearray(32 << 20)
        assert plan(model, num_blocks=8).activations < alone + (1 << 20)
        assert tracemalloc.is_tracing() and len(held) == 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_afterwards_as_before(model: LlamaModel, collects: bool) -> None:
    """The pause ends with the measurement, also when it fails, and is not one's who had it off."""
    before = gc.isenabled()
    try:
        gc.enable() if collects else gc.disable()
        plan(model, num_blocks=8)
        assert gc.isenabled() == collects
        with pytest.raises(ConfigError):
            collection_paused()(total_bytes)("much", GPU)
        assert gc.isenabled() == collects
        assert not collection_paused()(gc.isenabled)()
    finally:
        gc.enable() if before else gc.disable()


def test_blocks_or_cache_bytes_may_be_given_and_activations_left_out(model: LlamaModel) -> None:
    profile = plan(model, memory="8MiB", activations_in_total=False)
    assert profile.kv == 8 * 2**20 - profile.weights
    assert profile.activations > 0
    assert plan(model, num_blocks=5).num_blocks == 5
    assert plan(model, kv_memory=10 * BLOCK + 1).num_blocks == 10
    assert plan(model).num_blocks == 16 * 64 // 16


def test_a_budget_too_small_names_what_fits_and_what_is_missing(model: LlamaModel) -> None:
    """The advice is true: with that much more it fits, and so does the length it names."""
    with pytest.raises(OutOfMemory, match=r"needs 4\. 4,095 bytes.*max_model_len=48 at most"):
        plan(model, kv_memory=3 * BLOCK + BLOCK - 4095)
    assert plan(model, kv_memory=4 * BLOCK).num_blocks == 4
    assert plan(model, 48, kv_memory=3 * BLOCK).num_blocks == 3
    with pytest.raises(OutOfMemory, match="no request fits"):
        plan(model, memory="50KiB")
    with pytest.raises(OutOfMemory, match=r"8\.0 TiB is asked for; this machine has"):
        plan(model, kv_memory="8TiB")


def test_what_the_profiling_pass_held_is_given_back_at_once(model: LlamaModel) -> None:
    """No cycle keeps its buffers until garbage is collected, beside those of the engine."""
    gc.collect()
    gc.disable()
    try:
        before = [found for found in gc.get_objects() if type(found) is Buffers]  # other engines'
        plan(model, num_blocks=8)
        after = [found for found in gc.get_objects() if type(found) is Buffers]
        assert {id(found) for found in after} <= {id(found) for found in before}
    finally:
        gc.enable()


# -- a GPU's --


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, of which torch holds 5, 2 of them idle, and others 3."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (72 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 3 * GIB)


def test_a_step_s_peak_is_torch_s_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above what was held before, rounded up."""
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: GIB + (3 << 16) - 7)
    with memory.peak_on(GPU) as peak:
        pass
    assert peak.bytes == 3 << 16


def test_recorded_steps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch keeps for them once, what the driver keeps for every layer of the whole model."""
    torch_s, driver_s = [2 * GIB], [GIB]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: torch_s[0])
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda _: (80 * GIB - torch_s[0] - driver_s[0], 80 * GIB)
    )

    class Recording:
        """Of the first two of 32 layers."""

        model = load_model("dummy:tiny-solver").first_layers(2)

        def record_steps(self) -> None:
            torch_s[0] += 300
            driver_s[0] += 20

    executor = Recording()
    assert memory.measure_graphs(executor, 32) == 0, "on a CPU nothing is counted"
    executor.model.device = GPU
    assert memory.measure_graphs(executor, 32) == 300 + 20 * 32 // 2


def test_a_gpu_s_parts_add_up(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`memory` is the GPU's, and pays for what lies beside torch's; the message has the numbers."""
    model = load_model("dummy:tiny-solver")
    monkeypatch.setattr("workbench.engine.memory.measure_activations", lambda *_: 1 << 20)
    model.device = GPU
    profile = plan(model, 32, memory="4GiB")
    assert profile.other == 3 * GIB
    assert total_bytes(0.5, GPU) == 40 * GIB
    assert profile.total == profile.weights + profile.activations + profile.other + profile.kv
    with pytest.raises(OutOfMemory, match=r"cuda has 80\.0 GiB, of which 74\.0 GiB are free"):
        plan(model, 32, kv_memory="75GiB")
    with pytest.raises(OutOfMemory, match=r"activations 1\.0 MiB, other 3\.0 GiB"):
        plan(model, 32, memory="3GiB")


def test_weights_larger_than_the_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any is drawn or read."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GIB, 24 * GIB))
    monkeypatch.setattr("workbench.models.loading.load_kernels", lambda *_, **__: None)
    with pytest.raises(OutOfMemory, match=r"bfloat16 on cuda.*10\.0 GiB of memory are available"):
        load_model("dummy:llama-3.1-8b-prm", device="cuda")


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many are is said; of other names, what is allowed."""
    for name, count, found in (("cuda", 0, "no CUDA device"), ("cuda:1", 1, "1 CUDA device")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=count: n)
        with pytest.raises(ConfigError, match=f"device='{name}'.*finds {found} here"):
            load_model("dummy:tiny-solver", device=name)
    for name in ("GPU", "cuda:", "cuda:x", "mps"):
        with pytest.raises(ConfigError, match=r"EngineConfig\.device is .*'cuda:1'"):
            EngineConfig(device=name)


def full(*_: object, **__: object) -> None:
    """What torch does when a GPU is full."""
    raise torch.OutOfMemoryError("CUDA out of memory.")


def failed(*_: object, **__: object) -> None:
    """The same within a step."""
    try:
        full()
    except torch.OutOfMemoryError as error:
        raise StepError("The forward pass failed") from error


@pytest.mark.parametrize(
    ("where", "fails", "parts"),
    [
        ("memory.measure_activations", full, "weights .* MiB, free 1.0 GiB"),
        ("memory.measure_activations", failed, "weights .* MiB, free 1.0 GiB"),
        ("engine.Executor", full, "weights .* MiB, activations .* KiB, KV .* KiB, free 1.0 GiB"),
    ],
)
def test_a_device_that_runs_out_is_told_with_numbers(where, fails, parts, monkeypatch) -> None:
    """While activations are measured, or buffers taken: what is known by then, and what to do."""
    monkeypatch.setattr("workbench.engine.memory.measure_activations", lambda *_: 1 << 19)
    monkeypatch.setattr("workbench.engine.memory.free_memory", lambda _: 1 << 30)
    monkeypatch.setattr(f"workbench.engine.{where}", fails)
    with pytest.raises(OutOfMemory, match=rf"\({parts}\)\. Give a smaller max_num_batched_tokens"):
        Engine("tiny-solver", num_blocks=32, max_model_len=64)


def test_activations_are_those_of_the_longest_contexts_too() -> None:
    """Kernels that gather a context, as the reference ones, take room for the longest."""
    model = load_model("tiny-solver", dtype="bfloat16", batch_invariant=False)
    short, long = (memory.measure_activations(model, 8, 2, length) for length in (64, 2048))
    spec = model.spec
    gathered = 2 * 2048 * spec.heads * spec.head_dim * model.dtype.itemsize
    assert long - short > 0.9 * gathered


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16", "batch_invariant": False}])
def test_activations_cover_one_prompt_that_fills_the_step(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], scored: bool
) -> None:
    """Of which all positions may be scored; kernels may hold all its scores at once."""
    sizes = {"max_num_batched_tokens": 1024, "max_num_seqs": 16, "max_model_len": 1100}
    engine = Engine("tiny-prm" if scored else "tiny-solver", num_blocks=80, **sizes, **settings)
    if scored:
        engine.add_score([k % 300 for k in range(1024)], range(1024), [0])
    else:
        engine.add([k % 300 for k in range(1024)], SamplingParams(max_tokens=1))
    run, peaks = engine.executor.submit, list[int]()

    def measured(step: StepPlan) -> Future[StepResult]:
        with memory.peak_on(torch.device("cpu")) as peak:
            result = run(step)
        peaks.append(engine.executor.buffers.nbytes + peak.bytes)
        return result

    monkeypatch.setattr(engine.executor, "submit", measured)
    engine.step()
    assert peaks[0] <= engine.memory.activations


def test_activations_need_room_beside_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's: they are taken after it; a cache that is there already needs none."""
    monkeypatch.setattr("workbench.engine.memory.measure_activations", lambda *_: 3 << 20)
    monkeypatch.setattr("workbench.engine.memory.free_memory", lambda _: 4 << 20)
    model, config = load_model("tiny-solver"), EngineConfig(kv_memory="2MiB")
    told = r"a KV cache of 2\.0 MiB beside activations of 3\.0 MiB is asked for; .* 4\.0 MiB are"
    with pytest.raises(OutOfMemory, match=told):
        plan_memory(model, config, 64)
    assert plan_memory(model, replace(config, kv_memory="1MiB"), 64).kv == 1 << 20
    assert plan_memory(model, config, 64, kv_held=True).kv == 2 << 20
