"""Which cells the batching study consists of: one engine, one pair of batch limits, one kind each.

A cell is a run like any other: it has a fingerprint, is stored in a folder and found again. All of
a study's cells ask the same requests, those of one recorded search at one split. Nothing here loads
a model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from workbench.config import EngineConfig, SweepConfig
from workbench.errors import ConfigError
from workbench.experiments.plan import RunSpec

TIMED, COUNTED = "batch", "blocks"
"""Roles: an engine computes and is timed; or only scheduler and cache run, and blocks are counted.
"""
CONTINUOUS, UNCACHED, STATIC = "continuous", "continuous, no prefix cache", "static, padded"
KINDS: dict[str, dict[str, Any]] = {
    CONTINUOUS: {"batching": "continuous", "enable_prefix_caching": True},
    UNCACHED: {"batching": "continuous", "enable_prefix_caching": False},
    STATIC: {"batching": "static", "enable_prefix_caching": False},
}
COMPARED = (UNCACHED, STATIC)
MODELS = ("llm", "prm")
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "block_size")
THESIS_SHARE = 0.3
"""The thesis's baseline split: both engines have the memory it leaves them."""


@dataclass(frozen=True, slots=True)
class BatchGrid:
    """The limits that are tried.

    compared: max_num_seqs at which static batches stand beside continuous ones; without a prefix
    cache requests cost the same whenever they are asked, so there every so many are enough.
    num_problems: of the search whose requests are asked. repeats: times each timed cell is
    carried out.
    """

    max_num_seqs: tuple[int, ...] = (8, 64, 512)
    max_num_batched_tokens: tuple[int, ...] = (256, 2048, 16384)
    compared: tuple[int, ...] = (8, 16, 64)
    compared_every: int = 6
    block_sizes: tuple[int, ...] = (1, 4, 16, 64)
    num_problems: int = 4
    repeats: int = 2
    llm_share: float = THESIS_SHARE

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "compared",
            "block_sizes",
        ):
            values = getattr(self, name)
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise ConfigError(
                    f"BatchGrid.{name} is {values!r}; allowed: whole numbers from 1, each once."
                )
        counts = {"num_problems": self.num_problems, "repeats": self.repeats}
        counts["compared_every"] = self.compared_every
        if min(counts.values()) < 1 or not 0 < self.llm_share < 1:
            given = ", ".join(f"{name}={count}" for name, count in counts.items())
            raise ConfigError(
                f"BatchGrid got {given}, llm_share={self.llm_share}; allowed: at least 1 each, and "
                "a share in (0, 1)."
            )


_POWERS = tuple(2**k for k in range(15))
_WHOLE = BatchGrid(_POWERS[3:10], _POWERS[8:], _POWERS[3:10], 1, _POWERS[:7], 16, repeats=3)
GRIDS = {
    "quick": BatchGrid((8, 64), (256, 2048), (8, 16), 4, (4, 16, 64), 2, repeats=1),
    "default": BatchGrid(),
    "full": _WHOLE,
    "thesis": _WHOLE,
}


@dataclass(frozen=True, slots=True)
class BatchSpec(RunSpec):
    """One cell. kind: a key of KINDS; block_size: None is the study's own.

    every: of the recorded requests this cell asks each so many-th. repeat: which of a timed
    cell's repetitions it is, from 0.
    """

    model: str = "llm"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kind: str = CONTINUOUS
    block_size: int | None = None
    every: int = 1

    @property
    def cell(self) -> dict[str, Any]:
        """What tells this cell from the study's others."""
        return {
            "model": self.model,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kind": self.kind,
            "block_size": self.block_size or self.config.block_size,
            "every": self.every,
        }

    @property
    def name(self) -> str:
        """Readable half of the run folder's name."""
        kind = self.kind.replace(",", "").replace(" ", "-")
        limits = "x".join(str(self.cell[name]) for name in LIMITS)
        return f"{self.role}{self.repeat or ''}-{self.model}-{limits}-{kind}"

    @property
    def parameters(self) -> dict[str, Any]:
        return super(BatchSpec, self).parameters | self.cell

    def engine(self, role: str) -> EngineConfig:
        """The study's engine of this role; the measured one with the cell's limits."""
        usual = super(BatchSpec, self).engine(role)
        if role != self.model:
            return usual
        limits = {name: self.cell[name] for name in LIMITS}
        return EngineConfig.from_dict(usual.to_dict() | limits | KINDS[self.kind])


def batch_cells(config: SweepConfig, grid: BatchGrid) -> list[BatchSpec]:
    """All cells in shuffled order, every one once before any is repeated.

    Continuous batching takes the whole grid; static batches, and continuous ones as little cached
    as they, the study's own step; blocks are counted there for every block size. Limits no engine
    accepts (more sequences than tokens) have no cell.
    """
    few = replace(config, num_problems=grid.num_problems, warmup_problems=0, sentinel_every=0)
    cell = partial(BatchSpec, few, grid.llm_share, config.seeds[0])
    usual = config.max_num_batched_tokens
    timed = [
        cell(TIMED, 0, model, seqs, tokens, kind, every=every)
        for model in MODELS
        for seqs, tokens, kind, every in _timed(grid, usual)
    ]
    counted = [
        cell(COUNTED, 0, model, seqs, max(seqs, usual), block_size=size)
        for model in MODELS
        for seqs in grid.max_num_seqs
        for size in grid.block_sizes
    ]
    order = random.Random(config.order_seed)
    rounds = [timed + counted]
    rounds += [[replace(each, repeat=k) for each in timed] for k in range(1, grid.repeats)]
    return [each for cells in rounds for each in order.sample(cells, len(cells))]


def _timed(grid: BatchGrid, usual_tokens: int) -> list[tuple[int, int, str, int]]:
    """max_num_seqs, max_num_batched_tokens, kind and every of one model's timed cells."""
    limits = product(grid.max_num_seqs, grid.max_num_batched_tokens)
    whole = [(seqs, tokens, CONTINUOUS, 1) for seqs, tokens in limits if accepted(seqs, tokens)]
    return whole + [
        (seqs, max(seqs, usual_tokens), kind, grid.compared_every)
        for seqs in grid.compared
        for kind in COMPARED
    ]


def accepted(max_num_seqs: int, max_num_batched_tokens: int) -> bool:
    """Whether an engine takes these limits: all running sequences must be able to decode."""
    return max_num_seqs <= max_num_batched_tokens
