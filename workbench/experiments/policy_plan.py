"""Which runs the study of policies consists of: two engines in one arena, at a tight KV budget.

A run is one search with a KV budget in multiples of the working set W, a policy, and a set of
techniques; runs of one seed search the same problems, so they are paired. The budget is of KV
alone, hence its split is `kv_share`, used as it is: at these budgets the weights are most of the
memory, and the thesis's axis (llm_share, weights included) would leave one model nothing over most
of its interval. Each run says the llm_share that its split comes to. Nothing here loads a model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from workbench.config import EngineConfig, StrategyConfig, SweepConfig, parse_size
from workbench.errors import ConfigError
from workbench.experiments.feasible import FeasibleShares, feasible_shares
from workbench.experiments.plan import RunSpec
from workbench.experiments.policy_techniques import ALL, ALONE, NONE, TECHNIQUES
from workbench.experiments.profiles import overridden
from workbench.experiments.starting_share import starting_share
from workbench.kvcache.policies import FirstCome, MarginalValue, PhaseAware, Policy, StaticSplit

REFERENCE, TIGHT = "reference", "policy"
"""Roles: memory uncapped, which tells W and the longest sequence; or a budget of the study."""
UNCAPPED = "256MiB"
STATIC, ELASTIC = "static", "marginal_value"
POLICIES: dict[str, type[Policy]] = {
    STATIC: StaticSplit,
    "first_come": FirstCome,
    "phase_aware": PhaseAware,
    ELASTIC: MarginalValue,
}
THESIS_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """What the searches need with memory uncapped, in bytes of KV.

    llm, prm: each model's own peak of active blocks. longest: tokens of the longest sequence
    either model was asked.
    """

    llm: int
    prm: int
    longest: int

    @property
    def total(self) -> int:
        """W, the unit of budgets: what a split needs that gives each model its own peak."""
        return self.llm + self.prm

    @property
    def at_once(self) -> int:
        """The peak of both at one time: the models take turns."""
        return max(self.llm, self.prm)

    def max_model_len(self, block_size: int) -> int:
        """The least limit, in whole blocks, that cuts no sequence short."""
        return -(-(self.longest + 1) // block_size) * block_size


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """How much is run.

    in_flight: problems at once, fewer than there are, so that there is a queue to be kept full
    from. budgets: KV in multiples of W. alone_at: budgets at
    which every technique is measured alone, over the shares. num_seeds: of the profile's, the first
    so many. repeats: of the default policy alone at every budget, which tell the machine's noise.
    in_turns: those of a budget and seed at one time (in_turns.py), each in a process of its own, so
    that the pace of the machine is the same for all; of models for which `can_take_turns`.
    """

    num_problems: int = 8
    in_flight: int = 6
    num_seeds: int = 1
    budgets: tuple[float, ...] = (0.5, 1.0)
    kv_shares: tuple[float, ...] = (0.08, 0.2, 0.3, 0.4, 0.5)
    alone_at: tuple[float, ...] = (0.5,)
    repeats: int = 0
    in_turns: bool = False

    def __post_init__(self) -> None:
        counts = {n: getattr(self, n) for n in ("num_problems", "in_flight", "num_seeds")}
        if min(counts.values()) < 1:
            given = ", ".join(f"{name}={count}" for name, count in counts.items())
            raise ConfigError(f"PolicyPlan got {given}; allowed: at least 1 each.")
        if not self.budgets or min(self.budgets) <= 0 or not set(self.alone_at) <= {*self.budgets}:
            raise ConfigError(
                f"PolicyPlan got budgets={self.budgets}, alone_at={self.alone_at}; allowed: "
                "multiples of the working set above 0, and of them those to be looked at closer."
            )
        if not self.kv_shares or not all(0 < share < 1 for share in self.kv_shares):
            raise ConfigError(f"PolicyPlan.kv_shares is {self.kv_shares}; allowed: in (0, 1).")


_THESIS = PolicyPlan(128, 12, 5, (0.5, 1.0, 2.0), (0.08, 0.2, 0.3, 0.4, 0.5), (0.5, 1.0), 2)
PLANS = {
    "quick": PolicyPlan(4, 2, 1, (0.5, 1.0), (0.2, 0.3, 0.5), (0.5,), 1),
    "default": PolicyPlan(num_seeds=2, repeats=2, in_turns=True),
    "full": replace(_THESIS, in_turns=True),
    "thesis": _THESIS,
}


ROUND = 12
"""Runs that take turns with each other, processes of a third of a GiB; the bound is one more."""


@dataclass(frozen=True, slots=True)
class PolicySpec(RunSpec):
    """One search of two engines in one arena.

    budget: in multiples of W, None where memory is uncapped; kv_bytes: the same in bytes. kv_share:
    the LLM's part of it, None where the policy starts from its own split. in_turns: see PolicyPlan.
    """

    budget: float | None = None
    kv_bytes: int = 0
    policy: str = ELASTIC
    kv_share: float | None = None
    technique: str = NONE
    in_turns: bool = False

    @property
    def setting(self) -> dict[str, Any]:
        """What tells this run from the study's others of its seed."""
        return {
            "budget": self.budget,
            "kv_bytes": self.kv_bytes,
            "policy": self.policy,
            "kv_share": self.kv_share,
            "technique": self.technique,
            "in_turns": self.in_turns,
        }

    @property
    def name(self) -> str:
        """Readable half of the run folder's name."""
        budget = "uncapped" if self.budget is None else f"{self.budget:g}W"
        again = str(self.repeat or "")
        return f"{TIGHT}{again}-{budget}-{self.policy_name}-{self.technique}-seed{self.seed}"

    @property
    def policy_name(self) -> str:
        """The policy, a static one with its share."""
        return policy_name(self.policy, self.kv_share)

    @property
    def parameters(self) -> dict[str, Any]:
        return super(PolicySpec, self).parameters | self.setting

    @property
    def total_bytes(self) -> int:
        """KV and the weights of both models."""
        needs = room(self.config)
        return self.kv_bytes + needs.llm.fixed + needs.prm.fixed

    @property
    def llm_bytes(self) -> int:
        """The LLM's weights and its part of the KV; where it may vary, what it starts from."""
        share = starting_share(self.config, self.kv_bytes, self.kv_share)
        return room(self.config).llm.fixed + round(self.kv_bytes * share)

    @property
    def search(self) -> StrategyConfig:
        """The search with the techniques' switches."""
        return replace(self.config.search(), **TECHNIQUES[self.technique].search)

    def engine(self, role: str) -> EngineConfig:
        """Settings of one engine; its memory is the arena's."""
        usual = super(PolicySpec, self).engine(role).to_dict()
        own = TECHNIQUES[self.technique].engine
        return EngineConfig.from_dict({**usual, "memory": None, **own})


def policy_name(policy: str, kv_share: float | None) -> str:
    """static_0.3, marginal_value, ..."""
    return policy if policy != STATIC else f"{STATIC}_{kv_share:g}"


def room(config: SweepConfig) -> FeasibleShares:
    """What both models take beside KV, and their least KV: one request of max_model_len each."""
    return feasible_shares(
        config.llm,
        config.prm,
        "1TiB",
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        dtype=config.dtype,
    )


def policy_plan(profile: str = "default", **overrides: Any) -> PolicyPlan:
    """The profile's plan with the overrides that are not None; lists become tuples.

    Of other budgets the smallest is looked at closer, unless alone_at says otherwise.
    """
    changed = overridden(overrides)
    if "budgets" in changed:
        changed = {"alone_at": (min(changed["budgets"]),)} | changed
    return replace(PLANS[profile], **changed)


POLICY_PARAMETERS = {
    "budgets": "budgets",
    "kv_shares": "kv_shares",
    "num_problems": "num_problems",
}
"""Parameters of the notebook and the fields of PolicyPlan they set."""


def policy_config(config: SweepConfig, plan: PolicyPlan) -> SweepConfig:
    """The sweep's settings with the plan's problems and seeds, and no sentinel."""
    return replace(
        config,
        num_problems=plan.num_problems,
        min_problem_batch=plan.in_flight,
        seeds=config.seeds[: plan.num_seeds],
        sentinel_every=0,
    )


def reference_runs(config: SweepConfig) -> list[PolicySpec]:
    """Memory uncapped, without techniques and with all: W and the ceiling. config: the study's."""
    size = parse_size(UNCAPPED)
    return [
        _spec(config, seed, REFERENCE, None, size, "first_come", None, technique)
        for seed in config.seeds
        for technique in (NONE, ALL)
    ]


def tight_runs(config: SweepConfig, plan: PolicyPlan, working_set: WorkingSet) -> list[PolicySpec]:
    """Every budget with every policy and share, and what is repeated, seed by seed; in shuffled
    order within a seed, or round by round.

    config: the study's.
    """
    limit = working_set.max_model_len(config.block_size)
    own = replace(config, max_model_len=limit)
    order = random.Random(config.order_seed)
    runs: list[PolicySpec] = []
    for seed in config.seeds:
        specs = [
            spec
            for budget in plan.budgets
            for spec in runs_at(own, seed, budget, round(budget * working_set.total), plan)
        ]
        runs += specs if plan.in_turns else order.sample(specs, len(specs))
    return runs


def runs_at(
    config: SweepConfig, seed: int, budget: float, kv_bytes: int, plan: PolicyPlan
) -> list[PolicySpec]:
    """Of one budget, those without a technique first; repeats a round apart, for their noise."""
    runs = [
        replace(_spec(config, seed, TIGHT, budget, kv_bytes, *setting), in_turns=plan.in_turns)
        for setting in settings_at(budget, plan)
    ]
    runs.sort(key=lambda spec: spec.technique != NONE)
    elastic = next(spec for spec in runs if (spec.policy, spec.technique) == (ELASTIC, NONE))
    for number in range(1, plan.repeats + 1):
        runs.insert(number * ROUND, replace(elastic, repeat=number))
    return runs


def settings_at(budget: float, plan: PolicyPlan) -> Iterator[tuple[str, float | None, str]]:
    """Policy, kv_share and technique of each run at a budget."""
    alone = ALONE if budget in plan.alone_at else ()
    together = (ALL,) if budget in plan.alone_at else ()
    for share in plan.kv_shares:
        for technique in (NONE, *alone, *together):
            yield STATIC, share, technique
    for policy in POLICIES:
        if policy != STATIC:
            yield policy, None, NONE
    yield ELASTIC, None, ALL


def _spec(
    config: SweepConfig,
    seed: int,
    role: str,
    budget: float | None,
    kv_bytes: int,
    policy: str,
    kv_share: float | None,
    technique: str,
) -> PolicySpec:
    needs = room(config)
    llm = needs.llm.fixed + round(kv_bytes * starting_share(config, kv_bytes, kv_share))
    share = round(llm / (kv_bytes + needs.llm.fixed + needs.prm.fixed), 6)
    return PolicySpec(config, share, seed, role, 0, budget, kv_bytes, policy, kv_share, technique)
