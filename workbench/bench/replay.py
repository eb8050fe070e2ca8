"""How well a replay foretells a measured run, and what it costs to ask.

Cells are searches of the embedded pair at different splits, policies, limits and n. Some calibrate
this machine, the others are held out: their throughput is replayed and held against the measured
one, their events are compared step by step. All cells' rounds take turns, so that a slow minute of
the machine is every cell's. `@repeats` are means over every repeat of the error's size; without it
errors are against a composite, which the device is fitted to: of each step the mean. What a
replay costs is CPU time of this process, for a search at the thesis's scale, never replayed before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from workbench.bench.kernels import gpu_ceiling, require_gpu
from workbench.bench.record import Row, measure_ceiling, median_row
from workbench.bench.search import TINY, TINY_PRM, make_workload
from workbench.config import SweepConfig
from workbench.engine.engine import Engine
from workbench.engine.memory import block_shape, device_memory
from workbench.experiments.execute import make_search
from workbench.experiments.provenance import cpu_model, memory_bytes
from workbench.experiments.runs import sweep_problems
from workbench.host import collection_paused
from workbench.kvcache.arena import BlockShape, KVArena
from workbench.replay import simulator
from workbench.replay.answers import Answers
from workbench.replay.devices import PRESETS, Device
from workbench.replay.miss_ratio import curve_sizes, miss_ratio
from workbench.replay.workload import thesis_search
from workbench.search.recording import read_recording
from workbench.search.result import SearchResult
from workbench.search.search import Search
from workbench.trace import Trace

PROFILES = {"quick": (2, 1, 4), "default": (8, 3, 12), "full": (16, 5, 18)}
"""Problems, repeats, held-out cells."""
THESIS_PROBLEMS = {"quick": 4, "default": 128, "full": 128}
WIDTHS = (16, 4)  # n
SPLITS = ((96, 480), (200, 120), (400, 80), (140, 240), (260, 96))  # blocks of LLM and PRM
LIMITS = ((64, 2048), (16, 256), (8, 512), (32, 1024))  # max_num_seqs, max_num_batched_tokens
SHARED = ("marginal_value", "first_come", "phase_aware", "static")  # policies of one memory
ARENA = (110, 170)  # blocks that its bytes would be for LLM and PRM
CURVE_SIZES = 32
REPEATS = 3  # of what is timed at scale
MODE = {"batch_invariant": True, "beam_width": 4, "max_depth": 40, "max_model_len": 1024}


def run(profile: str = "default", seed: int = 0, repeats: int | None = None) -> Iterator[Row]:
    """The rows of `workbench bench replay`. repeats: searches a cell, not the profile's."""
    num_problems, own_repeats, held_out = PROFILES[profile]
    workload = make_workload(TINY, limit=num_problems)
    fitted, others = make_cells(held_out)
    answers, device = fitted_device(fitted, others, workload, seed, repeats or own_repeats)
    yield from accuracy_rows(others, answers, device)
    yield from scale_rows(THESIS_PROBLEMS[profile], seed)


def calibrate(num_problems: int, repeats: int, seed: int = 0) -> Device:
    """This machine's preset for the embedded pair, measured now."""
    workload, (fitted, _) = make_workload(TINY, limit=num_problems), make_cells(0)
    return fitted_device(fitted, [], workload, seed, repeats)[1]


# -- cells --


@dataclass(slots=True, eq=False)
class Cell:
    """One configuration, and the searches that were measured with it.

    policy: None gives each model its blocks, else both share an arena of as many bytes.
    """

    n: int
    blocks: tuple[int, int]
    limits: tuple[int, int]
    policy: str | None = None
    results: list[SearchResult] = field(default_factory=list)

    def __str__(self) -> str:
        memory = "{}+{} blocks".format(*self.blocks) + (f" {self.policy}" if self.policy else "")
        return f"n={self.n}, {memory}, {self.limits[0]} rows, {self.limits[1]} tokens"

    @property
    def settings(self) -> list[dict[str, Any]]:
        """Of LLM and PRM: what differs from cell to cell."""
        limits = dict(zip(("max_num_seqs", "max_num_batched_tokens"), self.limits))
        return [limits | ({} if self.policy else {"num_blocks": n}) for n in self.blocks]

    @property
    def shared(self) -> simulator.SharedMemory | None:
        """The memory that both models share, if they do."""
        if self.policy is None:
            return None
        llm, prm = (n * shape.block_bytes for n, shape in zip(self.blocks, _shapes(), strict=True))
        return simulator.SharedMemory(llm + prm, self.policy, llm / (llm + prm))

    def search(self, workload: SweepConfig, seed: int, record: Path | None = None) -> Search:
        """One more search on fresh engines, to be played."""
        given: dict[str, Any] = {"max_model_len": MODE["max_model_len"]}
        if (shared := self.shared) is not None:
            share = shared.kv_share if shared.keeps_split else None
            policy = simulator.POLICIES[shared.policy]()
            given["arena"] = KVArena(shared.memory, _shapes(), policy, share)
        each = zip((TINY, TINY_PRM), self.settings, strict=True)
        llm, prm = (Engine(name, **own, **given) for name, own in each)
        config = replace(workload, n=self.n)
        return make_search(sweep_problems(config), llm, prm, config, seed, record)

    @property
    def trace(self) -> Trace:
        """Each step and span as long as the mean of the repeats'."""
        traces = [result.trace for result in self.results]
        steps, spans = (
            frames[0].assign(duration_s=np.mean([each["duration_s"] for each in frames], axis=0))
            for frames in ([each.steps for each in traces], [each.spans for each in traces])
        )
        return replace(traces[0], steps=steps, spans=spans)

    @property
    def tokens_per_s(self) -> float:
        """Over the seconds of `trace`'s steps, and the mean of what repeats spent outside."""
        steps = [each.trace.steps["duration_s"].sum() for each in self.results]
        outside = [each.throughput.wall_s - spent for each, spent in zip(self.results, steps)]
        seconds = fmean(outside) + self.trace.steps["duration_s"].sum()
        return float(self.results[0].throughput.tokens / seconds)


def _shapes() -> list[BlockShape]:
    return [block_shape(name, max_model_len=MODE["max_model_len"]) for name in (TINY, TINY_PRM)]


def make_cells(held_out: int) -> tuple[list[Cell], list[Cell]]:
    """Those to fit, each n with each of the limits, and those held out; all differ.

    Every third of those held out is an arena, of one policy after the other.
    """
    places = product(range(len(SPLITS)), range(len(LIMITS)), WIDTHS)
    grid = [Cell(n, SPLITS[(k + at) % len(SPLITS)], LIMITS[k]) for at, k, n in places]
    count = len(LIMITS) * len(WIDTHS)
    others = grid[count : count + held_out - held_out // 3]
    for k in range(held_out // 3):
        limits = LIMITS[(k + k // len(LIMITS)) % len(LIMITS)]
        arena = Cell(WIDTHS[k % len(WIDTHS)], ARENA, limits, SHARED[k % len(SHARED)])
        others.insert(3 * k + 2, arena)
    return grid[:count], others


def measure(measured: list[Cell], workload: SweepConfig, seed: int, repeats: int) -> None:
    """Search every cell so often; of each repeat the rounds of all cells take turns."""
    for _ in range(repeats):
        searches = [cell.search(workload, seed) for cell in measured]
        playing = searches
        while playing:
            with collection_paused():
                playing = [search for search in playing if search.round()]
        for cell, search in zip(measured, searches, strict=True):
            cell.results.append(search.result())


def this_machine(device: str = "cpu") -> Device:
    """This machine's roofline, or its GPU's, measured now."""
    if device == "cpu":
        ceiling, name, memory = measure_ceiling(), cpu_model(), memory_bytes() or 1 << 30
    else:
        place = require_gpu(bench="reenact", name=device)
        ceiling, name = gpu_ceiling(place), torch.cuda.get_device_name(place)
        memory = device_memory(place)
    source = "measured: a matrix product, a sum over memory"
    return Device(name, ceiling.gemm_flops_per_s, ceiling.bytes_per_s, memory, source)


def fitted_device(
    fitted: list[Cell], others: list[Cell], workload: SweepConfig, seed: int, repeats: int
) -> tuple[dict[int, Answers], Device]:
    """A recording of each n; this machine with the terms that explain the fitted cells' steps.

    All cells are measured; the searches that made the recordings warm the machine up and are
    dropped.
    """
    answers = {}
    with TemporaryDirectory() as folder:
        for n in WIDTHS:
            cell, path = next(cell for cell in fitted if cell.n == n), Path(folder) / f"{n}.parquet"
            cell.search(workload, seed, path).play()
            answers[n] = Answers(read_recording(path))
    measure([*fitted, *others], workload, seed, repeats)
    runs = [simulator.MeasuredRun(answers[cell.n], cell.trace, *cell.settings) for cell in fitted]
    return answers, simulator.calibrated(this_machine(), runs)


# -- rows --


def accuracy_rows(others: list[Cell], answers: dict[int, Answers], device: Device) -> Iterator[Row]:
    """How far replays of the cells lie from what was measured, and whether their events agree."""
    whole, errors, same, spreads = [], [], [], []  # spread: of repeats, over the fastest
    for cell in others:
        llm, prm = cell.settings
        found = simulator.replay(answers[cell.n], device, llm=llm, prm=prm, shared=cell.shared)
        rate, name = found.throughput.tokens_per_s, f"throughput_error@{cell}"
        measured = [result.throughput.tokens_per_s for result in cell.results]
        spreads.append(1 - min(measured) / max(measured))
        whole.append([rate / each - 1 for each in measured])
        errors.append(rate / cell.tokens_per_s - 1)
        foretold, seen = (simulator.events(each.steps) for each in (found.trace, cell.trace))
        same.append(foretold.equals(seen))
        yield median_row(f"{name}@repeats", whole[-1], "fraction")
        yield Row(name, errors[-1], "fraction", repeats=len(whole[-1]))
    each = [fmean(map(abs, repeats)) for repeats in whole]  # some cells ran once more
    for name, value in {
        "throughput_mean_error@repeats": fmean(each),
        "throughput_worst_error@repeats": max(each),
        "throughput_mean_error": fmean(map(abs, errors)),
        "throughput_worst_error": max(map(abs, errors)),
        "events_identical": fmean(same),
        "measured_spread_worst": max(spreads),
    }.items():
        yield Row(name, value, "fraction", repeats=len(others))


def scale_rows(num_problems: int, seed: int) -> Iterator[Row]:
    """Of each the fastest of REPEATS: the same work, whatever the machine's pace."""
    search, device = thesis_search(num_problems, seed=seed), PRESETS["a100-40"]
    spent = []
    for _ in range(REPEATS):
        answers = Answers(search)  # no block is hashed yet
        start = time.process_time()
        replayed = simulator.replay(answers, device)
        spent.append(time.process_time() - start)
    share = min(spent) / replayed.throughput.wall_s
    yield Row("replay_s", min(spent), "s", repeats=REPEATS)
    yield Row("replay_over_simulated", share, "fraction", repeats=REPEATS)
    logs = simulator.search_calls(answers, device)
    both = [(calls, curve_sizes(calls, CURVE_SIZES)) for calls in logs]
    curves = []
    for _ in range(REPEATS):
        start = time.process_time()
        for calls, sizes in both:
            miss_ratio(calls, sizes)
        curves.append(time.process_time() - start)
    yield Row("miss_ratio_s", min(curves), "s", repeats=REPEATS)
