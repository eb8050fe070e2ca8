"""The executor computes the rows a plan asks for, and survives a plan that fails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.models.plain_driver import Driver
from workbench.core import WantedLogits
from workbench.engine.executor import sample
from workbench.errors import StepError
from workbench.models.llama import LlamaModel
from workbench.models.loading import load_model

VOCAB = 50


@pytest.fixture
def model(small_model: str) -> LlamaModel:
    return load_model(small_model)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_sampled_tokens_are_those_of_the_wanted_logits(model: LlamaModel) -> None:
    """Greedy and warm tokens are what the sampler makes of the same rows' logits."""
    for temperature in (0.0, 1.0):
        driver = Driver(model)
        work = [("a", prompt(1, 9), True), ("b", prompt(2, 30), False), ("c", prompt(3, 4), True)]
        wanted = (WantedLogits(np.array([8, 42]), np.arange(VOCAB)),)
        plan = driver.plan(work, wanted, temperature)
        result = driver.executor.submit(plan).result()
        assert plan.sampling.rows.tolist() == [8, 42]
        logits = torch.from_numpy(result.wanted[0])
        assert result.tokens.tolist() == sample(model.kernels, logits, plan.sampling)[0].tolist()
        assert result.forward_s > 0
        assert result.sampling_s > 0


def test_wanted_columns_are_columns_of_all_logits(model: LlamaModel) -> None:
    """Several scoring requests with other rows and columns, and nothing sampled."""
    tokens = prompt(4, 40)
    everything = WantedLogits(np.arange(40), np.arange(VOCAB))
    some = WantedLogits(np.array([3, 39]), np.array([7, 2]))
    result = Driver(model).step([("a", tokens, False)], (everything, some))
    assert result.tokens.shape == (0,)
    assert result.wanted[1].shape == (2, 2)
    np.testing.assert_allclose(result.wanted[1], result.wanted[0][[3, 39]][:, [7, 2]], rtol=1e-4)


def test_the_last_layer_computes_what_is_needed(model: LlamaModel) -> None:
    """A step of which few rows or none are wanted has the bits of one of which all are."""
    work = [("a", prompt(1, 9), False), ("b", prompt(2, 30), False), ("c", prompt(3, 4), False)]
    rows = np.array([3, 8, 42])
    few, every = Driver(model), Driver(model, max_num_seqs=4)  # more than it has room for: all
    for chunk in (work, [(name, tokens[:3], False) for name, tokens, _ in work]):
        everything = WantedLogits(np.arange(sum(len(each[1]) for each in chunk)), np.arange(VOCAB))
        whole = every.step(chunk, (everything,)).wanted[0]
        found = few.step(chunk, (replace(everything, rows=rows),) if chunk is work else ())
        if chunk is work:
            np.testing.assert_array_equal(found.wanted[0], whole[rows])
    last = (WantedLogits(np.array([1]), np.arange(VOCAB)),)
    one, other = (each.step([("b", [7, 9], False)], last) for each in (few, every))
    np.testing.assert_array_equal(one.wanted[0], other.wanted[0])


def test_a_failing_step_raises_from_its_handle_and_the_next_one_works(model: LlamaModel) -> None:
    """A token outside the vocabulary, or a step that is too large, breaks its own step only."""
    driver, other = Driver(model), Driver(model)
    with pytest.raises(StepError, match=r"9 tokens.*room for 8"):
        Driver(model, max_num_batched_tokens=8).step([("a", prompt(1, 9), True)])
    handle = driver.executor.submit(driver.plan([("bad", [0, VOCAB + 5], True)]))
    with pytest.raises(StepError, match="forward pass failed"):
        handle.result()
    tokens = prompt(5, 12)
    assert driver.step([("a", tokens, True)]).tokens == other.step([("a", tokens, True)]).tokens


def test_plans_whose_arrays_are_views_or_read_only(model: LlamaModel) -> None:
    """A scheduler may hand out slices of its own tables."""
    driver, other = Driver(model), Driver(model)
    plan = driver.plan([("a", prompt(1, 40), True)])
    wide = np.zeros((3, 9), np.int64)
    wide[:1, :3] = plan.block_offsets
    positions = plan.positions.copy()
    positions.flags.writeable = False
    plan = replace(plan, block_offsets=wide[:1, :3], positions=positions)
    result = driver.executor.submit(plan).result()
    assert result.tokens == other.step([("a", prompt(1, 40), True)]).tokens


def test_bfloat16_runs_on_the_reference_kernels(small_model: str) -> None:
    """Once it is said that a row may depend on its batch."""
    driver = Driver(load_model(small_model, dtype="bfloat16", batch_invariant=False))
    assert 0 <= driver.step([("a", [1, 2, 3], True)]).tokens[0] < VOCAB
