"""Runs carried out with the embedded models: what is stored is what was measured."""

import gc
from dataclasses import fields, replace

import pandas as pd
import pytest

from workbench.config import SearchConfig, StrategyConfig, SweepConfig
from workbench.errors import ConfigError
from workbench.experiments import claims, execute, plans, settings
from workbench.experiments import rows as views
from workbench.experiments.memory import ENGINES, feasibility, starting_share
from workbench.experiments.plans import setting_of, sweep_config
from workbench.experiments.provenance import PACKAGE, REPLAY_SOURCES, SOURCES, this_code
from workbench.experiments.runs import compare, load_runs, sweep_problems
from workbench.experiments.settings import RunSpec
from workbench.experiments.study import (
    provenance,
    provenance_of,
    run_ablation_replayed,
    run_policies,
    run_policies_replayed,
    run_replayed,
    run_sweep,
    working_set_of,
)
from workbench.models.registry import find_model, load_tokenizer
from workbench.replay.answers import Answers
from workbench.replay.devices import PRESETS
from workbench.replay.miss_ratio import curve_sizes, miss_ratio
from workbench.replay.simulator import search_calls
from workbench.replay.what_if import what_if
from workbench.replay.workload import load_recording
from workbench.search.recording import Recording
from workbench.search.search import Search
from workbench.search.variants import STRATEGIES

SMALL = {"num_problems": 3, "levels": (1, 2), "n": 4, "beam_width": 2, "max_depth": 5}
SMALL |= {"shares": (0.08, 0.3), "seeds": (0,), "warmup_problems": 0, "max_num_seqs": 8}
SMALL |= {"max_num_batched_tokens": 256, "max_step_tokens": 48}
WHYS = ("evicted", "preempted", "partial")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    return run_sweep(sweep_config("quick", **SMALL), runs, progress=False)


def test_the_row_adds_up_at_both_shares(sweep):
    assert list(sweep.runs["llm_share"]) == [0.08, 0.3]
    for row in sweep.runs.to_dict("records"):
        for role in ("llm", "prm"):
            parts = row[f"{role}_weights_bytes"] + row[f"{role}_kv_bytes"]
            assert parts == row[f"{role}_bytes"]  # activations lie outside the total
            assert row[f"{role}_activations_bytes"] > 0
            assert row[f"{role}_blocks"] == row[f"{role}_kv_bytes"] // row[f"{role}_block_bytes"]
            assert row[f"{role}_lacks_bytes"] == 0
        assert row["tokens_per_s"] == pytest.approx(row["sampled_tokens"] / row["wall_s"])
        assert 0 < row["llm_busy_s"] + row["prm_busy_s"] <= row["wall_s"]
        assert row["steady_tokens_per_s"] > 0
        assert 0 <= row["accuracy"] <= 1
        again = sum(row[f"prm_recomputed_tokens_{why}"] for why in WHYS)
        read = row["prm_prefill_tokens"] + row["prm_decode_tokens"] - again
        assert row["prm_tokens_per_busy_s"] * row["prm_busy_s"] == pytest.approx(read)
        assert row["llm_tokens_per_busy_s"] > 0


def test_tables_agree_with_the_row_and_with_each_other(sweep):
    for row in sweep.runs.to_dict("records"):
        share = row["llm_share"]
        problems, nodes, steps, requests = (
            sweep.table(name, llm_share=share)
            for name in ("problems", "nodes", "steps", "requests")
        )
        assert len(problems) == 3
        assert problems["wall_part_s"].sum() == pytest.approx(row["wall_s"])
        assert problems["tokens"].sum() == nodes["step_tokens"].sum() == row["sampled_tokens"]
        assert nodes["step_tokens"].equals(nodes["token_ids"].map(len))
        for role in ("llm", "prm"):
            own = steps[steps["engine"] == role]
            assert len(own) == row[f"{role}_steps"]
            assert all(own[name].sum() == row[f"{role}_{name}"] for name in execute.COUNTS)
            assert row[f"{role}_blocks_peak"] == own["blocks_active"].max() > 0
            asked = requests[(requests["engine"] == role) & requests["scheduled_s"].notna()]
            assert row[f"{role}_look_ups"] == len(asked) + asked["preemptions"].sum()
            total = own[["blocks_active", "blocks_cached", "blocks_free"]].sum(axis=1)
            assert (total == row[f"{role}_blocks"]).all()
        both = pd.concat([steps, sweep.table("spans", llm_share=share)])
        filled = (both["start_s"] + both["duration_s"]).max() - both["start_s"].min()
        assert both["duration_s"].sum() == pytest.approx(filled, rel=0.02)
        generated = requests[requests["kind"] == "generate"]
        assert generated["output_tokens"].sum() == row["sampled_tokens"]
        assert set(requests["engine"]) == {"llm", "prm"}


def test_interleaved_searches_bring_what_each_brings_alone(sweep, tmp_path):
    """Guards that rounds taken in turn change no node."""
    both = compare(*sweep.runs["folder"])
    assert both.identical, both.first_difference
    assert list(both.parameters["name"]) == ["llm_share"]
    alone = run_sweep(sweep_config("quick", **SMALL | {"shares": (0.3,)}), tmp_path, progress=False)
    beside = sweep.runs[sweep.runs["llm_share"] == 0.3]
    found = compare(list(alone.runs["folder"]), list(beside["folder"]))
    assert found.identical and found.parameters.empty


def test_no_round_pays_for_the_garbage_of_other_searches(monkeypatch):
    """Garbage waits while a round is played, and no longer."""
    own, collects = Search.round, []

    def watched(search: Search) -> bool:
        collects.append(gc.isenabled())
        return own(search)

    monkeypatch.setattr(Search, "round", watched)
    config = sweep_config("quick", **SMALL)
    specs = [RunSpec(config, 0.3, seed) for seed in (0, 1)]
    for _ in execute.Searches()(specs):
        assert gc.isenabled()
    assert len(collects) > 2 and not any(collects)


def test_a_study_of_policies_measures_the_working_set_first(tmp_path):
    """Two engines in an arena, from W to the rows, with the embedded models."""
    plan = plans.PolicyPlan(2, 1, (2.0,), (0.3,), 0, repeats=0)
    study = run_policies(sweep_config("quick", **SMALL), plan, tmp_path, progress=False)
    assert set(study.all_runs["status"]) == {"finished"}
    assert study.runs["llm_final_share"].notna().any()


@pytest.mark.parametrize("policy", ["static", "marginal_value"])
def test_a_sweep_with_a_policy_shares_one_memory_and_changes_no_token(sweep, tmp_path, policy):
    """Guards `sweep --policy`: memory and share as asked for, every node as with two caches."""
    config = sweep_config("quick", **SMALL | {"shares": (0.3,), "policy": policy})
    shared = run_sweep(config, tmp_path, progress=False)
    (row,), beside = shared.runs.to_dict("records"), sweep.runs[sweep.runs["llm_share"] == 0.3]
    weights = row["llm_weights_bytes"] + row["prm_weights_bytes"]
    page = (row["total_memory"] - weights) / row["kv_pages"]
    assert round(page) in range(2**15, 2**15 + 2**10)
    own = beside.iloc[0]
    kv_share = own["llm_kv_bytes"] / (own["llm_kv_bytes"] + own["prm_kv_bytes"])
    if policy == "static":
        assert row["llm_final_share"] == pytest.approx(kv_share, abs=0.01)
    assert compare(list(shared.runs["folder"]), list(beside["folder"])).identical
    assert f"shared by the policy {policy}" in provenance(shared.runs)


@pytest.mark.parametrize("budget", [0.5, 2.0])
def test_a_run_records_the_split_that_its_arena_starts_with(budget):
    """Guards the column llm_share of runs whose policy starts from its own split."""
    need = plans.WorkingSet(2**21, 2**23, longest=600)
    plan = plans.PolicyPlan(3, 1, (budget,), (0.2, 0.3), 0)
    runs = plans.policy_runs(sweep_config("quick", n=4, max_depth=3), plan, need)
    spec = next(s for s in runs if s.setting == setting_of(budget, plans.ELASTIC, None, "none"))
    arena, kv_bytes = execute.make_arena(spec), spec.get("kv_bytes")
    started = arena.target["llm"] / arena.num_pages
    assert starting_share(spec.config, kv_bytes) == started
    static = next(s for s in runs if s.setting == setting_of(budget, "static", 0.2, "none"))
    assert spec.llm_bytes - static.llm_bytes == round(started * kv_bytes) - round(0.2 * kv_bytes)
    assert 0 < starting_share(spec.config, 1) < 1, "of a memory that holds no arena too"


# -- the replayed rung --

FEW = {"num_problems": 2, "n": 4, "max_depth": 4, "shares": [0.08, 0.5]}


@pytest.fixture(scope="module")
def replayed(root):
    return run_replayed(plans.replayed_config("quick", **FEW), root)


def test_problems_add_up_to_the_run_and_blocks_are_what_the_rest_leaves(replayed) -> None:
    problems, runs = replayed.table("problems"), replayed.runs
    sums = problems.groupby("llm_share")[["tokens", "wall_part_s"]].sum()
    assert sums["wall_part_s"].tolist() == pytest.approx(runs["wall_s"].tolist())
    assert sums["tokens"].tolist() == runs["sampled_tokens"].tolist()
    assert sums["tokens"].nunique() == 1, "the split changes no token"
    for engine in ("llm", "prm"):
        assert (runs[f"{engine}_activations_bytes"] > 0).all(), "they are in the total"
        parts = [f"{engine}_{name}_bytes" for name in ("weights", "activations")]
        left = runs[f"{engine}_bytes"] - runs[parts].sum(axis=1)
        assert (runs[f"{engine}_blocks"] == left // runs[f"{engine}_block_bytes"]).all()
    text = provenance_of(replayed)
    assert settings.REPLAYED in text and "Nothing was run: tokens are MATH-500's lengths" in text
    assert "simulated NVIDIA A100 40 GB" in text


def test_a_share_that_needs_more_seeds_has_them(replayed, root) -> None:
    """What all shares have is found again; a ratio is of the seeds that both of its shares have."""
    config = plans.replayed_config("quick", **FEW | {"shares": [0.08, 0.3, 0.5]})
    study = run_replayed(config, root, surer={0.3: 3, 0.5: 2, 0.45: 9}, progress=False)
    seeds = study.runs.groupby("llm_share")["seed"].agg(list).to_dict()
    assert seeds == {0.08: [0], 0.3: [0, 1, 2], 0.5: [0, 1]}
    assert set(replayed.folders) <= set(study.folders)
    text = provenance_of(study)
    assert "2 problems, 1 to 3 seeds a share" in text and "6 of 6 runs" in text
    rows = views.split_rows(study).set_index(["metric", "llm_share"])
    rate = study.runs.assign(rate=study.runs["sampled_tokens"] / study.runs["wall_s"])
    rate = rate.set_index(["llm_share", "seed"])["rate"]
    assert rows.loc[("tokens_per_s", 0.3), "value"] == pytest.approx(rate[0.3, 0])
    both = study.runs[study.runs["seed"] < 2].groupby("llm_share")
    own = both["sampled_tokens"].sum() / both["wall_s"].sum()
    assert rows.loc[("tokens_per_s", 0.5), "ratio"] == pytest.approx(own[0.5] / own[0.3])


def test_a_recording_is_a_rung_with_its_own_problems_settings_and_memory(root) -> None:
    """Guards that what is replayed of SmolLM2 is what a measured run of the same settings does."""
    config = plans.recorded_config("quick", shares=(0.08, 0.3))
    recording = load_recording(config.problems)
    assert sweep_problems(config) == [each.problem for each in recording.problems]
    study = run_replayed(config, root, progress=False)
    steps = sum(len(step.tokens) for each in recording.problems for step in each.steps)
    assert study.runs["sampled_tokens"].tolist() == [steps, steps]
    fits = [feasibility(settings.RunSpec(config, share, 0)) for share in config.shares]
    for engine in ("llm", "prm"):
        assert study.runs[f"{engine}_blocks"].tolist() == [each.blocks(engine) for each in fits]
    assert study.runs["llm_preempted"].iloc[0] > 0 == study.runs["llm_preempted"].iloc[1]
    assert study.noise.is_known and study.noise.sigma == 0, "simulated seconds have no noise"
    rows = views.on_rungs(views.split_rows, [study], "memory_split")
    assert set(rows["rung"]) == {settings.RECORDED}
    lost = views.lost_time_rows(study)
    spent = claims.time_spent(lost, *lost["part"].unique())
    assert spent.between(0.999, 1.001).all(), "a replay has steps alone"
    assert "a recorded search's" in provenance_of(study)


def config_of(strategy: str, found: Recording, **more) -> SweepConfig:
    """Of a recording by the tiny pair, at a share of 0.2."""
    own = {"llm": found.llm.name, "prm": found.prm.name, "strategy": strategy, "prm_format": None}
    own |= {"num_problems": len(found.problems), "n": 16, "max_model_len": 2048, **more}
    own |= {name: getattr(found.settings, name) for name in execute.SAMPLED}
    own |= {"problems": f"tiny-16-n16-{strategy.replace('_', '-')}", "total_memory": "64MiB"}
    return plans.recorded_config("quick", shares=(0.2,), **own)


def test_a_recording_of_a_strategy_without_a_width_is_replayed_as_its_own_pair(root) -> None:
    """Guards a KeyError, and the tiny pair drawn as the thesis's."""
    config = config_of("rebase", load_recording("tiny-16-n16-rebase"), max_depth=40)
    (run,) = run_replayed(config, root, progress=False).all_runs.to_dict("records")
    assert (run["status"], run["rung"]) == ("finished", "replayed tiny-solver"), run["error"]


def test_what_a_replay_tells_of_the_ablation_is_its_speed(root) -> None:
    """Guards C7 at the thesis's scale: a queue is waited in, and nothing is sampled to an end."""
    config = plans.replayed_config("quick", **FEW | {"min_problem_batch": 2})
    plan = plans.replayed_ablation(config, plans.AblationPlan())
    study = run_ablation_replayed(config, plan, root, progress=False)
    assert set(study.all_runs["status"]) == {"finished"}
    rows = views.ablation_rows(study)
    assert not set(rows["metric"]) & {"accuracy", "finishes", "stops"}
    gains = rows[rows["metric"] == "gain"].set_index("setting")["value"]
    assert gains["one_runtime"] > 1 < gains["score_cache"]
    assert gains["continuous_problems"] != 1, "problems wait in the queue"
    asked = replace(settings.RunSpec(config, 0.3, 0), config=replace(config, finish_at_limit=True))
    with pytest.raises(ConfigError, match="finish_at_limit=False"):
        execute.replayed_run(PRESETS["a100-40"], asked)
    asked = replace(asked, config=replace(config, finish_at_limit=False))
    recorded = plans.recorded_config("quick", strategy="dvts")
    rebase = replace(asked.config, strategy="rebase", balance_temperature=0.5)
    for name, own in (
        ("strategy", recorded),
        ("dtype", replace(asked.config, dtype="float32")),
        ("score_shuffle_seed", replace(asked.config, score_shuffle_seed=1)),
        ("temperature", replace(asked.config, temperature=0.1)),
        ("problems", replace(asked.config, problems="tiny")),
        ("levels", replace(asked.config, levels=(1,))),
        ("balance_temperature", rebase),
    ):
        other = replace(asked, config=own, seed=own.seeds[0])
        with pytest.raises(ConfigError, match=f"{name} is .*; the search that is replayed has"):
            execute.replayed_run(PRESETS["a100-40"], other)
    again = settings.RunSpec(plans.recorded_config("quick"), 0.3, 7)
    with pytest.raises(ConfigError, match="seed is 7; the search that is replayed has 0"):
        execute.replayed_run(PRESETS["a100-40"], again)


def test_a_recorded_search_has_another_prm_in_the_bytes_that_its_sweep_reckons_with() -> None:
    """As many blocks as is told to be feasible, in float32 as the recording's own."""
    own = {"prm": "qwen2.5-1.5b-instruct", "total_memory": "20GiB"}
    spec = settings.RunSpec(plans.recorded_config("quick", **own), 0.3, 0)
    row, room = execute.replayed_run(PRESETS["h200"], spec).measured, feasibility(spec)
    assert [row[f"{role}_blocks"] for role in ENGINES] == [room.blocks(role) for role in ENGINES]
    assert row["prm_weights_bytes"] == room.prm.weights


def test_a_search_without_a_prm_is_measured_in_an_arena_and_replayed() -> None:
    """A model that never stepped has an empty working set; the strategy's settings are its own."""
    config = SweepConfig(strategy="self_consistency", n=2, num_problems=1, policy="static",
                         max_tokens=16, beam_width=1)  # fmt: skip
    pair = execute.Pair(settings.RunSpec(config, 0.3, 0))
    row = pair.result_of(pair.search().play()).measured
    assert row["prm_active_bytes"] == 0 < row["llm_active_bytes"]
    found = load_recording("tiny-16-n16-self-consistency")
    config = config_of("self_consistency", found)
    replayed = execute.replayed_run(PRESETS["h100"], settings.RunSpec(config, 0.2, 0)).measured
    assert replayed["prm_blocks_peak"] == 0 < replayed["llm_blocks_peak"]
    calls = search_calls(Answers(found), PRESETS["h100"])[1]
    assert curve_sizes(calls, 8) == [1] and miss_ratio(calls, [1])["hit_ratio"].item() == 0


def test_the_search_that_is_made_of_lengths_is_the_config_s_strategy_s() -> None:
    """With its usual settings; others are refused above."""
    config, speeds = plans.replayed_config("quick", **FEW), []
    for strategy in ("beam_search", "rebase"):
        spec = settings.RunSpec(replace(config, strategy=strategy), 0.3, 0)
        row = execute.replayed_run(PRESETS["a100-40"], spec).measured
        speeds.append(row["tokens_per_s"])
    assert speeds[0] != speeds[1]


def test_policies_are_replayed_at_budgets_of_the_rung_s_own_working_set(root) -> None:
    """Guards W first, every policy, no forgetting; and that more memory is no slower."""
    config = plans.replayed_config("quick", **FEW)
    plan = plans.replayed_policies(config, plans.PolicyPlan(9, 5, (2.0, 4.0), (0.3,)))
    study = run_policies_replayed(config, plan, root, progress=False)
    assert not study.all_runs["forget_pruned"].any()
    assert not (study.all_runs["technique"] == "forget_pruned").any()
    need, runs = working_set_of(study.all_runs), study.runs.set_index("setting")
    for spec in plans.policy_runs(config, plan, need):
        if spec.get("policy") in ("phase_aware", plans.ELASTIC) and spec.setting in runs.index:
            run = runs.loc[spec.setting]  # it starts where a measured one does
            start = starting_share(spec.config, spec.get("kv_bytes"))
            assert run["llm_kv_bytes"] / run["kv_bytes"] == pytest.approx(start, abs=1e-3)
    assert runs["kv_bytes"][setting_of(2.0, plans.ELASTIC, None, "none")] == 2 * need.total
    assert need.prm > need.llm > 0
    rows = views.optimisation_rows(study)
    speed = rows[rows["metric"] == "tokens_per_s"].set_index("setting")["value"]
    for policy, share in (("first_come", None), ("phase_aware", None), (plans.ELASTIC, None)):
        tight, roomy = (setting_of(budget, policy, share, "none") for budget in (2.0, 4.0))
        assert speed[tight] <= speed[roomy] * 1.001
    assert not set(rows["metric"]) & {"same", "accuracy"}, "a replay samples and answers nothing"


def test_the_thesis_profile_is_carried_out_on_a_pair_that_is_here(tmp_path) -> None:
    """Its prompt, RLHFlow's form and activations in the total, for three MATH-500 problems: all of
    it but the models' size, the device and the depth.
    """
    here = {"llm": "tiny-solver", "prm": "dummy:tiny-prm", "device": "cpu", "dtype": "auto"}
    here |= {"total_memory": "1GiB", "problems": "tests/data/math500_sample.json"}
    here |= {"num_problems": 3, "seeds": (0,), "shares": (0.3,), "max_model_len": 2048}
    config = sweep_config("thesis", **here, n=4, max_depth=2, max_step_tokens=32)
    study = run_sweep(config, tmp_path, progress=False)
    (run,) = study.runs.to_dict("records")
    assert run["prm_format"] == "rlhflow"
    for role in ("llm", "prm"):
        parts = (run[f"{role}_{part}_bytes"] for part in ("weights", "activations", "kv"))
        assert sum(parts) == run[f"{role}_bytes"]
    asked = study.table("requests").groupby("engine")["prompt_tokens"].min()
    prompt = load_tokenizer(find_model("tiny-solver")).encode(config.system_prompt)
    assert asked["llm"] > len(prompt) > 100
    assert study.table("problems")["prm_tokens_computed"].min() > 0


def test_the_smallest_profile_leaves_a_model_short_of_room_at_either_end_and_none_at_0_3() -> None:
    """Guards quick's story: with fewer problems than are in flight elsewhere the PRM has room."""
    config, recording = sweep_config("quick"), load_recording("tiny-16-n16")
    answers = Answers(replace(recording, problems=recording.problems[: config.num_problems]))
    how = {"device": "a100-40", "total_memory": config.total_memory}
    how |= {"min_problem_batch": config.min_problem_batch}
    lost, columns = {}, ["preempted", "recomputed_tokens_evicted"]
    for share in (0.08, 0.3, 0.5):
        steps = what_if(answers, llm_share=share, **how).trace.steps
        lost[share] = steps.groupby("engine")[columns].sum().sum(axis=1)
    assert lost[0.08]["llm"] > 0 == lost[0.08]["prm"]
    assert lost[0.5]["prm"] > 0 == lost[0.5]["llm"]
    assert not lost[0.3].any()


def test_a_prm_that_writes_is_replayed_beside_one_that_scores(tmp_path) -> None:
    """Another PRM's shape, the same search: critiques cost the PRM time and change no token."""
    own = {**FEW, "shares": [0.5], "prm": "qwen2.5-1.5b-instruct", "total_memory": "8GiB"}
    writes = {"prm_format": "thinkprm", "critiques": 2, "critique_tokens": 40}
    plain, writing = (
        run_replayed(plans.replayed_config("quick", **own, **more), tmp_path)
        for more in ({}, writes)
    )
    before, after = plain.runs.iloc[0], writing.runs.iloc[0]
    assert "qwen2.5-1.5b-instruct" in after["rung"] and after["rung"] != settings.REPLAYED
    assert before["sampled_tokens"] == after["sampled_tokens"]
    assert before["prm_decode_tokens"] == 0
    assert before["llm_busy_s"] == pytest.approx(after["llm_busy_s"])  # added up otherwise
    assert after["prm_decode_tokens"] > 0 and after["prm_busy_s"] > 5 * before["prm_busy_s"]
    rows = views.critique_rows(plain, writing)
    rates = rows[rows["metric"] == "problems_per_min"].set_index("kind")["value"]
    assert rates.to_dict() == pytest.approx(
        {"scores": before["problems_per_min"], "critiques": after["problems_per_min"]}
    )
    again = rows[rows["metric"] == "again"].groupby(["kind", "engine"])["value"].sum()
    evicted = after["prm_recomputed_tokens_evicted"] + after["prm_recomputed_tokens_preempted"]
    assert again["critiques", "prm"] == evicted / FEW["num_problems"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_setting_of_a_strategy_is_one_of_a_configuration(name: str) -> None:
    """And no other strategy's is taken; limit_tokens, a ceiling of a sample, is the strategy's."""
    own = {each.name for each in fields(STRATEGIES[name])} - {"aggregation", "seed", "limit_tokens"}
    values = {"instruction": "Think.", "examples": ("1+1=2",), "finish_at_limit": True}
    some = {each.name for each in fields(StrategyConfig)} - {e.name for e in fields(SearchConfig)}
    for setting in some - {"strategy"}:
        given = {setting: values.get(setting, 2)}
        if setting in own:
            config = StrategyConfig(strategy=name, **({"beam_width": 1} | given))
            made = execute.make_strategy(config)
            assert getattr(made, setting) == given[setting]
            own.remove(setting)
        elif setting not in ("beam_width", "max_depth"):  # what every configuration has
            with pytest.raises(ConfigError, match=f"{setting} is .*, here {name}"):
                StrategyConfig(strategy=name, **given)
    assert not own


def test_another_device_or_replay_is_another_run() -> None:
    """A changed constant of cost or workload is not taken for runs stored before it."""
    made, recorded = plans.replayed_config("quick"), plans.recorded_config("quick")
    assert execute.replay_identity(PRESETS["h100"], made).code == this_code(replayed=True)["code"]
    assert {PACKAGE / "replay", *SOURCES} == {*REPLAY_SOURCES}
    others = [(PRESETS["h100"], made), (PRESETS["a100-40"], made), (PRESETS["h100"], recorded)]
    assert len({execute.replay_identity(*each) for each in others}) == 3


def test_runs_are_found_again_and_not_mixed_up(replayed, root) -> None:
    """The same question finds the stored runs; another device is another run."""
    again = run_replayed(plans.replayed_config("quick", **FEW), root)
    assert again.folders == replayed.folders
    other = run_replayed(plans.replayed_config("quick", **FEW), root, "h100")
    assert not set(other.folders) & set(replayed.folders)
    assert len(load_runs([*again.folders, *other.folders])) == 4
    assert other.runs["wall_s"].max() < replayed.runs["wall_s"].min()
