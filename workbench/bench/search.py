"""What search is worth, what its caches save, and the searches that other benchmarks share.

On the embedded pair every seed runs four searches over the same problems: beam search, beam search
whose scores are dealt out at random, and n samples: pass@1, majority vote, and best-of-n, weighted
by the same PRM; `equal_tokens` is best-of-N at the tokens of beam search (N by seed 0). Gains are
paired by problem; intervals draw problems, each with all its seeds. The first problems are searched
again, with seed 0, without PRM cache and score cache, for the tokens that both save.

Other systems search beside ours (--peer): the embedded pair's problems, where accuracy means
something, or with a generator of true size MATH problems. Where no reward model is named, its own
weights are asked in RLHFlow's form: the shape and the cost of a PRM, scores that mean nothing: for
speed, never for accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from workbench.bench.beside import chosen_systems, rows_beside
from workbench.bench.record import Row
from workbench.config import SweepConfig
from workbench.core import TokenEngine
from workbench.engine.engine import Engine
from workbench.errors import ConfigError, RecordingError, nearest
from workbench.experiments.execute import Pair, make_search, with_wall_part
from workbench.experiments.runs import sweep_problems
from workbench.experiments.settings import RunSpec
from workbench.experiments.statistics import bootstrap, unlike_a_point, wilson
from workbench.search.recording import require_destination
from workbench.search.result import SearchResult
from workbench.search.search import SYSTEM_PROMPTS
from workbench.search.variants import STRATEGIES
from workbench.training.corpus import DEFAULT_SYSTEM_MESSAGE

PROFILES = {"quick": (8, 1), "default": (32, 2), "full": (128, 5)}  # problems, seeds
PEER_PROBLEMS, EASY = {"quick": 1, "default": 3, "full": 3}, (1, 2)  # levels
PEER_REPEATS = {"quick": 1, "default": 3, "full": 3}  # a seed each
UNCACHED_PROBLEMS = 16  # searched without caches: the slowest search of all
TINY, TINY_PRM = "tiny-solver", "tiny-prm"
BLOCKS = 16384  # of each tiny engine; roomy: what is measured is the search, not the memory
KV_MEMORY = "2GiB"  # of each engine of true size
PROMPT = "search-and-learn"  # of SYSTEM_PROMPTS: as the field asks MATH-500
WARM_UP_SEED = 10_000


def make_workload(
    llm: str, prm: str | None = None, source: str | None = None, limit: int = 1, **settings: Any
) -> SweepConfig:
    """A search of the first `limit` problems of a source (None: the tiny family, or MATH-500, which
    is asked as the field asks). prm: None is tiny-prm beside tiny-solver, else the generator.
    """
    tiny = llm == TINY
    prm = prm or (TINY_PRM if tiny else llm)
    own: dict[str, Any] = {"prm_format": "rlhflow" if prm == llm else None}
    if not tiny:
        own |= {"max_depth": 10, "max_step_tokens": 128, "system_prompt": SYSTEM_PROMPTS[PROMPT]}
    source = source or ("tiny" if tiny else "math500")
    own |= {"llm": llm, "prm": prm, "problems": source, "num_problems": limit}
    return SweepConfig(**own | settings)


def searched(
    workload: SweepConfig,
    llm: TokenEngine,
    prm: TokenEngine,
    seed: int = 0,
    record: Path | None = None,
    **changes: Any,
) -> SearchResult:
    """All its problems searched on two engines; changes: of its settings."""
    config = replace(workload, **changes)
    return make_search(sweep_problems(config), llm, prm, config, seed, record).play()


def sizes_of(workload: SweepConfig) -> dict[str, Any]:
    """The search's sizes as a record's mode names them."""
    names = ("prm", "n", "beam_width", "max_depth", "max_step_tokens")
    own = {name: getattr(workload, name) for name in names}
    own["problems_in_flight"] = workload.min_problem_batch
    named = workload.system_prompt == SYSTEM_PROMPTS[PROMPT]
    return own | ({"system_prompt": PROMPT} if named else {})


def roomy_engine(model: str, **settings: Any) -> Engine:
    """An engine of the tiny pair with more memory than its searches need."""
    return Engine(model, num_blocks=BLOCKS, max_num_seqs=256, **settings)


def run(
    profile: str = "default",
    llm: str = TINY,
    prm: str | None = None,
    seeds: int | None = None,
    problems: str | None = None,
    peer: str | None = None,
    strategy: str = "beam_search",
    repeats: int | None = None,
) -> Iterator[Row]:
    """The rows of `workbench bench search`; with `peer` those of whole systems beside ours and
    nothing else.
    """
    for name, given, usual in (("strategy", strategy, "beam_search"), ("repeats", repeats, None)):
        if given != usual and peer is None:
            raise ConfigError(f"{name} is {given}; it is of --peer alone: give both, or neither.")
    if seeds is not None and peer is not None:
        raise ConfigError(f"seeds is {seeds}; with --peer give repeats, a seed each.")
    if llm != TINY and peer is None:
        raise ConfigError(f"llm is {llm!r}; only {TINY} is searched alone: give a --peer.")
    if peer is not None:
        systems = chosen_systems(peer)
        workload, times = shared_workload(profile, llm, prm, problems, strategy)
        yield from rows_beside(workload, systems, KV_MEMORY, seeds=range(repeats or times))
        return
    limit, count = PROFILES[profile]
    workload = make_workload(llm, prm, problems, limit)
    yield from tiny_rows(workload, seeds or count)


def mode_of(settings: dict[str, Any]) -> dict[str, Any]:
    """What the record says of a run with these settings."""
    llm, prm, profile = (settings[name] for name in ("llm", "prm", "profile"))
    if settings["peer"] is not None:
        told: dict[str, Any] = {"peer": ",".join(chosen_systems(settings["peer"]))}
        told |= {"kv_memory": KV_MEMORY, "reuse_partial_blocks": True, "batch_invariant": True}
        own = settings["problems"], settings["strategy"]
        workload, times = shared_workload(profile, llm, prm, *own)
        ids = [each.id for each in sweep_problems(workload)]
        told |= {"problems": len(ids), "source": Path(workload.problems).name}
        told |= {"problem_ids": ids}
        told |= {"repeats": settings["repeats"] or times}
        told |= {"finish_at_limit": True} if workload.strategy == "beam_search" else {}
        return told | sizes_of(workload)
    limit, seeds = PROFILES[profile]
    workload = make_workload(llm, prm, settings["problems"], limit)
    count = len(sweep_problems(workload)) if settings["problems"] else limit
    counts = {"problems": count, "source": Path(workload.problems).name}
    counts |= {"uncached_problems": min(count, UNCACHED_PROBLEMS)}
    counts |= {"batch_invariant": True, "seeds": settings["seeds"] or seeds}
    return sizes_of(workload) | counts


def shared_workload(
    profile: str, llm: str, prm: str | None, problems: str | None, strategy: str
) -> tuple[SweepConfig, int]:
    """What is searched beside other systems, and how many times: easy MATH problems, each with
    several seeds; of the tiny pair as many of its own as are searched alone, once.
    """
    if llm == TINY:  # every system is told what the model's template says by itself
        told: dict[str, Any] = {"system_prompt": DEFAULT_SYSTEM_MESSAGE, "strategy": strategy}
        return make_workload(llm, prm, problems, PROFILES[profile][0], **told), 1
    limit, times = PEER_PROBLEMS[profile], PEER_REPEATS[profile]
    return make_workload(llm, prm, problems, limit, levels=EASY, strategy=strategy), times


def tiny_rows(workload: SweepConfig, seeds: int) -> Iterator[Row]:
    """Pace, accuracy and gains over all problems and seeds, and what the PRM computes."""
    llm, prm = engines = roomy_engine(workload.llm), roomy_engine(workload.prm)
    found: list[pd.DataFrame] = []
    count, sampled = 0, dict[str, Any](strategy="best_of_n", max_step_tokens=2048, beam_width=1)
    searched(workload, llm, prm, WARM_UP_SEED, num_problems=2)  # compiled kernels, allocators
    for seed in tqdm(range(seeds), desc="seeds"):
        for engine in engines:
            engine.cache.reset()
        beam = searched(workload, llm, prm, seed)
        shuffled = searched(workload, llm, prm, seed, score_shuffle_seed=seed)
        samples = searched(workload, llm, prm, seed, **sampled)
        each, used = samples.problems, beam.throughput.tokens / samples.throughput.tokens
        count = count or max(1, round(workload.n * used))
        equal = searched(workload, llm, prm, seed, **sampled, n=count)
        other = {
            "shuffled": shuffled.problems["correct"].to_numpy(float),
            "majority": samples.correct_by("majority").to_numpy(float),
            "pass_1": (each["correct_candidates"] / each["candidates"]).to_numpy(float),
            "best_of_n": samples.correct_by("weighted").to_numpy(float),
            "equal_tokens": equal.correct_by("weighted").to_numpy(float),
            "equal_used": equal.problems["tokens"].to_numpy(float),
        }
        found.append(with_wall_part(beam.problems, beam.throughput).assign(**other))
    done = pd.concat(found, ignore_index=True)
    right = done["correct"].astype(float)
    ones, seconds = pd.Series(1.0, done.index), done["wall_part_s"]
    table: dict[str, tuple[str, pd.Series, pd.Series]] = {  # unit; a ratio of sums
        "problems_per_min": ("problems/min", ones, seconds / 60),
        "tokens_per_s": ("tokens/s", done["tokens"], seconds),
        "accuracy": ("fraction", right, ones),
        "pass_at_1": ("fraction", done["pass_1"], ones),
        "accuracy_gain": ("fraction", right - done["pass_1"], ones),
        "gain_over_majority": ("fraction", right - done["majority"], ones),
        "gain_over_shuffled": ("fraction", right - done["shuffled"], ones),
        "best_of_n": ("fraction", done["best_of_n"], ones),
        "gain_over_best_of_n": ("fraction", right - done["best_of_n"], ones),
        "equal_tokens_accuracy": ("fraction", done["equal_tokens"], ones),
        "gain_at_equal_tokens": ("fraction", right - done["equal_tokens"], ones),
        "tokens_a_problem": ("tokens", done["tokens"], ones),
        "equal_tokens_a_problem": ("tokens", done["equal_used"], ones),
        "prm_over_ideal": ("x", done["prm_tokens_computed"], done["prm_tokens_distinct"]),
    }
    for name, columns in table.items():
        yield ratio_row(name, *columns, done["problem_id"], seeds)
    yield Row("equal_tokens_n", count, "samples")

    # PRM tokens without its cache and without a score cache, over those with both
    few = replace(workload, num_problems=min(workload.num_problems, UNCACHED_PROBLEMS))
    llm, found = roomy_engine(few.llm), list[pd.DataFrame]()
    for caches in (True, False):
        prm = roomy_engine(few.prm, enable_prefix_caching=caches)
        found.append(searched(few, llm, prm, score_cache=caches).problems)
        llm.cache.reset()
    cheap, dear = (each["prm_tokens_computed"] for each in found)
    yield ratio_row("prm_tokens_saved", "x", dear, cheap, found[0]["problem_id"])


def ratio_row(
    name: str, unit: str, top: pd.Series, bottom: pd.Series, problems: pd.Series, repeats: int = 1
) -> Row:
    """A ratio of sums with its 95 % interval over problems; never a point where all are alike."""
    found, count = bootstrap((top, bottom), problems.tolist()), problems.nunique()
    if unit == "fraction" and found.low == found.high:
        gained = "gain" in name
        found = unlike_a_point(found, count) if gained else wilson(found.estimate, count)
    return Row(name, found.estimate, unit, repeats=repeats, spread=(found.low, found.high))


# -- the searches that are kept in the package for replays --


Plan = tuple[str, int, dict[str, Any]]  # the generator, problems of its family, the strategy's own
PLANS: dict[str, Plan] = {
    "tiny-128": (TINY, 128, {}),
    "tiny-16-n4": (TINY, 16, {"n": 4}),
    "tiny-16-n16": (TINY, 16, {}),
    "tiny-16-n16-w2": (TINY, 16, {"beam_width": 2}),
    "tiny-16-n16-w8": (TINY, 16, {"beam_width": 8}),
    "tiny-16-n64": (TINY, 16, {"n": 64}),
    "smollm2-n4": ("smollm2-135m", 8, {"n": 4}),
    "smollm2-n16": ("smollm2-135m", 8, {}),
}
PLANS |= {
    f"tiny-16-n16-{name.replace('_', '-')}": (TINY, 16, {"strategy": name})
    for name in STRATEGIES
    if name != "beam_search"
}


def make_recording(name: str, path: str | Path, source: str | None = None) -> SearchResult:
    """Search as the recording's plan says and write it; returns the search.

    The embedded pair with the default profile's memory, batch limits and problems in flight;
    neither memory nor limits change a token, they are where replays start. source: the problems'
    file where it is not the usual one.
    """
    if name not in PLANS:
        known = ", ".join(PLANS)
        raise RecordingError(
            f"There is no recording {name!r}; known: {known}.{nearest(name, list(PLANS))}"
        )
    require_destination(path)
    model, num_problems, sizes = PLANS[name]
    workload = make_workload(model, None, source, num_problems)
    if model == TINY:
        workload = SweepConfig(problems=source or "tiny", num_problems=num_problems)
        llm, prm = Pair(RunSpec(workload, workload.sentinel_share, 0)).engines.values()
    else:
        llm, prm = (Engine(model, kv_memory=KV_MEMORY) for _ in range(2))
    return searched(workload, llm, prm, record=Path(path), **sizes)
