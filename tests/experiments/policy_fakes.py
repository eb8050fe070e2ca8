"""Runs of the study of policies without models: speed follows from the setting alone."""

from dataclasses import replace

from tests.experiments.fakes import fake_result
from workbench.errors import OutOfMemory
from workbench.experiments.execute import COUNTS, one_by_one
from workbench.experiments.plans import ALL, NONE, PolicyPlan, sweep_config
from workbench.experiments.runs import RunResult
from workbench.experiments.settings import RunSpec

BLOCK = {"llm": 8192, "prm": 32768}
PEAK = {"llm": 2**21, "prm": 2**23}  # bytes of active blocks
PLAN = PolicyPlan(3, 2, (0.5, 2.0), (0.08, 0.2, 0.3), 1, (0.2,), repeats=0)
CONFIG = sweep_config("quick", n=4, max_depth=3, seeds=(0, 1), warmup_problems=0)


def misses(spec: RunSpec) -> int:
    """Tokens computed again: none with plenty of memory, least at a share of 0.2, else."""
    if spec.get("budget") is None or spec.get("budget") >= 2:
        return 0
    best = {"first_come": 900, "phase_aware": 700, "marginal_value": 320}
    missed = best.get(spec.get("policy")) or 300 + round(4000 * abs(spec.get("kv_share") - 0.2))
    return missed // 2 if spec.get("technique") == ALL else missed


@one_by_one
def execute(spec: RunSpec) -> RunResult:
    """A run of known speed. A share of 0.08 is infeasible at half of W."""
    if (spec.get("kv_share"), spec.get("budget")) == (0.08, 0.5):
        raise OutOfMemory("A split of [14, 169] pages leaves 'llm' below the 21 it needs.")
    result = fake_result(replace(spec, llm_share=0.3))
    again, techniques = misses(spec), spec.get("technique") != NONE
    wall = (2.0 - 0.2 * techniques + again / 1000) * (1.01 if spec.repeat else 1.0)
    problems = result.tables["problems"]
    parts = problems["tokens"] * wall / problems["tokens"].sum()
    cells = {"wall_s": wall, "longest": 600, "kv_pages": spec.get("kv_bytes") // 32768}
    for engine, block in BLOCK.items():
        own = dict.fromkeys(COUNTS, 0) | {"prefill_tokens": 1000 + again // 2, "steps": 40}
        own |= {"decode_tokens": 1000, "recomputed_tokens_evicted": again // 2}
        own |= {"recomputed_tokens_partial": 100, "busy_s": 0.4 * wall, "block_bytes": block}
        own |= {"active_bytes": PEAK[engine], "final_share": 0.5}
        cells |= {f"{engine}_{name}": value for name, value in own.items()}
    tables = {**result.tables, "problems": problems.assign(wall_part_s=parts)}
    return RunResult(dict(result.measured) | cells, tables)
