"""Guards the corpus of the embedded models: true labels, stated slips, nothing held out in it."""

import hashlib
import random
from itertools import islice, pairwise

import pytest

from workbench.training import corpus
from workbench.training.corpus import STUDENT, StudentRates, is_right, value_left


def solutions(count: int, seed: int = 0, rates: StudentRates = STUDENT, longest: int = 24):
    stream = corpus.training_solutions(range(2, longest + 1), random.Random(seed), [rates])
    return list(islice(stream, count))


def value_of(expression: str) -> int:
    """Sum of a chain, digit by digit: no code shared with the corpus."""
    total, sign, number = 0, 1, ""
    for character in expression + "+":
        if character.isdigit():
            number += character
        else:
            total += sign * int(number) if number else 0
            sign, number = (-1 if character == "-" else 1), ""
    return total


def test_a_step_is_labelled_right_when_it_progresses_to_what_has_the_true_value():
    """Of problems that are not held out; what cannot be read has no value."""
    assert value_left("well") is value_left("take 1+2=3, left") is None
    for work in solutions(400):
        assert int(hashlib.sha256(work.problem.encode()).hexdigest(), 16) % 8 != 0
        truth = value_of(work.problem.removeprefix("Compute ").rstrip("."))
        for step in work.steps[:-1]:
            left = value_of(step.text.split(" ")[-1])
            assert left == sum(step.left) == value_left(step.text)
            assert step.correct == (left == truth and step.kind != "check")
            assert step.correct == is_right(step.text, truth)
        answer = work.steps[-1].text
        assert answer == f"The answer is \\boxed{{{work.steps[-1].left[0]}}}."
        assert work.steps[-1].correct == (value_left(answer) == truth)


def test_a_solution_goes_on_from_what_it_wrote():
    for work in solutions(200, seed=1):
        before = work.terms
        for step in work.steps[:-1]:
            left_out = step.slipped and len(step.left) == len(before) - 2
            assert left_out or len(step.left) == len(before) - (step.kind != "check")
            before = step.left
        assert work.steps[-1].left == before


def test_a_flawless_student_is_always_right():
    for work in solutions(200, rates=StudentRates(dropped_carry=0, scattered_slip=0)):
        assert all(step.correct != (step.kind == "check") for step in work.steps)
        assert not any(step.slipped for step in work.steps)


def test_slips_come_at_the_stated_rate_and_a_forgotten_carry_is_ten_too_little():
    carries = forgotten = plain = scattered = 0
    for work in solutions(600, seed=2):
        before = work.terms
        for step in work.steps[:-1]:
            change = sum(step.left) - sum(before)
            possible = any(corpus.has_carry(*pair) for pair in pairwise(before[:4]))
            if change == -10 and possible:
                forgotten += 1
            elif step.kind in ("merge", "verbose"):
                plain += 1
                scattered += step.slipped
            before = step.left
        carries += _carries(work)
    assert forgotten / carries == pytest.approx(STUDENT.dropped_carry, abs=0.05)
    assert 0.4 < scattered / plain / STUDENT.scattered_slip < 2


def _carries(work) -> int:
    """How many steps of a solution merged a pair that had a carry."""
    count = 0
    for step in work.steps[:-1]:
        if step.kind != "check":
            pair = step.text.split("=")[0].split(":")[0].split(" ")[1]
            cut = max(pair.rfind("+"), pair.rfind("-"))
            count += corpus.has_carry(int(pair[:cut]), int(pair[cut:]))
    return count
