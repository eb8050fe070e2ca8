"""Weights rounded at load: by how little, and that everything else is as with the file's own."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models.plain_driver import Driver
from workbench import Engine, SamplingParams, load_problems
from workbench.core import WantedLogits
from workbench.errors import ConfigError
from workbench.kernels.panels import FLOAT32
from workbench.kernels.quantised import quantise
from workbench.models.llama import LlamaModel
from workbench.models.loading import load_model


@pytest.mark.parametrize(("kind", "steps"), [("Q8_0", 127), ("Q4_1", 7.5)])
def test_rounding_errs_by_half_a_step_at_most(kind: str, steps: float) -> None:
    """Also in blocks of zeros, of one value, and of very large ones."""
    draw = np.random.default_rng(0)
    matrix = draw.standard_normal((40, 96), np.float32)
    matrix[0], matrix[1, :32], matrix[2] = 0, 3.25, matrix[2] * 1e4
    given = quantise(kind, matrix).dequantise()
    largest = np.abs(matrix.reshape(40, 3, 32)).max(-1).repeat(32, axis=1)
    assert (np.abs(given - matrix) <= largest * (0.5 / steps + 2e-3)).all()
    assert (given[0] == 0).all()


NEW = 60  # tokens the model writes; prompts it never learnt to predict


def worked_examples() -> list[list[int]]:
    """Problems and what the model itself writes on them, at temperature 1."""
    engine = Engine("tiny-solver", num_blocks=200)
    prompts = [
        engine.tokenizer.encode_chat([{"role": "user", "content": p.problem}])
        for p in load_problems("tiny", limit=5)
    ]
    params = [
        SamplingParams(temperature=1.0, max_tokens=NEW, seed=seed, ignore_eos=True)
        for seed in range(5)
    ]
    texts = [engine.generate([p], each)[0].token_ids for p, each in zip(prompts, params)]
    return [prompt + list(text) for prompt, text in zip(prompts, texts)]


def perplexity(model: LlamaModel, texts: list[list[int]]) -> float:
    """exp of the mean negative log likelihood of the last NEW tokens of each text."""
    columns, found = np.arange(model.spec.vocab), []
    for tokens in texts:
        wanted = (WantedLogits(np.arange(len(tokens)), columns),)
        logits = Driver(model).step([("a", tokens, False)], wanted).wanted[0].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        found.append(logprobs[np.arange(len(tokens) - 1), tokens[1:]][-NEW:])
    return float(np.exp(-np.concatenate(found).mean()))


def test_int8_keeps_perplexity_and_saves_memory() -> None:
    """Perplexity of worked examples within 1 %, in little more than a quarter of the bytes."""
    plain = load_model("tiny-solver")
    small, smaller = (load_model("tiny-solver", quantization=q) for q in ("int8", "int4"))
    texts = worked_examples()
    expected = perplexity(plain, texts)
    assert perplexity(small, texts) == pytest.approx(expected, rel=0.01)
    assert perplexity(smaller, texts) == pytest.approx(expected, rel=0.1)
    assert all(p.matrix.form.kind != FLOAT32 for p in (*small.products, *smaller.products))
    product = plain.products[0].nbytes
    assert product * 0.26 < small.products[0].nbytes < product * 0.29
    assert product * 0.13 < smaller.products[0].nbytes < product * 0.17
    assert len({model.fingerprint for model in (plain, small, smaller)}) == 3


def test_an_unknown_quantization_is_named() -> None:
    with pytest.raises(ConfigError, match="quantization is 'int5'; allowed: int8, int4"):
        Engine("tiny-solver", num_blocks=200, quantization="int5")
