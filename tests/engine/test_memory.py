"""Budgets become blocks by the published formula, and too small ones are refused with numbers."""

from __future__ import annotations

import gc
import json
import tracemalloc

import numpy as np
import pytest

from workbench.core import SamplingRows
from workbench.engine.memory import (
    StepLimits,
    plan_memory,
    total_bytes,
)
from workbench.engine.sampling import sample
from workbench.errors import ConfigError, OutOfMemory
from workbench.host import collection_paused, total_memory
from workbench.models.llama import Buffers, LlamaModel
from workbench.models.loading import load_model

LIMITS = StepLimits(max_num_batched_tokens=256, max_num_seqs=16, max_model_len=64)
BLOCK = 16 * 2 * 2 * 2 * 8 * 4  # tokens, K and V, layers, KV heads, dimensions, bytes
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 50,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return load_model(f"dummy:{folder}")


def test_the_parts_add_up(model: LlamaModel) -> None:
    profile = plan_memory(model, LIMITS, 16, memory="8MiB")
    assert profile.total == 8 * 2**20
    assert profile.total == profile.weights + profile.activations + profile.other + profile.kv
    assert profile.block_bytes == BLOCK
    assert profile.num_blocks == profile.kv // BLOCK
    assert 0 <= profile.unused < BLOCK
    table = profile.table.set_index("part")
    assert table.loc["total", "bytes"] == 8 * 2**20
    assert table.drop("total").share.sum() == pytest.approx(1)


def test_a_step_may_have_more_tokens_than_sequences_can_hold(model: LlamaModel) -> None:
    """Guards the profiling step against positions that the model does not have."""
    few = StepLimits(max_num_batched_tokens=4096, max_num_seqs=2, max_model_len=128)
    assert plan_memory(model, few, 16, num_blocks=8).activations > 0


def test_a_cache_larger_than_the_machine_is_refused_at_once(model: LlamaModel) -> None:
    """Before a block is counted; with the numbers."""
    with pytest.raises(OutOfMemory, match=r"8\.0 TiB is asked for; this machine has"):
        plan_memory(model, LIMITS, 16, kv_memory="8TiB")


def test_activations_cover_buffers_and_grow_with_the_step(model: LlamaModel) -> None:
    """At least what the executor holds, little more, and the same each time it is measured."""
    small = plan_memory(model, LIMITS, 16, num_blocks=8).activations
    wide = StepLimits(1024, 16, 64)
    large = plan_memory(model, wide, 16, num_blocks=8).activations
    held = model.buffers(1024, 16).nbytes
    assert held < large < held + 2**20
    assert small < large == plan_memory(model, wide, 16, num_blocks=8).activations


@pytest.mark.parametrize("count", [1, 8])
def test_one_filtered_row_takes_the_room_of_many(count: int) -> None:
    """Rows are filtered in turn: the profiling pass relies on it, and so filters one.

    Rows without filters are drawn by the kernels, which take next to nothing.
    """
    logits = np.random.default_rng(0).standard_normal((count, 4096), np.float32)

    def peak(filtered: int) -> int:
        top_p = np.ones(count)
        top_p[:filtered] = 0.9
        none, places = np.zeros(count, np.int64), np.arange(count)
        seeds, warm, zeros = np.zeros(count, np.uint64), np.ones(count), np.zeros(count)
        rows = SamplingRows(places, places, seeds, warm, none, top_p, zeros, none - 1)
        tracemalloc.start()
        sample(logits, rows, lambda logits, *_: np.zeros(len(logits), np.int64))
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    peak(count)  # what a first call leaves behind is not a row's
    assert peak(1) == pytest.approx(peak(count), rel=0.01)


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_afterwards_as_before(model: LlamaModel, collects: bool) -> None:
    """The pause ends with the measurement, also when it fails, and is not one's who had it off."""
    before = gc.isenabled()
    try:
        gc.enable() if collects else gc.disable()
        plan_memory(model, LIMITS, 16, num_blocks=8)
        assert gc.isenabled() == collects
        with pytest.raises(ConfigError):
            collection_paused()(total_bytes)(1.5)
        assert gc.isenabled() == collects
        assert not collection_paused()(gc.isenabled)()
    finally:
        gc.enable() if before else gc.disable()


def test_activations_can_be_left_out(model: LlamaModel) -> None:
    profile = plan_memory(model, LIMITS, 16, memory="8MiB", activations_in_total=False)
    assert profile.kv == 8 * 2**20 - profile.weights
    assert profile.activations > 0


def test_blocks_or_cache_bytes_may_be_given_instead(model: LlamaModel) -> None:
    assert plan_memory(model, LIMITS, 16, num_blocks=5).num_blocks == 5
    assert plan_memory(model, LIMITS, 16, kv_memory=10 * BLOCK + 1).num_blocks == 10
    assert plan_memory(model, LIMITS, 16).num_blocks == 16 * 64 // 16


def test_a_budget_too_small_names_what_fits_and_what_is_missing(model: LlamaModel) -> None:
    """The advice is true: with that much more it fits, and so does the length it names."""
    with pytest.raises(OutOfMemory, match=r"needs 4\. 4,095 bytes.*max_model_len=48 at most"):
        plan_memory(model, LIMITS, 16, kv_memory=3 * BLOCK + BLOCK - 4095)
    assert plan_memory(model, LIMITS, 16, kv_memory=4 * BLOCK).num_blocks == 4
    assert plan_memory(model, StepLimits(256, 16, 48), 16, kv_memory=3 * BLOCK).num_blocks == 3
    with pytest.raises(OutOfMemory, match="no request fits"):
        plan_memory(model, LIMITS, 16, memory="50KiB")


def test_a_share_is_of_the_device() -> None:
    assert total_bytes(0.5) == total_memory() // 2
    with pytest.raises(ConfigError, match=r"share is in \(0, 1\]"):
        total_bytes(1.5)


def test_what_the_profiling_pass_held_is_given_back_at_once(model: LlamaModel) -> None:
    """No cycle keeps its buffers until garbage is collected, beside those of the engine."""
    gc.collect()
    gc.disable()
    try:
        plan_memory(model, LIMITS, 16, num_blocks=8)
        assert not [found for found in gc.get_objects() if type(found) is Buffers]
    finally:
        gc.enable()
