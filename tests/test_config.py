"""Settings refuse what they do not know, say what is allowed, and are named by content."""

import math
from itertools import product

import numpy as np
import pytest

from workbench.config import (
    EngineConfig,
    Range,
    SearchConfig,
    StrategyConfig,
    SweepConfig,
    format_size,
    parse_size,
)
from workbench.core import SamplingParams, node_seed
from workbench.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "size"),
    [(1, 1), ("64MiB", 64 << 20), ("1 GiB", 1 << 30), ("1.5kib", 1536), ("2kB", 2000), ("7", 7)],
)
def test_sizes_are_bytes_or_text(given, size):
    assert parse_size(given) == size
    assert [format_size(s) for s in (5, 1536, 64 << 20)] == ["5 B", "1.5 KiB", "64.0 MiB"]


@pytest.mark.parametrize("given", [0, -1, "", "apples", "3 apples", True, "0MiB", "0.5", None])
def test_what_is_no_size_is_refused_by_name(given):
    with pytest.raises(ConfigError, match="is no size"):
        parse_size(given)


def test_a_configuration_survives_a_round_trip_and_knows_its_keys():
    for config in (EngineConfig(), SearchConfig(), StrategyConfig(), SweepConfig()):
        assert type(config).from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match=r"'block_sise'.*Did you mean 'block_size'"):
        EngineConfig.from_dict({"block_sise": 8})


@pytest.mark.parametrize(
    ("kind", "settings", "complaint"),
    [
        (EngineConfig, {"memory": 1.5}, "share in"),
        (EngineConfig, {"memory": "1GiB", "num_blocks": 4}, "memory and num_blocks"),
        (EngineConfig, {"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_seqs"),
        (EngineConfig, {"dtype": "q"}, r"allowed: auto, float32, float16, bfloat16\.$"),
        (SearchConfig, {"voting": "weightd"}, r"majority, naive\. Did you mean 'weighted'\?$"),
        (StrategyConfig, {"n": 4, "beam_width": 8}, "<= n"),
        (SearchConfig, {"problem_batching": "none"}, "continuous, static"),
        (SearchConfig, {"min_p": 1.0}, "in \\[0, 1\\)"),
        (StrategyConfig, {"strategy": "best_of_n", "finish_at_limit": True}, "beam_search"),
        (StrategyConfig, {"strategy": "dora", "sharing_weight": 0.0}, "ets, here dora"),
        (SweepConfig, {"shares": (0.3, 1.0)}, "in \\(0, 1\\)"),
        (SamplingParams, {"stop": ("",)}, "non-empty"),
        (SamplingParams, {"stop": ("a\ud800",)}, "whole characters"),
        (SamplingParams, {"temperature": float("nan")}, "temperature"),
        (SamplingParams, {"top_k": 10**30}, "top_k"),
        (SamplingParams, {"stop_token_ids": (-1,)}, "token ids, >= 0"),
    ],
)
def test_a_bad_value_says_what_is_allowed(kind, settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        kind(**settings)


@pytest.mark.parametrize(
    ("kind", "name", "given", "allowed"),
    [
        (EngineConfig, "block_size", 16.0, "a whole number"),
        (EngineConfig, "num_blocks", True, "a whole number or None"),
        (EngineConfig, "memory", [1], "a number or text or None"),
        (EngineConfig, "batch_invariant", 1, "true or false"),
        (SearchConfig, "temperature", "x", "a number"),
        (SweepConfig, "seeds", "01", "a list of whole numbers"),
        (SweepConfig, "shares", 0.3, "a list of numbers"),
        (SamplingParams, "stop", (3,), "a list of texts"),
    ],
)
def test_values_of_another_type_are_refused_with_what_is_allowed(kind, name, given, allowed):
    with pytest.raises(ConfigError) as raised:
        kind(**{name: given})
    assert str(raised.value) == f"{kind.__name__}.{name} is {given!r}; allowed: {allowed}."


def test_values_that_lose_nothing_are_put_into_the_declared_type():
    """Equal settings are written alike, whether typed, read from JSON or computed by numpy."""
    numpys = SweepConfig(shares=[np.float64(0.3)], seeds=np.arange(2), temperature=1)
    assert repr(numpys) == repr(SweepConfig(shares=(0.3,), temperature=1.0))
    assert [type(seed) for seed in numpys.seeds] == [int, int]
    params = SamplingParams(stop="a", stop_token_ids=[np.int64(3)], seed=np.uint64(5))
    assert params == SamplingParams(stop=("a",), stop_token_ids=(3,), seed=5)


def test_a_node_seed_depends_on_run_problem_and_path_alone():
    named = product((0, 1), ("a", "b"), ((), (0,), (0, 1), (1,)))
    seeds = {node_seed(*each) for each in named}
    assert len(seeds) == 16
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert node_seed(0, "a", (0, 11)) != node_seed(0, "a", (0, 1, 1))


def test_a_width_is_asked_of_those_that_have_one_and_ranges_are_told_as_they_are() -> None:
    assert StrategyConfig(strategy="best_of_n", n=2).n == 2
    with pytest.raises(ConfigError, match="beam_width is 4; allowed: <= n"):
        StrategyConfig(n=2)
    assert str(Range(0, math.inf, "(")) == "> 0" and str(Range(0)) == ">= 0"
    with pytest.raises(ConfigError, match="is no size"):
        parse_size("9" * 400)
