"""Memory is what the machine has, or what a container leaves of it: in total, and now."""

import os

import pytest
import torch

from workbench.engine.memory import total_bytes
from workbench.experiments.provenance import memory_bytes
from workbench.host import available_memory, total_memory

MIB = 2**20
STATISTICS = (
    "anon 1\ninactive_file {0}\nactive_file {0}\ntotal_inactive_file {0}\ntotal_active_file {0}"
)
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


def test_memory_is_some_and_no_more_than_there_is():
    there_is = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 2**26 < available_memory() <= there_is
    assert 2**26 < total_memory() <= there_is


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """A machine with 1 GiB available, this process in a group of both versions."""
    files = {"_MEMINFO": "meminfo", "_MEMBERSHIP": "membership", "_CGROUPS": "cgroup"}
    for name, file in files.items():
        monkeypatch.setattr(f"workbench.host.{name}", tmp_path / file)
    (tmp_path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:  {2**20} kB\n")
    (tmp_path / "membership").write_text("4:cpu,memory:/a/b\n1:name=systemd:/\n0::/a/b\n")
    return tmp_path / "cgroup"


@pytest.mark.parametrize(
    ("names", "root", "endless"), [(V1, "memory", 9223372036854771712), (V2, "", "max")]
)
def test_a_containers_limit_counts_beside_the_machines_memory(cgroups, names, root, endless):
    """Its own, or that of a group around it; an engine's `memory` and a record take the same."""
    own, around = cgroups / root / "a" / "b", cgroups / root

    def limit_to(group, limit, used, pages):
        group.mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, (limit, used), strict=True):
            (group / name).write_text(f"{value}\n")
        (group / "memory.stat").write_text(STATISTICS.format(pages))

    limit_to(own, endless, 40 * MIB, 0)
    assert available_memory() == 1024 * MIB
    limit_to(around, 800 * MIB, 300 * MIB, 50 * MIB)
    assert available_memory() == 600 * MIB
    limit_to(own, 100 * MIB, 40 * MIB, 5 * MIB)
    assert available_memory() == 70 * MIB
    assert total_memory() == memory_bytes() == 100 * MIB
    assert total_bytes(0.5, torch.device("cpu")) == 50 * MIB
    limit_to(own, 100 * MIB, 200 * MIB, 5 * MIB)
    assert available_memory() == 0
    (own / "memory.stat").unlink()
    assert available_memory() == 100 * MIB, "its usage is not told"
