"""Runs without models: tables of the real shape, made of the run's settings alone."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from workbench.experiments.runs import RunResult, RunStore
from workbench.experiments.settings import Identity
from workbench.trace import frame

IDENTITY = Identity("llm0", "prm0", "problems0", "0.1.0", 1)
STEP_COLUMNS = tuple(frame("steps", []).columns)


def fake_result(spec):
    """A finished run: speed peaks at a share of 0.3, every node's tokens follow from its path."""
    problems = [_problem(spec, k) for k in range(spec.config.num_problems)]
    spans = [("", "search", kind, 0.1 * k, 0.05) for k, kind in enumerate(("strategy", "waiting"))]
    frames = {
        "problems": pd.DataFrame(problems).astype({"correct": "boolean"}),
        "nodes": pd.DataFrame([node for p in problems for node in _nodes(spec, p["problem_id"])]),
        "steps": pd.DataFrame([_step(spec, e, k) for e in ("llm", "prm") for k in range(6)]),
        "requests": frame("requests", []),
        "spans": pd.DataFrame(spans, columns=["run_id", "lane", "kind", "start_s", "duration_s"]),
    }
    tokens, wall = sum(p["tokens"] for p in problems), sum(p["wall_part_s"] for p in problems)
    measured = {"wall_s": wall, "sampled_tokens": tokens, "tokens_per_s": tokens / wall}
    measured |= {"problems_per_min": 60 * len(problems) / wall, "accuracy": 0.5}
    measured |= {"steady_tokens_per_s": tokens / wall, "steady_problems_per_min": 1.0}
    for engine in ("llm", "prm"):
        size = spec.llm_bytes if engine == "llm" else spec.prm_bytes
        cells = {"kv_tokens": size // 2048, "blocks": size // 2**15, "busy_s": 0.4 * wall}
        cells |= {"tokens_per_busy_s": 100.0, "query_tokens": 1000, "hit_tokens": 900}
        measured |= {f"{engine}_{name}": value for name, value in cells.items()}
    return RunResult(measured, frames)


def store_fake(root, spec, identity=IDENTITY):
    """A finished fake run, stored; returns its folder."""
    return RunStore(root).write(spec, identity, fake_result(spec))


def _problem(spec, k):
    tokens = 100 + 10 * k + spec.seed
    seconds = tokens * (1 + 4 * abs(spec.llm_share - 0.3)) / 1000
    row = {"run_id": "", "problem_id": f"p{k}", "level": 1 + k % 5, "subject": "arithmetic"}
    row |= {"predicted": "1", "answer": "1", "correct": k % 2 == 0, "tokens": tokens}
    row |= {"iterations": 3, "seconds": 2 * seconds, "wall_part_s": seconds}
    return row | {"prm_tokens_computed": 5 * tokens, "finished": True}


def _nodes(spec, problem_id):
    for path in ("0", "1", "0/0"):
        seed = hashlib.sha256(f"{spec.seed}{problem_id}{path}".encode()).digest()
        row = {"run_id": "", "problem_id": problem_id, "node_id": path, "parent_id": path[:-2]}
        row |= {"path": path, "depth": len(path) // 2 + 1, "beam": 0, "step_tokens": 3}
        row |= {"total_tokens": 3, "score": seed[3] / 256, "kept": path != "1"}
        yield row | {"finished": path == "0/0", "token_ids": list(seed[:3])}


def _step(spec, engine, k):
    row = dict.fromkeys(STEP_COLUMNS, 0) | {"run_id": "", "engine": engine, "step": k}
    total = (spec.llm_bytes if engine == "llm" else spec.prm_bytes) // 2**15
    row |= {"start_s": 0.1 * k, "duration_s": 0.05, "schedule_s": 0.001, "decode_tokens": 10}
    row |= {"blocks_total": total, "blocks_active": total // 2, "blocks_free": total - total // 2}
    return row | {"prefill_tokens": 20, "query_tokens": 100, "hit_tokens": 80, "evicted": k}


@dataclass
class Dying:
    """Notes fake runs as they begin; dies once in seed 0's second run, always in seed 1's last."""

    notes: Path

    def __call__(self, specs):
        for spec in specs:
            begun = (self.notes / "begun").read_text().split()
            with (self.notes / "begun").open("a") as file:
                file.write(f"{spec.name}\n")
            before = [name for name in begun if name.endswith(f"seed{spec.seed}")]
            if (spec.seed, len(before)) == (0, 1) or (spec.seed == 1 and spec == specs[-1]):
                os._exit(1)
            yield spec, fake_result(spec)


def stumbling(specs):
    """Carries out one fake run; then its process ends, where there are more."""
    yield specs[0], fake_result(specs[0])
    if len(specs) > 1:
        os._exit(1)


def broken(specs):
    """Cannot begin."""
    raise OSError("no space is left")
