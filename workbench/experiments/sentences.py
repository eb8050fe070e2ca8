"""Results in words: a sentence a figure, its numbers computed from the rows drawn.

Notebooks show these below their figures, so that the prose cannot drift from the data. What it does
not do: judge claims (claims.py), or soften a number.
"""

from __future__ import annotations

import pandas as pd

from workbench.experiments.claims import DEPENDS, Claim
from workbench.experiments.lost_time import AGAIN, accounted
from workbench.experiments.noise import Noise

MODELS = {"llm": "LLM", "prm": "PRM"}


def peak_sentence(rows: pd.DataFrame) -> str:
    """Where throughput peaks, how sure that is, what the ends cost. Rows of memory_split."""
    rate = rows[rows["metric"] == "tokens_per_s"].set_index("llm_share")["value"].sort_index()
    peak, same = (rows[rows["metric"] == m].iloc[0] for m in ("peak_share", "same_work"))
    best, low, high = rate[peak["value"]], rate.index[0], rate.index[-1]
    among = rate.loc[same["low"] : same["high"]]
    differ = (
        "what rates differ by between these shares is the machine's noise"
        if among.min() < among.max()
        else "their rates are equal"
    )
    plateau = (
        f" From {same['low']:.2f} to {same['high']:.2f} both models do exactly the same work, so "
        f"{differ}."
    )
    return (
        f"Throughput is highest at an LLM share of **{peak['value']:.2f}** (95 %: "
        f"{peak['low']:.2f} to {peak['high']:.2f}) with **{best:,.0f}** generated tokens/s; at "
        f"{low:.2f} it is {_change(rate[low], best)} and at {high:.2f} {_change(rate[high], best)}."
        f"{plateau if same['low'] < same['high'] else ''}"
    )


def noise_sentence(noise: Noise) -> str:
    """What a difference in time must exceed to be the share's doing."""
    text = str(noise)
    if not noise.is_known:
        return f"{text[0].upper()}{text[1:]}: with fewer than three seeds no difference is certain."
    return f"**{text}**: a difference between shares must exceed that, and intervals contain it."


def busy_sentence(rows: pd.DataFrame) -> str:
    """How fast each model is while it works, at the ends against its best. Rows of memory_split."""
    parts = []
    for engine, label in MODELS.items():
        rate = rows[rows["metric"] == f"{engine}_tokens_per_busy_s"].set_index("llm_share")["value"]
        parts.append(
            f"the {label} processes at most {rate.max():,.0f} tokens per busy second (at "
            f"{rate.idxmax():.2f}) and at least {rate.min():,.0f} (at {rate.idxmin():.2f})"
        )
    return f"While it works, {parts[0]}; {parts[1]}."


def blocks_sentence(rows: pd.DataFrame) -> str:
    """How full the PRM's cache was and what was evicted. Rows of prm_blocks."""
    total, most = int(rows["blocks_total"].max()), int(rows["blocks_active"].max())
    evicted, allocated = int(rows["evicted"].sum()), int(rows["allocated"].sum())
    again = int(rows["recomputed_tokens_evicted"].sum())
    return (
        f"At a share of {rows['llm_share'].iloc[0]:.2f} the PRM has {total:,} blocks and holds at "
        f"most {most:,} of them ({most / total:.0%}) at once, over {len(rows):,} scheduling steps. "
        f"It takes {allocated:,} blocks; **{evicted:,}** of them evict a cached one, and "
        f"**{again:,}** tokens are computed again because their block was evicted."
    )


def starvation_sentence(rows: pd.DataFrame) -> str:
    """What the ends of the axis lack, and what they did not show. Rows of starvation_rows."""
    seen, not_seen = rows[rows["seen"]], rows[~rows["seen"]]
    texts = [
        f"**{row['count']:,}** {row['what']} ({MODELS[row['engine']]} at {row['llm_share']:.2f})"
        for row in seen.to_dict("records")
    ]
    found = f"The ends of the axis show {', '.join(texts)}." if texts else ""
    lacking = [
        f"{row['what']} ({MODELS[row['engine']]} at {row['llm_share']:.2f})"
        for row in not_seen.to_dict("records")
    ]
    none = "Not seen in a sweep of this size: " + ", ".join(lacking) + "." if lacking else ""
    return f"{found} {none}".strip()


def hits_sentence(rows: pd.DataFrame) -> str:
    """Highest and lowest hit rate of each model. Rows of prefix_hits."""
    parts = []
    for engine, label in MODELS.items():
        rate = rows[rows["engine"] == engine].set_index("llm_share")["value"]
        parts.append(
            f"the {label} finds between **{rate.min():.1%}** (at {rate.idxmin():.2f}) and "
            f"{rate.max():.1%} (at {rate.idxmax():.2f})"
        )
    return f"Of the prompt tokens it asks for, {parts[0]} cached, and {parts[1]}."


def thrash_sentence(rows: pd.DataFrame) -> str:
    """Where each model thrashes most, or the bound below which its rate lies. Rows of thrashing."""
    events = rows[rows["metric"] == "events_per_1000"]
    parts = [_thrash_of(events[events["engine"] == e], label) for e, label in MODELS.items()]
    return f"{parts[0][0].upper()}{parts[0][1:]}; {parts[1]}."


def lost_sentence(rows: pd.DataFrame) -> str:
    """How much of the slow-down at the highest share is recomputing. Rows of lost_time."""
    table = rows.pivot_table(index="llm_share", columns="part", values="seconds", aggfunc="sum")
    walls = rows.groupby("llm_share")["wall_s"].first()
    best, worst = int(walls.argmin()), len(walls) - 1
    if best == worst:
        return (
            f"The highest share ({walls.index[worst]:.2f}) is the fastest here, so there is no "
            "slow-down that evictions could explain."
        )
    extra = float(walls.iloc[worst] - walls.iloc[best])
    change = table.iloc[worst] - table.iloc[best]
    again, evicted = change.reindex(list(AGAIN)).sum(), change.get("recomputed_evicted", 0.0)
    return (
        f"From the fastest share ({walls.index[best]:.2f}) to the highest "
        f"({walls.index[worst]:.2f}) a search takes {extra:+.2f} s "
        f"({extra / walls.iloc[best]:+.1%}); computing evicted tokens again accounts for "
        f"**{evicted:+.2f} s**, all recomputation for {again:+.2f} s; the rest is other work and "
        "the machine's noise."
    )


def thesis_sentence(eviction: Claim, thrash: Claim) -> str:
    """Which of the thesis's two sentences holds, from the verdicts on C4 and C6."""
    where = "more than these runs can tell" if eviction.verdict == DEPENDS else "here"
    return (
        f'Of the thesis\'s two sentences, "evictions explain the slow-down" **{eviction.verdict}** '
        f'{where}, and "thrashing is extremely rare" **{thrash.verdict}**'
        f"{'' if thrash.verdict != DEPENDS else ' the share'}."
    )


def accounted_sentence(rows: pd.DataFrame) -> str:
    """How much of the wall time the parts add up to. Rows of lost_time."""
    shares = accounted(rows)
    return (
        f"Steps and spans add up to between {shares.min():.2%} and {shares.max():.2%} of the wall "
        "time that was measured apart."
    )


def _thrash_of(events: pd.DataFrame, label: str) -> str:
    most = events.sort_values("value").iloc[-1]
    if most["value"] == 0:
        bound = f"below {events['high'].max():.2f} events per 1,000 look-ups"
        return f"the {label} never thrashed: its rate is {bound} everywhere"
    return (
        f"the {label} thrashes most at {most['llm_share']:.2f}, **{most['value']:.1f}** events per "
        f"1,000 look-ups (95 %: {most['low']:.1f} to {most['high']:.1f}), and not at all at "
        f"{int((events['value'] == 0).sum())} of {len(events)} shares"
    )


def _change(value: float, best: float) -> str:
    return f"{value:,.0f} ({value / best - 1:+.1%})"
