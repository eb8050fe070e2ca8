"""What memory the engine takes: starts, an arena, two models in one memory.

starts: from the call of Engine(MODEL, kv_memory=...) to the first token of a prompt of 8 tokens, in
a process of its own that has imported it, and the peak of resident memory over what was resident
before. In it: numba, loading of compiled kernels (the start that compiles them is thrown away),
weights, tokenizer, profiling. Cold: the model's files are dropped from the page cache first.

arena: arena_vs_dedicated, the same requests by engines in an arena and by such with pools of their
own of as many blocks, step by step in turns.

sharing: every policy and static share at KV budgets of 0.5, 1 and 2 W, all settings of a budget and
seed interleaved by rounds with the uncapped search that bounds them. Ratios are as measured;
equal_work_differs says how far runs of the same work lay apart, whatever the policy.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import pandas as pd
import torch

from workbench.bench.record import Row, median_row
from workbench.bench.search import TINY, TINY_PRM
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.engine.memory import block_shape
from workbench.experiments import plans
from workbench.experiments.plans import ALL, ELASTIC, NONE, STATIC
from workbench.experiments.rows import UNCAPPED_SETTING, bound_tokens_per_s, differing_nodes
from workbench.experiments.runs import FINISHED
from workbench.experiments.settings import REFERENCE, THESIS_SHARE
from workbench.experiments.statistics import WORK, median_interval
from workbench.experiments.study import Study, run_policies
from workbench.kvcache.arena import KVArena
from workbench.kvcache.policies import MarginalValue
from workbench.models.registry import find_model
from workbench.search.answers import check_choice

PROFILES = {  # starts; pairs and prompts of an arena's overhead
    "quick": {"starts": 1, "pairs": 9, "prompts": 8},
    "default": {"starts": 5, "pairs": 101, "prompts": 32},
    "full": {"starts": 9, "pairs": 201, "prompts": 64},
}
PARTS = ("starts", "arena", "sharing")
BUDGETS, SHARES = (0.5, 1.0, 2.0), (0.2, 0.3, 0.5, 0.7)
PLANS = {  # of sharing, and how often it is carried out
    "quick": (plans.PolicyPlan(3, 1, BUDGETS, SHARES, 0, repeats=0), 1),
    "default": (plans.PolicyPlan(16, 2, BUDGETS, SHARES, 0, repeats=0), 2),
    "full": (plans.PolicyPlan(128, 3, BUDGETS, SHARES, 0, repeats=0), 3),
}


def run(
    profile: str = "default",
    model: str = TINY,
    seed: int = 0,
    repeats: int | None = None,
    seeds: int | None = None,
    part: str | None = None,
) -> Iterator[Row]:
    """The rows of `workbench bench memory`; repeats: of starts, seeds: of searches that share."""
    tiny, sizes = model == TINY, PROFILES[profile]
    known, kv_memory = (PARTS, "64MiB") if tiny else (PARTS[:2], "1GiB")
    if part is not None:
        check_choice("part", part, known)
    for name in known if part is None else (part,):
        if name == "starts":
            yield from start_rows(model, kv_memory, repeats or sizes["starts"])
        elif name == "arena":
            pairs = sizes["pairs"] if tiny else PROFILES["quick"]["pairs"]
            yield from overhead_rows(model, pairs, sizes["prompts"], seed)
        else:
            yield from sharing_rows(profile, seeds)


def mode_of(given: dict[str, Any]) -> dict[str, Any]:
    """What the record says of a run with these settings."""
    mode: dict[str, Any] = {"batch_invariant": True, "n": 16, "beam_width": 4, "block_size": 16}
    if given["model"] != TINY:
        return mode
    config, (plan, _) = plans.sweep_config(given["profile"]), PLANS[given["profile"]]
    mode |= {"baseline": f"thesis 5.3 modifications on, static kv_share {THESIS_SHARE:g}"}
    mode |= {"budgets_of_w": BUDGETS, "kv_shares": SHARES, "shared_problems": plan.num_problems}
    mode |= {"shared_seeds": given["seeds"] or plan.num_seeds}
    return mode | {"shared_in_flight": config.min_problem_batch}


# -- starts --

STARTING = """
import json, time
from pathlib import Path
from workbench import Engine, SamplingParams

def held(name):
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

params = SamplingParams(temperature=0.0, max_tokens=1)
before, began = held("VmRSS"), time.perf_counter()
engine = Engine({model!r}, kv_memory={kv_memory!r})
engine.generate([list(range(1, 9))], params)
seconds, memory = time.perf_counter() - began, engine.memory
found = {{"seconds": seconds, "peak": held("VmHWM") - before, "budget": memory.weights + memory.kv}}
print(json.dumps(found))
"""


def measured_start(model: str, kv_memory: str, cold: bool = False) -> dict[str, float]:
    """seconds, and bytes: peak, and budget: weights and the KV memory that was declared.

    In a fresh process with as many threads as this one. cold: the system is asked to forget the
    pages of the model's files. Raises CalledProcessError if it fails.
    """
    where = find_model(model)
    for file in ([where] if where.is_file() else where.iterdir()) if cold else ():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    done = subprocess.run(
        [sys.executable, "-c", STARTING.format(model=model, kv_memory=kv_memory)],
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def start_rows(model: str, kv_memory: str, repeats: int) -> Iterator[Row]:
    """Seconds and memory of a start."""
    starts = [measured_start(model, kv_memory) for _ in range(repeats + 1)][1:]
    yield median_row("startup_s", [start["seconds"] for start in starts], "s")
    cold = measured_start(model, kv_memory, cold=True)
    yield Row("startup_cold_s", cold["seconds"], "s", repeats=1)
    over = [start["peak"] / start["budget"] for start in starts]
    yield median_row("startup_peak_over_budget", over, "fraction")


# -- an arena --

BLOCKS = 2048  # of one model alone


def overhead_rows(model: str, pairs: int, prompts: int, seed: int = 0) -> Iterator[Row]:
    """arena_vs_dedicated: median of the paired ratios; _low: lower end of its 95 % interval.

    Both sides take turns, step by step: the machine's pace varies. Of the tiny pair the LLM samples
    while the PRM scores, in one arena of the default policy or with a pool each. Prompts are new
    each time and nothing is emptied, as a search or a server goes on.
    """
    models, draw = ((TINY, TINY_PRM) if model == TINY else (model,)), random.Random(seed)
    shapes = [block_shape(each) for each in models]
    arena = KVArena(sum(BLOCKS * shape.block_bytes for shape in shapes), shapes, MarginalValue())
    sides = [Engine(m, arena=arena) for m in models], [Engine(m, num_blocks=BLOCKS) for m in models]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    every = []  # [seconds of each side], the first a warm-up
    for number in range(pairs + 1):
        for _ in range(prompts):
            prompt = [draw.randrange(3, 300) for _ in range(128)]
            for engines in sides:
                engines[0].add(prompt, params)
                for scoring in engines[1:]:
                    scoring.add_score(prompt, range(7, len(prompt), 8), (0, 1))
        seconds, first = [0.0, 0.0], number % 2
        while any(engine.has_work for engine in chain(*sides)):
            for which in (first, 1 - first):
                start = perf_counter()
                for engine in sides[which]:
                    if engine.has_work:
                        engine.step()
                seconds[which] += perf_counter() - start
            first = 1 - first
        every.append(seconds)
    ours, theirs = ([64 * prompts / spent for spent in each] for each in zip(*every[1:]))
    row = median_row("arena_vs_dedicated", ours, "tokens/s", peer="a pool of its own", peers=theirs)
    found = median_interval([mine / other for mine, other in zip(ours, theirs)])
    yield replace(row, spread=(found.low, found.high))
    yield Row("arena_vs_dedicated_low", found.low, "x", repeats=pairs)


# -- two models in one memory --


def sharing_rows(profile: str, seeds: int | None = None) -> Iterator[Row]:
    """The study of sharing, carried out as often as the profile says."""
    plan, times = PLANS[profile]
    plan = replace(plan, num_seeds=seeds or plan.num_seeds)
    config = replace(plans.sweep_config(profile), seeds=tuple(range(plan.num_seeds)))
    with TemporaryDirectory() as folder:
        places = [Path(folder) / str(number) for number in range(times)]
        yield from study_rows([run_policies(config, plan, place) for place in places])


def study_rows(studies: Sequence[Study]) -> Iterator[Row]:
    """Every row that the study tells, carried out once or several times.

    Raises AssertionError where a run's nodes, tokens and scores are not those of the uncapped
    search without techniques: settings are about speed alone.
    """
    plan, tables = studies[0].plan, [each.all_runs for each in studies]
    assert isinstance(plan, plans.PolicyPlan)
    every = pd.concat([table.assign(time=k) for k, table in enumerate(tables)], ignore_index=True)
    done = every[every["status"] == FINISHED]
    others = [s for s in done["setting"].unique() if s != UNCAPPED_SETTING]
    for study in studies:
        counts = differing_nodes(study, [(UNCAPPED_SETTING, setting) for setting in others])
        wrong = {setting: differ for setting, (differ, _) in counts.items() if differ}
        assert not wrong, f"nodes that are not the uncapped search's, by setting: {wrong}"
    yield Row("same_nodes", 1.0, "fraction", repeats=int(done["setting"].isin(others).sum()))
    bounds = done[(done["role"] == REFERENCE) & (done["technique"] == ALL)]
    yield Row("measured_bound", bound_tokens_per_s(bounds), "tokens/s", repeats=len(bounds))
    for budget in plan.budgets:
        yield from budget_rows(every[every["budget"] == budget])


def budget_rows(runs: pd.DataFrame) -> Iterator[Row]:
    """The rows of one budget; runs: of every time and seed, whether they finished or not."""
    budget, repeats = float(runs["budget"].iloc[0]), len(runs[["time", "seed"]].drop_duplicates())
    finished = runs[runs["status"] == FINISHED]
    wall, tokens, pace = (
        finished.pivot(index=["time", "seed"], columns="setting", values=name)
        for name in ("wall_s", "sampled_tokens", "tokens_per_s")
    )
    done = wall.columns[wall.count() == repeats].astype(str)
    rates = tokens.sum() / wall.sum()

    def row(name: str, setting: str, peer: str | None = None) -> Row:
        """Tokens a second, beside the peer's; spread: the least and the most of all times and
        seeds, of the ratio where there is a peer.
        """
        label = None if peer is None else peer.split("/")[1]
        for needed in filter(None, (setting, peer)):
            if needed not in done:  # the reason stands in place of a unit
                failed = runs[(runs["setting"] == needed) & (runs["status"] != FINISHED)]
                told = (failed["status"] + ": " + failed["error"].astype(str)).tolist()
                return Row(name, float("nan"), told[0] if told else "not measured", label)
        found, beside = pace[setting], {}
        if peer is not None:
            found = wall[peer] / wall[setting]
            beside = {"peer_value": float(rates[peer]), "ratio": float(found.mean())}
        ends = float(found.min()), float(found.max())
        rate = float(rates[setting])
        return Row(name, rate, "tokens/s", label, repeats=repeats, spread=ends, **beside)

    ours, everything = (plans.setting_of(budget, ELASTIC, None, key) for key in (NONE, ALL))
    thesis, split = (plans.setting_of(budget, STATIC, THESIS_SHARE, key) for key in (NONE, ALL))
    static = [s for s in done if f"/{STATIC}_" in s and s.endswith(f"/{NONE}")]
    fastest, at = thesis, f"@{budget:g}W"
    if static and ours in done:
        fastest = str(wall[static].div(wall[ours], axis="index").mean().idxmin())
    yield row(f"elastic_vs_best_static{at}", ours, fastest)
    yield row(f"elastic_vs_static_{THESIS_SHARE:g}{at}", ours, thesis)
    yield row(f"all_vs_baseline{at}", everything, thesis)
    yield row(f"all_vs_best_static{at}", everything, fastest)
    yield row(f"all_vs_static_{THESIS_SHARE:g}_all{at}", everything, split)
    alike = finished.groupby(["time", "seed", *WORK])["wall_s"].agg(["min", "max", "size"])
    alike = alike.query("size > 1")
    if len(alike):
        apart, count = (alike["max"] / alike["min"]).max(), alike["size"].sum()
        yield Row(f"equal_work_differs{at}", float(apart), "x", repeats=int(count))
    for setting in sorted(runs["setting"].unique()):
        _, policy, technique = setting.split("/")
        name = policy if technique == NONE else f"{policy}_{technique}"
        yield row(f"{name}{at}", setting)
