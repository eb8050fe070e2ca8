"""The recorded start of a run is where its arena starts."""

from dataclasses import replace

import pytest

from tests.experiments.policy_fakes import CONFIG, PEAK, PLAN
from workbench.experiments.policy_plan import ELASTIC, WorkingSet, policy_config, tight_runs
from workbench.experiments.policy_run import make_arena
from workbench.experiments.policy_techniques import NONE
from workbench.experiments.starting_share import starting_share

NEED = WorkingSet(PEAK["llm"], PEAK["prm"], longest=600)


@pytest.mark.parametrize("budget", PLAN.budgets)
def test_an_elastic_run_records_the_split_that_its_arena_starts_with(budget):
    """Guards the column llm_share of runs whose policy starts from its own split."""
    specs = tight_runs(policy_config(CONFIG, PLAN), PLAN, NEED)
    own = (budget, ELASTIC, NONE)
    spec = next(s for s in specs if (s.budget, s.policy, s.technique) == own)
    arena = make_arena(spec)
    started = arena.target["llm"] / arena.num_pages
    assert starting_share(spec.config, spec.kv_bytes, None) == started
    kv = spec.llm_bytes - weights_of(spec)
    assert kv == round(started * spec.kv_bytes)
    assert spec.llm_share == pytest.approx(spec.llm_bytes / spec.total_bytes, abs=1e-5)


def weights_of(spec) -> int:
    """Bytes of the LLM beside its KV: what a run with nearly no KV of its own has."""
    return replace(spec, kv_bytes=0, kv_share=0.5).llm_bytes


def test_a_share_that_is_given_is_the_share():
    """And one of a memory that holds no arena is no error: the run itself will tell."""
    assert starting_share(CONFIG, 2**20, 0.3) == 0.3
    assert 0 < starting_share(CONFIG, 1, None) < 1
