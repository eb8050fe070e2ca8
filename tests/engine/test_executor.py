"""The executor computes the rows a plan asks for, and survives a plan that fails."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from tests.models.plain_driver import Driver
from workbench.core import SamplingRows, WantedLogits
from workbench.engine.executor import chosen_tokens
from workbench.engine.sampling import sample
from workbench.errors import ConfigError, StepError
from workbench.kernels.reference import ReferenceKernels
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
        assert result.tokens.tolist() == sample(result.wanted[0], plan.sampling)[0].tolist()
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


class Sevens(ReferenceKernels):
    """A device that chooses token 7, whatever the logits."""

    def choose(
        self, logits: torch.Tensor, temperature: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        return torch.stack([torch.full((len(logits),), 7), torch.ones(len(logits)).long()])


def sampling_rows(**columns: list[float]) -> SamplingRows:
    """Warm rows without filters, but for the given columns."""
    count = len(next(iter(columns.values())))
    plain = {"seeds": 3, "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "logprobs": -1}
    given = {name: columns.get(name, [value] * count) for name, value in plain.items()}
    kinds = {"seeds": np.uint64, "top_k": np.int64, "logprobs": np.int64}
    arrays = {name: np.array(given[name], kinds.get(name, np.float64)) for name in given}
    return SamplingRows(rows=np.arange(count), positions=np.arange(count) + 5, **arrays)


def test_who_draws_a_row_does_not_depend_on_its_batch() -> None:
    """The device draws rows without filters, whatever the others want; log probabilities fit."""
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((5, VOCAB))).float()
    rows = sampling_rows(top_p=[1, 0.5, 1, 1, 1], top_k=[0, 0, 0, 3, VOCAB],
                         logprobs=[-1, -1, 2, -1, -1])  # fmt: skip
    tokens, logprobs = chosen_tokens(Sevens(torch.device("cpu"), torch.float32), logits, rows)
    host = sample(logits.numpy(), rows)[0]
    assert tokens.tolist() == [7, host[1], 7, host[3], 7]
    assert [each is None for each in logprobs] == [True, True, False, True, True]
    assert logprobs[2] is not None and 7 in logprobs[2]


def test_a_row_is_sampled_alone_as_in_a_batch() -> None:
    """Filters, log probabilities and greedy rows in one batch; all as the sampler has them."""
    kernels = ReferenceKernels(torch.device("cpu"), torch.float32)
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((6, VOCAB))).float()
    rows = sampling_rows(temperature=[0, 0.7, 0, 1.2, 1, 1], min_p=[0, 0, 0.1, 0.1, 0, 0],
                         logprobs=[1, -1, -1, 0, -1, 3])  # fmt: skip
    tokens, logprobs = chosen_tokens(kernels, logits, rows)
    expected = sample(logits.numpy(), rows)
    assert (tokens.tolist(), logprobs) == (expected[0].tolist(), expected[1])
    for at in range(6):
        columns = {field.name: getattr(rows, field.name)[at : at + 1] for field in fields(rows)}
        alone = chosen_tokens(kernels, logits[at : at + 1], SamplingRows(**columns))
        assert alone[0][0] == tokens[at]


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


def test_only_kernels_that_are_batch_invariant_may_claim_it(small_model: str) -> None:
    """bfloat16 runs on the reference kernels, after saying that rows may depend on the batch;
    without invariance products may sum in another order, and nothing else changes.
    """
    model = load_model(small_model, dtype="bfloat16")
    with pytest.raises(ConfigError, match="batch_invariant=False"):
        Driver(model)
    driver = Driver(model, batch_invariant=False)
    assert 0 <= driver.step([("a", [1, 2, 3], True)]).tokens[0] < VOCAB
    everything = (WantedLogits(np.arange(30), np.arange(VOCAB)),)
    drivers = [Driver(load_model(small_model), batch_invariant=mode) for mode in (True, False)]
    one, other = (d.step([("a", prompt(6, 30), False)], everything).wanted[0] for d in drivers)
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
