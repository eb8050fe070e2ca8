"""`quantization=` does what it says: the bytes are foreseen, and nothing is left out silently."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.models.gguf_making import random_tensors, write_gguf
from tests.models.test_loading import CONFIG, folder, shapes, weights
from workbench.errors import ConfigError, OutOfMemory
from workbench.kernels.panels import INT4, pack_codes
from workbench.kernels.quantised import FORMATS, Quantised, quantise
from workbench.models.folders import model_spec, open_source
from workbench.models.loading import load_model, open_weights
from workbench.models.names import REGISTRY
from workbench.models.rounding import Listed, held_bytes, listed
from workbench.models.spec import ModelSpec

__all__ = ["folder"]  # the fixture
GIB = 2**30


class Built(Exception):
    """Raised where weights would be made."""


@pytest.fixture
def ten_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory available; no model is built."""

    def build(*_: object) -> None:
        raise Built

    monkeypatch.setattr("workbench.models.room.available_memory", lambda: 10 * GIB)
    monkeypatch.setattr("workbench.models.loading.build", build)


@pytest.mark.parametrize("name", REGISTRY)
def test_a_models_tensors_follow_from_its_shapes(name: str) -> None:
    """All of its parameters, so what is foreseen is what is held."""
    spec = model_spec(f"dummy:{name}")
    assert sum(math.prod(tensor.shape) for tensor in listed(spec)) == spec.parameters()
    assert held_bytes(listed(spec), 4) == spec.weight_bytes(4)


def test_matrices_are_those_of_the_file() -> None:
    spec = ModelSpec.from_config(CONFIG)
    found = sorted(tensor.shape for tensor in listed(spec) if len(tensor.shape) == 2)
    assert found == sorted(shape for shape in shapes().values() if len(shape) == 2)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_the_bytes_that_are_foreseen_are_those_held(quantization: str | None) -> None:
    kind = {"int8": "Q8_0", "int4": "Q4_1"}.get(quantization or "")
    model = load_model("tiny-solver", quantization=quantization)
    expected = held_bytes(listed(model.spec), 4, kind) + model.spec.table_bytes(4)
    assert model.weight_bytes == expected


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_memory_is_asked_for_what_rounding_leaves(ten_gib: None, quantization: str) -> None:
    """The thesis's PRM: 30 GiB in float32, 8 or 5 rounded."""
    with pytest.raises(Built):
        load_model("dummy:llama-3.1-8b-prm", quantization=quantization)


def test_a_model_too_large_is_told_the_roundings_that_would_fit(ten_gib: None) -> None:
    expected = r"take 30\.0 GiB .*Take quantization='int8' \(8\.0 GiB\), quantization='int4' \(4\.7"
    with pytest.raises(OutOfMemory, match=expected):
        load_model("dummy:llama-3.1-8b-prm")


def test_kernels_that_widen_weights_are_counted_so(ten_gib: None) -> None:
    with pytest.raises(OutOfMemory, match=r"take 15\.0 GiB \(torch.bfloat16; .*Take a smaller"):
        load_model("dummy:llama-3.1-8b-prm", dtype="bfloat16", quantization="int4")


def test_a_quantised_file_is_rounded_further(tmp_path: Path) -> None:
    """To what rounding the numbers that it holds gives."""
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), Kind.Q8_0)
    file, small = load_model(str(path)), load_model(str(path), quantization="int4")
    assert all(product.matrix.form.kind == INT4 for product in small.products)
    assert small.weight_bytes < file.weight_bytes * 0.8
    assert small.fingerprint != file.fingerprint
    held = open_weights(open_source(path)).take("lm_head.weight", (320, 64)).numpy()
    assert np.array_equal(weights(small.head).numpy(), quantise("Q4_1", held).dequantise())


@pytest.mark.parametrize(
    ("kind", "quantization", "allowed"),
    [
        (Kind.Q8_0, "int8", "'int4' or None, which keeps"),
        (Kind.Q4_1, "int8", "None, which keeps"),
        (Kind.Q4_1, "int4", "None, which keeps"),
        (Kind.Q4_0, "int4", "None, which keeps"),
    ],
)
def test_a_rounding_of_nothing_is_refused(
    kind: Kind, quantization: str, allowed: str, tmp_path: Path
) -> None:
    """It would be the same model under another name."""
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), kind)
    held = rf"would round nothing: the 16 matrices of .* are 16 {kind.name} \(of no more bits"
    with pytest.raises(ConfigError, match=rf"{held}.*Allowed here: {allowed}"):
        load_model(str(path), quantization=quantization)


def test_inputs_that_are_no_whole_blocks_are_refused_or_counted(folder: Path) -> None:
    """Of the folder's matrices two have 48 inputs; then all have."""
    rounded = r"rounds 14 of the 16 .*; 2 stay as they are: 2 \w+ \(with inputs that 32 does not"
    for name in (str(folder), f"dummy:{folder}"):
        with pytest.warns(RuntimeWarning, match=rounded):
            load_model(name, quantization="int8")
    sizes = {"hidden_size": 48, "num_attention_heads": 6}
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
    with pytest.raises(ConfigError, match=r"would round nothing.*32 does not divide.*here: None"):
        load_model(f"dummy:{folder}", quantization="int4")


def test_matrices_that_are_small_already_are_counted(tmp_path: Path) -> None:
    kinds = {"blk.0.ffn_down.weight": Kind.Q4_1}
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), Kind.Q8_0, kinds=kinds)
    with pytest.warns(RuntimeWarning, match=r"rounds 15 of the 16 .* 1 Q4_1 \(of no more bits"):
        load_model(str(path), quantization="int4")


def test_a_whole_rounding_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model("tiny-solver", quantization="int8")


def test_rounding_in_pieces_is_rounding_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 64}))
    whole = load_model(f"dummy:{folder}", quantization="int4")
    monkeypatch.setattr("workbench.models.loading._ROWS", 7)
    pieces = load_model(f"dummy:{folder}", quantization="int4")
    for one, other in zip(whole.products, pieces.products, strict=True):
        assert np.array_equal(one.matrix.data, other.matrix.data)
    tokens, rows = torch.arange(40), [torch.empty(40, 32) for _ in range(2)]
    for model, out in zip((whole, pieces), rows, strict=True):
        model.embedding(tokens, out)
    assert torch.equal(*rows)


def test_an_unknown_quantization_is_named() -> None:
    with pytest.raises(ConfigError, match=r"quantization is 'int5'; allowed: int8, int4, or None"):
        load_model("tiny-solver", quantization="int5")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_quantised_kind_takes_what_the_kernels_panels_take(kind: str) -> None:
    """More than in the file where float16 does not hold a scale that is itself a product."""
    form = FORMATS[kind]
    rows = np.random.default_rng(0).integers(0, 256, (64, 2 * 256 // form.columns * form.size))
    rows = rows.astype(np.uint8)
    for first in form.halves:
        rows.reshape(-1, form.size)[:, first + 1] &= 0xBF  # finite
    packed = pack_codes(Quantised(kind, rows, (64, 512)).codes())
    assert held_bytes([Listed("matrix", kind, (64, 512))], 4) == packed.nbytes
