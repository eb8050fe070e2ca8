"""The executor computes the rows that a plan asks for."""

from dataclasses import replace

import numpy as np

from tests.models.plain_driver import Driver
from workbench.core import WantedLogits
from workbench.models.llama import LlamaModel

VOCAB = 50


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_wanted_columns_are_columns_of_all_logits(model: LlamaModel) -> None:
    """Several scoring requests with other rows and columns, and nothing sampled."""
    tokens = prompt(4, 40)
    everything = WantedLogits(np.arange(40), np.arange(VOCAB))
    some = WantedLogits(np.array([3, 39]), np.array([7, 2]))
    result = Driver(model).step([("a", tokens)], (everything, some))
    assert result.tokens.shape == (0,)
    assert result.wanted[1].shape == (2, 2)
    np.testing.assert_allclose(result.wanted[1], result.wanted[0][[3, 39]][:, [7, 2]], rtol=1e-4)


def test_the_last_layer_computes_what_is_needed(model: LlamaModel) -> None:
    """A step of which few rows or none are wanted has the bits of one of which all are."""
    work = [("a", prompt(1, 9)), ("b", prompt(2, 30)), ("c", prompt(3, 4))]
    rows = np.array([3, 8, 42])
    few, every = Driver(model), Driver(model, max_num_seqs=4)  # more than it has room for: all
    for chunk in (work, [(name, tokens[:3]) for name, tokens in work]):
        everything = WantedLogits(np.arange(sum(len(each[1]) for each in chunk)), np.arange(VOCAB))
        whole = every.step(chunk, (everything,)).wanted[0]
        found = few.step(chunk, (replace(everything, rows=rows),) if chunk is work else ())
        if chunk is work:
            np.testing.assert_array_equal(found.wanted[0], whole[rows])
    last = (WantedLogits(np.array([1]), np.arange(VOCAB)),)
    one, other = (each.step([("b", [7, 9])], last) for each in (few, every))
    np.testing.assert_array_equal(one.wanted[0], other.wanted[0])
