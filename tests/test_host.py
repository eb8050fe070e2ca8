"""Memory is what the machine has, or what a container leaves of it: in total, and now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workbench.engine.memory import total_bytes
from workbench.experiments.provenance import memory_bytes
from workbench.host import available_memory, total_memory


def test_memory_is_some_and_no_more_than_there_is() -> None:
    there_is = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 2**26 < available_memory() <= there_is
    assert 2**26 < total_memory() <= there_is


MIB = 2**20
STATISTICS = (
    "anon 1\ninactive_file {0}\nactive_file {0}\ntotal_inactive_file {0}\ntotal_active_file {0}"
)


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1 GiB available, this process in a group of both versions."""
    meminfo, membership = tmp_path / "meminfo", tmp_path / "membership"
    meminfo.write_text(f"MemTotal: 9 kB\nMemAvailable:  {2**20} kB\n")
    membership.write_text("4:cpu,memory:/a/b\n1:name=systemd:/\n0::/a/b\n")
    monkeypatch.setattr("workbench.host._MEMINFO", meminfo)
    monkeypatch.setattr("workbench.host._MEMBERSHIP", membership)
    monkeypatch.setattr("workbench.host._CGROUPS", tmp_path / "cgroup")
    return tmp_path / "cgroup"


def limit_to(group: Path, names: tuple[str, str], limit: object, used: int, pages: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=True):
        (group / name).write_text(f"{value}\n")
    (group / "memory.stat").write_text(STATISTICS.format(pages))


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


@pytest.mark.parametrize(
    ("names", "root", "endless"), [(V1, "memory", 9223372036854771712), (V2, "", "max")]
)
def test_a_containers_limit_counts_beside_the_machines_memory(
    cgroups: Path, names: tuple[str, str], root: str, endless: object
) -> None:
    """Its own, or that of a group around it; what it holds of files can be given back.

    An engine's `memory=0.5` and what a record says of the machine are of the same limit.
    """
    own, around = cgroups / root / "a" / "b", cgroups / root
    limit_to(own, names, endless, 40 * MIB, 0)
    assert available_memory() == 1024 * MIB
    limit_to(around, names, 800 * MIB, 300 * MIB, 50 * MIB)
    assert available_memory() == 600 * MIB
    limit_to(own, names, 100 * MIB, 40 * MIB, 5 * MIB)
    assert available_memory() == 70 * MIB
    assert total_memory() == memory_bytes() == 100 * MIB
    assert total_bytes(0.5) == 50 * MIB
    limit_to(own, names, 100 * MIB, 200 * MIB, 5 * MIB)
    assert available_memory() == 0
    (own / "memory.stat").unlink()
    assert available_memory() == 100 * MIB, "its usage is not told"
