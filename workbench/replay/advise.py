"""Advice on a pair of models in one memory: where to split it, and what to change first.

    found = advise("llama-3.2-1b", "llama-3.1-8b-prm", device="a100-40", total="40GiB")
    found.recommended, found.plateau, found.replays, found.flags

A beam search is drawn (workload.thesis_search) and replayed once with memory without limit. The
cache calls of that replay give both models' miss-ratio curves, and so a guess of what each share
loses. The guess chooses shares; each is replayed exactly and corrects the guess around it. Every
number of the answer is a row of the table of replays, or arithmetic on bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.config import AtLeastOne, Range, check, format_size, parse_size, require_known
from workbench.errors import ConfigError, OutOfMemory
from workbench.models.registry import REGISTRY
from workbench.replay.answers import Answers
from workbench.replay.cost import ModelWork, recorded, spec_of
from workbench.replay.devices import load_device
from workbench.replay.miss_ratio import miss_ratio
from workbench.replay.simulator import Replayed, replay
from workbench.replay.workload import DTYPE_BYTES, LLM, PRM, drawn_engine, thesis_search
from workbench.search.recording import RecordedEngine

ROLES = ("llm", "prm")
RATES = ("tokens_per_s", "problems_per_min")
REPLAYS = 6  # shares that are replayed
NEAR = 0.02  # a plateau: shares that lose less than this to the best
ENOUGH = 0.99  # a cache is short that hits less than this part of what one without limit hits
MOST_BEAMS = 3072  # n 64 with 48 problems in flight
NODES, LEAST_ROUNDS, MOST_ROUNDS = 12288, 6, 24  # of a replay: beams times rounds
PROBLEMS, LEAST_PROBLEMS = 2, 16  # of the search: times those in flight, so that these stay so many
USABLE = 0.9  # of the device's memory, where no total is given; drivers take some
OPTIONS = {  # the memory's part, sequences, tokens of a step, of a request; exactly: the KV's size
    "vLLM": ("gpu-memory-utilization", "max-num-seqs", "max-num-batched-tokens", "max-model-len",
             "kv-cache-memory-bytes"),
    "SGLang": ("mem-fraction-static", "max-running-requests", "chunked-prefill-size",
               "context-length", "max-total-tokens"),
}  # fmt: skip
CHANGED = ("max_num_seqs", "in_flight", "n")
SHARE, NO_LIMIT = "share", "no limit"  # what a row of the table of replays is of
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. llm, prm: any name of a model whose config.json is at hand; device: a preset,
    or a file of `workbench calibrate`.

    total: weights, activations and KV of both; empty: 90 % of the device's memory. llm_share: the
    present split, None: 0.5 where it fits. in_flight: problems. Limits are both models'.
    """

    llm: str = LLM
    prm: str = PRM
    device: str = "a100-40"
    total: int | str = ""
    llm_share: Annotated[float | None, Range(0, 1, "()")] = None
    n: Annotated[int, Range(1, 64, "[]")] = 16
    beam_width: AtLeastOne = 4
    in_flight: Annotated[int, Range(1, 192, "[]")] = 48
    max_num_seqs: AtLeastOne = 256
    max_num_batched_tokens: AtLeastOne = 8192
    max_model_len: AtLeastOne = 4096
    block_size: AtLeastOne = 16

    def __post_init__(self) -> None:
        check(self)
        beams = self.n * self.in_flight
        if beams > MOST_BEAMS:
            raise ConfigError(
                f"n = {self.n} with {self.in_flight} problems in flight are {beams:,} beams; "
                f"allowed: at most {MOST_BEAMS:,}. Give less of either."
            )

    @property
    def rounds(self) -> int:
        """How many the search is replayed for, two a step (sampled, scored): some seconds."""
        return max(LEAST_ROUNDS, min(MOST_ROUNDS, NODES // (self.n * self.in_flight)))

    @property
    def problems(self) -> int:
        """How many are searched."""
        return max(PROBLEMS * self.in_flight, LEAST_PROBLEMS)

    def drawn(self, depth: int, *drawn: Any) -> Answers:
        """The search that is replayed, steps down to a depth. drawn: seed and assumptions, as
        thesis_search takes them.
        """
        return Answers(thesis_search(self.problems, self.n, self.beam_width, depth, *drawn))


class Need(NamedTuple):
    """What one model takes, in bytes. activations: buffers of the largest step, from its shapes;
    block: of KV; least: with room for one request, less than which no engine starts with.
    """

    engine: RecordedEngine
    weights: int
    activations: int
    block: int
    least: int

    @classmethod
    def of(
        cls, model: str, asked: Question, width: int = DTYPE_BYTES, activations: bool = True
    ) -> Need:
        """With the question's limits. width: bytes of a number; activations=False: their memory is
        none of the total. Raises ModelError for a model that is not known.
        """
        names = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size")
        engine = drawn_engine(model, width=width, **{name: getattr(asked, name) for name in names})
        weights, block = recorded(engine, "weight_bytes"), recorded(engine, "block_bytes")
        tokens, rows = asked.max_num_batched_tokens, asked.max_num_seqs
        buffers = spec_of(engine).step_bytes(tokens, rows, width) if activations else 0
        least = weights + buffers + -(-engine.max_model_len // asked.block_size) * block
        return cls(engine, weights, buffers, block, least)


def _longest(answers: Answers) -> int:
    """Tokens of the longest request of a search, to either model."""
    found = [each.trie.length for own in answers.solutions.values() for each in own.values()]
    for problem in answers.recording.problems:
        ends: dict[tuple[int, ...], int] = {(): len(problem.prompt)}
        for step in problem.steps:
            ends[step.path] = ends[step.path[:-1]] + len(step.tokens)
        found += ends.values()
    return max(found)


class Pair:
    """Two models in one memory, and the replays of them so far: `rows`.

    answers: the search; drawn where it is not given. need: of Need.of. Raises as `advise`.
    """

    def __init__(self, asked: Question, answers: Answers | None = None, **need: Any) -> None:
        self.asked, self.rounds, self.rows = asked, asked.rounds, list[dict[str, Any]]()
        self.device = load_device(asked.device)
        usable = round(USABLE * self.device.memory_bytes)
        self.total = usable if asked.total == "" else parse_size(asked.total)
        self.device.require_room(self.total, "Both models")
        self.needs = Need.of(asked.llm, asked, **need), Need.of(asked.prm, asked, **need)
        least = [need.least for need in self.needs]
        if sum(least) > self.total:
            parts = " and ".join(map(format_size, least))
            raise OutOfMemory(
                f"{asked.llm} and {asked.prm} lack {format_size(sum(least) - self.total)}: "
                f"weights, activations and one request of {asked.max_model_len:,} tokens take "
                f"{parts}, and there are {format_size(self.total)}. Give more memory, another "
                "model, or less max_model_len or max_num_batched_tokens."
            )
        self.answers = answers or asked.drawn(asked.rounds)
        self.longest, allowed = _longest(self.answers), [n.engine.max_model_len for n in self.needs]
        if self.longest >= min(allowed):
            raise ConfigError(
                f"max_model_len is {min(allowed):,}; the replayed search has requests of "
                f"{self.longest:,} tokens: give more than that, or a model that takes it."
            )

    @property
    def feasible(self) -> tuple[float, float]:
        """Shares: below the LLM, above the PRM has no room for one request."""
        return self.needs[0].least / self.total, 1 - self.needs[1].least / self.total

    @property
    def axis(self) -> list[float]:
        """The feasible hundredths, or ten even steps where these are few."""
        low, high = self.feasible
        found = [k / 100 for k in range(1, 100) if low <= k / 100 <= high]
        return found if len(found) > REPLAYS else np.linspace(low, high, 10).tolist()

    def blocks(self, share: float) -> tuple[int, int]:
        """Blocks of both caches at a share of the LLM. OutOfMemory says what lacks."""
        budgets = round(share * self.total), self.total - round(share * self.total)
        for need, budget in zip(self.needs, budgets):
            if budget < need.least - 1:  # shares are rounded
                low, high = self.feasible
                raise OutOfMemory(
                    f"An LLM share of {share:g} leaves {need.engine.name} {format_size(budget)}; "
                    f"{format_size(need.least - budget)} are missing. Feasible in "
                    f"{format_size(self.total)}: {low:.3f} to {high:.3f}."
                )
        free = (b - n.weights - n.activations for n, b in zip(self.needs, budgets))
        llm, prm = (left // need.block for left, need in zip(free, self.needs))
        return llm, prm

    def run(self, what: str, share: float | None, blocks: Sequence[int], **how: Any) -> Replayed:
        """Replay the search, and keep a row of it."""
        start = time.perf_counter()
        llm, prm = ({"num_blocks": count} for count in blocks)
        models = self.needs[0].engine, self.needs[1].engine
        how |= {"min_problem_batch": self.asked.in_flight, "max_rounds": self.rounds}
        done = replay(self.answers, self.device, llm=llm, prm=prm, models=models, **how)
        row: dict[str, Any] = {"what": what, "llm_share": share}
        rate, problems = done.throughput.tokens_per_s, self.answers.recording.problems
        tokens = sum(len(step.tokens) for problem in problems for step in problem.steps)
        row |= dict(zip(RATES, (rate, 60 * rate * len(problems) / tokens)))
        for role, count in zip(ROLES, blocks):
            steps = done.trace.steps[done.trace.steps["engine"] == role]
            again = ["recomputed_tokens_evicted", "recomputed_tokens_preempted"]
            row[f"{role}_kv_tokens"] = count * self.asked.block_size if share else math.inf
            row[f"{role}_hit_rate"] = steps["hit_tokens"].sum() / steps["query_tokens"].sum()
            row[f"{role}_computed_again"] = int(steps[again].to_numpy().sum())
        self.rows.append(row | {"replay_s": time.perf_counter() - start})
        return done

    def at(self, share: float, what: str = SHARE) -> float:
        """Seconds of an exact replay at a share."""
        return self.run(what, share, self.blocks(share)).throughput.wall_s


def plateau(seconds: Sequence[float] | Floats, best: float) -> tuple[int, int]:
    """The first and the last place around the least that loses less than NEAR to the best."""
    good = np.asarray(seconds) <= best / (1 - NEAR)
    first = last = int(np.argmin(seconds))
    while first and good[first - 1]:
        first -= 1
    while last + 1 < len(good) and good[last + 1]:
        last += 1
    return first, last


class Unlimited(NamedTuple):
    """The search in memory without limit, and what its cache calls tell of less.

    lost_s: a guess of the seconds that each share of the axis loses; spare: how many times its need
    the shorter of the caches has there; enough: that need in tokens, of the LLM and of the PRM.
    """

    seconds: float
    lost_s: Floats
    spare: Floats
    enough: tuple[int, int]

    @classmethod
    def of(cls, pair: Pair, axis: Sequence[float]) -> Unlimited:
        """What is lost is computed again at the device's FLOP/s; an LLM without room for all it
        decodes at once takes as many times the steps.
        """
        size = pair.asked.block_size
        steps = [s for problem in pair.answers.recording.problems for s in problem.steps]
        room = sum(3 + (len(s.tokens) + 32) // size for s in steps) + 65536 // size
        done = pair.run(NO_LIMIT, None, (room, room), log_calls=True)
        lost_s, spare, enough = np.zeros(len(axis)), np.full(len(axis), np.inf), []
        caches: tuple[Any, ...] = (done.llm.cache, done.prm.cache)
        for need, cache, sizes in zip(pair.needs, caches, zip(*map(pair.blocks, axis))):
            peak = int(miss_ratio(cache.calls, [1])["peak_active"].iloc[0])
            fine = np.linspace(peak, peak + cache.calls.num_contents, 400).astype(int)
            curve = miss_ratio(cache.calls, sorted({*sizes, *fine.tolist()}))
            curve = curve.set_index("num_blocks")
            hits, most = curve["hit_tokens"], curve["hit_tokens"].max()
            enough.append(size * int(curve.index[curve["fits"] & (hits >= ENOUGH * most)][0]))
            spare = np.minimum(spare, np.array(sizes) * size / enough[-1])
            again = (most - hits.loc[list(sizes)]).to_numpy(np.float64)
            lost_s += again * ModelWork.of(need.engine).flops_of_one[0] / pair.device.flops_per_s
            if need is pair.needs[0]:
                crowded = np.maximum(peak / np.array(sizes, np.float64), 1) - 1
                lost_s += done.throughput.llm_busy_s * crowded
        return cls(done.throughput.wall_s, lost_s, spare, (enough[0], enough[1]))

    def next_share(self, axis: Sequence[float], found: Mapping[float, float]) -> float | None:
        """The share to be replayed next: the roomiest of the plateau as guessed, what promises more
        than is known, and the plateau's ends; None: all are known. found: seconds of replays.

        The guess is corrected by how many times what it says was lost where a replay is known.
        """
        known, best = sorted(found), min(found.values())
        told = [s for s in known if self.lost_s[axis.index(s)] > 1e-3 * self.seconds]
        ratios = [(found[s] - self.seconds) / self.lost_s[axis.index(s)] for s in told]
        likely = self.seconds + self.lost_s * (np.interp(axis, told, ratios) if told else 1.0)
        top = int(likely.argmin())
        low, high = plateau(likely, min(likely[top], best))
        roomiest = low + int(self.spare[low : high + 1].argmax())
        wanted = [] if any(axis[low] <= s <= axis[high] for s in known) else [roomiest]
        wanted += [top] if likely[top] < 0.995 * best else []
        gap = {at: min(abs(axis[at] - share) for share in known) for at in range(len(axis))}
        wanted += [*sorted((low, high), key=lambda at: -gap[at]), roomiest]
        least = (axis[-1] - axis[0]) / 60
        return next((axis[at] for at in wanted if gap[at] > least), None)


class Explored(NamedTuple):
    """An axis of which some shares were replayed, in seconds. plateau: the lowest and the highest
    of those that lose less than 2 % to the best, as all replayed between them do.
    """

    free: Unlimited
    seconds: dict[float, float]
    plateau: tuple[float, float]

    @classmethod
    def of(cls, pair: Pair, axis: list[float], first: set[float], most: int = REPLAYS) -> Explored:
        """first: shares replayed whatever they promise; most: replays, of these and of others."""
        free = Unlimited.of(pair, axis)
        found = {share: pair.at(share) for share in sorted(first)}
        while len(found) < most and (share := free.next_share(axis, found)) is not None:
            found[share] = pair.at(share)
        shares = sorted(found)
        low, high = plateau([found[share] for share in shares], min(found.values()))
        return cls(free, found, (shares[low], shares[high]))

    def table(self, pair: Pair) -> pd.DataFrame:
        """The pair's replays, with the tokens that each model lacks."""
        table = pd.DataFrame(pair.rows)
        for role, enough in zip(ROLES, self.free.enough):
            table[f"{role}_lacks_tokens"] = (enough - table[f"{role}_kv_tokens"]).clip(lower=0)
        return table


@dataclass(frozen=True, slots=True, eq=False)
class Advice:
    """The answer. feasible: shares of the LLM that fit both models; recommended: of the replayed
    within 0.5 % of the best, the one whose shorter cache has most to spare; plateau: Explored's.

    replays: a row each, in simulated seconds: what, llm_share, tokens_per_s, problems_per_min (of
    the search's mean length), against_best (tokens/s, to the best share) and of each model
    kv_tokens, lacks_tokens (of cache, to hit 99 % of what one without limit hits), hit_rate,
    computed_again (tokens that had been evicted or preempted); replay_s. First without limit, last
    with settings changed alone at the recommended share. flags: of each engine, the LLM's and the
    PRM's: model, and OPTIONS, of which the last says the KV's size in the place of the first.
    """

    question: Question
    total: int
    feasible: tuple[float, float]
    recommended: float
    plateau: tuple[float, float]
    replays: pd.DataFrame
    flags: dict[str, list[dict[str, Any]]]
    notes: list[str]

    @property
    def changes(self) -> pd.DataFrame:
        """Settings changed alone, the best first: what, and gains against the recommended share."""
        rows = self.replays.set_index("what")
        kept = rows.loc[[SHARE]].set_index("llm_share").loc[self.recommended, list(RATES)]
        others = rows.drop(index=[SHARE, NO_LIMIT])[list(RATES)] / kept.astype(float) - 1
        return others.sort_values(RATES[0], ascending=False).reset_index()

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name; None where there is no number."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("replays", "changes"):
            rows = getattr(self, name).to_dict("records")
            told[name] = [
                {k: v if v == v and v != math.inf else None for k, v in row.items()} for row in rows
            ]
        return told | {"question": asdict(self.question)}


def advise(llm: str, prm: str, **settings: Any) -> Advice:
    """Where to split a memory between two models that search together. settings: Question's.

    Raises ModelError for an unknown model, ConfigError for a setting or device that is unknown or
    outside what is allowed, and OutOfMemory, with the GiB that lack, where the pair or a share
    does not fit.
    """
    require_known(settings, [each.name for each in fields(Question)], "advise")
    pair = Pair(asked := Question(llm, prm, **settings))
    present, notes = 0.5 if asked.llm_share is None else asked.llm_share, list[str]()
    try:
        pair.blocks(present)
        axis = sorted({*pair.axis, present})
    except OutOfMemory as error:
        if asked.llm_share is not None:
            raise
        axis, notes = pair.axis, [str(error)]
    explored = Explored.of(pair, axis, {axis[0], present, axis[-1]} & {*axis})
    free, found, ends = explored
    best = 1.005 * min(found.values())
    alike = [s for s in sorted(found) if ends[0] <= s <= ends[1] and found[s] <= best]
    recommended = max(alike, key=lambda share: free.spare[axis.index(share)])
    notes += _change_each(pair, recommended)
    table = explored.table(pair)
    rates = table[RATES[0]]
    table["against_best"] = rates / rates[table["what"] == SHARE].max() - 1
    notes += _notes(pair)
    flags = start_up(pair, recommended)
    return Advice(asked, pair.total, pair.feasible, recommended, ends, table, flags, notes)


def _change_each(pair: Pair, share: float) -> list[str]:
    """Replay a share with each setting changed alone; what is no replay is told."""
    asked, told = pair.asked, list[str]()
    for name, factor in zip((*CHANGED, CHANGED[0]), (0.5, 0.5, 0.5, 2)):
        if value := int(factor * getattr(asked, name)):
            only: Any = {name: value}
            changed = replace(asked, **only)
            answers = changed.drawn(asked.rounds) if name == "n" else pair.answers
            try:
                other = Pair(changed, answers)
                other.rounds = pair.rounds
                other.at(share, f"{name} {value}")
                pair.rows += other.rows
            except OutOfMemory as error:
                told.append(f"{name} {value} was not replayed: {error}")
    if (half := asked.max_model_len // 2) > pair.longest:
        low, high = Pair(replace(asked, max_model_len=half), pair.answers).feasible
        told.append(
            f"max_model_len {half:,} would make shares of {low:.3f} to {high:.3f} feasible and "
            "change no replay, whose requests are shorter."
        )
    return told


def start_up(pair: Pair, share: float) -> dict[str, list[dict[str, Any]]]:
    """Options of two instances of vLLM or SGLang, the LLM's to be started first.

    vLLM's part is of the device's memory and pays for weights, activations and KV; SGLang's is of
    what is free as it starts, and pays for weights and KV.
    """
    flags: dict[str, list[dict[str, Any]]] = {"vLLM": [], "SGLang": []}
    asked, memory = pair.asked, pair.device.memory_bytes
    free, budgets = float(memory), (share * pair.total, (1 - share) * pair.total)
    for need, count, budget in zip(pair.needs, pair.blocks(share), budgets):
        name, kv, length = need.engine.name, count * need.block, need.engine.max_model_len
        parts = budget / memory, (need.weights + kv) / free
        free -= budget
        limits = asked.max_num_seqs, asked.max_num_batched_tokens, length
        for (engine, names), part, exact in zip(
            OPTIONS.items(), parts, (kv, count * asked.block_size)
        ):
            options = dict(zip(names, (math.floor(1e4 * part) / 1e4, *limits, exact)))
            flags[engine].append({"model": str(REGISTRY.get(name, name)), **options})
    return flags


def _notes(pair: Pair) -> list[str]:
    """What the numbers stand on, and what they leave out."""
    device = pair.device
    fitted = {need.engine.name for need in pair.needs} & set(device.terms)
    bound = "fitted terms" if fitted else "its roofline, so they are a bound from below"
    problems, left = len(pair.answers.recording.problems), device.memory_bytes - pair.total
    activations = " and ".join(format_size(need.activations) for need in pair.needs)
    notes = [
        f"Seconds are simulated for {device.name} ({device.source}), by {bound}.",
        f"The search: the first {pair.rounds} rounds of {problems} MATH-500 problems, lengths in "
        f"Llama 3's tokens, at most {pair.longest:,} a request; deeper beams need more cache. "
        "16-bit weights and KV.",
        f"Activations, from shapes: {activations}. Contexts and workspaces of two processes come "
        f"on top, and have {format_size(left)} here." + (" Ask with less total." * (left < 1)),
    ]
    return notes + [
        f"vLLM serves {need.engine.name} as a token-level reward model, without its prefix cache: "
        "it then computes again what the replays find cached."
        for need in pair.needs
        if spec_of(need.engine).value_head is not None
    ]
