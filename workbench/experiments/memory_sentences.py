"""Memory over the split in words, numbers computed from the rows drawn and the engines built.

What it does not do: soften a number, or judge a claim (claims.py).
"""

from __future__ import annotations

import pandas as pd

from workbench.config import format_size
from workbench.experiments.memory_parts import COMPUTED, MEASURED, MODELS, MemoryStudy, Pair

LABELS = {"llm": "LLM", "prm": "PRM"}


def constant_sentence(rows: pd.DataFrame) -> str:
    """What stays while the share moves, and how far the KV cache goes. Rows of memory_parts."""
    built = rows[(rows["how"] == MEASURED) & rows["fits"]]
    sizes = built.pivot_table(index=["model", "llm_share"], columns="part", values="bytes")
    parts = []
    for model in MODELS:
        own = sizes.loc[model]
        weights, steps = (format_size(own[n].median()) for n in ("weights", "activations_limits"))
        kv = f"{format_size(own['kv'].min())} to {format_size(own['kv'].max())} of KV"
        fixed = f"{weights} of weights and {steps} of activations at every share"
        parts.append(f"the {LABELS[model]} has {fixed}, and {kv}")
    fixed_parts = sizes.drop(columns="kv").groupby("model")
    change = ((fixed_parts.max() - fixed_parts.min()) / fixed_parts.max().clip(lower=1)).max().max()
    shares = len(built["llm_share"].unique())
    return (
        f"Over the {shares} shares at which engines were built, {'; '.join(parts)}. What is not KV "
        f"changes by at most **{float(change):.2%}**."
    )


def activations_sentence(study: MemoryStudy) -> str:
    """Both dry passes of both models, and what the first would leave unreserved."""
    return (
        "Activations of one step over the longest request, as the thesis measures them, and at "
        f"the batch limits, as the engine here does: {_passes(study.measured)} (measured); "
        f"{_passes(study.computed)} (computed: buffers alone). A pass over one request reserves "
        f"**{_missing(study.computed)}** less than steps of the computed pair may need."
    )


def ends_sentence(study: MemoryStudy) -> str:
    """Where the axis ends for both pairs, and what lacks beyond. For the figure of blocks."""
    return " ".join(_ends(pair, study.beyond) for pair in (study.measured, study.computed))


def blocks_sentence(rows: pd.DataFrame) -> str:
    """How many blocks a hundredth of the total is, and how near engines are. Rows of kv_blocks."""
    parts = []
    for how in (MEASURED, COMPUTED):
        slopes = [_slope(rows[(rows["how"] == how) & (rows["model"] == m)]) for m in MODELS]
        texts = [f"{slope:+,.1f} of the {LABELS[m]}" for m, slope in zip(MODELS, slopes)]
        parts.append(f"{' and '.join(texts)} ({how})")
    built = int((rows["kind"] == "built").sum())
    return (
        f"A hundredth of the total moves blocks by {'; '.join(parts)}: a block of the PRM has "
        f"the bytes of **{_ratio(rows):.1f}** of the LLM's. The formula gives the count of "
        f"{_on_the_line(rows)} of {built} caches that were built exactly."
    )


def _passes(pair: Pair) -> str:
    sides = zip(MODELS, pair.longest, pair.limits, strict=True)
    return ", ".join(
        f"{LABELS[model]} {format_size(longest)} and {format_size(limits)}"
        for model, longest, limits in sides
    )


def _missing(pair: Pair) -> str:
    lacking = (max(0, b - a) for a, b in zip(pair.longest, pair.limits, strict=True))
    return format_size(sum(lacking))


def _ends(pair: Pair, beyond: tuple[float, ...]) -> str:
    names = " and ".join(str(getattr(pair.config, m)).removeprefix("dummy:") for m in MODELS)
    ends = pair.shares
    lacks = [str(ends.at(share)) for share in beyond if not ends.at(share).fits]
    text = (
        f"{names} in {format_size(ends.total)} ({pair.how}) both fit at LLM shares from "
        f"**{ends.low:.3f}** to **{ends.high:.3f}**"
    )
    return f"{text}; {'; '.join(lacks).replace('dummy:', '')}." if lacks else f"{text}."


def _slope(rows: pd.DataFrame) -> float:
    """Blocks for a hundredth of the total, where the model has any."""
    line = rows[(rows["kind"] == "formula") & (rows["blocks"] > 0)].sort_values("llm_share")
    blocks, shares = line["blocks"], line["llm_share"]
    return float((blocks.iloc[-1] - blocks.iloc[0]) / (shares.iloc[-1] - shares.iloc[0]) / 100)


def _ratio(rows: pd.DataFrame) -> float:
    own = rows[rows["how"] == MEASURED]
    llm, prm = (_slope(own[own["model"] == model]) for model in MODELS)
    return abs(llm / prm)


def _on_the_line(rows: pd.DataFrame) -> int:
    built = rows[rows["kind"] == "built"]
    return int((built["blocks"] == built["formula_blocks"]).sum())
