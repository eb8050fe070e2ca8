"""Backends: the same rows wherever runs are carried out; of a dead worker nothing lost or twice."""

import os
import signal
from collections import Counter
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest

from tests.experiments.fakes import IDENTITY, Dying, broken, fake_result, stumbling
from workbench.errors import ConfigError
from workbench.experiments import backends
from workbench.experiments.backends import Backend
from workbench.experiments.execute import one_by_one
from workbench.experiments.plans import split_runs, sweep_config
from workbench.experiments.runs import TABLES, RunStore, compare
from workbench.experiments.study import run_replayed, run_sweep
from workbench.trace import read_table, write_table

TWO = Backend("processes", 2)
SMALL = sweep_config(
    "quick", num_problems=2, levels=(1,), n=4, beam_width=2, max_depth=3, shares=(0.08, 0.3),
    seeds=(0, 1), warmup_problems=0, max_num_seqs=8, max_step_tokens=48,
)  # fmt: skip
FAKE = sweep_config("quick", num_problems=2, shares=(0.1, 0.2, 0.3), seeds=(0, 1))
ITS_OWN = ["written_at", "folder", "machine_threads", "git_commit", "git_dirty"]
"""Columns of the rows of a replay that tell where and when it was made."""


def assert_same_replays(one, other) -> None:
    """Every table of both studies is the same, simulated seconds among them."""
    assert one.missing == other.missing == () and len(one.runs) == len(other.runs) > 0
    rows = [study.runs.drop(columns=ITS_OWN) for study in (one, other)]
    pd.testing.assert_frame_equal(*rows)
    for name in set(TABLES) - {"runs"}:
        tables = [study.table(name) for study in (one, other)]
        pd.testing.assert_frame_equal(*tables)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A replay of the tiny recording at six shares."""
    own = {"n": 4, "num_problems": 16}  # as it was recorded
    shares = (0.1, 0.15, 0.2, 0.3, 0.35, 0.4)
    config = sweep_config("quick", problems="tiny-16-n4", shares=shares, **own)
    return run_replayed(config, tmp_path_factory.mktemp("here"), progress=False)


def test_replays_on_two_processes_are_those_of_here(here, tmp_path, monkeypatch) -> None:
    """Where workers are asked for `here`, replays alone go to them."""
    started = Mock(wraps=backends._on_processes)
    monkeypatch.setattr(backends, "_on_processes", started)
    found = run_replayed(here.config, tmp_path, progress=False, backend=Backend("here", 2))
    assert_same_replays(here, found)
    assert started.call_count == 1


def test_a_sweep_on_two_processes_is_that_of_here_but_for_seconds(tmp_path) -> None:
    """Each seed on one of them."""
    assert_same_sweep(tmp_path, TWO)


def assert_same_sweep(tmp_path, backend) -> None:
    """Of four runs here and by a backend every node and count is the same."""
    one = run_sweep(SMALL, tmp_path / "here", progress=False)
    other = run_sweep(SMALL, tmp_path / "there", progress=False, backend=backend)
    assert len(one.runs) == len(other.runs) == 4
    found = compare(list(one.runs["folder"]), list(other.runs["folder"]))
    assert found.identical, found.first_difference


def assert_nothing_lost_or_twice(tmp_path, monkeypatch, backend) -> str:
    """Of one seed a worker dies once: all is stored; of the other all die: returns their error."""
    monkeypatch.setattr(backends, "ATTEMPTS", 2)
    (tmp_path / "begun").touch()
    given = {"execute": Dying(tmp_path), "progress": False, "backend": backend}
    found = run_sweep(FAKE, tmp_path / "runs", **given)
    begun = Counter((tmp_path / "begun").read_text().split())
    assert found.missing == ()
    again = {name for name, times in begun.items() if times == 2}
    assert sum(begun.values()) == 8 and len(again) == 2, begun
    failed = found.all_runs[found.all_runs["status"] != "finished"]
    assert list(failed["status"]) == ["failed"] and set(failed["name"]) < again
    assert list(failed["seed"]) == [1]
    return failed["error"].iloc[0]


def test_a_dead_worker_s_runs_are_done_again_and_no_other(tmp_path, monkeypatch) -> None:
    error = assert_nothing_lost_or_twice(tmp_path, monkeypatch, TWO)
    assert error.startswith("WorkerError: 2 workers died of it. BrokenProcessPool")


def test_a_group_is_tried_anew_after_each_run_that_it_stores(tmp_path, monkeypatch) -> None:
    """However often a worker dies: each death follows a finished run."""
    monkeypatch.setattr(backends, "ATTEMPTS", 2)
    found = run_sweep(FAKE, tmp_path, execute=stumbling, progress=False, backend=TWO)
    assert list(found.all_runs["status"]) == ["finished"] * 6


def test_an_error_in_a_worker_is_no_death_of_it(tmp_path) -> None:
    """It is raised as it would be here."""
    for backend in (Backend(), TWO):
        with pytest.raises(OSError, match="no space is left"):
            run_sweep(FAKE, tmp_path, execute=broken, progress=False, backend=backend)
    assert not any(tmp_path.iterdir())


def test_seconds_of_two_machines_are_never_compared(tmp_path) -> None:
    """A group that another machine began is refused by name; other groups and replays go on."""
    run = {"runs_dir": tmp_path, "execute": one_by_one(fake_result), "progress": False}
    begun = sweep_config("quick", num_problems=2, shares=(0.1,), seeds=(0,))
    (folder,) = run_sweep(begun, **run).folders
    rows = read_table(folder / "runs.parquet")
    write_table(rows.assign(machine="An H200"), folder / "runs.parquet")
    found = run_sweep(FAKE, **run).all_runs.set_index(["seed", "llm_share"])["error"]
    assert found.loc[1].isna().all() and pd.isna(found[0, 0.1])
    for share in (0.2, 0.3):
        assert "would be compared with those of split-0.100-seed0" in found[0, share]
        assert "measured on An H200. Go on there" in found[0, share]
    (folder / "runs.parquet").write_bytes(b"PAR1")  # damaged: it is measured anew
    again = run_sweep(begun, **run).runs
    assert again["status"].tolist() == ["finished"]


def test_a_stored_run_is_read_once_for_its_machine(tmp_path, monkeypatch) -> None:
    """Guards the cost of a study: not every run of a group again before each one."""
    read = Mock(wraps=backends.read_run)
    monkeypatch.setattr(backends, "read_run", read)
    run_sweep(FAKE, tmp_path, execute=one_by_one(fake_result), progress=False)
    times = Counter(call.args[0] for call in read.call_args_list)
    assert list(times.values()) == [1] * 4, "before the second and third of each seed"


def test_measured_groups_stay_whole_and_replays_are_dealt(tmp_path) -> None:
    """Runs of one seed go to one worker, replays in turn to each of so many as there are."""

    def dealt(backend: Backend, llm: str) -> list[list[tuple[int, float]]]:
        runs = dict.fromkeys(split_runs(FAKE), replace(IDENTITY, llm=llm))
        groups = backend.groups(RunStore(tmp_path), Dying(tmp_path), runs, {})
        return sorted(sorted((s.seed, s.llm_share) for s in group.runs) for group in groups)

    whole = [[(seed, share) for share in FAKE.shares] for seed in FAKE.seeds]
    assert dealt(TWO, "tiny") == dealt(Backend(), "replayed") == whole
    parts = dealt(TWO, "replayed")
    assert sorted(map(len, parts)) == [1, 1, 2, 2]
    assert sorted(chain(*parts)) == sorted(chain(*whole))


def test_a_backend_that_cannot_be_is_refused_by_name(monkeypatch, tmp_path, says) -> None:
    with pytest.raises(ConfigError, match=r"'rya'; allowed: .*Did you mean 'ray'"):
        Backend("rya")
    with pytest.raises(ConfigError, match=r"Backend\.workers is 0"):
        Backend("processes", 0)
    monkeypatch.setenv("WORKBENCH_BACKEND", "processes")
    monkeypatch.setenv("WORKBENCH_WORKERS", "3")
    assert Backend.usual() == Backend("processes", 3)
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    said = says("sweep", "--backend", "ray", "--runs", str(tmp_path), status=2)
    assert "needs ray: pip install -e '.[ray]'" in said
    monkeypatch.setattr(backends, "find_spec", lambda name: name)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="slurm needs srun"):
        Backend("slurm")
    assert not any(tmp_path.iterdir())


@pytest.fixture
def importable(monkeypatch, tmp_path) -> None:
    """Processes that others start find this project, and keep their notes out of it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))


@pytest.mark.slow
def test_a_ray_cluster_gives_what_is_got_here(here, tmp_path, monkeypatch, importable) -> None:
    """Replays, and a sweep but for its seconds; also where workers die in the middle."""
    ray = pytest.importorskip("ray", reason="Ray is an extra: pip install -e '.[ray]'")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        ray.init(cluster.address, log_to_driver=False)
        assert sum(node["Alive"] for node in ray.nodes()) == 2
        on = Backend("ray", 2)
        found = run_replayed(here.config, tmp_path / "replays", progress=False, backend=on)
        assert_same_replays(here, found)
        assert_same_sweep(tmp_path, on)
        assert "WorkerCrashedError" in assert_nothing_lost_or_twice(tmp_path, monkeypatch, on)
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_calls_are_made_by_processes_where_workers_are_asked_for_here() -> None:
    assert Backend("here", 1).map(os.getpid, [()]) == [os.getpid()]
    assert os.getpid() not in Backend("here", 2).map(os.getpid, [(), ()])


@pytest.mark.slow
def test_replays_by_submitit_are_those_of_here(here, tmp_path, importable, monkeypatch) -> None:
    """As jobs of this machine, in Slurm's place."""
    extra = "submitit is an extra: pip install -e '.[slurm]'"
    submitit = pytest.importorskip("submitit", reason=extra)
    monkeypatch.setattr(backends.shutil, "which", lambda name: name)
    monkeypatch.setattr(submitit, "AutoExecutor", partial(submitit.AutoExecutor, cluster="local"))
    on = Backend("slurm", 2)
    found = run_replayed(here.config, tmp_path / "runs", progress=False, backend=on)
    assert_same_replays(here, found)


def test_a_worker_has_as_many_threads_however_few_groups_are_left(tmp_path, monkeypatch) -> None:
    """Else the seconds of a study that goes on would not be comparable with those it has."""
    threads: list[int] = []
    monkeypatch.setattr(backends, "usable_cores", lambda: 4)
    monkeypatch.setattr(Backend, "each", lambda *own: threads.append(own[3].threads) or iter(()))
    for seeds, on in (((0, 1), Backend("processes")), ((0,), Backend("processes")), ((0,), TWO)):
        run_sweep(replace(FAKE, seeds=seeds), tmp_path, progress=False, backend=on)
    assert threads == [1, 1, 2]
    monkeypatch.setattr(backends, "total_memory", lambda: 8 << 30)
    shares = (0.001, *FAKE.shares)  # the first of which has no room
    big = replace(FAKE, seeds=(0,), shares=shares, total_memory="512MiB")
    here = {"execute": one_by_one(fake_result), "progress": False}
    for shares in ((), big.shares[:3]):  # what is stored already
        if shares:
            run_sweep(replace(big, shares=shares), tmp_path, **here)
        run_sweep(big, tmp_path, progress=False, backend=Backend("processes"))
    assert threads[3:] == [4, 4], "memory for one worker, whose group is as large as it was"


def test_a_worker_that_dies_between_calls_is_replaced() -> None:
    with ExitStack() as stack:
        submit, _ = backends._on_processes(backends.Needs(), stack)
        first = submit(os.getpid).result()
        os.kill(first, signal.SIGKILL)
        found = first
        for _ in range(20):
            with suppress(BrokenExecutor):  # the pool had not noticed yet
                found = submit(os.getpid).result()
                break
        assert found != first
