"""Answers: read out of a solution, compared as mathematics, grouped for a vote.

An answer is what the last \\boxed{...} holds; a solution without one has no answer, whether
it is finished or not. Equal texts and whole numbers are compared here; anything else by
`math-verify`, an optional extra that is imported only when two answers need it.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from workbench.errors import WorkbenchError

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+(?=[^\s{])")
WHOLE_NUMBER = re.compile(r"[+-]?\d{1,18}")
LONGEST_COMPARED = 200  # characters
LARGEST_POWER = 10**6
POWER_TOWER = re.compile(r"\^\s*(\{[^{}]*\^|[^{}\s]\s*\^)")
POWER = re.compile(r"([)}\]]?)\s*\^\s*\{?\s*[-+]?(\d+)")
FACTORIAL = re.compile(r"\d{5,}\s*!|!\s*!|\)\s*!")


def extract_answer(text: str) -> str:
    """The content of the last complete \\boxed{...}, or "" when there is none."""
    for match in reversed(list(BOX.finditer(text))):
        answer = _content(text, match.end())
        if answer is not None:
            return answer.strip()
    return ""


def _content(text: str, start: int) -> str | None:
    """What the braces opening at `start` hold, or the bare word there; None if never closed."""
    if text[start : start + 1] != "{":
        return re.split(r"[\s$.]", text[start:], maxsplit=1)[0]
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "{" and text[index - 1] != "\\":
            depth += 1
        elif text[index] == "}" and text[index - 1] != "\\":
            depth -= 1
            if depth == 0:
                return text[start + 1 : index]
    return None


def same_answer(reference: str, given: str) -> bool:
    """Whether two answers mean the same. An empty answer equals nothing.

    Raises WorkbenchError when the two need `math-verify` and it is not installed.
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
    return _equal_mathematics(reference, given)


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


def group_answers(answers: Sequence[str]) -> list[int]:
    """A group number for each answer: equal answers share one, "" gets a group of its own."""
    firsts: list[str] = []
    known: dict[str, int] = {}
    for answer in answers:
        if answer not in known:
            known[answer] = _group_of(answer, firsts)
    return [known[answer] for answer in answers]


def _group_of(answer: str, firsts: list[str]) -> int:
    for group, first in enumerate(firsts):
        if same_answer(first, answer):
            return group
    firsts.append(answer)
    return len(firsts) - 1


def _plain(answer: str) -> str:
    return answer.strip().strip("$").strip()


@lru_cache(maxsize=4096)
def _equal_mathematics(reference: str, given: str) -> bool:
    """math-verify's verdict; without its time limits, which use signals and fail in threads."""
    verifier = _math_verify()
    parsed = [
        verifier.parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (reference, given)
    ]
    return bool(verifier.verify(*parsed, timeout_seconds=None))


def _math_verify() -> Any:
    try:
        import math_verify  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise WorkbenchError(
            "Comparing answers that are no whole numbers needs math-verify: "
            "pip install 'workbench[search]' (or pip install math-verify)."
        ) from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that no time limit is set
    return math_verify
