"""The what-if widget's controls: a row each, in the order in which one asks.

n, beam width, models and the number of problems offer what was recorded; shares and memories offer
what both models fit in. Needs the notebooks extra. What it does not do: answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workbench.errors import WorkbenchError
from workbench.replay.simulator import POLICIES
from workbench.widgets import parts
from workbench.widgets.what_if_position import MIB, Kept, Position, device_names

OWN_CACHES = "each model its own cache"
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
SEQUENCES = (4, 8, 16, 32, 64, 128, 256, 512)
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOSEN = ("models", "n", "beam_width", "num_problems")


class Controls:
    """All controls. `box` is shown; observers get the position, or None where there is none."""

    def __init__(self, kept: Mapping[str, Kept], start: Position) -> None:
        self._kept, self._usual = dict(kept), start.bytes
        self._observers = list[Callable[[Position | None], None]]()
        self._busy = False
        self.problem = ""
        self.recording = self._kept[start.recording]
        self.menus = {
            name: parts.Choice(text, self._offered(name), getattr(self.recording, name))
            for name, text in zip(
                CHOSEN,
                ("models", "n (beams)", "beam width", "problems"),
                strict=True,
            )
        }
        self.share, self.memory = self._memory_dials(start)
        self.steps = _step_dials(start)
        devices = list(dict.fromkeys([*device_names(), start.device]))
        self.device = parts.Choice("device", devices, start.device)
        policy = start.policy or OWN_CACHES
        self.policy = parts.Choice("cache policy", [OWN_CACHES, *POLICIES], policy)
        boxes = [dial.box for dial in (self.share, self.memory, *self.steps.values())]
        boxes += [choice.box for choice in (*self.menus.values(), self.device, self.policy)]
        self.box = parts.column(boxes)
        for menu in self.menus.values():
            menu.observe(self._other_recording)
        for dial in (self.memory, self.steps["block_size"]):
            dial.observe(self._other_room)
        for dial in (self.share, self.steps["max_num_seqs"], self.steps["max_num_batched_tokens"]):
            dial.observe(self._tell)
        for choice in (self.device, self.policy):
            choice.observe(self._tell)

    def observe(self, observer: Callable[[Position | None], None]) -> None:
        """Call this with every new position."""
        self._observers.append(observer)

    @property
    def position(self) -> Position:
        """Where the controls stand; ConfigError where that cannot be."""
        return Position(
            recording=self.recording.name,
            device=self.device.value,
            total_memory=round(self.memory.value * MIB),
            llm_share=self.share.value,
            **{name: round(dial.value) for name, dial in self.steps.items()},
            policy=None if self.policy.value == OWN_CACHES else self.policy.value,
        )

    def _memory_dials(self, start: Position) -> tuple[parts.Dial, parts.Dial]:
        shares = self.recording.shares(start.bytes, start.block_size)
        sizes = [size / MIB for size in self.recording.memories(start.bytes, start.block_size)]
        share = parts.Dial(
            "LLM share of total memory (llm_share)", shares, start.llm_share, "{:.2f}"
        )
        return share, parts.Dial("total memory (MiB)", sizes, start.bytes / MIB, "{:,.0f}")

    def _offered(self, name: str) -> list[Any]:
        """Recorded values of one menu, given those of the menus before it."""
        before = CHOSEN[: CHOSEN.index(name)]
        fitting = [
            kept
            for kept in self._kept.values()
            if all(getattr(kept, b) == getattr(self.recording, b) for b in before)
        ]
        return sorted({getattr(kept, name) for kept in fitting}, key=lambda v: (v is None, v))

    def _other_recording(self, _: Any) -> None:
        """The recording that agrees with most menus, the first ones first."""
        if self._busy:
            return
        wanted = [self.menus[name].value for name in CHOSEN]
        self.recording = max(
            self._kept.values(),
            key=lambda kept: [getattr(kept, n) == w for n, w in zip(CHOSEN, wanted, strict=True)],
        )
        self._busy = True
        for name, menu in self.menus.items():
            menu.offer(self._offered(name))
            menu.value = getattr(self.recording, name)
        if not self.recording.shares(self._usual, 16):
            self._usual = self.recording.recorded_memory
        self._busy = False
        self._other_room(None)

    def _other_room(self, _: Any) -> None:
        """Offer the memories and shares that fit the recording's models and the block size."""
        if self._busy:
            return
        self._busy = True
        block_size = round(self.steps["block_size"].value)
        sizes = self.recording.memories(self._usual, block_size)
        self.memory.offer([size / MIB for size in sizes])
        shares = self.recording.shares(round(self.memory.value * MIB), block_size)
        if shares:
            self.share.offer(shares)
        self._busy = False
        self._tell(None)

    def _tell(self, _: Any) -> None:
        if self._busy:
            return
        try:
            found: Position | None = self.position
        except WorkbenchError as error:
            found, self.problem = None, f"{type(error).__name__}: {error}"
        for observer in self._observers:
            observer(found)


def _step_dials(start: Position) -> dict[str, parts.Dial]:
    """The limits of a step; what the start has is always among what is offered."""
    given = {
        "block_size": ("block size (tokens)", BLOCK_SIZES),
        "max_num_seqs": ("sequences in a step (max_num_seqs)", SEQUENCES),
        "max_num_batched_tokens": ("tokens in a step (max_num_batched_tokens)", TOKENS),
    }
    dials = {}
    for name, (text, usual) in given.items():
        value = getattr(start, name)
        dials[name] = parts.Dial(text, sorted({*usual, value}), value, "{:,.0f}")
    return dials
