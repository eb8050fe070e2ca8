"""Any figure of the study, of one pick of stored runs or of two laid over each other.

The rows are the study's own views, the drawings its own plots; the second pick is drawn fainter,
dotted, with open markers, and every entry of the legend says whose it is. Of searches and batching
cells together there is the balance of the two models. What it does not do: choose runs
(explorer_runs.py), or draw what is made of no stored runs (memory parts, miss ratios).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from workbench.errors import ConfigError, RunStoreError, nearest
from workbench.experiments.compare import Comparison, compare
from workbench.experiments.rows import (
    balance_rows,
    batch_rows,
    block_rows,
    cells_provenance,
    lost_time_rows,
    memory_split_rows,
    prefix_hit_rows,
    thrashing_rows,
)
from workbench.experiments.study import provenance
from workbench.plots import (
    balance,
    batch_limits,
    lost_time,
    memory_split,
    prefix_hits,
    prm_blocks,
    thrashing,
)
from workbench.widgets.explorer_overlay import aligned, overlaid
from workbench.widgets.explorer_runs import Pick

Rows = Callable[[Pick, float], pd.DataFrame]
Draw = Callable[[pd.DataFrame, str], go.Figure]

OF_SEARCHES: dict[str, tuple[Rows, Draw]] = {
    "memory_split": (lambda pick, _: memory_split_rows(pick.searches()), memory_split),
    "prm_blocks": (lambda pick, share: block_rows(pick.searches(), share), prm_blocks),
    "prefix_hits": (lambda pick, _: prefix_hit_rows(pick.searches()), prefix_hits),
    "thrashing": (lambda pick, _: thrashing_rows(pick.searches()), thrashing),
    "lost_time": (lambda pick, _: lost_time_rows(pick.searches()), lost_time),
}
OF_BATCHES: dict[str, tuple[Rows, Draw]] = {
    "llm_batch": (lambda pick, _: batch_rows(pick.runs, "llm"), batch_limits),
    "prm_batch": (lambda pick, _: batch_rows(pick.runs, "prm"), batch_limits),
}
OF_BOTH_KINDS = ("balance",)  # of searches and of batching cells at once
FIGURES = OF_SEARCHES | OF_BATCHES
AT_ONE_SHARE = ("prm_blocks",)


@dataclass(frozen=True, slots=True)
class Explored:
    """A figure of one pick or two, the rows it draws (column `pick`), what it shows in words."""

    figure: go.Figure
    rows: pd.DataFrame
    words: str


def figures_of(a: Pick, b: Pick | None = None) -> list[str]:
    """Names of the figures that can be drawn of a pick, or of both."""
    kinds = {pick.is_batches for pick in (a, b) if pick is not None}
    if len(kinds) > 1:
        return list(OF_BOTH_KINDS)
    return list(OF_BATCHES if kinds.pop() else OF_SEARCHES)


def explore(name: str, a: Pick, b: Pick | None = None, llm_share: float | None = None) -> Explored:
    """The figure called `name` of one pick, or of two overlaid.

    llm_share: of figures at one share, the nearest measured one (default 0.3). ConfigError for a
    figure that is unknown or not of such runs.
    """
    _require(name, a, b)
    if b is not None and name in OF_BOTH_KINDS:
        return _balance(*((b, a) if a.is_batches else (a, b)))
    make, draw = FIGURES[name]
    wanted = 0.3 if llm_share is None else llm_share
    rows = [make(pick, nearest_share(pick, wanted)) for pick in (a, b) if pick is not None]
    if b is None:
        figure = draw(rows[0], _face(a))
        return Explored(figure, rows[0].assign(pick=a.name), f"{a.name}: {caption(figure)}")
    shares = [nearest_share(pick, wanted) if name in AT_ONE_SHARE else None for pick in (a, b)]
    faces = (_face(a), _face(b))
    first, second = (draw(own, face) for own, face in zip(aligned(*rows), faces, strict=True))
    figure = overlaid(first, second, faces, shares)
    both = [own.assign(pick=pick.name) for own, pick in zip(rows, (a, b), strict=True)]
    words = f"A: {a.name}. B: {b.name}. {compared(a, b)}"
    return Explored(figure, pd.concat(both, ignore_index=True), words)


def _balance(searches: Pick, cells: Pick) -> Explored:
    """One figure that is made of picks of both kinds."""
    rows = balance_rows(searches.searches(), cells.runs)
    figure = balance(rows, f"{_face(searches)}\n{cells_provenance(cells.runs)}")
    return Explored(figure, rows, f"{searches.name}; {cells.name}: {caption(figure)}")


def nearest_share(pick: Pick, wanted: float) -> float:
    """The share of the pick nearest to `wanted`. RunStoreError where no run is finished."""
    if not pick.shares:
        raise RunStoreError(f"{pick.name} holds no finished run.")
    return min(pick.shares, key=lambda share: abs(share - wanted))


def compared(a: Pick, b: Pick) -> str:
    """What `compare` finds between the two, in words; or why they do not compare."""
    if a.is_batches or b.is_batches:
        return "Cells ask the same requests; they are not paired problem by problem."
    try:
        found = compare(list(a.folders), list(b.folders))
    except RunStoreError as problem:
        return str(problem)
    return comparison_in_words(found)


def comparison_in_words(found: Comparison) -> str:
    """Paired differences, and whether both searched alike."""
    metrics = found.differences.set_index("metric").to_dict("index")
    rates = metrics["tokens_per_s"]
    same = "identical" if found.identical else f"different: {found.first_difference}"
    words = (
        f"B minus A over {int(rates['pairs'])} pairs of problem and seed: "
        f"{rates['difference']:+,.0f} tokens/s (95 %: {rates['low']:+,.0f} to "
        f"{rates['high']:+,.0f}). Tokens and scores of pairs are {same}."
    )
    return " ".join([words, *found.warnings])


def caption(figure: go.Figure) -> str:
    """The one sentence a plot function says about its figure."""
    return str((figure.layout.meta or {}).get("caption", ""))


def _require(name: str, a: Pick, b: Pick | None) -> None:
    known = figures_of(a, b)
    if name not in known:
        hint = nearest(name, known)
        raise ConfigError(
            f"There is no figure {name!r} of {a.name}.{hint} Figures: {', '.join(known)}."
        )


def _face(pick: Pick) -> str:
    if not pick.is_batches:
        return provenance(pick.searches().runs)
    return provenance(pick.runs, None, cells_provenance(pick.runs))
