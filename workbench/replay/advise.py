"""Advice on a pair of models in one memory: where to split it, and what to change first.

    found = advise("llama-3.2-1b", "llama-3.1-8b-prm", device="a100-40", total="40GiB")
    found.recommended, found.plateau, found.replays, found.flags

A search is drawn (workload.thesis_search) and replayed, whole, with memory without limit. Its cache
calls give both models' miss-ratio curves, and so the shares at which neither cache is short:
there the steps are the same, and nothing is lost. What others lose is replayed over the first
rounds; where these lack nothing and the whole search lacks room at every share, over all of it.
Where all shares lose something, a guess from the curves chooses what to replay, and each replay
corrects it. Every number is a row of the table of replays, or arithmetic on bytes.
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

from workbench.config import (
    OF_WIDTH,
    AtLeastOne,
    Range,
    check,
    format_size,
    parse_size,
    refused,
    require_known,
)
from workbench.errors import ConfigError, OutOfMemory
from workbench.host import collection_paused
from workbench.models.registry import DUMMY, REGISTRY
from workbench.replay import workload
from workbench.replay.answers import Answers
from workbench.replay.cost import BOUND, ModelWork, recorded, spec_of
from workbench.replay.devices import load_device
from workbench.replay.miss_ratio import miss_ratio
from workbench.replay.shapes import shapes_of
from workbench.replay.simulator import Replayed, replay
from workbench.replay.workload import ASK, DTYPE_BYTES, LEAD, LLM, PRM, drawn_engine
from workbench.search.prm import Critiques
from workbench.search.recording import RecordedEngine
from workbench.search.strategies import BestOfN

ROLES = ("llm", "prm")
RATES = ("tokens_per_s", "problems_per_min")
REPLAYS = 6  # shares that are replayed
NEAR = 0.02  # a plateau: shares that lose less than this to the best
ENOUGH = 0.99  # a cache is short that hits less than this part of what one without limit hits
ROOMY = 0.98  # of a cache: no request waits where those that run take less
MARGIN = 0.01  # of the total: what a share leaves either model beyond what it starts with
DEPTH, WIDTH = 40, 4  # steps of a search, and its beam width, as the thesis's
MOST_BEAMS = 3072  # n 64 with 48 problems in flight
NODES, LEAST_ROUNDS, MOST_ROUNDS = 12288, 6, 24  # of a replay of its first: beams times rounds
PROBLEMS, LEAST_PROBLEMS = 2, 16  # of the search: times those in flight, so that these stay so many
USABLE = 0.9  # of the device's memory, where no total is given; drivers take some
OPTIONS = {  # the memory's part, sequences, tokens of a step, request and block; the KV's size
    "vLLM": ("gpu-memory-utilization", "max-num-seqs", "max-num-batched-tokens", "max-model-len",
             "block-size", "kv-cache-memory-bytes"),
    "SGLang": ("mem-fraction-static", "max-running-requests", "chunked-prefill-size",
               "context-length", "page-size", "max-total-tokens"),
}  # fmt: skip
FP8 = {"vLLM": "fp8", "SGLang": "fp8_e5m2"}  # of KV in 8 bits
CUDA_BLOCKS = 16  # tokens: of FlashAttention's and Triton's kernels in vLLM 0.32
CONTEXTS = 2 << 30  # two CUDA contexts and their workspaces, at least
CHANGED = ("max_num_seqs", 0.5), ("max_num_seqs", 2), ("in_flight", 0.5), ("n", 0.5)
SHARE, NO_LIMIT, WHOLE = "share", "no limit", "whole search"  # what a row of the replays is of
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. llm, prm: any name of a model whose config.json is at hand; device: a preset,
    or a file of `workbench calibrate`.

    total: weights, activations and KV of both; empty: 90 % of the device's memory. llm_share: the
    present split, None: 0.5 where it fits. strategy: of workload.DRAWN_STRATEGIES; in_flight:
    problems. kv_bits: of a number in both caches; weights have 16, quantised ones what the model's
    config says. whole: compare shares over whole searches, not over their first rounds. critiques:
    that the PRM writes of each step before it scores it, critique_tokens at most each. Limits are
    both models'.
    """

    llm: str = LLM
    prm: str = PRM
    device: str = "a100-40"
    total: int | str = ""
    llm_share: Annotated[float | None, Range(0, 1, "()")] = None
    strategy: Annotated[str, workload.DRAWN_STRATEGIES] = "beam_search"
    n: Annotated[int, Range(1, 64, "[]")] = 16
    beam_width: AtLeastOne = WIDTH
    in_flight: Annotated[int, Range(1, 192, "[]")] = 48
    max_num_seqs: AtLeastOne = 256
    max_num_batched_tokens: AtLeastOne = 8192
    max_model_len: AtLeastOne = 4096
    block_size: AtLeastOne = 16
    kv_bits: int = 16
    whole: bool = False
    critiques: Annotated[int, Range(0, 8, "[]")] = 0
    critique_tokens: AtLeastOne = 512

    def __post_init__(self) -> None:
        check(self)
        if self.kv_bits not in (8, 16):
            raise refused(type(self), "kv_bits", self.kv_bits, "8, 16")
        if not self.critiques and self.critique_tokens != Critiques().tokens:
            raise ConfigError(
                f"critique_tokens is {self.critique_tokens}; allowed: with critiques."
            )
        if self.beam_width != WIDTH and self.strategy not in OF_WIDTH:
            told = f"{self.strategy} has no beam_width, given {self.beam_width}"
            raise ConfigError(f"{told}: leave it out, or take one of {', '.join(OF_WIDTH)}.")
        if (beams := self.n * self.in_flight) > MOST_BEAMS:
            raise ConfigError(
                f"n = {self.n} with {self.in_flight} problems in flight are {beams:,} beams; "
                f"allowed: at most {MOST_BEAMS:,}. Give less of either."
            )

    @property
    def rounds(self) -> int:
        """How many shares and settings are compared over, two a step (sampled, scored): seconds."""
        return max(LEAST_ROUNDS, min(MOST_ROUNDS, NODES // (self.n * self.in_flight)))

    @property
    def problems(self) -> int:
        """How many are searched."""
        return max(PROBLEMS * self.in_flight, LEAST_PROBLEMS)

    def drawn(
        self, depth: int, seed: int = 0, assumptions: workload.Assumptions | None = None
    ) -> Answers:
        """The search, steps down to a depth, or whole samples in proportion to it."""
        sizes: dict[str, Any] = {"n": self.n, "beam_width": self.beam_width, "max_depth": depth}
        sizes |= {"max_tokens": BestOfN().max_tokens * depth // DEPTH, "strategy": self.strategy}
        found = workload.thesis_search(self.problems, seed=seed, assumptions=assumptions, **sizes)
        if self.critiques:
            found = workload.with_critiques(found, Critiques(self.critiques, self.critique_tokens))
        return Answers(found)


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
        limits = {name: getattr(asked, name) for name in names}
        kv_width = width * asked.kv_bits // 16
        engine = drawn_engine(model, width=width, kv_width=kv_width, **limits)
        weights, block = recorded(engine, "weight_bytes"), recorded(engine, "block_bytes")
        tokens, rows = asked.max_num_batched_tokens, asked.max_num_seqs
        products = max(width, DTYPE_BYTES)  # of numbers in 8 bits, in 16
        buffers = spec_of(engine).step_bytes(tokens, rows, products) if activations else 0
        least = weights + buffers + -(-engine.max_model_len // asked.block_size) * block
        return cls(engine, weights, buffers, block, least)


class Pair:
    """Two models in one memory, and the replays of them so far: `rows`. Raises as `advise`.

    answers: the search; drawn where it is not given. longest: tokens of a request. need: Need.of's.
    """

    def __init__(self, asked: Question, answers: Answers | None = None, **need: Any) -> None:
        self.asked, self.rows = asked, list[dict[str, Any]]()
        self.rounds: int | None = asked.rounds  # None: the whole search
        self.free: Unlimited | None = None  # what it tells of an axis, where that is known
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
        allowed = min(need.engine.max_model_len for need in self.needs)
        # an engine ends a beam that leaves a critique no room
        writes = ASK + asked.critique_tokens + LEAD if asked.critiques else 0
        for depth in (DEPTH, DEPTH // 2, DEPTH // 5):
            self.answers = answers or asked.drawn(depth)
            tokens, solved = self.answers.tokens, self.answers.solutions.values()
            scored = [each.trie.length + writes for own in solved for each in own.values()]
            self.longest = max(int((np.cumsum(tokens.counts) - tokens.offsets).max()), *scored)
            if answers or self.longest < allowed:
                break
        if self.longest >= allowed:
            raise ConfigError(
                f"max_model_len is {allowed:,}; the replayed search has requests of "
                f"{self.longest:,} tokens{', a critique among them' * bool(writes)}: give more "
                "than that, or a model that takes it."
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

    def run(
        self,
        what: str,
        share: float | None,
        blocks: Sequence[int],
        begun: Replayed | None = None,
        **how: Any,
    ) -> Replayed:
        """Replay the search, or the rest of one that is begun, and keep a row of it."""
        start = time.perf_counter()
        llm, prm = ({"num_blocks": count} for count in blocks)
        models = self.needs[0].engine, self.needs[1].engine
        how |= {"min_problem_batch": self.asked.in_flight, "max_rounds": self.rounds}
        if begun is None:
            done = replay(self.answers, self.device, llm=llm, prm=prm, models=models, **how)
        else:
            done = begun.go_on()
        row: dict[str, Any] = {"what": what, "llm_share": share, "rounds": self.rounds}
        rate, problems = done.throughput.tokens_per_s, self.answers.recording.problems
        tokens = sum(len(step.tokens) for problem in problems for step in problem.steps)
        row |= dict(zip(RATES, (rate, 60 * rate * len(problems) / tokens)))
        row["tokens"] = done.throughput.tokens
        sums = done.trace.steps.groupby("engine").sum(numeric_only=True)
        for role, count in zip(ROLES, blocks):
            of: Any = sums.loc[role]
            again = of["recomputed_tokens_evicted"] + of["recomputed_tokens_preempted"]
            row[f"{role}_kv_tokens"] = count * self.asked.block_size if share else math.inf
            row[f"{role}_hit_rate"] = of["hit_tokens"] / of["query_tokens"]
            row[f"{role}_computed"] = int(of["prefill_tokens"] + of["decode_tokens"])
            row[f"{role}_computed_again"] = int(again)
        self.rows.append(row | {"replay_s": time.perf_counter() - start})
        return done

    def at(self, share: float, what: str = SHARE) -> float:
        """Seconds of an exact replay at a share, the first row's where its steps are the same."""
        blocks = self.blocks(share)
        if self.free is None or share not in self.free.alike:
            return self.run(what, share, blocks).throughput.wall_s
        row = self.rows[0] | {"what": what, "llm_share": share, "replay_s": 0.0}
        sizes = [count * self.asked.block_size for count in blocks]
        self.rows.append(row | dict(zip(("llm_kv_tokens", "prm_kv_tokens"), sizes)))
        return self.free.seconds


def plateau(seconds: Sequence[float] | Floats, best: float) -> tuple[int, int]:
    """The first and the last place around the least that loses less than NEAR to the best."""
    bad, least = np.flatnonzero(np.asarray(seconds) > best / (1 - NEAR)), int(np.argmin(seconds))
    first = max(bad[bad < least], default=-1) + 1
    return int(first), int(min(bad[bad > least], default=len(seconds))) - 1


class Unlimited(NamedTuple):
    """The search in memory without limit, and what its cache calls tell of less.

    lost_s: a guess of the seconds that each share of the axis loses; spare: how many times its need
    the shorter of the caches has there; enough: that need in tokens, of the LLM and of the PRM;
    alike: shares at which neither cache evicts what is asked for again, nor lets a request wait.
    """

    replayed: Replayed
    seconds: float
    lost_s: Floats
    spare: Floats
    enough: tuple[int, int]
    alike: list[float]

    @classmethod
    def of(
        cls,
        pair: Pair,
        axis: Sequence[float],
        what: str = NO_LIMIT,
        begun: Replayed | None = None,
    ) -> Unlimited:
        """Lost is what is computed again, at the device's FLOP/s, and the steps of a model that
        decodes as many times as it lacks room for all it decodes at once.
        """
        size = pair.asked.block_size
        problems = pair.answers.recording.problems
        lengths = [len(s.tokens) + 32 for problem in problems for s in problem.steps]
        lengths += [len(c.tokens) + ASK + LEAD for problem in problems for c in problem.critiques]
        room = sum(3 + tokens // size for tokens in lengths) + 65536 // size
        done = pair.run(what, None, (room, room), begun, log_calls=True)
        lost_s, spare, enough = np.zeros(len(axis)), np.full(len(axis), np.inf), []
        alike = np.ones(len(axis), bool)
        writes_s = done.throughput.prm_busy_s if pair.asked.critiques else 0.0
        own_s: Any = (done.llm.cache, done.throughput.llm_busy_s), (done.prm.cache, writes_s)
        for need, (cache, decode_s), sizes in zip(pair.needs, own_s, zip(*map(pair.blocks, axis))):
            curve = miss_ratio(cache.calls, range(1, max(2 * room, *sizes) + 1))
            curve, peak = curve.set_index("num_blocks"), int(curve["peak_active"].iloc[0])
            fine = np.linspace(peak, peak + cache.calls.num_contents, 400).astype(int)
            own, curve = curve.loc[list(sizes)], curve.loc[sorted({*sizes, *fine.tolist()})]
            hits, most = curve["hit_tokens"], curve["hit_tokens"].max()
            enough.append(size * int(curve.index[curve["fits"] & (hits >= ENOUGH * most)][0]))
            spare = np.minimum(spare, np.array(sizes) * size / enough[-1])
            alike &= (own["thrashed"].to_numpy() == 0) & (peak <= ROOMY * np.array(sizes))
            again = (most - own["hit_tokens"]).to_numpy(np.float64)
            lost_s += again * ModelWork.of(need.engine).flops_of.tokens / pair.device.flops_per_s
            lost_s += decode_s * (np.maximum(peak / np.array(sizes, np.float64), 1) - 1)
        told = lost_s, spare, (enough[0], enough[1]), [s for s, same in zip(axis, alike) if same]
        return cls(done, done.throughput.wall_s, *told)

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
    """An axis of which some shares were replayed, in seconds."""

    free: Unlimited
    seconds: dict[float, float]

    @classmethod
    def of(cls, pair: Pair, axis: list[float], first: set[float], most: int = REPLAYS) -> Explored:
        """first: shares replayed whatever they promise; most: replays, of these and of others."""
        free = pair.free or Unlimited.of(pair, axis)
        found = {share: pair.at(share) for share in sorted(first)}
        while len(found) < most and (share := free.next_share(axis, found)) is not None:
            found[share] = pair.at(share)
        return cls(free, found)

    @property
    def plateau(self) -> tuple[float, float]:
        """The outermost of the replayed around the best that all lose less than 2 % to it."""
        shares = sorted(self.seconds)
        low, high = plateau([self.seconds[each] for each in shares], min(self.seconds.values()))
        return shares[low], shares[high]

    def sharpen(self, pair: Pair, axis: list[float], apart: float) -> None:
        """Replay more shares until each end of the plateau has one beyond it that is not on it and
        no farther than `apart`, or is an end of the axis.
        """
        while True:
            ends, shares = self.plateau, sorted(self.seconds)
            below = [share for share in shares if share < ends[0]][-1:]
            above = [share for share in shares if share > ends[1]][:1]
            gaps = [*zip(below, ends[:1]), *zip(ends[1:], above)]
            between = [[s for s in axis if low < s < high] for low, high in gaps
                       if high - low > apart * (1 + 1e-9)]  # fmt: skip
            if not any(between):
                return
            inner = max(between, key=len)
            self.seconds[inner[len(inner) // 2]] = pair.at(inner[len(inner) // 2])

    def table(self, pair: Pair) -> pd.DataFrame:
        """The pair's replays, with the tokens that each model lacks; of other settings none."""
        table = pd.DataFrame(pair.rows)
        as_asked = table["what"].isin([SHARE, NO_LIMIT, WHOLE])
        for role, enough in zip(ROLES, self.free.enough):
            lacks = (enough - table[f"{role}_kv_tokens"]).clip(lower=0)
            table[f"{role}_lacks_tokens"] = lacks.where(as_asked)
        return table


@dataclass(frozen=True, slots=True, eq=False)
class Advice:
    """The answer. feasible: shares of the LLM that fit both models. plateau: if whole, the shares
    at which neither cache is short in a whole search, else Explored's. recommended: the share whose
    shorter cache has most to spare, of the plateau, or of the replayed within 0.5 % of the best.

    replays: a row each, in simulated seconds: what, llm_share, rounds (none: the whole search),
    tokens_per_s, problems_per_min (of the search's mean length), against_best (tokens/s, to the
    best share), tokens (generated in these rounds) and of each model kv_tokens, lacks_tokens (of
    cache, to hit 99 % of what one without limit hits; none where a setting differs), hit_rate,
    computed (tokens), of these computed_again (had been evicted or preempted); replay_s, 0: of the
    first row. flags: of each engine, the LLM's and the PRM's: model, and OPTIONS: the last is
    vLLM's in place of the first, SGLang's a limit beside it.
    """

    question: Question
    total: int
    feasible: tuple[float, float]
    recommended: float
    plateau: tuple[float, float]
    whole: bool
    replays: pd.DataFrame
    flags: dict[str, list[dict[str, Any]]]
    notes: list[str]

    @property
    def changes(self) -> pd.DataFrame:
        """Settings changed alone, the best first: what, and gains against the recommended share."""
        rows = self.replays.set_index("what")
        kept = rows.loc[[SHARE]].set_index("llm_share")[list(RATES)].loc[self.recommended]
        gains = rows.drop(index=[SHARE, NO_LIMIT, WHOLE], errors="ignore")[list(RATES)] / kept - 1
        return gains.sort_values(RATES[0], ascending=False).reset_index()

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name; None where there is no number."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("replays", "changes"):
            table = getattr(self, name).astype(object)
            told[name] = table.where(table.notna() & (table != math.inf), None).to_dict("records")
        return told | {"question": asdict(self.question)}


@collection_paused()
def advise(llm: str, prm: str, **settings: Any) -> Advice:
    """Where to split a memory between two models that search together. settings: Question's.

    Raises ModelError for an unknown model, ConfigError for a setting or device that is unknown or
    not allowed, and OutOfMemory, with the GiB that lack, where the pair or a share does not fit.
    """
    require_known(settings, [each.name for each in fields(Question)], "advise")
    pair = Pair(asked := Question(llm, prm, **settings))
    present, notes = 0.5 if asked.llm_share is None else asked.llm_share, list[str]()
    low, high = pair.feasible
    axis = [s for s in pair.axis if low + MARGIN <= s <= high - MARGIN] or pair.axis
    try:
        pair.blocks(present)
        axis = sorted({*axis, present})
    except OutOfMemory as error:
        if asked.llm_share is not None:
            raise
        notes = [str(error)]
    whole = pair.free = Unlimited.of(pair, axis)
    if whole.alike or asked.whole:  # where its first rounds lack room, all of it does
        pair.rounds = None
        whole = Unlimited.of(pair, axis, WHOLE, whole.replayed)
        if whole.alike and not asked.whole:
            pair.rounds = asked.rounds
        else:  # and where all of it lacks room, its first rounds do not tell what is lost
            pair.free, pair.rows = whole, [pair.rows[-1] | {"what": NO_LIMIT}]
    first, most = {axis[0], present, axis[-1]} & {*axis}, 0 if whole.alike else REPLAYS - 1
    explored = Explored.of(pair, axis, first, most)
    found, middle = explored.seconds, sum(explored.plateau) / 2
    middle = min(axis, key=lambda share: abs(share - middle))
    if middle not in found and not whole.alike:
        found[middle] = pair.at(middle)
    (low, high), least = explored.plateau, 1.005 * min(found.values())
    good = whole.alike or [s for s in sorted(found) if low <= s <= high and found[s] <= least]
    recommended = max(good, key=lambda share: whole.spare[axis.index(share)])
    if recommended not in found:
        pair.at(recommended)
    notes += _change_each(pair, recommended)
    table = explored.table(pair)
    best = table.loc[table["what"] == SHARE, RATES[0]].max()
    table["against_best"] = (table[RATES[0]] / best - 1).where(table["what"] != WHOLE)
    ends = (good[0], good[-1]) if whole.alike else (low, high)
    told = recommended, ends, bool(whole.alike), table, start_up(pair, recommended)
    return Advice(asked, pair.total, pair.feasible, *told, notes + _notes(pair))


def _change_each(pair: Pair, share: float) -> list[str]:
    """Replay a share with each setting changed alone; what is no replay is told, as where twice the
    sequences are more than the tokens of a step.
    """
    asked, told = pair.asked, list[str]()
    for name, factor in CHANGED:
        if value := int(factor * getattr(asked, name)):
            changed = replace(asked, **dict[str, Any]({name: value}))
            try:
                other = Pair(changed, None if name == "n" else pair.answers)
                other.rounds = pair.rounds
                other.at(share, f"{name} {value}")
                pair.rows += other.rows
            except (ConfigError, OutOfMemory) as error:
                told.append(f"{name} {value} was not replayed: {error}")
    if (half := asked.max_model_len // 2) <= pair.longest:
        told.append(f"max_model_len {half:,} has no room for requests of {pair.longest:,} tokens.")
    else:
        low, high = Pair(replace(asked, max_model_len=half), pair.answers).feasible
        told.append(
            f"max_model_len {half:,} would make shares of {low:.3f} to {high:.3f} feasible and "
            "change no replay, whose requests are shorter."
        )
    return told


def start_up(pair: Pair, share: float) -> dict[str, list[dict[str, Any]]]:
    """Options of two instances of vLLM or SGLang, the LLM's first. vLLM's part is of the device's
    memory, for weights, activations and KV; SGLang's of what is then free, for weights and KV.
    """
    flags: dict[str, list[dict[str, Any]]] = {"vLLM": [], "SGLang": []}
    asked, memory = pair.asked, pair.device.memory_bytes
    free, budgets = float(memory), (share * pair.total, (1 - share) * pair.total)
    for need, count, budget in zip(pair.needs, pair.blocks(share), budgets):
        name, kv, length = need.engine.name, count * need.block, need.engine.max_model_len
        parts = budget / memory, (need.weights + kv) / free
        exactly = kv, count * asked.block_size
        free -= budget
        limits = asked.max_num_seqs, asked.max_num_batched_tokens, length, asked.block_size
        for (engine, names), part, exact in zip(OPTIONS.items(), parts, exactly):
            options: dict[str, Any] = dict(
                zip(names, (math.floor(1e4 * part) / 1e4, *limits, exact))
            )
            if asked.kv_bits == 8:  # the size of the KV stays the last
                options = {"kv-cache-dtype": FP8[engine], **options}
            model = name.removeprefix(DUMMY)  # these start with the weights
            flags[engine].append({"model": str(REGISTRY.get(model, model)), **options})
    return flags


def _notes(pair: Pair) -> list[str]:
    """What the numbers stand on, and what they leave out."""
    device = pair.device
    names = [need.engine.name for need in pair.needs]
    rest = [name for name in names if not device.is_fitted_to(name)]
    bound = f"its roofline, {BOUND}" if rest else "fitted terms"
    if 0 < len(rest) < len(names):
        bound = f"fitted terms, those of {rest[0]} by {bound}"
    search, left = pair.answers.recording, device.memory_bytes - pair.total
    sizes = search.settings.strategy_settings
    depth = sizes.get("max_depth")
    reach = f"to {depth} steps" if depth else f"to their end or {sizes['max_tokens']:,} tokens"
    deeper = "; later beams are deeper and need more cache" * bool(depth)
    over = f"its first {pair.rounds} rounds, of sampling or of scoring{deeper}"
    activations = " and ".join(format_size(need.activations) for need in pair.needs)
    notes = [
        f"Seconds are simulated for {device.name} ({device.source}), by {bound}.",
        f"The search: {len(search.problems)} MATH-500 problems {reach}, lengths in Llama "
        f"3's tokens, at most {pair.longest:,} a request; how steps branch, end and are scored is "
        f"assumed. Rates are over {over if pair.rounds else 'all of it'}. 16-bit weights "
        + ("and KV." if pair.asked.kv_bits == 16 else "and 8-bit KV."),
        f"Activations, from shapes: {activations}. Contexts and workspaces of two processes come "
        f"on top, and have {format_size(left)} here."
        + (" Ask with less total." * (left < CONTEXTS)),
    ]
    notes += filter(None, (shapes_of(name).told for name in names))
    if (size := pair.asked.block_size) % CUDA_BLOCKS:
        notes.append(
            f"vLLM's attention takes blocks of a multiple of {CUDA_BLOCKS} tokens on a GPU, and "
            f"refuses {size}."
        )
    if count := pair.asked.critiques:
        notes.append(
            f"Critiques: {count} a step as ThinkPRM is asked, of drawn lengths (median "
            f"{workload.CRITIQUE_MEDIAN:.0f} tokens, at most {pair.asked.critique_tokens:,})."
        )
    return notes + [
        f"{need.engine.name} ({need.engine.architecture}) was not run on vLLM, which may lack that "
        "class. A token-level reward model has no prefix cache there: it computes again what the "
        "replays find cached. SGLang returns no values of single tokens."
        for need in pair.needs
        if spec_of(need.engine).value_head is not None
    ]
