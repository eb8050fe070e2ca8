"""Which shares leave both models room for one request, and how many bytes the others lack.

The same rule as the engines': weights (and activations where the total pays for them) are taken
off, and what is left must hold ceil(max_model_len / block_size) blocks. Computed from a model's
config alone, without weights or torch, so a sweep knows its infeasible shares before it starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.config import EngineConfig, format_size, parse_size
from workbench.experiments.plan import RunSpec
from workbench.models.registry import held_bytes, model_spec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


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

    @property
    def fits(self) -> bool:
        """Whether neither model lacks anything."""
        return not (self.llm_lacks or self.prm_lacks)

    @property
    def llm_lacks(self) -> int:
        """Bytes the LLM lacks."""
        return self.llm.lacks(self.llm_bytes)

    @property
    def prm_lacks(self) -> int:
        """Bytes the PRM lacks."""
        return self.prm.lacks(self.prm_bytes)

    @property
    def columns(self) -> dict[str, int]:
        """Cells of the `runs` table."""
        return {"llm_lacks_bytes": self.llm_lacks, "prm_lacks_bytes": self.prm_lacks}

    def __str__(self) -> str:
        if self.fits:
            return f"llm_share {self.llm_share:g} fits"
        sides = (("LLM", self.llm, self.llm_lacks), ("PRM", self.prm, self.prm_lacks))
        short = [f"the {name} ({n.model}) lacks {format_size(b)}" for name, n, b in sides if b]
        return f"llm_share {self.llm_share:g} is infeasible: {' and '.join(short)}"


@dataclass(frozen=True, slots=True)
class FeasibleShares:
    """The interval of llm_share in which both models fit `total` bytes; empty when low > high."""

    low: float
    high: float
    total: int
    llm: Need
    prm: Need
    activations_known: bool = True  # False: the total pays for activations that nobody measured yet

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
    needs = [
        _need(model, block_size, max_model_len, dtype, bytes_)
        for model, bytes_ in zip((llm, prm), activations or (0, 0), strict=True)
    ]
    low, high = needs[0].least / size, 1 - needs[1].least / size
    return FeasibleShares(low, high, size, needs[0], needs[1], activations is not None)


def feasibility(spec: RunSpec) -> Feasibility:
    """Whether a run's two engines can be built, as far as configs tell: without activations."""
    llm, prm = (_need_of(spec.engine(role)) for role in ("llm", "prm"))
    return Feasibility(spec.llm_share, llm, prm, spec.llm_bytes, spec.prm_bytes)


def _need_of(config: EngineConfig) -> Need:
    return _need(config.model, config.block_size, config.max_model_len, config.dtype, 0)


def _need(
    model: str, block_size: int, max_model_len: int | None, dtype: str, activations: int
) -> Need:
    spec = model_spec(model)
    size = DTYPE_BYTES.get(dtype, 4)
    blocks = -(-(max_model_len or spec.max_model_len) // block_size)
    block_bytes = spec.block_bytes(block_size, size)
    weights = held_bytes(model, size) + spec.table_bytes(size)
    return Need(model, weights, activations, block_bytes, blocks)
