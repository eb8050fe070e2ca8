"""Whether a search's tokens and scores are the same whatever the memory, batch and block size.

One search is run under settings that share nothing but the models, the problems and the seed; every
node of every tree is compared with the first setting's, token by token and score by score. Settings
without a share leave each engine only a few requests' worth of blocks, so that requests are
preempted all the time. A record holds the fraction of equal nodes. The first setting is searched
once more under each other instruction set of this host, in a process of its own.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tqdm.auto import tqdm

from workbench.bench.record import Row
from workbench.bench.search import REAL_PROBLEMS, TINY, make_workload, searched, sizes_of
from workbench.config import SweepConfig, parse_size
from workbench.engine.engine import Engine
from workbench.kernels.isa import ISA, environment, host_sets
from workbench.search.result import SearchResult

PROFILES = {"quick": 6, "default": 32, "full": 128}  # problems
Nodes = dict[tuple[str, str], tuple[tuple[int, ...], float]]  # problem, node -> tokens, score


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that settings deal out, and the longest request."""

    total: str = "64MiB"  # of both engines,
    budget: str = "memory"  # weights included, or "kv_memory": without
    max_model_len: int | None = None  # None: the model's own
    least_tokens: int = 2048  # an engine's positions when preemption is forced


REAL_ROOM = Room("2GiB", "kv_memory", max_model_len=2048, least_tokens=4096)


@dataclass(frozen=True, slots=True)
class Setting:
    """How one search is run; share None gives each engine the least memory it accepts."""

    share: float | None
    max_num_seqs: int
    block_size: int
    max_num_batched_tokens: int = 2048
    reuse_partial_blocks: bool = False

    @property
    def name(self) -> str:
        """The row's name in the record."""
        where = "preempting" if self.share is None else f"share{self.share}"
        sizes = f"seqs{self.max_num_seqs},block{self.block_size}"
        reuse = ",partial" if self.reuse_partial_blocks else ""
        return f"{where},{sizes},chunk{self.max_num_batched_tokens}{reuse}"

    def engine(self, model: str, share: float, room: Room) -> Engine:
        """An engine under this setting with its share of the memory."""
        given: dict[str, Any] = asdict(self) | {"max_model_len": room.max_model_len}
        if given.pop("share") is None:
            given["num_blocks"] = -(-room.least_tokens // self.block_size)
        else:
            given[room.budget] = int(share * parse_size(room.total))
        return Engine(model, activations_in_total=False, **given)


# Four splits, two batch sizes, two block sizes; then preemption forced; then partial blocks reused.
SETTINGS = (
    Setting(0.3, 64, 16),
    Setting(0.3, 16, 8, 256),
    Setting(0.08, 16, 16, 256),
    Setting(0.08, 64, 8),
    Setting(0.2, 64, 16),
    Setting(0.2, 16, 8, 256),
    Setting(0.5, 16, 16, 256),
    Setting(0.5, 64, 8),
    Setting(None, 64, 16),
    Setting(None, 64, 8, 256),
    Setting(0.3, 64, 16, reuse_partial_blocks=True),
    Setting(0.08, 16, 8, 256, reuse_partial_blocks=True),
    Setting(None, 64, 16, reuse_partial_blocks=True),
)
# The same splits and sizes in half as many, one with partial blocks: a search takes minutes.
REAL_SETTINGS = (
    Setting(0.3, 64, 16),
    Setting(0.08, 16, 8, 256, reuse_partial_blocks=True),
    Setting(0.2, 16, 16, 256),
    Setting(0.5, 64, 8),
    Setting(None, 64, 16, 256),
)


def run(
    profile: str = "default",
    llm: str = TINY,
    prm: str | None = None,
    seed: int = 0,
    problems: str | None = None,
) -> Iterator[Row]:
    """The rows of `workbench bench identity`."""
    count = (PROFILES if llm == TINY else REAL_PROBLEMS)[profile]
    yield from compare(*_plan(llm, prm, problems, count), seed)


def mode_of(settings: dict[str, Any]) -> dict[str, Any]:
    """What the record says of a run with these settings."""
    workload, _, room = _plan(settings["llm"], settings["prm"])
    memory = "total_memory" if room.budget == "memory" else room.budget
    return {"batch_invariant": True, memory: room.total} | sizes_of(workload)


def _plan(llm: str, *given: Any) -> tuple[SweepConfig, tuple[Setting, ...], Room]:
    if llm == TINY:
        return make_workload(llm, *given), SETTINGS, Room()
    return make_workload(llm, *given, max_depth=4), REAL_SETTINGS, REAL_ROOM


def compare(
    workload: SweepConfig, settings: Sequence[Setting], room: Room, seed: int = 0
) -> Iterator[Row]:
    """The workload under each setting, each tree beside the first, the base, which has no row of
    sameness; then the base under other instruction sets.
    """
    base: Nodes = {}
    for setting in tqdm(settings, desc="settings"):
        result = search(setting, workload, room, seed)
        nodes = nodes_of(result)
        if not base:
            base = nodes
            yield Row(f"base@{setting.name}", len(nodes), "nodes")
        else:
            same = equal_share(base, nodes)
            yield Row(f"identical@{setting.name}", same, "fraction", repeats=len(nodes))
        preempted = float(result.trace.steps["preempted"].sum())
        yield Row(f"preemptions@{setting.name}", preempted, "requests")
    for isa in host_sets():
        if isa != ISA.name:
            same = equal_share(base, nodes_under(isa, settings[0], workload, room, seed))
            yield Row(f"identical@isa_{isa}", same, "fraction", repeats=len(base))


def search(setting: Setting, workload: SweepConfig, room: Room, seed: int) -> SearchResult:
    """The one search, under a setting."""
    share = setting.share or 0.5
    llm = setting.engine(workload.llm, share, room)
    return searched(workload, llm, setting.engine(workload.prm, 1 - share, room), seed)


def nodes_of(result: SearchResult) -> Nodes:
    """What must be the same."""
    names = ("problem_id", "node_id", "token_ids", "score")
    columns = (result.tree[name].tolist() for name in names)
    return {(p, node): (tuple(ids), score) for p, node, ids, score in zip(*columns)}


def equal_share(first: Nodes, other: Nodes) -> float:
    """Nodes with the same id, tokens and score, over all nodes of both trees."""
    every = first.keys() | other.keys()
    return sum(first.get(node) == other.get(node) for node in every) / len(every)


def nodes_under(isa: str, *searched: Any) -> Nodes:
    """Of a search in a process that takes an instruction set; CalledProcessError if it fails."""
    done = subprocess.run(
        [sys.executable, "-c", "from workbench.bench.identity import tell; tell()"],
        input=pickle.dumps(searched),
        stdout=subprocess.PIPE,
        env=os.environ | environment(isa),
        check=True,
    )
    found: Nodes = pickle.loads(bytes.fromhex(done.stdout.decode().split()[-1]))
    return found


def tell() -> None:
    """The other process: reads what to search, writes the nodes in its last line."""
    nodes = nodes_of(search(*pickle.load(sys.stdin.buffer)))
    sys.stdout.write(f"\n{pickle.dumps(nodes).hex()}\n")
