"""Drives an executor without scheduler or cache manager: sequences, each with its own blocks."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from workbench.core import SamplingRows, StepPlan, StepResult, WantedLogits
from workbench.engine.executor import Executor
from workbench.kvcache.storage import KVStorage
from workbench.models.llama import LlamaModel

Work = tuple[str, list[int]]  # sequence, its next tokens
NONE_SAMPLED = SamplingRows(**{each.name: np.zeros(0, np.int64) for each in fields(SamplingRows)})


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

    def step(self, work: Sequence[Work], wanted: tuple[WantedLogits, ...] = ()) -> StepResult:
        """The logits that are wanted of these tokens' rows; nothing is sampled."""
        tokens, positions, starts = [], [], [0]
        for name, new in work:
            begin = self.lengths.get(name, 0)
            tokens += new
            positions += range(begin, begin + len(new))
            starts.append(len(tokens))
            self.lengths[name] = begin + len(new)
            table = self.tables.setdefault(name, [])
            while len(table) * self.storage.block_size < self.lengths[name]:
                table.append(self.free.pop())
        names = [name for name, _ in work]
        offsets = np.zeros((len(names), max(len(self.tables[n]) for n in names)), np.int64)
        for row, name in enumerate(names):
            offsets[row, : len(self.tables[name])] = self.storage.offsets[self.tables[name]]
        plan = StepPlan(
            step=0,
            tokens=np.array(tokens, np.int64),
            positions=np.array(positions, np.int64),
            query_start=np.array(starts, np.int32),
            context_len=np.array([self.lengths[name] for name in names], np.int32),
            block_offsets=offsets,
            sampling=NONE_SAMPLED,
            wanted=wanted,
        )
        return self.executor.submit(plan).result()
