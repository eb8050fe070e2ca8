"""Plans: the sweeps of each profile, and the lists of runs that the studies are.

Profiles say how much of each study is run. What a run does and gives does not depend on this
module: more seeds or problems in a profile leave finished runs what they are.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, NamedTuple

from workbench.config import (
    POLICIES,
    STRATEGIES,
    SweepConfig,
    check,
    parse_size,
    refused,
    require_known,
)
from workbench.experiments.memory import ENGINES, feasibility, shares_of, starting_share
from workbench.experiments.settings import (
    ABLATION,
    CONTINUOUS,
    COUNTED,
    DEPTH,
    QUEUE,
    RECORDING,
    REFERENCE,
    SENTINEL,
    STATIC_BATCH,
    THESIS_SHARE,
    TIGHT,
    TIMED,
    UNCACHED,
    RunSpec,
    make_run,
    nearest_to_thesis,
    overridden,
    with_width,
)
from workbench.replay.simulator import POLICIES as POLICY_CLASSES
from workbench.replay.workload import IN_FLIGHT, load_recording
from workbench.search.search import SYSTEM_PROMPTS

# -- profiles --

EVERY_SHARE = (0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
PROFILES: dict[str, dict[str, Any]] = {
    "quick": {"num_problems": 12, "seeds": (0,), "shares": (0.08, 0.2, 0.3, 0.5)},
    "default": {"num_problems": 32, "seeds": (0,), "sentinel_every": 5},
    "full": {"num_problems": 128, "seeds": (0, 1, 2, 3, 4), "shares": EVERY_SHARE},
    "thesis": {
        "llm": "llama-3.2-1b",
        "prm": "llama-3.1-8b-prm",
        "total_memory": "40GiB",
        "activations_in_total": True,
        "dtype": "bfloat16",
        "device": "cuda",
        "max_model_len": 4096,
        "problems": "math500",
        "system_prompt": SYSTEM_PROMPTS["search-and-learn"],
        "prm_format": "rlhflow",
        "num_problems": 128,
        "seeds": (0, 1, 2, 3, 4),
        "shares": EVERY_SHARE,
        "max_step_tokens": 2048,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "min_problem_batch": IN_FLIGHT,
    },
}
"""Settings that differ from SweepConfig's own. Problems in flight are the same for every study of a
pair, and no profile has fewer problems: need and room keep their ratio. Problems rather than
seeds: a search begins and ends with empty caches.
"""
SECONDS_PER_PROBLEM = {"tiny": 0.55, "math500": 60.0}
"""Rough cost of one problem of a family, until this machine has finished a run."""


def sweep_config(profile: str = "default", **overrides: Any) -> SweepConfig:
    """The sweep of a profile with settings overridden (None: the profile's own)."""
    require_known([profile], list(PROFILES), "The study", "profile")
    own = PROFILES[profile] | {"profile": profile}
    return SweepConfig.from_dict(own | with_width(overridden(overrides)))


# -- replayed rungs --

SIZES = dict.fromkeys(("full", "thesis"), (128, (0, 1, 2)))
"""Problems and seeds of a profile, else as many problems as are in flight, and one seed."""
SURER = {"full": {THESIS_SHARE: 128, 0.4: 128, 0.45: 16}}
"""A profile's seeds of the replayed pair at shares where some lose more than others, and at the one
that all are compared with."""
RECORDED_MEMORY, RECORDED_LENGTH = "2.25GiB", 2048
"""The least memory in which a share of 0.08 holds a request of so many tokens; none is as long."""
ALIKE = {"warmup_problems": 0, "sentinel_every": 0}  # no simulated second is slower than others
RECORDED_SETTINGS = ("min_problem_batch", "score_cache", "temperature", "top_p", "top_k", "min_p",
                     "max_step_tokens", "voting", "prm_format")  # fmt: skip


def recorded_config(profile: str = "default", **overrides: Any) -> SweepConfig:
    """The search of RECORDING over a profile's shares: for its own models, or to be replayed."""
    found = load_recording(RECORDING)
    own = {name: getattr(found.settings, name) for name in RECORDED_SETTINGS}
    own |= {n: found.settings.strategy_settings[n] for n in ("n", "beam_width", "max_depth")}
    own |= {"llm": found.llm.name, "prm": found.prm.name, "problems": RECORDING,
            "num_problems": len(found.problems), "seeds": (found.settings.seed,),
            "total_memory": RECORDED_MEMORY, "max_model_len": RECORDED_LENGTH,
            "system_prompt": SYSTEM_PROMPTS["search-and-learn"]}  # fmt: skip
    own |= {"shares": sweep_config(profile).shares, "profile": profile} | ALIKE
    return SweepConfig.from_dict(own | overridden(overrides))


def replayed_config(profile: str = "default", **overrides: Any) -> SweepConfig:
    """The thesis profile's models and limits, the profile's shares."""
    num_problems, seeds = SIZES.get(profile, (IN_FLIGHT, (0,)))
    own = dict[str, Any](num_problems=num_problems, seeds=seeds)
    own |= {"shares": sweep_config(profile).shares, "profile": profile} | ALIKE
    return SweepConfig.from_dict(PROFILES["thesis"] | own | with_width(overridden(overrides)))


WRITING = {"prm": "qwen2.5-1.5b-instruct", "total_memory": "8GiB", "num_problems": IN_FLIGHT,
           "shares": (0.35, 0.38, 0.41, 0.44, 0.5, 0.56)}  # fmt: skip
WRITES = {"prm_format": "thinkprm", "critiques": 1, "critique_tokens": 512}
"""A PRM that writes a critique before it scores."""


def writing_config(profile: str = "default", **overrides: Any) -> SweepConfig:
    """The LLM beside a PRM small enough to write."""
    return replayed_config(profile, **WRITING | overridden(overrides))


# -- the memory split --

SENTINELS_FROM = 6
"""Sweeps of so few runs have no room for drift to show, and no sentinel."""


def split_runs(config: SweepConfig) -> list[RunSpec]:
    """Every share with every seed in shuffled order; the sentinel first and after every so many.

    One share alone of a policy that keeps no split: it does not matter to it. ConfigError for a
    policy where the total pays for activations: those are measured later.
    """
    shares = config.shares
    if config.policy and not POLICY_CLASSES[config.policy]().keeps_split:
        shares = (nearest_to_thesis(shares),)
    if config.policy and config.activations_in_total:
        raise refused(SweepConfig, "policy", config.policy, "None with activations_in_total=True")
    planned = [RunSpec(config, *each) for each in product(shares, config.seeds)]
    random.Random(config.order_seed).shuffle(planned)
    if config.sentinel_every and len(planned) > SENTINELS_FROM:
        sentinel = RunSpec(config, config.sentinel_share, config.seeds[0], SENTINEL)
        starts = range(0, len(planned), config.sentinel_every)
        for number in reversed(range(len(starts))):
            planned.insert(starts[number], replace(sentinel, repeat=number + 1))
    return planned


# -- plans: how much the other studies run; fields are called as their notebook's parameters --

FROM_0 = ("depth_limits", "queue_problems", "repeats", "num_alone", "surer")
"""Fields of plans that may be 0, or an empty list."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Counts from 1 (FROM_0: from 0), shares in (0, 1), and lists of them, nothing twice."""

    def __post_init__(self) -> None:
        check(self)
        for field in fields(self):
            value = getattr(self, field.name)
            each = value if isinstance(value, tuple) else (value,)
            least = 0 if field.name in FROM_0 else 1
            share = field.name.endswith(("share", "shares"))
            fine = all(0 < v < 1 if share else v >= least or 0 < v < 1 for v in each)
            twice = field.name != "num_problems" and len(set(each)) < len(each)
            if not fine or twice or (least and not each):
                allowed = "shares in (0, 1)" if share else f"numbers from {least}"
                raise refused(type(self), field.name, value, f"{allowed}, each once")


@dataclass(frozen=True, slots=True)
class BatchPlan(Plan):
    """The limits that are tried, of requests of searches of `batch_problems`.

    compared_seqs: at which static batches stand beside continuous ones; without a prefix cache
    every so many requests are enough. num_seeds: of the profile's, the first so many; each timed
    cell is asked the requests of a search with each.
    """

    grid_seqs: tuple[int, ...] = (8, 64, 512)
    grid_tokens: tuple[int, ...] = (256, 2048, 16384)
    compared_seqs: tuple[int, ...] = (8, 16, 64)
    compared_every: int = 6
    block_sizes: tuple[int, ...] = (1, 4, 16, 64)
    batch_problems: int = 4
    num_seeds: int = 1


@dataclass(frozen=True, slots=True)
class AblationPlan(Plan):
    """How much of the ablation is run.

    depth_limits: beside the profile's own. num_seeds: of the profile's, the first so many;
    dear_seeds: of settings without a score cache, of lower depth limits and of the longer queue.
    repeats: of the last setting, for the noise. queue_problems: of that queue; 0: none.
    """

    num_problems: int = 12
    depth_limits: tuple[int, ...] = (4,)
    num_seeds: int = 1
    dear_seeds: int = 1
    repeats: int = 1
    queue_problems: int = 24
    ablation_share: float = THESIS_SHARE


@dataclass(frozen=True, slots=True)
class PolicyPlan(Plan):
    """How much of the study of policies is run.

    num_seeds: of the profile's, the first so many. budgets: KV in multiples of the working set W.
    num_alone, alone_shares: how many of them, the smallest first, and static shares at which every
    technique is measured alone; at other budgets all of them together. repeats: of the default
    policy at the smallest, for the noise.
    """

    num_problems: int = 12
    num_seeds: int = 1
    budgets: tuple[float, ...] = (0.5,)
    kv_shares: tuple[float, ...] = (0.3, 0.5, 0.7)
    num_alone: int = 1
    alone_shares: tuple[float, ...] = (THESIS_SHARE,)
    repeats: int = 2


@dataclass(frozen=True, slots=True)
class StrategyPlan(Plan):
    """Every strategy with each of the numbers of beams. num_problems: one for all of these, or one
    for each, of a list that begins alike; the fewer, the nearer accuracy is to 1. What only votes
    stays far from that, however many beams it has, and takes the most. surer: problems of FAR with
    MANY beams, for whom the others' are too few. num_seeds: the profile's first so many.
    """

    num_problems: int | tuple[int, ...] = 12
    beam_counts: tuple[int, ...] = (4, 16)
    num_seeds: int = 1
    surer: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        Plan.__post_init__(self)  # slots leave super() no class
        if len(self.problem_counts) != len(self.beam_counts):
            allowed = f"one number, or one for each of beam_counts {self.beam_counts}"
            raise refused(type(self), "num_problems", self.num_problems, allowed)

    @property
    def problem_counts(self) -> tuple[int, ...]:
        """Problems of a run, for each of beam_counts."""
        given = self.num_problems
        return given if isinstance(given, tuple) else (given,) * len(self.beam_counts)


_POWERS = tuple(2**k for k in range(15))
_GRID = BatchPlan(_POWERS[3:10], _POWERS[8:], _POWERS[3:10], 6, _POWERS[:7], 32, 3)
REPLAYED_GRID = BatchPlan(
    _POWERS[3:10],
    _POWERS[8:],
    (8, 16, 32, 64, 128),
    block_sizes=(16,),
    batch_problems=32,
    num_seeds=3,
)
"""What is replayed of batch limits, whatever the profile measures."""
_OF_KV = (0.2, 0.3, 0.5, 0.7)
_POLICIES = PolicyPlan(48, 3, (0.5, 1.0, 2.0), _OF_KV, 2, _OF_KV, 2)
PLANS: dict[type[Plan], dict[str, Any]] = {
    BatchPlan: {"quick": BatchPlan((8, 64), (256, 2048), (8, 16), 4, (4, 16, 64), 2),
                "full": _GRID, "thesis": _GRID},
    AblationPlan: {"full": AblationPlan(128, (4, 8, 16, 24, 32), 3, 1, 3, 0),
                   "thesis": AblationPlan(128, (4, 16), 5, queue_problems=0)},
    PolicyPlan: {"full": _POLICIES, "thesis": _POLICIES},
    StrategyPlan: {"full": StrategyPlan((1072, 640, 384), (4, 16, 64), 1, (480, 560, 768)),
                   "thesis": StrategyPlan(128, (4, 16, 64), 5)},
}  # fmt: skip


def replayed_ablation(config: SweepConfig, plan: AblationPlan) -> AblationPlan:
    """Replayed are the problems of a replayed rung, and twice as many: the second half waits. A
    recording has no more than its own. At the share of the measured plan, with as many of its own
    seeds; none is dear.
    """
    count, seeds = config.num_problems, plan.num_seeds
    queue = 0 if config.problems == RECORDING else 2 * count
    return AblationPlan(count, (), seeds, seeds, 0, queue, plan.ablation_share)


def replayed_policies(config: SweepConfig, plan: PolicyPlan) -> PolicyPlan:
    """A replayed rung's problems, and nothing again: its seconds have no noise."""
    return replace(plan, num_problems=config.num_problems, repeats=0)


def plan_of(kind: type[Plan], profile: str, parameters: Mapping[str, Any] | None = None) -> Any:
    """A profile's plan (of no PLANS: its kind's own), `changed` by a notebook's parameters."""
    return changed(PLANS[kind].get(profile) or kind(), parameters or {})


def changed(plan: Plan, parameters: Mapping[str, Any]) -> Any:
    """The plan with those of a notebook's parameters that are its own and not None. A given number
    of problems is every strategy's.
    """
    names = {field.name for field in fields(plan)}
    own = {k: v for k, v in overridden(parameters).items() if k in names}
    if "num_problems" in own and "surer" in names:
        own.setdefault("surer", ())
    return replace(plan, **own)


# -- strategies --

VOTE_ONLY = ("self_consistency",)  # without a PRM
MANY, FAR = 64, ("beam_search", "lookahead", "ets")
"""Strategies whose accuracy so many beams leave farthest from 1, where more problems tell it."""


def strategy_runs(config: SweepConfig, plan: StrategyPlan) -> list[RunSpec]:
    """All strategies beside each other, seed by seed. With more beams than the study's 16 fewer
    problems are in flight: as many beams share the caches.
    """
    sizes, most = zip(plan.beam_counts, plan.problem_counts), max(plan.problem_counts)
    surer = dict(zip(FAR, plan.surer))

    def run(seed: int, n: int, count: int, name: str) -> RunSpec:
        if name in VOTE_ONLY:
            count = most
        elif n >= MANY:
            count = surer.get(name, count)
        own: Any = {"strategy": name, "n": n, "num_problems": count}
        own["min_problem_batch"] = max(1, config.min_problem_batch * 16 // max(n, 16))
        own["beam_width"] = min(config.beam_width, n)
        return make_run(config, THESIS_SHARE, seed, setting=f"{name}-n{n}", **own)

    cells = product(config.seeds[: plan.num_seeds], sizes, STRATEGIES)
    return [run(seed, *size, name) for seed, size, name in cells]


# -- batch limits --

KINDS: dict[str, dict[str, Any]] = {
    CONTINUOUS: {"batching": "continuous", "enable_prefix_caching": True},
    UNCACHED: {"batching": "continuous", "enable_prefix_caching": False},
    STATIC_BATCH: {"batching": "static", "enable_prefix_caching": False},
}
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "block_size")


def batch_runs(config: SweepConfig, plan: BatchPlan) -> list[RunSpec]:
    """One run a cell, model, and kind of batching, one seed after the other.

    Continuous batching takes the whole grid; static batches, and continuous ones as little cached
    as they, the study's own step; blocks are counted there for every block size, with one seed.
    """
    few = replace(config, num_problems=plan.batch_problems)
    usual, size = config.max_num_batched_tokens, config.block_size

    def cells(
        seed: int, role: str, kind: str, limits: Iterable[tuple[int, int, int]]
    ) -> list[RunSpec]:
        every, what = plan.compared_every, kind.replace(",", "").replace(" ", "-")
        found = []
        for model, each in product(ENGINES, limits):
            setting = f"{model}-{'x'.join(map(str, each))}-{what}"
            own: dict[str, Any] = {f"{model}_{name}": value for name, value in KINDS[kind].items()}
            own |= {"model": model, "kind": kind, "every": 1 if kind == CONTINUOUS else every}
            own |= zip(LIMITS, each)
            found.append(make_run(few, THESIS_SHARE, seed, role, setting, **own))
        return found

    # no engine takes more sequences than tokens in a step: all must be able to decode
    grid = [(s, t, size) for s, t in product(plan.grid_seqs, plan.grid_tokens) if s <= t]
    compared = [(s, max(s, usual), size) for s in plan.compared_seqs]
    sizes = [(s, max(s, usual), b) for s in plan.grid_seqs for b in plan.block_sizes]
    planned, order = list[RunSpec](), random.Random(config.order_seed)
    for seed in config.seeds[: plan.num_seeds]:
        runs = cells(seed, TIMED, CONTINUOUS, grid)
        for kind in (UNCACHED, STATIC_BATCH):
            runs += cells(seed, TIMED, kind, compared)
        if not planned:
            runs += cells(seed, COUNTED, CONTINUOUS, sizes)
        planned += order.sample(runs, len(runs))
    return planned


# -- the ablation of the thesis's modifications (section 5.3) --


class Named(NamedTuple):
    """Settings with names. label: as on a figure; said: within a sentence."""

    label: str
    said: str
    settings: dict[str, Any]


_TWO: dict[str, Any] = {
    "prm_enable_prefix_caching": False,
    "score_cache": False,
    "problem_batching": "static",
    "finish_at_limit": True,
}
_ONE = _TWO | {"prm_enable_prefix_caching": True}
_SCORES = _ONE | {"score_cache": True}
_FULL = _SCORES | {"problem_batching": "continuous"}
_STOP = _FULL | {"finish_at_limit": False}
_PADDED = _STOP | {"llm_batching": "static", "llm_enable_prefix_caching": False}
BATCHED = ("score_cache", "continuous_problems")
"""Settings that differ in problem batching."""
LAST_TWO = ("continuous_problems", "stop_at_limit")
BESIDE = "static_requests"
"""What the last is compared with: everything on, but the LLM batches requests statically."""
MODIFICATIONS = {
    "two_runtimes": Named("two runtimes:<br>a PRM without cache", "two runtimes", _TWO),
    "one_runtime": Named("+ one runtime:<br>a PRM with a cache", "one runtime", _ONE),
    BATCHED[0]: Named("+ score cache", "the score cache", _SCORES),
    LAST_TWO[0]: Named("+ continuous<br>problem batching", "continuous problem batching", _FULL),
    LAST_TWO[1]: Named("+ no sampling<br>to the end", "no sampling to the end", _STOP),
    BESIDE: Named("the last, LLM in static<br>padded batches", "static padded batches", _PADDED),
}
"""Each is the one before it with one more modification."""
COST = {"two_runtimes": 8.0, "one_runtime": 5.0, BESIDE: 2.0}
"""Roughly how many times as long as the others these take; measured on the tiny pair."""


def ablation_runs(config: SweepConfig, plan: AblationPlan) -> list[RunSpec]:
    """All settings seed by seed, LAST_TWO at lower depth limits, BATCHED over a longer queue."""
    own = replace(config, num_problems=plan.num_problems)
    share = plan.ablation_share
    room = feasibility(RunSpec(own, share, config.seeds[0]))
    most = min(config.max_num_seqs, max(1, room.blocks("llm") // room.llm.blocks))
    padded = 1 << (most.bit_length() - 1)  # members, a power of two: every batch surely fits

    def run(seed: int, key: str, role: str = ABLATION, repeat: int = 0, **sizes: int) -> RunSpec:
        sizes |= {"llm_max_num_seqs": padded} if key == BESIDE else {}
        settings = MODIFICATIONS[key].settings | sizes
        return make_run(own, share, seed, role, key, repeat, **settings)

    runs: list[RunSpec] = []
    for number, seed in enumerate(config.seeds[: plan.num_seeds]):
        dear = number < plan.dear_seeds
        keys = [key for key, m in MODIFICATIONS.items() if dear or m.settings["score_cache"]]
        runs += [run(seed, key) for key in keys]
        runs += [run(seed, LAST_TWO[1], repeat=k + 1) for k in range(plan.repeats) if not number]
        limits = [each for each in plan.depth_limits if dear and each < config.max_depth]
        runs += [run(seed, k, DEPTH, max_depth=limit) for limit in limits for k in LAST_TWO]
    seeds = config.seeds[: plan.dear_seeds] if plan.queue_problems else ()
    return runs + [
        run(seed, key, QUEUE, num_problems=plan.queue_problems) for seed in seeds for key in BATCHED
    ]


# -- policies and techniques: two engines in one arena, at tight budgets of KV --

UNCAPPED = 4
"""Times the sweep's total memory: KV that no search fills."""
STATIC, ELASTIC = "static", "marginal_value"
NONE, ALL = "none", "all"
_ALONE = {
    "partial_blocks": Named("partial blocks reused", "reuse of partial blocks",
                            {"reuse_partial_blocks": True}),
    "forget_pruned": Named("pruned beams forgotten", "forgetting pruned beams",
                           {"forget_pruned": True}),
    "adaptive": Named("adaptive problem batching", "adaptive problem batching",
                      {"problem_batching": "adaptive"}),
    "prefix_order": Named("prefix-aware order", "prefix-aware order", {"request_order": "prefix"}),
}  # fmt: skip
_TOGETHER = {name: value for each in _ALONE.values() for name, value in each.settings.items()}
TECHNIQUES = {
    NONE: Named("none", "no technique", {}),
    **_ALONE,
    ALL: Named("all techniques", "all techniques that gain together", _TOGETHER),
}
"""None of them changes a token (search/rounds.py says what each does)."""


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """What the searches need with memory uncapped: each model's own peak, in bytes of KV, and the
    tokens of the longest sequence.
    """

    llm: int
    prm: int
    longest: int

    @property
    def total(self) -> int:
        """W, the unit of budgets: what a split needs that gives each model its own peak."""
        return self.llm + self.prm

    def max_model_len(self, block_size: int) -> int:
        """The least limit, in whole blocks, that cuts no sequence short."""
        return -(-(self.longest + 1) // block_size) * block_size


def setting_of(budget: float | None, policy: str, kv_share: float | None, technique: str) -> str:
    """BUDGET/POLICY/TECHNIQUE, e.g. "0.5W/static_0.3/none"."""
    name = "uncapped" if budget is None else f"{budget:g}W"
    return f"{name}/{policy if kv_share is None else f'{policy}_{kv_share:g}'}/{technique}"


def reference_runs(config: SweepConfig, plan: PolicyPlan) -> list[RunSpec]:
    """Memory uncapped, without techniques: they tell W, and what every setting must sample."""
    seeds = config.seeds[: plan.num_seeds]
    return [_policy_run(config, plan, seed, role=REFERENCE) for seed in seeds]


def policy_runs(config: SweepConfig, plan: PolicyPlan, working_set: WorkingSet) -> list[RunSpec]:
    """Every budget with every policy and share, and beside them the uncapped search with all
    techniques, whose pace is the bound. Budgets are of KV alone, split by `kv_share`.
    """
    tight = replace(config, max_model_len=working_set.max_model_len(config.block_size))
    runs: list[RunSpec] = []
    for seed, budget in product(config.seeds[: plan.num_seeds], plan.budgets):
        settings: list[tuple[str, float | None, str]]
        settings = [(STATIC, share, NONE) for share in plan.kv_shares]
        settings += [(policy, None, NONE) for policy in POLICIES if policy != STATIC]
        near = [min(plan.kv_shares, key=lambda s: abs(s - at)) for at in plan.alone_shares]
        keys = (*_ALONE, ALL) if budget in sorted(plan.budgets)[: plan.num_alone] else (ALL,)
        settings += [(STATIC, share, key) for share in dict.fromkeys(near) for key in keys]
        settings.append((ELASTIC, None, ALL))
        at: dict[str, Any] = {"kv_bytes": round(budget * working_set.total), "budget": budget}
        runs += [_policy_run(tight, plan, seed, *each, **at) for each in settings]
        elastic = _policy_run(tight, plan, seed, ELASTIC, **at)
        again = range(1, plan.repeats + 1) if budget == min(plan.budgets) else ()
        runs += [replace(elastic, repeat=number) for number in again]
        runs.append(_policy_run(config, plan, seed, technique=ALL, role=REFERENCE, beside=budget))
    return runs


def _policy_run(
    config: SweepConfig,
    plan: PolicyPlan,
    seed: int,
    policy: str = "first_come",
    kv_share: float | None = None,
    technique: str = NONE,
    role: str = TIGHT,
    **own: Any,
) -> RunSpec:
    """own: budget and kv_bytes, or beside. llm_share: what the split comes to; of a policy without
    a share, what it starts from.
    """
    own = {"kv_bytes": UNCAPPED * parse_size(config.total_memory)} | own
    own["num_problems"] = plan.num_problems
    fixed, kv_bytes = shares_of(config, total="1TiB"), own["kv_bytes"]
    share = kv_share if kv_share is not None else starting_share(config, kv_bytes)
    total = kv_bytes + fixed.llm.fixed + fixed.prm.fixed
    own |= {"policy": policy, "kv_share": kv_share, "technique": technique, "total_memory": total}
    llm_share = (fixed.llm.fixed + round(kv_bytes * share)) / total
    setting = setting_of(own.get("budget"), policy, kv_share, technique)
    settings = own | TECHNIQUES[technique].settings
    return make_run(config, llm_share, seed, role, setting, **settings)
