"""A row's logits are bit for bit the same alone, in any batch, place, chunking or block size."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.models.plain_driver import Driver
from workbench.core import WantedLogits
from workbench.models.layers import Linear, RowTiles, find_row_tiles
from workbench.models.llama import LlamaModel
from workbench.models.loading import load_model

VOCAB = 96
SHAPES = {
    "solver": (128, 8, 1, 16, 544),
    "prm": (320, 5, 1, 64, 1280),
    "awkward": (72, 3, 3, 24, 100),
}


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    """A layer or two of random weights."""
    hidden, heads, kv_heads, head_dim, inner = SHAPES[request.param]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2 if hidden < 300 else 1,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
    }
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(f"dummy:{folder}")


def wanted(rows: list[int]) -> tuple[WantedLogits, ...]:
    return (WantedLogits(np.array(rows, np.int64), np.arange(VOCAB)),)


def logits_in_chunks(driver: Driver, name: str, tokens: list[int], chunk: int) -> np.ndarray:
    """Logits of every position [len(tokens), vocab] when tokens come `chunk` at a time."""
    parts = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
    steps = [driver.step([(name, p, False)], wanted(list(range(len(p))))) for p in parts]
    return np.concatenate([step.wanted[0] for step in steps])


def test_logits_do_not_depend_on_chunks_or_block_size(model: LlamaModel) -> None:
    """Every position's logits, for four block sizes and chunks down to one token."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 150).tolist()
    expected = logits_in_chunks(Driver(model), "a", tokens, 150)
    for block_size, chunk in ((1, 150), (8, 64), (16, 1), (16, 17), (32, 33)):
        got = logits_in_chunks(Driver(model, block_size), "a", tokens, chunk)
        assert np.array_equal(expected, got), (block_size, chunk)


def test_logits_do_not_depend_on_the_rest_of_the_batch(model: LlamaModel) -> None:
    """The same sequence alone, first, in the middle of and last among up to 63 others."""
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, VOCAB, 21).tolist()
    expected = logits_in_chunks(Driver(model), "a", tokens, 21)[-1]
    for others, places in ((1, (0, 1)), (6, (3,)), (14, (14,)), (63, (0, 40))):
        for place in places:
            driver = Driver(model, tokens=16384)
            work = [
                (str(i), draw.integers(0, VOCAB, 1 + i % 9).tolist(), False) for i in range(others)
            ]
            work.insert(place, ("a", tokens, False))
            row = sum(len(t) for _, t, _ in work[: place + 1]) - 1
            assert np.array_equal(expected, driver.step(work, wanted([row])).wanted[0][0])


def test_logits_after_a_prefix_hit_are_those_of_a_full_prefill(model: LlamaModel) -> None:
    """A sequence that starts from another's blocks continues as if it had computed them."""
    draw = np.random.default_rng(2)
    tokens = draw.integers(0, VOCAB, 64).tolist()
    driver = Driver(model)
    expected = logits_in_chunks(driver, "a", tokens, 64)
    driver.fork("a", "b", 48)
    assert np.array_equal(expected[48:], logits_in_chunks(driver, "b", tokens[48:], 5))


def test_logits_do_not_depend_on_the_number_of_threads(model: LlamaModel) -> None:
    """One thread and two give the same bits, for a batch that a BLAS would split."""
    tokens = np.random.default_rng(3).integers(0, VOCAB, 300).tolist()
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            seen.append(logits_in_chunks(Driver(model), "a", tokens, 300))
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(*seen)


@pytest.mark.parametrize("shape", [(128, 1088), (1280, 320), (100, 33), (64, 2)])
def test_products_in_the_tiles_found_are_invariant(shape: tuple[int, int]) -> None:
    """Every number of rows up to 300 gives the rows of the largest product."""
    generator = torch.Generator().manual_seed(5)
    product = Linear(torch.randn(*shape, generator=generator))
    product.cut(find_row_tiles(product.weight))
    x = torch.randn(364, shape[0], generator=generator)
    expected, out = torch.empty(364, shape[1]), torch.empty(364, shape[1])
    product(x, 300, expected)
    for rows in (*range(1, 40), 63, 64, 65, 127, 128, 129, 200, 255, 257, 299):
        product(x, rows, out)
        assert torch.equal(out[:rows], expected[:rows]), rows


def test_row_tiles_cover_all_rows_in_allowed_sizes() -> None:
    """Spans join without a gap, none larger than allowed, each a multiple."""
    for tiles in (RowTiles(2, 128, 9), RowTiles(64, 64, 9), RowTiles(16, 32, 9)):
        for rows in (1, 2, 63, 64, 129, 500):
            spans = list(tiles.spans(rows))
            assert spans[0][0] == 0
            assert spans[-1][1] == tiles.pad(rows) >= rows
            assert all(a[1] == b[0] for a, b in pairwise(spans))
            assert all((b - a) % tiles.multiple == 0 and b - a <= tiles.largest for a, b in spans)
