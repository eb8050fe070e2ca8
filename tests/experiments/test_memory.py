"""Feasible shares: the ends are sharp, and they are the engines' own rule."""

from dataclasses import replace

import pytest

from workbench.errors import ModelError, OutOfMemory
from workbench.experiments.memory import shares_of
from workbench.experiments.plans import sweep_config

TINY = sweep_config("quick")


def test_the_study_s_axis_is_feasible_and_its_ends_are_sharp():
    ends = shares_of(TINY)
    assert ends.low <= 0.08 < 0.5 <= ends.high
    for end, inwards in ((ends.low, 1), (ends.high, -1)):
        assert ends.at(end + inwards * 1e-6).fits
        assert not ends.at(end - inwards * 1e-6).fits
    lacking = ends.at(ends.low - 0.01)
    assert lacking.lacks("llm") == pytest.approx(0.01 * ends.total, abs=2)
    assert lacking.lacks("prm") == 0


def test_one_request_of_the_longest_length_sets_the_end():
    whole, half, odd = (shares_of(replace(TINY, max_model_len=n)) for n in (2048, 1024, 1025))
    assert [ends.llm.blocks for ends in (whole, half, odd)] == [128, 64, 65], "whole blocks"
    assert half.low < odd.low < whole.low
    assert shares_of(TINY, activations=(2**20, 0)) == whole, "they are outside the total"
    inside = shares_of(replace(TINY, activations_in_total=True), activations=(2**20, 0))
    assert inside.low == pytest.approx(whole.low + 1 / 64)
    assert inside.high == whole.high


def test_activations_are_the_largest_step_s_buffers_where_nothing_was_measured():
    """Of both models at the thesis's limits; 8,192 tokens and 256 rows, two bytes a number."""
    thesis = sweep_config("thesis")
    ends, outside = shares_of(thesis), shares_of(replace(thesis, activations_in_total=False))
    sizes = (2048, 3072 + 2048 + 8192, 128256), (4096, 6144 + 4096 + 14336, 128256)
    buffers = [2 * (8192 * (2 * h + i) + 256 * (h + v)) for h, i, v in sizes]
    assert [ends.llm.activations, ends.prm.activations] == buffers
    assert ends.low - outside.low == pytest.approx(buffers[0] / ends.total)
    assert outside.high - ends.high == pytest.approx(buffers[1] / ends.total)
    lost = outside.at(0.3).blocks("prm") - ends.at(0.3).blocks("prm")
    assert lost == pytest.approx(buffers[1] / ends.prm.block_bytes, abs=1)
    assert str(ends).endswith("is feasible in 40.0 GiB, 912.2 MiB of activations in it")


def test_on_a_gpu_a_model_keeps_the_type_of_its_file():
    """As engines choose it; in float32 the pair would not fit 24 GiB."""
    pair = {name: f"dummy:{getattr(sweep_config('thesis'), name)}" for name in ("llm", "prm")}
    given = sweep_config("thesis", **pair, dtype="auto", total_memory="24GiB")
    there, named, here = (
        shares_of(replace(given, **own)) for own in ({}, {"dtype": "bfloat16"}, {"device": "cpu"})
    )
    assert there == named and there.low < there.high
    assert here.llm.weights == 2 * there.llm.weights


def test_what_is_not_feasible_or_not_known_is_said():
    ends = shares_of(TINY, total="16MiB")
    assert ends.low > ends.high
    assert "no share is feasible" in str(ends)
    assert str(shares_of(TINY)).endswith("is feasible in 64.0 MiB")
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
