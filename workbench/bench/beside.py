"""Whole search systems beside ours: the same weights, problems and sizes, one after the other.

vllm-both: our rounds over two servers of vLLM, prefix caches on, so that engine and algorithm are
told apart. search-and-learn: huggingface/search-and-learn's own code (bench/peers.py). A peer has
the values of our file as bfloat16 where the processor multiplies it, its own choice and its
fastest, else as float32, and heads of at least HEAD numbers. Each searches several times while its
processes stay up, from empty caches, after one short search that is not counted. Repeat k is paired
with repeat k of the others; of ours and vllm-both it has the same seed, while search-and-learn's
vLLM takes the first seed and draws on. search-and-learn's beam search takes one problem at a time,
the others all of them.

Where the reward model is a trained one, answers are judged: each system's own solutions and scores,
by one vote and one comparison of answers. search-and-learn asks its PRM about solutions that still
end in a step's empty line, behind which it opens one turn more: its score is that of an empty step.

What a system holds at its peak is memory of all its processes at one time, libraries included,
pages that they share counted once; ours is measured last, so that nothing of it is left while a
peer is. Beside search-and-learn our beam search samples its last iteration on, past the end of a
step, as that does. Its beam search takes a step that used up its tokens for the end of a solution,
ours goes on from there: so problems a minute stand beside tokens a problem.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file
from torch.nn.functional import pad

from workbench.bench.engine import PEERS_FOLDER, peer_dtypes, peer_files
from workbench.bench.peers import PeerError, PeerProcess
from workbench.bench.record import Row, meanwhile, median_row
from workbench.bench.serve import metrics_of, served, version_of, vllm_command
from workbench.config import SweepConfig, parse_size
from workbench.core import TokenEngine
from workbench.engine.engine import Engine
from workbench.engine.remote import RemoteEngine
from workbench.errors import ConfigError, WorkbenchError
from workbench.experiments.execute import make_search, make_strategy
from workbench.experiments.provenance import git_state
from workbench.experiments.runs import sweep_problems
from workbench.experiments.statistics import bootstrap_mean
from workbench.models.loading import FolderWeights
from workbench.models.registry import model_spec
from workbench.search.answers import (
    aggregate,
    check_choice,
    extract_answer,
    group_answers,
    same_answer,
    vote,
)
from workbench.search.prm import known_format
from workbench.search.problems import Problem
from workbench.search.search import Search
from workbench.search.strategies import BeamSearch

VLLM_BOTH, SEARCH_AND_LEARN = SYSTEMS = ("vllm-both", "search-and-learn")
APPROACHES = ("beam_search", "best_of_n", "dvts")
WARM_UP: dict[str, Any] = {"max_depth": 1, "max_step_tokens": 4}
ANSWER_S = 600.0  # that a server may take to one request
SEQUENCES = 256  # that a server of vLLM may have in a step
BLOCK = 32  # tokens of a block of vLLM: faster here than its own choice on a CPU, 128 (NOTES)
HEAD = 32  # numbers of an attention head, at least
LOOK_S = 0.5  # between two looks at memory
PSS = re.compile(r"^Pss: +(\d+) kB", re.MULTILINE)
RATES = ("problems_per_min", "tokens_per_s")  # of which more is better; of the rest less
UNITS = dict(zip(RATES, ("problems/min", "tokens/s")))
UNITS |= dict.fromkeys(("llm_s", "prm_s", "rest_s"), "s/problem")
UNITS |= {"prm_over_ideal": "x", "peak_memory": "bytes"}
HITS = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"  # prompt tokens
Pair = tuple[TokenEngine, TokenEngine]  # LLM, PRM
Systems = Mapping[str, str | None]  # by name, with the checkout that was given


@dataclass(frozen=True, slots=True)
class Measured:
    """One system's search of all problems; PRM tokens are those of its inputs.

    correct: of each problem whether its answer is right; hits: parts of the prompt tokens that were
    found cached, by model; None where there is no cache.
    """

    version: str
    wall_s: float
    llm_s: float
    prm_s: float
    tokens: int
    prm_computed: float
    prm_distinct: float
    peak_bytes: int
    correct: tuple[bool, ...] = ()
    hits: tuple[float, float] | None = None

    def values(self, problems: int) -> dict[str, float]:
        """As the rows have them, hits where there is a cache."""
        found = {
            "problems_per_min": 60 * problems / self.wall_s,
            "tokens_per_s": self.tokens / self.wall_s,
            "llm_s": self.llm_s / problems,
            "prm_s": self.prm_s / problems,
            "rest_s": (self.wall_s - self.llm_s - self.prm_s) / problems,
            "prm_over_ideal": self.prm_computed / self.prm_distinct,
            "peak_memory": float(self.peak_bytes),
            "tokens": self.tokens / problems,
        }
        return found | dict(zip(("llm_hits", "prm_hits"), self.hits or ()))


def chosen_systems(peer: str) -> Systems:
    """Peers by name, each with the checkout that was given: "vllm-both,search-and-learn=PATH".

    ConfigError for another name, and for a checkout that is none.
    """
    found = dict[str, str | None]()
    for each in peer.split(","):
        name, given, path = each.strip().partition("=")
        check_choice("peer", name, SYSTEMS)
        if given and (name != SEARCH_AND_LEARN or not Path(path, "src", "sal").is_dir()):
            raise ConfigError(
                f"peer is {each!r}; a path is that of a checkout of {SEARCH_AND_LEARN}, with "
                f"src/sal in it; `make bench-peers PEERS={SEARCH_AND_LEARN}` brings one."
            )
        found[name] = path or None
    return found


def rows_beside(
    workload: SweepConfig, peers: Systems, kv_memory: str, seeds: Sequence[int] = (0,)
) -> Iterator[Row]:
    """Each peer's rows, ours beside them, of a search a seed; a peer that fails is one row that
    says so.
    """
    form = workload.prm_format or known_format(workload.prm, "")
    if form != "rlhflow" or workload.strategy not in APPROACHES:
        raise ConfigError(
            f"--peer got prm {workload.prm!r} and strategy {workload.strategy!r}; it takes a PRM "
            f"that is asked in RLHFlow's form, or none but the LLM, and {', '.join(APPROACHES)}."
        )
    found = dict[str, list[Measured] | Exception]()
    for name, checkout in peers.items():
        try:
            folders = [with_wide_heads(peer_files(m)[0]) for m in (workload.llm, workload.prm)]
            if name == VLLM_BOTH:
                found[name] = over_servers(workload, folders, kv_memory, seeds)
            else:
                found[name] = by_search_and_learn(workload, folders, checkout, kv_memory, seeds)
        except (PeerError, WorkbenchError, httpx.HTTPError, OSError) as error:
            found[name] = error
    ours = measured_here(workload, kv_memory, seeds)
    for name, theirs in found.items():
        if isinstance(theirs, Exception):
            yield Row(f"problems_per_min@{name}", float("nan"), f"failed: {theirs}")
        else:
            judged = workload.prm != workload.llm
            yield from compared(name, len(sweep_problems(workload)), ours, theirs, judged)


def compared(
    name: str, problems: int, ours: Sequence[Measured], theirs: Sequence[Measured], judged: bool
) -> Iterator[Row]:
    """Rates, seconds a problem by where they went, PRM work and memory; judged: accuracy, too, and
    what ours is above theirs, paired by problem.
    """
    label = f"{name} ({theirs[0].version})"
    if judged:
        right = [np.mean([each.correct for each in system], axis=0) for system in (ours, theirs)]
        own, peer = (float(side.mean()) for side in right)
        yield Row(f"accuracy@{name}", own, "fraction", label, peer, repeats=len(ours))
        gain = bootstrap_mean(pd.Series(right[0] - right[1]), [*range(problems)])
        ends = gain.low, gain.high
        yield Row(f"gain_over@{name}", gain.estimate, "fraction", repeats=len(ours), spread=ends)
    values = [[each.values(problems) for each in system] for system in (ours, theirs)]
    for row in values[0][0]:
        if row not in values[1][0]:
            continue
        sides = [[each[row] for each in system] for system in values]
        whole = [max(side) if row == "peak_memory" else median(side) for side in sides]
        if row in UNITS:
            how: dict[str, Any] = {"peer": label, "peers": sides[1], "less": row not in RATES}
            found = median_row(f"{row}@{name}", sides[0], UNITS[row], extremes=True, **how)
            yield replace(found, value=whole[0], peer_value=whole[1])
        else:
            unit = "tokens/problem" if row == "tokens" else "fraction"
            yield Row(f"{row}@{name}", whole[0], unit, label, whole[1], repeats=len(ours))


def measured(
    workload: SweepConfig,
    pair: Pair,
    seeds: Sequence[int],
    version: str,
    empty: Callable[[], None],
    cached: Callable[[], list[list[float]]],
) -> list[Measured]:
    """A search a seed, each from empty caches, after a short one that is not counted.

    cached: of LLM and PRM, prompt tokens found cached and asked for, since they were started.
    """
    problems, every = sweep_problems(workload), list[Measured]()
    whole = hasattr(make_strategy(workload), "max_tokens")  # samples of more than a step
    sizes = WARM_UP | ({"max_tokens": WARM_UP["max_step_tokens"]} if whole else {})
    short = replace(workload, **sizes)
    search_of(problems[:1], pair, short, seeds[0]).play()
    for seed in seeds:
        empty()
        before = cached()
        with peak_memory() as peak:
            found = search_of(problems, pair, workload, seed).play()
        hits, queries = np.subtract(cached(), before).T.tolist()
        speed, told = found.throughput, found.problems["prm_tokens_computed"]
        computed = queries[1] - hits[1] if told.isna().any() else told.sum()
        every.append(Measured(
            version, speed.wall_s, speed.llm_busy_s, speed.prm_busy_s, speed.tokens,
            float(computed), float(found.problems["prm_tokens_distinct"].sum()), peak(),
            tuple(found.problems["correct"].astype(bool)),
            (hits[0] / queries[0], hits[1] / queries[1]),
        ))  # fmt: skip
    return every


def search_of(problems: Sequence[Problem], pair: Pair, workload: SweepConfig, seed: int) -> Search:
    """The workload's search; a beam search's last iteration goes on to max_step_tokens."""
    strategy = make_strategy(workload)
    if isinstance(strategy, BeamSearch):
        limit = workload.max_step_tokens
        strategy = replace(strategy, finish_at_limit=True, limit_tokens=limit)
    return make_search(problems, *pair, workload, seed, strategy=strategy)


def measured_here(workload: SweepConfig, kv_memory: str, seeds: Sequence[int]) -> list[Measured]:
    """Our engines, partly filled blocks reused, with as many sequences as peers have."""
    how: dict[str, Any] = {"kv_memory": kv_memory, "reuse_partial_blocks": True}
    how["max_num_seqs"] = SEQUENCES
    pair = Engine(workload.llm, **how), Engine(workload.prm, **how)

    def empty() -> None:
        for engine in pair:
            engine.cache.reset()

    def cached() -> list[list[float]]:
        counts = (engine.cache.stats for engine in pair)
        return [[each.hit_tokens, each.query_tokens] for each in counts]

    return measured(workload, pair, seeds, "", empty, cached)


def as_many_tokens(kv_memory: str) -> int:
    """Bytes of a peer's KV that hold as many tokens as ours do in float32."""
    return parse_size(kv_memory) // (2 if peer_dtypes()[-1] == "bfloat16" else 1)


# -- our rounds over two servers --


def over_servers(
    workload: SweepConfig, folders: Sequence[Path], kv_memory: str, seeds: Sequence[int]
) -> list[Measured]:
    """Both models from vLLM, each in a server of its own on all cores."""
    own: dict[str, Any] = {"dtype": peer_dtypes()[-1], "max_num_seqs": SEQUENCES}
    own["block_size"] = BLOCK
    how: dict[str, Any] = {"timeout": ANSWER_S, "in_flight": SEQUENCES}
    # 0.32 dies of a seeded request whose prompt is cut: no CPU generator can go back
    commands = [vllm_command("vllm", folder, "--no-enable-chunked-prefill",
                             kv_bytes=as_many_tokens(kv_memory), served_model_name=folder.name,
                             **own) for folder in folders]  # fmt: skip
    version = f"vllm{version_of('vllm', 'vllm')}, {peer_dtypes()[-1]}, prefix cache on, "
    version += f"blocks of {BLOCK}, {SEQUENCES} sequences, prompts whole"
    with ExitStack() as stack:
        urls = [stack.enter_context(served(command)) for command in commands]
        models = zip(urls, folders, (workload.llm, workload.prm))
        llm, prm = (
            stack.enter_context(closing(RemoteEngine(url, folder.name, files=files, **how)))
            for url, folder, files in models
        )

        def empty() -> None:  # a server takes this only as its developers start it
            for url in urls:
                httpx.post(f"{url}/reset_prefix_cache").raise_for_status()

        def cached() -> list[list[float]]:
            return [metrics_of(url, *HITS) for url in urls]

        return measured(workload, (llm, prm), seeds, version, empty, cached)


def with_wide_heads(folder: Path, written: Path = PEERS_FOLDER / "models") -> Path:
    """A model that computes the same with heads of HEAD, where its own are narrower, which vLLM's
    attention on a CPU does not take. The new places hold zeros; a pair of places that turn together
    keeps its angle by another base, a score its scale by the queries'.
    """
    spec = model_spec(str(folder))
    if (narrow := spec.head_dim) >= HEAD:
        return folder
    read, weights = FolderWeights(folder), dict[str, torch.Tensor]()
    target = written / f"{folder.name}-{read.digest()[:12]}-heads{HEAD}"
    if target.is_dir():
        return target
    if spec.rope_scaling is not None or spec.gpt2:
        raise PeerError(f"{folder.name} turns heads of {narrow} in another way than Llama 2 does")
    for name in read.names:
        held: Any = read.read(name)
        held = held.float()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # place i turns with i + half a head
            rows = held.unflatten(0, (-1, 2, narrow // 2))
            rows = pad(rows, (0, 0, 0, (HEAD - narrow) // 2)).flatten(0, 2)
            held = rows * math.sqrt(HEAD / narrow) if "q_proj" in name else rows
        elif name.endswith("v_proj.weight"):
            held = pad(held.unflatten(0, (-1, narrow)), (0, 0, 0, HEAD - narrow)).flatten(0, 1)
        elif name.endswith("o_proj.weight"):
            held = pad(held.unflatten(1, (-1, narrow)), (0, HEAD - narrow)).flatten(1, 2)
        weights[name] = held.contiguous()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    theta = spec.rope_theta ** (HEAD / narrow)
    config |= {"head_dim": HEAD, "rope_theta": theta, "dtype": "float32"}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    written.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=written) as made:
        rest = shutil.ignore_patterns("*.safetensors*")
        partial = Path(shutil.copytree(folder, Path(made) / target.name, ignore=rest))
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        partial.replace(target)
    return target


@contextmanager
def peak_memory(own: bool = True) -> Iterator[Callable[[], int]]:
    """The most bytes that processes below this one, and itself if `own`, held at one time: before,
    after, or at a look between.
    """
    found = list[int]()

    def look() -> None:
        found.append(sum(map(memory_of, [str(os.getpid())] if own else below(os.getpid()))))

    look()
    with meanwhile(look, lambda: LOOK_S):
        yield lambda: max(found)
    look()


def memory_of(process: str) -> int:
    """Bytes of a process and of those below it; a page that several share is divided among them."""
    try:
        found = PSS.search(Path(f"/proc/{process}/smaps_rollup").read_text())
    except OSError:  # it has ended
        return 0
    return 1024 * int(found[1] if found else 0) + sum(map(memory_of, below(process)))


def below(process: str | int) -> list[str]:
    """Numbers of the processes that one has started."""
    found = Path(f"/proc/{process}/task").glob("*/children")
    try:
        return [child for each in found for child in each.read_text().split()]
    except OSError:
        return []


# -- the system that the thesis starts from --


def by_search_and_learn(
    workload: SweepConfig,
    folders: Sequence[Path],
    checkout: str | None,
    kv_memory: str,
    seeds: Sequence[int],
) -> list[Measured]:
    """Its own code on the same problems and sizes; its beam search takes one problem at a time."""
    home = PEERS_FOLDER / SEARCH_AND_LEARN
    source = Path(checkout or home / "source")
    if not (source / "src" / "sal").is_dir():
        raise PeerError(f"there is no {source}; `make bench-peers PEERS={SEARCH_AND_LEARN}`")
    sizes: dict[str, Any] = {n: getattr(workload, n) for n in ("n", "beam_width", "temperature")}
    sizes |= {"top_p": workload.top_p, "approach": workload.strategy, "seed": seeds[0]}
    most = getattr(make_strategy(workload), "max_tokens", workload.max_step_tokens)
    sizes |= {"num_iterations": workload.max_depth, "max_tokens": most}
    sizes["lookahead"] = 0  # as ours; other commits of it have another default
    sizes |= {"search_batch_size": 1} if workload.strategy == "beam_search" else {}
    sizes |= {"system_prompt": workload.system_prompt} if workload.system_prompt else {}
    settings = {"threads": torch.get_num_threads(), "max_num_seqs": SEQUENCES, "config": sizes}
    settings["block_size"] = BLOCK
    settings |= dict(zip(("model", "prm"), map(str, folders))) | {"dtype": peer_dtypes()[-1]}
    settings |= {"checkout": str(source), "packages": str(home / "packages")}
    at = f", blocks of {BLOCK}, {SEARCH_AND_LEARN} "
    at += (git_state(source)["commit"] or "of no commit")[:12]
    problems, every = sweep_problems(workload), list[Measured]()
    asked = [each.problem for each in problems]
    room = as_many_tokens(kv_memory)
    with closing(PeerProcess(SEARCH_AND_LEARN, PEERS_FOLDER, settings, room)) as peer:
        short = {"num_iterations": WARM_UP["max_depth"], "max_tokens": WARM_UP["max_step_tokens"]}
        peer.ask({"problems": asked[:1], **short}, "search")
        for seed in seeds:
            with peak_memory(own=False) as peak:
                found = peer.ask({"problems": asked, "seed": seed}, "search")
            solved = zip(problems, found.pop("solved"), strict=True)
            found["correct"] = tuple(
                is_right(each.answer, texts, scores, workload.voting)
                for each, (texts, scores) in solved
            )
            every.append(Measured(peer.version + at, **found, peak_bytes=peak()))
    return every


def is_right(answer: str | None, texts: list[str], scores: list[list[float]], voting: str) -> bool:
    """Whether the vote over these solutions, by their last steps' scores, is for the answer."""
    found = [extract_answer(text) for text in texts]
    place = vote(found, [aggregate(each) for each in scores], group_answers(found), voting)
    return answer is not None and place is not None and same_answer(answer, found[place])
