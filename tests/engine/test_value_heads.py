"""Models with a value head answer scoring requests through the same engine, and nothing else."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.search.prm_tokenizers import qwen_like, save
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.errors import ConfigError, PromptError

pytest.importorskip("transformers")

from tests.models.reward_models import HEADS, reward_model

LIMITS = {"max_model_len": 256, "max_num_seqs": 8}


@pytest.fixture(scope="module", params=HEADS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random reward model of each kind."""
    folder = tmp_path_factory.mktemp(request.param)
    reward_model(folder, request.param, vocab_size=save(qwen_like(), folder))
    save(qwen_like(), folder)
    return folder


def test_values_are_the_same_in_any_batch_and_chunks(folder: Path) -> None:
    """Bit for bit: alone, among others, in chunks, at other positions, out of the cache."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 250, 100).tolist()
    engine = Engine(str(folder), num_blocks=64, **LIMITS)
    columns = range(engine.value_outputs)
    alone = engine.score(tokens, range(100), columns).logits
    chunked = Engine(str(folder), num_blocks=64, max_num_batched_tokens=16, **LIMITS)
    ids = [chunked.add_score(draw.integers(0, 250, 9 + k).tolist(), (5,), (0,)) for k in range(5)]
    ids.append(chunked.add_score(tokens, (7, 50, 99), columns))
    found = {}
    while chunked.has_work:
        found |= {output.request_id: output for output in chunked.step()}
    assert np.array_equal(found[ids[-1]].logits, alone[[7, 50, 99]])
    again = engine.score(tokens, (99,), columns)
    assert again.num_cached_tokens == 96
    assert np.array_equal(again.logits, alone[[99]])


def test_it_gives_no_tokens_and_has_few_columns(folder: Path) -> None:
    """What cannot be is refused by name; head and biases are counted as weights, lm_head not."""
    engine = Engine(str(folder), num_blocks=64, **LIMITS)
    assert engine.memory.weights == engine.spec.weight_bytes(4) + engine.spec.table_bytes(4)
    with pytest.raises(PromptError, match=r"value head.* cannot generate; use it as a PRM"):
        engine.generate([[1, 2]], SamplingParams())
    with pytest.raises(PromptError, match=r"Column 2 is not in .*'s value head; allowed: 0 to"):
        engine.score([1, 2], (0,), (2,))
    assert not engine.has_work


def test_a_sliding_window_bounds_the_requests(tmp_path: Path) -> None:
    """Mistral's window is no obstacle while every request fits into it."""
    reward_model(tmp_path, "MistralForCausalLM", vocab_size=260, sliding_window=128)
    save(qwen_like(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window"] == 128
    with pytest.raises(ConfigError, match=r"max_model_len=512 .* give max_model_len=128 at most"):
        Engine(str(tmp_path), num_blocks=64)
    assert Engine(str(tmp_path), num_blocks=64, max_model_len=128).max_model_len == 128
