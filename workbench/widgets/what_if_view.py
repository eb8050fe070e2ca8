"""What the what-if figures draw, as data: the view, its ghosts, and the lines over the share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pandas as pd

from workbench.experiments.memory import FeasibleShares
from workbench.plots.theme import BLACK, MODELS
from workbench.widgets.what_if_answers import Answer

GHOSTS = 3  # curves that stay, at most


class Quantity(NamedTuple):
    """One line of the figure: a column of Answer.row, its panel from 1, and its looks."""

    column: str
    panel: int
    label: str
    colour: str
    dash: str
    symbol: str
    scale: float = 1.0

    @property
    def model(self) -> str | None:
        """The model it is of; None: both."""
        return self.column[:3] if self.column[:3] in MODELS else None


def _of(model: str, column: str, panel: int, scale: float = 1.0) -> Quantity:
    style = MODELS[model]
    name = f"{model}_{column}"
    return Quantity(name, panel, style.label, style.colour, style.dash, style.symbol, scale)


QUANTITIES = (
    Quantity("tokens_per_s", 1, "both models", BLACK, "solid", "diamond"),
    *(_of(model, "hit_rate", 2, 100.0) for model in MODELS),
    *(_of(model, "thrash", 3) for model in MODELS),
)


class Ghost(NamedTuple):
    """A curve pinned for comparison: what it is called, its rows, and its answer."""

    name: str
    curve: pd.DataFrame
    answer: Answer


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """All that is drawn. curve: rows of share_curve; answer: at the chosen share.

    replays: rows of exact answers at the same settings, other shares. An empty curve: nobody knows
    it yet.
    """

    answer: Answer
    curve: pd.DataFrame
    feasible: FeasibleShares
    replays: pd.DataFrame = field(default_factory=pd.DataFrame)
    ghosts: Sequence[Ghost] = ()
    face: str = ""

    @property
    def rows(self) -> pd.DataFrame:
        """The rows drawn: estimates, replays, the chosen point, ghosts by name."""
        parts = [self.curve.assign(curve="now"), self.replays.assign(curve="now")]
        parts += [pd.DataFrame([self.answer.row()]).assign(curve="chosen")]
        parts += [ghost.curve.assign(curve=ghost.name) for ghost in self.ghosts]
        return pd.concat([part for part in parts if len(part)], ignore_index=True)
