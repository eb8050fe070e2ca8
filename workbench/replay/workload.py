"""Searches to be replayed without having run here: recordings of the package, and made ones.

`load_recording("tiny-128")` reads one that comes with the package (data/README.md says how each was
made, and how lengths were counted). `thesis_search` makes a search of the thesis's scale out of
MATH-500's lengths and stated assumptions: the real strategy runs on steps and scores that are
drawn, and what comes out is a Recording, as if run_search had written it. A token id in a made
search is a name, not a text.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from workbench.config import EngineConfig, Range, check
from workbench.errors import ConfigError, RecordingError, nearest
from workbench.models.registry import held_bytes, model_spec
from workbench.search.prm import SCORE_UNIT
from workbench.search.problems import Problem, pick_uniformly
from workbench.search.recording import (
    RecordedEngine,
    RecordedProblem,
    RecordedSettings,
    RecordedSolution,
    RecordedStep,
    Recording,
    read_recording,
)
from workbench.search.requests import STEP_END, Beam, Generate, Score, Step
from workbench.search.requests import Path as NodePath
from workbench.search.strategies import BeamSearch

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
"""Llama 3.2's chat template with search-and-learn's system prompt and a date, around a problem."""
PRM_HEAD, PRM_VERDICT, PRM_BETWEEN, PRM_DROPPED = 30, 5, 6, 1
"""RLHFlow's chat in Llama 3.1's template; a step's last token is its blank line."""
PLUS, MINUS = 10, 12  # verdict columns: "+" and "-"


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


def math500_lengths(limit: int | None = None, seed: int = 0) -> list[Lengths]:
    """Every problem, or those that load_problems("math500", limit, seed=seed) chooses."""
    with MATH500.open(encoding="utf-8", newline="") as file:
        rows = [Lengths(r[0], *map(int, r[1:])) for r in list(csv.reader(file))[1:]]
    if limit is None:
        return rows
    if not 1 <= limit <= len(rows):
        raise ConfigError(f"limit is {limit}; allowed: 1 to {len(rows)}, or None.")
    known = {row.id: row for row in rows}
    problems = [Problem(row.id, row.id, None, row.level) for row in rows]
    return [known[problem.id] for problem in pick_uniformly(problems, limit, seed)]


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


def _grown(
    problem: Problem, own: Tokens, strategy: BeamSearch, draw: _AssumedSteps
) -> RecordedProblem:
    """One problem's search; rounds are counted from 1, as if it had been the only one.

    own: the problem's tokens; draw: the steps of the beams of an iteration.
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
            if isinstance(request, Score):
                reply = [
                    tuple(solutions[b.steps[: k + 1]].score or 0.0 for k in range(len(b.steps)))
                    for b in request.beams
                ]
                continue
            assert isinstance(request, Generate)
            drawn = draw(request.beams)
            for slot, (beam, s) in enumerate(zip(request.beams, drawn, strict=True)):
                step = RecordedStep(
                    path=beam.path,
                    tokens=s.tokens,
                    text=s.text,
                    slot=slot,
                    round=rounds,
                    finish_reason=s.reason,
                    request_reason=s.reason,
                )
                steps.append(step)
                texts = (*beam.steps, s.text)
                if texts not in solutions:
                    before = (PLUS, *_fixed("between", PRM_BETWEEN - 1))
                    if len(texts) == 1:  # the first step brings the problem
                        before = _fixed("prm", PRM_HEAD) + own
                    shown = s.tokens[: max(1, len(s.tokens) - PRM_DROPPED)]
                    solutions[texts] = RecordedSolution(
                        steps=texts,
                        tokens=before + shown + _fixed("verdict", PRM_VERDICT),
                        asks=True,
                        fits=True,
                        score=round(s.score * SCORE_UNIT) / SCORE_UNIT,
                    )
            reply = [Step(s.tokens, s.text, s.reason) for s in drawn]
    except StopIteration:
        prompt = _fixed("prompt", PROMPT_HEAD) + own + _fixed("answer", PROMPT_TAIL)
        return RecordedProblem(problem, prompt, tuple(steps), tuple(solutions.values()))


def _engine(model: str, num_blocks: int) -> RecordedEngine:
    """What an engine of the thesis profile's settings would tell about itself."""
    config = EngineConfig(
        model,
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        dtype="bfloat16",
    )
    spec = model_spec(model)
    return RecordedEngine(
        name=model,
        architecture=spec.architecture,
        fingerprint=f"grown:{model}",
        max_model_len=MAX_MODEL_LEN,
        value_outputs=None,
        config=config.to_dict(),
        spec=asdict(spec),
        num_blocks=num_blocks,
        weight_bytes=held_bytes(model, DTYPE_BYTES) + spec.table_bytes(DTYPE_BYTES),
        block_bytes=spec.block_bytes(config.block_size, DTYPE_BYTES),
    )


_Positive = Annotated[float, Range(0)]
_Part = Annotated[float, Range(0, 1, "[]")]


@dataclass(frozen=True, slots=True)
class Assumptions:
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

    def __post_init__(self) -> None:
        check(self)


def thesis_search(
    num_problems: int = 128,
    n: int = 16,
    beam_width: int = 4,
    max_depth: int = 40,
    seed: int = 0,
    assumptions: Assumptions | None = None,
) -> Recording:
    """A beam search over MATH-500 problems by the 1B + 8B pair, ready to be replayed.

    Lengths of problems, reference solutions, prompts and templates are real; how a 1B model's
    solutions differ from the reference, branch and end is assumed. The same seed gives the same
    search; the problems are those of the study, whatever it is. Raises ConfigError.
    """
    strategy = BeamSearch(n, beam_width, max_depth)
    problems = []
    for lengths in math500_lengths(num_problems):
        own = drawn_tokens(random.Random(lengths.id), lengths.problem_tokens)
        problem = Problem(lengths.id, lengths.id, None, lengths.level)
        draw = _AssumedSteps(lengths, seed, assumptions or Assumptions())
        problems.append(_grown(problem, own, strategy, draw))
    settings = RecordedSettings(
        strategy="BeamSearch",
        strategy_settings=asdict(strategy),
        seed=seed,
        min_problem_batch=IN_FLIGHT,
        score_cache=True,
        temperature=0.8,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_step_tokens=2048,
        voting="weighted",
        score_shuffle_seed=None,
        prm_format="rlhflow",
        prm_fingerprint=f"grown:{PRM}",
        prm_columns=(PLUS, MINUS),
    )
    engines = _engine(LLM, 19_000), _engine(PRM, 6_500)  # about a share of 0.3 of 40 GiB
    return Recording(settings, *engines, tuple(problems))


class _Progress(NamedTuple):
    """Where a partial solution stands. wanted: tokens to come as it goes now; inf: for ever."""

    wanted: float
    score: float
    tokens: int  # of all steps
    steps: int


class _AssumedSteps:
    """Steps of one problem: each from a generator that its path seeds, in whatever order."""

    def __init__(self, lengths: Lengths, seed: int, assumed: Assumptions) -> None:
        self._assumed, self._name = assumed, f"{seed}/{lengths.id}"
        start = _Progress(assumed.length_ratio * lengths.solution_tokens, 0.9, 0, 0)
        self._progress: dict[NodePath, _Progress] = {(): start}
        self._steps: dict[NodePath, DrawnStep] = {}
        around = PRM_HEAD + PRM_VERDICT + lengths.problem_tokens
        self._room = MAX_MODEL_LEN - max(around, PROMPT_HEAD + PROMPT_TAIL) - 64

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
            left = self._room - parent.tokens - (parent.steps + 1) * (PRM_BETWEEN + PRM_VERDICT)
            if draws.random() < assumed.endless:
                wanted = math.inf
            ends = count >= wanted or count >= left - 2 * assumed.step_tokens
            count = max(2, min(count, math.ceil(min(wanted, left))))
            score = min(max(parent.score + draws.gauss(0, assumed.score_spread), 0.0), 1.0)
            tokens, steps = parent.tokens + count, parent.steps + 1
            self._progress[path] = _Progress(wanted - count, score, tokens, steps)
            text, reason = "/".join(map(str, path)) + STEP_END, "eos" if ends else "stop"
            self._steps[path] = DrawnStep(drawn_tokens(draws, count), text, score, reason)
        return [self._steps[path] for path in paths]
