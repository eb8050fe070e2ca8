"""A row's logits are bit for bit the same alone, in any batch, place, chunking or block size."""

import numpy as np
import pytest

from tests.engine.conftest import CONFIG, dummy
from tests.models.plain_driver import Driver
from workbench.core import WantedLogits
from workbench.kernels.cpu import CpuKernels
from workbench.kernels.cpu.thread_pool import ThreadPool
from workbench.models.llama import LlamaModel
from workbench.models.loading import load_model

VOCAB = 96
NAMES = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads",
         "num_key_value_heads", "head_dim", "intermediate_size")  # fmt: skip
GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": VOCAB, "n_layer": 2, "n_head": 3}
GPT2 |= {"n_embd": 72, "n_inner": 100, "n_positions": 512}
SHAPES = {
    "solver": (VOCAB, 2, 128, 8, 1, 16, 544),
    "prm": (VOCAB, 1, 320, 5, 1, 64, 1280),
    "awkward": (VOCAB, 2, 72, 3, 3, 24, 100),
    "gpt2": (),
}


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    """A layer or two of random weights."""
    shape = dict(zip(NAMES, SHAPES[request.param]))
    config = GPT2 if request.param == "gpt2" else CONFIG | shape | {"max_position_embeddings": 512}
    return load_model(dummy(tmp_path_factory.mktemp(request.param), config))


def wanted(rows: list[int]) -> tuple[WantedLogits, ...]:
    return (WantedLogits(np.array(rows, np.int64), np.arange(VOCAB)),)


def logits_in_chunks(driver: Driver, name: str, tokens: list[int], chunk: int) -> np.ndarray:
    """Logits of every position [len(tokens), vocab] when tokens come `chunk` at a time."""
    parts = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
    steps = [driver.step([(name, p)], wanted(list(range(len(p))))) for p in parts]
    return np.concatenate([step.wanted[0] for step in steps])


def test_logits_do_not_depend_on_chunks_block_size_or_prefix_hits(model: LlamaModel) -> None:
    """For four block sizes, chunks down to one token, and starts from another's blocks."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 150).tolist()
    expected = logits_in_chunks(Driver(model), "a", tokens, 150)
    for block_size, chunk in ((1, 150), (8, 64), (16, 1), (16, 17), (32, 33)):
        driver = Driver(model, block_size)
        got = logits_in_chunks(driver, "a", tokens, chunk)
        assert np.array_equal(expected, got), (block_size, chunk)
        driver.fork("a", "b", 96)
        got = logits_in_chunks(driver, "b", tokens[96:], 5)
        assert np.array_equal(expected[96:], got), (block_size, chunk)


def test_logits_do_not_depend_on_the_rest_of_the_batch(model: LlamaModel) -> None:
    """The same sequence alone, first, in the middle of and last among up to 63 others."""
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, VOCAB, 21).tolist()
    expected = logits_in_chunks(Driver(model), "a", tokens, 21)[-1]
    for others, places in ((1, (0, 1)), (6, (3,)), (14, (14,)), (63, (0, 40))):
        for place in places:
            driver = Driver(model, tokens=16384)
            work = [(str(i), draw.integers(0, VOCAB, 1 + i % 9).tolist()) for i in range(others)]
            work.insert(place, ("a", tokens))
            row = sum(len(t) for _, t in work[: place + 1]) - 1
            assert np.array_equal(expected, driver.step(work, wanted([row])).wanted[0][0])


def test_logits_do_not_depend_on_the_number_of_threads(model: LlamaModel) -> None:
    """One thread and three give the same bits, for a batch of many pieces."""
    tokens = np.random.default_rng(3).integers(0, VOCAB, 300).tolist()
    assert isinstance(model.kernels, CpuKernels)
    before, seen = model.kernels.pool, []
    try:
        for threads in (1, 3):
            model.kernels.pool = ThreadPool(threads)
            seen.append(logits_in_chunks(Driver(model), "a", tokens, 300))
    finally:
        model.kernels.pool = before
    assert np.array_equal(*seen)
