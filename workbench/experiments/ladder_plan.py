"""Which runs the ladder of the thesis's modifications (section 5.3) consists of.

A rung is the one before it with one more switch; all rungs search the same problems with the same
seeds at one split, so they are paired. Beside the last stands the same with the LLM's requests in
static, padded batches. More runs stop at lower depth limits, where sampling to the end can matter.
Nothing here loads a model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from workbench.config import EngineConfig, StrategyConfig, SweepConfig
from workbench.errors import ConfigError
from workbench.experiments.feasible import feasibility
from workbench.experiments.plan import RunSpec
from workbench.experiments.profiles import overridden

LADDER, DEPTH, QUEUE = "ladder", "depth", "queue"
"""Roles: a rung at the profile's depth limit; one of the last two rungs at a lower limit; one that
differs in problem batching, over a longer queue.
"""


@dataclass(frozen=True, slots=True)
class Switches:
    """The modifications of section 5.3, each off as the thesis found its baseline."""

    prm_cache: bool = False  # the PRM lives in this runtime and keeps its prefixes
    score_cache: bool = False
    problem_batching: str = "static"
    finish_at_limit: bool = True
    llm_batching: str = "continuous"  # or "static": padded batches, and no prefix cache


@dataclass(frozen=True, slots=True)
class Rung:
    """One setting of the switches. label: as on the figure's axis; said: within a sentence."""

    key: str
    label: str
    said: str
    switches: Switches


_TWO = Switches()
_ONE = replace(_TWO, prm_cache=True)
_SCORES = replace(_ONE, score_cache=True)
_FULL = replace(_SCORES, problem_batching="continuous")
_STOP = replace(_FULL, finish_at_limit=False)
LAST_TWO = ("continuous_problems", "stop_at_limit")
BATCHED = ("score_cache", "continuous_problems")
"""Rungs that differ in problem batching."""
RUNGS = (
    Rung("two_runtimes", "two runtimes:<br>a PRM without cache", "two runtimes", _TWO),
    Rung("one_runtime", "+ one runtime:<br>a PRM with a cache", "one runtime", _ONE),
    Rung("score_cache", "+ score cache", "the score cache", _SCORES),
    Rung(LAST_TWO[0], "+ continuous<br>problem batching", "continuous problem batching", _FULL),
    Rung(LAST_TWO[1], "+ no sampling<br>to the end", "no sampling to the end", _STOP),
)
BESIDE = Rung(
    "static_requests",
    "the last, LLM in static<br>padded batches",
    "static padded batches",
    replace(_STOP, llm_batching="static"),
)
"""What the last rung is compared with: everything on, but the LLM batches requests statically."""
BY_KEY = {rung.key: rung for rung in (*RUNGS, BESIDE)}
COST = {"two_runtimes": 8.0, "one_runtime": 5.0, BESIDE.key: 2.0}
"""Roughly how many times as long as the others these rungs take; measured on the tiny pair."""


@dataclass(frozen=True, slots=True)
class LadderPlan:
    """How much is run.

    in_flight: problems at once, fewer than there are, so that there is a queue to be kept full
    from. depth_limits: those tried beside the profile's own. dear_seeds: the first so many seeds
    are those of the rungs without a score cache, which take several times as long, of the lower
    depth limits and of the longer queue. repeats: times the last rung's first seed is run again,
    which tells the machine's noise. queue_problems: of the longer queue over which problem batching
    is measured, since of few problems the last ones drain. in_turns: all rungs in the same minutes
    (ladder_turns.py), each in a process of its own; of models for which `can_take_turns`.
    """

    num_problems: int = 6
    in_flight: int = 2
    depth_limits: tuple[int, ...] = (4, 8, 16)
    dear_seeds: int = 1
    repeats: int = 1
    queue_problems: int = 20  # 0: the ladder's own are queue enough
    queue_in_flight: int = 4
    llm_share: float = 0.3  # the thesis's baseline
    in_turns: bool = False

    def __post_init__(self) -> None:
        names = ("num_problems", "in_flight", "dear_seeds", "queue_in_flight")
        counts = {name: getattr(self, name) for name in names}
        if (
            min(counts.values(), default=1) < 1
            or min(self.repeats, self.queue_problems) < 0
            or not (0 < self.llm_share < 1)
        ):
            given = ", ".join(f"{name}={count}" for name, count in counts.items())
            raise ConfigError(
                f"LadderPlan got {given}, repeats={self.repeats}, queue_problems="
                f"{self.queue_problems}, llm_share={self.llm_share}; allowed: at least 1 each, 0 "
                "or more repeats and queue_problems, and a share in (0, 1)."
            )
        limits = self.depth_limits
        if min(limits, default=1) < 1 or len(set(limits)) < len(limits):
            raise ConfigError(
                f"LadderPlan.depth_limits is {limits!r}; allowed: whole numbers from 1, each once."
            )


PLANS = {
    "quick": LadderPlan(4, 2, (4, 8), queue_problems=8, queue_in_flight=2),
    "default": LadderPlan(in_turns=True),
    "full": LadderPlan(
        128, 12, (4, 8, 16, 24, 32), dear_seeds=2, repeats=3, queue_problems=0, in_turns=True
    ),
    "thesis": LadderPlan(128, 16, (4, 8, 16), dear_seeds=1, repeats=1, queue_problems=0),
}

LADDER_PARAMETERS = {
    "num_problems": "num_problems",
    "in_flight": "in_flight",
    "depth_limits": "depth_limits",
    "queue_problems": "queue_problems",
    "ladder_share": "llm_share",
}
"""Parameters of the notebook and the fields of LadderPlan they set."""


def ladder_plan(profile: str = "default", **overrides: Any) -> LadderPlan:
    """The profile's plan with the overrides that are not None; lists become tuples."""
    return replace(PLANS[profile], **overridden(overrides))


@dataclass(frozen=True, slots=True)
class LadderSpec(RunSpec):
    """One search on one rung. in_turns: see LadderPlan."""

    rung: Rung = field(default=RUNGS[-1])
    in_turns: bool = False

    @property
    def name(self) -> str:
        """Readable half of the run folder's name."""
        limit, problems = self.config.max_depth, self.config.num_problems
        at = {DEPTH: f"-depth{limit}", QUEUE: f"-queue{problems}"}.get(self.role, "")
        return f"{LADDER}{self.repeat or ''}-{self.rung.key}{at}-seed{self.seed}"

    @property
    def parameters(self) -> dict[str, Any]:
        switches = {f.name: getattr(self.rung.switches, f.name) for f in fields(Switches)}
        own = {"ladder": self.rung.key, "static_seqs": self.static_seqs, "in_turns": self.in_turns}
        return super(LadderSpec, self).parameters | switches | own

    @property
    def search(self) -> StrategyConfig:
        """The search of the sweep with the rung's switches."""
        switches = self.rung.switches
        return replace(
            self.config.search(),
            score_cache=switches.score_cache,
            problem_batching=switches.problem_batching,
            finish_at_limit=switches.finish_at_limit,
        )

    def engine(self, role: str) -> EngineConfig:
        """The sweep's engine of this role with the rung's switches."""
        usual = super(LadderSpec, self).engine(role)
        switches = self.rung.switches
        if role == "prm":
            return replace(usual, enable_prefix_caching=switches.prm_cache)
        if switches.llm_batching == "continuous":
            return usual
        seqs = self.static_seqs or 1
        return replace(usual, batching="static", enable_prefix_caching=False, max_num_seqs=seqs)

    @property
    def static_seqs(self) -> int | None:
        """Members of a padded batch: the largest power of two of which every batch surely fits.

        None where requests are batched continuously.
        """
        if self.rung.switches.llm_batching == "continuous":
            return None
        room = feasibility(RunSpec(self.config, self.llm_share, self.seed))
        most = room.llm.num_blocks(room.llm_bytes) // room.llm.blocks
        return 1 << (min(self.config.max_num_seqs, max(1, most)).bit_length() - 1)


def ladder_config(config: SweepConfig, plan: LadderPlan) -> SweepConfig:
    """The sweep's settings with the plan's problems, those in flight, and no sentinel."""
    return replace(
        config,
        num_problems=plan.num_problems,
        min_problem_batch=plan.in_flight,
        sentinel_every=0,
    )


def ladder_runs(config: SweepConfig, plan: LadderPlan) -> list[LadderSpec]:
    """All runs, seed by seed; within a seed every rung once, in shuffled order."""
    own, spec = ladder_config(config, plan), partial(LadderSpec, in_turns=plan.in_turns)
    order = random.Random(config.order_seed)
    runs: list[LadderSpec] = []
    for number, seed in enumerate(config.seeds):
        rungs = [r for r in BY_KEY.values() if number < plan.dear_seeds or r.switches.score_cache]
        specs = [spec(own, plan.llm_share, seed, LADDER, 0, rung) for rung in rungs]
        limits = plan.depth_limits if number < plan.dear_seeds else ()
        specs += [
            LadderSpec(replace(own, max_depth=limit), plan.llm_share, seed, DEPTH, 0, BY_KEY[key])
            for limit in limits
            if limit < config.max_depth
            for key in LAST_TWO
        ]
        again = range(1, plan.repeats + 1) if number == 0 else ()
        specs += [spec(own, plan.llm_share, seed, LADDER, k, RUNGS[-1]) for k in again]
        runs += order.sample(specs, len(specs))
    return runs


def queue_runs(config: SweepConfig, plan: LadderPlan) -> list[LadderSpec]:
    """The two rungs that differ in problem batching over the longer queue, seed by seed."""
    if not plan.queue_problems:
        return []
    own = replace(
        ladder_config(config, plan),
        num_problems=plan.queue_problems,
        min_problem_batch=plan.queue_in_flight,
    )
    seeds = config.seeds[: plan.dear_seeds]
    spec = partial(LadderSpec, own, plan.llm_share, in_turns=plan.in_turns)
    return [spec(seed, QUEUE, 0, BY_KEY[key]) for seed in seeds for key in BATCHED]
