"""Runs carried out: searches interleaved by rounds, and replays.

Searches of a group take rounds in turn in one process, each with engines and a clock of its own, so
that a slow minute of the machine is a slow minute of all; weights are the same tensors for all.
Garbage is collected between the rounds: a full collection goes through the objects of every search
and would be the time of one (of equal work, searches of 13 s lay 2.4 % apart, and so 0.4 %).
The module of the experiments that loads models. It measures and decides nothing.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from workbench.config import SearchConfig, StrategyConfig, SweepConfig
from workbench.core import TokenEngine
from workbench.engine.engine import Engine
from workbench.engine.memory import block_shape
from workbench.errors import ConfigError
from workbench.experiments import settings
from workbench.experiments.energy import EnergyMeter
from workbench.experiments.memory import ENGINES, feasibility, starting_share
from workbench.experiments.provenance import this_code
from workbench.experiments.runs import Outcome, RunResult, sweep_problems
from workbench.experiments.settings import Identity, RunSpec
from workbench.experiments.statistics import SIMULATED
from workbench.host import collection_paused, total_memory
from workbench.kvcache.arena import KVArena
from workbench.models.loading import require_device
from workbench.models.registry import model_spec
from workbench.replay import workload
from workbench.replay.answers import Answers
from workbench.replay.devices import Device
from workbench.replay.simulator import POLICIES, recorded_strategy
from workbench.replay.what_if import what_if
from workbench.replay.workload import load_recording, recording_names, recording_path
from workbench.search.prm import PRM, Critiques
from workbench.search.problems import Problem
from workbench.search.result import SearchResult, Throughput
from workbench.search.rounds import Progress
from workbench.search.search import Search
from workbench.search.strategies import Strategy
from workbench.search.variants import STRATEGIES, strategy_with
from workbench.trace import SCHEMA_VERSION, Trace

Execute = Callable[[Sequence[RunSpec]], Iterable[tuple[RunSpec, Outcome | Progress]]]
"""Carries out the first of these runs, and as many more as it would beside it, each handed back as
soon as it has ended; until then it may be told how far a search is.
"""
COUNTS = (
    *("preempted", "allocated", "evicted", "thrashed", "thrash_events", "query_tokens"),
    *("hit_tokens", "prefill_tokens", "decode_tokens", "recomputed_tokens_evicted"),
    *("recomputed_tokens_preempted", "recomputed_tokens_partial"),
)
"""Columns of `steps` whose sums are kept in the `runs` row, one each an engine."""


def one_by_one(function: Callable[[RunSpec], RunResult]) -> Execute:
    """Carries out runs one after the other; can be sent to a worker where the function can."""
    return partial(_first_of, function)


def _first_of(
    function: Callable[[RunSpec], RunResult], specs: Sequence[RunSpec]
) -> Iterator[tuple[RunSpec, Outcome]]:
    try:
        yield specs[0], function(specs[0])
    except Exception as problem:  # a study outlives whatever one of its runs raises
        yield specs[0], problem
    gc.collect()  # engines hold cycles; the next run must not pay for this one's memory


# -- searches --


class Searches:
    """Carries out the searches of a group, as many interleaved as fit into half of the memory.

    Before the first a few problems are searched and thrown away: kernels are compiled, caches warm.
    """

    def __init__(self) -> None:
        self._warm = False

    def __call__(self, specs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, Outcome | Progress]]:
        few = min(specs[0].config.num_problems, specs[0].config.warmup_problems)
        if few and not self._warm:
            config = replace(specs[0].config, num_problems=few)
            with suppress(Exception):  # the measured runs keep it as a row
                Pair(replace(specs[0], config=config)).search().play()
                self._warm = True
        yield from _interleaved(specs[: num_at_once(specs)])
        gc.collect()  # engines hold cycles; the next runs must not pay for their memory


def num_at_once(specs: Sequence[RunSpec]) -> int:
    """How many of them take turns: as fit into half of the memory; on a GPU one."""
    if specs[0].config.device != "cpu":
        return 1
    sizes = accumulate(spec.total_bytes for spec in specs)
    return max(1, sum(size <= total_memory() // 2 for size in sizes))


def _interleaved(specs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, Outcome | Progress]]:
    """Every search in turn plays a round; each turn begins with the next of them."""
    first: Pair | None = None
    running: list[tuple[Pair, Search]] = []
    meter = EnergyMeter(gpu_uuid(specs[0].config.device))
    for spec in specs:
        try:
            pair = Pair(spec, first)
            running.append((pair, pair.search()))
            first = first or pair
        except Exception as problem:  # a study outlives whatever one of its runs raises
            yield spec, problem
    while running:
        left = []
        for pair, search in running:
            outcome: Outcome | Progress
            try:
                meter.joules()  # what others used
                with collection_paused():
                    goes_on, joules = search.round(), meter.joules()
                pair.joules = None if joules is None else joules + (pair.joules or 0.0)
                if goes_on:
                    left.append((pair, search))
                    outcome = search.progress
                else:
                    outcome = pair.result_of(search.result())
            except Exception as problem:
                outcome = problem
            yield pair.spec, outcome
        running = left[1:] + left[:1]


def gpu_uuid(device: str) -> str:
    """As NVML names the device of torch's name; "" for a processor."""
    if require_device(device).type != "cuda":
        return ""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


class Pair:
    """Both engines of a run, each in its memory, or both in one arena. weights: another pair whose
    tensors are shared. kind: of engine. joules: what its rounds used; None where no machine tells.
    Raises whatever building them raises.
    """

    def __init__(
        self, spec: RunSpec, weights: Pair | None = None, kind: type[Engine] = Engine
    ) -> None:
        self.spec, self.arena = spec, make_arena(spec) if spec.config.policy else None
        self.engines: dict[str, Engine] = {}
        self.joules: float | None = None
        for role in ENGINES:
            given = spec.engine(role).to_dict()
            given |= {} if self.arena is None else {"arena": self.arena, "arena_name": role}
            given["weights"] = weights and weights.engines[role].weights
            self.engines[role] = kind(**given)

    def search(self) -> Search:
        """The run's search, to be played."""
        spec, (llm, prm) = self.spec, self.engines.values()
        return make_search(sweep_problems(spec.config), llm, prm, spec.config, spec.seed)

    def result_of(self, result: SearchResult) -> RunResult:
        """What the run brings: cells of its row, problems, nodes and the trace of both engines."""
        parts = {role: memory_parts(engine) for role, engine in self.engines.items()}
        cells = run_columns(result.throughput, result.trace, parts)
        cells["accuracy"] = result.accuracy
        if self.joules is not None:
            each = self.joules / result.throughput.tokens
            cells |= {"joules": self.joules, "joules_per_token": each}
        if self.arena is not None:
            cells |= _arena_columns(result.trace, self.arena)
        tables = {"problems": with_wall_part(result.problems, result.throughput)}
        return RunResult(cells, tables | {"nodes": result.tree} | _traced(result.trace))


def _traced(trace: Trace) -> dict[str, pd.DataFrame]:
    return {name: getattr(trace, name) for name in ("steps", "requests", "spans")}


def make_arena(spec: RunSpec) -> KVArena:
    """The memory of both models. OutOfMemory where a floor cannot be met."""
    names, shapes = ("block_size", "max_model_len", "dtype", "device"), []
    for role in ENGINES:
        own = spec.engine(role)
        given = {name: getattr(own, name) for name in names}
        shapes.append(block_shape(own.model, name=role, **given))
    kv_bytes, kv_share = kv_split(spec)
    return KVArena(kv_bytes, shapes, POLICIES[str(spec.config.policy)](), kv_share)


def kv_split(spec: RunSpec) -> tuple[int, float | None]:
    """Bytes of both caches: what a run gives them, else what both models leave of the total. And
    the LLM's part as the run's share comes to; None where a policy keeps no split.
    """
    kv_bytes, kv_share = spec.get("kv_bytes"), spec.get("kv_share")
    if kv_bytes is None:
        (llm, llm_bytes), (prm, _) = map(feasibility(spec).of, ENGINES)
        kv_bytes = spec.total_bytes - llm.fixed - prm.fixed
        keeps = spec.config.policy is None or POLICIES[spec.config.policy]().keeps_split
        kv_share = (llm_bytes - llm.fixed) / kv_bytes if keeps else None
    return kv_bytes, kv_share


def make_strategy(config: StrategyConfig) -> Strategy:
    """The strategy a configuration names, with its settings; the search sets its aggregation."""
    names = {each.name for each in fields(StrategyConfig)} - {"aggregation"}
    return strategy_with(config.strategy, {name: getattr(config, name) for name in names})


def make_search(
    problems: Sequence[Problem],
    llm: TokenEngine,
    prm: TokenEngine,
    config: StrategyConfig,
    seed: int,
    record: Path | None = None,
    **more: Any,
) -> Search:
    """A search with the settings, strategy and PRM's format of `config`. more: of `Search`, in the
    place of these.
    """
    own = {each.name: getattr(config, each.name) for each in fields(SearchConfig)}
    scorer = PRM(prm, own.pop("prm_format"))
    own |= {"strategy": make_strategy(config), "seed": seed, "record": record}
    return Search(problems, llm=llm, prm=scorer, **own | more)


def with_wall_part(problems: pd.DataFrame, throughput: Throughput) -> pd.DataFrame:
    """Problems with wall_part_s: wall time divided among them by their time in flight, `seconds`.

    The parts add up to wall time: tokens over wall_part_s is the run's throughput, by problem.
    """
    seconds = problems["seconds"]
    part = throughput.wall_s / seconds.sum() if seconds.sum() else 0.0
    return problems.assign(wall_part_s=seconds * part)


def run_columns(
    throughput: Throughput, trace: Trace, parts: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Cells of the `runs` row: throughputs, memory parts by engine, and sums over all its steps.

    *_blocks_peak: active at most; *_look_ups: admissions, preempted requests' later ones included.
    *_tokens_per_busy_s: by the seconds in which a model worked; of the PRM the tokens it computed
    for the first time, since recomputing is no progress.
    """
    row = throughput.to_dict()
    row["sampled_tokens"], row["answered_problems"] = row.pop("tokens"), row.pop("problems")
    for role, memory in parts.items():
        own, asked = (each[each["engine"] == role] for each in (trace.steps, trace.requests))
        cells = dict(memory) | {name: int(own[name].sum()) for name in COUNTS}
        cells["blocks_peak"] = int(own["blocks_active"].max()) if len(own) else 0
        admitted = asked.loc[asked["scheduled_s"].notna(), "preemptions"]
        cells["look_ups"] = int((1 + admitted).sum())
        cells["hit_rate"] = cells["hit_tokens"] / (cells["query_tokens"] or float("nan"))
        row |= {f"{role}_{name}": value for name, value in cells.items()}
        row[f"{role}_steps"] = len(own)
    again = sum(row[f"prm_{name}"] for name in COUNTS if name.startswith("recomputed"))
    new = {"llm": row["sampled_tokens"], "prm": row["prm_prefill_tokens"] - again}
    new["prm"] += row["prm_decode_tokens"]  # of critiques
    for role in ENGINES:
        row[f"{role}_tokens_per_busy_s"] = new[role] / (row[f"{role}_busy_s"] or float("nan"))
    return row


def memory_parts(engine: Engine) -> dict[str, Any]:
    """The engine's memory in bytes, part by part, and what its cache holds."""
    memory = engine.memory
    names = ("weights", "activations", "other", "kv")
    parts = {f"{name}_bytes": getattr(memory, name) for name in names}
    parts |= {"block_bytes": memory.block_bytes, "blocks": memory.num_blocks}
    return parts | {"kv_tokens": memory.num_blocks * engine.config.block_size}


def _arena_columns(trace: Trace, arena: KVArena) -> dict[str, Any]:
    """The working set, and what of the memory each model ended with: *_final_share, of a policy
    that keeps a split.
    """
    shapes = {name: arena.packing(name).shape for name in ENGINES}
    cells = _working_set(trace, {n: shape.layers * shape.cell_bytes for n, shape in shapes.items()})
    cells["kv_pages"] = arena.num_pages
    for name, pages in arena.target.items():
        share = pages / arena.num_pages if arena.policy.keeps_split else None
        cells[f"{name}_final_share"] = share
    return cells


def _working_set(trace: Trace, block_bytes: Mapping[str, int]) -> dict[str, Any]:
    """*_active_bytes: the highest at any step. longest: tokens of the longest sequence."""
    requests, most = trace.requests, trace.steps.groupby("engine")["blocks_active"].max()
    longest = (requests["prompt_tokens"] + requests["output_tokens"]).max()
    return {"longest": int(longest)} | {
        f"{name}_active_bytes": int(most.get(name, 0)) * size for name, size in block_bytes.items()
    }


# -- the other rungs: a recorded search of real text, and the thesis's pair at its own size --

DEVICE = "a100-40"
REPLAYED_SETTINGS = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
                     "min_problem_batch", "score_cache", "request_order", "problem_batching",
                     "forget_pruned", "reuse_partial_blocks", "policy")  # fmt: skip
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "max_step_tokens", "voting")
"""Settings that decided what a recorded search sampled and answered."""


def replay_identity(device: Device, config: SweepConfig) -> Identity:
    """What replays depend on beside their settings: recording or assumptions, code, device."""
    is_recorded = config.problems in recording_names()
    source = recording_path(config.problems) if is_recorded else workload.MATH500
    content = hashlib.sha256(source.read_bytes()).hexdigest()
    digest = settings.hash_of([content, asdict(workload.Assumptions()), asdict(device)])
    code = this_code(replayed=True)["code"]
    return Identity(SIMULATED, SIMULATED, digest, code, SCHEMA_VERSION)


def rung_answers(config: SweepConfig, seed: int) -> Answers:
    """The search of a replayed rung, recorded or made, with critiques where the PRM writes them."""
    sizes = config.num_problems, config.n, config.beam_width, config.max_depth, seed
    writes, strategy = None, config.strategy
    if config.prm_format == "thinkprm":
        asked = {"count": config.critiques, "tokens": config.critique_tokens}
        writes = Critiques(**{name: value for name, value in asked.items() if value is not None})
    return _answers(config.problems, sizes, strategy, writes)


@lru_cache(maxsize=1)  # seeds come one after the other: one is kept
def _answers(
    problems: str, sizes: tuple[int, int, int, int, int], strategy: str, writes: Critiques | None
) -> Answers:
    if problems in recording_names():
        found = load_recording(problems)
    else:
        found = workload.thesis_search(*sizes, strategy=strategy)
    return Answers(workload.with_critiques(found, writes, seed=sizes[-1]) if writes else found)


def replayed_run(device: Device, spec: RunSpec) -> RunResult:
    """One share of a replayed rung on a device that is a table of numbers: the same search as at
    every other; stored and read as a measured one. Another PRM than the recording's is one of its
    own shape that gives the same scores. ConfigError for a setting that no replay has.
    """
    config, answers = spec.config, rung_answers(spec.config, spec.seed)
    is_recorded = config.problems in recording_names()
    if config.finish_at_limit:
        raise ConfigError("A replay samples nothing: replay with finish_at_limit=False.")
    how, llm = answers.recording.settings, answers.recording.llm.name
    there: Any = {"llm": llm, "score_shuffle_seed": how.score_shuffle_seed}
    there |= {n: getattr(how, n) for n in SAMPLED}
    sizes = asdict(recorded_strategy(answers.recording))  # type: ignore[call-overload]
    there |= {n: sizes[n] for n in sizes if getattr(config, n, None) is not None}
    there |= {"num_problems": len(answers.recording.problems), "levels": (), "problem_seed": 0}
    there |= {"strategy": next(n for n, s in STRATEGIES.items() if s.__name__ == how.strategy)}
    there |= {} if is_recorded else {"dtype": "bfloat16", "problems": "math500"}
    for name, value in there.items():
        if (given := getattr(config, name)) != value:
            raise ConfigError(f"{name} is {given!r}; the search that is replayed has {value!r}.")
    if spec.seed != how.seed:
        raise ConfigError(f"seed is {spec.seed}; the search that is replayed has {how.seed}.")
    asked: dict[str, Any] = {name: getattr(config, name) for name in REPLAYED_SETTINGS}
    for role in ENGINES:
        own = ((n.removeprefix(f"{role}_"), v) for n, v in spec.own if n.startswith(f"{role}_"))
        asked[role] = dict(own)
    kv_memory, kv_share = kv_split(spec)
    if kv_share is None and POLICIES[str(config.policy)]().keeps_split:  # as its arena starts
        kv_share = starting_share(config, kv_memory)
    asked |= {"kv_memory": kv_memory, "kv_share": kv_share}
    rung = f"replayed {config.llm}" if is_recorded else settings.REPLAYED
    rung = settings.RECORDED if config.problems == settings.RECORDING else rung
    if config.prm != answers.recording.prm.name:
        shape, need = model_spec(config.prm), feasibility(spec).prm
        asked |= {"prm_spec": shape, "prm_name": config.prm}
        asked["dtype_bytes"] = need.block_bytes // shape.block_bytes(config.block_size, 1)
        rung = f"replayed {config.llm} + {config.prm}"
    found = what_if(answers, device=device, **asked)
    parts = {}
    for role, memory in zip(ENGINES, found.memory, strict=True):
        held = {"weights_bytes": memory.weight_bytes, "kv_bytes": memory.kv_bytes}
        held["activations_bytes"] = feasibility(spec).of(role)[0].activations
        held |= {"block_bytes": memory.block_bytes, "blocks": memory.num_blocks}
        parts[role] = held | {"kv_tokens": memory.num_blocks * config.block_size}
    row = run_columns(found.throughput, found.trace, parts)
    if config.policy:
        row |= _working_set(found.trace, {r: parts[r]["block_bytes"] for r in ENGINES})
    row |= {"rung": rung, "machine": f"simulated {device.name}"}
    requests = found.trace.requests
    by_problem = requests.groupby("problem_id")  # its part of wall time goes by its seconds
    seconds = by_problem["finished_s"].max() - by_problem["arrival_s"].min()
    prm = requests[requests["engine"] == "prm"]
    computed = prm["prompt_tokens"] - prm["cached_tokens"]
    computed += (prm["output_tokens"] - 1).clip(lower=0)  # of critiques; the last is not read yet
    computed = computed.groupby(prm["problem_id"]).sum()
    tokens = found.trace.nodes.groupby("problem_id")["step_tokens"].sum()
    rows = pd.DataFrame({"tokens": tokens, "seconds": seconds, "prm_tokens_computed": computed})
    levels = {p.problem.id: p.problem.level for p in answers.recording.problems}
    rows["level"] = rows.index.map(levels)
    problems = with_wall_part(rows, found.throughput).rename_axis("problem_id").reset_index()
    return RunResult(row, {"problems": problems} | _traced(found.trace))
