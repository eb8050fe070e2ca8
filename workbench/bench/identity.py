"""Whether a search's tokens and scores are the same whatever the memory, batch and block size.

One search is run under settings that share nothing but the models, the problems and the seed; every
node of every tree is compared with the first setting's, token by token and score by score. Settings
without a share leave each engine only a few requests' worth of blocks, so that requests are
preempted all the time. A record holds the fraction of equal nodes. The first setting is searched
once more under each other instruction set of this host, in a process of its own: all or none.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from workbench.bench.record import Row
from workbench.bench.search import REAL_PROBLEMS, Workload, is_tiny, make_workload
from workbench.config import parse_size
from workbench.engine.engine import Engine
from workbench.kernels.isa import ISA, environment, host_sets
from workbench.search.result import SearchResult

PROFILES = {"quick": 6, "default": 32, "full": 128}  # problems
TINY_SIZES: dict[str, Any] = {"max_depth": 40, "max_step_tokens": 256}
REAL_SIZES: dict[str, Any] = {"max_depth": 4}


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that settings deal out, and the longest request; None: the model's own.

    total: of both engines, weights included where so said; least_tokens: an engine's positions when
    preemption is forced.
    """

    total: str = "64MiB"
    with_weights: bool = True
    max_model_len: int | None = None
    least_tokens: int = 2048


TINY_ROOM = Room()
REAL_ROOM = Room("2GiB", with_weights=False, max_model_len=2048, least_tokens=4096)


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

    def engine(self, model: str, share: float | None, room: Room) -> Engine:
        """An engine under this setting with its share of the memory."""
        settings: dict[str, Any] = {
            "max_num_seqs": self.max_num_seqs,
            "block_size": self.block_size,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "reuse_partial_blocks": self.reuse_partial_blocks,
            "max_model_len": room.max_model_len,
            "activations_in_total": False,
        }
        if share is None:
            return Engine(model, num_blocks=-(-room.least_tokens // self.block_size), **settings)
        budget = "memory" if room.with_weights else "kv_memory"
        return Engine(model, **settings | {budget: int(share * parse_size(room.total))})


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
# The same four splits and sizes in half as many, since a search takes minutes.
REAL_SETTINGS = (
    Setting(0.3, 64, 16),
    Setting(0.08, 16, 8, 256),
    Setting(0.2, 16, 16, 256),
    Setting(0.5, 64, 8),
    Setting(None, 64, 16, 256),
)


def run(
    profile: str = "default",
    llm: str = "tiny-solver",
    prm: str | None = None,
    seed: int = 0,
    problems: str | None = None,
) -> Iterator[Row]:
    """A row a setting: the fraction of nodes equal to the base's, the first; its preemptions.

    prm: None is tiny-prm beside tiny-solver, else the generator itself. problems: a file of them.
    """
    if is_tiny(llm):
        workload = make_workload(llm, prm, problems, PROFILES[profile], **TINY_SIZES)
        yield from compare(workload, SETTINGS, TINY_ROOM, seed)
    else:
        workload = make_workload(llm, prm, problems, REAL_PROBLEMS[profile], **REAL_SIZES)
        yield from compare(workload, REAL_SETTINGS, REAL_ROOM, seed)


def mode_of(settings: dict[str, Any]) -> dict[str, Any]:
    """What the record says of a run with these settings."""
    tiny = is_tiny(settings["llm"])
    room, sizes = (TINY_ROOM, TINY_SIZES) if tiny else (REAL_ROOM, REAL_SIZES)
    memory = "total_memory" if room.with_weights else "kv_memory"
    workload = make_workload(settings["llm"], settings["prm"], **sizes)
    return {"batch_invariant": True, memory: room.total} | workload.mode


def compare(
    workload: Workload, settings: Sequence[Setting], room: Room, seed: int = 0
) -> Iterator[Row]:
    """The workload under each setting, each tree beside the first: the base, which has no row of
    sameness, since with itself it cannot differ. Then the base under other instruction sets.
    """
    base = pd.DataFrame()
    for setting in tqdm(settings, desc="settings"):
        result = search(setting, workload, room, seed)
        nodes = result.tree.set_index(["problem_id", "node_id"]).sort_index()
        if base.empty:
            base = nodes
            yield Row(f"base@{setting.name}", len(nodes), "nodes")
        else:
            same = equal_share(base, nodes)
            yield Row(f"identical@{setting.name}", same, "fraction", repeats=len(nodes))
        preempted = float(result.trace.steps["preempted"].sum())
        yield Row(f"preemptions@{setting.name}", preempted, "requests")
    for name in host_sets():
        if name != ISA.name:
            found = digest_under(name, settings[0], workload, room, seed)
            yield Row(
                f"identical@isa_{name}", float(found == digest(base)), "fraction", repeats=len(base)
            )


def search(setting: Setting, workload: Workload, room: Room, seed: int) -> SearchResult:
    """The one search, under a setting."""
    rest = None if setting.share is None else 1 - setting.share
    prm = workload.reward(setting.engine(workload.prm, rest, room))
    return workload.search(setting.engine(workload.llm, setting.share, room), prm, seed)


def equal_share(first: pd.DataFrame, other: pd.DataFrame) -> float:
    """Nodes with the same id, tokens and score, over all nodes of both trees."""
    together = first.join(other.add_suffix("_other"), how="outer")
    tokens = [
        [tuple(value) if isinstance(value, tuple | list) else value for value in together[name]]
        for name in ("token_ids", "token_ids_other")
    ]
    same_tokens = pd.Series([a == b for a, b in zip(*tokens)], index=together.index)
    return float((same_tokens & (together["score"] == together["score_other"])).mean())


def digest(nodes: pd.DataFrame) -> str:
    """Of every node's id, tokens and score; nodes are indexed by problem and node, in order."""
    told = hashlib.sha256()
    for key, tokens, score in zip(nodes.index, nodes["token_ids"], nodes["score"]):
        told.update(f"{key} {tuple(tokens)} {float(score).hex()}\n".encode())
    return told.hexdigest()


def digest_under(isa: str, *searched: Any) -> str:
    """The digest of a search in a process that takes an instruction set. Raises CalledProcessError
    if it fails.
    """
    done = subprocess.run(
        [sys.executable, "-c", "from workbench.bench.identity import tell; tell()"],
        input=pickle.dumps(searched),
        stdout=subprocess.PIPE,
        env=os.environ | environment(isa),
        check=True,
    )
    return done.stdout.decode().split()[-1]


def tell() -> None:
    """The other process: reads what to search, writes the digest of its tree."""
    result = search(*pickle.load(sys.stdin.buffer))
    nodes = result.tree.set_index(["problem_id", "node_id"]).sort_index()
    sys.stdout.write(digest(nodes) + "\n")
