"""A GGUF file's metadata is of the kinds it must be: a damaged value is named, none is dropped."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.gguf_making import HEAD_DIM, random_tensors, write_gguf
from workbench.errors import ModelError
from workbench.models.folders import load_tokenizer, model_spec, open_source, read_spec
from workbench.models.gguf_file import GGUFFile
from workbench.models.loading import open_weights

EMBEDDING = {"model.embed_tokens.weight": random_tensors()["model.embed_tokens.weight"]}
WHOLE = (
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "context_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "rope.dimension_count",
)
TOKENS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": ["<bos>", "<eos>", "h", "i", "Ġ", "hi", "Ġhi", "<t>", "x"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1, 4, 1],
    "tokenizer.ggml.merges": ["h i", "Ġ hi"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}


def write(folder: Path, about: dict[str, Any], arch: str = "llama") -> Path:
    """A file with a tokenizer and, of the tensors, what the shapes are read from."""
    return write_gguf(folder / "model.gguf", EMBEDDING, arch=arch, about=TOKENS | about)


def test_the_sound_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, {})
    assert model_spec(str(path)).layers == 2
    tokenizer = load_tokenizer(open_source(path))
    assert tokenizer.encode("hi hi<t>") == [0, 5, 6, 7]
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, {1})


@pytest.mark.parametrize("key", WHOLE)
def test_a_size_that_is_none_is_named(key: str, tmp_path: Path) -> None:
    """Nothing is cut to a whole number, and nothing of another kind reaches a formula."""
    for wrong in (math.nan, math.inf, -1.0, 0.5, 2.0, "7", [4, 4], [2.0], ["a"], True, 2**32 - 1):
        path = write(tmp_path, {f"llama.{key}": wrong})
        with pytest.raises(
            ModelError, match=rf"model\.gguf says llama\.{key} = .*; allowed: a whole number from"
        ):
            model_spec(str(path))


@pytest.mark.parametrize("key", ["rope.freq_base", "attention.layer_norm_rms_epsilon"])
def test_a_number_that_is_none_is_named(key: str, tmp_path: Path) -> None:
    for wrong in (math.nan, math.inf, -1.0, 0, "7", [4, 4], True):
        path = write(tmp_path, {f"llama.{key}": wrong})
        with pytest.raises(ModelError, match=rf"says llama\.{key} = .*; allowed: a number above 0"):
            model_spec(str(path))


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"rope.scaling.type": "yarn"}, r"rope\.scaling\.type = 'yarn'; supported: 'none'"),
        ({"rope.scaling.type": ["none"]}, r"rope\.scaling\.type = .*; allowed: a text"),
        ({"rope.scaling.factor": 8.0}, r"rope\.scaling\.factor = 8\.0; allowed: none, or 1"),
        ({"rope.scale_linear": 4.0}, r"rope\.scale_linear = 4\.0; allowed: none, or 1"),
        ({"rope.scale_linear": math.nan}, r"rope\.scale_linear = nan; allowed: none, or 1"),
        ({"rope.scaling.attn_factor": 0.5}, r"attn_factor = 0\.5; allowed: none, or 1"),
        ({"rope.dimension_count": 8}, r"rope.dimension_count = 8; supported: the head's 16"),
        ({"attention.head_count": [4, 4]}, r"head_count = \[4, 4\] \(2 values\); allowed: a whole"),
        ({"attention.head_count": 0}, r"head_count = 0; allowed: a whole number from 1"),
        ({"attention.head_count": 128}, r"key_length = 0; allowed: a whole number from 1"),
        ({"block_count": None}, r"lacks 'llama.block_count'; needed: a whole number from 1"),
        ({"expert_count": 8}, "mixture of experts"),
        ({"rope.freq_base": 1e-30}, r"rope_theta = .*; supported: 1 or more"),
    ],
)
def test_other_models_are_refused(about: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path, {f"llama.{key}": value for key, value in about.items()})
    with pytest.raises(ModelError, match=message):
        model_spec(str(path))


@pytest.mark.parametrize("wrong", [5, ["llama"], None])
def test_an_architecture_is_a_text(wrong: object, tmp_path: Path) -> None:
    path = write(tmp_path, {})
    opened = GGUFFile(path)
    opened.metadata["general.architecture"] = wrong
    with pytest.raises(ModelError, match=r"general\.architecture.*a text"):
        read_spec(opened)


def test_an_alignment_is_a_whole_number(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"corrupt \(general.alignment is 0\)"):
        model_spec(str(write(tmp_path, {"general.alignment": 0})))


@pytest.mark.parametrize("key", ["rope.scale_linear", "rope.scaling.factor"])
@pytest.mark.parametrize("neutral", [0.0, 1.0, 1])
def test_scalings_that_stretch_nothing_are_read(key: str, neutral: float, tmp_path: Path) -> None:
    plain = model_spec(str(write(tmp_path, {})))
    about = {f"llama.{key}": neutral, "llama.rope.scaling.type": "none"}
    assert model_spec(str(write(tmp_path, about))) == plain


@pytest.mark.parametrize("wrong", [0.0, 0.5, math.nan, math.inf])
def test_factors_of_rotations_that_are_none_are_refused(wrong: float, tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.full(HEAD_DIM // 2, wrong, np.float32)}
    path = write_gguf(tmp_path / "model.gguf", EMBEDDING, extra=extra)
    with pytest.raises(ModelError, match=r"stretches rotations otherwise than Llama 3"):
        model_spec(str(path))


def test_a_window_of_a_llama_file_bounds_its_requests(tmp_path: Path) -> None:
    """Converters write Mistral as llama with a window; 0 is none."""
    spec = model_spec(str(write(tmp_path, {"llama.attention.sliding_window": 64})))
    assert (spec.architecture, spec.sliding_window) == ("MistralForCausalLM", 64)
    spec = model_spec(str(write(tmp_path, {"llama.attention.sliding_window": 0})))
    assert (spec.architecture, spec.sliding_window) == ("LlamaForCausalLM", None)


def test_a_window_of_a_qwen2_file_is_refused_if_it_hides_anything(tmp_path: Path) -> None:
    path = write(tmp_path, {"qwen2.attention.sliding_window": 128}, "qwen2")
    assert model_spec(str(path)).sliding_window is None
    path = write(tmp_path, {"qwen2.attention.sliding_window": 64}, "qwen2")
    with pytest.raises(ModelError, match=r"sliding_window = 64; supported: none, .* of 128"):
        model_spec(str(path))


NO_TEXTS = (5, "text", [1, 2], [0.5], True)
NO_IDS = (1.0, math.nan, "1", [1], True, ["a"])
DAMAGED = {
    "ggml.model": (NO_TEXTS[:1] + NO_TEXTS[2:], "a text"),
    "ggml.pre": (NO_TEXTS[:1] + NO_TEXTS[2:], "a text"),
    "chat_template": (NO_TEXTS[:1] + NO_TEXTS[2:], "a text"),
    "ggml.tokens": (NO_TEXTS, "a list of texts"),
    "ggml.merges": (NO_TEXTS, "a list of texts"),
    "ggml.token_type": ((5, "text", [0.5], ["a"], [True]), "a list of whole numbers"),
    "ggml.bos_token_id": (NO_IDS, "a whole number from 0"),
    "ggml.eos_token_id": (NO_IDS, "a whole number from 0"),
    "ggml.eot_token_id": (NO_IDS, "a whole number from 0"),
    "ggml.padding_token_id": (NO_IDS, "a whole number from 0"),
    "ggml.add_bos_token": ((1, "false", [1], math.nan), "true or false"),
}


@pytest.mark.parametrize("key", DAMAGED)
def test_a_tokenizers_value_of_another_kind_is_named(key: str, tmp_path: Path) -> None:
    """The file, the key, what was found and what is allowed."""
    values, allowed = DAMAGED[key]
    for wrong in values:
        path = write(tmp_path, {f"tokenizer.{key}": wrong})
        with pytest.raises(
            ModelError, match=rf"model\.gguf says tokenizer\.{key} = .*; allowed: {allowed}"
        ):
            load_tokenizer(open_source(path))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("token_type", [3, 3, 1], r"token_type has 3 values for 9 tokens; allowed: one for each"),
        ("tokens", ["h", "i", "hi", "Ġ", "Ġhi", "h", "x", "y"], r"tokens holds 'h' twice"),
        (
            "tokens",
            ["<bos>", "<eos>", "h", "i", "Ġ", "hi", "Ġhi", "<t>", "x日"],
            r"'x日', a plain token with letters that stand for no byte",
        ),
        ("merges", ["h i i"], r"its tokens and merges do not fit"),
        ("eot_token_id", 9, r"names token id 9 \(tokenizer.ggml.eot_token_id\); allowed: 0 to 8"),
        (
            "tokens",
            ["a b", "<eos>", "h", "i", "Ġ", "hi", "Ġhi", "<t>", "x"],
            r"'a b' can begin no text",
        ),
    ],
)
def test_lists_that_do_not_fit_are_named(
    key: str, value: object, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, {f"tokenizer.ggml.{key}": value})
    with pytest.raises(ModelError, match=message):
        load_tokenizer(open_source(path))


def read_all(path: Path) -> None:
    model_spec(str(path))
    weights = open_weights(open_source(path))
    for name in weights.names:
        weights.read(name)


def tokenize(path: Path) -> None:
    tokenizer = load_tokenizer(open_source(path))
    assert len(tokenizer.token_bytes) == tokenizer.vocab_size
    tokenizer.encode("hi <t>hi")


def test_any_wrong_byte_of_the_header_is_an_error_or_another_model(tmp_path: Path) -> None:
    """Nothing but ModelError comes of a damaged header, and no wait."""
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), about=TOKENS)
    header = path.read_bytes()[: min(t.start for t in GGUFFile(path).tensors.values())]
    for place in range(0, len(header), 7):
        for byte in (0, 255, header[place] ^ 1):
            overwrite(path, place, bytes([byte]))
            for use in (read_all, tokenize):
                with contextlib.suppress(ModelError):
                    use(path)
        overwrite(path, place, header[place : place + 1])


def overwrite(file: Path, place: int, content: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(content)


def test_any_kind_of_value_under_any_key_is_an_error_or_another_model(tmp_path: Path) -> None:
    """Each key of the metadata in turn with a value of each kind, so that all kinds are met."""
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), about=TOKENS)
    kinds = (0, 1, 2**40, -1, 0.5, math.nan, math.inf, True, "text", "", [], [1], [math.nan], [[1]])
    for key in GGUFFile(path).metadata:
        for wrong in kinds:
            opened = GGUFFile(path)
            opened.metadata[key] = wrong
            for read in (read_spec, load_tokenizer):
                with contextlib.suppress(ModelError):
                    read(opened)
