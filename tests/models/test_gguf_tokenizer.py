"""A GGUF file's tokenizer gives the ids of the tokenizer.json that the file was made of."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from tests.models.gguf_making import TOKENS, write_gguf
from workbench.errors import ModelError
from workbench.models.gguf import PRE_TOKENIZERS
from workbench.models.registry import load_tokenizer, open_source
from workbench.tokenizer import Tokenizer

SPECIAL = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
OWN = ["<tool>"]  # found whole in text, and part of it
TEXTS = [
    "The cat sat on the mat.",
    "  two  spaces,\ttabs\t\tand\n\n\nlines \r\n ends  ",
    "It's we'VE I'm THEY'D don't",
    "3.14159 + 1,000,000 = 1003.14 in 2024; x2 2x  12",
    "def f(x):\n    return x**2  # done!!!\n",
    "naïve émigré cafe\u0301 ½ ² १२३ ٤٥ 日本語 한국어 👍🏽 \u200d",
    "<|im_start|>user\nhi<|im_end|>\n<|eos|> <tool>x</tool><|unknown|>",
    "$\\frac{1}{2}$ \\boxed{42}\n\n## Step 1: add\n\n",
    "",
]
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(pattern: str) -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, _BYTES | {"use_regex": False}]}


# As the tokenizer.json of a model of each name says it: GPT-2, SmolLM2, Qwen2.5, Llama 3.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = _BYTES | {"use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
RULES: dict[str, dict[str, Any]] = {
    "gpt-2": {"pre_tokenizer": _GPT2},
    "smollm": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [_DIGITS, _GPT2]}},
    "qwen2": {"pre_tokenizer": _split(_WORDS + r"\p{N}" + _REST), "normalizer": {"type": "NFC"}},
    "llama-bpe": {"pre_tokenizer": _split(_WORDS + r"\p{N}{1,3}" + _REST)},
}


def trained(name: str) -> Backend:
    """A small tokenizer that cuts text by these rules, trained on the texts themselves."""
    backend = Backend(models.BPE())
    rules = json.loads(backend.to_str()) | RULES[name] | {"decoder": _GPT2}
    backend = Backend.from_str(json.dumps(rules))
    how = {"special_tokens": SPECIAL, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False, **how)
    backend.train_from_iterator(TEXTS * 20, trainer)
    backend.add_tokens([AddedToken(token, normalized=False) for token in OWN])
    rules = json.loads(backend.to_str())
    rules["model"]["ignore_merges"] = name == "llama-bpe"
    backend = Backend.from_str(json.dumps(rules))
    if name == "llama-bpe":
        bos = (SPECIAL[0], 0)
        first = processors.TemplateProcessing(single=f"{SPECIAL[0]} $A", special_tokens=[bos])
        backend.post_processor = first
    return backend


def about(backend: Backend, name: str) -> dict[str, Any]:
    """The metadata that a converter writes for a tokenizer."""
    model = json.loads(backend.to_str())["model"]
    ids = sorted(backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    kinds = dict.fromkeys(SPECIAL, gguf.TokenType.CONTROL)
    kinds |= dict.fromkeys(OWN, gguf.TokenType.USER_DEFINED)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [token for token, _ in ids],
        "tokenizer.ggml.token_type": [int(kinds.get(token, 1)) for token, _ in ids],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 3,
    }


@pytest.mark.parametrize("name", RULES)
def test_ids_are_those_of_the_tokenizer_json(name: str, tmp_path: Path) -> None:
    """For every text, with and without what is put before it; and back to bytes."""
    backend = trained(name)
    expected = Tokenizer(backend, {})
    path = write_gguf(tmp_path / "model.gguf", {}, about=about(backend, name))
    given = load_tokenizer(open_source(path))
    for text in TEXTS:
        assert given.encode(text) == expected.encode(text), text
        plain = given.encode(text, add_special_tokens=False)
        assert plain == expected.encode(text, add_special_tokens=False)
        assert given.decode(plain) == expected.decode(plain)
    assert given.token_bytes == expected.token_bytes


def test_special_ids_and_the_chat_template(tmp_path: Path) -> None:
    """Every id that may end a turn ends one; a file may say whether bos begins a text."""
    assert set(RULES) == set(PRE_TOKENIZERS)  # every name is tested
    given = read(tmp_path, {"ggml.eot_token_id": 7})
    assert (given.bos_id, given.eos_ids) == (0, {1, 7})
    assert given.render_chat([{"role": "user", "content": "hi"}]) == "<bos>26 Jul 2024hi"
    assert given.token_bytes[:3] == (b"", b"", b"h")
    assert read(tmp_path, {}).encode("hi hi<t>") == [0, 5, 6, 7]
    assert read(tmp_path, {}).encode("hi", add_special_tokens=False) == [5]
    assert read(tmp_path, {"ggml.add_bos_token": False}).encode("hi") == [5]


def read(folder: Path, changes: dict[str, Any]) -> Any:
    """The tokenizer of a file, some of whose metadata is changed."""
    about = TOKENS | {f"tokenizer.{key}": value for key, value in changes.items()}
    return load_tokenizer(open_source(write_gguf(folder / "model.gguf", {}, about=about)))


PLAIN = ["<eos>", "h", "i", "Ġ", "hi", "Ġhi", "<t>"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", 5, r"model\.gguf says tokenizer\.ggml\.model = 5; allowed: a text"),
        ("token_type", ["a"], r"ggml\.token_type = .*; allowed: a list of whole numbers"),
        ("add_eos_token", True, r"ggml\.add_eos_token = True; supported: False only"),
        ("add_bos_token", "false", r"ggml\.add_bos_token = 'false'; allowed: true or false"),
        ("model", "llama", r"kind 'llama', SentencePiece; supported: 'gpt2'.*tokenizer\.json"),
        ("pre", None, r"no tokenizer \(tokenizer.ggml.pre is missing\)"),
        ("pre", "tekken", r"cuts text as 'tekken' does; supported: 'gpt-2', 'smollm'"),
        ("merges", None, r"no tokenizer \(tokenizer.ggml.merges is missing\)"),
        ("merges", ["x yz"], "its tokens and merges do not fit"),
        ("eot_token_id", 9, r"names token id 9 \(tokenizer.ggml.eot_token_id\); allowed: 0 to 8"),
        ("token_type", [3, 3, 1], r"token_type has 3 values for 9 tokens; allowed: one for each"),
        ("tokens", ["h", *PLAIN, "x"], r"tokens holds 'h' twice"),
        ("tokens", ["a b", *PLAIN, "x"], r"'a b' can begin no text"),
        ("tokens", ["a", *PLAIN, "x日"], r"'x日', a plain token with letters that stand for no"),
    ],
)
def test_other_tokenizers_are_refused(key, value, message, tmp_path) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, {f"ggml.{key}": value})
