"""Drives an executor without scheduler or cache manager: sequences, each with its own blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.core import SamplingRows, StepPlan, StepResult, WantedLogits
from workbench.engine.executor import Executor
from workbench.kvcache.storage import KVStorage
from workbench.models.llama import LlamaModel

Work = tuple[str, list[int], bool]  # sequence, its next tokens, whether to sample after them


def sampling_rows(
    rows: Sequence[int], positions: Sequence[int], temperature: float = 0.0, seed: int = 0
) -> SamplingRows:
    count = len(rows)
    return SamplingRows(
        rows=np.array(rows, np.int64),
        positions=np.array(positions, np.int64),
        seeds=np.full(count, seed, np.uint64),
        temperature=np.full(count, temperature),
        top_k=np.zeros(count, np.int64),
        top_p=np.ones(count),
        min_p=np.zeros(count),
        logprobs=np.full(count, -1, np.int64),
    )


class Driver:
    """Gives each sequence blocks in a scattered order and runs the steps it is told."""

    def __init__(
        self, model: LlamaModel, block_size: int = 16, tokens: int = 8192, **options: object
    ) -> None:
        spec = model.spec
        blocks = tokens // block_size
        shape = (spec.layers, spec.kv_heads, spec.head_dim)
        self.storage = KVStorage(blocks, block_size, *shape, model.dtype)
        self.executor = Executor(model, self.storage, **options)  # type: ignore[arg-type]
        self.free = np.random.default_rng(0).permutation(blocks).tolist()
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def fork(self, parent: str, child: str, length: int) -> None:
        """`child` starts from `length` tokens of `parent`, in its blocks: a prefix hit."""
        assert length % self.storage.block_size == 0
        self.tables[child] = self.tables[parent][: length // self.storage.block_size]
        self.lengths[child] = length

    def step(
        self,
        work: Sequence[Work],
        wanted: tuple[WantedLogits, ...] = (),
        temperature: float = 0.0,
    ) -> StepResult:
        return self.executor.submit(self.plan(work, wanted, temperature)).result()

    def plan(
        self,
        work: Sequence[Work],
        wanted: tuple[WantedLogits, ...] = (),
        temperature: float = 0.0,
    ) -> StepPlan:
        tokens, positions, starts, rows = [], [], [0], []
        for name, new, sampled in work:
            begin = self.lengths.get(name, 0)
            tokens += new
            positions += range(begin, begin + len(new))
            starts.append(len(tokens))
            self._make_room(name, begin + len(new))
            if sampled:
                rows.append(len(tokens) - 1)
        return StepPlan(
            step=0,
            tokens=np.array(tokens, np.int64),
            positions=np.array(positions, np.int64),
            query_start=np.array(starts, np.int32),
            context_len=np.array([self.lengths[name] for name, _, _ in work], np.int32),
            block_offsets=self._offsets([name for name, _, _ in work]),
            sampling=sampling_rows(rows, [positions[r] + 1 for r in rows], temperature),
            wanted=wanted,
        )

    def _make_room(self, name: str, length: int) -> None:
        self.lengths[name] = length
        table = self.tables.setdefault(name, [])
        while len(table) * self.storage.block_size < length:
            table.append(self.free.pop())

    def _offsets(self, names: list[str]) -> np.ndarray:
        offsets = np.zeros((len(names), max(len(self.tables[n]) for n in names)), np.int64)
        for row, name in enumerate(names):
            offsets[row, : len(self.tables[name])] = self.storage.offsets[self.tables[name]]
        return offsets


def generate(
    driver: Driver, prompts: dict[str, list[int]], count: int, chunk: int = 10_000
) -> dict[str, list[int]]:
    """Greedy continuations of all prompts at once, prompts in chunks."""
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    longest = max(map(len, prompts.values()))
    for first in range(0, longest, chunk):
        parts = {n: p[first : first + chunk] for n, p in prompts.items() if first < len(p)}
        ends = {n: first + chunk >= len(prompts[n]) for n in parts}
        result = driver.step([(n, part, ends[n]) for n, part in parts.items()])
        for name, token in zip([n for n in parts if ends[n]], result.tokens, strict=True):
            tokens[name].append(int(token))
    for _ in range(count - 1):
        result = driver.step([(n, [tokens[n][-1]], True) for n in prompts])
        for name, token in zip(prompts, result.tokens, strict=True):
            tokens[name].append(int(token))
    return tokens
