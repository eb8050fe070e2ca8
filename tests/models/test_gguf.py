"""A GGUF file gives the model it was made of, or nothing: every fault has its own error."""

import math
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from tests.kernels.test_products import random_blocks
from tests.models import gguf_making as making
from tests.models.gguf_making import NAMES, SIZES, TOKENS, VOCAB, random_tensors, write_gguf
from tests.models.plain_driver import Driver
from tests.models.test_spec import STRETCHED
from workbench.core import WantedLogits
from workbench.errors import ModelError
from workbench.kernels.cpu.products import pack_codes
from workbench.kernels.quantised import FORMATS, Quantised
from workbench.models.gguf import KINDS, PLAIN, GGUFFile
from workbench.models.llama import rotary_frequencies
from workbench.models.loading import load_model, open_weights
from workbench.models.registry import load_tokenizer, model_spec, open_source, read_spec
from workbench.models.spec import ModelSpec

QUERY = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = {"model.embed_tokens.weight": random_tensors()["model.embed_tokens.weight"]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small sound file."""
    return write_gguf(tmp_path / "model.gguf", random_tensors())


def values(part: Any) -> np.ndarray:
    """A part's numbers, quantised or not."""
    return part.dequantise() if isinstance(part, Quantised) else part.float().numpy()


def refused(path: Path | str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(str(path))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_tensors_are_those_the_file_was_made_of(kind: Kind, tmp_path: Path) -> None:
    """Quantised ones are the file's mapped bytes, but for rows that change their order."""
    tensors = random_tensors()
    weights = open_weights(open_source(write_gguf(tmp_path / "model.gguf", tensors, kind)))
    for name, tensor in tensors.items():
        held, part = tensor, weights.take(name, tensor.shape)
        if tensor.ndim > 1:
            held = quants.dequantize(quants.quantize(tensor, kind), kind)
        assert np.array_equal(values(part), held), name
        if tensor.ndim > 1 and kind.name in FORMATS:
            assert part.kind == kind.name
            assert part.rows.flags.owndata == any(p in name for p in ("q_proj", "k_proj"))
    weights.refuse_leftovers()


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_of_every_quantised_kind_are_read_and_foreseen(kind: str, tmp_path: Path) -> None:
    """The kernels hold more bytes where a scale is itself a product."""
    drawn = random_blocks(kind, 64, 512)
    path = write_gguf(tmp_path / "model.gguf", {}, Kind[kind], extra={"own": drawn.rows})
    given = open_weights(open_source(path)).take("own", (64, 512))
    assert np.array_equal(values(given), drawn.dequantise())
    assert GGUFFile(path).held_bytes(4) == pack_codes(drawn.codes()).nbytes


def test_the_reader_knows_the_kinds_that_can_be_computed_with() -> None:
    """Numbers, names and sizes are the gguf package's; the quantised ones are FORMATS."""
    for number, (name, *sizes) in KINDS.items():
        assert Kind[name] == number and gguf.GGML_QUANT_SIZES[Kind(number)] == tuple(sizes)
    sizes = {name: tuple(sizes) for name, *sizes in KINDS.values() if name not in PLAIN}
    assert sizes == {name: (form.columns, form.size) for name, form in FORMATS.items()}


def test_a_file_that_mixes_kinds_computes_what_it_would_in_float32(tmp_path: Path) -> None:
    """Values finer than queries and keys, as files have them: equal bits, in fewer bytes."""
    tensors, own = random_tensors(), {f"blk.{i}.attn_v.weight": Kind.Q8_0 for i in range(2)}
    mixed = write_gguf(tmp_path / "mixed.gguf", tensors, Kind.Q4_1, kinds=own)
    weights = open_weights(open_source(mixed))
    held = {name: values(weights.take(name, t.shape)) for name, t in tensors.items()}
    plain = write_gguf(tmp_path / "plain.gguf", held)
    models = [load_model(str(path)) for path in (mixed, plain)]
    assert models[0].layers[1].qkv.nbytes < models[1].layers[1].qkv.nbytes / 4
    drivers = [Driver(model) for model in models]
    for tokens in ([*range(40)], [7]):  # prefill, then decoding
        wanted = (WantedLogits(np.arange(len(tokens)), np.arange(VOCAB)),)
        one, other = (d.step([("a", tokens)], wanted).wanted[0] for d in drivers)
        assert np.array_equal(one, other)


def test_without_an_output_matrix_the_embedding_is_it(file: Path, tmp_path: Path) -> None:
    """And scalings that stretch nothing are read."""
    plain = model_spec(str(file))
    assert plain == ModelSpec.from_config(making.CONFIG)
    tensors = random_tensors()
    del tensors["lm_head.weight"]
    path = write_gguf(tmp_path / "tied.gguf", tensors)
    assert model_spec(str(path)).tied
    assert load_model(str(path)).weight_bytes < load_model(str(file)).weight_bytes
    for key, neutral in product(("rope.scale_linear", "rope.scaling.factor"), (0.0, 1)):
        about = {f"llama.{key}": neutral, "llama.rope.scaling.type": "none"}
        path = write_gguf(tmp_path / "model.gguf", random_tensors(), about=about)
        assert model_spec(str(path)) == plain


def test_qwen2_has_biases_and_rows_as_they_are(tmp_path: Path) -> None:
    tensors = random_tensors(NAMES | making.BIASES)
    path = write_gguf(tmp_path / "model.gguf", tensors, arch="qwen2")
    weights = open_weights(open_source(path))
    for name, tensor in tensors.items():
        assert np.array_equal(values(weights.take(name, tensor.shape)), tensor), name
    assert load_model(str(path)).spec.architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors_become_the_config_they_came_from(factor: float, tmp_path: Path) -> None:
    """A converter stores plain over stretched rotations; other factors are refused."""
    config = making.CONFIG | {"rope_theta": 500000.0}
    configs = (config, config | {"rope_scaling": STRETCHED | {"factor": factor}})
    plain, scaled = (rotary_frequencies(ModelSpec.from_config(c)) for c in configs)
    about = {"llama.rope.freq_base": 500000.0}
    extra = {"rope_freqs.weight": (plain / scaled).numpy()}
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), extra=extra, about=about)
    scaling = load_model(str(path)).spec.rope_scaling
    assert scaling is not None
    assert (scaling.factor, scaling.original_max_position) == (factor, 8192)
    for wrong in (2.0, 0.0, 0.5, math.nan, math.inf):
        extra = {"rope_freqs.weight": np.full(making.HEAD_DIM // 2, wrong, np.float32)}
        path = write_gguf(tmp_path / "model.gguf", EMBEDDING, extra=extra)
        refused(path, r"rope_freqs.weight stretches rotations otherwise than Llama 3")


def write(folder: Path, about: dict[str, Any], arch: str = "llama") -> Path:
    """A file with a tokenizer and, of the tensors, what the shapes are read from."""
    return write_gguf(folder / "model.gguf", EMBEDDING, arch=arch, about=TOKENS | about)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"rope.scaling.type": "yarn"}, r"rope\.scaling\.type = 'yarn'; supported: 'none'"),
        ({"rope.scaling.factor": 8.0}, r"rope\.scaling\.factor = 8\.0; allowed: none, or 1"),
        ({"rope.dimension_count": 8}, r"rope.dimension_count = 8; supported: the head's 16"),
        ({"attention.head_count": [4, 4]}, r"head_count = \[4, 4\] \(2 values\); allowed: a whole"),
        ({"block_count": None}, r"lacks 'llama.block_count'; needed: a whole number from 1"),
        ({"expert_count": 8}, "mixture of experts"),
        ({"attention.causal": False}, r"attention\.causal = False; supported: True only"),
    ],
)
def test_other_models_are_refused(about: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(write(tmp_path, {f"llama.{key}": value for key, value in about.items()}), message)


def test_a_window_bounds_a_llama_file_and_is_refused_in_a_qwen2_file(tmp_path: Path) -> None:
    """Converters write Mistral as llama with a window; 0 is none, the whole context hides none."""
    for arch, window, expected in (
        ("llama", 64, ("MistralForCausalLM", 64)),
        ("llama", 0, ("LlamaForCausalLM", None)),
        ("qwen2", 128, ("Qwen2ForCausalLM", None)),
    ):
        spec = model_spec(str(write(tmp_path, {f"{arch}.attention.sliding_window": window}, arch)))
        assert (spec.architecture, spec.sliding_window) == expected
    path = write(tmp_path, {"qwen2.attention.sliding_window": 64}, "qwen2")
    refused(path, r"sliding_window = 64; supported: none, .* of 128")


def test_another_quantisation_is_named(tmp_path: Path) -> None:
    for kind in (Kind.Q5_0, Kind.Q5_K, Kind.IQ4_NL):
        columns, size = gguf.GGML_QUANT_SIZES[kind]
        rows = np.zeros((2, 256 // columns * size), np.uint8)
        path = write_gguf(tmp_path / "model.gguf", {}, kind, extra={"blk.0.ffn_up.weight": rows})
        refused(path, rf"ffn_up.weight is stored as {kind.name}; .*Q4_K, Q6_K")


def test_a_truncated_file_or_what_is_none_is_named(file: Path, tmp_path: Path) -> None:
    """Cut in the header, in the list of tensors, or in the last tensor's bytes."""
    path, whole = file, file.read_bytes()
    for kept in (3, 16, 40, 700, 4000, -1):
        file.write_bytes(whole[:kept])
        refused(file, r"model\.gguf is (cut short or corrupt|no GGUF)")
    for content, message in (
        (b"", "cannot be read"),
        (b"PK\x03\x04 and more", "no GGUF file: it begins with b'PK"),
        (b"GGUF\x00\x00\x00\x03" + bytes(40), "GGUF version 50331648; supported: 2 and 3"),
    ):
        path.write_bytes(content)
        refused(path, message)
    refused(write(tmp_path, {"general.alignment": 0}), r"corrupt \(general.alignment is 0\)")
    refused(write(tmp_path, {}, "gemma2"), r"architecture 'gemma2'; supported: 'llama'")
    refused(write_gguf(path, {}, extra={"a": np.ones(2, "f4")}), "lacks the tensor 'token_embd")


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """By the names of Hugging Face; a scale that is no number is one of a matrix's."""
    path, tensors = tmp_path / "model.gguf", random_tensors()
    rows = quants.quantize(tensors.pop(QUERY), Kind.Q4_1)
    refused(write_gguf(path, tensors), r"model.gguf lacks the tensor '.*1.self_attn.q_proj")
    for wrong in (np.inf, np.nan):
        rows[5, 2:4] = np.array([wrong], np.float16).view(np.uint8)
        write_gguf(path, tensors, Kind.Q4_1, extra={"blk.1.attn_q.weight": rows})
        refused(path, r"1\.self_attn\.q_proj.* holds numbers that are not finite")


def test_what_is_there_twice_is_refused(tmp_path: Path) -> None:
    """Nothing is dropped silently: not the first of two."""
    path, tensors = tmp_path / "model.gguf", random_tensors()
    extra = {"dup.aaa": np.ones(4, "f4"), "dup.bbb": np.zeros(4, "f4")}
    content = write_gguf(path, tensors, extra=extra).read_bytes()
    path.write_bytes(content.replace(b"dup.bbb", b"dup.aaa"))
    refused(path, "dup.aaa is there twice")
    about = {"llama.rope.freq_base": 10000.0, "llama.rope.freq_basf": 5.0}
    content = write_gguf(path, tensors, about=about).read_bytes()
    path.write_bytes(content.replace(b"freq_basf", b"freq_base"))
    refused(path, "llama.rope.freq_base is there twice")
    write_gguf(path, tensors, extra={"model.norm.weight": np.full(4, 9, "f4")})
    refused(path, "holds a tensor under two names")


def test_a_file_that_does_not_say_has_keys_of_every_head(tmp_path: Path) -> None:
    """As converters write older Llamas, whose configs do not say either."""
    tensors, heads = random_tensors(), SIZES["attention.head_count"]
    for name in list(tensors):
        if ".k_proj." in name or ".v_proj." in name:
            tensors[name] = tensors[name.replace("k_proj", "q_proj").replace("v_proj", "q_proj")]
    said, silent = ({"llama.attention.head_count_kv": count} for count in (heads, None))
    expected = load_model(str(write_gguf(tmp_path / "model.gguf", tensors, about=said)))
    found = load_model(str(write_gguf(tmp_path / "older.gguf", tensors, about=silent)))
    assert found.spec.kv_heads == expected.spec.kv_heads == heads
    for one, other in zip(found.products, expected.products, strict=True):
        assert np.array_equal(one.matrix.data, other.matrix.data)


def use(opened: GGUFFile) -> None:
    """Everything that is read of a file; ModelError is all that may come of it."""
    with suppress(ModelError):
        read_spec(opened)
    with suppress(ModelError):
        tokenizer = load_tokenizer(opened)
        assert len(tokenizer.token_bytes) == tokenizer.vocab_size
        tokenizer.encode("hi <t>hi")


def test_any_wrong_byte_of_the_header_is_an_error_or_another_model(tmp_path: Path) -> None:
    """Nothing but ModelError comes of a damaged header, and no wait."""
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), about=TOKENS)
    header = path.read_bytes()[: min(t.start for t in GGUFFile(path).tensors.values())]
    for place in range(0, len(header), 23):
        for byte in (0, 255, header[place] ^ 1, header[place]):  # the last mends it
            with path.open("r+b") as opened:
                opened.seek(place)
                opened.write(bytes([byte]))
            with suppress(ModelError):
                use(GGUFFile(path))
                weights = open_weights(open_source(path))
                for name in weights.names:
                    weights.read(name)


def test_any_kind_of_value_under_any_key_is_an_error_or_another_model(tmp_path: Path) -> None:
    opened = GGUFFile(write_gguf(tmp_path / "model.gguf", random_tensors(), about=TOKENS))
    kinds = (None, 0, 1, 2**40, -1, 0.5, math.nan, math.inf, True, "text", "", [], [1], [[1]])
    for key, sound in dict(opened.metadata).items():
        for wrong in kinds:
            opened.metadata[key] = wrong
            use(opened)
        opened.metadata[key] = sound
    opened.metadata["general.architecture"] = 5
    with pytest.raises(ModelError, match=r"general\.architecture.*a text"):
        read_spec(opened)
