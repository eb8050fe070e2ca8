"""Searches to be replayed without having run here: recordings of the package, and made ones.

`load_recording("tiny-128")` reads one that comes with the package (data/README.md says how each was
made, and how lengths were counted). `thesis_search` makes a search of the thesis's scale out of
MATH-500's lengths and stated assumptions, `from_completions` one out of published completions. Both
run the real strategy with steps and scores that are drawn; what comes out is a Recording, as if
run_search had written it. A token id in a made search is a name, not a text.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from workbench.config import Checked, EngineConfig, Range, require_known
from workbench.errors import ConfigError, RecordingError, nearest
from workbench.replay.shapes import shapes_of
from workbench.search.prm import SCORE_UNIT, Critiques
from workbench.search.problems import Problem, pick_uniformly
from workbench.search.recording import (
    RecordedCritique,
    RecordedEngine,
    RecordedProblem,
    RecordedSettings,
    RecordedSolution,
    RecordedStep,
    Recording,
    read_recording,
)
from workbench.search.strategies import (
    STEP_END,
    Beam,
    BeamSearch,
    Generate,
    Step,
    Strategy,
    split_steps,
)
from workbench.search.variants import strategy_with

FOLDER = Path(__file__).parent / "data"
MATH500 = FOLDER / "math500_lengths.csv"
Tokens = tuple[int, ...]

# The thesis's pair: Llama-3.2-1B-Instruct asked as search-and-learn asks it, judged by an 8B PRM in
# RLHFlow's form.
LLM, PRM = "llama-3.2-1b", "llama-3.1-8b-prm"
VOCABULARY = 128_000  # of Llama 3, special tokens left out
DTYPE_BYTES = 2
MAX_MODEL_LEN = 4096
IN_FLIGHT = 48  # 768 beams of n = 16, three times max_num_seqs, as 12 problems are on the tiny rung
PROMPT_HEAD, PROMPT_TAIL = 154, 5
MAX_STEP_TOKENS = 2048
"""Llama 3.2's chat template with search-and-learn's system prompt and a date, around a problem."""
PRM_HEAD, PRM_VERDICT, PRM_BETWEEN, PRM_DROPPED = 30, 5, 6, 1
"""RLHFlow's chat in Llama 3.1's template; a step's last token is its blank line."""
PLUS, MINUS = 10, 12  # verdict columns: "+" and "-"
ASK, LEAD = 45, 6
"""ThinkPRM's tokens after a solution and before a verdict, as SmolLM2's tokenizer counts them."""


# -- what comes with the package --


def recording_names() -> list[str]:
    """Names of the recordings that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.parquet"))


def recording_path(name: str) -> Path:
    """Where a recording of the package lies; RecordingError for a name it does not have."""
    names = recording_names()
    if name not in names:
        raise RecordingError(
            f"There is no recording {name!r}; known: {', '.join(names)}."
            f"{nearest(name, names)} Another one is read by read_recording(path)."
        )
    return FOLDER / f"{name}.parquet"


def load_recording(name: str) -> Recording:
    """A recording of the package; RecordingError for a name it does not have."""
    return read_recording(recording_path(name))


class Lengths(NamedTuple):
    """One problem of MATH-500. Llama 3's tokens of its text, and of the reference solution."""

    id: str
    level: int
    problem_tokens: int
    solution_tokens: int


def math500_lengths(limit: int | None = None) -> list[Lengths]:
    """Every problem, or those that load_problems("math500", limit) chooses."""
    with MATH500.open(encoding="utf-8", newline="") as file:
        rows = [Lengths(r[0], *map(int, r[1:])) for r in list(csv.reader(file))[1:]]
    if limit is None:
        return rows
    if not 1 <= limit <= len(rows):
        raise ConfigError(f"limit is {limit}; allowed: 1 to {len(rows)}, or None.")
    return pick_uniformly(rows, limit, 0)


# -- a search of the thesis's pair, its steps drawn --


def drawn_tokens(draws: random.Random, count: int) -> Tokens:
    """`count` token ids that no others begin with: three are drawn, the rest counts on."""
    drawn = [draws.randrange(VOCABULARY) for _ in range(min(3, count))]
    return (*drawn, *((drawn[-1] + k) % VOCABULARY for k in range(1, count - 2)))


def _fixed(name: str, count: int) -> Tokens:
    return drawn_tokens(random.Random(name), count)


class DrawnStep(NamedTuple):
    """One sampled node. text: equal texts below one parent are one solution to the PRM.

    score: the PRM's verdict on the step; reason: why sampling ended.
    """

    tokens: Tokens
    text: str
    score: float
    reason: str


Draw = Callable[[Sequence[Beam]], Sequence[DrawnStep]]
"""Steps for the beams of one iteration, whose paths name the nodes to be sampled."""


def _grown(problem: Problem, own: Tokens, strategy: Strategy, draw: Draw) -> RecordedProblem:
    """One problem's search; rounds are counted from 1, as if it had been the only one.

    own: the problem's tokens.
    """
    steps: list[RecordedStep] = []
    solutions: dict[tuple[str, ...], RecordedSolution] = {}
    search = strategy.search(problem)
    reply: Any = None
    rounds = 0
    try:
        while True:
            request = search.send(reply)
            rounds += 1
            if not isinstance(request, Generate):  # it asks for scores
                reply = [
                    tuple(solutions[b.steps[: k + 1]].score or 0.0 for k in range(len(b.steps)))
                    for b in request.beams
                ]
                continue
            if request.stop:
                drawn = [[step] for step in draw(request.beams)]
            else:
                most = request.max_tokens or MAX_MODEL_LEN
                drawn = [_whole(beam, draw, most) for beam in request.beams]
            reply = []
            for slot, (beam, pieces) in enumerate(zip(request.beams, drawn, strict=True)):
                tokens, reason = sum((s.tokens for s in pieces), ()), pieces[-1].reason
                step = RecordedStep(
                    path=beam.path,
                    tokens=tokens,
                    text="".join(s.text for s in pieces),
                    slot=slot,
                    round=rounds,
                    finish_reason=reason,
                    request_reason=reason,
                )
                steps.append(step)
                reply.append(Step(tokens, step.text, reason))
                texts = beam.steps
                for s in pieces:
                    texts = (*texts, s.text)
                    if texts not in solutions:
                        solutions[texts] = _judged(texts, s, own)
    except StopIteration:
        prompt = _fixed("prompt", PROMPT_HEAD) + own + _fixed("answer", PROMPT_TAIL)
        return RecordedProblem(problem, prompt, tuple(steps), tuple(solutions.values()))


def _judged(texts: tuple[str, ...], step: DrawnStep, own: Tokens) -> RecordedSolution:
    """The solution that ends with this step, as the PRM sees it. own: the problem's tokens."""
    before = (PLUS, *_fixed("between", PRM_BETWEEN - 1))
    if len(texts) == 1:  # the first step brings the problem
        before = _fixed("prm", PRM_HEAD) + own
    shown = step.tokens[: max(1, len(step.tokens) - PRM_DROPPED)]
    tokens = before + shown + _fixed("verdict", PRM_VERDICT)
    score = round(step.score * SCORE_UNIT) / SCORE_UNIT
    return RecordedSolution(texts, tokens, asks=True, fits=True, score=score)


def _whole(beam: Beam, draw: Draw, most: int) -> list[DrawnStep]:
    """Steps from this node's own until the solution ends, of so many tokens together at most."""
    steps: list[DrawnStep] = []
    while not steps or steps[-1].reason == "stop":
        (step,) = draw([beam])
        count = len(step.tokens)
        if count > most or (count == most and step.reason != "eos"):
            step = step._replace(tokens=step.tokens[:most], reason="length")
        steps.append(step)
        most, beam = most - count, beam.child(0)
    return steps


def drawn_engine(
    model: str,
    num_blocks: int | None = None,
    width: int = DTYPE_BYTES,
    kv_width: int | None = None,
    **limits: Any,
) -> RecordedEngine:
    """What an engine would tell about itself. width: bytes of a number, in weights that are not
    quantised and, if there is no kv_width, in KV; limits: of EngineConfig, else the thesis
    profile's. A model that reads less than max_model_len keeps its own.
    """
    usual = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    config = EngineConfig(model, num_blocks=num_blocks, dtype="bfloat16", **usual | limits)
    shapes = shapes_of(model)
    spec = shapes.spec
    return RecordedEngine(
        name=model,
        architecture=shapes.architecture,
        fingerprint=f"grown:{model}",
        max_model_len=min(config.max_model_len or MAX_MODEL_LEN, spec.max_model_len),
        value_outputs=None,
        config=config.to_dict(),
        spec=asdict(spec),
        num_blocks=num_blocks,
        weight_bytes=shapes.weight_bytes(width) + spec.table_bytes(width),
        block_bytes=spec.block_bytes(config.block_size, kv_width or width),
    )


_Positive = Annotated[float, Range(0)]
_Part = Annotated[float, Range(0, 1, "[]")]


def _recording(problems: Sequence[RecordedProblem], strategy: Strategy, seed: int) -> Recording:
    """Grown problems as a search of the pair, with the thesis profile's limits; 16-bit weights."""
    settings = RecordedSettings(
        strategy=type(strategy).__name__,
        strategy_settings=asdict(strategy),  # type: ignore[call-overload]
        seed=seed,
        min_problem_batch=IN_FLIGHT,
        score_cache=True,
        temperature=0.8,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_step_tokens=MAX_STEP_TOKENS,
        voting="weighted",
        score_shuffle_seed=None,
        prm_format="rlhflow",
        prm_fingerprint=f"grown:{PRM}",
        prm_columns=(PLUS, MINUS),
    )
    engines = drawn_engine(LLM, 19_000), drawn_engine(PRM, 6_500)  # about a share of 0.3 of 40 GiB
    return Recording(settings, *engines, tuple(problems))


@dataclass(frozen=True, slots=True)
class Assumptions(Checked):
    """What is not known of the 1B model's steps without running it.

    length_ratio: a solution's tokens over the reference's (headings and small steps are written
    out). length_spread: standard deviation of the log of what a step changes in the length to come.
    step_tokens, step_spread: median and log standard deviation of a step's tokens; twins: the part
    of siblings that repeat the one before word for word: all three as SmolLM2's are in the
    recordings of real text. endless: the part of steps after which a solution never ends.
    score_spread: how far a step's score lies from its parent's.
    """

    length_ratio: _Positive = 2.0
    length_spread: _Positive = 0.25
    step_tokens: Annotated[float, Range(1)] = 40.0
    step_spread: _Positive = 0.68
    endless: _Part = 0.001
    twins: _Part = 0.004
    score_spread: _Positive = 0.12


DRAWN_STRATEGIES = ("beam_search", "best_of_n", "dvts", "lookahead", "rebase", "ets")
"""Strategies whose decisions follow from lengths and scores. Left out are DORA, which compares
texts; particle filters, whose logarithms of scores near 1 would be the assumption's alone; and
self-consistency, which asks no PRM. To ETS every drawn step is of another kind, but for twins.
"""


def thesis_search(
    num_problems: int = 128,
    n: int = 16,
    beam_width: int = 4,
    max_depth: int = 40,
    seed: int = 0,
    assumptions: Assumptions | None = None,
    strategy: str = "beam_search",
    max_tokens: int | None = None,
) -> Recording:
    """A search over MATH-500 problems by the 1B + 8B pair, ready to be replayed.

    Lengths of problems, reference solutions, prompts and templates are real; how a 1B model's
    solutions differ from the reference, branch and end is assumed, alike for every strategy. The
    same seed gives the same search; the problems are those of the study, whatever it is. strategy:
    of DRAWN_STRATEGIES; max_tokens: of best of n's whole samples. Raises ConfigError.
    """
    require_known([strategy], list(DRAWN_STRATEGIES), "A search made of lengths", "strategy")
    sizes = {"n": n, "beam_width": beam_width, "max_depth": max_depth, "max_tokens": max_tokens}
    chosen = strategy_with(strategy, sizes)
    problems = []
    for lengths in math500_lengths(num_problems):
        own = drawn_tokens(random.Random(lengths.id), lengths.problem_tokens)
        problem = Problem(lengths.id, lengths.id, None, lengths.level)
        draw = _AssumedSteps(lengths, seed, assumptions or Assumptions())
        problems.append(_grown(problem, own, chosen, draw))
    return _recording(problems, chosen, seed)


class _Progress(NamedTuple):
    """Where a partial solution stands. wanted: tokens to come as it goes now; inf: for ever."""

    wanted: float
    score: float
    tokens: int  # of all steps


class _AssumedSteps:
    """Steps of one problem: each from a generator that its path seeds, in whatever order."""

    def __init__(self, lengths: Lengths, seed: int, assumed: Assumptions) -> None:
        self._assumed, self._name = assumed, f"{seed}/{lengths.id}"
        start = _Progress(assumed.length_ratio * lengths.solution_tokens, 0.9, 0)
        self._progress: dict[tuple[int, ...], _Progress] = {(): start}
        self._steps: dict[tuple[int, ...], DrawnStep] = {}
        self._room = MAX_MODEL_LEN - lengths.problem_tokens - 64

    def __call__(self, beams: Sequence[Beam]) -> list[DrawnStep]:
        assumed, usual = self._assumed, math.log(self._assumed.step_tokens)
        paths = [beam.path for beam in beams]
        for path in sorted(paths, key=lambda path: path[-1]):  # twins follow their siblings
            parent, before = self._progress[path[:-1]], (*path[:-1], path[-1] - 1)
            draws = random.Random(f"{self._name}/{path}")
            if before in self._steps and draws.random() < assumed.twins:
                self._progress[path] = self._progress[before]
                self._steps[path] = self._steps[before]
                continue
            wanted = parent.wanted * draws.lognormvariate(0, assumed.length_spread)
            count = max(2, round(draws.lognormvariate(usual, assumed.step_spread)))
            between = len(path) * (PRM_BETWEEN + PRM_VERDICT)
            around = max(PRM_HEAD + PRM_VERDICT + between, PROMPT_HEAD + PROMPT_TAIL)
            left = self._room - around - parent.tokens
            if draws.random() < assumed.endless:
                wanted = math.inf
            ends = count >= wanted or count >= left - 2 * assumed.step_tokens
            count = max(2, min(count, MAX_STEP_TOKENS, math.ceil(min(wanted, left))))
            score = min(max(parent.score + draws.gauss(0, assumed.score_spread), 0.0), 1.0)
            self._progress[path] = _Progress(wanted - count, score, parent.tokens + count)
            text, reason = "/".join(map(str, path)) + STEP_END, "eos" if ends else "stop"
            self._steps[path] = DrawnStep(drawn_tokens(draws, count), text, score, reason)
        return [self._steps[path] for path in paths]


CRITIQUE_MEDIAN, CRITIQUE_SPREAD = 200.0, 0.5
"""A drawn critique's tokens: median, and standard deviation of their logarithm."""


def with_critiques(recording: Recording, critiques: Critiques, seed: int = 0) -> Recording:
    """The search as if a generative verifier had judged it: each judged solution gets critiques.

    Steps, inputs and scores stay. A critique's tokens are drawn, critiques.tokens at most. The
    PRM's max_model_len grows by what a critique may take, so that the same solutions fit.
    """
    problems, usual = [], math.log(CRITIQUE_MEDIAN)
    for problem in recording.problems:
        found = []
        for solution in problem.solutions:
            for number in range(critiques.count if solution.score is not None else 0):
                key = (*solution.steps, number)
                draws = random.Random(f"critique/{seed}/{problem.problem.id}/{key}")
                count = max(1, round(draws.lognormvariate(usual, CRITIQUE_SPREAD)))
                tokens = drawn_tokens(draws, min(count, critiques.tokens))
                reason = "stop" if count <= critiques.tokens else "length"
                found.append(RecordedCritique(key, tokens, "", reason, solution.score))
        problems.append(replace(problem, critiques=tuple(found)))
    settings = replace(
        recording.settings,
        prm_critiques=asdict(critiques),
        prm_ask=_fixed("ask", ASK),
        prm_lead=_fixed("lead", LEAD),
    )
    longer = recording.prm.max_model_len + ASK + critiques.tokens + LEAD
    prm = replace(recording.prm, max_model_len=longer)
    return replace(recording, settings=settings, prm=prm, problems=tuple(problems))


# -- from published completions --

COLUMNS = ("problem", "completions", "scores")
Tokenize = Callable[[str], Sequence[int]]
Row = Mapping[str, Any]


def from_completions(
    rows: Iterable[Row],
    tokenize: Tokenize,
    *,
    beam_width: int = 4,
    max_depth: int = 40,
    seed: int = 0,
) -> Recording:
    """A search of the 1B + 8B pair whose kept beams are these. tokenize: of the generator.

    rows: of a data set as search-and-learn writes them (Beeching, Tunstall and Rush 2024):
    problem, completions (texts of the n final beams) and scores (a list a completion) are read,
    and unique_id, level and answer where there are any. All rows have as many completions: that is
    n. Nothing is published of what was pruned: final beams are cut at blank lines and laid into a
    trie; siblings that were pruned are modelled, as long as the problem's known steps, scored below
    every step that was kept, and going on until all final beams are out. A final beam that finds no
    place among the survivors of this package's beam search is left out. Raises RecordingError
    naming row and column.
    """
    known = list(rows)
    if not known:
        raise RecordingError("There are no completions; give one row or more.")
    for number, row in enumerate(known):
        _require_readable(number, row)
    counts = sorted({len(row["completions"]) for row in known})
    if len(counts) > 1:
        raise RecordingError(
            f"Rows have {', '.join(map(str, counts))} completions; give rows of one n."
        )
    given = [row.get("unique_id") for row in known]
    names = [str(number if name is None else name) for number, name in enumerate(given)]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise RecordingError(f"Row {number} has the unique_id {name!r} of a row before it.")
    strategy = BeamSearch(counts[0], beam_width, max_depth)
    problems = []
    for number, row in enumerate(known):
        name, level, answer = names[number], row.get("level"), row.get("answer")
        problem = Problem(
            name,
            row["problem"],
            None if answer is None else str(answer),
            None if level is None else int(level),
        )
        own = tuple(int(token) for token in tokenize(row["problem"]))
        draw = _PublishedSteps(row, tokenize, f"{seed}/{name}", len(own))
        problems.append(_grown(problem, own, strategy, draw))
    return _recording(problems, strategy, seed)


def _require_readable(number: int, row: Row) -> None:
    """RecordingError for what is missing in a row, or of another kind."""
    for column in COLUMNS:
        if column not in row:
            has = ", ".join(map(str, row))
            raise RecordingError(f"Row {number} has no {column!r}; it has {has}.")
    texts, scores = row["completions"], row["scores"]
    if not isinstance(row["problem"], str) or not all(map(np.iterable, (texts, scores))):
        raise RecordingError(
            f"Row {number}: problem is {row['problem']!r:.80}, completions and scores are "
            f"{texts!r:.80} and {scores!r:.80}; give a text and two lists."
        )
    if not len(texts) or len(texts) != len(scores):
        raise RecordingError(
            f"Row {number} has {len(texts)} completions and {len(scores)} lists of scores; "
            "give one list for each, at least one."
        )
    for place, (text, own) in enumerate(zip(texts, scores)):
        if not isinstance(text, str) or not split_steps(text):
            raise RecordingError(f"Row {number}: Completion {place} is empty.")
        if not np.iterable(own) or not all(isinstance(each, Real) for each in own):
            raise RecordingError(f"Row {number}: scores {place} are {own!r:.80}: give numbers.")
    try:
        int(row.get("level") or 0)
    except (TypeError, ValueError):
        told = f"Row {number}: level is {row['level']!r}; give a whole number."
        raise RecordingError(told) from None


@dataclass(slots=True)
class _KnownStep:
    """A step of final beams. score: the published one; ending: beams that do here; following: by
    text.
    """

    score: float
    ending: int = 0
    following: dict[str, _KnownStep] = field(default_factory=dict)

    def below(self) -> Iterator[tuple[str, _KnownStep]]:
        """All steps after it."""
        for text, step in self.following.items():
            yield text, step
            yield from step.below()


class _PublishedSteps:
    """Steps of one problem: the final beams' where there are any left, else modelled ones.

    Of final beams, steps of equal beginnings are one; a score that lacks is the last one's.
    """

    def __init__(self, row: Row, tokenize: Tokenize, name: str, problem_tokens: int) -> None:
        self._tokenize, self._name = tokenize, name
        root = _KnownStep(0.5)
        self._at: dict[tuple[int, ...], _KnownStep | None] = {(): root}
        for text, scores in zip(row["completions"], row["scores"], strict=True):
            node = root
            for place, step in enumerate(split_steps(text)):
                score = float(scores[min(place, len(scores) - 1)]) if len(scores) else node.score
                node = node.following.setdefault(step, _KnownStep(score))
            node.ending += 1
        known = list(root.below())
        self._lengths = [len(tokenize(text)) for text, _ in known]
        self._least = min(step.score for _, step in known)
        self._left = sum(step.ending for _, step in known if not step.following)  # not out yet
        self._room = MAX_MODEL_LEN - (PRM_HEAD + PRM_VERDICT + problem_tokens) - 256

    def __call__(self, beams: Sequence[Beam]) -> list[DrawnStep]:
        found = {beam.path: self._published(beam.path) for beam in beams}
        if not any(found.values()):
            self._left = 0  # what is left found no place among the survivors
        return [found[beam.path] or self._modelled(beam) for beam in beams]

    def _published(self, path: tuple[int, ...]) -> DrawnStep | None:
        """The k-th child of a step takes its k-th continuation; equal beams come last."""
        parent, ordinal = self._at[path[:-1]], path[-1]
        once = list(parent.following.items()) if parent is not None else []
        again = [each for each in once for _ in range(each[1].ending - 1) if not each[1].following]
        known = once + again
        if ordinal >= len(known):
            self._at[path] = None
            return None
        text, node = known[ordinal]
        self._at[path] = node
        tokens = tuple(int(token) for token in self._tokenize(text))
        ends = not node.following
        self._left -= ends
        return DrawnStep(tokens, text, min(max(node.score, 0.0), 1.0), "eos" if ends else "stop")

    def _modelled(self, beam: Beam) -> DrawnStep:
        """A step that was pruned and not published: it scores less than any that was kept.

        It ends its solution once all final beams are out, or where there is no room for another.
        """
        draws = random.Random(f"{self._name}/{beam.path}")
        used = len(beam.token_ids) + len(beam.steps) * (PRM_BETWEEN + PRM_VERDICT)
        count = max(1, draws.choice(self._lengths))
        ends = self._left < 1 or used + 2 * count > self._room
        score = self._least * draws.random()
        text = "modelled " + "/".join(map(str, beam.path)) + STEP_END
        return DrawnStep(drawn_tokens(draws, count), text, score, "eos" if ends else "stop")
