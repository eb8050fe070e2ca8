"""Where runs and replays are carried out: here, by processes of this machine, by Ray or by Slurm.

A worker is sent a group of runs and stores each as it ends. The run folder is the only state, so
that a worker may die, and a study may end elsewhere than where it began. Runs whose seconds are
compared are of one group, and so of one machine.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import repeat, starmap
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, NamedTuple

import torch

from workbench.config import BACKENDS, Range, check
from workbench.errors import ConfigError, RunStoreError, WorkerError
from workbench.experiments.execute import Execute
from workbench.experiments.provenance import describe, machine_facts, runs_folder, this_code
from workbench.experiments.runs import FAILED, FINISHED, RunStore, held, read_run
from workbench.experiments.settings import COUNTED, Identity, RunSpec
from workbench.experiments.statistics import is_replayed
from workbench.host import total_memory, usable_cores
from workbench.search.rounds import Progress

HERE, PROCESSES, RAY, SLURM = BACKENDS
PACKAGES = {RAY: "ray", SLURM: "submitit"}
LEAST_REPLAYS = 6  # for which processes are started where measured runs are done here
ATTEMPTS = 3  # at a group whose workers die before another of its runs is stored
POLL_S = 0.1
OWN_BYTES = 1 << 30  # of a worker beside its runs: Python, kernels, a recording
DAY = 24 * 60  # minutes; submitit's own limit is five, and SBATCH_TIMELIMIT goes before both
NAME, WORKERS = "WORKBENCH_BACKEND", "WORKBENCH_WORKERS"

Submit = Callable[..., Any]  # a function and its arguments; returns what has done() and result()
IsDeath = Callable[[Exception], bool]  # of what result() raised: no error of the call, but its end


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that one worker carries out and stores. beside: stored ones that they stand beside.

    places: the folder of each run, and when it was made as this was planned, 0: there was none.
    largest: bytes of the models of the study's largest group, what is stored of it included.
    """

    store: RunStore
    execute: Execute
    runs: Mapping[RunSpec, Identity]
    places: Mapping[RunSpec, tuple[Path, int]]
    beside: Sequence[Path] = ()
    largest: int = 0

    @property
    def identity(self) -> Identity:
        """Of the first run; all are of one code, and all replayed or none."""
        return next(iter(self.runs.values()))

    def carry_out(self, problem: Exception | None = None) -> Iterator[tuple[RunSpec, int]]:
        """Carry out what is left; each run with how many of its problems are answered by now.

        What others store meanwhile is not begun. A failed run that is repeated is kept until then.
        problem: stored of all these runs in place of a result.
        """
        left, alike = dict(self.places), set[Path]()
        while left := {spec: place for spec, place in left.items() if _is_left(*place)}:
            now, wrong = [*left], problem or self._mixture(alike)
            for spec, outcome in zip(now, repeat(wrong)) if wrong else self.execute(now):
                if isinstance(outcome, Progress):
                    yield spec, outcome.answered
                else:
                    self.store.write(spec, self.runs[spec], outcome)
                    del left[spec]
                    yield spec, spec.config.num_problems

    def _mixture(self, alike: set[Path]) -> RunStoreError | None:
        """Why seconds of this machine must not be compared with those stored; None if they may.

        alike: folders known to hold none of another's, to which those found to hold none are added.
        """
        if is_replayed(self.identity.llm) or next(iter(self.runs)).role == COUNTED:
            return None
        own = [at for at, _ in self.places.values() if at.exists()]  # by a worker that died
        here = describe(machine_facts(next(iter(self.runs)).config.device))
        other = (each for each in own if each not in alike and held(each))
        for folder in (*(each for each in self.beside if each not in alike), *other):
            row = read_run(folder)
            if row["status"] == FINISHED and row["machine"] != here:
                return RunStoreError(
                    f"Seconds of {here} would be compared with those of {row['run_id']}, measured "
                    f"on {row['machine']}. Go on there, or begin anew here in another folder "
                    "(--runs DIR); --retry-failed repeats this run."
                )
            if row["status"] != FAILED:  # which another machine may repeat
                alike.add(folder)
        return None


class Needs(NamedTuple):
    """What one worker has: threads to compute with, bytes, GPUs."""

    threads: int = 1
    memory: int = OWN_BYTES
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Backend:
    """Where work is carried out, and by how many workers at once; None: as many as fit.

    Here runs are done one after the other in this process, but where workers are asked for, replays
    by so many processes: their seconds are simulated. ConfigError for a name unknown or without its
    package.
    """

    name: Annotated[str, BACKENDS] = HERE
    workers: Annotated[int | None, Range(1)] = None

    def __post_init__(self) -> None:
        check(self)
        package = PACKAGES.get(self.name)
        if package and find_spec(package) is None:
            raise ConfigError(
                f"The backend {self.name} needs {package}: pip install -e '.[{self.name}]'."
            )
        if self.name == SLURM and not shutil.which("srun"):
            raise ConfigError("The backend slurm needs srun; start it where sbatch is called.")

    @classmethod
    def usual(cls) -> Backend:
        """What WORKBENCH_BACKEND and WORKBENCH_WORKERS say."""
        workers: Any = os.environ.get(WORKERS) or None
        workers = int(workers) if workers and workers.isdigit() else workers
        return cls(os.environ.get(NAME) or HERE, workers)

    @property
    def environment(self) -> dict[str, str]:
        """What makes this the usual one, as in a notebook's process."""
        return {NAME: self.name, WORKERS: str(self.workers or "")}

    def groups(
        self,
        store: RunStore,
        execute: Execute,
        runs: Mapping[RunSpec, Identity],
        done: Mapping[RunSpec, Path],
    ) -> list[Group]:
        """The runs by whose seconds are compared, beside those that are done. Replays are dealt to
        as many workers as there may be: no machine has a part in their seconds.
        """
        hands = self.workers or (1 if self.name == HERE else usable_cores())
        dealt, beside = dict[Any, dict[RunSpec, Identity]](), dict[Any, list[Path]]()
        for spec, folder in done.items():
            beside.setdefault(spec.group, []).append(folder)
        sizes = Counter[Any]()
        for spec in (*runs, *done):
            sizes[spec.group] += spec.total_bytes
        for number, (spec, own) in enumerate(runs.items()):
            hand = number % hands if is_replayed(own.llm) else 0
            dealt.setdefault((spec.group, hand), {})[spec] = own
        groups, largest = [], max(sizes.values(), default=0)
        for (at, _), each in dealt.items():
            folders = {spec: store.folder(spec, own) for spec, own in each.items()}
            places = {spec: (folder, _made(folder)) for spec, folder in folders.items()}
            groups.append(Group(store, execute, each, places, beside.get(at, ()), largest))
        return groups

    def carry_out(self, groups: Sequence[Group]) -> Iterator[tuple[RunSpec, int]]:
        """Carry out all groups; each run with how many of its problems are answered by now.

        A worker has its part of this machine's cores; on a cluster one for replays, else as many as
        this process has threads. Runs of a group whose workers die are stored as failed.
        """
        if self.name == HERE:
            replays = sum(len(g.runs) for g in groups if is_replayed(g.identity.llm))
            if (self.workers or 1) > 1 and replays >= LEAST_REPLAYS:
                yield from replace(self, name=PROCESSES).carry_out(groups)
                return
            for group in groups:
                yield from group.carry_out()
            return
        left = {spec: place for group in groups for spec, place in group.places.items()}
        memory, gpus, threads = OWN_BYTES, 0, 1
        measured = [group for group in groups if not is_replayed(group.identity.llm)]
        if measured:
            gpus = int(any(spec.config.device != "cpu" for spec in left))
            # not of what is left: seconds are compared with those of as many threads
            memory += 0 if gpus else min(measured[0].largest, total_memory() // 2)  # as Searches
            threads = torch.get_num_threads()
        workers = self._workers(len(groups), memory, gpus)
        if self.name == PROCESSES:
            # as many with few groups left: seconds are compared with those of full strength
            threads = max(1, usable_cores() // self._workers(usable_cores(), memory, gpus))
        calls, needs = [(group, threads) for group in groups], Needs(threads, memory, gpus)

        def num_left(number: int) -> int:
            return sum(starmap(_is_left, groups[number].places.values()))

        for ended in self.each(_carry_out, calls, needs, workers, num_left):
            if ended and ended[1]:
                deque(groups[ended[0]].carry_out(ended[1]), maxlen=0)
            for spec in [spec for spec, (at, before) in left.items() if _made(at) != before]:
                del left[spec]
                yield spec, spec.config.num_problems

    def map(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What a function returns of each tuple of arguments. WorkerError where workers die."""
        several = self.name == HERE and (self.workers or 1) > 1
        on = replace(self, name=PROCESSES) if several else self
        workers = on._workers(len(calls), OWN_BYTES)
        found = dict(filter(None, on.each(function, calls, Needs(), workers)))
        for problem in (each for each in found.values() if isinstance(each, WorkerError)):
            raise problem
        return [found[number] for number in range(len(calls))]

    def each(
        self,
        function: Callable[..., Any],
        calls: Sequence[tuple[Any, ...]],
        needs: Needs,
        workers: int,
        num_left: Callable[[int], int] = lambda number: 1,
    ) -> Iterator[tuple[int, Any] | None]:
        """Number and result of each call as it ends, and None now and then. What a call raises is
        raised. The result is a WorkerError where ATTEMPTS workers died and as much of it was left.
        """
        if self.name == HERE or not calls:
            yield from ((number, function(*call)) for number, call in enumerate(calls))
            return
        waiting, running = deque((n, 0, num_left(n)) for n in range(len(calls))), dict[Any, Any]()
        with ExitStack() as stack:  # on an interrupt, what still runs is ended
            starts = {PROCESSES: _on_processes, RAY: _on_ray, SLURM: _on_slurm}
            submit, is_death = starts[self.name](needs, stack)
            while waiting or running:
                while waiting and len(running) < workers:
                    number, deaths, before = waiting.popleft()
                    running[submit(function, *calls[number])] = number, deaths, before
                yield None
                time.sleep(POLL_S)
                for future in [future for future in running if future.done()]:
                    number, deaths, before = running.pop(future)
                    try:
                        yield number, future.result()
                    except Exception as problem:
                        if not is_death(problem):
                            raise
                        left = num_left(number)
                        deaths = deaths + 1 if left == before else 1
                        told = f"{type(problem).__name__}: {problem}"
                        if deaths < ATTEMPTS:
                            waiting.append((number, deaths, left))
                        else:
                            yield number, WorkerError(f"{ATTEMPTS} workers died of it. {told}")

    def _workers(self, count: int, memory: int, gpus: int = 0) -> int:
        """How many are at once for so many calls; a cluster has a queue of its own."""
        if self.workers or self.name in PACKAGES:
            return self.workers or count
        return max(1, min(count, 1 if gpus else usable_cores(), total_memory() // 2 // memory))


def _is_left(folder: Path, before: int) -> bool:
    """Whether a run is to be carried out: it is as it was when planned, or cannot be read."""
    return _made(folder) == before or not held(folder)


def _made(folder: Path) -> int:
    """When a run folder was made, in nanoseconds; 0: there is none."""
    with suppress(FileNotFoundError):
        return folder.stat().st_mtime_ns
    return 0


def _on_processes(needs: Needs, stack: ExitStack) -> tuple[Submit, IsDeath]:
    """Processes, each the only one of its pool: one that dies takes no other with it."""
    last = dict[ProcessPoolExecutor, Future[Any]]()

    def submit(function: Callable[..., Any], *given: Any) -> Any:
        for pool in [pool for pool, call in last.items() if call.done()]:
            with suppress(BrokenExecutor):  # its worker died, at a call or without one
                last[pool] = pool.submit(function, *given)
                return last[pool]
        pool = ProcessPoolExecutor(1, get_context("spawn"), _follow_parent)
        stack.callback(_end, pool)
        last[pool] = pool.submit(function, *given)
        return last[pool]

    return submit, lambda problem: isinstance(problem, BrokenExecutor)


def _end(pool: ProcessPoolExecutor) -> None:
    for process in [*pool._processes.values()]:
        process.kill()
    pool.shutdown()


def _on_ray(needs: Needs, stack: ExitStack) -> tuple[Submit, IsDeath]:
    """Tasks of the cluster that RAY_ADDRESS names or that runs here, else of one made here."""
    import ray  # noqa: PLC0415  an optional extra
    from ray.exceptions import RayError, RayTaskError  # noqa: PLC0415

    if not ray.is_initialized():
        ray.init()
    how = {"num_cpus": needs.threads, "memory": needs.memory, "num_gpus": needs.gpus}

    def submit(function: Callable[..., Any], *given: Any) -> Any:
        sent = ray.remote(max_retries=0, **how)(function).remote(*given)
        stack.callback(ray.cancel, sent, force=True)
        return sent.future()

    return submit, lambda told: isinstance(told, RayError) and not isinstance(told, RayTaskError)


def _on_slurm(needs: Needs, stack: ExitStack) -> tuple[Submit, IsDeath]:
    """Jobs; SBATCH_PARTITION, SBATCH_TIMELIMIT and others of sbatch's own say more of them."""
    import submitit  # noqa: PLC0415  an optional extra
    from submitit.core.utils import FailedJobError, UncompletedJobError  # noqa: PLC0415

    executor = submitit.AutoExecutor(runs_folder() / ".slurm")
    size = {"mem_gb": math.ceil(needs.memory / 2**30), "timeout_min": DAY}
    size |= {"cpus_per_task": needs.threads, "gpus_per_node": needs.gpus}
    executor.update_parameters(name="workbench", **size)

    def submit(*given: Any) -> Any:
        job = executor.submit(*given)
        stack.callback(job.cancel, check=False)
        return job

    def is_death(problem: Exception) -> bool:  # a failed job is one whose call raised
        return isinstance(problem, UncompletedJobError) and not isinstance(problem, FailedJobError)

    return submit, is_death


# -- in a worker --


def _carry_out(group: Group, threads: int) -> None:
    """Carry out what is left of a group; its runs fail where this is other code than was asked."""
    torch.set_num_threads(threads)
    asked, own = group.identity.code, this_code(is_replayed(group.identity.llm))["code"]
    told = f"A worker has other code ({own}) than was asked for ({asked}); give all one commit."
    deque(group.carry_out(None if own == asked else RunStoreError(told)), maxlen=0)


def _follow_parent() -> None:
    """An interrupt is for the parent to handle; where that is gone, so is its worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent: Any = parent_process()

    def end_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    Thread(target=end_with_parent, daemon=True).start()
