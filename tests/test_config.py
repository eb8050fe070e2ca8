"""Settings refuse what they do not know, say what is allowed, and are named by content."""

import pytest

from workbench.config import EngineConfig, SearchConfig, SweepConfig, format_size, parse_size
from workbench.core import SamplingParams, node_seed
from workbench.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "size"),
    [(1, 1), ("64MiB", 64 << 20), ("1 GiB", 1 << 30), ("1.5kib", 1536), ("2kB", 2000), ("7", 7)],
)
def test_sizes_are_bytes_or_text(given, size):
    assert parse_size(given) == size


@pytest.mark.parametrize("given", [0, -1, "", "apples", "3 apples", True, "0MiB", None])
def test_what_is_no_size_is_refused_by_name(given):
    with pytest.raises(ConfigError, match="is no size"):
        parse_size(given)


def test_sizes_print_in_binary_units():
    assert [format_size(s) for s in (5, 1536, 64 << 20)] == ["5 B", "1.5 KiB", "64.0 MiB"]


def test_an_unknown_key_names_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"'block_sise'.*Did you mean 'block_size'"):
        EngineConfig.from_dict({"block_sise": 8})


@pytest.mark.parametrize("config", [EngineConfig(), SearchConfig(), SweepConfig()])
def test_a_configuration_survives_a_round_trip_and_keeps_its_name(config):
    again = type(config).from_dict(config.to_dict())
    assert again == config
    assert again.fingerprint() == config.fingerprint()


def test_any_changed_setting_changes_the_fingerprint():
    assert EngineConfig(block_size=8).fingerprint() != EngineConfig().fingerprint()


@pytest.mark.parametrize(
    ("kind", "settings", "complaint"),
    [
        (EngineConfig, {"memory": 1.5}, "share in"),
        (EngineConfig, {"memory": "1GiB", "num_blocks": 4}, "memory and num_blocks"),
        (EngineConfig, {"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_seqs"),
        (EngineConfig, {"dtype": "float8"}, "float32"),
        (SearchConfig, {"aggregation": "lst"}, "Did you mean 'last'"),
        (SearchConfig, {"n": 4, "beam_width": 8}, "<= n"),
        (SweepConfig, {"shares": (0.3, 1.0)}, "in \\(0, 1\\)"),
        (SweepConfig, {"temperature": -1.0}, "temperature"),
        (SamplingParams, {"top_p": 0.0}, "top_p"),
        (SamplingParams, {"stop": ("",)}, "non-empty"),
    ],
)
def test_a_bad_value_says_what_is_allowed(kind, settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        kind(**settings)


def test_a_node_seed_depends_on_run_problem_and_path_alone():
    seeds = {
        node_seed(r, p, path)
        for r in (0, 1)
        for p in ("a", "b")
        for path in ((), (0,), (0, 1), (1,))
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert node_seed(0, "a", (0, 11)) != node_seed(0, "a", (0, 1, 1))
