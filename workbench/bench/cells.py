"""Searches of the embedded pair in cells of different splits, policies, limits and n, measured.

What a device is calibrated with, and what a replay is held against. Cells are searched in turn; a
cell whose repeats lie more than 5 % apart is searched again. All repeats take the same steps, so of
each step the fastest stands: the pace of a shared machine wanders within a search, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from workbench.bench.machine_ceiling import measure_ceiling
from workbench.engine.engine import Engine
from workbench.engine.memory import block_shape
from workbench.experiments.provenance import cpu_model, memory_bytes
from workbench.kvcache.arena import BlockShape, KVArena
from workbench.replay.answers import Answers
from workbench.replay.devices import Device
from workbench.replay.simulator import POLICIES as REPLAYED_POLICIES
from workbench.replay.simulator import MeasuredRun, SharedMemory, calibrated
from workbench.search.prm import PRM
from workbench.search.problems import Problem, load_problems
from workbench.search.recording import read_recording
from workbench.search.result import SearchResult
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch
from workbench.trace import Trace

WIDTHS = (16, 4)  # n
SPLITS = ((96, 480), (200, 120), (400, 80), (140, 240), (260, 96))  # blocks of LLM and PRM
LIMITS = ((64, 2048), (16, 256), (8, 512), (32, 1024))  # max_num_seqs, max_num_batched_tokens
POLICIES = ("MarginalValue", "FirstCome", "PhaseAware", "StaticSplit")  # of a shared memory
ARENA = (110, 170)  # blocks that its bytes would be for LLM and PRM
SPREAD, MORE = 0.05, 2  # repeats further apart than this are searched again, so often at most
MAX_MODEL_LEN = 1024
MODELS = ("tiny-solver", "tiny-prm")


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

    @property
    def llm(self) -> dict[str, Any]:
        """What a replay changes of the recorded LLM."""
        return self._settings(0)

    @property
    def prm(self) -> dict[str, Any]:
        """What a replay changes of the recorded PRM."""
        return self._settings(1)

    @property
    def shared(self) -> SharedMemory | None:
        """The memory that both models share, if they do."""
        if self.policy is None:
            return None
        llm, prm = (n * shape.block_bytes for n, shape in zip(self.blocks, _shapes(), strict=True))
        return SharedMemory(llm + prm, self.policy, llm / (llm + prm))

    @property
    def best(self) -> SearchResult:
        """The fastest repeat as a whole."""
        return max(self.results, key=lambda result: result.throughput.tokens_per_s)

    @property
    def trace(self) -> Trace:
        """Each step as long as in the repeat in which it was fastest; spans of the one with the
        fewest seconds of them.
        """
        traces = [result.trace for result in self.results]
        fastest = np.min([trace.steps["duration_s"] for trace in traces], axis=0)
        spans = min((trace.spans for trace in traces), key=lambda spans: spans["duration_s"].sum())
        return replace(traces[0], steps=traces[0].steps.assign(duration_s=fastest), spans=spans)

    @property
    def tokens_per_s(self) -> float:
        """Over the seconds of `trace`, and the fewest that a repeat spent outside of steps."""
        outside = min(
            result.throughput.wall_s - result.trace.steps["duration_s"].sum()
            for result in self.results
        )
        seconds = outside + self.trace.steps["duration_s"].sum()
        return float(self.results[0].throughput.tokens / seconds)

    @property
    def spread(self) -> float:
        """Distance of the slowest repeat from the fastest, as a share of the fastest."""
        rates = [result.throughput.tokens_per_s for result in self.results]
        return 1 - min(rates) / max(rates) if rates else 0.0

    def __str__(self) -> str:
        memory = "{}+{} blocks".format(*self.blocks) + (f" {self.policy}" if self.policy else "")
        return f"n={self.n}, {memory}, {self.limits[0]} rows, {self.limits[1]} tokens"

    def _settings(self, place: int) -> dict[str, Any]:
        seqs, tokens = self.limits
        own = {"num_blocks": self.blocks[place]} if self.policy is None else {}
        return own | {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}

    def engines(self) -> list[Engine]:
        """Fresh ones: LLM, PRM."""
        given: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN}
        shared = self.shared
        if shared is not None:
            policy = REPLAYED_POLICIES[shared.policy]()
            share = shared.kv_share if policy.keeps_split else None
            given["arena"] = KVArena(shared.memory, _shapes(), policy, share)
        each = zip(MODELS, (self.llm, self.prm), strict=True)
        return [Engine(name, **own, **given) for name, own in each]

    def search(self, problems: list[Problem], seed: int, record: Path | None = None) -> None:
        """Search once more on engines of this cell."""
        llm, prm = self.engines()
        result = run_search(
            problems,
            llm=llm,
            prm=PRM(prm),
            strategy=BeamSearch(n=self.n, beam_width=4, max_depth=40),
            seed=seed,
            record=record,
        )
        self.results.append(result)


def _shapes() -> list[BlockShape]:
    return [block_shape(name, max_model_len=MAX_MODEL_LEN) for name in MODELS]


def cells(held_out: int) -> tuple[list[Cell], list[Cell]]:
    """Those to fit, each n with each of the limits, and those held out; all differ.

    Every third of those held out is an arena, of one policy after the other.
    """
    grid = [
        Cell(n, SPLITS[(place + shift) % len(SPLITS)], LIMITS[place])
        for shift in range(len(SPLITS))
        for place in range(len(LIMITS))
        for n in WIDTHS
    ]
    count = len(LIMITS) * len(WIDTHS)
    fitted, rest = grid[:count], iter(grid[count:])
    others = [_arena(k) if k % 3 == 2 else next(rest) for k in range(held_out)]
    return fitted, others


def _arena(place: int) -> Cell:
    number = place // 3
    limits = LIMITS[(number + number // len(LIMITS)) % len(LIMITS)]
    return Cell(WIDTHS[number % len(WIDTHS)], ARENA, limits, POLICIES[number % len(POLICIES)])


def this_machine() -> Device:
    """This machine's roofline, measured now."""
    ceiling = measure_ceiling()
    return Device(
        cpu_model(),
        ceiling.gemm_flops_per_s,
        ceiling.bytes_per_s,
        memory_bytes() or 1 << 30,
        "measured: a matrix product, a sum over memory",
    )


def recorded(fitted: list[Cell], problems: list[Problem], seed: int) -> dict[int, Answers]:
    """A recording of each n; the searches that made them warm the machine up and are dropped."""
    answers = {}
    with TemporaryDirectory() as folder:
        for n in WIDTHS:
            cell = next(cell for cell in fitted if cell.n == n)
            path = Path(folder) / f"{n}.parquet"
            cell.search(problems, seed, path)
            cell.results.clear()
            answers[n] = Answers(read_recording(path))
    return answers


def measure(measured: list[Cell], problems: list[Problem], seed: int, repeats: int) -> None:
    """Search every cell so often, in turn, and those whose repeats disagree once more."""
    for _ in range(repeats):
        for cell in measured:
            cell.search(problems, seed)
    for _ in range(MORE if repeats > 1 else 0):
        for cell in [cell for cell in measured if cell.spread > SPREAD]:
            cell.search(problems, seed)


def fitted_device(fitted: Iterable[Cell], answers: dict[int, Answers]) -> Device:
    """This machine with the terms that explain the cells' measured steps."""
    runs = [MeasuredRun(answers[c.n], c.trace, c.llm, c.prm) for c in fitted]
    return calibrated(this_machine(), runs)


def calibrate(num_problems: int, repeats: int, seed: int = 0) -> Device:
    """This machine's preset for the embedded pair, measured now."""
    problems = load_problems("tiny", num_problems)
    fitted, _ = cells(0)
    answers = recorded(fitted, problems, seed)
    measure(fitted, problems, seed, repeats)
    return fitted_device(fitted, answers)
