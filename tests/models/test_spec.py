"""Sizes and work follow from the shapes, and configs that mean another model are refused."""

import dataclasses
import json
import math

import pytest
import torch

from workbench.errors import ModelError
from workbench.models.llama import rotary_frequencies
from workbench.models.registry import CONFIGS
from workbench.models.spec import ARCHITECTURES, ModelSpec

LLAMA_1B = json.loads((CONFIGS / "llama-3.2-1b" / "config.json").read_text())
STRETCHED = LLAMA_1B.pop("rope_scaling")


def test_published_sizes() -> None:
    """Llama-3.2-1B: 1,235,814,400 parameters; 512 KiB of KV a 16-token block in bfloat16."""
    spec = ModelSpec.from_config(LLAMA_1B)
    assert spec.parameters() == 1_235_814_400
    assert spec.block_bytes(16, 2) == 512 * 1024
    assert spec.kv_bytes_per_token(2, tp=8, pp=4) == 2 * 4 * 1 * 64 * 2
    assert spec.dtype == "bfloat16"
    assert dataclasses.replace(spec, tied=False).parameters() == 1_235_814_400 + 128256 * 2048


def test_a_value_head_takes_the_vocabularys_place() -> None:
    """Qwen2.5-7B has 7,615,616,512 parameters; as a PRM its head is two layers with biases."""
    qwen = json.loads((CONFIGS / "qwen2.5-math-prm-7b" / "config.json").read_text())
    language = ModelSpec.from_config(qwen | {"architectures": ["Qwen2ForCausalLM"]})
    assert language.parameters() == 7_615_616_512
    assert (language.outputs, language.value_head) == (152064, None)
    judge = ModelSpec.from_config(qwen)
    head = 3584 * 3584 + 3584 + 2 * 3584 + 2
    assert judge.parameters() == 7_615_616_512 - 152064 * 3584 + head
    assert judge.parameters(pp=2) == language.parameters(pp=2)  # the end with the embedding
    assert judge.outputs == 2
    assert judge.block_bytes(16, 2) == 896 * 1024
    assert judge.flops(1, 0) - judge.flops(1, 0, logits=0) == 2 * (3584 * 3584 + 2 * 3584)
    skywork = ModelSpec.from_config(qwen | {"architectures": ["Qwen2ForPrmModel"]})
    assert judge.parameters() - skywork.parameters() == head - (3584 + 1)


def test_mistrals_window_is_known() -> None:
    """4,096 where a config does not say it, as `transformers` reads it."""
    cases = ({"sliding_window": None}, None), ({"sliding_window": 9}, 9), ({}, 4096)
    for given, expected in cases:
        mistral = LLAMA_1B | {"architectures": ["MistralForCausalLM"]} | given
        assert ModelSpec.from_config(mistral).sliding_window == expected
        assert ModelSpec.from_config(LLAMA_1B | given).sliding_window is None


def test_flops_are_two_a_weight_and_four_a_key() -> None:
    """One token: every matrix once; and scores and sums over each key seen."""
    spec = ModelSpec.from_config(LLAMA_1B)
    matrices = spec.parameters() - 2048 * (2 * 16 + 1)
    assert spec.flops(1, 0) == 2 * matrices + 16 * 4 * 2048
    assert spec.flops(1, 100) - spec.flops(1, 0) == 100 * 16 * 4 * 2048
    assert spec.flops(10, 0, logits=0) == sum(spec.flops(1, n, logits=0) for n in range(10))


def test_llama3_scaling_keeps_fast_rotations_and_stretches_slow_ones() -> None:
    """transformers 4 writes rope_theta beside rope_scaling, 5 writes both into rope_parameters."""
    plain = ModelSpec.from_config(LLAMA_1B)
    scaled = ModelSpec.from_config(LLAMA_1B | {"rope_scaling": STRETCHED})
    newer = {"rope_parameters": STRETCHED | {"rope_theta": 500000.0}, "rope_theta": None}
    assert scaled == ModelSpec.from_config(LLAMA_1B | newer)
    before, after = rotary_frequencies(plain), rotary_frequencies(scaled)
    assert torch.equal(before[:8], after[:8])
    torch.testing.assert_close(before[-4:] / 32, after[-4:])
    assert ((after <= before) & (after >= before / 32.001)).all()


TWO = "rope_parameters .* and rope_scaling .*; remove one"
YARN = {"type": "yarn", "factor": 2.0}
REFUSED: list[tuple[dict[str, object], str]] = [
    ({"architectures": ["OPTForCausalLM"]}, "OPTForCausalLM.*supported: LlamaForCausalLM"),
    ({"architectures": [["a"]]}, rf"\[\['a'\]\]; supported: {', '.join(ARCHITECTURES)}"),
    ({"use_sliding_window": True}, "use_sliding_window = True; supported: False"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; supported: 'silu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"intermediate_size": None}, "lacks 'intermediate_size'"),
    ({"num_key_value_heads": 5}, "heads = 32; supported: a multiple of num_key_value_heads = 5"),
    ({"head_dim": 60}, "head_dim = 60; supported: a multiple of 8"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000; supported: 10,000 at most"),
    ({"num_attention_heads": 4096, "head_dim": None}, "head_dim = 0; allowed: a whole number"),
    ({"rope_theta": 1e-30}, "rope_theta = 1e-30; supported: 1 or more"),
    ({"rope_scaling": {"rope_type": 3}}, "rope_scaling says rope_type = 3; allowed: a text"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
    ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6}}, TWO),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks 'low_freq_factor'"),
    ({"rope_scaling": STRETCHED | {"high_freq_factor": 1}}, r"1\.0; supported: more than low_freq"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "= 0; allowed: a whole"),
    ({"is_causal": False}, "is_causal = False; supported: True"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5; supported: 1\.0"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"factor = 0\.5; allowed: none beside"),
    ({"rope_parameters": {"full_attention": STRETCHED}}, "says full_attention = .*allowed: none"),
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_theta": 1e6}}, TWO),
    (
        {"rope_scaling": STRETCHED, "original_max_position_embeddings": 4096},
        "original_max_position_embeddings = 4096; allowed: 8192, as its rotations say",
    ),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'; allowed: true or false"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_other_models_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_config(LLAMA_1B | change)


def test_kv_heads_must_be_said_where_the_usual_number_is_another() -> None:
    """8 for Mistral, 32 for Qwen2, says transformers: no number of these weights."""
    silent = {name: value for name, value in LLAMA_1B.items() if name != "num_key_value_heads"}
    assert ModelSpec.from_config(silent).kv_heads == 32
    for name in ("MistralForCausalLM", "Qwen2ForCausalLM"):
        own = silent | {"architectures": [name]}
        with pytest.raises(ModelError, match="lacks 'num_key_value_heads'"):
            ModelSpec.from_config(own)
        assert ModelSpec.from_config(own | {"num_key_value_heads": None}).kv_heads == 32


NONE = [0, -1, math.nan, math.inf, "7", True, [4], {}, 10**400]


@pytest.mark.parametrize("wrong", [*NONE, 1.5, 4.0, 2**31])
def test_a_size_that_is_none_is_named(wrong: object) -> None:
    """Nothing is cut to a whole number, taken for a default, or left for a kernel to fall over."""
    for name in (name for name, value in LLAMA_1B.items() if type(value) is int):
        with pytest.raises(ModelError, match=rf"json says {name} = .*; allowed: a whole num"):
            ModelSpec.from_config(LLAMA_1B | {name: wrong})


@pytest.mark.parametrize("wrong", [*NONE, -0.5, 1e39])
def test_a_number_that_is_none_is_named(wrong: object) -> None:
    """Of theta, in each place, of epsilon and of the scaling; and a config that is no object."""
    changes = {name: {name: wrong} for name in ("rope_theta", "rms_norm_eps")}
    changes["rope_parameters says rope_theta"] = {"rope_parameters": {"rope_theta": wrong}}
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        changes[name] = {"rope_scaling": STRETCHED | {name: wrong}}
    for name, change in changes.items():
        with pytest.raises(ModelError, match=rf"{name} = .*; allowed: a number above 0"):
            ModelSpec.from_config(LLAMA_1B | change)
    said = r"config\.json holds .*; allowed: an object of settings"
    for config in ([], 5, "text", None):
        with pytest.raises(ModelError, match=said):
            ModelSpec.from_config(config)  # type: ignore[arg-type]
