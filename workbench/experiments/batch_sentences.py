"""Results of the batching study in words, their numbers computed from the rows drawn.

What it does not do: soften a number, or judge a claim.
"""

from __future__ import annotations

import pandas as pd

from workbench.experiments.batch_plan import CONTINUOUS, STATIC, UNCACHED

MODELS = {"llm": "LLM", "prm": "PRM"}
STEPS = {"llm": "sampled", "prm": "judged"}


def limits_sentence(rows: pd.DataFrame) -> str:
    """Which limits are fastest and which slowest. Rows of one model."""
    cells = _measured(rows, CONTINUOUS)
    rates = cells["steps_per_s"]
    best, least = cells.iloc[int(rates.argmax())], cells.iloc[int(rates.argmin())]
    high, low = rates.max(), rates.min()
    return (
        f"The {_name(rows)} is fastest with at most {_limits(best)}: **{high:,.1f}** reasoning "
        f"steps {_verb(rows)} a second, and slowest with {_limits(least)}: {low:,.1f}, a factor of "
        f"**{high / low:.1f}** less."
    )


def static_sentence(rows: pd.DataFrame) -> str:
    """Continuous over static batches, with and without a prefix cache. Rows of one model."""
    static = _measured(rows, STATIC)
    if static.empty:
        return f"No static batch of the {_name(rows)} was carried out: {_why_not(rows)}."
    widest = static.iloc[int(static["max_num_seqs"].argmax())]
    most, rate = int(widest["max_num_seqs"]), float(widest["steps_per_s"])
    padding, waste = f"{widest['padding']:.0%}", f"{widest['waste']:.0%}"
    parts = [
        f"In static batches of {most} the {_name(rows)} has **{rate:,.1f}** steps {_verb(rows)} a "
        f"second; {padding} of the rows they compute are padding, {waste} of their blocks' room "
        "holds nothing"
    ]
    for kind, words in ((UNCACHED, "without a prefix cache"), (CONTINUOUS, "with one")):
        own = _measured(rows, kind).groupby("max_num_seqs")["steps_per_s"].max()
        if len(own):
            beside = min(own.index, key=lambda seqs: abs(seqs - most))
            parts.append(
                f"continuous batching of at most {beside} sequences {words} is "
                f"**{own[beside] / rate:.1f}** times as fast"
            )
    refused = f" {_why_not(rows)}." if _why_not(rows) else ""
    return f"{'; '.join(parts)}.{refused}"


def sameness_sentence(cells: pd.DataFrame) -> str:
    """How many timed runs gave the recorded answers. The study's finished runs."""
    same = int(cells["same_answers"].astype(bool).sum())
    return (
        f"**{same} of {len(cells)}** runs, static ones included, gave the recorded answers: "
        "tokens of the LLM and logits of the PRM are the same whatever the batch."
    )


def balance_sentence(rows: pd.DataFrame) -> str:
    """Which model the search waits for, at the ends of the split. Rows of the balance figure."""
    busy = rows[rows["metric"] == "steps_per_busy_s"]
    table = busy.pivot(index="llm_share", columns="model", values="value").sort_index()
    parts = [_ratio_at(table, share) for share in dict.fromkeys((table.index[0], table.index[-1]))]
    return f"{'; '.join(parts)}."


def waste_sentence(rows: pd.DataFrame) -> str:
    """Waste of the smallest and largest blocks, and of static batches. Rows of the figure."""
    waste = rows[rows["metric"] == "waste"]
    parts = []
    for model, label in MODELS.items():
        own = waste[waste["model"] == model]
        paged = own[own["kind"] == CONTINUOUS].groupby("block_size")["value"].max()
        text = ", ".join(f"{value:.1%} in blocks of {size:.0f}" for size, value in paged.items())
        static = own.loc[own["kind"] == STATIC, "value"]
        padded = f" (static batches: {static.min():.0%} to {static.max():.0%})"
        parts.append(f"the {label} wastes at most {text}{padded if len(static) else ''}")
    return f"Of the room in active blocks, {'; '.join(parts)}."


def _measured(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    return rows[(rows["kind"] == kind) & rows["steps_per_s"].notna()]


def _why_not(rows: pd.DataFrame) -> str:
    refused = rows[(rows["kind"] == STATIC) & rows["steps_per_s"].isna()]
    sizes = " and ".join(f"{s:.0f}" for s in refused["max_num_seqs"])
    return f"Padded batches of {sizes} do not fit its cache" if sizes else ""


def _ratio_at(table: pd.DataFrame, share: float) -> str:
    llm, prm = float(table["llm"][share]), float(table["prm"][share])
    slower, faster = ("LLM", "PRM") if llm < prm else ("PRM", "LLM")
    times = max(llm, prm) / min(llm, prm)
    return (
        f"at an LLM share of {share:.2f} the LLM samples {llm:,.0f} reasoning steps per busy "
        f"second and the PRM judges {prm:,.0f}, so a search spends **{times:.1f}** times as long "
        f"in the {slower} as in the {faster}"
    )


def _name(rows: pd.DataFrame) -> str:
    return MODELS[str(rows["model"].iloc[0])]


def _verb(rows: pd.DataFrame) -> str:
    return STEPS[str(rows["model"].iloc[0])]


def _limits(cell: pd.Series) -> str:
    return (
        f"{cell['max_num_seqs']:,} sequences and {cell['max_num_batched_tokens']:,} tokens a step"
    )
