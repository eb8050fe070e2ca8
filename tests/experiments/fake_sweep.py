"""A sweep without models: tables with the columns of real ones, small enough to count by hand."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pandas as pd

SHARES = (0.08, 0.2, 0.3, 0.4, 0.5)
SEEDS = (0, 1)
PROBLEMS = ("a", "b", "c", "d")
BLOCKS = 4096  # bytes of a block of either model
TOTAL = 64 * 2**20


class FakeSweep:
    """Throughput has its peak at 0.3; the PRM evicts at 0.5, the LLM thrashes never.

    changed: functions of tables, by name, that are applied to what `table` returns.
    """

    def __init__(self, shares=SHARES, seeds=SEEDS, **changed):
        self._runs = [_run(share, seed) for share in shares for seed in seeds]
        self.config = SimpleNamespace(profile="quick", shares=shares, seeds=seeds)
        self._changed = changed
        self.missing = ()

    @property
    def runs(self):
        return pd.DataFrame([run["row"] for run in self._runs])

    @property
    def all_runs(self):
        """The measured runs and a sentinel at 0.3 whose three repetitions differ by 2 %."""
        sentinel = _run(0.3, self.config.seeds[0])["row"] | {"role": "sentinel"}
        wall, speed = sentinel["wall_s"], sentinel["tokens_per_s"]
        repeated = [
            sentinel | {"run_id": f"sentinel-{f}", "wall_s": f * wall, "tokens_per_s": speed / f}
            for f in (0.99, 1.0, 1.01)
        ]
        return pd.concat([self.runs, pd.DataFrame(repeated)], ignore_index=True)

    def table(self, name, llm_share=None, seed=None, runs=None):
        frames = []
        for run in self._runs:
            row = run["row"]
            if llm_share in (None, row["llm_share"]) and seed in (None, row["seed"]):
                keys = {"run_id": row["run_id"], "llm_share": row["llm_share"]}
                frames.append(run[name].assign(**keys, run_seed=row["seed"]))
        return self._changed.get(name, lambda rows: rows)(pd.concat(frames, ignore_index=True))


def wall(share):
    """Seconds of a search: fastest at 0.3."""
    return 10.0 * (1 + 4 * (share - 0.3) ** 2)


def _run(share, seed):
    steps = _steps(share)
    busy = steps.groupby("engine")["duration_s"].sum()
    row = {"run_id": f"split-{share}-{seed}", "name": f"split-{share}-{seed}"}
    row |= {"status": "finished", "role": "measure", "written_at": "2026-01-01"}
    row |= {"llm_share": share, "seed": seed, "profile": "quick", "llm": "tiny-solver"}
    row |= {"prm": "tiny-prm", "total_memory": TOTAL, "activations_in_total": False}
    row |= {"num_problems": len(PROBLEMS), "n": 16, "beam_width": 4, "block_size": 16}
    row |= {"machine": "A CPU, 2 cores, 2 threads", "wall_s": wall(share)}
    row |= {"tokens_per_s": 400 / wall(share), "llm_prefill_tokens": 320, "llm_decode_tokens": 640}
    row |= {"prm_decode_tokens": 0, "llm_steps": 40, "prm_steps": 40}
    row |= {"llm_hit_rate": 0.9, "prm_hit_rate": 0.95}
    row["prm_prefill_tokens"] = 2400 + round(1000 * share)  # no two shares' work is equal
    llm_bytes = round(TOTAL * share)
    for engine, size in (("llm", llm_bytes), ("prm", TOTAL - llm_bytes)):
        kv = size - 1_100_000
        parts = {"bytes": size, "weights_bytes": 10**6, "activations_bytes": 10**5}
        parts |= {"other_bytes": 0, "block_bytes": BLOCKS, "kv_bytes": kv, "blocks": kv // BLOCKS}
        parts |= {"kv_tokens": 16 * (kv // BLOCKS), "busy_s": busy[engine]}
        row |= {f"{engine}_{name}": value for name, value in parts.items()}
    problems = pd.DataFrame({"problem_id": PROBLEMS, "tokens": [80, 100, 120, 100]})
    problems["prm_tokens_computed"] = [100, 200, 300, 200]
    problems["wall_part_s"] = wall(share) / len(PROBLEMS)
    tables = {"steps": steps, "spans": _spans(share), "problems": problems}
    return {"row": row, **tables, "requests": _requests(), "nodes": _nodes(seed)}


def _steps(share, count=40):
    """Alternating steps of both engines that fill 90 % of the wall time."""
    pitch = wall(share) / (2 * count)
    number = np.arange(2 * count)
    prm = number % 2 == 1
    starved = prm & (share == 0.5)
    rows = {"engine": np.where(prm, "prm", "llm"), "step": number // 2}
    rows |= {"start_s": number * pitch, "duration_s": 0.9 * pitch, "schedule_s": 0.09 * pitch}
    rows |= {"prefill_tokens": np.where(prm, 60, 8), "decode_tokens": np.where(prm, 0, 16)}
    rows |= {"running": 16, "tokens_held": 1600}
    rows |= {"blocks_total": 200, "blocks_active": 100, "blocks_cached": 60, "preempted": 0}
    rows |= {"allocated": np.where(prm, 6, 2), "evicted": np.where(starved, 5, 0)}
    rows |= {"thrashed": np.where(starved, 4, 0), "thrash_events": np.where(starved, 1, 0)}
    rows |= {"recomputed_tokens_evicted": np.where(starved, 40, 0)}
    rows |= {"recomputed_tokens_preempted": 0, "recomputed_tokens_partial": np.where(prm, 4, 1)}
    return pd.DataFrame(rows)


def _spans(share, count=80):
    pitch = wall(share) / count
    starts = np.arange(count) * pitch + 0.9 * pitch
    kinds = np.where(np.arange(count) % 2, "strategy", "bookkeeping")
    spans = {"lane": "search", "kind": kinds, "start_s": starts, "duration_s": 0.1 * pitch}
    return pd.DataFrame(spans)


def _requests():
    rows = pd.DataFrame(product(("llm", "prm"), PROBLEMS, 0.5 + np.arange(5)))
    rows.columns = ["engine", "problem_id", "scheduled_s"]
    cached = np.where(rows["engine"] == "llm", 90, 95)
    return rows.assign(prompt_tokens=100, cached_tokens=cached, preemptions=0)


def _nodes(seed):
    rows = [(p, str(k), [seed, k, k + 1]) for p in PROBLEMS for k in range(3)]
    return pd.DataFrame(rows, columns=["problem_id", "node_id", "token_ids"])
