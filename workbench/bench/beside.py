"""Whole search systems beside ours: the same weights, problems and sizes, one after the other.

vllm-both: our rounds over two servers of vLLM, prefix caches on, so that engine and algorithm are
told apart. search-and-learn: huggingface/search-and-learn's own code (bench/peers.py). A peer has
the values of our file as bfloat16 where the processor multiplies it, its own choice and its
fastest, else as float32. Each begins with empty caches, after one short search that is not counted.
What a system holds at its peak is memory of all its processes at one time, weights, libraries and
interpreters included, pages that they share counted once; ours is measured last, so that nothing
of it is left while a peer is. search-and-learn's beam search takes a step that used up its tokens
for the end of a solution, ours goes on from there: so problems a minute stand beside tokens a
problem.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import httpx
import torch

from workbench.bench.engine import PEERS_FOLDER, multiplies_bfloat16
from workbench.bench.peers import PeerError, PeerProcess
from workbench.bench.record import Row
from workbench.bench.serve import searchable, served, summed, vllm_command
from workbench.engine.engine import Engine
from workbench.engine.remote import RemoteEngine
from workbench.errors import ConfigError, RemoteError
from workbench.search.answers import check_choice

if TYPE_CHECKING:
    from workbench.bench.search import Workload

VLLM_BOTH, SEARCH_AND_LEARN = SYSTEMS = ("vllm-both", "search-and-learn")
APPROACHES = ("beam_search", "best_of_n", "dvts")
WARM_UP: dict[str, Any] = {"max_depth": 1, "max_step_tokens": 4}
ANSWER_S = 600.0  # that a server may take to one request
SEQUENCES = 256  # that a server of vLLM may have in a step
LOOK_S = 0.5  # between two looks at memory
PSS = re.compile(r"^Pss: +(\d+) kB", re.MULTILINE)
RATES = ("problems_per_min", "tokens_per_s")  # of which more is better; of the rest less
UNITS = dict(zip(RATES, ("problems/min", "tokens/s")))
UNITS |= dict.fromkeys(("llm_s", "prm_s", "rest_s"), "s/problem")
UNITS |= {"prm_over_ideal": "x", "peak_memory": "bytes"}
HITS = {  # of vLLM's metrics, and what a request asks for
    "hits": "vllm:prefix_cache_hits_total",
    "queries": "vllm:prefix_cache_queries_total",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One system's search of all problems; PRM tokens are those of its inputs.

    hits: parts of the prompt tokens that were found cached, by model; None where there is no cache.
    """

    version: str
    wall_s: float
    llm_s: float
    prm_s: float
    tokens: int
    prm_computed: float
    prm_distinct: float
    peak_bytes: int
    hits: tuple[float, float] | None = None


def chosen_systems(peer: str) -> dict[str, str | None]:
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
    workload: Workload, peers: Mapping[str, str | None], kv_memory: str, seed: int = 0
) -> Iterator[Row]:
    """Each peer's rows, ours beside them; a peer that fails is one row that says so."""
    if workload.prm != workload.llm or workload.config.strategy not in APPROACHES:
        raise ConfigError(
            f"--peer got prm {workload.prm!r} and strategy {workload.config.strategy!r}; it takes "
            f"one model in both roles and {', '.join(APPROACHES)}."
        )
    (folder, _), found = searchable(workload.llm), dict[str, Measured | Exception]()
    for name, checkout in peers.items():
        try:
            if name == VLLM_BOTH:
                found[name] = over_servers(workload, folder, seed)
            else:
                found[name] = by_search_and_learn(workload, folder, checkout, seed)
        except (PeerError, RemoteError, httpx.HTTPError) as error:
            found[name] = error
    ours = measured_here(workload, kv_memory, seed)
    for name, theirs in found.items():
        if isinstance(theirs, Measured):
            yield from compared(name, len(workload.problems), ours, theirs)
        else:
            yield Row(f"problems_per_min@{name}", float("nan"), f"failed: {theirs}")


def compared(name: str, problems: int, ours: Measured, theirs: Measured) -> Iterator[Row]:
    """Rates, seconds a problem by where they went, PRM work and memory; a ratio above 1: ours is
    better.
    """
    mine, other = (
        {
            "problems_per_min": 60 * problems / each.wall_s,
            "tokens_per_s": each.tokens / each.wall_s,
            "llm_s": each.llm_s / problems,
            "prm_s": each.prm_s / problems,
            "rest_s": (each.wall_s - each.llm_s - each.prm_s) / problems,
            "prm_over_ideal": each.prm_computed / each.prm_distinct,
            "peak_memory": float(each.peak_bytes),
        }
        for each in (ours, theirs)
    )
    label = f"{name} ({theirs.version})"
    for row, unit in UNITS.items():
        ratio = mine[row] / other[row] if row in RATES else other[row] / mine[row]
        yield Row(f"{row}@{name}", mine[row], unit, label, other[row], ratio, repeats=1)
    used = (ours.tokens / problems, theirs.tokens / problems)
    yield Row(f"tokens@{name}", used[0], "tokens/problem", label, used[1], repeats=1)
    if ours.hits and theirs.hits:
        for model, here, there in zip(("llm", "prm"), ours.hits, theirs.hits, strict=True):
            yield Row(f"{model}_hits@{name}", here, "fraction", label, there, repeats=1)


def peer_dtype() -> str:
    """What peers compute in."""
    return "bfloat16" if multiplies_bfloat16() else "float32"


def measured_here(workload: Workload, kv_memory: str, seed: int) -> Measured:
    """Our engines, partly filled blocks reused."""
    how: dict[str, Any] = {"kv_memory": kv_memory, "reuse_partial_blocks": True}
    llm, prm = Engine(workload.llm, **how), Engine(workload.prm, **how)
    replace(workload, problems=workload.problems[:1]).search(llm, prm, seed, **WARM_UP)
    for engine in (llm, prm):
        engine.cache.reset()
    with peak_memory() as peak:
        found = workload.search(llm, prm, seed)
    sums = found.trace.steps.groupby("engine")[["hit_tokens", "query_tokens"]].sum()
    hits = sums["hit_tokens"] / sums["query_tokens"]
    speed, prm_tokens = found.throughput, found.problems["prm_tokens_computed"].sum()
    return Measured(
        "", speed.wall_s, speed.llm_busy_s, speed.prm_busy_s, speed.tokens, float(prm_tokens),
        float(found.problems["prm_tokens_distinct"].sum()), peak(),
        (hits["llm"], hits["prm"]),
    )  # fmt: skip


# -- our rounds over two servers --


def over_servers(workload: Workload, folder: Path, seed: int) -> Measured:
    """Both models from vLLM, each in a server of its own on all cores."""
    how: dict[str, Any] = {"files": workload.llm, "timeout": ANSWER_S}
    with ExitStack() as stack:
        servers = [stack.enter_context(vllm_server(folder)) for _ in range(2)]
        llm, prm = (
            stack.enter_context(closing(RemoteEngine(url, folder.name, **how))) for url in servers
        )
        replace(workload, problems=workload.problems[:1]).search(llm, prm, seed, **WARM_UP)
        for url in servers:
            emptied(url)
        before = [counters(url) for url in servers]
        with peak_memory() as peak:
            found = workload.search(llm, prm, seed)
        after = [counters(url) for url in servers]
        version = version_of(servers[0])
    counted = [{name: new[name] - old[name] for name in new} for old, new in zip(before, after)]
    told = f"vllm {version}, {peer_dtype()}, prefix cache on, {SEQUENCES} sequences, prompts whole"
    speed = found.throughput
    return Measured(
        told, speed.wall_s, speed.llm_busy_s, speed.prm_busy_s, speed.tokens,
        counted[1]["queries"] - counted[1]["hits"],
        float(found.problems["prm_tokens_distinct"].sum()), peak(),
        (counted[0]["hits"] / counted[0]["queries"], counted[1]["hits"] / counted[1]["queries"]),
    )  # fmt: skip


@contextmanager
def vllm_server(folder: Path, **limits: Any) -> Iterator[str]:
    """vLLM's own server of a model's folder, by the folder's name; its url.

    limits: of its command line. Raises PeerError where it does not start.
    """
    own = {"served_model_name": folder.name, "dtype": peer_dtype(), "max_num_seqs": SEQUENCES}
    # 0.32 dies of a seeded request whose prompt is cut: no CPU generator can go back
    command = vllm_command("vllm", folder, "--no-enable-chunked-prefill", **own | limits)
    # without which its cache cannot be emptied
    command = replace(command, environment={**command.environment, "VLLM_SERVER_DEV_MODE": "1"})
    with served(command) as ((host, port), _):
        yield f"http://{host}:{port}"


def emptied(url: str) -> None:
    """Forget what a server has cached; it takes this only as its developers start it."""
    httpx.post(f"{url}/reset_prefix_cache").raise_for_status()


def version_of(url: str) -> str:
    """As the server tells it."""
    return str(httpx.get(f"{url}/version").json()["version"])


def counters(url: str) -> dict[str, float]:
    """Prompt tokens that a server's prefix cache was asked for, and had, since its start."""
    text = httpx.get(f"{url}/metrics").text
    return {name: summed(text, metric) for name, metric in HITS.items()}


@contextmanager
def peak_memory(own: bool = True) -> Iterator[Callable[[], int]]:
    """The most bytes that processes below this one, and itself if `own`, held at one time."""
    found, ended = [0], Event()

    def look() -> None:
        while not ended.wait(LOOK_S):
            found.append(sum(map(memory_of, [str(os.getpid())] if own else below(os.getpid()))))

    watch = Thread(target=look, daemon=True)
    watch.start()
    try:
        yield lambda: max(found)
    finally:
        ended.set()
        watch.join()


def memory_of(process: str) -> int:
    """Bytes of a process and of those below it; a page that several share is divided among them."""
    try:
        told = PSS.search(Path(f"/proc/{process}/smaps_rollup").read_text())
    except OSError:  # it has ended
        return 0
    return 1024 * int(told[1] if told else 0) + sum(map(memory_of, below(process)))


def below(process: str | int) -> list[str]:
    """Numbers of the processes that one has started."""
    found = Path(f"/proc/{process}/task").glob("*/children")
    try:
        return [child for each in found for child in each.read_text().split()]
    except OSError:
        return []


# -- the system that the thesis starts from --


def by_search_and_learn(
    workload: Workload, folder: Path, checkout: str | None, seed: int
) -> Measured:
    """Its own code on the same problems and sizes; its beam search takes one problem at a time."""
    home, config = PEERS_FOLDER / SEARCH_AND_LEARN, workload.config
    source = Path(checkout or home / "source")
    if not (source / "src" / "sal").is_dir():
        raise PeerError(f"there is no {source}; `make bench-peers PEERS={SEARCH_AND_LEARN}`")
    sizes: dict[str, Any] = {
        "n": config.n,
        "beam_width": config.beam_width,
        "temperature": config.temperature,
    }
    sizes |= {"top_p": config.top_p, "approach": config.strategy, "seed": seed}
    sizes |= {"num_iterations": config.max_depth, "max_tokens": config.max_step_tokens}
    sizes |= {"search_batch_size": 1} if config.strategy == "beam_search" else {}
    sizes |= {"system_prompt": config.system_prompt} if config.system_prompt else {}
    settings: dict[str, Any] = {
        "checkout": str(source),
        "packages": str(home / "packages"),
        "config": sizes,
    }
    settings |= {"model": str(folder), "prm": str(folder), "dtype": peer_dtype()}
    settings |= {"threads": torch.get_num_threads(), "max_num_seqs": SEQUENCES}
    texts = [problem.problem for problem in workload.problems]
    with closing(PeerProcess(SEARCH_AND_LEARN, PEERS_FOLDER, settings)) as peer:
        short = {"num_iterations": WARM_UP["max_depth"], "max_tokens": WARM_UP["max_step_tokens"]}
        peer.ask({"problems": texts[:1], **short}, "search")
        with peak_memory(own=False) as peak:
            found = peer.ask({"problems": texts}, "search")
        return Measured(peer.version, **found | {"peak_bytes": peak()})
