"""Where the what-if controls stand, as plain data, and the recordings that they may stand on.

A position is a question to a recorded search that names everything: two equal ones have the same
answer. n, beam width and models are a recording's, so only recorded ones can be asked about. What
it does not do: answer (what_if_answers.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from workbench.config import check, format_size, parse_size
from workbench.errors import ConfigError, nearest
from workbench.experiments.memory import FeasibleShares, Need
from workbench.experiments.provenance import project_root
from workbench.replay.devices import PRESETS, load_device
from workbench.replay.simulator import POLICIES
from workbench.replay.what_if import WhatIf
from workbench.replay.workload import recording_names, recording_path
from workbench.search.recording import Header, read_header

DEFAULT_RECORDING, DEFAULT_DEVICE = "tiny-16-n16", "h100"
LIMITS = ("block_size", "max_num_seqs", "max_num_batched_tokens")
SHARE_STEP = 100  # shares are offered in hundredths
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Position:
    """One place of every control. recording: a name of the package's, or a file.

    total_memory: bytes, or text, of weights and KV of both models; llm_share: the LLM's part of it.
    device: a preset, or a file of `workbench calibrate`. policy: of an arena that both models
    share; None: a cache of its own for each.
    """

    recording: str
    device: str
    total_memory: int | str
    llm_share: float
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str | None = None

    def __post_init__(self) -> None:
        check(self)
        object.__setattr__(self, "total_memory", parse_size(self.total_memory))
        if not 0 < self.llm_share < 1:
            raise ConfigError(f"llm_share is {self.llm_share}; allowed: a number in (0, 1).")
        for name in LIMITS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: >= 1.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; allowed: >= "
                f"max_num_seqs ({self.max_num_seqs})."
            )
        if self.policy is not None and self.policy not in POLICIES:
            raise ConfigError(
                f"policy is {self.policy!r}; allowed: None, {', '.join(POLICIES)}."
                f"{nearest(self.policy, list(POLICIES))}"
            )
        load_device(self.device)

    @property
    def bytes(self) -> int:
        """Total memory."""
        return parse_size(self.total_memory)

    @property
    def question(self) -> WhatIf:
        """What a replay is asked."""
        known = {f.name for f in fields(WhatIf)}
        return WhatIf(**{k: v for k, v in self.to_dict().items() if k in known})

    def to_dict(self) -> dict[str, Any]:
        """Every field by its name: a notebook's parameters."""
        return asdict(self)


class Kept(NamedTuple):
    """One recording: where it is, and what it says of itself."""

    name: str
    path: Path
    header: Header

    @property
    def models(self) -> str:
        """LLM and PRM."""
        return f"{self.header.llm.name} + {self.header.prm.name}"

    @property
    def n(self) -> int:
        """Beams, or samples."""
        return int(self.header.settings.strategy_settings.get("n", 1))

    @property
    def beam_width(self) -> int | None:
        """Children of a beam; None: the strategy has none."""
        return self.header.settings.strategy_settings.get("beam_width")

    @property
    def num_problems(self) -> int:
        """Problems searched."""
        return len(self.header.problems)

    @property
    def recorded_memory(self) -> int:
        """Bytes of weights and KV of both models as they were, in whole MiB."""
        engines = (self.header.llm, self.header.prm)
        held = sum((engine.weight_bytes or 0) + self._kv(engine) for engine in engines)
        return -(-held // MIB) * MIB

    def _kv(self, engine: Any) -> int:
        return (engine.num_blocks or 0) * (engine.block_bytes or 0)

    @property
    def recorded_share(self) -> float:
        """The LLM's part of it, to a hundredth."""
        llm = self.header.llm
        share = ((llm.weight_bytes or 0) + self._kv(llm)) / max(self.recorded_memory, 1)
        return min(max(round(share, 2), 0.01), 0.99)

    def limit(self, name: str) -> int:
        """A limit of the recorded LLM's steps."""
        default = {"block_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 2048}[name]
        return int((self.header.llm.config or {}).get(name, default))

    def feasible(self, total_memory: int, block_size: int) -> FeasibleShares:
        """The shares at which both models hold one request of their max_model_len."""
        needs = []
        for engine in (self.header.llm, self.header.prm):
            recorded = (engine.config or {}).get("block_size", 16)
            block = (engine.block_bytes or 1) * block_size // recorded
            blocks = -(-engine.max_model_len // block_size)
            needs.append(Need(engine.name, engine.weight_bytes or 0, 0, block, blocks))
        low, high = needs[0].least / total_memory, 1 - needs[1].least / total_memory
        return FeasibleShares(low, high, total_memory, needs[0], needs[1])

    def memories(self, usual: int, block_size: int) -> list[int]:
        """Sizes from the least that holds both models to four times the usual, in whole MiB."""
        needs = self.feasible(usual, block_size)
        least = needs.llm.least + needs.prm.least
        steps = [round(usual * 2 ** (k / 4) / MIB) * MIB for k in range(-8, 9)]
        fitting = [size for size in (*steps, self.recorded_memory) if size >= 1.02 * least]
        return sorted({usual, *fitting})

    def shares(self, total_memory: int, block_size: int) -> list[float]:
        """Hundredths within the feasible interval; OutOfMemory's sentence is `feasible`'s."""
        found = self.feasible(total_memory, block_size)
        first, last = -(-found.low * SHARE_STEP // 1), found.high * SHARE_STEP // 1
        return [k / SHARE_STEP for k in range(int(first), int(last) + 1)]


def kept_recordings(given: Sequence[str | os.PathLike[str]] | None = None) -> dict[str, Kept]:
    """Recordings by name: files and names given, or all of the package's."""
    found = {}
    for name in recording_names() if given is None else given:
        path = Path(name) if Path(name).suffix == ".parquet" else recording_path(str(name))
        found[str(name)] = Kept(str(name), path, read_header(path))
    return found


def device_names() -> list[str]:
    """All presets, and this machine's where `workbench calibrate` left it in the project."""
    own = project_root() / "device.json"
    return [*PRESETS, *([str(own)] if own.is_file() else [])]


def position_on(kept: Kept, **given: Any) -> Position:
    """A position on a recording; what is None or not given is as recorded, the device an H100.

    ConfigError for a name no position has, a value of the wrong type, an unknown device or policy.
    """
    known = [f.name for f in fields(Position) if f.name != "recording"]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"what_if has no setting {name!r}; known: {', '.join(known)}.{nearest(name, known)}"
            )
    recorded: dict[str, Any] = {
        "device": DEFAULT_DEVICE,
        "total_memory": kept.recorded_memory,
        "llm_share": kept.recorded_share,
        **{name: kept.limit(name) for name in LIMITS},
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    position = Position(kept.name, **(recorded | chosen))
    require_room(kept, position)
    return position


def require_room(kept: Kept, position: Position) -> None:
    """ConfigError where the two models, or one at this share, lack memory; OutOfMemory where the
    device does.
    """
    load_device(position.device).require_room(position.bytes, "Weights and KV of both models")
    found = kept.feasible(position.bytes, position.block_size)
    if position.policy is None and not found.at(position.llm_share).fits:
        raise ConfigError(f"{found.at(position.llm_share)}: {found}.")
    least = found.llm.least + found.prm.least
    if position.bytes < least:
        raise ConfigError(
            f"total_memory is {format_size(position.bytes)}; the two models need "
            f"{format_size(least)} at least."
        )
