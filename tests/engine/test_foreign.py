"""TransformersEngine: the same search as ours, and what an engine without our cache cannot do."""

import math

import numpy as np
import pytest
import torch

from tests.engine.conftest import search
from tests.models.reward_models import reward_model
from tests.search.prm_tokenizers import qwen_like, save
from workbench import Engine, SamplingParams
from workbench.engine.foreign import TransformersEngine
from workbench.errors import ConfigError, ModelError, PromptError, StepError

pytest.importorskip("transformers")

NEAR_TIE = 1e-4
SHORT = {"max_model_len": 384}
PROMPTS = ["Compute 7-3+12.", "Compute 2*(4+5)."]


@pytest.fixture(scope="module")
def ours():
    return [Engine(f"tiny-{name}", num_blocks=400, **SHORT) for name in ("solver", "prm")]


@pytest.fixture(scope="module")
def theirs():
    return [TransformersEngine(f"tiny-{name}", **SHORT) for name in ("solver", "prm")]


@pytest.mark.parametrize("temperature", [0.8, 0.0])
def test_the_tree_is_ours(ours, theirs, temperature):
    """Node by node; these problems and seeds meet no near tie."""
    mine, other = (search(*pair, temperature=temperature) for pair in (ours, theirs))
    columns = ["problem_id", "node_id", "token_ids", "finish_reason", "kept"]
    trees = [found.tree[columns].to_dict("records") for found in (mine, other)]
    assert trees[0] == trees[1]
    assert np.abs(mine.tree["score"] - other.tree["score"]).max() < 1e-4
    assert mine.answers == other.answers


def test_filters_stops_and_log_probabilities_are_ours(ours, theirs):
    """Requests that use every setting end alike, with the same tokens and reasons."""
    params = [
        SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, seed=2**63 + 5,
                       max_tokens=30, logprobs=3),
        SamplingParams(temperature=0.0, stop=("\n\n",), max_tokens=40),
    ]  # fmt: skip
    pairs = [*zip(*(pair[0].generate(PROMPTS, params) for pair in (ours, theirs)))]
    for mine, other in pairs:
        assert mine.token_ids == other.token_ids
        assert (mine.text, mine.finish_reason) == (other.text, other.finish_reason)
    first, second = (output.logprobs for output in pairs[0])
    assert [sorted(each) for each in first] == [sorted(each) for each in second]
    assert all(math.isclose(a[k], b[k], abs_tol=1e-4) for a, b in zip(first, second) for k in a)


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForProcessRewardModel", "Qwen2ForPrmModel"]
)
def test_scores_are_those_of_the_model_and_its_head(architecture, tmp_path):
    """Logits at positions and columns, of a vocabulary and of both value heads."""
    judge = reward_model(tmp_path, architecture, vocab_size=300)
    save(qwen_like(), tmp_path)
    engine = TransformersEngine(str(tmp_path))
    ids, places = torch.arange(5, 40).tolist(), [3, 20, 34]
    columns = [1, 0] if architecture == "Qwen2ForProcessRewardModel" else [0]
    found = engine.score(ids, places, columns).logits
    assert np.abs(found - judge(ids)[places][:, columns].numpy()).max() < 1e-4
    if engine.value_outputs is not None:
        with pytest.raises(PromptError, match="value head"):
            engine.add([1], SamplingParams())


def test_an_architecture_that_our_engine_does_not_know(tmp_path):
    """GPT-NeoX (parallel residual): greedy tokens are those of its own forward."""
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "max_position_embeddings": 64, "vocab_size": 300}
    peer = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**shape)).eval()
    with torch.no_grad():
        for weights in peer.parameters():
            weights += 0.3 * torch.randn_like(weights)
    peer.save_pretrained(tmp_path)
    save(qwen_like(), tmp_path)
    with pytest.raises(ModelError):
        Engine(str(tmp_path), num_blocks=8)
    engine, ids = TransformersEngine(str(tmp_path)), [5, 6, 7]
    assert engine.max_model_len == 64
    (output,) = engine.generate([ids], SamplingParams(temperature=0, max_tokens=12,
                                                     ignore_eos=True))  # fmt: skip
    for token in output.token_ids:
        with torch.inference_mode():
            logits = peer(torch.tensor([ids])).logits[0, -1]
        assert logits[token] > logits.max() - NEAR_TIE
        ids.append(token)


def test_a_model_that_transformers_would_complete_at_random_is_refused(tmp_path):
    """Missing tensors are an error, not random numbers."""
    from safetensors.torch import load_file, save_file

    reward_model(tmp_path, "LlamaForCausalLM", vocab_size=300, tie_word_embeddings=False)
    save(qwen_like(), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({n: w for n, w in load_file(file).items() if "layers.1" not in n}, file)
    with pytest.raises(ModelError, match=r"lack 9 tensors, first 'model\.layers\.1"):
        TransformersEngine(str(tmp_path))


def test_what_it_lacks_is_refused_by_name(theirs):
    """What needs our cache; a trace; random weights; more than the model's length."""
    with pytest.raises(ConfigError, match="capabilities of tiny-solver are: token_identity"):
        search(*theirs, forget_pruned=True)
    with pytest.raises(ConfigError, match=r"adaptive.*tiny-solver"):
        search(*theirs, problem_batching="adaptive")
    with pytest.raises(ConfigError, match="cannot trace; its capabilities: token_identity"):
        theirs[0].trace_as(None, "llm")
    for given in ({"model": "dummy:tiny-solver"}, {"dtype": "int8"}, {"max_model_len": 10**6}):
        with pytest.raises(ConfigError):
            TransformersEngine(**given)
    for given in ("384", 100.5, 1):
        with pytest.raises(ConfigError, match="max_model_len is"):
            TransformersEngine(max_model_len=given)
    for ids in ([], [10**6], [5] * 384):
        with pytest.raises(PromptError):
            theirs[0].add(ids, SamplingParams())
    assert not theirs[0].has_work


def test_a_request_that_fails_leaves_the_others(theirs, monkeypatch):
    """A forward pass that raises ends its request with a StepError; an abort ends one."""
    llm = theirs[0]
    numbers = [llm.add(PROMPTS[0], SamplingParams(max_tokens=2, seed=k)) for k in range(3)]
    llm.abort(numbers[2])
    with monkeypatch.context() as patch:
        patch.setattr(llm, "_model", None)
        (failed,) = llm.step()
    assert failed.request_id == numbers[0]
    assert failed.finish_reason == "error" and isinstance(failed.error, StepError)
    assert not llm._stops._params
    (fine,) = llm.step()
    assert fine.request_id == numbers[1] and len(fine.token_ids) == 2
    assert not llm.has_work and llm.step() == []
