"""Scores of each PRM format equal what `transformers` makes of the same tokens, within 1e-4."""

from pathlib import Path

import pytest
import torch

from tests.search.prm_tokenizers import mistral_like, qwen_like, save
from workbench.engine.engine import Engine
from workbench.search.prm import PRM

pytest.importorskip("transformers")

from tests.models.reward_models import reward_model

QUESTION = "What is 2 + 3, and what is twice that?"
STEPS = ["Step 1: 2 + 3 = 5.\n\n", "Step 2: 5 + 5 = 11.\n\n", "So it is 10.", "So it is 10."]
MODELS = {  # a folder's name, as it may be published -> architecture, tokenizer, its first token
    "tiny-rlhflow": ("LlamaForCausalLM", qwen_like, None),
    "math-shepherd-tiny": ("MistralForCausalLM", mistral_like, "<s>"),
    "tiny-math-prm": ("Qwen2ForProcessRewardModel", qwen_like, None),
    "tiny-open-prm": ("Qwen2ForPrmModel", qwen_like, "<|endoftext|>"),
}
FORMAT = ("rlhflow", "math-shepherd", "qwen2.5-math-prm", "skywork")


def expected_scores(prm: PRM, rows: torch.Tensor) -> list[float]:
    """Of all outputs at the verdicts' positions: the published models' own arithmetic."""
    if prm.format == "skywork":
        return rows[:, 0].double().sigmoid().tolist()
    if prm.format == "qwen2.5-math-prm":
        return rows.double().softmax(-1)[:, 1].tolist()
    return rows[:, list(prm.columns)].double().softmax(-1)[:, 0].tolist()


@pytest.mark.parametrize(("name", "format"), list(zip(MODELS, FORMAT, strict=True)))
def test_scores_equal_transformers(name: str, format: str, tmp_path: Path) -> None:
    """Prefilled in chunks, the format found by itself, and again out of the prefix cache."""
    architecture, tokenizer, bos = MODELS[name]
    folder = tmp_path / name
    folder.mkdir()
    vocab = save(tokenizer(), folder, bos)
    judge = reward_model(folder, architecture, vocab_size=vocab)
    limits = {"max_model_len": 448, "max_num_batched_tokens": 40, "max_num_seqs": 4}
    prm = PRM(Engine(str(folder), num_blocks=64, **limits))
    assert prm.format == format
    grown = [prm.first_input(QUESTION, STEPS[0])]
    for step in STEPS[1:]:
        grown.append(prm.next_input(grown[-1], step))
    positions = [len(ids) - 1 for ids in grown]
    whole = prm.engine.score(grown[-1].tolist(), positions, prm.columns)
    scores = list(prm.scores(whole.logits.tolist()))
    expected = expected_scores(prm, judge(grown[-1].tolist())[positions])
    assert scores == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 1e-3  # the steps are told apart
    last = prm.engine.score(grown[-1].tolist(), positions[-1:], prm.columns)
    assert last.num_cached_tokens > 0
    assert last.logits.tolist() == whole.logits[-1:].tolist()
