"""What search is worth, what its caches save, and the searches that other benchmarks share.

On the embedded pair every seed runs three searches over the same problems: beam search, beam search
whose scores are dealt out at random, and 16 samples (pass@1 and majority vote). Gains are paired by
problem; all intervals draw problems, each with all its seeds. The first problems are searched once
more, with seed 0, without PRM cache and score cache, for the tokens that both save.

A generator of true size searches MATH problems twice, with these caches and without: same tree,
other time and PRM tokens. Where no reward model is named, its own weights are asked in RLHFlow's
form: the shape and the cost of a PRM, scores that mean nothing. So this is for speed, memory and
sameness, never for accuracy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from tqdm.auto import tqdm

from workbench.bench.record import Row, interval_row
from workbench.engine.engine import Engine
from workbench.errors import ConfigError, RecordingError, nearest
from workbench.experiments.execute import build_engine, with_wall_part
from workbench.experiments.settings import RunSpec, sweep_config
from workbench.experiments.statistics import bootstrap_mean, bootstrap_ratio
from workbench.search.prm import PRM
from workbench.search.problems import Problem, load_problems
from workbench.search.recording import require_destination
from workbench.search.requests import Strategy
from workbench.search.result import SearchResult
from workbench.search.search import SYSTEM_PROMPTS, chat_prompt, run_search
from workbench.search.strategies import BeamSearch, BestOfN

PROFILES = {"quick": (8, 1), "default": (32, 2), "full": (128, 5)}  # problems, seeds
REAL_PROBLEMS = {"quick": 2, "default": 8, "full": 8}  # of a generator of true size
UNCACHED_PROBLEMS = 16  # searched without caches: the slowest search of all
TINY = {"tiny-solver": "tiny-prm"}  # generator -> its reward model
TINY_SIZES: dict[str, Any] = {"max_depth": 40, "max_step_tokens": 256, "in_flight": 32}
BLOCKS = 16384  # of each tiny engine; roomy: what is measured is the search, not the memory
KV_MEMORY = "2GiB"  # of each engine of true size
WARM_UP_SEED = 10_000
WITHOUT = "without PRM cache and score cache"


@dataclass(frozen=True, slots=True)
class Workload:
    """Problems, models and the beam search over them.

    max_step_tokens: of one step, at most; system_prompt: one of SYSTEM_PROMPTS, or the template's.
    """

    llm: str
    prm: str
    problems: tuple[Problem, ...]
    n: int = 16
    beam_width: int = 4
    max_depth: int = 10
    max_step_tokens: int = 128
    in_flight: int = 8
    system_prompt: str | None = None

    @property
    def mode(self) -> dict[str, Any]:
        """The search's sizes as a record's mode names them."""
        names = ("prm", "n", "beam_width", "max_depth", "max_step_tokens", "system_prompt")
        return {n: getattr(self, n) for n in names} | {"problems_in_flight": self.in_flight}

    @property
    def label(self) -> str:
        """The generator's name as rows carry it: `smollm2` of `smollm2-135m`."""
        return Path(self.llm).name.split("-")[0].lower()

    @property
    def _settings(self) -> dict[str, Any]:
        named = self.system_prompt
        return {
            "temperature": 0.8,
            "max_step_tokens": self.max_step_tokens,
            "min_problem_batch": self.in_flight,
            "system_prompt": None if named is None else SYSTEM_PROMPTS[named],
        }

    def reward(self, engine: Engine) -> PRM:
        """The scoring end over an engine of `prm`."""
        return PRM(engine, "rlhflow" if self.prm == self.llm else None)

    def prompt(self, problem: Problem, llm: Engine) -> list[int]:
        """Token ids before anything is sampled."""
        return chat_prompt(problem, llm, self._settings["system_prompt"])

    def search(
        self,
        llm: Engine,
        prm: PRM,
        seed: int = 0,
        strategy: Strategy | None = None,
        record: Path | None = None,
        **settings: Any,
    ) -> SearchResult:
        """All problems searched, by beam search unless told otherwise."""
        chosen = strategy or BeamSearch(self.n, self.beam_width, self.max_depth)
        return run_search(
            list(self.problems),
            llm=llm,
            prm=prm,
            strategy=chosen,
            seed=seed,
            record=record,
            **self._settings | settings,
        )


def is_tiny(llm: str) -> bool:
    """Whether the generator is the embedded one, whose searches are studied for accuracy too."""
    return llm in TINY


def make_workload(
    llm: str, prm: str | None = None, source: str | None = None, limit: int = 0, **sizes: Any
) -> Workload:
    """The first `limit` problems of a source (None: the tiny family, or MATH-500, which is asked as
    the field asks). prm: None is tiny-prm beside tiny-solver, else the generator itself.
    """
    tiny = is_tiny(llm)
    problems = load_problems(source or ("tiny" if tiny else "math500"), limit) if limit else []
    told = {"system_prompt": None if tiny else "search-and-learn"}
    return Workload(llm, prm or TINY.get(llm, llm), tuple(problems), **told | sizes)


def roomy_engine(model: str, **settings: Any) -> Engine:
    """An engine of the tiny pair with more memory than its searches need."""
    return Engine(model, num_blocks=BLOCKS, max_num_seqs=256, **settings)


def run(
    profile: str = "default",
    llm: str = "tiny-solver",
    prm: str | None = None,
    seeds: int | None = None,
    problems: str | None = None,
) -> Iterator[Row]:
    """The rows of `workbench bench search`.

    prm: None is tiny-prm beside tiny-solver, else the generator itself. seeds: as many as these
    instead of the profile's, on the tiny pair. problems: a file of them.
    """
    if not is_tiny(llm):
        yield from real_rows(make_workload(llm, prm, problems, REAL_PROBLEMS[profile]))
        return
    limit, count = PROFILES[profile]
    count = count if seeds is None else seeds
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"seeds is {count!r}; allowed: whole numbers >= 1.")
    yield from tiny_rows(make_workload(llm, prm, problems, limit, **TINY_SIZES), count)


def mode_of(settings: dict[str, Any]) -> dict[str, Any]:
    """What the record says of a run with these settings."""
    llm, prm = settings["llm"], settings["prm"]
    if not is_tiny(llm):
        return {"batch_invariant": True, "kv_memory": KV_MEMORY} | make_workload(llm, prm).mode
    limit, seeds = PROFILES[settings["profile"]]
    sizes = make_workload(llm, prm, **TINY_SIZES).mode
    kept = {name: sizes[name] for name in ("prm", "n", "beam_width", "problems_in_flight")}
    counts = {"problems": limit, "uncached_problems": min(limit, UNCACHED_PROBLEMS)}
    return {"batch_invariant": True} | kept | counts | {"seeds": settings["seeds"] or seeds}


def tiny_rows(workload: Workload, seeds: int) -> Iterator[Row]:
    """Pace, accuracy and gains over all problems and seeds, and what the PRM computes."""
    llm, scoring = roomy_engine(workload.llm), roomy_engine(workload.prm)
    prm, found = workload.reward(scoring), []
    warm_up = replace(workload, problems=workload.problems[:2])  # compiled kernels, allocators
    warm_up.search(llm, prm, WARM_UP_SEED)
    for seed in tqdm(range(seeds), desc="seeds"):
        _forget(llm, scoring)
        beam = workload.search(llm, prm, seed)
        shuffled = workload.search(llm, prm, seed, score_shuffle_seed=seed)
        samples = workload.search(llm, prm, seed, BestOfN(n=workload.n), max_step_tokens=2048)
        each = samples.problems
        other = {
            "shuffled": shuffled.problems["correct"].to_numpy(float),
            "majority": samples.correct_by("majority").to_numpy(float),
            "pass_1": (each["correct_candidates"] / each["candidates"]).to_numpy(float),
        }
        found.append(with_wall_part(beam).assign(**other))
    done = pd.concat(found)
    done["correct"] = done["correct"].astype(float)
    ids = done["problem_id"].tolist()

    def rate(name: str, amount: ArrayLike, of: ArrayLike, unit: str) -> Row:
        return interval_row(name, bootstrap_ratio(amount, of, ids), unit, seeds)

    def mean(name: str, values: pd.Series) -> Row:
        return interval_row(name, bootstrap_mean(values, ids), "fraction", seeds)

    seconds = done["wall_part_s"]
    yield rate("problems_per_min", np.ones(len(done)), seconds / 60, "problems/min")
    yield rate("tokens_per_s", done["tokens"], seconds, "tokens/s")
    yield mean("accuracy", done["correct"])
    yield mean("pass_at_1", done["pass_1"])
    yield mean("accuracy_gain", done["correct"] - done["pass_1"])
    yield mean("gain_over_majority", done["correct"] - done["majority"])
    yield mean("gain_over_shuffled", done["correct"] - done["shuffled"])
    yield rate("prm_over_ideal", done["prm_tokens_computed"], done["prm_tokens_distinct"], "x")

    _forget(llm, scoring)
    few = replace(workload, problems=workload.problems[:UNCACHED_PROBLEMS])
    bare = few.reward(roomy_engine(few.prm, enable_prefix_caching=False))
    ours, without = few.search(llm, prm), few.search(llm, bare, score_cache=False)
    yield _tokens_saved("prm_tokens_saved", ours, without)


def _forget(*engines: Engine) -> None:
    for engine in engines:
        engine.cache.reset()


def _tokens_saved(name: str, ours: SearchResult, without: SearchResult) -> Row:
    """PRM tokens computed without caches, over those computed with them, for the same searches."""
    dear, cheap = (result.problems["prm_tokens_computed"] for result in (without, ours))
    found = bootstrap_ratio(dear, cheap, ours.problems["problem_id"].tolist())
    return interval_row(name, found, "x", 1)


def real_rows(workload: Workload, seed: int = 0) -> Iterator[Row]:
    """Problems/min, tokens/s and PRM tokens beside the run without caches, then the ratio.

    Both runs begin with empty caches, kernels compiled and allocators warm.
    """
    llm, found = Engine(workload.llm, kv_memory=KV_MEMORY), []
    brief = replace(workload, problems=workload.problems[:1], max_depth=1, max_step_tokens=4)
    for caches in (True, False):
        engine = Engine(workload.prm, kv_memory=KV_MEMORY, enable_prefix_caching=caches)
        prm = workload.reward(engine)
        brief.search(llm, prm, WARM_UP_SEED)
        _forget(llm, engine)
        found.append(workload.search(llm, prm, seed, score_cache=caches))
    ours, other = found
    name, speed, slow = workload.label, ours.throughput, other.throughput
    for row, unit in (("search", "problems_per_min"), ("search_tokens", "tokens_per_s")):
        fast, peer = getattr(speed, unit), getattr(slow, unit)
        told = unit.replace("_per_", "/")
        yield Row(f"{row}_{name}", fast, told, WITHOUT, peer, fast / peer, repeats=1)
    computed, without = ours.prm_tokens["computed"], other.prm_tokens["computed"]
    saved = without / computed
    yield Row(f"prm_tokens_{name}", computed, "tokens", WITHOUT, without, saved, repeats=1)
    yield _tokens_saved(f"prm_tokens_saved_{name}", ours, other)


# -- the searches that are kept in the package for replays --


@dataclass(frozen=True, slots=True)
class Plan:
    """One recording: so many problems of the generator's family."""

    llm: str
    problems: int
    n: int
    beam_width: int = 4


PLANS = {
    "tiny-128": Plan("tiny-solver", 128, 16),
    "tiny-16-n4": Plan("tiny-solver", 16, 4),
    "tiny-16-n16": Plan("tiny-solver", 16, 16),
    "tiny-16-n16-w2": Plan("tiny-solver", 16, 16, 2),
    "tiny-16-n16-w8": Plan("tiny-solver", 16, 16, 8),
    "tiny-16-n64": Plan("tiny-solver", 16, 64),
    "smollm2-n4": Plan("smollm2-135m", 8, 4),
    "smollm2-n16": Plan("smollm2-135m", 8, 16),
}


def make_recording(
    name: str, path: str | os.PathLike[str], source: str | None = None
) -> SearchResult:
    """Search as the recording's plan says and write it; returns the search.

    The embedded pair with the default profile's memory, batch limits and problems in flight;
    neither memory nor limits change a token, they are where replays start. source: the problems'
    file where it is not the usual one.
    """
    if name not in PLANS:
        raise RecordingError(
            f"There is no recording {name!r}; known: {', '.join(PLANS)}."
            f"{nearest(name, list(PLANS))}"
        )
    require_destination(path)
    plan = PLANS[name]
    sizes: dict[str, Any] = {"n": plan.n, "beam_width": plan.beam_width}
    if is_tiny(plan.llm):
        config = sweep_config("default")
        own, spec = config.search(), RunSpec(config, config.sentinel_share, 0)
        sizes |= {"max_depth": own.max_depth, "max_step_tokens": own.max_step_tokens}
        sizes |= {"in_flight": own.min_problem_batch}
        llm, prm = build_engine(spec.engine("llm")), build_engine(spec.engine("prm"))
    else:
        llm, prm = (Engine(plan.llm, kv_memory=KV_MEMORY) for _ in range(2))
    workload = make_workload(plan.llm, None, source, plan.problems, **sizes)
    return workload.search(llm, workload.reward(prm), record=Path(path))
