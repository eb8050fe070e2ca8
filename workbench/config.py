"""The settings of an engine, a search and a sweep: frozen, checked at construction.

`check` judges each field by its declared type, choices and range; `from_dict` refuses a key it does
not know. Nothing here reads the machine or loads a model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Self, get_args, get_origin, get_type_hints

from workbench.errors import ConfigError, nearest

_UNITS = {"": 1, "b": 1} | {
    prefix + ending: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("ib", 1024), ("b", 1000))
}


def parse_size(size: int | str) -> int:
    """Bytes of a size given as a number of bytes or as text ("1GiB", "64 MiB", "500MB")."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(size).lower())
    exact = float(found[1]) * _UNITS[found[2]] if found and found[2] in _UNITS else 0.0
    num_bytes = int(exact) if math.isfinite(exact) else 0
    if num_bytes < 1:
        raise ConfigError(
            f"{size!r} is no size; give a positive number of bytes, or text such as '64MiB'."
        )
    return num_bytes


def format_size(num_bytes: float) -> str:
    """`num_bytes` as a person reads it, in binary units: 1536 -> '1.5 KiB'."""
    power = min(4, int(math.log2(max(1, abs(num_bytes))) // 10))
    if power == 0:
        return f"{num_bytes:.0f} B"
    return f"{num_bytes / 1024**power:.1f} {'KMGT'[power - 1]}iB"


AGGREGATIONS = ("last", "min", "prod", "mean")
"""How a beam's step scores become one number."""
VOTINGS = ("weighted", "majority", "naive")
STRATEGIES = ("beam_search", "best_of_n", "self_consistency", "dvts", "lookahead", "rebase", "ets",
              "dora", "particle_filter")  # fmt: skip
"""As search/variants.py has their classes."""
OF_WIDTH = ("beam_search", "dvts", "lookahead")
"""Strategies that have a beam width."""
_OF_SOME = {
    "finish_at_limit": ("beam_search",),
    "lookahead": ("lookahead",),
    "balance_temperature": ("rebase", "ets", "dora"),
    "sharing_weight": ("ets",),
    "coverage_weight": ("ets",),
    "direction_temperature": ("dora",),
    "weight_temperature": ("particle_filter",),
    "max_tokens": ("best_of_n", "self_consistency"),
    "instruction": ("self_consistency",),
    "examples": ("self_consistency",),
}
"""Settings that only these strategies have."""
POLICIES = ("static", "first_come", "phase_aware", "marginal_value")
"""Who gets the pages of one memory for both models; kvcache/policies.py has their classes."""
BACKENDS = ("here", "processes", "ray", "slurm")
"""Where runs are carried out; experiments/backends.py says how."""
_ONE = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_MANY = {int: "whole numbers", float: "numbers", bool: "truth values", str: "texts"}


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from low to high; ends: which of the two belong to it, as intervals are written."""

    low: float
    high: float = math.inf
    ends: str = "[)"

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.ends[0] == "(" else value >= self.low
        return above and (value < self.high if self.ends[1] == ")" else value <= self.high)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'>' if self.ends[0] == '(' else '>='} {self.low}"
        return f"in {self.ends[0]}{self.low}, {self.high}{self.ends[1]}"


AtLeastOne = Annotated[int, Range(1)]
Share = Annotated[float, Range(0, 1, "(]")]


def check(settings: Any) -> None:
    """Puts each field into its declared type, where that loses nothing; ConfigError otherwise.

    Declared are int, float, bool, str, None, tuples and unions of them, Annotated with a Range or
    choices. A whole number is a float, any iterable but a text a tuple; true is no number.
    """
    kind: Any = type(settings)
    for name, declared, exact, allowed in declared_fields(kind):
        given = value = getattr(settings, name)
        if type(given) not in exact:
            try:
                value = _fitted(given, declared)
            except TypeError:
                raise refused(kind, name, given, _described(declared)) from None
            object.__setattr__(settings, name, value)
        if value is None or allowed is None or value in allowed:
            continue
        if isinstance(allowed, Range):
            raise refused(kind, name, given, str(allowed))
        raise refused(kind, name, given, ", ".join(allowed), nearest(value, allowed))


def require_known(given: Iterable[str], known: list[str], what: str, noun: str = "setting") -> None:
    """ConfigError for the first of the given names that is unknown, with the nearest one."""
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{what} has no {noun} {name!r}.{nearest(name, known)} Known: {', '.join(known)}."
            )


def refused(kind: type, name: str, given: Any, allowed: str, hint: str = "") -> ConfigError:
    """The error for a setting of another type or outside what is allowed."""
    return ConfigError(f"{kind.__name__}.{name} is {given!r}; allowed: {allowed}.{hint}")


def check_subtrees(settings: Any) -> None:
    """ConfigError unless beam_width divides n, as in a DVTS."""
    if settings.n % settings.beam_width:
        allowed = f"multiples of beam_width ({settings.beam_width})"
        raise refused(type(settings), "n", settings.n, allowed)


@cache
def declared_fields(cls: type) -> tuple[tuple[str, Any, frozenset[type], Any], ...]:
    """Of each field: its name, its types, those taken as they are, and its range or choices."""
    found, hints = [], get_type_hints(cls, include_extras=True)
    for each in fields(cls):
        declared, allowed = hints[each.name], None
        if get_origin(declared) is Annotated:
            declared, allowed = get_args(declared)
        found.append((each.name, declared, frozenset(_members(declared)), allowed))
    return tuple(found)


def _members(declared: Any) -> tuple[Any, ...]:
    return get_args(declared) if isinstance(declared, UnionType) else (declared,)


def _fitted(given: Any, declared: Any) -> Any:
    """The value in the first declared type that takes it. Raises TypeError when none does."""
    is_list = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    for member in _members(declared):
        if get_origin(member) is tuple and is_list:
            return tuple(_fitted(each, get_args(member)[0]) for each in given)
        if member is int and isinstance(given, Integral) and not isinstance(given, bool):
            return int(given)
        if member is float and isinstance(given, Real) and not isinstance(given, bool):
            return float(given)
        if member in (bool, str, NoneType) and isinstance(given, member):
            return given
    raise TypeError


def _described(declared: Any) -> str:
    """What a declared type admits, in words."""
    words, members = [], _members(declared)
    for member in members:
        if member is int and float in members:
            continue
        if get_origin(member) is tuple:
            words.append(f"a list of {_MANY[get_args(member)[0]]}")
        else:
            words.append("None" if member is NoneType else _ONE[member])
    return " or ".join(words)


@dataclass(frozen=True, slots=True)
class Checked:
    """Settings whose types and values are checked when they are made: see `check`."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class _Settings(Checked):
    """What every configuration can do: be read from a mapping, and be written."""

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        require_known(given, [f.name for f in fields(cls)], cls.__name__)
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _require(self, name: str, fine: bool, allowed: str) -> None:
        if not fine:
            raise refused(type(self), name, getattr(self, name), allowed)


@dataclass(frozen=True, slots=True)
class EngineConfig(_Settings):
    """One engine. At most one of memory, kv_memory, num_blocks says how much cache there is.

    memory: all the engine may use, in bytes or text, or a share in (0, 1] of the device's memory;
    kv_memory: the cache alone; num_blocks: the cache alone, in blocks. None of the three: as many
    blocks as max_num_seqs requests of max_model_len need, within a quarter of the device's memory.
    """

    model: str = "tiny-solver"
    memory: int | float | str | None = None
    kv_memory: int | str | None = None
    num_blocks: Annotated[int | None, Range(1)] = None
    block_size: AtLeastOne = 16  # positions a block holds
    max_num_seqs: AtLeastOne = 64  # sequences in one step
    max_num_batched_tokens: AtLeastOne = 2048  # tokens in one step
    max_model_len: Annotated[int | None, Range(2)] = None  # None: the model's own maximum
    enable_prefix_caching: bool = True
    reuse_partial_blocks: bool = False  # what goes on with a partly filled block copies it
    batch_invariant: bool = True
    activations_in_total: bool = True  # False: `memory` pays for weights and KV only
    dtype: Annotated[str, ("auto", "float32", "float16", "bfloat16")] = "auto"
    device: str = "cpu"  # or a GPU: "cuda", "cuda:1"; "memory" is then the GPU's
    watermark: Annotated[float, Range(0, 1)] = 0.01  # blocks kept free when a request is admitted
    # static: whole padded batches
    batching: Annotated[str, ("continuous", "static")] = "continuous"
    # False, for comparison only: each token computes its whole sequence again; the same tokens
    use_kv_cache: bool = True

    def __post_init__(self) -> None:
        check(self)
        given = [n for n in ("memory", "kv_memory", "num_blocks") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ConfigError(f"EngineConfig got {' and '.join(given)}; give one of them.")
        if isinstance(self.memory, float):
            allowed = "a share in (0, 1], bytes, or text ('1GiB')"
            self._require("memory", 0 < self.memory <= 1, allowed)
        for size in (self.memory, self.kv_memory):
            if size is not None and not isinstance(size, float):
                parse_size(size)
        fits = self.max_num_batched_tokens >= self.max_num_seqs
        self._require("max_num_batched_tokens", fits, f">= max_num_seqs ({self.max_num_seqs})")
        named = re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is not None
        self._require("device", named, "'cpu', 'cuda', or one of several GPUs: 'cuda:1'")
        caching, padded = self.enable_prefix_caching, self.batching == "static"
        allowed = "False with batching='static', which pads prompts"
        self._require("enable_prefix_caching", not (padded and caching), allowed)
        allowed = "False with enable_prefix_caching=False: full blocks lead to partial ones"
        self._require("reuse_partial_blocks", caching or not self.reuse_partial_blocks, allowed)
        allowed = "True unless batching='continuous' and enable_prefix_caching=False"
        self._require("use_kv_cache", self.use_kv_cache or not (caching or padded), allowed)


@dataclass(frozen=True, slots=True)
class SearchSwitches(_Settings):
    """How a search uses its two engines. Every setting gives the same tokens, scores and answers.

    search/rounds.py says what each does.
    """

    # slot: as the strategy lists them; prefix: problems served last go first
    request_order: Annotated[str, ("slot", "path", "prefix")] = "path"
    # static: no problem joins others; adaptive: some wait
    problem_batching: Annotated[str, ("continuous", "static", "adaptive")] = "continuous"
    forget_pruned: bool = False


@dataclass(frozen=True, slots=True)
class SearchConfig(SearchSwitches):
    """One search: how tokens are sampled, beams scored, answers voted on and engines used.

    max_step_tokens: of a step, at most; the LLM's max_model_len may leave fewer. A beam for which
    either model has no room left ends unfinished, with the finish_reason "context".
    """

    min_problem_batch: AtLeastOne = 12  # problems in flight, kept full from the queue
    score_cache: bool = True  # False asks every step of every beam again
    temperature: Annotated[float, Range(0)] = 0.8
    top_p: Share = 1.0
    top_k: Annotated[int, Range(0, 2**31)] = 0
    min_p: Annotated[float, Range(0, 1)] = 0.0
    max_step_tokens: AtLeastOne = 256
    # None: the strategy's own
    aggregation: Annotated[str | None, AGGREGATIONS] = None
    voting: Annotated[str, VOTINGS] = "weighted"
    system_prompt: str | None = None  # None: the model template's default
    prm_format: str | None = None  # None: as the PRM was made
    score_shuffle_seed: int | None = None  # the control experiment: scores dealt at random
    # of a PRM that writes critiques; None: as the PRM was made (search/prm.py: Critiques)
    critiques: Annotated[int | None, Range(1)] = None
    critique_tokens: Annotated[int | None, Range(1)] = None
    critique_temperature: Annotated[float | None, Range(0)] = None


@dataclass(frozen=True, slots=True)
class StrategyConfig(SearchConfig):
    """A search and the strategy's own settings.

    From finish_at_limit on they are those of some strategies alone, refused in others; None and ():
    as search/variants.py has them from their papers.
    """

    strategy: Annotated[str, STRATEGIES] = "beam_search"
    n: AtLeastOne = 16
    beam_width: AtLeastOne = 4
    max_depth: AtLeastOne = 40
    finish_at_limit: bool = False  # sample on to the end of the solution at max_depth
    lookahead: Annotated[int | None, Range(1)] = None  # steps sampled ahead of what is judged
    balance_temperature: Annotated[float | None, Range(1e-6)] = None  # of scores, for children
    sharing_weight: Annotated[float | None, Range(0)] = None  # of KV that survivors share
    coverage_weight: Annotated[float | None, Range(0)] = None  # of kinds of steps that survive
    direction_temperature: Annotated[float | None, Range(1e-6)] = None  # of steps' similarities
    weight_temperature: Annotated[float | None, Range(1e-6)] = None  # of particles' weights
    max_tokens: Annotated[int | None, Range(1)] = None  # of a whole sample
    instruction: str | None = None  # behind the problem
    examples: tuple[str, ...] = ()  # worked problems before it

    def __post_init__(self) -> None:
        check(self)
        if self.strategy in OF_WIDTH:
            self._require("beam_width", self.beam_width <= self.n, f"<= n ({self.n})")
        for name, having in _OF_SOME.items():
            value = getattr(self, name)
            unset = value is None or value is False or value == ()
            allowed = f"only with strategy {' or '.join(having)}, here {self.strategy}"
            self._require(name, unset or self.strategy in having, allowed)
        if self.strategy == "dvts":
            check_subtrees(self)


@dataclass(frozen=True, slots=True)
class SweepConfig(StrategyConfig):
    """A memory-split sweep: `llm_share` of `total_memory` to the LLM, the rest to the PRM.

    policy: both models lease the KV memory from one arena, and the share is what a policy that
    keeps a split starts from; None: each has a cache of its own. Settings called as EngineConfig's
    are those of both engines. The ones from `profile` on say how the sweep is carried out; they do
    not enter a run's fingerprint.
    """

    llm: str = "tiny-solver"
    prm: str = "tiny-prm"
    total_memory: int | str = "64MiB"
    shares: tuple[float, ...] = (0.08, 0.15, 0.2, 0.3, 0.4, 0.45, 0.5)
    policy: Annotated[str | None, POLICIES] = None
    problems: str = "tiny"
    num_problems: AtLeastOne = 16
    levels: tuple[int, ...] = ()  # empty: all, uniformly
    problem_seed: int = 0  # which problems are drawn
    seeds: tuple[int, ...] = (0, 1)
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    reuse_partial_blocks: bool = False
    max_model_len: int | None = None
    activations_in_total: bool = False
    batch_invariant: bool = True
    dtype: str = "auto"
    device: str = "cpu"
    profile: str = "default"
    warmup_problems: Annotated[int, Range(0)] = 2  # of the run before the first; 0: none
    sentinel_every: Annotated[int, Range(0)] = 10  # runs between two of the sentinel's; 0: none
    sentinel_share: Annotated[float, Range(0, 1, "()")] = 0.3
    order_seed: int = 0  # of the shuffled order

    def __post_init__(self) -> None:
        StrategyConfig.__post_init__(self)
        parse_size(self.total_memory)
        in_range = all(0 < share < 1 for share in self.shares or (0,))
        self._require("shares", in_range, "one or more shares in (0, 1)")
        self._require("seeds", bool(self.seeds), "one or more whole numbers")
        for name, once in (("shares", "each share once"), ("seeds", "each seed once")):
            self._require(name, len(set(getattr(self, name))) == len(getattr(self, name)), once)
        EngineConfig(device=self.device)  # refuses other names
