"""The settings of an engine, a search and a sweep: frozen, checked at construction, fingerprinted.

`from_dict` refuses a key it does not know; `fingerprint()` names a setting by what it contains, so
equal settings find each other's results. Nothing here reads the machine or loads a model.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from workbench.errors import ConfigError, nearest, require_types

_UNITS = {"": 1, "b": 1} | {
    prefix + ending: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("ib", 1024), ("b", 1000))
}


def parse_size(size: int | str) -> int:
    """Bytes of a size given as a number of bytes or as text ("1GiB", "64 MiB", "500MB")."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(size).lower())
    if isinstance(size, bool) or found is None or found[2] not in _UNITS or float(found[1]) <= 0:
        raise ConfigError(
            f"{size!r} is no size; give a positive number of bytes, or text such as '64MiB'."
        )
    return int(float(found[1]) * _UNITS[found[2]])


def format_size(num_bytes: float) -> str:
    """`num_bytes` as a person reads it, in binary units: 1536 -> '1.5 KiB'."""
    power = min(4, int(math.log2(max(1, abs(num_bytes))) // 10))
    if power == 0:
        return f"{num_bytes:.0f} B"
    return f"{num_bytes / 1024**power:.1f} {'KMGT'[power - 1]}iB"


@dataclass(frozen=True, slots=True)
class _Settings:
    """What every configuration can do: be read from a mapping, be written, be named."""

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        known = [f.name for f in fields(cls)]
        for key in given:
            if key not in known:
                raise ConfigError(
                    f"{cls.__name__} has no setting {key!r}.{nearest(key, known)} "
                    f"Known: {', '.join(known)}."
                )
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def fingerprint(self) -> str:
        """12 hexadecimal digits of sha256 over the sorted settings."""
        text = json.dumps(self.to_dict(), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _require(self, name: str, fine: bool, allowed: str, hint: str = "") -> None:
        if not fine:
            given = getattr(self, name)
            kind = type(self).__name__
            raise ConfigError(f"{kind}.{name} is {given!r}; allowed: {allowed}.{hint}")

    def _choose(self, name: str, allowed: tuple[str, ...]) -> None:
        given = getattr(self, name)
        self._require(name, given in allowed, ", ".join(allowed), nearest(given, allowed))


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
    num_blocks: int | None = None
    block_size: int = 16  # positions a block holds
    max_num_seqs: int = 64  # sequences in one step
    max_num_batched_tokens: int = 2048  # tokens in one step
    max_model_len: int | None = None  # None: the model's own maximum
    enable_prefix_caching: bool = True
    reuse_partial_blocks: bool = False  # what goes on with a partly filled block copies it
    batch_invariant: bool = True
    activations_in_total: bool = True  # False: `memory` pays for weights and KV only
    dtype: str = "auto"
    device: str = "cpu"  # or a GPU: "cuda", "cuda:1"; "memory" is then the GPU's
    watermark: float = 0.01  # share of blocks kept free when a request is admitted
    batching: str = "continuous"  # or "static": whole padded batches, without prefix caching

    def __post_init__(self) -> None:
        require_types(self)
        given = [n for n in ("memory", "kv_memory", "num_blocks") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ConfigError(f"EngineConfig got {' and '.join(given)}; give one of them.")
        if isinstance(self.memory, float):
            self._require(
                "memory", 0 < self.memory <= 1, "a share in (0, 1], bytes, or text ('1GiB')"
            )
        elif self.memory is not None:
            parse_size(self.memory)
        if self.kv_memory is not None:
            parse_size(self.kv_memory)
        self._require("num_blocks", self.num_blocks is None or self.num_blocks >= 1, ">= 1")
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            self._require(name, getattr(self, name) >= 1, ">= 1")
        fits = self.max_num_batched_tokens >= self.max_num_seqs
        self._require("max_num_batched_tokens", fits, f">= max_num_seqs ({self.max_num_seqs})")
        self._require(
            "max_model_len", self.max_model_len is None or self.max_model_len >= 2, ">= 2"
        )
        self._require("watermark", 0 <= self.watermark < 1, "in [0, 1)")
        self._choose("dtype", ("auto", "float32", "float16", "bfloat16"))
        named = re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is not None
        self._require("device", named, "'cpu', 'cuda', or one of several GPUs: 'cuda:1'")
        self._choose("batching", ("continuous", "static"))
        shares = self.batching == "static" and self.enable_prefix_caching
        self._require(
            "enable_prefix_caching", not shares, "False with batching='static', which pads prompts"
        )
        self._require(
            "reuse_partial_blocks",
            self.enable_prefix_caching or not self.reuse_partial_blocks,
            "False with enable_prefix_caching=False: full blocks lead to partial ones",
        )


@dataclass(frozen=True, slots=True)
class SearchSwitches(_Settings):
    """How a search uses its two engines. Every setting gives the same tokens, scores and answers.

    search/rounds.py says what each does, what it promises and what it needs.
    """

    request_order: str = "path"  # or "slot": as the strategy lists them; "prefix": hot ones first
    problem_batching: str = "continuous"  # "static": no problem joins others; "adaptive": some wait
    speculative_extension: bool = False
    lookahead_scoring: bool = False
    overlap: bool = False
    forget_pruned: bool = False

    def __post_init__(self) -> None:
        require_types(self)
        self._choose("request_order", ("slot", "path", "prefix"))
        self._choose("problem_batching", ("continuous", "static", "adaptive"))
        self._require(
            "lookahead_scoring",
            self.speculative_extension or not self.lookahead_scoring,
            "False without speculative_extension, whose steps are what is scored ahead",
        )

    def require_usable(self, *, score_cache: bool, min_problem_batch: int) -> None:
        """ConfigError for a switch that could do nothing beside these settings."""
        self._require(
            "lookahead_scoring",
            score_cache or not self.lookahead_scoring,
            "False with score_cache=False: a score is found again in the score cache only",
        )
        self._require(
            "overlap",
            min_problem_batch > 1 or not self.overlap,
            "False with min_problem_batch=1: overlap takes two groups of problems in flight",
        )


@dataclass(frozen=True, slots=True)
class SearchConfig(SearchSwitches):
    """One search: strategy, its sizes, and how tokens are sampled and scores used."""

    strategy: str = "beam_search"
    n: int = 16
    beam_width: int = 4
    max_depth: int = 40
    temperature: float = 0.8
    top_p: float = 1.0
    max_step_tokens: int = 256
    finish_at_limit: bool = False  # sample on to the end of the solution at max_depth
    aggregation: str = "last"
    voting: str = "weighted"
    score_cache: bool = True
    min_problem_batch: int = 8  # problems in flight

    def __post_init__(self) -> None:
        SearchSwitches.__post_init__(self)
        self._choose("strategy", ("beam_search", "best_of_n"))
        self._choose("aggregation", ("last", "min", "prod", "mean"))
        self._choose("voting", ("weighted", "majority", "naive"))
        for name in ("n", "beam_width", "max_depth", "max_step_tokens", "min_problem_batch"):
            self._require(name, getattr(self, name) >= 1, ">= 1")
        self._require("beam_width", self.beam_width <= max(self.n, 1), f"<= n ({self.n})")
        self._require("temperature", 0 <= self.temperature < math.inf, ">= 0")
        self._require("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        steps = self.strategy == "beam_search"
        self._require(
            "finish_at_limit", steps or not self.finish_at_limit, "False but in a beam_search"
        )
        self.require_usable(score_cache=self.score_cache, min_problem_batch=self.min_problem_batch)


@dataclass(frozen=True, slots=True)
class SweepConfig(_Settings):
    """A memory-split sweep: `llm_share` of `total_memory` to the LLM, the rest to the PRM.

    The settings from `profile` on say how the sweep is carried out; they do not enter a run's
    fingerprint.
    """

    llm: str = "tiny-solver"
    prm: str = "tiny-prm"
    total_memory: int | str = "64MiB"
    shares: tuple[float, ...] = (0.08, 0.15, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5)
    problems: str = "tiny"
    num_problems: int = 16
    levels: tuple[int, ...] = ()  # empty: all, uniformly
    problem_seed: int = 0  # which problems are drawn
    seeds: tuple[int, ...] = (0, 1)
    strategy: str = "beam_search"
    n: int = 16
    beam_width: int = 4
    max_depth: int = 40
    temperature: float = 0.8
    top_p: float = 1.0
    max_step_tokens: int = 256
    finish_at_limit: bool = False
    aggregation: str = "last"
    voting: str = "weighted"
    score_cache: bool = True
    min_problem_batch: int = 12  # problems in flight: sets how much cache the working set wants
    request_order: str = "path"  # this and the next five: SearchSwitches
    problem_batching: str = "continuous"
    speculative_extension: bool = False
    lookahead_scoring: bool = False
    overlap: bool = False
    forget_pruned: bool = False
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    reuse_partial_blocks: bool = False
    max_model_len: int | None = None
    activations_in_total: bool = False
    batch_invariant: bool = True
    dtype: str = "auto"  # of weights and KV of both models
    device: str = "cpu"  # or a GPU, "cuda": of both models
    profile: str = "default"
    warmup_problems: int = 2  # of the run before the first, which is thrown away; 0: none
    sentinel_every: int = 10  # runs between two repetitions of the sentinel setting; 0: none
    sentinel_share: float = 0.3
    order_seed: int = 0  # of the shuffled order

    def __post_init__(self) -> None:
        require_types(self)
        parse_size(self.total_memory)
        in_range = bool(self.shares) and all(0 < share < 1 for share in self.shares)
        self._require("shares", in_range, "one or more shares in (0, 1)")
        self._require("shares", len(set(self.shares)) == len(self.shares), "each share once")
        self._require("seeds", bool(self.seeds), "one or more whole numbers")
        self._require("seeds", len(set(self.seeds)) == len(self.seeds), "each seed once")
        self._require("num_problems", self.num_problems >= 1, ">= 1")
        for name in ("warmup_problems", "sentinel_every"):
            self._require(name, getattr(self, name) >= 0, ">= 0")
        EngineConfig(device=self.device)  # refuses other names
        self._require("sentinel_share", 0 < self.sentinel_share < 1, "in (0, 1)")
        self.search()

    def search(self) -> SearchConfig:
        """The search every run of this sweep performs."""
        names = {f.name for f in fields(SearchConfig)} & {f.name for f in fields(self)}
        return SearchConfig(**{name: getattr(self, name) for name in names})
