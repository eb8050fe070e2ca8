"""What a reader of a sweep must be told: drift, mixed machines, other code."""

import pandas as pd

from workbench.experiments.health import remarks, sentinel_drift
from workbench.experiments.machine import git_state


def runs(speeds, **columns):
    """A sweep's rows: the sentinel's setting in three places, another setting beside it."""
    row = {"status": "finished", "machine": "m", "versions": "v", "seed": 0}
    row |= {"git_commit": git_state()["commit"]}
    rows = [
        row
        | {"run_id": f"r{k}", "role": role, "llm_share": share, "written_at": f"2026-01-01T0{k}"}
        for k, (role, share) in enumerate(
            [("sentinel", 0.3), ("measure", 0.5), ("measure", 0.3), ("sentinel", 0.3)]
        )
    ]
    return pd.DataFrame(rows).assign(tokens_per_s=speeds, **columns)


def test_drift_is_seen_on_the_sentinel_s_setting_alone():
    found = sentinel_drift(runs([100.0, 5.0, 100.0, 80.0]))
    assert list(found["run_id"]) == ["r0", "r2", "r3"]
    assert list(found["relative"]) == [1.0, 1.0, 0.8]
    assert "drifted by -20% to +0% over 3" in " ".join(remarks(runs([100.0, 5.0, 100.0, 80.0])))
    assert list(remarks(runs([100.0, 5.0, 100.0, 98.0]))) == []


def test_no_sentinel_no_drift():
    plain = runs([1.0, 2.0, 3.0, 4.0], role="measure")
    assert sentinel_drift(plain).empty
    assert sentinel_drift(pd.DataFrame()).empty
    assert list(remarks(plain)) == list(remarks(pd.DataFrame())) == []


def test_mixed_machines_and_other_code_are_said():
    mixed = runs([1.0] * 4, machine=["laptop", "laptop", "laptop", "H200"])
    assert "differ in machine: H200 / laptop" in " ".join(remarks(mixed))
    old = runs([1.0] * 4, git_commit="0123456789abcdef")
    assert "made at commit 0123456789ab" in " ".join(remarks(old))
