"""Shapes of models that the engine does not run: sizes as published, quantised bits, refusals."""

import json

import pytest

import workbench
from workbench.errors import ConfigError, ModelError
from workbench.models.registry import model_spec
from workbench.replay.advise import Pair, Question, start_up
from workbench.replay.shapes import shapes_of

# The models' config.json on the hub, as far as sizes go; parameters by their model cards.
QWEN3_4B = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36, "hidden_size": 2560,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 9728, "vocab_size": 151936, "max_position_embeddings": 40960,
            "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False,
            "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False,
            "torch_dtype": "bfloat16"}  # fmt: skip
PHI3_MINI = {"architectures": ["Phi3ForCausalLM"], "num_hidden_layers": 32, "hidden_size": 3072,
             "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 8192,
             "vocab_size": 32064, "max_position_embeddings": 131072, "sliding_window": 262144,
             "rope_scaling": {"type": "longrope", "long_factor": [1.0]},
             "tie_word_embeddings": False}  # fmt: skip
QWEN2_7B = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 28, "hidden_size": 3584,
            "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
            "vocab_size": 152064, "max_position_embeddings": 32768, "hidden_act": "silu",
            "tie_word_embeddings": False, "use_sliding_window": False,
            "sliding_window": 131072}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
W8A8 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {
    "num_bits": 8, "type": "int", "symmetric": True, "group_size": None}}}}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    def made(config, **more):
        (tmp_path / "config.json").write_text(json.dumps(config | more))
        return str(tmp_path)

    return made


@pytest.mark.parametrize(
    ("config", "billions", "kv_bytes"),
    [(QWEN3_4B, 4.02, 36 * 2 * 8 * 128 * 2), (PHI3_MINI, 3.82, 32 * 2 * 32 * 96 * 2)],
)
def test_sizes_are_those_that_are_published(folder, config, billions, kv_bytes) -> None:
    """Parameters to the digits of the model card, KV of a token in 16 bits; said to be none of the
    engine's."""
    found = shapes_of(folder(config))
    assert found.weight_bytes(2) / 2e9 == pytest.approx(billions, abs=0.01)
    assert found.spec.kv_bytes_per_token(2) == kv_bytes
    assert found.architecture == config["architectures"][0]
    assert "the engine here does not run it" in found.told
    known = shapes_of("llama-3.2-1b")
    assert known.spec == model_spec("llama-3.2-1b") and not known.told
    assert known.weight_bytes(2) == known.spec.weight_bytes(2)


@pytest.mark.parametrize(
    ("quantised", "gigabytes"),
    # Qwen2.5-7B-Instruct-AWQ's file holds 5.57 GB, -GPTQ-Int8's 8.9; fp8: 7.1 matrices, 1.1 tables
    [(AWQ, 5.57), ({"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True}, 8.8),
     ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 8.7), (W8A8, 8.7),
     ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, 5.85)],
)  # fmt: skip
def test_quantised_weights_take_what_their_files_do(folder, quantised, gigabytes) -> None:
    found = shapes_of(folder(QWEN2_7B, quantization_config=quantised))
    assert found.weight_bytes(2) / 1e9 == pytest.approx(gigabytes, rel=0.02)
    assert "bits a weight" in found.told


@pytest.mark.parametrize(
    ("change", "said"),
    [({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
     ({"num_experts": 64}, "supported"), ({"kv_lora_rank": 512}, "supported"),
     ({"layer_types": ["full_attention", "sliding_attention"]}, "supported"),
     ({"sliding_window": 4096, "use_sliding_window": True}, "supported"),
     ({"num_key_value_heads": None}, "num_key_value_heads"),
     ({"quantization_config": {"quant_method": "quip"}}, "sizes are known of awq, gptq"),
     ({"quantization_config": {"bits": "four"}}, "bits")],
)  # fmt: skip
def test_what_sizes_do_not_tell_is_refused(folder, change, said) -> None:
    with pytest.raises(ModelError, match=said):
        shapes_of(folder(QWEN3_4B, **change))


def test_a_quantised_model_and_a_cache_in_eight_bits_are_advised(folder) -> None:
    """A PRM of 4 bits fits where it would not in 16; KV in 8 bits is twice the tokens, its flag is
    told, and what no engine here runs is said."""
    name = folder(QWEN3_4B, quantization_config=AWQ)
    asked = {"n": 1, "in_flight": 1, "device": "rtx-4090", "total": "10GiB"}
    pairs = [Pair(Question("qwen2.5-1.5b-instruct", name, kv_bits=b, **asked)) for b in (16, 8)]
    plain, halved = (pair.needs[1] for pair in pairs)
    assert plain.block == 2 * halved.block and plain.weights == halved.weights < 3 << 30
    flags = [start_up(pair, 0.4) for pair in pairs]
    assert flags[1]["vLLM"][1]["kv-cache-dtype"] == "fp8"
    assert flags[1]["SGLang"][0]["kv-cache-dtype"] == "fp8_e5m2"
    assert "kv-cache-dtype" not in flags[0]["vLLM"][0]
    assert [*flags[1]["vLLM"][0]][-1] == "kv-cache-memory-bytes"
    found = workbench.advise("qwen2.5-1.5b-instruct", name, kv_bits=8, **asked)
    told = " ".join(found.notes)
    assert "Qwen3ForCausalLM) has the shapes of Llama's layers" in told
    assert "4.16 bits a weight" in told and "16-bit weights and 8-bit KV" in told
    with pytest.raises(ConfigError, match="kv_bits is 12; allowed: 8, 16"):
        Question(kv_bits=12)
