"""A model larger than memory is refused with the numbers, before its weights are read."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from tests.models.gguf_making import random_tensors, write_gguf
from tests.models.test_loading import folder, shapes
from workbench.errors import OutOfMemory
from workbench.models.folders import held_bytes, open_source
from workbench.models.loading import load_model, open_weights
from workbench.models.room import available_memory

__all__ = ["folder"]  # the fixture


def refuse_reading(*_: object) -> None:
    raise AssertionError("weights were read")


def test_available_memory_is_some_and_no_more_than_there_is() -> None:
    there_is = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 2**26 < available_memory() <= there_is


def test_a_model_larger_than_memory_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real or dummy; the message holds what is needed, what is there and what is missing."""
    monkeypatch.setattr("workbench.models.room.available_memory", lambda: 20_000)
    monkeypatch.setattr("workbench.models.weights.FolderWeights.read", refuse_reading)
    for name in (str(folder), f"dummy:{folder}"):
        with pytest.raises(OutOfMemory, match=r"weights take .* KiB \(torch.float32, .*missing"):
            load_model(name)


def test_the_published_sizes_are_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thesis's PRM as a dummy, in float32 on a machine with 24 GiB: no download, no wait."""
    monkeypatch.setattr("workbench.models.room.available_memory", lambda: 24 * 2**30)
    with pytest.raises(OutOfMemory, match=r"take 30\.0 GiB .* 24\.0 GiB .* are available"):
        load_model("dummy:llama-3.1-8b-prm")


def test_quantised_weights_count_as_they_are_stored(folder: Path, tmp_path: Path) -> None:
    """Numbers are counted in the type they will have, whatever the file's."""
    numbers = sum(t.size for t in random_tensors().values())
    matrices = sum(t.size for t in random_tensors().values() if t.ndim > 1)
    for kind, expected in (
        (Kind.F16, 4 * numbers),
        (Kind.Q4_0, matrices // 32 * 18 + 4 * (numbers - matrices)),
    ):
        path = write_gguf(tmp_path / f"{kind.name}.gguf", random_tensors(), kind)
        assert open_weights(open_source(path)).held_bytes(4) == held_bytes(str(path), 4) == expected
        assert held_bytes(f"dummy:{path}", 4) == 4 * numbers
    assert open_weights(folder).held_bytes(2) == held_bytes(str(folder), 2)
    assert held_bytes(str(folder), 2) == 2 * sum(map(math.prod, shapes().values()))


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
    monkeypatch.setattr("workbench.models.room._MEMINFO", meminfo)
    monkeypatch.setattr("workbench.models.room._MEMBERSHIP", membership)
    monkeypatch.setattr("workbench.models.room._CGROUPS", tmp_path / "cgroup")
    return tmp_path / "cgroup"


def limit_to(group: Path, names: tuple[str, str], limit: object, used: int, pages: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=True):
        (group / name).write_text(f"{value}\n")
    (group / "memory.stat").write_text(STATISTICS.format(pages))


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


@pytest.mark.parametrize(("names", "root"), [(V1, "memory"), (V2, "")])
def test_a_containers_limit_counts_beside_the_machines_memory(
    cgroups: Path, names: tuple[str, str], root: str
) -> None:
    """Its own, or that of a group around it; what it holds of files can be given back."""
    assert available_memory() == 1024 * MIB
    own, around = cgroups / root / "a" / "b", cgroups / root
    limit_to(around, names, 800 * MIB, 300 * MIB, 50 * MIB)
    assert available_memory() == 600 * MIB
    limit_to(own, names, 100 * MIB, 40 * MIB, 5 * MIB)
    assert available_memory() == 70 * MIB
    limit_to(own, names, 100 * MIB, 200 * MIB, 5 * MIB)
    assert available_memory() == 0


@pytest.mark.parametrize(
    ("names", "root", "limit"), [(V1, "memory", 9223372036854771712), (V2, "", "max")]
)
def test_a_group_without_a_limit_leaves_the_machines_memory(
    cgroups: Path, names: tuple[str, str], root: str, limit: object
) -> None:
    limit_to(cgroups / root / "a" / "b", names, limit, 40 * MIB, 0)
    assert available_memory() == 1024 * MIB
