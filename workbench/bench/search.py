"""What search is worth on the embedded pair, and what the caches save.

Every seed runs three searches over the same problems: beam search, beam search whose scores are
dealt out at random, and 16 samples (pass@1 and majority vote). Gains are paired by problem; all
intervals draw problems, each with all its seeds. The first problems are searched once more, with
seed 0, without PRM cache and score cache, for the tokens that both save. A generator of true size
is real_search.py's. What it does not do: choose settings; they are the study's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from tqdm.auto import tqdm

from workbench.bench import real_search
from workbench.bench.record import Row
from workbench.bench.rows import interval_row
from workbench.bench.workload import Workload, is_tiny, real_workload, reward_model
from workbench.engine.engine import Engine
from workbench.errors import ConfigError
from workbench.experiments.execute import with_wall_part
from workbench.experiments.statistics import bootstrap_mean, bootstrap_ratio
from workbench.search.prm import PRM
from workbench.search.problems import Problem, load_problems
from workbench.search.result import SearchResult
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch, BestOfN

PROFILES = {"quick": (8, 1), "default": (32, 2), "full": (128, 5)}  # problems, seeds
REAL_PROBLEMS = {"quick": 2, "default": 8, "full": 8}  # of a generator of true size
N, BEAM_WIDTH, MAX_DEPTH, IN_FLIGHT = 16, 4, 40, 32
BLOCKS = 16384  # roomy: what is measured is the search, not the memory
UNCACHED_PROBLEMS = 16  # searched without caches: the slowest search of all
MODE = {"batch_invariant": True, "n": N, "beam_width": BEAM_WIDTH, "problems_in_flight": IN_FLIGHT}


@dataclass(slots=True)
class Evidence:
    """One value a (seed, problem) of each accuracy, and the problem it belongs to."""

    problem_ids: list[str] = field(default_factory=list)
    beam: list[float] = field(default_factory=list)
    shuffled: list[float] = field(default_factory=list)
    majority: list[float] = field(default_factory=list)
    pass_1: list[float] = field(default_factory=list)

    def row(self, name: str, minus: list[float] | None, seeds: int) -> Row:
        """Beam search's accuracy, less another's where one is given."""
        values = np.array(self.beam) - (0.0 if minus is None else np.array(minus))
        return interval_row(name, bootstrap_mean(values, self.problem_ids), "fraction", seeds)


class Pair:
    """The two engines, and the same two with the PRM's prefix cache off."""

    def __init__(self, llm: str, prm: str) -> None:
        self.llm = _engine(llm)
        self.prm_engine = _engine(prm)
        self.prm = PRM(self.prm_engine)
        self.prm_without_cache = PRM(_engine(prm, enable_prefix_caching=False))

    def beam(self, problems: list[Problem], seed: int, shuffle: bool = False) -> SearchResult:
        """Beam search, its scores as they are or dealt out at random."""
        strategy = BeamSearch(n=N, beam_width=BEAM_WIDTH, max_depth=MAX_DEPTH)
        dealt = seed if shuffle else None
        return _search(problems, self.llm, self.prm, strategy, seed, score_shuffle_seed=dealt)

    def samples(self, problems: list[Problem], seed: int) -> SearchResult:
        """N independent solutions of each problem."""
        return _search(problems, self.llm, self.prm, BestOfN(n=N), seed, max_step_tokens=2048)

    def beam_without_caches(self, problems: list[Problem], seed: int) -> SearchResult:
        """Beam search whose PRM reads every solution anew and scores every step again."""
        strategy = BeamSearch(n=N, beam_width=BEAM_WIDTH, max_depth=MAX_DEPTH)
        return _search(
            problems, self.llm, self.prm_without_cache, strategy, seed, score_cache=False
        )


def mode_of(settings: dict[str, Any]) -> dict[str, Any]:
    """What the record says of a run with these settings."""
    llm, prm = settings["llm"], reward_model(settings["llm"], settings["prm"])
    if is_tiny(llm):
        limit, seeds = PROFILES[settings["profile"]]
        sizes = {"problems": limit, "uncached_problems": min(limit, UNCACHED_PROBLEMS)}
        return MODE | sizes | {"prm": prm, "seeds": settings["seeds"] or seeds}
    sizes = Workload(llm, prm, ()).mode
    return {"batch_invariant": True, "kv_memory": real_search.KV_MEMORY} | sizes


def run(
    profile: str = "default",
    llm: str = "tiny-solver",
    prm: str | None = None,
    seeds: int | None = None,
    problems: str | None = None,
) -> Iterator[Row]:
    """The rows of `workbench bench search`.

    prm: None is tiny-prm beside tiny-solver, else the generator itself. seeds: as many as these
    instead of the profile's, on the tiny pair. problems: what a generator of true size searches.
    """
    if is_tiny(llm):
        yield from _tiny_rows(profile, llm, reward_model(llm, prm), seeds)
    else:
        yield from real_search.rows(real_workload(llm, prm, problems, REAL_PROBLEMS[profile]))


def _tiny_rows(profile: str, llm: str, prm: str, seeds: int | None) -> Iterator[Row]:
    limit, all_seeds = PROFILES[profile]
    seeds = all_seeds if seeds is None else seeds
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise ConfigError(f"seeds is {seeds!r}; allowed: whole numbers >= 1.")
    problems = load_problems("tiny", limit=limit)
    pair = Pair(llm, prm)
    pair.beam(problems[:2], seed=10_000)  # warm-up: compiled kernels, allocators
    _forget(pair)
    evidence, beams = Evidence(), []
    for seed in tqdm(range(seeds), desc="seeds"):
        beams.append(pair.beam(problems, seed))
        _add(
            evidence,
            beams[-1],
            pair.beam(problems, seed, shuffle=True),
            pair.samples(problems, seed),
        )
        _forget(pair)
    yield from _rows(evidence, beams, seeds)
    yield _saved(pair, problems[:UNCACHED_PROBLEMS])


def _saved(pair: Pair, problems: list[Problem]) -> Row:
    """PRM tokens computed without caches, over those computed with them, for the same searches."""
    computed = "prm_tokens_computed"
    with_caches = pair.beam(problems, seed=0).problems
    without = pair.beam_without_caches(problems, seed=0).problems
    problem_ids = with_caches["problem_id"].tolist()
    found = bootstrap_ratio(without[computed], with_caches[computed], problem_ids)
    return interval_row("prm_tokens_saved", found, "x", 1)


def _rows(evidence: Evidence, beams: list[SearchResult], seeds: int) -> Iterator[Row]:
    done = pd.concat([with_wall_part(result) for result in beams])
    minutes = done["wall_part_s"] / 60
    yield _rate("problems_per_min", np.ones(len(done)), minutes, done, "problems/min", seeds)
    yield _rate("tokens_per_s", done["tokens"], done["wall_part_s"], done, "tokens/s", seeds)
    yield evidence.row("accuracy", None, seeds)
    pass_1 = bootstrap_mean(evidence.pass_1, evidence.problem_ids)
    yield interval_row("pass_at_1", pass_1, "fraction", seeds)
    yield evidence.row("accuracy_gain", evidence.pass_1, seeds)
    yield evidence.row("gain_over_majority", evidence.majority, seeds)
    yield evidence.row("gain_over_shuffled", evidence.shuffled, seeds)
    tokens = done["prm_tokens_computed"], done["prm_tokens_distinct"]
    yield _rate("prm_over_ideal", *tokens, done, "x", seeds)


def _rate(
    name: str, amount: ArrayLike, of: ArrayLike, done: pd.DataFrame, unit: str, seeds: int
) -> Row:
    """Sum over sum, problems drawn; the wall time of a run is divided among its problems."""
    return interval_row(name, bootstrap_ratio(amount, of, done["problem_id"].tolist()), unit, seeds)


def _add(
    evidence: Evidence, beam: SearchResult, shuffled: SearchResult, samples: SearchResult
) -> None:
    table = samples.problems
    evidence.problem_ids += list(beam.problems["problem_id"])
    evidence.beam += beam.problems["correct"].astype(float).tolist()
    evidence.shuffled += shuffled.problems["correct"].astype(float).tolist()
    evidence.majority += samples.correct_by("majority").astype(float).tolist()
    evidence.pass_1 += (table["correct_candidates"] / table["candidates"]).astype(float).tolist()


def _forget(pair: Pair) -> None:
    """A seed starts with empty caches, as its own run would."""
    for engine in (pair.llm, pair.prm_engine):
        engine.cache.reset()


def _engine(model: str, **settings: Any) -> Engine:
    return Engine(model, num_blocks=BLOCKS, max_num_seqs=256, **settings)


def _search(
    problems: list[Problem],
    llm: Engine,
    prm: PRM,
    strategy: BeamSearch | BestOfN,
    seed: int,
    **settings: Any,
) -> SearchResult:
    settings = {"min_problem_batch": IN_FLIGHT, "temperature": 0.8} | settings
    return run_search(problems, llm=llm, prm=prm, strategy=strategy, seed=seed, **settings)  # type: ignore[arg-type]
