"""From solutions to one answer: answers read out, compared as mathematics, scored and voted on.

An answer is what the last \\boxed{...} holds; a solution without one has no answer, whether
it is finished or not. Equal texts and whole numbers are compared here; anything else by
`math-verify`, an optional extra that is started only when two answers need it. Aggregation and
voting are applied alike by every strategy; an empty answer never votes, ties go to the first seen.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.connection import wait
from statistics import fmean
from typing import Any

from workbench.errors import ConfigError, WorkbenchError, nearest

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed(?:\s+(?=[^\s{])|(?=\\))")
DOLLARS = re.compile(r"(?<!\\)\$+")  # they open or close a formula
EDGES = re.compile(r"^\s*\$*\s*|\s*(?<!\\)\$*\s*$")  # white space and dollars, none escaped
UNIT = re.compile(r"\\(?:text|textrm|mbox|mathrm)\s*\{|\s[A-Za-z]{2,}\W*$")  # or another word
OTHER_NUMBER = re.compile(r"\b(hundred|thousand|million|billion|trillion|or|and)\b")
BRACE = re.compile(r"(?<!\\)(?:\\\\)*[{}]")  # not one that is escaped
WHOLE_NUMBER = re.compile(r"[+-]?\d{1,18}")
WORDS = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm)\s*\{([^{}]*)\}")
IDLE_SPACE = re.compile(r"(?<!\w)\s+|\s+(?!\w)")
LONE_BRACES = re.compile(r"(?<=[\^_])\{(\w)\}")
PROOF_SECONDS = 3.0  # of one comparison
MOST_TOLD = 4096  # verdicts that are kept
LONGEST_COMPARED = 200  # characters
LARGEST_POWER = 10**6
POWER_TOWER = re.compile(r"\^\s*(\{[^{}]*\^|[^{}\s]\s*\^)")
POWER = re.compile(r"([)}\]]?)\s*\^\s*\{?\s*[-+]?(\d+)")
FACTORIAL = re.compile(r"\d{5,}\s*!|!\s*!|\)\s*!")


def extract_answer(text: str) -> str:
    """The content of the last complete \\boxed{...}, else of the last \\boxed without braces, or ""
    when there is none.
    """
    boxes = sorted(BOX.finditer(text), key=lambda box: (text[box.end()] == "{", box.end()))
    for match in reversed(boxes):
        start, depth = match.end(), 0
        if text[start] != "{":  # bare: to the end of the formula it is in, or one word
            opened = DOLLARS.match(text, start)
            since = max(text.rfind("\n\n", 0, start), 0)  # no formula goes on over a blank line
            inside = opened or len(DOLLARS.findall(text, since, start)) % 2
            rest = text[opened.end() if opened else start :]
            formula = DOLLARS.split(rest, 1)[0]
            bare = formula if inside and formula != rest else (formula.split() or [""])[0]
            return bare.strip().rstrip(".")
        for brace in BRACE.finditer(text, start):
            depth += 1 if brace[0].endswith("{") else -1
            if depth == 0:
                return text[start + 1 : brace.end() - 1].strip()
    return ""


def same_answer(reference: str, given: str) -> bool:
    """Whether two answers mean the same. An empty answer equals nothing. Raises WorkbenchError when
    the two need `math-verify` and it is not installed.
    """
    reference, given = _plain(reference), _plain(given)
    if not reference or not given:
        return False
    if _text(reference) == _text(given):
        return True
    if WHOLE_NUMBER.fullmatch(reference) and WHOLE_NUMBER.fullmatch(given):
        return int(reference) == int(given)
    if not (_can_be_evaluated(reference) and _can_be_evaluated(given)):
        return False
    return equal_mathematics(reference, given)


def _can_be_evaluated(answer: str) -> bool:
    """Whether working it out ends soon; what a model puts in a box may be a tower of powers.

    An answer that cannot be evaluated equals only its own text.
    """
    if len(answer) > LONGEST_COMPARED or POWER_TOWER.search(answer) or FACTORIAL.search(answer):
        return False
    powers = [(bracket, int(digits)) for bracket, digits in POWER.findall(answer)]
    of_brackets = math.prod(power for bracket, power in powers if bracket)
    largest = max((power for bracket, power in powers if not bracket), default=1)
    return of_brackets * largest <= LARGEST_POWER


def group_answers(
    answers: Sequence[str], same: Callable[[str, str], bool] = same_answer
) -> list[int]:
    """A group number for each answer: equal answers share one, "" gets a group of its own.

    Equal are those that `same` finds so either way round, with every one of the group: math-verify
    takes 50 percent for 0.5, and for 50, too.
    """
    groups: list[list[str]] = []
    known: dict[str, int] = {}
    for answer in answers:
        if answer not in known:
            equal = (
                number
                for number, group in enumerate(groups)
                if all(same(each, answer) and same(answer, each) for each in group)
            )
            known[answer] = next(equal, len(groups))
            if known[answer] == len(groups):
                groups.append([])
            groups[known[answer]].append(answer)
    return [known[answer] for answer in answers]


def _plain(answer: str) -> str:
    return EDGES.sub("", answer).removesuffix(".").rstrip()


def _text(answer: str) -> str:
    """An answer without what changes nothing in its text: \\text{} around it, idle spaces."""
    words = WORDS.fullmatch(answer)
    spaced = IDLE_SPACE.sub("", words[1].strip() if words else answer)
    return LONE_BRACES.sub(r"\1", spaced)


class Proofs:
    """math-verify's verdict on two answers, by a process of its own, each within PROOF_SECONDS.

    sympy may compute for ever on what a model writes, and hold the interpreter meanwhile. A pair
    that takes longer is told apart, and the process begun anew; told again it may have the time.
    """

    def __init__(self) -> None:
        self.told: dict[tuple[str, str], bool] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def __call__(self, reference: str, given: str) -> bool:
        """Whether they are equal, as far as can be told in time."""
        pair = reference, given
        with self._lock:
            if pair in self.told:
                return self.told[pair]
            process, self._process = self._process, None  # an interrupt leaves none
            if process is None or process.poll() is not None or self._owner != os.getpid():
                process, self._owner = self._started(), os.getpid()  # a fork's are not its own
            try:
                found = self._answer(process, [*pair], PROOF_SECONDS)
            except BaseException:
                process.kill()
                raise
            if found is None:
                process.kill()
                process.wait()
                return False
            self._process = process
            if len(self.told) >= MOST_TOLD:
                self.told.clear()
            self.told[pair] = found
            return found

    def _started(self) -> subprocess.Popen[str]:
        """The process, once it has compared two answers."""
        if find_spec("math_verify") is None:
            raise WorkbenchError(
                "Comparing answers that are no whole numbers needs math-verify: "
                "pip install math-verify."
            )
        program = f"import sys; sys.path[:] = {sys.path}; from {__name__} import prove; prove()"
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is not for it
        )
        weakref.finalize(self, process.kill)
        if not self._answer(process, ["1", "1"], None):
            raise WorkbenchError(f"math-verify did not start (exit status {process.wait()}).")
        return process

    @staticmethod
    def _answer(
        process: subprocess.Popen[str], pair: list[str], seconds: float | None
    ) -> bool | None:
        """None: it did not come in time, or the process ended over it."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(f"{json.dumps(pair)}\n")
            process.stdin.flush()
            # select refuses the 1,024th open file; the stub of wait knows no files
            there = wait([process.stdout], seconds)  # type: ignore[list-item]
            line = process.stdout.readline() if there else ""
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else None


equal_mathematics = Proofs()


def prove() -> None:
    """Answers a line of standard input, two answers, by another: whether they are equal.

    Units are cut off only of the one of both that has any: what math-verify takes for one may be a
    variable (it finds 2 in 2d), and two that differ (AM, PM; km, m) are no less part of an answer,
    nor is a word that makes it another number (5 million, 5 or more).
    """
    import math_verify  # noqa: PLC0415 - an optional extra

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that no time limit is set
    usual = math_verify.LatexExtractionConfig()
    whole = replace(usual, normalization_config=replace(usual.normalization_config, units=False))

    def parsed(text: str, latex: Any) -> list[Any]:
        how = [latex, math_verify.ExprExtractionConfig()]
        return math_verify.parse(f"\\boxed{{{text}}}", how, parsing_timeout=None)

    def equal(pair: list[str], latex: Any) -> bool:
        return bool(math_verify.verify(*(parsed(t, latex) for t in pair), timeout_seconds=None))

    def one_unit(pair: list[str]) -> bool:
        bare = [text for text in pair if UNIT.search(text) is None]
        if len(bare) != 1 or any(OTHER_NUMBER.search(text) for text in pair):
            return False
        return parsed(bare[0], whole)[:1] == parsed(bare[0], usual)[:1]  # it has no short one, m

    for line in sys.stdin:
        pair = json.loads(line)
        told = json.dumps(equal(pair, whole) or (one_unit(pair) and equal(pair, usual)))
        sys.stdout.write(f"{told}\n")
        sys.stdout.flush()


_AGGREGATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "last": lambda scores: scores[-1],
    "min": min,
    "prod": math.prod,
    "mean": fmean,
}
UNSCORED = 0.5
"""Score of a beam without a step: the PRM has seen nothing for or against it."""


def check_choice(name: str, given: str, allowed: Sequence[str]) -> None:
    """Raises ConfigError, with the nearest known name, unless `given` is allowed."""
    if given not in allowed:
        hint = nearest(given, tuple(allowed))
        raise ConfigError(f"{name} is {given!r}; allowed: {', '.join(allowed)}.{hint}")


def aggregate(scores: Sequence[float], aggregation: str = "last") -> float:
    """One number for a beam from its step scores; 0.5 when it has none."""
    return float(_AGGREGATIONS[aggregation](scores)) if scores else UNSCORED


def vote(
    answers: Sequence[str], scores: Sequence[float], groups: Sequence[int], voting: str = "weighted"
) -> int | None:
    """The first beam of the group that wins, by its place; None when none votes.

    answers, scores, groups: one entry a beam, in the order seen; beams whose answers are equal
    share a group number. majority counts, weighted sums scores, naive takes the best score.
    """
    totals: dict[int, float] = {}
    for answer, score, group in zip(answers, scores, groups, strict=True):
        if not answer:
            continue
        if voting == "naive":
            totals[group] = max(totals.get(group, score), score)
        else:
            totals[group] = totals.get(group, 0.0) + (1 if voting == "majority" else score)
    # max: first of equals
    return list(groups).index(max(totals, key=totals.__getitem__)) if totals else None


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n samples hold a right one (Chen et al. 2021, eq. 1)."""
    if not 1 <= k <= n:
        raise ConfigError(
            f"pass@k needs 1 <= k <= n; k is {k}, n is {n}: sample more, or ask for less."
        )
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
