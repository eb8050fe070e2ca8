"""Runs of the study of policies without models: speed follows from the setting alone."""

from dataclasses import replace

from tests.experiments.fakes import fake_result
from workbench.errors import OutOfMemory
from workbench.experiments.plan import RunSpec
from workbench.experiments.policy_plan import STATIC, PolicyPlan, PolicySpec
from workbench.experiments.policy_techniques import ALL, NONE
from workbench.experiments.profiles import sweep_config
from workbench.experiments.record import RunResult
from workbench.experiments.run import COUNTS, ENGINES

BLOCK = {"llm": 8192, "prm": 32768}
PEAK = {"llm": 2**21, "prm": 2**23}  # bytes of active blocks
PLAN = PolicyPlan(3, 2, 1, (0.5, 2.0), (0.08, 0.2, 0.3), (0.5,))
CONFIG = sweep_config("quick", n=4, max_depth=3, seeds=(0, 1), warmup_problems=0)


def misses(spec: PolicySpec) -> int:
    """Tokens computed again: none with plenty of memory, least at a share of 0.2, else."""
    if spec.budget is None or spec.budget >= 2:
        return 0
    best = {"first_come": 900, "phase_aware": 700, "marginal_value": 320}
    missed = best.get(spec.policy) or 300 + round(4000 * abs((spec.kv_share or 0) - 0.2))
    return missed // 2 if spec.technique == ALL else missed


def execute(spec: RunSpec) -> RunResult:
    """What policy_run.execute answers. A share of 0.08 is infeasible at half of W."""
    assert isinstance(spec, PolicySpec)
    if spec.policy == STATIC and spec.kv_share == 0.08 and spec.budget == 0.5:
        raise OutOfMemory("A split of [14, 169] pages leaves 'llm' below the 21 it needs.")
    result = fake_result(replace(spec, llm_share=0.3))
    again, techniques = misses(spec), spec.technique != NONE
    wall = 2.0 - 0.2 * techniques + again / 1000
    problems = result.tables["problems"]
    parts = problems["tokens"] * wall / problems["tokens"].sum()
    tables = {**result.tables, "problems": problems.assign(wall_part_s=parts)}
    return RunResult(dict(result.measured) | measured(spec, wall, again), tables)


def measured(spec: PolicySpec, wall: float, again: int) -> dict[str, object]:
    """Cells of the runs row that the study reads."""
    cells: dict[str, object] = {"wall_s": wall, "longest": 600, "kv_pages": spec.kv_bytes // 32768}
    for engine in ENGINES:
        cells |= {f"{engine}_{name}": 0 for name in COUNTS}
        computed = {"prefill_tokens": 1000 + again // 2, "decode_tokens": 1000, "steps": 40}
        computed |= {"recomputed_tokens_evicted": again // 2, "recomputed_tokens_partial": 100}
        cells |= {f"{engine}_{name}": count for name, count in computed.items()}
        cells |= {f"{engine}_busy_s": 0.4 * wall, f"{engine}_block_bytes": BLOCK[engine]}
        cells |= {f"{engine}_active_bytes": PEAK[engine], f"{engine}_final_share": 0.5}
    return cells
