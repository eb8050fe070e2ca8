"""What the what-if widget knows: bases, replays, pins, and which of them a view is made of.

No widget in it, so tests and notebooks can move it by hand: `move` answers with an estimate at once
and asks the worker; `hear` takes what comes back. What it does not do: draw, or show controls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import pandas as pd

from workbench.config import format_size
from workbench.errors import WorkbenchError
from workbench.replay.basis import Basis
from workbench.widgets.what_if_answers import (
    EXACT,
    Answer,
    estimate,
    moved,
    share_curve,
    spread_shares,
)
from workbench.widgets.what_if_position import LIMITS, Kept, Position, require_room
from workbench.widgets.what_if_view import GHOSTS, Ghost, View
from workbench.widgets.what_if_words import face_of
from workbench.widgets.what_if_worker import Reply

CURVE_SHARES, REPLAYED_SHARES = 14, 5
WAITING, MORE, DONE = (
    "An exact replay is on its way.",
    "Exact. Other shares of the curve are being replayed.",
    "Exact.",
)


class Asked(Protocol):
    """Who replays: a Worker, or a stand-in."""

    def ask(
        self, position: Position, *, wants_basis: bool = False, others: Sequence[Position] = ()
    ) -> int:
        """Ask; answers the request's number."""
        ...

    def cancel(self) -> int:
        """Nothing asked so far is wanted any more; answers a number that no reply has."""
        ...


class Desk:
    """Where the controls stand, and what is known there. view: what is drawn; None: nothing yet.

    bases: by basis_key, what estimates start from. status: one sentence.
    """

    def __init__(self, kept: Mapping[str, Kept], worker: Asked, position: Position) -> None:
        self.kept, self.position = dict(kept), position
        self.status = ""
        self.view: View | None = None
        self.pins: tuple[Ghost, ...] = ()
        self.bases: dict[tuple[Any, ...], Basis] = {}
        self._worker = worker
        self._number = 0
        self._replayed: dict[Position, Answer] = {}
        self._curves: dict[tuple[Any, ...], pd.DataFrame] = {}
        self._tables: dict[tuple[Any, ...], pd.DataFrame] = {}

    def know(self, position: Position, basis: Basis) -> None:
        """Keep a basis for the estimates at a position's limits."""
        self.bases[basis_key(position)] = basis
        self._curves.clear()

    @property
    def is_behind(self) -> bool:
        """Whether the view is not of where the controls stand; no view at all is not."""
        return self.view is not None and self.view.answer.position != self.position

    def move(self, position: Position) -> View | None:
        """Stand there: what is known now, and the worker is asked for what is not.

        What cannot be is said in `status`; the view stays, and is marked an estimate no more.
        """
        self.position = position
        kept = self.kept[position.recording]
        try:
            require_room(kept, position)
            answer = self._replayed.get(position) or self._estimate(kept, position)
        except WorkbenchError as error:
            self.rest(f"{type(error).__name__}: {error}")
            return None
        others = self._others(kept, position)
        wants = basis_key(position) not in self.bases
        if wants or others or answer is None or answer.kind != EXACT:
            self._number = self._worker.ask(position, wants_basis=wants, others=others)
            self.status = MORE if answer is not None and answer.kind == EXACT else WAITING
        else:
            self.rest(DONE)
        return self._show(answer)

    def rest(self, status: str) -> None:
        """Nothing is asked any more; what comes late is not heard. status: one sentence, why."""
        self._number = self._worker.cancel()
        self.status = status

    def hear(self, reply: Reply) -> View | None:
        """Take a reply in; answers the view that it changes, None where it changes none."""
        if reply.number != self._number:
            return None
        if reply.kind == "error":
            self.status = self._failed(reply.content)
            return None
        if reply.kind == "done":
            self.status = DONE
            return self.view
        if reply.kind == "basis":
            self.know(*reply.content)
        else:
            self._keep(reply.content)
            self.status = MORE
        kept = self.kept[self.position.recording]
        known = self._replayed.get(self.position)
        return self._show(known or self._estimate(kept, self.position))

    def pin(self) -> str:
        """Keep the present curve as a ghost, in the place of the oldest; answers what was done."""
        if self.view is None or not len(self.view.curve):
            return "There is no curve to pin yet."
        if self.is_behind:
            return (
                "Nothing is pinned: the curve drawn is of where the controls stood before; wait "
                "until this place is known."
            )
        drawn = self.view.answer.position
        name = f"{self._called(drawn.recording)}, {pin_name(self.kept[drawn.recording], drawn)}"
        ghost = Ghost(name, self.view.curve, self.view.answer)
        others = [pin for pin in self.pins if pin.name != name]
        self.pins = (ghost, *others)[:GHOSTS]
        self.view = replace(self.view, ghosts=self.pins)
        return f"Pinned: {name}."

    def unpin(self) -> str:
        """Let all ghosts go."""
        self.pins = ()
        if self.view is not None:
            self.view = replace(self.view, ghosts=self.pins)
        return "No curve is pinned."

    def _called(self, recording: str) -> str:
        """Its file's name; the whole place where two files are called alike."""
        stem = self.kept[recording].path.stem
        alike = [kept for kept in self.kept.values() if kept.path.stem == stem]
        return stem if len(alike) == 1 else recording

    def _show(self, answer: Answer | None) -> View | None:
        if answer is None:
            return None
        kept, position = self.kept[self.position.recording], self.position
        self.view = View(
            answer=answer,
            curve=self._curve(kept, position),
            feasible=kept.feasible(position.bytes, position.block_size),
            replays=self._tables.get(without_share(position), NO_ROWS),
            ghosts=self.pins,
            face=face_of(kept, position),
        )
        return self.view

    def _failed(self, sentence: Any) -> str:
        """What could not be done: this place's replay, its basis, or the next of the others."""
        if self.position not in self._replayed:
            return f"No exact replay: {sentence}"
        if basis_key(self.position) not in self.bases:
            return f"Exact. No estimates of other shares: {sentence}"
        others = self._others(self.kept[self.position.recording], self.position)
        if not others:
            return f"Exact. {sentence}"
        return f"Exact. No exact replay at an LLM share of {others[0].llm_share:.2f}: {sentence}"

    def _keep(self, answer: Answer) -> None:
        self._replayed[answer.position] = answer
        where = without_share(answer.position)
        row = pd.DataFrame([answer.row()])
        self._tables[where] = pd.concat([self._tables.get(where, NO_ROWS), row], ignore_index=True)

    def _basis(self, position: Position) -> Basis | None:
        """The position's own, or that of other limits of the same recording."""
        own = self.bases.get(basis_key(position))
        same = (basis for key, basis in self.bases.items() if key[0] == position.recording)
        return own if own is not None else next(same, None)

    def _estimate(self, kept: Kept, position: Position) -> Answer | None:
        basis = self._basis(position)
        return None if basis is None else estimate(kept, position, basis)

    def _curve(self, kept: Kept, position: Position) -> pd.DataFrame:
        where = without_share(position)
        basis = self._basis(position)
        if basis is None:
            return NO_ROWS
        if where not in self._curves:
            shares = kept.shares(position.bytes, position.block_size)
            table = share_curve(kept, position, basis, spread_shares(shares, CURVE_SHARES))
            self._curves[where] = table
        return self._curves[where]

    def _others(self, kept: Kept, position: Position) -> list[Position]:
        """Some shares of the curve that nobody has replayed yet, the nearest first."""
        shares = spread_shares(kept.shares(position.bytes, position.block_size), REPLAYED_SHARES)
        near = sorted(shares, key=lambda share: abs(share - position.llm_share))
        found = [moved(position, share) for share in near]
        return [other for other in found if other not in self._replayed and other != position]


NO_ROWS = pd.DataFrame()


def basis_key(position: Position) -> tuple[Any, ...]:
    """What a basis depends on: the recording, and the limits."""
    return (position.recording, *(getattr(position, name) for name in LIMITS))


def without_share(position: Position) -> tuple[Any, ...]:
    """What a curve depends on: everything but the share."""
    return tuple(value for name, value in position.to_dict().items() if name != "llm_share")


def pin_name(kept: Kept, position: Position) -> str:
    """What tells a pinned curve from another of the same recording, and what was recorded."""
    policy = "" if position.policy is None else f", {position.policy}"
    width = "" if kept.beam_width is None else f", width {kept.beam_width}"
    return (
        f"n {kept.n}{width}: "
        f"{format_size(position.bytes)} at {position.llm_share:.2f}, {position.device}, "
        f"{position.block_size}/{position.max_num_seqs}/{position.max_num_batched_tokens}{policy}"
    )
