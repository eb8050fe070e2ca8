"""Profiles as the study fixes them, and what enters a run's name and fingerprint."""

import pickle
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.experiments.fakes import IDENTITY
from workbench.config import POLICIES, STRATEGIES
from workbench.errors import ConfigError
from workbench.experiments import plans, settings
from workbench.experiments.plans import (
    MODIFICATIONS,
    PROFILES,
    TECHNIQUES,
    AblationPlan,
    BatchPlan,
    PolicyPlan,
    StrategyPlan,
    ablation_runs,
    batch_runs,
    plan_of,
    policy_runs,
    reference_runs,
    replayed_config,
    split_runs,
    strategy_runs,
    sweep_config,
)
from workbench.experiments.settings import RunSpec
from workbench.experiments.statistics import wilson

CONFIG = sweep_config("quick", n=4, max_depth=2, seeds=(0, 1))
SMALL = AblationPlan(4, (1,), num_seeds=2, queue_problems=5)
POLICY = PolicyPlan(3, 2, (0.5, 2.0), (0.08, 0.2, 0.3), 1, (0.3,), 1)
NEED = plans.WorkingSet(2**21, 2**23, 600)


def test_only_the_thesis_profile_pays_activations_from_the_total_and_all_span_the_axis():
    for profile in PROFILES:
        config = sweep_config(profile)
        assert config.profile == profile
        assert (config.n, config.beam_width, config.block_size) == (16, 4, 16)
        assert (min(config.shares), max(config.shares)) == (0.08, 0.5)
        assert config.activations_in_total is (profile == "thesis")


def test_a_policy_that_keeps_no_split_is_run_once_a_seed():
    """To the others the share is where they start."""
    for policy in plans.POLICIES:
        planned = plans.split_runs(replace(CONFIG, policy=policy))
        shares = (0.3,) if policy == "first_come" else CONFIG.shares
        assert sorted({run.llm_share for run in planned}) == sorted(shares)
        assert {run.seed for run in planned} == {0, 1}


def test_an_unknown_profile_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'quick'"):
        sweep_config("quik")


def test_few_beams_alone_are_few_children_too() -> None:
    """n = 2 of any strategy needs no second setting; what was given is taken at its word."""
    for strategy in STRATEGIES:
        config = sweep_config("quick", strategy=strategy, n=2)
        assert (config.n, config.beam_width) == (2, 2)
    assert sweep_config("quick", n=8).beam_width == 4
    with pytest.raises(ConfigError, match=r"beam_width is 4; allowed: <= n \(2\)"):
        sweep_config("quick", n=2, beam_width=4)


def test_every_share_and_seed_once_in_shuffled_but_fixed_order_and_sentinels_between():
    config = sweep_config("full")
    planned, other = split_runs(config), split_runs(replace(config, order_seed=1))
    assert planned == split_runs(config) != other
    places = [k for k, run in enumerate(planned) if run.role == "sentinel"]
    assert places == [0, 11, 22, 33, 44]
    sentinels = [planned.pop(k) for k in reversed(places)]
    assert {(s.llm_share, s.seed) for s in sentinels} == {(0.3, 0)}
    pairs = [(run.llm_share, run.seed) for run in planned]
    assert sorted(pairs) == [(s, k) for s in config.shares for k in config.seeds] != pairs
    for without in (sweep_config("quick"), replace(config, sentinel_every=0)):
        assert {run.role for run in split_runs(without)} == {"measure"}


def test_a_fingerprint_follows_what_a_run_does_and_nothing_else():
    config = sweep_config("default")

    def print_of(share=0.3, seed=0, identity=IDENTITY, **change):
        return RunSpec(replace(config, **change), share, seed).fingerprint(identity)

    own = print_of()
    changes = ({"profile": "x"}, {"shares": (0.3,)}, {"seeds": (0,)}, {"order_seed": 9})
    for change in (*changes, {"total_memory": 64 * 2**20}):
        assert print_of(**change) == own
    changes = ({"n": 8}, {"num_problems": 3}, {"temperature": 0.7}, {"min_problem_batch": 3})
    for change in (*changes, {"share": 0.35}, {"seed": 1}):
        assert print_of(**change) != own
    for part in ("llm", "prm", "problems", "code"):
        assert print_of(identity=replace(IDENTITY, **{part: "another"})) != own


def test_engines_share_the_total_and_every_other_setting():
    spec = RunSpec(sweep_config("quick", max_num_seqs=32), 0.08, 0)
    llm, prm = spec.engine("llm"), spec.engine("prm")
    assert (llm.model, prm.model) == ("tiny-solver", "tiny-prm")
    assert (llm.memory, llm.memory + prm.memory) == (round(0.08 * 64 * 2**20), 64 * 2**20)
    assert llm.max_num_seqs == prm.max_num_seqs == 32
    assert not llm.activations_in_total
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize("profile", ["quick", "default", "full"])
def test_every_run_of_every_study_has_its_own_fingerprint(profile):
    """A run that shares a fingerprint with another would be read in its place."""
    config = sweep_config(profile)
    batch, ablation, policy = (plan_of(p, profile) for p in (BatchPlan, AblationPlan, PolicyPlan))
    runs = [*split_runs(config), *batch_runs(config, batch), *ablation_runs(config, ablation)]
    runs += [*reference_runs(config, policy), *policy_runs(config, policy, NEED)]
    assert len({run.fingerprint(IDENTITY) for run in runs}) == len(runs)


def test_a_plan_takes_a_notebook_s_parameters():
    given = {"grid_seqs": [2, 4], "compared_seqs": None, "llm": "of no plan"}
    assert plan_of(BatchPlan, "quick", given).grid_seqs == (2, 4)
    assert plan_of(AblationPlan, "quick", {"ablation_share": 0.2}).ablation_share == 0.2


@pytest.mark.parametrize(
    ("kind", "wrong", "said"),
    [
        (BatchPlan, {"block_sizes": (0,)}, r"block_sizes is \(0,\)"),
        (BatchPlan, {"compared_seqs": ()}, "compared_seqs"),
        (AblationPlan, {"depth_limits": (4, 4)}, "each once"),
        (AblationPlan, {"ablation_share": 1.0}, "shares in"),
        (PolicyPlan, {"num_seeds": 0}, "numbers from 1"),
        (StrategyPlan, {"num_problems": (9, 9, 4)}, "one for each of beam_counts"),
    ],
)
def test_a_plan_refuses_nonsense(kind, wrong, said):
    with pytest.raises(ConfigError, match=said):
        replace(kind(), **wrong)


def test_problems_in_flight_are_the_same_in_every_profile_and_study_of_a_pair():
    """A smaller profile tells no other story, and a headline no other number than its figure."""
    for profile in PROFILES:
        config, tight = sweep_config(profile), plan_of(PolicyPlan, profile)
        flight = sweep_config("thesis" if profile == "thesis" else "full").min_problem_batch
        plans = [plan_of(kind, profile) for kind in (AblationPlan, PolicyPlan, StrategyPlan)]
        runs = [*split_runs(config), *ablation_runs(config, plans[0])]
        runs += [*reference_runs(config, tight), *policy_runs(config, tight, NEED)]
        runs += strategy_runs(config, replace(plans[2], num_problems=flight, beam_counts=(4, 16)))
        assert {run.config.min_problem_batch for run in runs} == {flight}
        wide = strategy_runs(config, replace(plans[2], num_problems=flight, beam_counts=(64,)))
        assert {run.config.min_problem_batch for run in wide} == {flight // 4}, "as many beams"
        assert min(run.config.num_problems for run in runs) >= flight
        assert settings.THESIS_SHARE in tight.kv_shares
        queued = [run for run in runs if run.role == settings.QUEUE]
        assert all(run.config.num_problems > flight for run in queued), "a queue to be filled from"


def test_strategies_with_each_number_of_beams_are_the_runs_of_a_plan_of_that_number_alone():
    """Guards that runs which were computed apart are found: same settings, same fingerprint."""
    config, full = sweep_config("full"), plan_of(StrategyPlan, "full")
    alone = {
        run.setting: run.fingerprint(IDENTITY)
        for n, num_problems in ((4, 1072), (16, 640), (64, 384))
        for run in strategy_runs(config, StrategyPlan(num_problems, (n,), 1, full.surer))
    }
    together = {run.setting: run for run in strategy_runs(config, full)}
    votes = {setting for setting in together if setting.startswith("self_consistency")}
    for setting in together.keys() - votes:
        assert together[setting].fingerprint(IDENTITY) == alone[setting]
    assert len(together) == len(set(alone.values())) == 3 * len(STRATEGIES)
    assert {together[setting].config.num_problems for setting in votes} == {1072}
    more = {name: together[f"{name}-n64"].config.num_problems for name in plans.FAR}
    assert more == {"beam_search": 480, "lookahead": 560, "ets": 768}
    bar = wilson(0.5, 1072)
    assert bar.high - bar.low <= 0.06, "accuracy to 0.03 wherever it lies"


def test_cells_take_the_limits_an_engine_accepts_and_differ_in_them_only():
    cells = batch_runs(CONFIG, BatchPlan())
    whole = [c for c in cells if (c.role, c.get("kind")) == (settings.TIMED, settings.CONTINUOUS)]
    assert len([c for c in whole if c.get("model") == "llm"]) == 8, "512 do not fit 256 tokens"
    seeds = [c.seed for c in batch_runs(replace(CONFIG, seeds=(2, 0, 1)), BatchPlan(num_seeds=2))]
    assert list(dict.fromkeys(seeds)) == [2, 0] and seeds == sorted(seeds, reverse=True)
    spec = next(c for c in cells if c.get("kind").startswith("static") and c.get("model") == "prm")
    usual, own = RunSpec(CONFIG, 0.3, 0).engine("prm"), spec.engine("prm")
    changed = {k for k, v in own.to_dict().items() if v != usual.to_dict()[k]}
    assert changed == {"max_num_seqs", "batching", "enable_prefix_caching"}
    sizes = {c.config.block_size for c in cells if c.role == settings.COUNTED}
    assert sizes == {1, 4, 16, 64}


def test_each_modification_is_the_one_before_with_one_more_switch():
    """The ablation measures one modification at a time, in the thesis's order."""
    *ladder, beside = MODIFICATIONS.values()
    for before, after in pairwise(ladder):
        assert sum(before.settings[k] != v for k, v in after.settings.items()) == 1
    assert ladder[-1].settings.items() < beside.settings.items()
    runs = {run.setting: run for run in ablation_runs(CONFIG, SMALL) if run.role == "ablation"}
    foot, top, padded = runs["two_runtimes"], runs["stop_at_limit"], runs[plans.BESIDE]
    assert top.engine("prm").enable_prefix_caching and not foot.engine("prm").enable_prefix_caching
    assert foot.engine("llm") == top.engine("llm")
    off = (foot.config.score_cache, foot.config.problem_batching, foot.config.finish_at_limit)
    assert off == (False, "static", True)
    assert (padded.engine("llm").batching, padded.engine("prm")) == ("static", top.engine("prm"))
    assert padded.config == top.config


@pytest.mark.parametrize(("share", "seqs"), [(0.08, 1), (0.3, 8), (0.5, 16)])
def test_padded_batches_are_as_large_as_surely_fit(share, seqs):
    """Every member may become max_model_len long: 128 blocks of the tiny solver's."""
    runs = ablation_runs(CONFIG, replace(SMALL, ablation_share=share))
    padded = next(run for run in runs if run.setting == plans.BESIDE)
    assert padded.engine("llm").max_num_seqs == seqs


def test_dear_settings_have_fewer_seeds_and_problem_batching_a_longer_queue():
    runs = ablation_runs(CONFIG, SMALL)
    assert {run.seed for run in runs if not run.config.score_cache} == {0}
    assert {run.config.max_depth for run in runs if run.role == settings.DEPTH} == {1}
    queue = [run for run in runs if run.role == settings.QUEUE]
    assert tuple(run.setting for run in queue) == plans.BATCHED
    assert {run.config.num_problems for run in queue} == {5}
    deep = ablation_runs(CONFIG, replace(SMALL, depth_limits=(1, 2, 40)))
    assert len(deep) == len(runs), "limits that the search's own does not reach are left out"


def test_policies_are_paired_and_techniques_stand_where_asked():
    """Guards the grid: nothing missing, all settings of a seed paired, beside them their bound."""
    runs = policy_runs(CONFIG, POLICY, NEED)
    for budget in POLICY.budgets:
        own = [run for run in runs if run.get("budget") == budget]
        assert {run.get("policy") for run in own} == set(POLICIES)
        alone = {run.get("technique") for run in own if run.get("policy") == plans.STATIC}
        assert alone == (set(TECHNIQUES) if budget == 0.5 else {plans.NONE, plans.ALL})
        beside = [run for run in runs if run.get("beside") == budget]
        assert {run.group for run in own} == {run.group for run in beside}
    names = [[run.setting for run in runs if run.seed == seed] for seed in (0, 1)]
    assert names[0] == names[1]


def test_a_run_in_an_arena_names_both_shares_and_its_engines_have_no_memory_of_their_own():
    """Guards the reading of the split: of KV as given, of the whole memory as it comes out."""
    runs = policy_runs(CONFIG, POLICY, NEED)
    spec = next(r for r in runs if r.setting == "2W/static_0.2/none")
    assert spec.get("kv_bytes") == 2 * NEED.total
    assert spec.llm_share == pytest.approx(spec.llm_bytes / spec.total_bytes, abs=1e-5)
    assert spec.llm_share < 0.2, "the PRM's weights are most of the memory"
    assert spec.engine("llm").memory is None
    assert spec.engine("llm").max_model_len == 608, "the longest sequence and a token, in blocks"
    assert spec.parameters["kv_share"] == 0.2
    everything = next(r for r in runs if r.setting == "0.5W/static_0.3/all")
    for technique in TECHNIQUES.values():
        assert technique.settings.items() <= TECHNIQUES[plans.ALL].settings.items()
    assert everything.config.problem_batching == "adaptive"
    assert everything.engine("prm").reuse_partial_blocks


def test_the_thesis_profile_asks_as_the_thesis_did():
    """Search and Learn's prompt to the LLM and RLHFlow's form to the PRM, replayed as measured."""
    for config in (sweep_config("thesis"), replayed_config("quick")):
        assert config.system_prompt.startswith("Solve the following math problem efficiently")
        assert config.prm_format == "rlhflow"
