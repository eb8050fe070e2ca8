"""Worked solutions of the tiny family, with a weak student's slips and the true label of a step.

A step merges the first two terms and restates what is left; now and then it only checks, and
restates without progress. The student often forgets a carry, always in the same direction, so
wrong answers agree with each other and a majority vote is no way out; rarer slips scatter. After
a slip the solution goes on consistently from the wrong rest. A step is labelled right when it makes
progress and what it leaves has the value of the problem: a verifier that praised mere restating
would have a search restate for ever. Pure Python; the models are trained elsewhere.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workbench.search.problems import Terms, draw_terms, format_terms, is_held_out, problem_text

STEP_END = "\n\n"
PAIR_WEIGHTS = (1.0,)
"""How often the first, second, ... pair is merged; choosing among several made a model of this size
miscopy what no verifier of this size sees."""
MERGE_WORDINGS = (
    "take {pair}={result}, left {rest}",
    "now {pair}={result}, giving {rest}",
    "next {pair}={result}, so {rest}",
    "do {pair}={result}, then {rest}",
    "put {pair}={result}, which leaves {rest}",
    "use {pair}={result}, rest {rest}",
)
CHECK_WORDINGS = ("check {rest}", "again {rest}", "still {rest}")
_CHECKING = tuple(wording.split(" ")[0] for wording in CHECK_WORDINGS)
VERBOSE_WORDING = "slowly {pair}: {work}, hence {pair}={result}, left {rest}"
ANSWER_WORDING = "The answer is \\boxed{{{answer}}}."

_REST = re.compile(r"(?:^|\s)(-?\d+(?:[+-]\d+)*)$")
_ANSWER = re.compile(r"\\boxed\{(-?\d+)\}")
_TERM = re.compile(r"[+-]?\d+")


@dataclass(frozen=True, slots=True)
class StudentRates:
    """How often the student does what; probabilities per opportunity."""

    dropped_carry: float = 0.42
    scattered_slip: float = 0.01
    verbose: float = 0.3
    check: float = 0.06
    check_again: float = 0.2
    longest_check: int = 12
    """A check begins only when at most this many terms are left, so its text stays short."""


@dataclass(frozen=True, slots=True)
class WorkedStep:
    """One step: its text without STEP_END, the terms it leaves, whether it is labelled right.

    The last step leaves its answer as the only term.
    """

    text: str
    left: Terms
    correct: bool
    kind: str
    slipped: bool = False


@dataclass(frozen=True, slots=True)
class WorkedSolution:
    """A problem and its steps."""

    problem: str
    terms: Terms
    steps: tuple[WorkedStep, ...]

    @property
    def completion(self) -> str:
        """What the LLM is trained to write; every step but the last ends in STEP_END."""
        return STEP_END.join(step.text for step in self.steps)


STUDENT = StudentRates()
DISTRACTED_STUDENT = StudentRates(dropped_carry=0.15, scattered_slip=0.1)
FLAWLESS_STUDENT = StudentRates(dropped_carry=0.0, scattered_slip=0.0)


def work_out(terms: Terms, rng: random.Random, rates: StudentRates = STUDENT) -> WorkedSolution:
    """One sampled solution of a chain, slips and labels included."""
    truth, left, steps = sum(terms), terms, []
    checking = False
    while len(left) > 1:
        checking = _checks(left, checking, rng, rates)
        step = _check_step(left, rng) if checking else _merge_step(left, rng, rates)
        left = step[1]
        right = not checking and sum(left) == truth
        steps.append(WorkedStep(step[0], left, right, step[2], step[3]))
    answer = ANSWER_WORDING.format(answer=left[0])
    steps.append(WorkedStep(answer, left, left[0] == truth, "answer"))
    return WorkedSolution(problem_text(terms), terms, tuple(steps))


def _checks(left: Terms, checking: bool, rng: random.Random, rates: StudentRates) -> bool:
    if checking:
        return rng.random() < rates.check_again
    return len(left) <= rates.longest_check and rng.random() < rates.check


def _check_step(left: Terms, rng: random.Random) -> tuple[str, Terms, str, bool]:
    return rng.choice(CHECK_WORDINGS).format(rest=format_terms(left)), left, "check", False


def _merge_step(
    left: Terms, rng: random.Random, rates: StudentRates
) -> tuple[str, Terms, str, bool]:
    places = range(min(len(PAIR_WEIGHTS), len(left) - 1))
    place = rng.choices(places, PAIR_WEIGHTS[: len(places)])[0]
    first, second = left[place], left[place + 1]
    dropped = has_carry(first, second) and rng.random() < rates.dropped_carry
    result = first + second - 10 * dropped
    rest = (*left[:place], result, *left[place + 2 :])
    pair = format_terms((first, second))
    slipped = dropped
    verbose = max(abs(first), abs(second)) >= 10 and rng.random() < rates.verbose
    if rng.random() < rates.scattered_slip:
        result, rest = _scatter(rest, place, first, second, rng)
        slipped = True
    fields = {"pair": pair, "result": result, "rest": format_terms(rest)}
    if verbose and (work := _spelled_out(first, second, dropped)):
        return VERBOSE_WORDING.format(work=work, **fields), rest, "verbose", slipped
    return rng.choice(MERGE_WORDINGS).format(**fields), rest, "merge", slipped


def has_carry(first: int, second: int) -> bool:
    """Whether the student can forget a carry here: two positive terms whose ones reach ten."""
    return first > 0 and second > 0 and first % 10 + second % 10 >= 10


def _scatter(
    rest: Terms, place: int, first: int, second: int, rng: random.Random
) -> tuple[int, Terms]:
    """A rare slip: a wrong result, or (where there is another term) one of the others miscopied."""
    if len(rest) > 1 and rng.random() < 0.35:
        return rest[place], _miscopied(rest, place, rng)
    kind = rng.choices(("off by one", "off by ten", "sign", "guess"), (0.5, 0.15, 0.2, 0.15))[0]
    result = {
        "off by one": rest[place] + rng.choice((-1, 1)),
        "off by ten": rest[place] + rng.choice((-10, 10)),
        "sign": first - second,
        "guess": rest[place] + _misread(rng),
    }[kind]
    return result, (*rest[:place], result, *rest[place + 1 :])


def _miscopied(rest: Terms, place: int, rng: random.Random) -> Terms:
    """`rest` with one term other than the result misread, with the wrong sign, or left out."""
    index = rng.choice([index for index in range(len(rest)) if index != place])
    term = rest[index]
    wrong = rng.choice(((term + rng.choice((-1, 1)),), (term + _misread(rng),), (-term,), ()))
    return (*rest[:index], *wrong, *rest[index + 1 :])


def _misread(rng: random.Random) -> int:
    return rng.choice((-1, 1)) * rng.randint(2, 9)


def _spelled_out(first: int, second: int, dropped: bool) -> str:
    """The working of a sum of two positive numbers, or of taking a two-digit number away."""
    if first > 0 and second > 0:
        ones, carried = first % 10 + second % 10, has_carry(first, second) and not dropped
        tens = first // 10 + second // 10 + carried
        carry = "+1" if carried else ""
        ones_work = f"ones {first % 10}+{second % 10}={ones}"
        return f"{ones_work}, tens {first // 10}+{second // 10}{carry}={tens}"
    if first > 0 and second <= -10:
        round_part = -(-second // 10) * 10
        halfway = first + round_part
        return f"{first}{round_part}={halfway}, {halfway}-{-second % 10}={first + second}"
    return ""


def training_solutions(
    operations: Sequence[int], rng: random.Random, rates: Sequence[StudentRates] = (STUDENT,)
) -> Iterator[WorkedSolution]:
    """An endless stream of worked solutions; a held-out problem is never among them."""
    while True:
        terms = draw_terms(rng.choice(operations), rng)
        if not is_held_out(problem_text(terms)):
            yield work_out(terms, rng, rng.choice(rates))


def value_left(step: str) -> int | None:
    """The value of what a step's text leaves (or answers); None where nothing can be read."""
    found = _ANSWER.search(step) or _REST.search(step.strip())
    return sum(map(int, _TERM.findall(found.group(1)))) if found else None


def is_right(step: str, answer: int) -> bool:
    """The true label of a step, by its text: it makes progress, and leaves the answer."""
    return not step.strip().startswith(_CHECKING) and value_left(step) == answer
