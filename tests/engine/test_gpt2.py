"""GPT-2 through the whole engine: tokens of `transformers`, its files as they are published."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.test_parity import check_greedy, first_difference
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.errors import ConfigError, ModelError
from workbench.models.loading import load_model
from workbench.models.registry import find_model, model_spec

transformers = pytest.importorskip("transformers")

PROMPTS, NEW, VOCAB = 32, 64, 320
SHAPE = {"vocab_size": VOCAB, "n_positions": 256, "n_embd": 72, "n_layer": 3, "n_head": 3}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
CUTS = {
    "roomy": {"num_blocks": 1024},
    "chunks of 33, block 8": {
        "num_blocks": 600, "block_size": 8, "max_num_batched_tokens": 33, "max_num_seqs": 5,
    },
    "preempting": {"num_blocks": 26, "max_num_seqs": 32},
    "without a KV cache": {
        "num_blocks": 1024, "use_kv_cache": False, "enable_prefix_caching": False,
    },
}  # fmt: skip
MERGES = (("Ġ", "t"), ("h", "e"), ("Ġt", "he"))
TEXT = "the thé\n<|endoftext|>"


def save_tokenizer(folder: Path):
    """A byte-level BPE of three merges, in the two files of an older GPT-2; the peer's copy."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [chr(256 + k) for k in range(256 - len(shown))]
    tokens = [*map(chr, shown), *hidden, *map("".join, MERGES), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({t: k for k, t in enumerate(tokens)}))
    lines = "\n".join(map(" ".join, MERGES))
    (folder / "merges.txt").write_text(f"#version: 0.2\n{lines}\n")
    return transformers.GPT2Tokenizer.from_pretrained(folder)


def peer_model(folder: Path, **changes: object) -> torch.nn.Module:
    """A model whose logits differ clearly and whose biases are not zero, saved in `folder`."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**SHAPE | {"initializer_range": 0.15} | changes)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(".bias"):
                weights.normal_(std=0.2)
            elif ".ln_" in name:
                weights.normal_(1, 0.2)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def saved(root: Path) -> tuple[Path, torch.nn.Module]:
    """Folder of a model and `transformers`' copy of it."""
    save_tokenizer(root)
    return root, peer_model(root)


def prompts() -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, VOCAB, n).tolist() for n in draw.integers(1, 150, PROMPTS)]


def test_greedy_tokens_equal_transformers(saved: tuple[Path, torch.nn.Module]) -> None:
    """However requests are cut and batched, and whether or not keys and values are kept."""
    folder, peer = saved
    answers = {}
    for cut, settings in CUTS.items():
        engine = Engine(str(folder), **settings)
        answers[cut] = [out.token_ids for out in engine.generate(prompts(), GREEDY)]
        assert (engine.cache.stats.readmit_query_tokens > 0) == (cut == "preempting")
    assert all(found == answers["roomy"] for found in answers.values())
    check_greedy(peer, prompts(), answers["roomy"])


def test_other_names_shapes_and_an_output_of_its_own(saved, tmp_path) -> None:
    """As the hub has GPT-2: no prefix, masks beside the weights; an untied head; a narrow MLP."""
    folder, _ = saved
    tensors = load_file(folder / "model.safetensors").items()
    hub = {name.removeprefix("transformer."): tensor for name, tensor in tensors}
    masks = {f"h.{k}.attn.bias": torch.ones(1, 1, 256, 256) for k in range(3)}
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_tokenizer(tmp_path)
    save_file(hub | masks, tmp_path / "model.safetensors")
    published, ours = (Engine(str(f), num_blocks=64) for f in (tmp_path, folder))
    few = prompts()[:4]
    assert [o.token_ids for o in published.generate(few, GREEDY)] == [
        o.token_ids for o in ours.generate(few, GREEDY)
    ]
    assert ours.memory.weights == ours.spec.weight_bytes(4) + ours.spec.table_bytes(4)
    own = {"lm_head.weight": hub["wte.weight"] + 1}  # no embedding, though the config ties both
    save_file(hub | own, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lm_head\.weight is not the embedding"):
        load_model(str(tmp_path))
    other = tmp_path / "other"
    other.mkdir()
    peer = peer_model(other, tie_word_embeddings=False, n_inner=100)
    save_tokenizer(other)
    engine = Engine(str(other), num_blocks=64)
    for prompt, out in zip(few, engine.generate(few, GREEDY), strict=True):
        assert first_difference(peer, prompt, out.token_ids) is None
    assert engine.memory.weights == engine.spec.weight_bytes(4) + engine.spec.table_bytes(4)
    save_file(hub | {"h.0.mlp.c_gate.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 tensors .* does not know.*c_gate"):
        load_model(str(tmp_path))


def test_its_tokenizer_is_the_peer_s(saved: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    """From the older pair of files and from tokenizer.json; eos is the one of config.json."""
    folder, _ = saved
    peer = save_tokenizer(tmp_path)
    peer.save_pretrained(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 259}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    newer, older = (Engine(str(f), num_blocks=64).tokenizer for f in (tmp_path, folder))
    for tokenizer in (newer, older):
        ids = tokenizer.encode(TEXT)
        assert ids == peer(TEXT).input_ids
        assert tokenizer.decode(ids) == TEXT
        assert b"".join(tokenizer.token_bytes[k] for k in ids).decode() == "the thé\n"
    assert newer.eos_ids == {259}


def test_what_is_another_model_is_refused_by_name(tmp_path: Path) -> None:
    """Settings that change the arithmetic, heads that do not divide, OpenAI's own checkpoint."""
    sound = SHAPE | {"architectures": ["GPT2LMHeadModel"]}
    for change, said in (
        ({"activation_function": "relu"}, "activation_function = 'relu'; supported: 'gelu_new'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "supported: False only"),
        ({"n_layer": "3"}, "n_layer = '3'; allowed: a whole number"),
        ({"n_embd": 73}, "n_embd = 73; supported: a multiple of n_head = 3"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(sound | change))
        with pytest.raises(ModelError, match=said):
            model_spec(str(tmp_path))
    (tmp_path / "config.json").rename(tmp_path / "hparams.json")
    with pytest.raises(ModelError, match=r"TensorFlow checkpoint .*model\.safetensors"):
        find_model(str(tmp_path))


def test_a_cache_that_is_off_goes_with_nothing_that_needs_one(saved) -> None:
    """What each token then computes: bench/test_generation.py."""
    for beside in ({}, {"enable_prefix_caching": False, "batching": "static"}):
        with pytest.raises(ConfigError, match=r"use_kv_cache is False; allowed: True unless"):
            Engine(str(saved[0]), use_kv_cache=False, **beside)
