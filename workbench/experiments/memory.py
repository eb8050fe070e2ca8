"""What fits: which shares leave both models room for one request, and how many bytes others lack.

The same rule as the engines': weights (and activations where the total pays for them) are taken
off, and what is left must hold ceil(max_model_len / block_size) blocks. Computed from a model's
config alone, without weights or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from workbench.config import EngineConfig, SweepConfig, format_size, parse_size
from workbench.kvcache.arena import BlockShape, choose_page, pack
from workbench.kvcache.policies import pages_above_floors
from workbench.models.registry import held_bytes, model_spec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MODELS = ("llm", "prm")
LABELS = {"llm": "LLM", "prm": "PRM"}


@dataclass(frozen=True, slots=True)
class Need:
    """What one model takes of its part of the memory, in bytes."""

    model: str
    weights: int
    activations: int
    block_bytes: int
    blocks: int

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on how much cache there is."""
        return self.weights + self.activations

    @property
    def least(self) -> int:
        """Bytes below which not even one request of max_model_len fits."""
        return self.fixed + self.blocks * self.block_bytes

    def lacks(self, budget: int) -> int:
        """Bytes missing from `budget`; 0 when it is enough."""
        return max(0, self.least - budget)

    def num_blocks(self, budget: int) -> int:
        """Blocks that `budget` bytes hold beside the weights."""
        return max(0, budget - self.fixed) // self.block_bytes


@dataclass(frozen=True, slots=True)
class Feasibility:
    """Whether both models fit at one share."""

    llm_share: float
    llm: Need
    prm: Need
    llm_bytes: int
    prm_bytes: int

    def of(self, model: str) -> tuple[Need, int]:
        """A model's need, and the bytes that the share leaves it."""
        return (self.llm, self.llm_bytes) if model == "llm" else (self.prm, self.prm_bytes)

    def lacks(self, model: str) -> int:
        """Bytes a model lacks."""
        need, budget = self.of(model)
        return need.lacks(budget)

    def blocks(self, model: str) -> int:
        """Blocks of a model's cache."""
        need, budget = self.of(model)
        return need.num_blocks(budget)

    @property
    def fits(self) -> bool:
        """Whether neither model lacks anything."""
        return not any(map(self.lacks, MODELS))

    @property
    def columns(self) -> dict[str, int]:
        """Cells of the `runs` row."""
        return {f"{model}_lacks_bytes": self.lacks(model) for model in MODELS}

    def __str__(self) -> str:
        if self.fits:
            return f"llm_share {self.llm_share:g} fits"
        short = [
            f"the {LABELS[m]} ({self.of(m)[0].model}) lacks {format_size(self.lacks(m))}"
            for m in MODELS
            if self.lacks(m)
        ]
        return f"llm_share {self.llm_share:g} is infeasible: {' and '.join(short)}"


@dataclass(frozen=True, slots=True)
class FeasibleShares:
    """The interval of llm_share in which both models fit `total` bytes; empty when low > high."""

    low: float
    high: float
    total: int
    llm: Need
    prm: Need
    activations_known: bool = True  # False: the total pays for activations not measured yet

    @property
    def is_empty(self) -> bool:
        """Whether no share leaves room for both."""
        return self.low > self.high

    def at(self, llm_share: float) -> Feasibility:
        """What one share leaves each model."""
        llm_bytes = round(self.total * llm_share)
        return Feasibility(llm_share, self.llm, self.prm, llm_bytes, self.total - llm_bytes)

    def __str__(self) -> str:
        total = format_size(self.total)
        if self.is_empty:
            least = format_size(self.llm.least + self.prm.least)
            return f"no share is feasible in {total}: the two models need {least} at least"
        unknown = "" if self.activations_known else ", less what activations take"
        return f"llm_share {self.low:.3f} to {self.high:.3f} is feasible in {total}{unknown}"


class Run(Protocol):
    """What tells whether a run fits: its share, and the settings of both engines."""

    @property
    def llm_share(self) -> float:
        """The LLM's part of total memory, weights included."""

    @property
    def llm_bytes(self) -> int: ...
    @property
    def prm_bytes(self) -> int: ...
    def engine(self, role: str) -> EngineConfig: ...


def feasible_shares(
    llm: str,
    prm: str,
    total: int | str,
    *,
    block_size: int = 16,
    max_model_len: int | None = None,
    dtype: str = "auto",
    activations: tuple[int, int] | None = (0, 0),
) -> FeasibleShares:
    """The ends of the axis for two models in `total` bytes.

    max_model_len None is each model's own. activations: bytes of (LLM, PRM) where the total pays
    for them, as the engines' profiling pass measures them; (0, 0) where it does not, None where
    they are not known yet and the ends are therefore too wide. Raises ModelError for an unknown
    model.
    """
    size = parse_size(total)
    first, second = (
        _need(model, block_size, max_model_len, dtype, bytes_)
        for model, bytes_ in zip((llm, prm), activations or (0, 0), strict=True)
    )
    low, high = first.least / size, 1 - second.least / size
    return FeasibleShares(low, high, size, first, second, activations is not None)


def shares_of(
    config: SweepConfig, activations: tuple[int, int] | None = (0, 0), total: int | str = ""
) -> FeasibleShares:
    """feasible_shares of a sweep's settings; total: another than the sweep's."""
    names = ("block_size", "max_model_len", "dtype")
    settings: dict[str, Any] = {name: getattr(config, name) for name in names}
    memory = total or config.total_memory
    return feasible_shares(config.llm, config.prm, memory, activations=activations, **settings)


def feasibility(run: Run) -> Feasibility:
    """Whether a run's two engines can be built, as far as configs tell: without activations."""
    llm, prm = (
        _need(each.model, each.block_size, each.max_model_len, each.dtype, 0)
        for each in map(run.engine, MODELS)
    )
    return Feasibility(run.llm_share, llm, prm, run.llm_bytes, run.prm_bytes)


def _need(
    model: str, block_size: int, max_model_len: int | None, dtype: str, activations: int
) -> Need:
    spec = model_spec(model)
    size = DTYPE_BYTES.get(dtype, 4)
    blocks = -(-(max_model_len or spec.max_model_len) // block_size)
    block_bytes = spec.block_bytes(block_size, size)
    weights = held_bytes(model, size) + spec.table_bytes(size)
    return Need(model, weights, activations, block_bytes, blocks)


@cache
def starting_share(config: SweepConfig, kv_bytes: int) -> float:
    """The LLM's part of the KV memory where an arena's policy starts from a split of its own.

    Where the memory does not hold both models' longest requests there is no arena: their own parts.
    """
    room = shares_of(config, total="1TiB")
    shapes = [
        BlockShape(
            name,
            model_spec(need.model).layers,
            need.block_bytes // model_spec(need.model).layers,
            element_bytes=DTYPE_BYTES.get(config.dtype, 4),
            floor_blocks=need.blocks,
        )
        for name, need in zip(MODELS, (room.llm, room.prm), strict=True)
    ]
    page = choose_page(shapes)
    floors = [-(-shape.floor_blocks // pack(shape, page).blocks) for shape in shapes]
    num_pages = max(kv_bytes // page.page_bytes, sum(floors))
    return pages_above_floors(floors, num_pages)[0] / num_pages
