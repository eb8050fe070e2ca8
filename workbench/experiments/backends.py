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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, NamedTuple

import torch

from workbench.config import Range, check
from workbench.errors import ConfigError, RunStoreError, WorkbenchError, WorkerError
from workbench.experiments import execute
from workbench.experiments.execute import Execute
from workbench.experiments.provenance import describe, machine_facts, runs_folder, this_code
from workbench.experiments.runs import FINISHED, RunResult, RunStore, held, read_run
from workbench.experiments.settings import COUNTED, Identity, RunSpec
from workbench.host import total_memory, usable_cores
from workbench.search.rounds import Progress

BACKENDS = HERE, PROCESSES, RAY, SLURM = "here", "processes", "ray", "slurm"
PACKAGES = {RAY: "ray", SLURM: "submitit"}
ATTEMPTS = 3  # at a group whose workers die
POLL_S = 0.1
OWN_BYTES = 2 << 30  # of a worker beside its runs: Python, kernels, a recording
DAY = 24 * 60  # minutes; submitit's own limit is five, and SBATCH_TIMELIMIT goes before both
NAME, WORKERS = "WORKBENCH_BACKEND", "WORKBENCH_WORKERS"

Submit = Callable[..., Any]  # a function and its arguments; returns what has done() and result()


def one_by_one(function: Callable[[RunSpec], RunResult], specs: Sequence[RunSpec]) -> Iterable[Any]:
    """execute.one_by_one as a worker can be sent it: partial(one_by_one, function)."""
    return execute.one_by_one(function)(specs)


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that one worker carries out and stores. beside: those stored that they stand beside."""

    store: RunStore
    execute: Execute
    runs: Mapping[RunSpec, Identity]
    beside: Sequence[Path] = ()

    @property
    def left(self) -> list[RunSpec]:
        """The runs that are not stored."""
        return [s for s, own in self.runs.items() if not held(self.store.stored(s, own))]

    def carry_out(self, most: float = math.inf) -> Iterator[tuple[RunSpec, int]]:
        """Carry out what is left; each run with how many of its problems are answered by now.

        most: bytes of the runs that are carried out together, where it is more than one.
        """
        if problem := self._mixture():
            yield from self.give_up(problem)
        left = self.left
        while left:
            sizes = accumulate(spec.total_bytes for spec in left)
            count = max(1, sum(size <= most for size in sizes))
            together, left = left[:count], left[count:]
            for spec, outcome in self.execute(together):
                now = spec.config.num_problems
                if isinstance(outcome, Progress):
                    now = outcome.answered
                else:
                    self.store.write(spec, self.runs[spec], outcome)
                yield spec, now

    def give_up(self, problem: Exception) -> Iterator[tuple[RunSpec, int]]:
        """Store a failed row of each run that is left."""
        for spec in self.left:
            self.store.write(spec, self.runs[spec], problem)
            yield spec, spec.config.num_problems

    def _mixture(self) -> RunStoreError | None:
        """What stands against comparing seconds of this machine with those of the runs beside and
        of the group's own, which another worker may have begun.
        """
        spec, identity = next(iter(self.runs.items()))
        if spec.role == COUNTED or _is_replayed(identity):
            return None
        own = (self.store.stored(*run) for run in self.runs.items())
        here = describe(machine_facts())
        for row in map(read_run, (*self.beside, *filter(None, own))):
            if row["status"] == FINISHED and row["machine"] != here:
                return RunStoreError(
                    f"Seconds of {here} would be compared with those of {row['run_id']}, measured "
                    f"on {row['machine']}. Go on there, or begin anew here in another folder "
                    "(--runs DIR); --retry-failed repeats this run."
                )
        return None


class Needs(NamedTuple):
    """What one worker has: threads to compute with, bytes, GPUs."""

    threads: int = 1
    memory: int = OWN_BYTES
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Backend:
    """Where work is carried out, and by how many workers at once; None: as many as fit.

    cluster: what submitit submits to; "local" starts processes in Slurm's place. ConfigError for an
    unknown name, or one whose package is not installed.
    """

    name: Annotated[str, BACKENDS] = HERE
    workers: Annotated[int | None, Range(1)] = None
    cluster: str = SLURM

    def __post_init__(self) -> None:
        check(self)
        package = PACKAGES.get(self.name)
        if package and find_spec(package) is None:
            raise ConfigError(
                f"The backend {self.name} needs {package}: pip install 'workbench[{self.name}]'."
            )
        if self.name == self.cluster and not shutil.which("srun"):
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
        stored: Iterable[tuple[RunSpec, Path]],
    ) -> list[Group]:
        """The runs by whose seconds are compared; replays, which no machine tells apart, dealt to
        as many workers as there may be.
        """
        hands = 1 if self.name == HERE else self.workers or usable_cores()
        dealt, beside = dict[Any, dict[RunSpec, Identity]](), dict[Any, list[Path]]()
        for spec, folder in stored:
            beside.setdefault(spec.group, []).append(folder)
        for number, (spec, own) in enumerate(runs.items()):
            hand = number % hands if _is_replayed(own) else 0
            dealt.setdefault((spec.group, hand), {})[spec] = own
        return [Group(store, execute, own, beside.get(at, ())) for (at, _), own in dealt.items()]

    def carry_out(self, groups: Sequence[Group]) -> Iterator[tuple[RunSpec, int]]:
        """Carry out all groups; each run with how many of its problems are answered by now.

        A replay has one thread, a measured group all that a process here has, or its part of this
        machine's. Runs of a group whose workers die are stored as failed.
        """
        if self.name == HERE:
            for group in groups:
                yield from group.carry_out()
            return
        left = {g.store.folder(s, own): s for g in groups for s, own in g.runs.items()}
        specs = [spec for group in groups for spec in group.runs]
        most, needs = max((spec.total_bytes for spec in specs), default=0), Needs()
        workers = self._workers(len(groups), OWN_BYTES)
        if not all(_is_replayed(own) for group in groups for own in group.runs.values()):
            on_gpu = any(spec.config.device != "cpu" for spec in specs)
            alone = on_gpu and self.name == PROCESSES  # the others tell workers their GPUs
            workers = self._workers(1 if alone else len(groups), OWN_BYTES + most)
            sharing = workers if self.name == PROCESSES else 1
            whole = max(sum(spec.total_bytes for spec in group.runs) for group in groups)
            most = max(most, min(whole, total_memory() // 2 // sharing))
            threads = torch.get_num_threads() if sharing == 1 else usable_cores() // sharing
            needs = Needs(max(1, threads), OWN_BYTES + most * (not on_gpu), int(on_gpu))
        calls = [(group, needs.threads, most) for group in groups]
        for ended in self.each(_carry_out, calls, needs, workers):
            if ended and ended[1]:
                deque(groups[ended[0]].give_up(ended[1]), maxlen=0)
            for folder in [folder for folder in left if folder.exists()]:
                spec = left.pop(folder)
                yield spec, spec.config.num_problems

    def map(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What a function returns of each tuple of arguments. WorkerError where workers die."""
        found = dict[int, Any]()
        for ended in self.each(function, calls, Needs(), self._workers(len(calls), OWN_BYTES)):
            if ended and isinstance(ended[1], WorkerError):
                raise ended[1]
            if ended:
                found[ended[0]] = ended[1]
        return [found[number] for number in range(len(calls))]

    def each(
        self,
        function: Callable[..., Any],
        calls: Sequence[tuple[Any, ...]],
        needs: Needs,
        workers: int,
    ) -> Iterator[tuple[int, Any] | None]:
        """Number and result of each call as it ends, and None now and then. The result is a
        WorkerError where ATTEMPTS workers died; what the workbench raises in one is raised.
        """
        if self.name == HERE:
            yield from ((number, function(*call)) for number, call in enumerate(calls))
            return
        waiting, running = deque((number, 1) for number in range(len(calls))), dict[Any, Any]()
        with ExitStack() as stack:  # on an interrupt, what still runs is ended
            begin = {PROCESSES: _on_processes, RAY: _on_ray, SLURM: partial(_on_slurm, self.cluster)}
            submit = begin[self.name](needs, stack)
            while waiting or running:
                while waiting and len(running) < workers:
                    number, attempt = waiting.popleft()
                    running[submit(function, *calls[number])] = number, attempt
                yield None
                time.sleep(POLL_S)
                for future in [each for each in running if each.done()]:
                    number, attempt = running.pop(future)
                    try:
                        yield number, future.result()
                    except WorkbenchError:
                        raise
                    except Exception as problem:
                        told = f"{type(problem).__name__}: {problem}"
                        if attempt < ATTEMPTS:
                            waiting.append((number, attempt + 1))
                        else:
                            yield number, WorkerError(f"{ATTEMPTS} workers died of it. {told}")

    def _workers(self, count: int, memory: int) -> int:
        """How many are at once for so many calls; a cluster has a queue of its own."""
        if self.workers or self.name in PACKAGES:
            return self.workers or count
        return max(1, min(count, usable_cores(), total_memory() // 2 // memory))


def _on_processes(needs: Needs, stack: ExitStack) -> Submit:
    """A process for each call: one that dies takes no other with it."""

    def submit(function: Callable[..., Any], *given: Any) -> Any:
        pool = ProcessPoolExecutor(1, get_context("spawn"), _begin)
        future = pool.submit(function, *given)
        for process in pool._processes.values():
            stack.callback(process.kill)
        pool.shutdown(wait=False)  # when the call has ended
        return future

    return submit


def _on_ray(needs: Needs, stack: ExitStack) -> Submit:
    """Tasks of the cluster that RAY_ADDRESS names or that runs here, else of one made here."""
    import ray  # noqa: PLC0415  an optional extra

    if not ray.is_initialized():
        ray.init()
    how = {"num_cpus": needs.threads, "memory": needs.memory, "num_gpus": needs.gpus}

    def submit(function: Callable[..., Any], *given: Any) -> Any:
        sent = ray.remote(max_retries=0, **how)(function).remote(*given)
        stack.callback(ray.cancel, sent, force=True)
        return sent.future()

    return submit


def _on_slurm(cluster: str, needs: Needs, stack: ExitStack) -> Submit:
    """Jobs; SBATCH_PARTITION, SBATCH_TIMELIMIT and others of sbatch's own say more of them."""
    import submitit  # noqa: PLC0415  an optional extra

    executor = submitit.AutoExecutor(runs_folder() / ".slurm", cluster=cluster)
    size = {"mem_gb": math.ceil(needs.memory / 2**30), "timeout_min": DAY}
    size |= {"cpus_per_task": needs.threads, "gpus_per_node": needs.gpus}
    executor.update_parameters(name="workbench", **size)

    def submit(*given: Any) -> Any:
        job = executor.submit(*given)
        stack.callback(job.cancel, check=False)
        return job

    return submit


def _is_replayed(identity: Identity) -> bool:
    return identity.llm == "replayed"


# -- in a worker --


def _carry_out(group: Group, threads: int, most: int) -> None:
    """Carry out what is left of a group. RunStoreError where this is other code than was asked."""
    torch.set_num_threads(threads)
    asked = next(iter(group.runs.values()))
    if (code := this_code(_is_replayed(asked))["code"]) != asked.code:
        raise RunStoreError(
            f"A worker has other code ({code}) than the study was begun with ({asked.code}); have "
            "every machine use the same commit."
        )
    deque(group.carry_out(most), maxlen=0)


def _begin() -> None:
    """An interrupt is for the parent to handle; where that is gone, so is its worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    Thread(target=follow, daemon=True).start()
