"""What fits: which shares leave both models room for one request, and how many bytes others lack.

The same rule as the engines': weights (and activations where the total pays for them) are taken
off, and what is left must hold ceil(max_model_len / block_size) blocks. Computed from a model's
config alone, without weights or torch: activations are the buffers of the largest step, beside
which only the engine that is built knows what kernels take for a moment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from workbench.config import EngineConfig, SweepConfig, format_size, parse_size
from workbench.kvcache.arena import BlockShape, choose_page, pack
from workbench.kvcache.policies import pages_above_floors
from workbench.models.registry import held_bytes, model_spec

if TYPE_CHECKING:
    from workbench.experiments.settings import RunSpec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
ENGINES = ("llm", "prm")


@dataclass(frozen=True, slots=True)
class Need:
    """What one model takes of its part of the memory, in bytes; blocks: of its longest request."""

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

    def num_blocks(self, budget: int) -> int:
        """Blocks that `budget` bytes hold beside the weights."""
        return max(0, budget - self.fixed) // self.block_bytes


@dataclass(frozen=True, slots=True)
class FeasibleShares:
    """The interval of llm_share in which both models fit `total` bytes; empty when low > high."""

    total: int
    llm: Need
    prm: Need

    @property
    def low(self) -> float:
        """Below it the LLM has no room for one request."""
        return self.llm.least / self.total

    @property
    def high(self) -> float:
        """Above it the PRM has none."""
        return 1 - self.prm.least / self.total

    def at(self, llm_share: float) -> Feasibility:
        """What one share leaves each model."""
        return Feasibility(self.total, self.llm, self.prm, llm_share=llm_share)

    def __str__(self) -> str:
        total = format_size(self.total)
        if self.low > self.high:
            least = format_size(self.llm.least + self.prm.least)
            return f"no share is feasible in {total}: the two models need {least} at least"
        buffers = self.llm.activations + self.prm.activations
        inside = f", {format_size(buffers)} of activations in it" if buffers else ""
        return f"llm_share {self.low:.3f} to {self.high:.3f} is feasible in {total}{inside}"


@dataclass(frozen=True, slots=True)
class Feasibility(FeasibleShares):
    """Whether both models fit at one share."""

    llm_share: float = 0.5

    def of(self, model: str) -> tuple[Need, int]:
        """A model's need, and the bytes that the share leaves it."""
        llm_bytes = round(self.total * self.llm_share)
        return (self.llm, llm_bytes) if model == "llm" else (self.prm, self.total - llm_bytes)

    def lacks(self, model: str) -> int:
        """Bytes a model lacks."""
        need, budget = self.of(model)
        return max(0, need.least - budget)

    def blocks(self, model: str) -> int:
        """Blocks of a model's cache."""
        need, budget = self.of(model)
        return need.num_blocks(budget)

    @property
    def fits(self) -> bool:
        """Whether neither model lacks anything."""
        return not any(map(self.lacks, ENGINES))

    @property
    def columns(self) -> dict[str, int]:
        """Cells of the `runs` row."""
        return {f"{model}_lacks_bytes": self.lacks(model) for model in ENGINES}

    def __str__(self) -> str:
        if self.fits:
            return f"llm_share {self.llm_share:g} fits"
        lacking = {m: format_size(self.lacks(m)) for m in ENGINES if self.lacks(m)}
        short = [f"the {m.upper()} ({self.of(m)[0].model}) lacks {b}" for m, b in lacking.items()]
        return f"llm_share {self.llm_share:g} is infeasible: {' and '.join(short)}"


def shares_of(
    config: SweepConfig, activations: tuple[int, ...] = (), total: int | str = ""
) -> FeasibleShares:
    """The ends of the axis for a sweep's two models in its memory, or in another `total`.

    activations: bytes of (LLM, PRM) as measured, where the total pays for them; else by formula.
    Raises ModelError for an unknown model.
    """
    needs = [_need(model, config) for model in (config.llm, config.prm)]
    if activations and config.activations_in_total:
        needs = [replace(n, activations=size) for n, size in zip(needs, activations, strict=True)]
    return FeasibleShares(parse_size(total or config.total_memory), *needs)


def feasibility(run: RunSpec) -> Feasibility:
    """Whether a run's two engines can be built, as far as configs tell."""
    llm, prm = (_need(each.model, each) for each in map(run.engine, ENGINES))
    return FeasibleShares(run.total_bytes, llm, prm).at(run.llm_share)


def _itemsize(model: str, config: EngineConfig | SweepConfig) -> int:
    """Bytes of a number in weights and KV, as models.loading.arithmetic_dtype chooses it."""
    usual = "float32" if config.device == "cpu" else model_spec(model).dtype
    return DTYPE_BYTES.get(usual if config.dtype == "auto" else config.dtype, 4)


def _need(model: str, config: EngineConfig | SweepConfig) -> Need:
    spec, size = model_spec(model), _itemsize(model, config)
    blocks = -(-(config.max_model_len or spec.max_model_len) // config.block_size)
    block_bytes = spec.block_bytes(config.block_size, size)
    is_packed = config.device == "cpu" and size == DTYPE_BYTES["float32"]  # what is quantised
    weights = held_bytes(model, size) if is_packed else spec.weight_bytes(size)
    weights += spec.table_bytes(size)
    step = config.max_num_batched_tokens, config.max_num_seqs
    activations = spec.step_bytes(*step, size) if config.activations_in_total else 0
    return Need(model, weights, activations, block_bytes, blocks)


@cache
def starting_share(config: SweepConfig, kv_bytes: int) -> float:
    """The LLM's part of the KV memory where an arena's policy starts from a split of its own.

    Where the memory does not hold both models' longest requests there is no arena: their own parts.
    """
    room, shapes = shares_of(config, total="1TiB"), []
    for name, need in zip(ENGINES, (room.llm, room.prm)):
        layers, size = model_spec(need.model).layers, _itemsize(need.model, config)
        shapes.append(BlockShape(name, layers, need.block_bytes // layers, size, need.blocks))
    page = choose_page(shapes)
    floors = [-(-shape.floor_blocks // pack(shape, page).blocks) for shape in shapes]
    num_pages = max(kv_bytes // page.page_bytes, sum(floors))
    return pages_above_floors(floors, num_pages)[0] / num_pages
