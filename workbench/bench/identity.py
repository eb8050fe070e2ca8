"""Whether a search's tokens and scores are the same whatever the memory, batch and block size.

One search is run under settings that share nothing but the models, the problems and the seed; every
node of every tree is compared with the first setting's, token by token and score by score. The last
setting leaves each engine just one request's worth of blocks, so that requests are preempted all
the time. A record holds the fraction of equal nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd
from tqdm.auto import tqdm

from workbench.bench.record import Row
from workbench.config import parse_size
from workbench.engine.engine import Engine
from workbench.search.beam import BeamSearch
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.result import SearchResult
from workbench.search.runner import run_search

PROFILES = {"quick": 6, "default": 32, "full": 128}  # problems
TOTAL = "64MiB"
MODE = {"batch_invariant": True, "n": 16, "beam_width": 4, "total_memory": TOTAL}


@dataclass(frozen=True, slots=True)
class Setting:
    """How one search is run; share None gives each engine the least memory it accepts."""

    share: float | None
    max_num_seqs: int
    block_size: int
    max_num_batched_tokens: int = 2048

    @property
    def name(self) -> str:
        """The row's name in the record."""
        where = "preempting" if self.share is None else f"share{self.share}"
        sizes = f"seqs{self.max_num_seqs},block{self.block_size}"
        return f"{where},{sizes},chunk{self.max_num_batched_tokens}"

    def engine(self, model: str, share: float | None) -> Engine:
        """An engine under this setting with its share of the memory."""
        settings: dict[str, object] = {
            "max_num_seqs": self.max_num_seqs,
            "block_size": self.block_size,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "activations_in_total": False,
        }
        if share is None:
            return Engine(model, num_blocks=-(-2048 // self.block_size), **settings)
        return Engine(model, memory=int(share * parse_size(TOTAL)), **settings)


# Four splits, two batch sizes, two block sizes; then preemption forced.
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
)


def run(
    profile: str = "default", llm: str = "tiny-solver", prm: str = "tiny-prm", seed: int = 0
) -> Iterator[Row]:
    """A row a setting: the fraction of nodes equal to the first setting's; its preemptions."""
    problems = load_problems("tiny", limit=PROFILES[profile])
    first: pd.DataFrame | None = None
    for setting in tqdm(SETTINGS, desc="settings"):
        result = search(setting, problems, llm, prm, seed)
        nodes = result.tree.set_index(["problem_id", "node_id"]).sort_index()
        first = nodes if first is None else first
        yield Row(
            f"identical@{setting.name}", equal_share(first, nodes), "fraction", repeats=len(nodes)
        )
        preempted = float(result.trace.steps["preempted"].sum())
        yield Row(f"preemptions@{setting.name}", preempted, "requests")


def search(setting: Setting, problems: list, llm: str, prm: str, seed: int) -> SearchResult:
    """The one search, under a setting."""
    rest = None if setting.share is None else 1 - setting.share
    return run_search(
        problems,
        llm=setting.engine(llm, setting.share),
        prm=PRM(setting.engine(prm, rest)),
        strategy=BeamSearch(n=16, beam_width=4, max_depth=40),
        seed=seed,
        temperature=0.8,
    )


def equal_share(first: pd.DataFrame, other: pd.DataFrame) -> float:
    """Nodes with the same id, tokens and score, over all nodes of both trees."""
    together = first.join(other, rsuffix="_other", how="outer")
    same_tokens = [
        a == b for a, b in zip(_tuples(together["token_ids"]), _tuples(together["token_ids_other"]))
    ]
    same = pd.Series(same_tokens, index=together.index) & (
        together["score"] == together["score_other"]
    )
    return float(same.mean())


def _tuples(column: pd.Series) -> list[object]:
    return [tuple(value) if isinstance(value, tuple | list) else value for value in column]
