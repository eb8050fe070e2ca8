"""Realistic frames without a model: a PRM's room shrinks with the share, an LLM's grows.

A toy cache makes the trace, so its columns obey the laws of a real one.
"""

from itertools import product

import numpy as np
import pandas as pd

from workbench.config import STRATEGIES

SHARES = (0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
PROVENANCE = (
    "tiny-solver + tiny-prm (measured tiny), 64 MiB fp32, activations outside the total; profile "
    "default: 16 problems, 2 seeds; AMD EPYC 9B14, 2 cores, 2 threads.\nCounts carry over at equal "
    "ratios; seconds do not."
)


def rooms(shares=SHARES):
    """KV tokens of both models over the share."""
    share = np.asarray(shares)
    llm = (share - 0.06) * 64 * 2**20 / 512
    prm = (1 - share - 0.35) * 64 * 2**20 / 2048
    return pd.DataFrame({"llm_share": share, "llm_kv_tokens": llm, "prm_kv_tokens": prm})


def split_rows(shares=SHARES):
    """Tidy rows of memory_split: a hump with its peak at 0.3."""
    hump = 1 - 4 * (np.asarray(shares) - 0.3) ** 2
    heights = {"tokens_per_s": 2400 * hump, "problems_per_min": 31 * hump}
    parts = [
        rooms(shares).assign(metric=name, value=v, low=0.93 * v, high=1.06 * v)
        for name, v in heights.items()
    ]
    peak = rooms((0.3,)).assign(metric="peak_share", value=0.3, low=0.2, high=0.4)
    ratio = pd.DataFrame({"llm_share": shares, "ratio": hump})
    ratio = ratio.assign(ratio_low=0.98 * hump, ratio_high=1.01 * hump)
    return pd.concat([*parts, peak], ignore_index=True).merge(ratio, on="llm_share")


def critique_rows(shares=SHARES):
    """Rates with a peak at 0.3, and what is computed again towards both ends; critiques cost 5x."""
    share, parts = np.asarray(shares), []
    hump = 30 * (1 - 4 * (share - 0.3) ** 2)
    for kind, rate in (("scores", hump), ("critiques", hump / 5)):
        own = rooms(shares).assign(kind=kind)
        low, high = 0.9 * rate, 1.1 * rate
        told = own.assign(metric="problems_per_min", value=rate, low=low, high=high)
        over = rate / rate.max()
        peak = {"llm_share": 0.3, "metric": "peak_share", "value": 0.3, "low": 0.2, "high": 0.4}
        parts.append(pd.DataFrame([{"kind": kind} | peak]))
        parts.append(told.assign(ratio=over, ratio_low=0.98 * over, ratio_high=over))
        for engine, again in (("llm", 500 * (0.5 - share)), ("prm", 900 * share)):
            parts.append(own.assign(metric="again", engine=engine, value=again))
    return pd.concat(parts, ignore_index=True)


def block_rows(steps=1500, total=320, share=0.5, seed=0):
    """A trace of one engine: demand swings, what is freed stays cached until its room is needed."""
    rng = np.random.default_rng(seed)
    active = cached = 0
    rows = []
    for step in range(steps):
        want = int(total * (0.45 + 0.35 * np.sin(step / 40) + 0.15 * rng.random()))
        taken = max(want - active, 0)
        evicted = max(taken - (total - active - cached), 0)
        cached += max(active - want, 0) - evicted
        active = want
        rows.append((step, active, cached, taken, evicted))
    names = ["step", "blocks_active", "blocks_cached", "allocated", "evicted"]
    axes = {"axis_steps": steps, "axis_blocks": 400, "axis_events": 90}
    constant = {"engine": "prm", "llm_share": share, "blocks_total": total}
    return pd.DataFrame(rows, columns=names).assign(**constant, **axes)


def hit_rows(shares=SHARES):
    """Hit rates: the PRM's falls towards 0.5, the LLM's towards 0.08."""
    share = np.asarray(shares)
    rates = {
        "llm": 0.93 - 0.4 * np.exp(-(share - 0.08) / 0.05),
        "prm": 0.95 - 0.5 * np.exp((share - 0.5) / 0.06),
    }
    parts = [
        rooms(shares).assign(engine=e, value=v, low=v - 0.02, high=np.minimum(v + 0.02, 1))
        for e, v in rates.items()
    ]
    return pd.concat(parts, ignore_index=True)


def thrash_rows(shares=SHARES):
    """Thrash counts: zero in the middle, with the rule of three as upper bound."""
    share = np.asarray(shares)
    events = {
        "llm": 120 * np.clip(0.14 - share, 0, None),
        "prm": 300 * np.clip(share - 0.34, 0, None),
    }
    parts = []
    for engine, rate in events.items():
        for metric, scale, bound in (("events_per_1000", 1.0, 0.7), ("blocks", 40.0, 28.0)):
            value = rate * scale
            bounds = {"low": 0.8 * value, "high": np.where(value > 0, 1.2 * value, bound)}
            parts.append(rooms(shares).assign(engine=engine, metric=metric, value=value, **bounds))
    return pd.concat(parts, ignore_index=True)


def lost_rows(shares=(0.08, 0.15, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5)):
    """Parts of the wall time; they add up to wall_s."""
    room = rooms(shares)
    starved = np.clip(np.asarray(shares) - 0.3, 0, None)
    always = {"llm_decode": 9, "llm_prefill": 2, "prm_prefill": 5, "bookkeeping": 3.1}
    always |= {"recomputed_preempted": 0.1, "recomputed_partial": 0.8}
    parts = {"recomputed_evicted": 25 * starved}
    parts |= {name: seconds + 0 * starved for name, seconds in always.items()}
    rows = [room.assign(part=name, seconds=seconds) for name, seconds in parts.items()]
    return pd.concat([own.assign(wall_s=sum(parts.values())) for own in rows], ignore_index=True)


def strategy_rows():
    """Every strategy at two numbers of beams, over all levels, the easier and the hard ones."""
    cells = product(("all levels", "levels to 3", "levels from 4"), STRATEGIES, (4, 16))
    rows = [
        {"strategy": name, "n": n, "levels": levels, "tokens": 30.0 * n + place, "value": 0.6}
        for place, (levels, name, n) in enumerate(cells)
    ]
    return pd.DataFrame(rows).assign(low=0.4, high=0.8, seconds=lambda own: own["tokens"] / 90)


def tree_nodes(depth=8, beams=4, width=4, seed=0):
    """One problem's tree: `beams` survivors, each continued `width` times, a level at a time."""
    rng = np.random.default_rng(seed)
    rows, survivors = [], [""]
    for level in range(depth):
        count = beams * width if level == 0 else width
        names = [f"{parent}/{k}".strip("/") for parent in survivors for k in range(count)]
        scores = rng.beta(3, 2, len(names))
        best = set(np.argsort(-scores)[:beams])
        last = level == depth - 1
        for i, name in enumerate(names):
            parent = name.rpartition("/")[0]
            rows.append((name, parent, level + 1, scores[i], i in best, last and i in best))
        survivors = [names[i] for i in sorted(best)]
    columns = ["node_id", "parent_id", "depth", "score", "kept", "finished"]
    return pd.DataFrame(rows, columns=columns)


def limit_rows(model="llm"):
    """Cells of both limits; more sequences than tokens cannot be, nor a wide static batch."""
    rows = []
    for seqs in (8, 64, 512):
        for tokens in (256, 2048, 16384):
            rate = np.nan if seqs > tokens else 20.0 * seqs**0.5 + tokens / 1000
            rows.append(("continuous", seqs, tokens, 20 * rate, rate, "more sequences than tokens"))
    for kind, rate in (("continuous, no prefix cache", 9.0), ("static, padded", 6.0)):
        rows += [(kind, seqs, 2048, np.nan, rate * seqs / 8, "") for seqs in (8, 16)]
    rows.append(("static, padded", 64, 2048, np.nan, np.nan, "needs 99 blocks. Give more."))
    names = ["kind", "max_num_seqs", "max_num_batched_tokens", "tokens_per_s", "steps_per_s"]
    cells = pd.DataFrame(rows, columns=[*names, "error"]).assign(model=model)
    rate = cells["steps_per_s"]
    cells["status"] = np.where(rate.isna(), "infeasible", "finished")
    ratio = rate / rate.max()
    return cells.assign(ratio=ratio, ratio_low=0.9 * ratio, ratio_high=1.2 * ratio)


def balance_rows(shares=SHARES):
    """The PRM's steps fall towards high shares; larger blocks waste more, static batches most."""
    busy = [
        rooms(shares).assign(metric="steps_per_busy_s", model=m, value=v, low=0.9 * v, high=1.1 * v)
        for m, v in (("llm", 90.0), ("prm", 120 - 160 * np.asarray(shares)))
    ]
    waste = [
        ("continuous", model, size, seqs, size / (size + 40))
        for model in ("llm", "prm")
        for size in (1, 4, 16, 64)
        for seqs in (8, 64)
    ]
    waste += [("static, padded", model, 16, 8, 0.5) for model in ("llm", "prm")]
    names = ["kind", "model", "block_size", "max_num_seqs", "value"]
    return pd.concat([*busy, pd.DataFrame(waste, columns=names).assign(metric="waste")])


def sensitivity_rows():
    """What is taken and four settings; one does not fit, one has no fall at its upper end."""
    cells = [("taken", "taken", 0.42, 0.29), ("seeds", "seed 1", 0.4, 0.3)]
    cells += [("n", "4", 0.5, 0.0), ("n", "64", 0.35, 0.4), ("dtype", "float32", None, None)]
    rows = pd.DataFrame(cells, columns=["value", "setting", "plateau_high", "loss_high"])
    fits = rows["loss_high"].notna()
    rest = {"plateau_low": 0.1, "best": 0.3, "low": 0.08, "high": 0.5, "loss_low": 0.05}
    rest |= {"loss_mid": 0.0}
    columns = {name: np.where(fits, value, np.nan) for name, value in rest.items()}
    return rows.assign(kind="setting", **columns)
