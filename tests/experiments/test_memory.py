"""Feasible shares: the ends are sharp, and they are the engines' own rule."""

from dataclasses import replace

import pytest

from workbench.errors import ModelError, OutOfMemory
from workbench.experiments.memory import feasibility, shares_of
from workbench.experiments.settings import RunSpec, sweep_config

TINY = sweep_config("quick")


def test_the_study_s_axis_is_feasible_for_the_tiny_pair():
    ends = shares_of(TINY)
    assert ends.low <= 0.08
    assert ends.high >= 0.5
    assert "is feasible in 64.0 MiB" in str(ends)


def test_the_ends_are_sharp():
    ends = shares_of(TINY)
    for end, inwards in ((ends.low, 1), (ends.high, -1)):
        assert ends.at(end + inwards * 1e-6).fits
        assert not ends.at(end - inwards * 1e-6).fits
    lacking = ends.at(ends.low - 0.01)
    assert lacking.lacks("llm") == pytest.approx(0.01 * ends.total, abs=2)
    assert lacking.lacks("prm") == 0


def test_one_request_of_the_longest_length_sets_the_end():
    whole = shares_of(replace(TINY, max_model_len=2048))
    half = shares_of(replace(TINY, max_model_len=1024))
    odd = shares_of(replace(TINY, max_model_len=1025))
    assert whole.llm.blocks == 128
    assert half.llm.blocks == 64
    assert odd.llm.blocks == 65  # rounded up to whole blocks
    assert half.low < odd.low < whole.low
    outside = shares_of(TINY, activations=(2**20, 0))
    assert outside.low == pytest.approx(whole.low + 1 / 64)


def test_a_total_too_small_for_both_has_no_share():
    ends = shares_of(TINY, total="16MiB")
    assert ends.low > ends.high
    assert "no share is feasible" in str(ends)


def test_activations_that_nobody_measured_yet_are_said():
    """Where the total pays for them the ends are too wide, and the sentence says so."""
    ends = shares_of(TINY, activations=None)
    assert str(ends).endswith("is feasible in 64.0 MiB, less what activations take")


def test_thesis_scale_is_feasible_where_the_study_says(tmp_path):
    """1B + 8B, bf16: 0.08 to 0.53 at 40 GiB, weights and KV only."""
    import json

    shapes = {
        "1b": (16, 2048, 32, 8, 64, 8192, True),
        "8b": (32, 4096, 32, 8, 128, 14336, False),
    }
    for name, (layers, hidden, heads, kv, dim, inner, tied) in shapes.items():
        (tmp_path / name).mkdir()
        config = {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "head_dim": dim,
            "intermediate_size": inner,
            "vocab_size": 128256,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": tied,
        }
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    pair = [str(tmp_path / name) for name in shapes]
    ends = shares_of(
        replace(TINY, llm=pair[0], prm=pair[1], total_memory="40GiB", dtype="bfloat16")
    )
    assert 0.05 < ends.low < 0.08
    assert 0.53 < ends.high < 0.66
    assert ends.llm.block_bytes == 512 * 2**10
    assert ends.prm.block_bytes == 2 * 2**20


def test_a_run_names_the_model_that_lacks_bytes():
    spec = RunSpec(sweep_config("quick"), 0.7, 0)
    found = feasibility(spec)
    assert not found.fits
    assert "the PRM (tiny-prm) lacks" in str(found)
    assert found.columns["prm_lacks_bytes"] == found.lacks("prm") > 0
    with pytest.raises(ModelError, match="no model"):
        shares_of(replace(TINY, prm="nothing-of-this-name"))


@pytest.mark.parametrize("model", ["tiny-solver", "tiny-prm"])
def test_the_rule_is_the_engine_s_own_to_the_byte(model):
    """One byte less than `least` is refused by the engine itself, with `least` it starts."""
    from workbench.engine.engine import Engine

    need = shares_of(replace(TINY, llm=model, prm=model)).llm
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "activations_in_total": False}
    engine = Engine(model, memory=need.least, **settings)
    assert engine.memory.weights == need.weights
    assert engine.memory.num_blocks == need.blocks == need.num_blocks(need.least)
    with pytest.raises(OutOfMemory, match="1 bytes are missing"):
        Engine(model, memory=need.least - 1, **settings)
