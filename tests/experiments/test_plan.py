"""Profiles as the study fixes them, and what enters a run's name and fingerprint."""

import dataclasses
import json
import pickle

import pytest

from workbench.errors import ConfigError
from workbench.experiments.plan import (
    Identity,
    RunSpec,
    fingerprint_of,
    measured_runs,
    planned_runs,
    warmup_run,
)
from workbench.experiments.profiles import EVERY_SHARE, PROFILES, sweep_config

IDENTITY = Identity("llm0", "prm0", "problems0", "0.1.0", 1)


@pytest.mark.parametrize(
    ("profile", "problems", "seeds", "shares"),
    [
        ("quick", 8, 1, (0.08, 0.2, 0.3, 0.5)),
        ("default", 16, 2, (0.08, 0.15, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5)),
        ("full", 128, 5, EVERY_SHARE),
        ("thesis", 128, 5, EVERY_SHARE),
    ],
)
def test_profiles_are_those_of_the_study(profile, problems, seeds, shares):
    config = sweep_config(profile)
    assert (config.num_problems, len(config.seeds), config.shares) == (problems, seeds, shares)
    assert (config.n, config.beam_width, config.max_depth, config.block_size) == (16, 4, 40, 16)
    assert config.temperature == 0.8
    assert config.activations_in_total is (profile == "thesis")
    assert config.profile == profile
    assert EVERY_SHARE[0] == 0.08
    assert EVERY_SHARE[-1] == 0.5


def test_unknown_profile_and_unknown_setting_name_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'quick'"):
        sweep_config("quik")
    with pytest.raises(ConfigError, match="Did you mean 'num_problems'"):
        sweep_config("quick", num_problem=3)
    assert set(PROFILES) == {"quick", "default", "full", "thesis"}


def test_every_share_and_seed_once_in_shuffled_but_fixed_order():
    config = sweep_config("default")
    runs = measured_runs(config)
    pairs = [(run.llm_share, run.seed) for run in runs]
    assert sorted(pairs) == sorted((s, k) for s in config.shares for k in config.seeds)
    assert pairs != sorted(pairs)
    assert pairs == [(run.llm_share, run.seed) for run in measured_runs(config)]
    other = measured_runs(dataclasses.replace(config, order_seed=1))
    assert pairs != [(run.llm_share, run.seed) for run in other]


def test_the_sentinel_returns_every_ten_runs_and_quick_has_none():
    config = sweep_config("full")
    planned = planned_runs(config)
    places = [k for k, run in enumerate(planned) if run.role == "sentinel"]
    assert places == [0, 11, 22, 33, 44]
    sentinels = [planned[k] for k in places]
    assert {(s.llm_share, s.seed) for s in sentinels} == {(0.3, 0)}
    assert len({s.fingerprint(IDENTITY) for s in sentinels}) == len(sentinels)
    assert all(run.role == "measure" for run in planned_runs(sweep_config("quick")))
    without = planned_runs(dataclasses.replace(config, sentinel_every=0))
    assert {run.role for run in without} == {"measure"}


def test_the_warm_up_is_small_and_can_be_left_out():
    assert warmup_run(sweep_config("quick")).config.num_problems == 2
    assert warmup_run(sweep_config("quick", warmup_problems=0)) is None


def test_a_fingerprint_follows_what_a_run_does_and_nothing_else():
    config = sweep_config("default")
    own = RunSpec(config, 0.3, 0).fingerprint(IDENTITY)
    for change in ({"profile": "x"}, {"shares": (0.3,)}, {"seeds": (0,)}, {"order_seed": 9}):
        assert RunSpec(dataclasses.replace(config, **change), 0.3, 0).fingerprint(IDENTITY) == own
    for change in ({"n": 8}, {"num_problems": 3}, {"temperature": 0.7}, {"min_problem_batch": 3}):
        assert RunSpec(dataclasses.replace(config, **change), 0.3, 0).fingerprint(IDENTITY) != own
    for share, seed in ((0.35, 0), (0.3, 1)):
        assert RunSpec(config, share, seed).fingerprint(IDENTITY) != own
    for part in ("llm", "prm", "problems", "version"):
        other = dataclasses.replace(IDENTITY, **{part: "another"})
        assert RunSpec(config, 0.3, 0).fingerprint(other) != own
    same = dataclasses.replace(config, total_memory=64 * 2**20)
    assert RunSpec(same, 0.3, 0).fingerprint(IDENTITY) == own


def test_a_fingerprint_survives_json():
    spec = RunSpec(sweep_config("quick", levels=[1, 2]), 0.08, 3)
    stored = json.loads(json.dumps([spec.parameters, spec.role, IDENTITY.to_dict()]))
    assert fingerprint_of(*stored) == spec.fingerprint(IDENTITY)


def test_engines_share_the_total_and_every_other_setting():
    spec = RunSpec(sweep_config("quick", max_num_seqs=32), 0.08, 0)
    llm, prm = spec.engine("llm"), spec.engine("prm")
    assert (llm.model, prm.model) == ("tiny-solver", "tiny-prm")
    assert llm.memory + prm.memory == 64 * 2**20
    assert llm.memory == round(0.08 * 64 * 2**20)
    assert llm.max_num_seqs == prm.max_num_seqs == 32
    assert not llm.activations_in_total
    assert pickle.loads(pickle.dumps(spec)) == spec
