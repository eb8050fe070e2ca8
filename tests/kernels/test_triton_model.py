"""A whole model over the Triton kernels says what it says over the CPU's, step by step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")

from tests.engine.conftest import CONFIG, dummy
from workbench import Engine, SamplingParams
from workbench.errors import ConfigError
from workbench.kernels.triton import INTERPRETED, TritonKernels
from workbench.kernels.triton.attention import Tiles
from workbench.kernels.triton.graphs import RecordedWork

LLAMA = CONFIG | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 300}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 300, "n_layer": 2, "n_head": 4}
GPT2 |= {"n_embd": 64, "n_inner": 96, "n_positions": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, max_tokens=5, seed=5, ignore_eos=True)
PROMPTS = [list(range(7, 25)), [9], [3, 200]]  # the largest step has three rows
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dummy(tmp_path_factory.mktemp("model"), LLAMA)


def interpret(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[TritonKernels], None] = lambda _: None
) -> None:
    """Engines take these kernels from now on; the largest step is not measured, only guessed."""

    def load(
        device: torch.device, dtype: torch.dtype, batch_invariant: bool, **_: Any
    ) -> TritonKernels:
        kernels = TritonKernels(device, dtype, batch_invariant=batch_invariant)
        made(kernels)
        return kernels

    monkeypatch.setattr("workbench.models.loading.load_kernels", load)
    monkeypatch.setattr("workbench.engine.memory.measure_activations", lambda *_: 1 << 20)


def engine(model: str, **settings: Any) -> Engine:
    limits = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "max_model_len": 32}
    return Engine(model, num_blocks=16, **limits | settings)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_an_engine_samples_the_same_tokens(config, batch_invariant, tmp_path, monkeypatch) -> None:
    """Prompts in chunks, then decodes of a changing batch, recorded ones too; greedy and drawn."""
    model = dummy(tmp_path, config)
    params = [GREEDY, DRAWN, GREEDY]
    expected = [out.token_ids for out in engine(model).generate(PROMPTS, params)]
    interpret(monkeypatch)
    ours = engine(model, batch_invariant=batch_invariant)
    assert ours.executor.model.kernels.batch_invariant == batch_invariant
    assert [out.token_ids for out in ours.generate(PROMPTS, params)] == expected


def test_all_sizes_are_captured_when_the_engine_is_made(tmp_path, monkeypatch) -> None:
    """The largest first, and nothing is stored meanwhile; no step captures one more."""
    model = dummy(tmp_path, LLAMA | {"num_hidden_layers": 1})  # enough: nine sizes are interpreted
    expected = engine(model, max_model_len=64).generate(PROMPTS, DRAWN)
    captured: list[tuple[int, int]] = []

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        placed = ours[0].held[2]
        captured.append((len(placed.positions), placed.spans))
        return work

    ours: list[TritonKernels] = []
    interpret(monkeypatch, ours.append)
    made = "workbench.kernels.triton.RecordedWork"
    monkeypatch.setattr(made, lambda kernels, work, _: RecordedWork(kernels, work, capture))
    small = Tiles(queries=16, tile=16, span=16)
    monkeypatch.setattr("workbench.kernels.triton.attention.FULL_PRECISION", small)
    recorded = engine(model, max_model_len=64)
    sizes = [(rows, spans) for rows in (4, 3, 2) for spans in (4, 3, 2)]
    assert captured == sizes
    assert not recorded.executor.storage.data.any()
    found = recorded.generate(PROMPTS, DRAWN)
    assert [out.token_ids for out in found] == [out.token_ids for out in expected]
    assert captured == sizes


def test_filters_and_log_probabilities_are_the_sampler_s(model, monkeypatch) -> None:
    """By the same rules on the device."""
    params = SamplingParams(temperature=0.9, top_p=0.7, max_tokens=2, seed=1, logprobs=2,
                            ignore_eos=True)  # fmt: skip
    expected = engine(model).generate(PROMPTS[1:2], params)[0]
    interpret(monkeypatch)
    found = engine(model, batch_invariant=False).generate(PROMPTS[1:2], params)[0]
    assert found.token_ids == expected.token_ids
    assert [set(each) for each in found.logprobs] == [set(each) for each in expected.logprobs]


def test_a_reward_model_computes_the_columns_it_is_asked_for(model, monkeypatch) -> None:
    """By the kernel that reads them where they lie: no matrix of columns is packed."""
    tokens, positions, columns = list(range(5, 16)), [3, 10], [7, 2]
    expected = engine(model).score(tokens, positions, columns).logits
    interpret(monkeypatch)
    ours = engine(model, batch_invariant=False)
    monkeypatch.setattr(ours.executor.model.kernels, "pack", None)
    found = ours.score(tokens, positions, columns).logits
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_blocks_that_kernels_cannot_read_are_refused_at_once(model, monkeypatch) -> None:
    """When the engine is made, before anything is computed."""
    interpret(monkeypatch)
    with pytest.raises(ConfigError, match="block_size=24; the Triton kernels take powers of two"):
        engine(model, block_size=24)
