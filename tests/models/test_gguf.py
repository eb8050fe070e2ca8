"""A GGUF file gives the model it was made of, or nothing: every fault has its own error."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from tests.models.gguf_making import (
    BIASES,
    HEAD_DIM,
    HIDDEN,
    NAMES,
    VOCAB,
    own_tensors,
    random_tensors,
    write_gguf,
)
from tests.models.plain_driver import Driver
from workbench.core import WantedLogits
from workbench.errors import ModelError
from workbench.kernels.quantised import FORMATS, Quantised
from workbench.models.folders import model_spec, open_source
from workbench.models.gguf_file import KINDS, PLAIN, GGUFFile
from workbench.models.layers import rotary_frequencies
from workbench.models.loading import load_model, open_weights
from workbench.models.spec import ModelSpec

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small sound file."""
    return write_gguf(tmp_path / "model.gguf", random_tensors())


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_tensors_are_those_the_file_was_made_of(kind: Kind, tmp_path: Path) -> None:
    """Under Hugging Face's names, rows in its order; matrices with the values their kind holds."""
    tensors = random_tensors()
    weights = open_weights(open_source(write_gguf(tmp_path / "model.gguf", tensors, kind)))
    for name, tensor in tensors.items():
        held = quants.dequantize(quants.quantize(tensor, kind), kind) if tensor.ndim > 1 else tensor
        given = weights.take(name, tensor.shape)
        assert np.array_equal(given.float().numpy(), held), name
    weights.refuse_leftovers()


def test_quantised_weights_are_given_as_they_are_stored(tmp_path: Path) -> None:
    """Bytes mapped from the file, not copied; the values are those of take."""
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), Kind.Q4_1)
    weights = open_weights(open_source(path))
    for name, (_, shape) in NAMES.items():
        stored = weights.take_stored(name, shape)
        assert isinstance(stored, Quantised) == (len(shape) == 2)
        if isinstance(stored, Quantised):
            assert stored.kind == "Q4_1"
            assert np.array_equal(stored.dequantise(), weights.take(name, shape).numpy())
    down = weights.take_stored("model.layers.0.mlp.down_proj.weight", (HIDDEN, 96))
    assert not down.rows.flags.owndata
    assert not down.rows.flags.writeable


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K])
def test_kinds_of_256_columns_are_read(kind: Kind, tmp_path: Path) -> None:
    """Any bytes, with finite scales, since the gguf package cannot quantise to these kinds."""
    form = FORMATS[kind.name]
    rows = np.random.default_rng(1).integers(0, 256, (8, 2 * form.size), dtype=np.uint8)
    for first in form.halves:
        rows.reshape(-1, form.size)[:, first + 1] &= 0xBF
    path = write_gguf(tmp_path / "model.gguf", {}, kind, extra={"own": rows})
    given = open_weights(open_source(path)).take("own", (8, 512)).numpy()
    assert np.array_equal(given, quants.dequantize(rows, kind))


@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_scales_that_are_no_numbers_are_refused(wrong: float, tmp_path: Path) -> None:
    """In one block of one matrix: named before anything is computed with it."""
    rows = quants.quantize(random_tensors()[QUERY], Kind.Q4_1)
    rows[5, 2:4] = np.array([wrong], np.float16).view(np.uint8)
    tensors = random_tensors()
    del tensors[QUERY]
    extra = {"blk.1.attn_q.weight": rows}
    path = write_gguf(tmp_path / "model.gguf", tensors, Kind.Q4_1, extra=extra)
    with pytest.raises(ModelError, match=r"1\.self_attn\.q_proj.* holds numbers that are not"):
        load_model(str(path))


def test_the_reader_knows_the_kinds_that_can_be_computed_with() -> None:
    """Numbers, names and sizes are the gguf package's; the quantised ones are FORMATS."""
    for number, (name, columns, size) in KINDS.items():
        assert Kind[name] == number
        assert gguf.GGML_QUANT_SIZES[Kind(number)] == (columns, size)
    assert {name for name, _, _ in KINDS.values()} == {*PLAIN, *FORMATS}


def test_a_file_that_mixes_kinds_computes_what_it_would_in_float32(tmp_path: Path) -> None:
    """Values finer than queries and keys, as files have them: equal bits, in fewer bytes."""
    tensors, own = random_tensors(), {f"blk.{i}.attn_v.weight": Kind.Q8_0 for i in range(2)}
    mixed = write_gguf(tmp_path / "mixed.gguf", tensors, Kind.Q4_1, kinds=own)
    weights = open_weights(open_source(mixed))
    held = {name: weights.take(name, t.shape).numpy() for name, t in tensors.items()}
    plain = write_gguf(tmp_path / "plain.gguf", held)
    models = [load_model(str(path)) for path in (mixed, plain)]
    assert models[0].layers[1].qkv.nbytes < models[1].layers[1].qkv.nbytes / 4
    drivers = [Driver(model) for model in models]
    for tokens in ([*range(40)], [7]):  # prefill, then decoding
        wanted = (WantedLogits(np.arange(len(tokens)), np.arange(VOCAB)),)
        one, other = (d.step([("a", tokens, False)], wanted).wanted[0] for d in drivers)
        assert np.array_equal(one, other)


def test_the_spec_is_that_of_the_config(file: Path) -> None:
    spec = model_spec(str(file))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": float(np.float32(1e-5)),
    }
    assert spec == ModelSpec.from_config(config)


def test_without_an_output_matrix_the_embedding_is_it(file: Path, tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors["lm_head.weight"]
    path = write_gguf(tmp_path / "tied.gguf", tensors)
    assert model_spec(str(path)).tied
    assert load_model(str(path)).weight_bytes < load_model(str(file)).weight_bytes


def test_qwen2_has_biases_and_rows_as_they_are(tmp_path: Path) -> None:
    tensors = random_tensors(NAMES | BIASES)
    path = write_gguf(tmp_path / "model.gguf", tensors, arch="qwen2")
    weights = open_weights(open_source(path))
    for name, tensor in tensors.items():
        assert np.array_equal(weights.take(name, tensor.shape).numpy(), tensor), name
    assert model_spec(str(path)).architecture == "Qwen2ForCausalLM"
    load_model(str(path))


def rope_factors(factor: float) -> np.ndarray:
    """What a converter stores for Llama 3: plain over stretched rotations."""
    config = {"num_attention_heads": 4, "hidden_size": HIDDEN, "num_hidden_layers": 1}
    config |= {"architectures": ["LlamaForCausalLM"], "intermediate_size": 96, "vocab_size": 9}
    config |= {"max_position_embeddings": 128, "rope_theta": 500000.0}
    stretch = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    stretch |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    plain, scaled = (
        rotary_frequencies(ModelSpec.from_config(c))
        for c in (config, config | {"rope_scaling": stretch})
    )
    return (plain / scaled).numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors_become_the_config_they_came_from(factor: float, tmp_path: Path) -> None:
    about = {"llama.rope.freq_base": 500000.0}
    extra = {"rope_freqs.weight": rope_factors(factor)}
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), extra=extra, about=about)
    scaling = model_spec(str(path)).rope_scaling
    assert scaling is not None
    assert (scaling.factor, scaling.original_max_position) == (factor, 8192)
    open_weights(open_source(path)).take(QUERY, (HIDDEN, HIDDEN))
    load_model(str(path))


def test_other_factors_are_refused(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.linspace(1, 3, HEAD_DIM // 2).astype(np.float32)}
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), extra=extra)
    with pytest.raises(ModelError, match=r"rope_freqs.weight stretches .* otherwise than Llama 3"):
        model_spec(str(path))


def test_another_architecture_is_refused_with_the_list(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {}, arch="gemma2", extra={"a": np.ones(2, "f4")})
    with pytest.raises(ModelError, match=r"architecture 'gemma2'; supported: 'llama', 'qwen2'"):
        load_model(str(path))


@pytest.mark.parametrize("kind", [Kind.Q5_0, Kind.Q5_K, Kind.IQ4_NL])
def test_another_quantisation_is_named(kind: Kind, tmp_path: Path) -> None:
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    rows = np.zeros((2, 256 // columns * size), np.uint8)
    path = write_gguf(tmp_path / "model.gguf", {}, kind, extra={"blk.0.ffn_up.weight": rows})
    with pytest.raises(ModelError, match=rf"ffn_up.weight is stored as {kind.name}; .*Q4_K, Q6_K"):
        load_model(str(path))


@pytest.mark.parametrize("kept", [3, 16, 40, 700, 4000, -1])
def test_a_truncated_file_is_named(file: Path, kept: int) -> None:
    """Cut in the header, in the list of tensors, or in the last tensor's bytes."""
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.gguf is (cut short or corrupt|no GGUF)"):
        load_model(str(file))


def test_empty_files_and_other_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(str(path))
    path.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ModelError, match="no GGUF file: it begins with b'PK"):
        load_model(str(path))
    path.write_bytes(b"GGUF\x00\x00\x00\x03" + bytes(40))
    with pytest.raises(ModelError, match="GGUF version 50331648; supported: 2 and 3"):
        load_model(str(path))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors[QUERY]
    path = write_gguf(tmp_path / "model.gguf", tensors)
    with pytest.raises(ModelError, match=r"model.gguf lacks the tensor '.*1.self_attn.q_proj"):
        load_model(str(path))


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.bias": np.ones(HIDDEN, np.float32)}
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), extra=extra)
    with pytest.raises(ModelError, match=r"1 tensors .* does not know.*0\.self_attn\.q_proj\.bias"):
        load_model(str(path))


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((95, HIDDEN), np.float32)
    path = write_gguf(tmp_path / "model.gguf", tensors)
    with pytest.raises(ModelError, match=r"up_proj.* shape \[95, 64\]; its config says \[96, 64\]"):
        load_model(str(path))


def test_opening_reads_no_weights(file: Path) -> None:
    """Shapes, kinds and places come from the header; the bytes stay where they are."""
    opened = GGUFFile(file)
    expected = own_tensors(random_tensors(), "llama")
    assert {n: t.shape for n, t in opened.tensors.items()} == {
        n: t.shape for n, t in expected.items()
    }
    for name, tensor in expected.items():
        assert np.array_equal(opened.data(name).view(np.float32).reshape(tensor.shape), tensor)
        assert not opened.data(name).flags.owndata
