"""What the what-if figures show, in sentences; the same for a screen reader, a notebook, a test."""

from __future__ import annotations

import pandas as pd

from workbench.config import format_size
from workbench.plots.theme import MODELS
from workbench.replay.devices import load_device
from workbench.widgets.what_if_answers import ESTIMATE, Answer
from workbench.widgets.what_if_blocks import unit_of
from workbench.widgets.what_if_position import Kept, Position
from workbench.widgets.what_if_share import mark


def in_words(answer: Answer, kind: str = "") -> str:
    """What the rings of the share figure stand on. kind: of answer, in other words."""
    kind = kind or _kind(answer)
    return f"{kind}: {_place(answer)}: {_rate(answer)}; {_hits(answer)}; {_thrash(answer)}."


def cost_in_words(answer: Answer, price_per_hour: float | None = None, kind: str = "") -> str:
    """What a problem costs, and how full the caches were. kind: of answer, in other words."""
    seconds, name = unit_of(answer.seconds)
    parts = (answer.llm.seconds, answer.prm.seconds, answer.outside_s)
    llm, prm, rest = (f"{part / seconds:.3g}" for part in parts)
    text = (
        f"{kind or _kind(answer)}: a problem takes {answer.seconds / seconds:.3g} {name}: {llm} in "
        f"steps of the LLM, {prm} in steps of the PRM, {rest} outside"
    )
    if price_per_hour is not None:
        text += f"; at {price_per_hour:g} an hour that is {answer.cost(price_per_hour):.3g}"
    full = _full(answer)
    return f"{text}. {full}" if full else f"{text}."


def mark_in_html(answer: Answer | None) -> str:
    """The kind of answer for a live view, where it stands out above a figure."""
    text, colour = mark(answer)
    return f'<b style="color: {colour}">{text}</b>'


def face_of(kept: Kept, position: Position) -> str:
    """What stands on the figures' face: recording, memory, limits, device."""
    device, settings = load_device(position.device), kept.header.settings
    width = "" if kept.beam_width is None else f", beam width {kept.beam_width}"
    fitted = [e.name for e in (kept.header.llm, kept.header.prm) if e.name in device.terms]
    bound = "" if fitted else "; roofline alone, so seconds are a bound from below"
    policy = "each model its own cache" if position.policy is None else f"policy {position.policy}"
    return (
        f"Replayed: LLM {kept.header.llm.name}, PRM {kept.header.prm.name}, n = {kept.n}{width}, "
        f"{kept.num_problems} problems, {settings.min_problem_batch} in flight (recording "
        f"{kept.path.stem}); total memory {format_size(position.bytes)}, activations outside it; "
        f"{policy}.\nBlocks of {position.block_size} tokens, at most {position.max_num_seqs} "
        f"sequences and {position.max_num_batched_tokens:,} tokens a step; {device.name} "
        f"({device.source}{bound})."
    )


def best_in_words(curve: pd.DataFrame) -> str:
    """Where the rows of a curve are fastest, and what its ends lose. Rows of Answer.row.

    Estimates are said to be such, also where only some rows are.
    """
    rate = curve.set_index("llm_share")["tokens_per_s"].sort_index()
    best = rate.max()
    within = rate[rate >= 0.99 * best].index
    low, high = rate.index[0], rate.index[-1]
    near = f"{within[0]:.2f} to {within[-1]:.2f}" if len(within) > 1 else "nowhere else"
    lead = "By estimate, throughput" if ESTIMATE in set(curve["kind"]) else "Throughput"
    return (
        f"{lead} is highest at an LLM share of **{rate.idxmax():.2f}** with **{best:,.0f}** "
        f"generated tokens/s (within 1 % of it: {near}); at {low:.2f} it is "
        f"{rate[low] / best - 1:+.0%}, at {high:.2f} {rate[high] / best - 1:+.0%}."
    )


def agreement_in_words(errors: pd.DataFrame) -> str:
    """How far estimates lie from replays. Rows of what_if_curve.agreement."""
    parts = []
    for fits, where in ((True, "where both caches hold the order"), (False, "where one does not")):
        own = errors.loc[errors["fits"] == fits, "error"].abs()
        if len(own):
            parts.append(f"{where} by at most {own.max():.1%} ({len(own)} replays)")
    return f"Estimated throughput misses the replayed one {', '.join(parts)}."


def _kind(answer: Answer) -> str:
    return "Estimate" if answer.kind == ESTIMATE else "Exact replay"


def _place(answer: Answer) -> str:
    position = answer.position
    return (
        f"at an LLM share of {position.llm_share:.2f} of {format_size(position.bytes)} "
        f"(kv_share {answer.kv_share:.2f})"
    )


def _rate(answer: Answer) -> str:
    return f"{answer.tokens_per_s:,.0f} generated tokens/s"


def _hits(answer: Answer) -> str:
    return (
        f"the LLM finds {answer.llm.hit_rate:.1%} and the PRM {answer.prm.hit_rate:.1%} of prompt "
        "tokens cached"
    )


def _thrash(answer: Answer) -> str:
    return (
        f"{answer.llm.thrash:.1f} and {answer.prm.thrash:.1f} of 1,000 look-ups ask for a block "
        "that was evicted"
    )


def _full(answer: Answer) -> str:
    """How many blocks were in use at most; empty where no blocks were asked for."""
    parts = []
    for model, own in answer.blocks.groupby("engine", sort=False):
        most, total = int(own["blocks_active"].max()), int(own["blocks_total"].max())
        parts.append(f"the {MODELS[str(model)].label} at most {most:,} of {total:,} blocks")
    return f"In use at once: {', '.join(parts)}." if parts else ""
