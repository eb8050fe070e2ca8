"""A GGUF file's tokenizer gives the ids of the tokenizer.json that the file was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from tests.models.gguf_making import random_tensors, write_gguf
from workbench.errors import ModelError
from workbench.models.folders import load_tokenizer, open_source
from workbench.models.gguf_tokenizer import CUTTINGS
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
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 20, trainer)
    backend.add_tokens([AddedToken(token, normalized=False) for token in OWN])
    rules = json.loads(backend.to_str())
    rules["model"]["ignore_merges"] = name == "llama-bpe"
    if name == "llama-bpe":
        bos = {"SpecialToken": {"id": SPECIAL[0], "type_id": 0}}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        rules["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [bos, text],
            "pair": [bos, text],
            "special_tokens": {SPECIAL[0]: {"id": SPECIAL[0], "ids": [0], "tokens": [SPECIAL[0]]}},
        }
    return Backend.from_str(json.dumps(rules))


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
        "tokenizer.ggml.eot_token_id": 1,
        "tokenizer.chat_template": "{{ bos_token }}{{ date_string }}{{ messages[0]['content'] }}",
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


def test_every_name_is_tested() -> None:
    assert set(RULES) == set(CUTTINGS)


def test_special_ids_and_the_chat_template(tmp_path: Path) -> None:
    """Every id that may end a turn ends one; the template gets the fixed date."""
    path = write_gguf(tmp_path / "model.gguf", {}, about=about(trained("gpt-2"), "gpt-2"))
    given = load_tokenizer(open_source(path))
    assert given.bos_id == 0
    assert given.eos_ids == {1, 3}
    assert given.render_chat([{"role": "user", "content": "hi"}]) == "<|bos|>26 Jul 2024hi"
    assert given.token_bytes[:4] == (b"",) * 4


def test_the_file_may_say_whether_bos_begins_a_text(tmp_path: Path) -> None:
    backend = trained("gpt-2")
    said = about(backend, "gpt-2") | {"tokenizer.ggml.add_bos_token": True}
    path = write_gguf(tmp_path / "model.gguf", {}, about=said)
    assert load_tokenizer(open_source(path)).encode("hi")[0] == 0
    assert load_tokenizer(open_source(path)).encode("hi", add_special_tokens=False)[0] != 0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "model",
            "llama",
            r"kind 'llama', SentencePiece; supported: 'gpt2'.*tokenizer\.json",
        ),
        ("pre", "tekken", r"cuts text as 'tekken' does; supported: 'gpt-2', 'smollm'"),
        ("merges", None, r"no tokenizer \(tokenizer.ggml.merges is missing\)"),
        ("merges", ["x yz"], "tokens and merges do not fit"),
        ("eos_token_id", 9999, r"names token id 9999 \(tokenizer.*\); allowed: 0 to \d+"),
    ],
)
def test_other_tokenizers_are_refused(
    key: str, value: object, message: str, tmp_path: Path
) -> None:
    said = about(trained("gpt-2"), "gpt-2") | {f"tokenizer.ggml.{key}": value}
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), about=said)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(open_source(path))
