"""Whether a search's tokens and scores are the same whatever the memory, batch and block size.

One search is run under settings that share nothing but the models, the problems and the seed; every
node of every tree is compared with the first setting's, token by token and score by score. Settings
without a share leave each engine blocks for a few requests, which are preempted all the time. In
those of a policy both models divide a small memory by it; techniques are those of notebook 08. A
record holds the fraction of equal nodes. The first setting is searched once more under each other
instruction set of this host, in a process of its own.

The first of the embedded pair's problems are also searched over `transformers`, which computes each
request alone, sampled and greedy: other sums, so scores need not be equal to the last bit.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tqdm.auto import tqdm

from workbench.bench.record import Row
from workbench.bench.search import TINY, make_workload, roomy_engine, searched, sizes_of
from workbench.config import POLICIES, SweepConfig
from workbench.engine.foreign import TransformersEngine
from workbench.errors import BrokenLaw
from workbench.experiments.execute import Pair
from workbench.experiments.memory import ENGINES
from workbench.experiments.plans import ALL, ELASTIC, TECHNIQUES
from workbench.experiments.settings import RunSpec
from workbench.experiments.statistics import bootstrap_mean
from workbench.kernels.isa import ISA, environment, host_sets
from workbench.search.result import SearchResult

PROFILES = {"quick": 6, "default": 32, "full": 128}  # problems
REAL_PROBLEMS = {"quick": 2, "default": 8, "full": 8}  # of models of true size
NEAR = 1e-4  # scores of two programs that are one
FEW = 12  # problems that are searched over transformers, too: half a minute each
Nodes = dict[tuple[str, str], tuple[tuple[int, ...], float]]  # problem, node -> tokens, score


@dataclass(frozen=True, slots=True)
class Setting:
    """How one search is run. tokens: where no share is given, the positions of each engine's cache,
    so few that requests are preempted.
    """

    share: float | None
    max_num_seqs: int
    block_size: int
    max_num_batched_tokens: int = 2048
    reuse_partial_blocks: bool = False
    tokens: int = 2048
    policy: str | None = None  # then both models divide total_memory by it
    total_memory: str | None = None  # None: the workload's
    techniques: bool = False  # all that plans.TECHNIQUES has

    @property
    def name(self) -> str:
        """The row's name in the record."""
        where = "preempting" if self.share is None else f"share{self.share}"
        where = f"{self.policy},{self.total_memory}" if self.policy else where
        sizes = f"seqs{self.max_num_seqs},block{self.block_size}"
        reuse = ",partial" if self.reuse_partial_blocks else ""
        more = ",techniques" if self.techniques else ""
        return f"{where},{sizes},chunk{self.max_num_batched_tokens}{reuse}{more}"


# Four splits, two batch sizes, two block sizes; then preemption forced; then partial blocks reused;
# then policies and techniques.
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
    *(Setting(0.3, 64, 16, policy=policy, total_memory="40MiB") for policy in POLICIES),
    Setting(0.08, 64, 16, techniques=True),
    Setting(0.3, 16, 8, 256, policy=ELASTIC, total_memory="40MiB", techniques=True),
)
# The same splits and sizes in half as many, one with partial blocks: a search takes minutes.
REAL_SETTINGS = (
    Setting(0.3, 64, 16),
    Setting(0.08, 16, 8, 256, reuse_partial_blocks=True),
    Setting(0.2, 16, 16, 256),
    Setting(0.5, 64, 8),
    Setting(None, 64, 16, 256, tokens=4096),
    Setting(0.3, 64, 16, policy="first_come", total_memory="1200MiB"),
    Setting(0.3, 16, 16, 256, policy="phase_aware", total_memory="1200MiB"),
    Setting(0.3, 64, 16, policy=ELASTIC, total_memory="1200MiB", techniques=True),
)


def run(
    profile: str = "default",
    llm: str = TINY,
    prm: str | None = None,
    seed: int = 0,
    problems: str | None = None,
) -> Iterator[Row]:
    """The rows of `workbench bench identity`. BrokenLaw, after the last, where a node differs."""
    count = (PROFILES if llm == TINY else REAL_PROBLEMS)[profile]
    workload, settings = _plan(llm, prm, problems, count)
    differing = []
    for row in compare(workload, settings, seed):
        differing += [row.name] if row.name.startswith("identical@") and row.value != 1 else []
        yield row
    if llm == TINY:
        yield from beside_transformers(workload, seed)
    if differing:
        raise BrokenLaw(f"Tokens or scores differ: {', '.join(differing)}.")


def mode_of(settings: dict[str, Any]) -> dict[str, Any]:
    """What the record says of a run with these settings."""
    workload, _ = _plan(settings["llm"], settings["prm"])
    mode = {"batch_invariant": True, "total_memory": workload.total_memory}
    return mode | sizes_of(workload)


def _plan(llm: str, *given: Any) -> tuple[SweepConfig, tuple[Setting, ...]]:
    if llm == TINY:
        return make_workload(llm, *given), SETTINGS
    sizes: dict[str, Any] = {"total_memory": "3GiB", "max_model_len": 2048, "max_depth": 4}
    return make_workload(llm, *given, **sizes), REAL_SETTINGS


def compare(workload: SweepConfig, settings: Sequence[Setting], seed: int = 0) -> Iterator[Row]:
    """The workload under each setting, each tree beside the first, the base, which has no row of
    sameness; then the base under other instruction sets.
    """
    base: Nodes = {}
    for setting in tqdm(settings, desc="settings"):
        result = search(setting, workload, seed)
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
            same = equal_share(base, nodes_under(isa, settings[0], workload, seed))
            yield Row(f"identical@isa_{isa}", same, "fraction", repeats=len(base))


def beside_transformers(workload: SweepConfig, seed: int = 0) -> Iterator[Row]:
    """Sampled, then greedy: nodes of both searches with the same tokens and scores that are NEAR,
    over all of both; and how much oftener ours is right.
    """
    models, longest = (workload.llm, workload.prm), workload.max_model_len
    workload = replace(workload, num_problems=min(FEW, workload.num_problems))
    ours = [roomy_engine(model, max_model_len=longest) for model in models]
    theirs = [TransformersEngine(model, max_model_len=longest) for model in models]
    for name, temperature in (("sampled", workload.temperature), ("greedy", 0.0)):
        mine, other = (searched(workload, llm, prm, seed, temperature=temperature)
                       for llm, prm in (ours, theirs))  # fmt: skip
        trees = [nodes_of(result) for result in (mine, other)]
        both, every = (how(*map(set, trees)) for how in (set.intersection, set.union))
        pairs = [[tree[node] for tree in trees] for node in both]
        near = sum(a[0] == b[0] and abs(a[1] - b[1]) < NEAR for a, b in pairs)
        yield Row(f"same@transformers,{name}", near / len(every), "fraction", repeats=len(every))
        right = [result.problems["correct"].astype(float) for result in (mine, other)]
        gain = bootstrap_mean(right[0] - right[1], list(mine.problems["problem_id"]))
        ends = gain.low, gain.high
        yield Row(f"gain_over@transformers,{name}", gain.estimate, "fraction", spread=ends)


def search(setting: Setting, workload: SweepConfig, seed: int) -> SearchResult:
    """The one search, under a setting."""
    sizes, blocks = asdict(setting), -(-setting.tokens // setting.block_size)
    share, _ = sizes.pop("share"), sizes.pop("tokens")
    sizes |= TECHNIQUES[ALL].settings if sizes.pop("techniques") else {}
    sizes["total_memory"] = sizes["total_memory"] or workload.total_memory
    given = {"memory": None, "num_blocks": blocks} if share is None else {}
    own = tuple((f"{role}_{name}", value) for role in ENGINES for name, value in given.items())
    return Pair(RunSpec(replace(workload, **sizes), share or 0.5, seed, own=own)).search().play()


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
