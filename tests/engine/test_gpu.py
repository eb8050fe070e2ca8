"""What only a GPU can show; that a search is the same on it: test_shared.py."""

import warnings

import pytest
import torch

from tests.engine.test_parity import TEXTS, chats, check_greedy, random_model
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.errors import OutOfMemory

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("batch_invariant", [True, False], ids=["invariant", "fast"])
def test_the_mode_chooses_the_kernels(batch_invariant: bool) -> None:
    """Fixed tiles or the fastest, as its arithmetic's name says; steps are graphs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*no CUDA graph")
        engine = Engine("tiny-solver", num_blocks=64, max_model_len=64, device="cuda",
                        batch_invariant=batch_invariant)  # fmt: skip
    kernels = engine.executor.model.kernels
    assert (kernels.name, kernels.batch_invariant) == ("triton", batch_invariant)
    assert engine.fingerprint.endswith("invariant" if batch_invariant else "fast")
    assert engine.memory.other > 0


def test_greedy_tokens_of_a_random_llama_equal_transformers(tmp_path) -> None:
    """A first difference only where the peer's best two are a near tie."""
    peer = random_model(tmp_path).to("cuda")
    where = {"device": "cuda", "dtype": "float32"}
    engine = Engine(str(tmp_path), num_blocks=400, max_model_len=512, **where)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = chats(engine, TEXTS[:8])
    answers = [output.token_ids for output in engine.generate(prompts, params)]
    check_greedy(peer, prompts, answers)


def test_a_gpu_that_is_too_small_is_told_with_numbers() -> None:
    """Before anything is allocated."""
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(OutOfMemory, match=r"a KV cache of .* is asked for; cuda.* are free"):
        Engine("tiny-solver", device="cuda", kv_memory=2 * total)
