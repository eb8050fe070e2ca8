"""From solutions to one answer: answers read out, compared as mathematics, scored and voted on.

An answer is what the last \\boxed{...} holds; a solution without one has no answer, whether
it is finished or not. Equal texts and whole numbers are compared here; anything else by
`math-verify`, an optional extra that is imported only when two answers need it. Aggregation and
voting are applied alike by every strategy; an empty answer never votes, ties go to the first seen.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import fmean

from workbench.errors import ConfigError, WorkbenchError, nearest

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+(?=[^\s{])")
BRACE = re.compile(r"(?<!\\)[{}]")
WHOLE_NUMBER = re.compile(r"[+-]?\d{1,18}")
LONGEST_COMPARED = 200  # characters
LARGEST_POWER = 10**6
POWER_TOWER = re.compile(r"\^\s*(\{[^{}]*\^|[^{}\s]\s*\^)")
POWER = re.compile(r"([)}\]]?)\s*\^\s*\{?\s*[-+]?(\d+)")
FACTORIAL = re.compile(r"\d{5,}\s*!|!\s*!|\)\s*!")


def extract_answer(text: str) -> str:
    """The content of the last complete \\boxed{...}, or "" when there is none."""
    for match in reversed(list(BOX.finditer(text))):
        start, depth = match.end(), 0
        if text[start] != "{":  # a bare word
            return re.split(r"[\s$.]", text[start:], maxsplit=1)[0]
        for brace in BRACE.finditer(text, start):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return text[start + 1 : brace.start()].strip()
    return ""


def same_answer(
    reference: str, given: str, prove: Callable[[str, str], bool] | None = None
) -> bool:
    """Whether two answers mean the same. An empty answer equals nothing.

    prove: compares what needs mathematics; equal_mathematics, where none is given. Raises
    WorkbenchError when the two need `math-verify` and it is not installed.
    """
    reference, given = _plain(reference), _plain(given)
    if not reference or not given:
        return False
    if reference == given:
        return True
    if WHOLE_NUMBER.fullmatch(reference) and WHOLE_NUMBER.fullmatch(given):
        return int(reference) == int(given)
    if not (_can_be_evaluated(reference) and _can_be_evaluated(given)):
        return False
    return (prove or equal_mathematics)(reference, given)


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
    """A group number for each answer: equal answers share one, "" gets a group of its own."""
    firsts: list[str] = []
    known: dict[str, int] = {}
    for answer in answers:
        if answer not in known:
            equal = (group for group, first in enumerate(firsts) if same(first, answer))
            known[answer] = next(equal, len(firsts))
            if known[answer] == len(firsts):
                firsts.append(answer)
    return [known[answer] for answer in answers]


def _plain(answer: str) -> str:
    return answer.strip().strip("$").strip()


@lru_cache(maxsize=4096)
def equal_mathematics(reference: str, given: str) -> bool:
    """math-verify's verdict; without its time limits, which use signals and fail in threads."""
    try:
        import math_verify  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise WorkbenchError(
            "Comparing answers that are no whole numbers needs math-verify: "
            "pip install math-verify."
        ) from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that no time limit is set
    parsed = [
        math_verify.parse(f"\\boxed{{{t}}}", parsing_timeout=None) for t in (reference, given)
    ]
    return bool(math_verify.verify(*parsed, timeout_seconds=None))


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
        hint = nearest(str(given), tuple(allowed))
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
