"""Greedy tokens of the whole engine equal `transformers`, however requests are cut and batched.

Checked by forcing: `transformers` reads prompt and answer in one pass, and at every position its
likeliest token must be the one we gave. A first difference is allowed at a near tie only.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.models.test_parity import LLAMA3, NEAR_TIE, peer_model
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.models.registry import EMBEDDED
from workbench.search.problems import load_problems

transformers = pytest.importorskip("transformers")

TEXTS, NEW = [p.problem for p in load_problems("tiny", limit=32)], 64
SHORT = {"max_model_len": 384}  # leaves room for preemption: one request fits, 32 do not
CUTS = {
    "roomy": {"num_blocks": 1024},
    "block 1, chunks of 64": {
        "num_blocks": 9000, "block_size": 1, "max_num_batched_tokens": 64, "max_num_seqs": 7,
    },
    "block 8, chunks of 40, no prefix caching": {
        "num_blocks": 1600, "block_size": 8, "max_num_batched_tokens": 40, "max_num_seqs": 32,
        "enable_prefix_caching": False,
    },
    "block 32, chunks of 33": {
        "num_blocks": 400, "block_size": 32, "max_num_batched_tokens": 33, "max_num_seqs": 3,
    },
    "preempting": {"num_blocks": 26, "max_num_seqs": 32, **SHORT},
    "preempting without prefix caching": {
        "num_blocks": 48, "block_size": 8, "max_num_batched_tokens": 100, **SHORT,
        "enable_prefix_caching": False,
    },
}  # fmt: skip


@pytest.fixture
def models(request, tmp_path_factory):
    """Folder of a model and `transformers`' copy of it."""
    if request.param != "random":
        folder = EMBEDDED / request.param
        peer = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return folder, peer
    folder = tmp_path_factory.mktemp("random")
    return folder, random_model(folder)


def random_model(folder: Path):
    """Llama-3 RoPE, grouped heads, untied, with the embedded models' tokenizer."""
    embedded = EMBEDDED / "tiny-solver"
    vocab = json.loads((embedded / "config.json").read_text())["vocab_size"]
    shape = {"vocab_size": vocab, "num_key_value_heads": 2, "rope_parameters": LLAMA3}
    peer = peer_model(folder, tie_word_embeddings=False, max_position_embeddings=2048, **shape)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / name, folder)
    return peer


def chats(engine: Engine, texts: list[str]) -> list[list[int]]:
    return [engine.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]


def first_difference(peer, prompt: list[int], answer: tuple[int, ...]) -> float | None:
    """None when the peer would have given this answer; else its gap between the best two there."""
    with torch.inference_mode():
        tokens = torch.tensor([[*prompt, *answer[:-1]]], device=peer.device)
        logits = peer(tokens).logits[0, len(prompt) - 1 :]
    for row, token in zip(logits, answer, strict=True):
        if int(row.argmax()) != token:
            best = row.topk(2).values
            return float(best[0] - best[1])
    return None


def check_greedy(peer, prompts, answers, most: int = 1) -> None:
    """The answers are the peer's; so many, one in 2,048 tokens, may part from it at a near tie."""
    gaps = [first_difference(peer, p, a) for p, a in zip(prompts, answers, strict=True)]
    differing = [gap for gap in gaps if gap is not None]
    assert all(gap < NEAR_TIE for gap in differing), f"first differences at gaps {differing}"
    assert len(differing) <= most


def check_cuts(peer, model: str, cuts, texts: list[str], new: int, most: int = 1) -> Engine:
    """The first cut's tokens are the peer's, all others its own. Returns the last cut's engine."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    answers = []
    for cut, settings in cuts.items():
        engine = Engine(model, **settings)
        prompts = chats(engine, texts)
        answers.append([output.token_ids for output in engine.generate(prompts, params)])
        engine.cache.check()
        assert answers[-1] == answers[0], cut
        assert (engine.trace.steps["preempted"].sum() > 0) == ("preempting" in cut), cut
    check_greedy(peer, prompts, answers[0], most)
    return engine


@pytest.mark.parametrize("models", ["tiny-solver", "random", "tiny-prm"], indirect=True)
def test_greedy_tokens_equal_transformers(models):
    """Whatever the blocks, chunks, hits and preemptions; of the largest model two cuts."""
    folder, peer = models
    two = {cut: CUTS[cut] for cut in ("roomy", "preempting")}
    check_cuts(peer, str(folder), two if folder.name == "tiny-prm" else CUTS, TEXTS, NEW)
