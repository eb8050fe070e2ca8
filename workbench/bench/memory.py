"""What memory the engine takes: beams that share their past, a start, two models in one arena.

kv_beams_saving: the 16 beams of one problem, as a real search had them when they were longest, in
blocks with shared prefixes against one contiguous piece each of exactly its length. The cache
manager is given what it was given in the search: each beam's path is admitted, then its own step is
room of its own, so equal steps of two beams count twice. How large it can be is the search's doing:
kv_beams_over_distinct is what the blocks hold over the distinct tokens, the least that anyone must
keep. startup_s and startup_peak_over_budget: startup.py. On the tiny pair also how two models share
one memory (sharing.py), what an arena costs (arena.py), and what forks save (reuse.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pandas as pd

from workbench.bench import arena, reuse, sharing
from workbench.bench.record import Row
from workbench.bench.rows import plain_row
from workbench.bench.startup import measure
from workbench.bench.workload import Workload, is_tiny, real_workload, reward_model
from workbench.engine.engine import Engine
from workbench.kvcache.manager import KVCacheManager
from workbench.search.answers import check_choice
from workbench.search.prm import trie_size
from workbench.search.problems import load_problems

PROBLEMS = {"quick": 1, "default": 3, "full": 8}
REUSED = {"quick": 2, "default": 16, "full": 32}  # problems searched with and without forks
STARTS = {"quick": 1, "default": 5, "full": 9}
BLOCK_SIZE = 16
KV_MEMORY = {True: "64MiB", False: "1GiB"}  # of an engine; whether the model is one of the tiny
MODE = {"batch_invariant": True, "n": 16, "beam_width": 4, "block_size": BLOCK_SIZE}
SHARED = {
    "budgets_of_w": sharing.BUDGETS,
    "kv_shares": sharing.SHARES,
    "baseline": "thesis 5.3 modifications on, static kv_share 0.3",
}
Beam = tuple[list[int], list[int]]  # the tokens before its own step, and its step's


def mode_of(settings: dict[str, Any]) -> dict[str, Any]:
    """What the record says of a run with these settings."""
    if not is_tiny(settings["model"]):
        return MODE
    plan = sharing.PLANS[settings["profile"]]
    sizes = {"shared_problems": plan.num_problems, "shared_in_flight": plan.in_flight}
    return MODE | SHARED | sizes | {"shared_seeds": settings["seeds"] or plan.num_seeds}


def run(
    profile: str = "default",
    model: str = "tiny-solver",
    prm: str | None = None,
    seed: int = 0,
    problems: str | None = None,
    repeats: int | None = None,
    seeds: int | None = None,
    part: str | None = None,
) -> Iterator[Row]:
    """The rows of `workbench bench memory`.

    repeats: starts, instead of the profile's. seeds: of the searches that share one memory, as many
    as these instead of the profile's. part: of the rows alone, None: all; arena, forks and sharing
    are of the tiny pair.
    """
    kv_memory = KV_MEMORY[is_tiny(model)]
    parts = {
        "starts": lambda: _starts(model, kv_memory, repeats or STARTS[profile]),
        "beams": lambda: _beams(
            _workload(model, prm, problems, PROBLEMS[profile]), kv_memory, seed
        ),
    }
    if is_tiny(model):
        parts["forks"] = lambda: reuse.rows(REUSED[profile], seed)
        parts["arena"] = lambda: arena.rows(profile, seed)
        parts["sharing"] = lambda: sharing.rows(profile, seeds)
    if part is not None:
        check_choice("part", part, tuple(parts))
    yield from chain.from_iterable(
        measured() for name, measured in parts.items() if part in (None, name)
    )


def _starts(model: str, kv_memory: str, repeats: int) -> Iterator[Row]:
    starts = [measure(model, kv_memory) for _ in range(repeats + 1)][1:]
    yield plain_row("startup_s", [start.seconds for start in starts], "s")
    yield Row("startup_cold_s", measure(model, kv_memory, cold=True).seconds, "s", repeats=1)
    peaks = [start.peak_bytes for start in starts]
    yield plain_row("startup_peak_bytes", peaks, "B")
    over = [start.peak_bytes / start.budget_bytes for start in starts]
    yield plain_row("startup_peak_over_budget", over, "fraction")


def _beams(workload: Workload, kv_memory: str, seed: int) -> Iterator[Row]:
    held = list(beams_of(workload, kv_memory, seed))
    yield plain_row("kv_beams_saving", [each.contiguous / each.paged for each in held], "x")
    yield plain_row("kv_beams_over_distinct", [each.paged / each.distinct for each in held], "x")


def _workload(model: str, prm: str | None, source: str | None, limit: int) -> Workload:
    if not is_tiny(model):
        return real_workload(model, prm, source, limit)
    chosen = tuple(load_problems("tiny", limit=limit))
    return Workload(model, reward_model(model, prm), chosen, max_depth=40)


@dataclass(frozen=True, slots=True)
class Held:
    """Tokens' worth of memory that all n beams of a problem take."""

    contiguous: int  # a piece of exactly its length for each
    paged: int  # whole blocks
    distinct: int


def beams_of(workload: Workload, kv_memory: str, seed: int) -> Iterator[Held]:
    """For each problem of which all n beams were alive at one time, when they were longest."""
    llm = Engine(workload.llm, kv_memory=kv_memory, block_size=BLOCK_SIZE)
    prm = workload.reward(Engine(workload.prm, kv_memory=kv_memory))
    for problem in workload.problems:
        result = replace(workload, problems=(problem,)).search(llm, prm, seed)
        beams = longest_beams(result.tree, workload.prompt(problem, llm), workload.n)
        if beams:
            whole = [before + step for before, step in beams]
            contiguous, paged = sum(map(len, whole)), blocks_used(beams) * BLOCK_SIZE
            distinct = trie_size(array("i", beam) for beam in whole)
            yield Held(contiguous, paged, distinct)


def longest_beams(tree: pd.DataFrame, prompt: list[int], n: int) -> list[Beam]:
    """The beams of the iteration that holds most tokens, of those in which all n were sampled."""
    tokens_to: dict[str, list[int]] = {}
    iterations: dict[int, list[Beam]] = {}
    for node in tree.sort_values("depth").itertuples():
        before = tokens_to.get(str(node.parent_id), prompt)
        step: list[int] = list(node.token_ids)  # type: ignore[arg-type]
        tokens_to[str(node.node_id)] = before + step
        iterations.setdefault(int(node.depth), []).append((before, step))  # type: ignore[arg-type]
    whole = [beams for beams in iterations.values() if len(beams) == n]
    return max(whole, key=lambda beams: sum(len(b) + len(s) for b, s in beams), default=[])


def blocks_used(beams: Sequence[Beam]) -> int:
    """Active blocks when all beams are held at once: paths admitted first, then their steps."""
    most = sum(-(-(len(before) + len(step)) // BLOCK_SIZE) for before, step in beams)
    cache = KVCacheManager(num_blocks=most, block_size=BLOCK_SIZE)
    for number, (before, _) in enumerate(beams):
        assert cache.allocate(number, before) is not None
    for number, (before, step) in enumerate(beams):
        assert cache.extend(number, before + step) is not None
    return cache.num_active
