"""Whether long use breaks anything: searches over an arena that are disturbed all the time.

The tiny pair searches a few problems again and again in little memory, which another thread splits
anew every few milliseconds. Every other search is interrupted somewhere, as Ctrl-C does it; the
recording of the first meets a full disk. After each, the laws of arena and caches are checked; no
block may be in use. A finished one must have the nodes of a search that nothing disturbed. Resident
memory must not grow: its median in the last quarter over that in the second.
"""

from __future__ import annotations

import os
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from tqdm.auto import tqdm

from workbench.bench.identity import nodes_of
from workbench.bench.record import Row, meanwhile
from workbench.bench.search import TINY, make_workload, roomy_engine, searched
from workbench.config import SweepConfig
from workbench.engine.engine import Engine
from workbench.engine.memory import block_shape
from workbench.errors import BrokenLaw, WorkbenchError
from workbench.experiments.execute import make_search
from workbench.experiments.runs import sweep_problems
from workbench.kvcache.arena import KVArena
from workbench.search.recording import read_recording
from workbench.search.search import Search

PROFILES = {"quick": 1.0, "default": 20.0, "full": 120.0}  # minutes
PROBLEMS, SEEDS, LEAST, LONGEST = 4, 3, 4, 384
FLOORS = 2  # memory, in what the longest request of each model needs
PAUSE_S = 0.02  # between re-splits, at most
MOST_GROWTH = 0.05  # of resident memory, where a quarter of the run has ENOUGH searches
ENOUGH = 25
MODE = {"batch_invariant": True, "problems": PROBLEMS, "seeds": SEEDS, "memory_floors": FLOORS}


class Interrupt(KeyboardInterrupt):
    """One of the soak's own."""


def run(profile: str = "default", minutes: float | None = None, seed: int = 0) -> Iterator[Row]:
    """The rows of `workbench bench soak`; WorkbenchError after them if anything was broken."""
    workload = make_workload(TINY, limit=PROBLEMS, min_problem_batch=PROBLEMS)
    yield from soak(workload, 60 * (PROFILES[profile] if minutes is None else minutes), seed)


def soak(workload: SweepConfig, least_s: float, seed: int = 0) -> Iterator[Row]:
    """See run. For so many seconds, and at least LEAST searches."""
    names, problems = (workload.llm, workload.prm), sweep_problems(workload)
    random, done = Random(seed), Counter[str]()
    llm, prm = (roomy_engine(name, max_model_len=LONGEST) for name in names)
    expected = [nodes_of(searched(workload, llm, prm, each)) for each in range(SEEDS)]
    shapes = [block_shape(name, max_model_len=LONGEST) for name in names]
    least_bytes = sum(shape.block_bytes * shape.floor_blocks for shape in shapes)
    arena = KVArena(int(FLOORS * least_bytes), shapes)
    llm, prm = (Engine(name, arena=arena, max_model_len=LONGEST) for name in names)
    broken: list[str] = []
    resident: list[int] = []  # bytes after each search
    usual_s, start = 1.0, perf_counter()

    def resplit() -> None:  # one below a floor is refused, and not counted
        try:
            done["resplits"] += not arena.resplit(random.uniform(0.1, 0.9)).refused
        except Exception as error:  # else the thread would end unseen
            broken.append(f"a re-split: {error!r}")

    splitting = meanwhile(resplit, lambda: random.uniform(0, PAUSE_S))
    with splitting, TemporaryDirectory() as folder:
        for number in tqdm(count(), desc="searches"):
            if number >= LEAST and perf_counter() - start > least_s:
                break
            record = None if number else Path(folder, "recording")
            which, began = number // 2 % SEEDS, perf_counter()
            search = make_search(problems, llm, prm, workload, which, record)
            try:
                if record is not None:
                    meet_full_disk(search, record)
                    done["full_disks"] += 1
                try:
                    with interrupt_after(random.uniform(0.001, usual_s) if number % 2 else 0):
                        nodes = nodes_of(search.play())
                    every = nodes.keys() | expected[which].keys()
                    done["nodes"] += len(every)
                    done["wrong"] += sum(nodes.get(n) != expected[which].get(n) for n in every)
                    usual_s = perf_counter() - began
                except Interrupt:
                    done["interrupts"] += 1
                for engine in (llm, prm):
                    used = engine.has_work or engine.cache.num_active
                    assert not used, f"{engine.name}: a request or block that nothing uses"
                arena.check()
            except (AssertionError, WorkbenchError) as error:
                broken.append(f"search {number}: {error!r}")
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            resident.append(pages * os.sysconf("SC_PAGE_SIZE"))
    quarter = len(resident) // 4
    growth = median(resident[-quarter:]) / median(resident[quarter : len(resident) // 2]) - 1
    if growth > MOST_GROWTH and quarter >= ENOUGH:
        broken.append(f"resident memory grew by {growth:.1%}; allowed: {MOST_GROWTH:.0%}")
    yield Row("searches", len(resident), "searches")
    for name in ("interrupts", "resplits", "full_disks"):
        yield Row(name, done[name], name)
    yield Row("broken_laws", len(broken), "laws", repeats=len(resident))
    yield Row("differing_nodes", done["wrong"], "nodes", repeats=done["nodes"])
    yield Row("rss_growth", growth, "fraction", repeats=quarter)
    if broken or done["wrong"]:
        told = "; ".join(broken[:3]) or f"{done['wrong']} nodes differ"
        raise BrokenLaw(f"The soak broke something: {told}. Repeat it with --seed {seed}.")


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Interrupt in the main thread after so long, unless it has left by then; 0: never."""

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def meet_full_disk(search: Search, record: Path) -> None:
    """Play a search while no file can grow; AssertionError unless nothing is left of its recording,
    and the search writes all of it once there is room.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with suppress(OSError):
            search.play()
            raise AssertionError("a recording was written to a full disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(record.parent.iterdir()), "a full disk left part of a file"
    search.play()
    steps = sum(len(problem.steps) for problem in read_recording(record).problems)
    assert steps == len(search.result().tree), "the recording lacks steps"
