"""Weights load whole or not at all: every way a model can be wrong has its own clear error."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.models.gguf_making import CONFIG, random_tensors
from tests.models.test_gguf import refused
from workbench.errors import ConfigError, ModelError, OutOfMemory
from workbench.models.llama import Linear
from workbench.models.loading import load_model
from workbench.models.registry import held_bytes

MIDDLE = "model.layers.1.mlp.up_proj.weight"


def save(folder: Path, tensors: dict[str, torch.Tensor], **changes: object) -> str:
    """A folder of these tensors and the small model's config; its name."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


Tensors = dict[str, torch.Tensor]


@pytest.fixture
def tensors() -> Tensors:
    return {name: torch.from_numpy(tensor) for name, tensor in random_tensors().items()}


@pytest.fixture
def folder(tmp_path: Path, tensors: Tensors) -> Path:
    """A small sound model."""
    return Path(save(tmp_path, tensors))


def weights(product: Linear) -> torch.Tensor:
    """[outputs, inputs] of a product that is not gated."""
    inputs, outputs = product.matrix.shape
    out = torch.empty(outputs, inputs)
    product.kernels.columns(product.matrix, torch.arange(len(out)), out)
    return out


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({MIDDLE: None}, r"lacks the tensor '.*layers.1.mlp.up_proj.*\[96, 64\]"),
        ({"model.layers.2.x": torch.ones(1)}, r"1 tensors .* does not know.*model\.layers\.2\.x"),
        ({MIDDLE: torch.ones(96, 64).char()}, r"is stored as torch\.int8; allowed: float"),
        ({MIDDLE: torch.ones(95, 64)}, r"up_proj.* shape \[95, 64\]; its config says \[96, 64\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, tensors, edit, message) -> None:
    """But not a tensor that follows from the config, as old files have it."""
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    load_model(save(tmp_path, tensors))
    kept = {name: t for name, t in (tensors | edit).items() if t is not None}
    refused(save(tmp_path, kept), message)


def test_a_file_that_is_truncated_missing_or_no_json_is_named(folder: Path) -> None:
    file, config = folder / "model.safetensors", folder / "config.json"
    whole = file.read_bytes()
    for kept in (0, 4, 1000, -1):
        file.write_bytes(whole[:kept])
        refused(folder, r"model\.safetensors is missing, cut short or corrupt")
    file.unlink()
    refused(folder, r"neither model\.safetensors nor")
    config.write_text("{")
    refused(folder, r"config\.json cannot be read as JSON")
    config.unlink()
    refused(folder, r"has no config\.json")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_tensor_with_one_number_that_is_not_finite_is_named(tmp_path, tensors, dtype) -> None:
    """One damaged number anywhere is seen before the model runs, whatever the file's dtype."""
    for bad in (float("nan"), float("inf"), -float("inf")):
        damaged = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        damaged[MIDDLE][31, 17] = bad
        refused(save(tmp_path, damaged), rf"{MIDDLE} holds numbers that are not finite")


@pytest.mark.parametrize(
    ("stored", "dtype", "number"),
    [
        (torch.float64, "float32", -1e39),
        (torch.float32, "float16", 1e5),
        (torch.bfloat16, "float16", 1e5),
    ],
)
def test_a_number_beyond_the_dtype_asked_is_named(tmp_path, tensors, stored, dtype, number) -> None:
    """It would be infinite, and its token never chosen, or always."""
    damaged = {name: tensor.to(stored) for name, tensor in tensors.items()}
    damaged[MIDDLE][31, 17] = number
    name = save(tmp_path, damaged)
    with pytest.raises(ModelError, match=rf"{MIDDLE} holds numbers beyond torch.{dtype}"):
        load_model(name, dtype=dtype, batch_invariant=dtype == "float32")


def test_shards_give_the_same_model(folder, tensors, tmp_path_factory) -> None:
    other, names = tmp_path_factory.mktemp("shards"), sorted(tensors)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, other / file)
    index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    (other / "config.json").write_text(json.dumps(CONFIG))
    one, two = load_model(str(folder)), load_model(str(other))
    for a, b in zip(one.products, two.products, strict=True):
        assert np.array_equal(a.matrix.data, b.matrix.data)
    save_file({n: tensors[n] for n in names[8:]}, other / "b.safetensors")
    refused(other, rf"{names[8]} is in .*a\.safetensors and in .*b\.safetensors")
    (other / "b.safetensors").unlink()
    refused(other, r"b\.safetensors is missing")


def test_half_precision_files_compute_in_float32(tmp_path: Path, tensors: Tensors) -> None:
    name = save(tmp_path, {n: t.bfloat16() for n, t in tensors.items()})
    model = load_model(name)
    assert model.dtype == torch.float32
    assert torch.equal(weights(model.head), tensors["lm_head.weight"].bfloat16().float())
    half = load_model(name, dtype="bfloat16", batch_invariant=False)
    assert half.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype is 'int8'; allowed: 'auto', 'float32'"):
        load_model(name, dtype="int8")


def test_fingerprints_follow_the_weights_and_a_dummy_needs_only_the_config(folder, tensors) -> None:
    before = load_model(str(folder)).fingerprint
    assert load_model(str(folder)).fingerprint == before
    assert load_model(save(folder, tensors | {MIDDLE: 2 * tensors[MIDDLE]})).fingerprint != before
    (folder / "model.safetensors").unlink()
    one, two = (load_model(f"dummy:{folder}") for _ in range(2))
    assert torch.equal(weights(one.head), weights(two.head))
    assert one.fingerprint == two.fingerprint != before


def test_tied_weights_are_held_once(folder: Path, tmp_path: Path, tensors: Tensors) -> None:
    """The bytes that are foreseen are those held."""
    for name in (str(folder), f"dummy:{folder}", "tiny-prm"):
        model = load_model(name)
        assert model.weight_bytes == held_bytes(name, 4) + model.spec.table_bytes(4)
    del tensors["lm_head.weight"]
    model = load_model(save(tmp_path, tensors, tie_word_embeddings=True))
    tokens, out = torch.tensor([3, 0, 3]), torch.empty(3, model.spec.hidden)
    model.embedding(tokens, out)
    assert torch.equal(out, tensors["model.embed_tokens.weight"][tokens])
    assert model.weight_bytes == model.spec.weight_bytes(4) + model.spec.table_bytes(4)
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}  # as some files have it
    same = load_model(save(tmp_path, tensors | copy, tie_word_embeddings=True))
    assert torch.equal(weights(same.head), weights(model.head))
    copy["lm_head.weight"][0, 0] += 1
    with pytest.raises(ModelError, match=r"lm_head\.weight is not the embedding"):
        load_model(save(tmp_path, tensors | copy, tie_word_embeddings=True))


def test_a_model_larger_than_memory_is_refused(folder, monkeypatch) -> None:
    """Before weights are read, real or dummy, with what is needed, there and missing."""
    monkeypatch.setattr("workbench.models.loading.available_memory", lambda: 20_000)
    monkeypatch.delattr("workbench.models.loading.FolderWeights.read")  # none is read
    for name in (str(folder), f"dummy:{folder}"):
        with pytest.raises(OutOfMemory, match=r"weights take .* KiB \(torch.float32, .*missing"):
            load_model(name)
    monkeypatch.setattr("workbench.models.loading.available_memory", lambda: 10 * 2**30)
    for dtype, size in (("float32", "30.0"), ("bfloat16", "15.0")):  # the thesis's PRM
        with pytest.raises(OutOfMemory, match=rf"take {size} GiB \(torch.{dtype}.*Take a smaller"):
            load_model("dummy:llama-3.1-8b-prm", dtype=dtype, batch_invariant=False)
