"""A sweep without models: tables with the columns of real ones, small enough to count by hand."""

from types import SimpleNamespace

import numpy as np
import pandas as pd

SHARES = (0.08, 0.2, 0.3, 0.4, 0.5)
SEEDS = (0, 1)
PROBLEMS = ("a", "b", "c", "d")
BLOCKS = 4096  # bytes of a block of either model
TOTAL = 64 * 2**20


class FakeSweep:
    """Throughput has its peak at 0.3; the PRM evicts at 0.5, the LLM thrashes never."""

    def __init__(self, shares=SHARES, seeds=SEEDS):
        self._runs = [_run(share, seed) for share in shares for seed in seeds]
        self.config = SimpleNamespace(profile="quick", shares=shares, seeds=seeds)
        self.folders, self.missing = (), ()

    @property
    def runs(self):
        return pd.DataFrame([run["row"] for run in self._runs])

    @property
    def all_runs(self):
        """The measured runs and a sentinel at 0.3 whose three repetitions differ by 2 %."""
        sentinel = _run(0.3, self.config.seeds[0])["row"] | {"role": "sentinel"}
        repeated = [
            sentinel
            | {"run_id": f"sentinel-{k}", "wall_s": factor * sentinel["wall_s"]}
            | {"tokens_per_s": sentinel["tokens_per_s"] / factor}
            for k, factor in enumerate((0.99, 1.0, 1.01))
        ]
        return pd.concat([self.runs, pd.DataFrame(repeated)], ignore_index=True)

    def table(self, name, llm_share=None, seed=None):
        wanted = [
            run
            for run in self._runs
            if llm_share in (None, run["row"]["llm_share"]) and seed in (None, run["row"]["seed"])
        ]
        frames = [run[name].assign(**_keys(run["row"])) for run in wanted]
        return pd.concat(frames, ignore_index=True)


def _keys(row):
    return {"run_id": row["run_id"], "llm_share": row["llm_share"], "run_seed": row["seed"]}


def wall(share):
    """Seconds of a search: fastest at 0.3."""
    return 10.0 * (1 + 4 * (share - 0.3) ** 2)


def _run(share, seed):
    steps, spans = _steps(share), _spans(share)
    busy = steps.groupby("engine")["duration_s"].sum()
    parts = {
        "weights_bytes": 10**6,
        "activations_bytes": 10**5,
        "other_bytes": 0,
        "block_bytes": BLOCKS,
    }
    sizes = {"llm": round(TOTAL * share), "prm": TOTAL - round(TOTAL * share)}
    row = {
        "run_id": f"split-{share}-{seed}",
        "name": f"split-{share}-{seed}",
        "status": "finished",
        "role": "measure",
        "written_at": "2026-01-01",
        "llm_share": share,
        "seed": seed,
        "profile": "quick",
        "llm": "tiny-solver",
        "prm": "tiny-prm",
        "total_memory": TOTAL,
        "activations_in_total": False,
        "num_problems": len(PROBLEMS),
        "n": 16,
        "beam_width": 4,
        "block_size": 16,
        "machine": "A CPU, 2 cores, 2 threads",
        "machine_cpu": "A CPU",
        "machine_gpu": None,
        "versions": '{"torch": "2.13"}',
        "git_commit": "c0ffee",
        "git_dirty": False,
        "wall_s": wall(share),
        "tokens_per_s": 400 / wall(share),
        "llm_busy_s": busy["llm"],
        "prm_busy_s": busy["prm"],
        "llm_prefill_tokens": 320,
        "llm_decode_tokens": 640,
        "llm_steps": 40,
        "prm_prefill_tokens": 2400 + round(1000 * share),  # no two shares' work is equal
        "prm_decode_tokens": 0,
        "prm_steps": 40,
        "llm_hit_rate": 0.9,
        "prm_hit_rate": 0.95,
        "llm_preempted": 3 if share < 0.1 else 0,
    }
    for engine, size in sizes.items():
        row |= {f"{engine}_{name}": value for name, value in parts.items()} | {
            f"{engine}_bytes": size
        }
        row[f"{engine}_kv_bytes"] = size - 1_100_000
        row[f"{engine}_blocks"] = row[f"{engine}_kv_bytes"] // BLOCKS
        row[f"{engine}_kv_tokens"] = 16 * row[f"{engine}_blocks"]
    problems = pd.DataFrame({"problem_id": PROBLEMS, "tokens": [80, 100, 120, 100]})
    problems["prm_tokens_computed"] = [100, 200, 300, 200]
    problems["wall_part_s"] = wall(share) / len(PROBLEMS)
    tables = {"steps": steps, "spans": spans, "problems": problems}
    return {"row": row, **tables, "requests": _requests(), "nodes": _nodes(seed)}


def _steps(share, count=40):
    """Alternating steps of both engines that fill 90 % of the wall time."""
    length = 0.9 * wall(share) / (2 * count)
    pitch = wall(share) / (2 * count)
    number = np.arange(2 * count)
    prm = number % 2 == 1
    starved = prm & (share == 0.5)
    return pd.DataFrame(
        {
            "engine": np.where(prm, "prm", "llm"),
            "step": number // 2,
            "start_s": number * pitch,
            "duration_s": length,
            "schedule_s": 0.1 * length,
            "prefill_tokens": np.where(prm, 60, 8),
            "decode_tokens": np.where(prm, 0, 16),
            "running": 16,
            "tokens_held": 1600,
            "blocks_total": 200,
            "blocks_active": 100,
            "blocks_cached": 60,
            "allocated": np.where(prm, 6, 2),
            "evicted": np.where(starved, 5, 0),
            "thrashed": np.where(starved, 4, 0),
            "thrash_events": np.where(starved, 1, 0),
            "recomputed_tokens_evicted": np.where(starved, 40, 0),
            "recomputed_tokens_preempted": 0,
            "recomputed_tokens_partial": np.where(prm, 4, 1),
        }
    )


def _spans(share, count=80):
    pitch = wall(share) / count
    starts = np.arange(count) * pitch + 0.9 * pitch
    kinds = np.where(np.arange(count) % 2, "strategy", "bookkeeping")
    return pd.DataFrame(
        {"lane": "search", "kind": kinds, "start_s": starts, "duration_s": 0.1 * pitch}
    )


def _requests():
    rows = [
        (engine, problem, 100, 90 if engine == "llm" else 95, 0.5 + i, 0)
        for engine in ("llm", "prm")
        for problem in PROBLEMS
        for i in range(5)
    ]
    names = ["engine", "problem_id", "prompt_tokens", "cached_tokens", "scheduled_s", "preemptions"]
    return pd.DataFrame(rows, columns=names)


def _nodes(seed):
    rows = [(p, str(k), [seed, k, k + 1]) for p in PROBLEMS for k in range(3)]
    return pd.DataFrame(rows, columns=["problem_id", "node_id", "token_ids"])
