"""The study's rungs beside each other: do the peak and the order of the shares agree?

Each rung's throughput is taken as a share of its own best, since seconds do not carry over. What it
does not do: measure, replay, or call a rung right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from workbench.experiments.export import SavedFigure
from workbench.experiments.face import counted, rung
from workbench.experiments.replayed import RUNG
from workbench.experiments.study import figures_home, keep_figure
from workbench.experiments.sweep import Sweep
from workbench.experiments.views import memory_split_rows


def rung_rows(*sweeps: Sweep) -> pd.DataFrame:
    """Rows of plots.rungs: tokens/s of each sweep over its best share, with intervals."""
    parts = []
    for sweep in sweeps:
        rows = memory_split_rows(sweep)
        own = rows[rows["metric"] == "tokens_per_s"]
        scaled = own[["value", "low", "high"]] / own["value"].max()
        name = rung(sweep.runs)
        parts.append(scaled.assign(rung=name, replayed=name == RUNG, llm_share=own["llm_share"]))
    return pd.concat(parts, ignore_index=True)


def agreement(rows: pd.DataFrame) -> dict[str, Any]:
    """Of two rungs: the share of each one's best, and how alike they order the common shares.

    order: Spearman's rank correlation of the rates, NaN where a rung's rates are all equal.
    """
    table = rows.pivot(index="llm_share", columns="rung", values="value").dropna()
    first, second = table.columns
    ranks = table.round(3).rank()
    shares = table.index.to_numpy(float)
    peaks = {str(name): float(shares[table[name].to_numpy().argmax()]) for name in table}
    return {"peaks": peaks, "order": float(ranks[first].corr(ranks[second])), "shares": len(table)}


def agreement_sentence(rows: pd.DataFrame) -> str:
    """Whether two rungs agree, with their numbers. Rows of rung_rows."""
    found = agreement(rows)
    peaks = " and ".join(f"**{share:.2f}** ({name})" for name, share in found["peaks"].items())
    table = rows.pivot(index="llm_share", columns="rung", values="value").dropna()
    ends = "; ".join(
        f"{name}: {table[name].iloc[0]:.0%} of its best at {table.index[0]:.2f}, "
        f"{table[name].iloc[-1]:.0%} at {table.index[-1]:.2f}"
        for name in table
    )
    order = found["order"]
    alike = "cannot be compared" if order != order else f"correlates with **{order:.2f}**"
    return (
        f"Throughput is highest at {peaks}. {ends}. Over {found['shares']} shares the order of the "
        f"two rungs {alike} (Spearman's rank correlation, rates rounded to 0.1 % of the best)."
    )


def rungs_face(*sweeps: Sweep) -> str:
    """What stands below the figure: every rung's models, machine and size."""
    lines = []
    for sweep in sweeps:
        runs = sweep.runs
        first = runs.iloc[0]
        lines.append(
            f"{rung(runs)}: LLM {first['llm']}, PRM {first['prm']}, {first['num_problems']} "
            f"problems, {counted(runs['seed'].nunique(), 'seed')}, n = {first['n']}; "
            f"{first['machine']}."
        )
    return "\n".join(lines)


def keep_replayed(
    fig: go.Figure,
    rows: pd.DataFrame,
    name: str,
    replayed: Sweep,
    beside: Sweep,
    folder: str | Path | None = None,
) -> SavedFigure:
    """Save a figure of the replayed rung beside the measured sweep's."""
    return keep_figure(fig, rows, name, replayed, folder or figures_home(beside))
