"""`run`, `advise`, `serve`, `bench`, `calibrate`, `record`, `train-tiny` and `doctor`: one search
on the terminal, where to split a memory, a server, benchmarks, and what this machine has.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import parse_qsl, urlsplit

from typer import Argument, Exit, Option

from workbench.cli.options import FAILED, Set, key_values, option, options_of, table, terminal
from workbench.config import OF_WIDTH, EngineConfig, SweepConfig, format_size
from workbench.errors import ConfigError, OutOfMemory, WorkbenchError, nearest

if TYPE_CHECKING:
    from workbench.replay.advise import Advice
    from workbench.search.problems import Problem
    from workbench.search.result import SearchResult

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
EXTRAS = {  # package: (what needs it, how to get it)
    "math-verify": ("answers that are not whole numbers", "pip install math-verify"),
    "transformers": ("bench engine's peer, train-tiny, run --engine", "pip install transformers"),
    "httpx": ("run --engine URL", "pip install httpx"),
    "papermill": ("figures", "pip install -e '.[notebooks]'"),
    "kaleido": ("figures as SVG and PDF", "pip install kaleido"),
    "fastapi": ("serve", "pip install -e '.[serve]'"),
    "jupyterlab": ("make lab", "pip install -e '.[notebooks]'"),
}
EXACTLY = {
    "vLLM": "for exactly this KV, add {}",
    "SGLang": "for no more KV, add {}, which takes less where less is free",
}
Searched = Annotated[dict[str, Any], [*options_of(SweepConfig, {
    "llm": "generator: a name, hub id, folder or .gguf",
    "prm": "process reward model",
    "total_memory": "of both models together, e.g. 64MiB",
    "strategy": "how to search",
    "n": "beams (or samples) of a problem",
    "max_depth": "steps of a beam, at most",
    "temperature": "of sampling; 0 is greedy",
    "prm_format": "how the PRM is asked (default: as its name tells)",
}), option("beam_width", int, "children of a survivor; n // beam_width survive (default: 4 or n)",
           min=1)]]  # fmt: skip


def run(
    *,
    problem: str = Argument(None, help='as text ("Compute 7-3+12."); else one of --problems'),
    problems: str = Option(None, help="tiny, math500, or a .json/.jsonl file (default: tiny)"),
    index: int = Option(None, min=0, help="which of --problems, counted from 0 (default: 0)"),
    level: int = Option(None, help="only problems of this level (1 to 5)"),
    settings: Searched,
    llm_share: float = Option(
        None, min=0, max=1, help="the LLM's share of the total memory (default: 0.3)"
    ),
    engine: str = Option(
        None, metavar="ENGINE", help="in place of ours: transformers, URL, or LLM's URL,PRM's URL"
    ),
    seed: int = Option(0, help="equal seeds give equal trees"),
    tree_depth: int = Option(6, min=0, help="levels of the tree that are printed; 0: none"),
    more: Set = None,
) -> None:
    """Search one problem; print its answer and tree."""
    from workbench.experiments import execute
    from workbench.experiments.memory import feasibility, shares_of
    from workbench.experiments.plans import VOTE_ONLY
    from workbench.experiments.settings import HOW_IT_IS_CARRIED_OUT as CARRIED_OUT
    from workbench.experiments.settings import RunSpec, with_width
    from workbench.search.problems import Problem, load_problems
    from workbench.search.search import as_problems
    from workbench.search.variants import STRATEGIES

    if problem is not None:
        for name, given in (("problems", problems), ("index", index), ("level", level)):
            if given is not None:
                both = f"run got the problem {problem!r} and --{name}, which picks another"
                raise ConfigError(f"{both}; give one of them.")
        (chosen,) = as_problems(Problem("given", problem))
    else:
        source, place = problems or "tiny", index or 0
        limit = place + 1 if source == "tiny" else None  # a file is counted in its own order
        found = load_problems(source, limit, levels=None if level is None else (level,))
        if place >= len(found):
            raise ConfigError(f"--index is {place}; {source} has problems 0 to {len(found) - 1}.")
        chosen = found[place]
    own = key_values(more, "--set")
    if idle := own.keys() & {"problems", "num_problems", "levels", "problem_seed", *CARRIED_OUT}:
        told = f"run searches one problem and takes no --set of {', '.join(sorted(idle))}"
        raise ConfigError(f"{told}; --problems, --level, --index and --seed say which, and how.")
    config = SweepConfig.from_dict(with_width(settings | own))
    has = {field.name for field in fields(STRATEGIES[config.strategy])}
    for setting in ("beam_width", "max_depth"):
        value = (settings | own).get(setting)
        if setting not in has and value not in (None, getattr(SweepConfig(), setting)):
            raise ConfigError(f"{config.strategy} has no {setting}, given {value}: leave it out.")
    if llm_share in (0, 1):
        raise ConfigError(f"--llm-share is {llm_share:g}; allowed: between 0 and 1, not these.")
    if engine is None:
        spec = RunSpec(config, 0.3 if llm_share is None else llm_share, seed)
        room = feasibility(spec)
        if not room.fits:
            raise OutOfMemory(f"{room}. {shares_of(config)}.")
        llm, prm = execute.Pair(spec).engines.values()
    else:
        llm, prm = _foreign_pair(engine, config, llm_share)
    result = execute.make_search([chosen], llm, prm, config, seed).play()
    _show_search(result, chosen, tree_depth, config.strategy not in VOTE_ONLY)


def _foreign_pair(engine: str, config: SweepConfig, llm_share: float | None) -> Any:
    """Both models by `transformers` or by servers; refuses settings that only our engine has."""
    of_ours = {each.name for each in fields(EngineConfig)} | {"total_memory", "llm_share", "policy"}
    of_ours -= {"max_model_len"} | ({"dtype", "device"} if engine == "transformers" else set())
    given = {f.name for f in fields(config) if getattr(config, f.name) != f.default}
    given |= set() if llm_share is None else {"llm_share"}
    for name in sorted(given & of_ours):
        raise ConfigError(f"--engine {engine} does not take {name}, a setting of our own engine.")
    models, longest = (config.llm, config.prm), config.max_model_len
    if engine == "transformers":
        from workbench.engine.foreign import TransformersEngine

        dtype = "float32" if config.dtype == "auto" else config.dtype
        how: dict[str, Any] = {"dtype": dtype, "device": config.device, "max_model_len": longest}
        return [TransformersEngine(model, **how) for model in models]
    known: dict[str, Any] = {"kind": str, "files": str, "timeout": float, "in_flight": int}
    servers = list[tuple[str, dict[str, Any]]]()
    with suppress(KeyError, ValueError):
        for url in map(urlsplit, engine.split(",")):
            own = {
                n: known[n](text)
                for n, text in parse_qsl(url.query, strict_parsing=bool(url.query))
            }
            if url.scheme in ("http", "https"):
                servers.append((url._replace(query="").geturl(), own))
    if not 0 < len(servers) == engine.count(",") + 1 < 3:
        told = f"--engine is {engine!r}; allowed: transformers, or one or two URLs, each with "
        told += f"?{'=...&'.join(known)}=... behind it or without."
        raise ConfigError(told + nearest(engine, ["transformers"]))
    if len(servers) == 1 and "files" in servers[0][1] and len({*models}) > 1:
        raise ConfigError(
            "files= is of one model; give the URL twice, each with its model's files."
        )
    try:
        from workbench.engine.remote import RemoteEngine
    except ModuleNotFoundError as error:
        raise ConfigError(f"A server needs {error.name}: pip install httpx.") from error
    how = {"api_key": os.environ.get("WORKBENCH_API_KEY"), "max_model_len": longest}
    sides = zip((servers[0], servers[-1]), models)
    return [RemoteEngine(url, model, **how, **own) for (url, own), model in sides]


def _show_search(result: SearchResult, problem: Problem, depth: int, is_scored: bool) -> None:
    """Problem, tree down to a depth (its kept nodes bold), answer and speed."""
    import pandas as pd
    from rich.markup import escape
    from rich.tree import Tree

    console, row, nodes = terminal(), result.problems.iloc[0], result.tree
    console.print(f"[bold]problem[/]  {escape(problem.problem)}")
    if depth:
        tree = Tree(f"tree  ({'score, ' * is_scored}step; bold: kept)")
        branches = {"": tree}
        shown = nodes[nodes["depth"] <= depth].sort_values(["depth", "path"])
        for node in shown.to_dict("records"):
            style = "bold" if node["kept"] else "dim"
            score = f"{node['score']:.3f}  " * is_scored
            label = f"[{style}]{score}{escape(' '.join(node['text'].split()))}[/]"
            branches[node["node_id"]] = branches[node["parent_id"]].add(label)
        console.print(tree)
    wrong = f"  (wrong; it is {escape(str(row['answer']))})"
    verdict = "" if pd.isna(row["correct"]) else "  (right)" if row["correct"] else wrong
    console.print(f"[bold]answer[/]   {escape(row['predicted'] or '(none)')}{verdict}")
    voted = result.candidates["answer"] == row["predicted"]
    best = result.candidates[voted].iloc[0]["text"]
    steps = filter(None, map(str.strip, best.split("\n\n")))
    console.print(f"[bold]best[/]     {escape(' / '.join(steps))}")
    counts = f"{len(nodes)} nodes, {row['tokens']} tokens, {row['iterations']} iterations"
    console.print(f"[bold]speed[/]    {result.throughput}; {counts}")


Asked = Annotated[dict[str, Any], [
    option("total", str, "weights to KV of both (default: 90 % of the device's)", metavar="SIZE"),
    option("llm_share", float, "the present split, to compare with (default: 0.5)"),
    option("strategy", str, "as `run` has them, not all (default: beam_search)", metavar="NAME"),
    option("n", int, "beams of a problem (default: 16)"),
    option("beam_width", int, "children of a survivor (default: 4)"),
    option("in_flight", int, "problems in flight (default: 48)"),
    option("max_num_seqs", int, "sequences in a step of either model (default: 256)"),
    option("max_num_batched_tokens", int, "tokens in a step (default: 8192)"),
    option("max_model_len", int, "tokens of a request (default: 4096)"),
    option("block_size", int, "tokens of a block (default: 16)"),
    option("whole", bool, "compare shares over whole searches, in some minutes"),
    option("kv_bits", int, "of a number in both KV caches, 16 or 8 (default: 16)"),
    option("critiques", int, "that the PRM writes of a step before its score (default: none)"),
    option("critique_tokens", int, "of a critique, at most (default: 512)"),
]]  # fmt: skip


def advise(
    llm: str = Option("llama-3.2-1b", help="generator: a name, hub id, or folder"),
    prm: str = Option("llama-3.1-8b-prm", help="process reward model: likewise"),
    device: str = Option("a100-40", help="a preset, or a .json file of another device (README)"),
    *,
    asked: Asked,
    json: bool = Option(False, "--json", help="print all of it as JSON"),
) -> None:
    """Split one device's memory between two models of your own.

    Replays a search of their shapes at a few shares, in simulated seconds; loads no weights.
    """
    from json import dumps

    from workbench.replay import advise as advice

    found = advice.advise(llm, prm, device=device, **asked)
    if json:
        print(dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        _show_advice(found)


def _show_advice(found: Advice) -> None:
    """The answer as a page of 100 columns, with the replays that it stands on."""
    from rich.console import Console
    from rich.markup import escape

    from workbench.replay.advise import CONTEXTS, NO_LIMIT, SHARE, WHOLE
    from workbench.replay.devices import load_device

    asked, share = found.question, found.recommended
    width = f", beam width {asked.beam_width}" * (asked.strategy in OF_WIDTH)
    rows = found.replays.to_dict("records")
    at = {row["llm_share"]: row for row in rows if row["what"] == SHARE}
    give = format_size(share * found.total), format_size((1 - share) * found.total)
    beyond = (share - found.feasible[0], found.feasible[1] - share)
    room = " and ".join(format_size(each * found.total) for each in beyond)
    count = rows[0]["rounds"]  # None: all
    rounds = f"the first {count:.0f} rounds" if count else "the whole search"
    deeper = " (whole searches are deeper and may lose more: --whole)" if count else ""
    over = f"within 2 % of the best, over {rounds}"
    if found.whole:
        over = "neither cache is short in a whole search"
    console = Console(highlight=False, width=100)
    console.print(
        f"{asked.llm} (LLM) and {asked.prm} (PRM) in {format_size(found.total)} of {asked.device}; "
        f"{asked.strategy}, n = {asked.n}{width}, {asked.in_flight} problems in flight, "
        f"{asked.max_num_seqs} sequences and {asked.max_num_batched_tokens:,} tokens a step\n\n"
        f"[bold]share {share:.3g}[/]: {give[0]} to the LLM, {give[1]} to the PRM\n"
        f"room       {room} more than the least that each starts with\n"
        f"feasible   {found.feasible[0]:.3f} to {found.feasible[1]:.3f}\n"
        f"plateau    at least {found.plateau[0]:.3g} to {found.plateau[1]:.3g}: {over}\n"
        f"Over {rounds}, against the best{deeper}:"
    )
    present = 0.5 if asked.llm_share is None else asked.llm_share
    for each in sorted({min(at), max(at), share, present}):
        if each not in at:
            console.print(f"at {each:<7.3g} does not fit: the first note says what lacks")
            continue
        row = at[each]
        short = [f"{role.upper()} cache lacks {row[f'{role}_lacks_tokens']:,.0f} tokens"
                 for role in ("llm", "prm") if row[f"{role}_lacks_tokens"]]  # fmt: skip
        again, computed = (
            row[f"llm_{name}"] + row[f"prm_{name}"] for name in ("computed_again", "computed")
        )
        console.print(
            f"at {each:<7.3g} {row['against_best']:+.1%} tokens/s, {again:,} tokens "
            f"({again / computed:.1%}) computed again: {', '.join(short) or 'no cache is short'}"
        )
    gains = found.replays["against_best"].iloc[0]
    console.print(f"no limit   {gains:+.1%} tokens/s: what more memory could give over {rounds}\n")
    console.print("[bold]What to change first[/] (alone, at this share; n changes accuracy too)")
    for row in found.changes.to_dict("records"):
        gains = f"{row['tokens_per_s']:+.1%} tokens/s, {row['problems_per_min']:+.1%} problems/min"
        console.print(f"  {row['what']:18} {gains}")

    def both(row: Mapping[Any, Any], name: str, form: str, scale: float = 1) -> str:
        pair = (row[f"{role}_{name}"] * scale for role in ("llm", "prm"))
        return " / ".join(format(value, form) for value in pair)

    head = ("", "share", "KV ktokens", "lacks k", "hits %", "again k", "tokens/s", "best", "took s")
    cells = []
    for row in rows:
        limited = row["what"] not in (NO_LIMIT, WHOLE)
        kv, lacks = (both(row, f"{n}_tokens", ",.0f", 1e-3) for n in ("kv", "lacks"))
        sizes = kv if limited else "", lacks if row["what"] == SHARE else ""
        share_ = f"{row['llm_share']:.3g}" if limited else ""
        hits, again = both(row, "hit_rate", ".1f", 100), both(row, "computed_again", ",.0f", 1e-3)
        best = "" if row["what"] == WHOLE else f"{row['against_best']:+.1%}"
        rate = f"{row['tokens_per_s']:,.0f}", best
        cells.append((row["what"], share_, *sizes, hits, again, *rate, f"{row['replay_s']:.1f}"))
    console.print("\n[bold]Replays[/] (LLM / PRM)")
    console.print(table(head, cells))
    console.print(
        "lacks: thousands of tokens of cache, to hit 99 % of what one without limit hits; again: "
        "thousands of tokens computed again after eviction or preemption"
    )
    starts = {  # and the port of the first
        "vLLM": ("vllm serve", 8000),
        "SGLang": ("python -m sglang.launch_server --model-path", 30000),
    }
    left = load_device(asked.device).memory_bytes - found.total
    if left < CONTEXTS:
        console.print(
            f"\n[bold]The second may not start[/]: two contexts take {format_size(CONTEXTS)} at "
            f"least and have {format_size(left)}. Ask with less --total."
        )
    for engine, instances in found.flags.items():
        console.print(f"\n[bold]{engine}[/], the LLM first, the PRM once it is up")
        command, first = starts[engine]
        for port, flags in enumerate(instances, first):
            (_, model), *options, (exact, size) = flags.items()
            words = [f"--port {port}", *(f"--{name} {value}" for name, value in options)]
            print(f"  {command} {model} \\\n    {' '.join(words[:3])} \\")
            print(f"    {' '.join(words[3:])}\n  # {EXACTLY[engine].format(f'--{exact} {size}')}")
    console.print("\n" + "\n".join(f"- {escape(note)}" for note in found.notes))


Served = Annotated[dict[str, Any], [
    option("host", str, "address to bind", "127.0.0.1"),
    option("port", int, "0: any that is free", 8000, min=0, max=65535),
    option("max_queue", int, "requests of a model that may wait (else 503)", 256, min=0),
    option("timeout", float, "seconds to an answer (else 504)", 600.0, min=0),
    option("api_key", str, "that clients must send", envvar="WORKBENCH_API_KEY"),
    option("memory", str, "of all KV caches together", metavar="SIZE"),
]]  # fmt: skip


def serve(
    *,
    model: list[str] = Argument(help="names; all of them as NAME=SIZE of KV cache, or none"),
    given: Served,
    engine: list[str] = Option(None, "--set", metavar="KEY=VALUE", help="of EngineConfig, for all"),
) -> None:
    """Serve models, and searches, to clients of OpenAI or vLLM.

    Ends at Ctrl-C or SIGTERM: what is in flight has ten seconds to finish.
    """
    import logging

    try:
        from workbench.serving import server
    except ModuleNotFoundError as error:
        raise ConfigError(f"serve needs {error.name}: pip install -e '.[serve]'.") from error
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server.serve(server.ServeConfig(tuple(model), **given), key_values(engine, "--set"))
    except KeyboardInterrupt:  # the server ended in order, and raises the signal again
        return
    finally:
        signal.signal(signal.SIGTERM, handler)


Measured = Annotated[dict[str, Any], [
    option("profile", Literal["quick", "default", "full"], "repeats or problems", "default"),
    option("model", str, "what is measured (default: tiny-solver)"),
    option("llm", str, "search, identity, reenact: generator (default: the tiny one)"),
    option("prm", str, "search, identity, reenact, prm: reward model (tiny-prm, else the LLM)"),
    option("data", str, "prm: a .jsonl file as ProcessBench's (default: the tiny family)"),
    option("prm_format", str, "prm: how it is asked (default: as its name tells)"),
    option("critiques", int, "prm: of a verifier that writes them, a step", min=1),
    option("critique_tokens", int, "prm: of a critique, at most", min=1),
    option("problems", str, "search, identity: file (default: by the models)"),
    option("seed", int, "where the bench takes one (default: 0)", min=0),
    option("seeds", int, "search: how many, not the profile's number", min=1),
    option("repeats", int, "engine, kernels, replay, serve, search --peer", min=1),
    option("minutes", float, "soak: how long (default: the profile's, 20)", min=0),
    option("peers", str, "installed (engine's default), none (serve's), or names and commas"),
    option("peer", str, "search: vllm-both, search-and-learn[=CHECKOUT], or both and a comma"),
    option("strategy", str, "search --peer: beam_search (default), best_of_n, dvts"),
    option("device", str, "engine, reenact: cpu (default), or a GPU: cuda, cuda:1"),
    option("part", str, "serve: shared, two"),
    option("clients", str, "serve: at a time (default: 1,4,16,64)"),
    option("rate", float, "serve: requests a second, arriving by chance", min=0.001),
    option("slo_ttft", float, "serve: seconds to a good request's first token (default: 1)", min=0),
    option("slo_itl", float, "serve: between its tokens, the mean (default: 0.1)", min=0),
    option("url", str, "serve: of a server that runs already"),
]]  # fmt: skip
Benchmark = Literal["engine", "search", "identity", "memory", "prm", "kernels", "replay", "reenact",
                    "serve", "soak", "stale"]  # fmt: skip


def bench(
    given: Measured,
    name: Benchmark = Argument(
        help="what to measure; stale: records that the code has changed under"
    ),
    json: str = Option(None, help="write the record (machine, versions, commit, rows) here"),
    isa: str = Option(None, help="avx512, avx2, neon: a lesser set than the host's, peers' too"),
) -> None:
    """Measure speed, search quality, sameness or endurance.

    Prints each row as it is measured (serve, search, prm, memory, soak and replay: at the end);
    --json FILE also keeps those of a run that was interrupted.
    """
    if isa is not None and name != "stale":
        from workbench.kernels.isa import environment

        if not environment(isa).items() <= os.environ.items():  # again: all it loads takes the set
            again = [sys.executable, *sys.orig_argv[1:]]
            os.execve(sys.executable, again, os.environ | environment(isa))
    console = terminal()
    if name == "stale":
        from workbench.bench import doubted

        if json or isa or given.keys() - {"profile"} or given["profile"] != "default":
            raise ConfigError("bench stale takes no option: it lists records of every benchmark.")
        console.print("\n".join(doubted()) or "Every record stands.")
        return
    from workbench.bench import measure

    rows = measure(name, given, json, partial(console.print, markup=False))
    failed = [row.name for row in rows if row.failed]
    if failed:
        console.print(f"Failed: {', '.join(failed)}.", style="red")
        raise Exit(FAILED)


def calibrate(
    out: str = Option("device.json", help="the .json file to be written"),
    num_problems: int = Option(4, min=1, help="problems of a search"),
    repeats: int = Option(3, min=1, help="searches of a setting; steps are their means"),
    seed: int = Option(0, help="of the searches"),
) -> None:
    """Measure this machine as a device for replays.

    Searches the embedded pair; leave the machine to it meanwhile.
    """
    from workbench.bench import replay
    from workbench.replay.devices import write_device
    from workbench.search.recording import require_destination

    require_destination(out)
    if Path(out).suffix != ".json":  # as load_device reads it
        raise ConfigError(f"--out is {out!r}; give a name that ends in .json.")
    device = replay.calibrate(num_problems, repeats, seed)
    terminal().print(
        f"{device.name}: {device.flops_per_s / 1e9:,.0f} GFLOP/s, "
        f"{device.bytes_per_s / 1e9:,.1f} GB/s, terms of {', '.join(device.terms)}\n"
        f"written: {write_device(device, out)}"
    )


def record(
    name: str = Argument(help="a recording of the package, e.g. tiny-128"),
    out: str = Option(None, help="the file to be written (default: NAME.parquet)"),
    problems: str = Option(None, help="file of MATH-500 for smollm2-* (default: the hub's)"),
) -> None:
    """Make a recorded search of the package anew.

    Names and what each holds: replay/data/README.md in the package.
    """
    from workbench.bench.search import make_recording

    path = Path(out or f"{name}.parquet")
    result = make_recording(name, path, problems)
    size = f"{len(result.tree):,} nodes, {path.stat().st_size / 1000:,.0f} kB"
    terminal().print(f"{path}: {len(result.problems)} problems, {size}")


Embedded = StrEnum("Embedded", {"solver": "tiny-solver", "prm": "tiny-prm"})


def train_tiny(
    out: str = Option(None, help="folder the model folders are written to (default: trained)"),
    minutes: float = Option(None, help="training time of all models together (default: 60)"),
    seed: int = Option(0, help="of data and initial weights"),
    model: list[Embedded] = Option(None, help="only this one (repeatable)"),
    card: bool = Option(False, "--card", help="train nothing: print the table of the model card"),
    num_problems: int = Option(
        None, min=1, help="--card: fresh problems, uniform over levels (default: 128)"
    ),
) -> None:
    """Train the embedded models anew."""
    trains = bool(out or model) or minutes is not None
    if trains if card else num_problems is not None:
        raise ConfigError(
            "train-tiny --card takes --num-problems and --seed alone, which without --card "
            "trains no model: give the one or the others."
        )
    if card:
        from workbench.training.card import embedded_card

        print(embedded_card(num_problems or 128, seed))
        return
    import logging

    from workbench.training import training

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    models = tuple(model or Embedded)
    time = 60.0 if minutes is None else minutes
    for folder in training.train_tiny(out or "trained", minutes=time, seed=seed, models=models):
        print(f"written: {folder}")


def doctor() -> None:
    """Print what this machine has and what is missing.

    Line by line, as it is found, what is cheap first. Changes nothing. Exit status 1 when something
    is missing that every run needs.
    """
    from workbench.experiments import provenance
    from workbench.experiments.energy import EnergyMeter
    from workbench.experiments.runs import RunStore
    from workbench.models.loading import load_model  # brings torch: its threads and GPU are told
    from workbench.models.spec import ARCHITECTURES
    from workbench.search.prm import FORMATS

    console, lacks = terminal(), False

    def tell(topic: str, found: str, remedy: str = "", style: str = "yellow") -> None:
        text = f"{topic:14}{found}" + (f"\n  -> {remedy}" if remedy else "")
        console.print(text, style=style if remedy else None, markup=False, soft_wrap=True)

    facts = provenance.machine_facts()
    features = " ".join(provenance.cpu_features())
    tell("processor", f"{facts['cpu']}, {facts['cores']} cores usable, {features}")
    crowded = facts["threads"] > facts["cores"]
    slow = f"more threads than cores: set OMP_NUM_THREADS={facts['cores']}" if crowded else ""
    tell("threads", f"{facts['threads']} a matrix product", slow)
    memory = facts["memory_bytes"]
    tell("memory", format_size(memory) if memory else "not told by this system")
    tell("GPU", facts["gpu"] or "none seen by torch")
    tell("energy", EnergyMeter().source)
    tell("versions", ", ".join(f"{k} {v}" for k, v in provenance.versions().items()))
    git = provenance.git_state()
    changed = ", with changes" if git["dirty"] else ""
    tell("commit", f"{git['commit'][:12]}{changed}" if git["commit"] else "no checkout")
    for name, (purpose, remedy) in EXTRAS.items():
        try:
            version(name)
        except PackageNotFoundError:
            tell(name, f"not installed; needed by: {purpose}", remedy)
    tell("architectures", ", ".join(ARCHITECTURES))
    tell("PRM formats", ", ".join(FORMATS))
    kept = any((provenance.PACKAGE / "kernels" / "cpu").rglob("*.nbi"))
    compiled = kept or "NUMBA_CACHE_DIR" in os.environ
    if not compiled:
        unknown = "not compiled yet: the first run does it, once, in about a minute"
        tell("kernels", f"{unknown}; the embedded models were not loaded for it")
    for name in Embedded if compiled else ():  # read and prepared as a run does it
        try:
            model: Any = load_model(name)
        except WorkbenchError as error:
            tell(name, "cannot be loaded", str(error), "red")
            lacks = True
            continue
        size, kernels = format_size(model.weight_bytes), model.kernels
        same = "tokens may differ between batches"
        if kernels.batch_invariant:
            same = f"equal tokens in any batch, {kernels.pool.threads} threads"
        where = f"{kernels.name} kernels on {model.device}"
        tell(name, f"{size} of weights; {where}; {same}")
    browser = next(filter(None, (os.environ.get("BROWSER_PATH"), *map(shutil.which, BROWSERS))), "")
    remedy = "SVG and PDF need one (Debian: apt install chromium), or set BROWSER_PATH"
    tell("browser", browser or "none", "" if browser else remedy)
    folder, free = provenance.runs_folder(), shutil.disk_usage(provenance.project_root()).free
    runs = len(RunStore(folder).folders())
    full = "less than 1 GiB is left on this disk" if free < 2**30 else ""
    tell("runs", f"{folder}: {runs} kept, {format_size(free)} free", full)
    if lacks:
        raise Exit(FAILED)
