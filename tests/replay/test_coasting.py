"""Steps that only decode, taken many at a time: the same rows as one by one, to the last bit."""

import random

import pytest

from workbench.replay.memory import POLICIES
from workbench.replay.scheduling import ReplayScheduler
from workbench.replay.what_if import what_if

TABLES = ("steps", "requests", "nodes", "spans")


def drawn_settings(draw: random.Random) -> dict:
    """Memory from one request's to plenty, few and many rows a step, every policy or none."""
    settings = {
        "device": "rtx-4090",
        "block_size": draw.choice([1, 2, 3, 8, 16, 32]),
        "max_num_seqs": draw.choice([1, 2, 5, 8, 40]),
        "max_num_batched_tokens": draw.choice([40, 100, 700]),
        "min_problem_batch": draw.choice([1, 2, 3]),
        "kv_memory": draw.choice(["1600KiB", "2MiB", "4MiB", "40MiB"]),
        "kv_share": draw.choice([0.2, 0.24]),
        "reuse_partial_blocks": draw.random() < 0.3,
    }
    policy = draw.choice([None, *POLICIES])
    if policy is not None and not POLICIES[policy]().keeps_split:
        del settings["kv_share"]
    return settings | {"policy": policy}


def rows_of(found) -> list:
    """All tables, times and all."""
    return [getattr(found.trace, name) for name in TABLES]


@pytest.mark.parametrize("seed", range(16))
def test_coasting_changes_no_row(measured, monkeypatch, seed) -> None:
    """Preemptions, refusals, arenas, tiny blocks: with and without, all tables are equal."""
    settings = drawn_settings(random.Random(seed))
    coasted = rows_of(what_if(measured.answers, **settings))
    with monkeypatch.context() as patched:
        patched.setattr(ReplayScheduler, "plan_decodes", lambda self: None)
        stepped = rows_of(what_if(measured.answers, **settings))
    for name, one, other in zip(TABLES, coasted, stepped, strict=True):
        assert one.equals(other), f"{name} with {settings}"


def test_most_steps_of_a_search_coast(measured, monkeypatch) -> None:
    """With room for all, a decision is asked for at most twice a round."""
    decided = []
    schedule = ReplayScheduler.schedule

    def counting(self):
        decided.append(1)
        return schedule(self)

    monkeypatch.setattr(ReplayScheduler, "schedule", counting)
    found = what_if(measured.answers, device="h100", kv_memory="40MiB", max_num_seqs=64)
    assert len(decided) < len(found.trace.steps) / 4
