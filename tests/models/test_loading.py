"""Weights load whole or not at all: every way a model can be wrong has its own clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench.errors import ConfigError, ModelError, OutOfMemory
from workbench.models.llama import Linear
from workbench.models.loading import load_model
from workbench.models.registry import find_model, held_bytes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MIDDLE = "model.layers.1.mlp.up_proj.weight"


def shapes() -> dict[str, tuple[int, ...]]:
    layer = {
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
    }
    ends = {"model.embed_tokens": (40, 32), "model.norm": (32,), "lm_head": (40, 32)}
    names = ends | {f"model.layers.{i}.{n}": shape for i in (0, 1) for n, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in names.items()}


def save(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small sound model."""
    generator = torch.Generator().manual_seed(0)
    save(tmp_path, {n: torch.randn(s, generator=generator) for n, s in shapes().items()}, CONFIG)
    return tmp_path


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def weights(product: Linear) -> torch.Tensor:
    """[outputs, inputs] of a product that is not gated."""
    outputs = product.shape[1]
    out = torch.empty(outputs, product.shape[0])
    product.kernels.columns(product.matrix, torch.arange(outputs), out)
    return out


def test_fused_weights_are_the_files_tensors(folder: Path) -> None:
    """Queries, keys, values side by side; gate and up so that their product is SwiGLU's."""
    model, tensors = load_model(str(folder)), load_file(folder / "model.safetensors")
    attention = [tensors[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert torch.equal(weights(model.layers[1].qkv), torch.cat(attention))
    gate, up = (tensors[f"model.layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up"))
    x, out = torch.randn(3, gate.shape[1]), torch.empty(3, len(gate))
    model.layers[1].gate_up.gated(x, out)
    torch.testing.assert_close(out, torch.nn.functional.silu(x @ gate.t()) * (x @ up.t()))
    assert torch.equal(weights(model.head), tensors["lm_head.weight"])
    assert model.source == folder


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({MIDDLE: None}, r"lacks the tensor '.*layers.1.mlp.up_proj.*\[48, 32\]"),
        ({"model.layers.2.x": torch.ones(1)}, r"1 tensors .* does not know.*model\.layers\.2\.x"),
        ({MIDDLE: torch.ones(47, 32)}, r"up_proj.* shape \[47, 32\]; its config says \[48, 32\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    folder: Path, edit: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors = load_file(folder / "model.safetensors") | edit
    save(folder, {name: t for name, t in tensors.items() if t is not None}, CONFIG)
    with pytest.raises(ModelError, match=message):
        load_model(str(folder))


@pytest.mark.parametrize("kept", [0, 4, 1000, -1])
def test_a_truncated_file_is_named(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors is missing, cut short or corrupt"):
        load_model(str(folder))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_tensor_with_one_number_that_is_not_finite_is_named(
    folder: Path, bad: float, dtype: torch.dtype
) -> None:
    """One damaged number anywhere is seen before the model runs, whatever the file's dtype."""
    tensors = {name: t.to(dtype) for name, t in load_file(folder / "model.safetensors").items()}
    tensors[MIDDLE][31, 17] = bad
    with pytest.raises(ModelError, match=rf"{MIDDLE} holds numbers that are not finite"):
        load_model(save(folder, tensors, CONFIG))


def test_rotary_tables_in_old_files_are_ignored(folder: Path) -> None:
    """What follows from the config may be there; nothing is lost by not reading it."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    load_model(str(folder))


def test_shards_give_the_same_model(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    tensors, other = load_file(folder / "model.safetensors"), tmp_path_factory.mktemp("shards")
    names = sorted(tensors)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, other / file)
    index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    (other / "config.json").write_text(json.dumps(CONFIG))
    one, two = load_model(str(folder)), load_model(str(other))
    for a, b in zip(one.products, two.products, strict=True):
        assert np.array_equal(a.matrix.data, b.matrix.data)
    (other / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors is missing"):
        load_model(str(other))


def test_half_precision_files_compute_in_float32(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    model, file = load_model(str(folder)), load_file(folder / "model.safetensors")
    assert model.dtype == torch.float32
    assert torch.equal(weights(model.head), file["lm_head.weight"].float())
    assert load_model(str(folder), dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype is 'int8'; allowed: 'auto', 'float32'"):
        load_model(str(folder), dtype="int8")


def test_a_dummy_needs_only_the_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        load_model(str(folder))
    one, two = (load_model(f"dummy:{folder}", seed=seed) for seed in (1, 1))
    assert torch.equal(weights(one.head), weights(two.head))
    assert one.fingerprint == two.fingerprint != load_model(f"dummy:{folder}", seed=2).fingerprint


def test_fingerprints_follow_the_weights(folder: Path) -> None:
    before = load_model(str(folder)).fingerprint
    assert load_model(str(folder)).fingerprint == before
    change(folder, lambda tensors: tensors[MIDDLE].mul_(1.001))
    assert load_model(str(folder)).fingerprint != before


def test_tied_weights_are_held_once(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    untied = load_file(folder / "model.safetensors")
    model = load_model(save(folder, untied, CONFIG | {"tie_word_embeddings": True}))
    tokens, out = torch.tensor([3, 0, 3]), torch.empty(3, model.spec.hidden)
    model.embedding(tokens, out)
    assert torch.equal(out, untied["model.embed_tokens.weight"][tokens])
    assert model.weight_bytes == model.spec.weight_bytes(4) + model.spec.table_bytes(4)


def test_a_folder_without_config_or_with_a_broken_one(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read as JSON"):
        load_model(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model(str(folder))


def test_the_hub_is_not_asked_when_a_snapshot_is_cached(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached snapshot answers; without one and without a network the error says what to do."""
    asked = []
    (tmp_path / "models--owner--name").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def snapshot(hub_id: str, local_files_only: bool = False, **_: object) -> str:
        asked.append(local_files_only)
        if not local_files_only:
            raise ConnectionError("no route to host")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert find_model("owner/name") == folder
    assert asked == [True]
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot be reached .*no route.*hf download owner/name"):
        load_model("owner/name")
    assert asked == [True, True, False]
    assert load_model("dummy:owner/name").spec.layers == 2


def refuse_reading(*_: object) -> None:
    raise AssertionError("weights were read")


def test_a_model_larger_than_memory_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real or dummy; the message holds what is needed, what is there and what is missing."""
    monkeypatch.setattr("workbench.models.loading.available_memory", lambda: 20_000)
    monkeypatch.setattr("workbench.models.loading.FolderWeights.read", refuse_reading)
    for name in (str(folder), f"dummy:{folder}"):
        with pytest.raises(OutOfMemory, match=r"weights take .* KiB \(torch.float32, .*missing"):
            load_model(name)


def test_the_published_sizes_are_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thesis's PRM as a dummy, in float32 on a machine with 24 GiB: no download, no wait."""
    monkeypatch.setattr("workbench.models.loading.available_memory", lambda: 24 * 2**30)
    with pytest.raises(OutOfMemory, match=r"take 30\.0 GiB .* 24\.0 GiB .* are available"):
        load_model("dummy:llama-3.1-8b-prm")
    monkeypatch.setattr("workbench.models.loading.available_memory", lambda: 10 * 2**30)
    with pytest.raises(OutOfMemory, match=r"take 15\.0 GiB \(torch.bfloat16; .*Take a smaller"):
        load_model("dummy:llama-3.1-8b-prm", dtype="bfloat16")


def test_the_bytes_that_are_foreseen_are_those_held(folder: Path) -> None:
    for name in (str(folder), f"dummy:{folder}", "tiny-prm"):
        model = load_model(name)
        assert model.weight_bytes == held_bytes(name, 4) + model.spec.table_bytes(4)
