"""A whole what-if figure as plain calls: the curve estimated, some of its shares replayed."""

from __future__ import annotations

import pandas as pd

from workbench.replay.answers import Answers
from workbench.replay.basis import Basis
from workbench.widgets.what_if_answers import (
    Answer,
    estimate,
    exact,
    moved,
    share_curve,
    spread_shares,
)
from workbench.widgets.what_if_position import Kept, Position
from workbench.widgets.what_if_view import View
from workbench.widgets.what_if_words import face_of

CURVE_SHARES = 14


def replayed_view(
    kept: Kept,
    position: Position,
    basis: Basis,
    answers: Answers,
    chosen: Answer,
    num_replays: int = 4,
) -> View:
    """The view of a position whose answer is `chosen`, with so many other shares replayed."""
    shares = kept.shares(position.bytes, position.block_size)
    others = spread_shares(shares, num_replays) if num_replays else []
    replays = [exact(kept, moved(position, share), answers).row() for share in others]
    return View(
        answer=chosen,
        curve=share_curve(kept, position, basis, spread_shares(shares, CURVE_SHARES)),
        feasible=kept.feasible(position.bytes, position.block_size),
        replays=pd.DataFrame([chosen.row(), *replays]),
        face=face_of(kept, position),
    )


def agreement(kept: Kept, position: Position, basis: Basis, replays: pd.DataFrame) -> pd.DataFrame:
    """llm_share, fits, error: how far an estimate lies from each replayed row, as a fraction."""
    rows = []
    for row in replays.to_dict("records"):
        guess = estimate(kept, moved(position, row["llm_share"]), basis, blocks=False)
        error = guess.tokens_per_s / row["tokens_per_s"] - 1
        rows.append({"llm_share": row["llm_share"], "fits": guess.fits, "error": error})
    return pd.DataFrame(rows)
