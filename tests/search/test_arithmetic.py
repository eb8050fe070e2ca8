"""Guards the tiny problem family: held out by its text, levels as stated, exact answers."""

from __future__ import annotations

import ast
import hashlib
import operator
import random
from collections import Counter
from itertools import accumulate

import pytest

from workbench.search.problems import (
    LARGEST_TOTAL,
    LEVEL_OPERATIONS,
    LEVELS,
    draw_terms,
    is_held_out,
    problem_text,
    stream_problems,
    tiny_problem,
    tiny_problems,
)


def evaluate(expression: str) -> int:
    """An evaluator that shares no code with the family: Python's own parser."""
    operators = {ast.Add: operator.add, ast.Sub: operator.sub}

    def walk(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return operators[type(node.op)](walk(node.left), walk(node.right))
        assert isinstance(node, ast.Constant)
        return node.value

    return walk(ast.parse(expression, mode="eval").body)


def expression_of(problem: str) -> str:
    assert problem.startswith("Compute ")
    assert problem.endswith(".")
    return problem[len("Compute ") : -1]


def test_every_problem_is_held_out_by_the_hash_of_its_text():
    for problem in tiny_problems(200, seed=3):
        digest = hashlib.sha256(problem.problem.encode()).hexdigest()
        assert int(digest, 16) % 8 == 0
        assert is_held_out(problem.problem)


def test_answers_are_right_and_stand_nowhere_in_the_prompt_by_design():
    for problem in tiny_problems(200, seed=4):
        expression = expression_of(problem.problem)
        assert str(evaluate(expression)) == problem.answer
        assert set(expression) <= set("0123456789+-")


def test_answers_satisfy_reasoning_gym_chain_sum():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    chain_sum = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)
    for problem in tiny_problems(50, seed=5):
        answer = str(evaluate(expression_of(problem.problem)))
        entry = {"question": problem.problem, "answer": answer}
        assert chain_sum.score_answer(problem.answer, entry) >= 0.999
        assert chain_sum.score_answer(str(int(problem.answer) + 1), entry) < 0.999


def test_our_evaluator_answers_reasoning_gym_chain_sums():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    for entry in reasoning_gym.create_dataset("chain_sum", size=50, seed=1, max_digits=2):
        expression = entry["question"].split(":")[-1].split("=")[0].replace(" ", "")
        expression = "".join(sign for sign in expression if sign in "0123456789+-*")
        if "*" not in expression and expression[0].isdigit():
            assert str(evaluate(expression)) == entry["answer"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_is_its_number_of_operations(level: int):
    fewest, most = LEVEL_OPERATIONS[level]
    counts = set()
    for problem in tiny_problems(60, levels=[level], seed=1):
        assert problem.level == level
        expression = expression_of(problem.problem)
        counts.add(expression.count("+") + expression.count("-"))
    assert counts == set(range(fewest, most + 1))


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_has_ten_thousand_held_out_problems(level: int):
    rng, held_out = random.Random(level), set()
    fewest, most = LEVEL_OPERATIONS[level]
    for _ in range(200_000):
        text = problem_text(draw_terms(rng.randint(fewest, most), rng))
        if is_held_out(text):
            held_out.add(text)
        if len(held_out) == 10_000:
            return
    pytest.fail(f"level {level} has only {len(held_out)} held-out problems in 200,000 draws")


def test_levels_take_turns_so_that_a_prefix_is_uniform():
    problems = tiny_problems(128)
    assert Counter(problem.level for problem in problems) == {1: 26, 2: 26, 3: 26, 4: 25, 5: 25}
    assert [problem.level for problem in problems[:6]] == [1, 2, 3, 4, 5, 1]
    assert len({problem.problem for problem in problems}) == 128
    assert len({problem.id for problem in problems}) == 128


def test_problems_depend_on_the_seed_alone():
    assert tiny_problems(40, seed=2) == tiny_problems(60, seed=2)[:40]
    assert tiny_problems(40, seed=2) != tiny_problems(40, seed=3)
    assert tiny_problems(0) == []
    assert list(stream_problems([], 0)) == []


def test_totals_stay_small_on_the_way():
    rng = random.Random(0)
    for _ in range(300):
        totals = list(accumulate(draw_terms(rng.randint(1, 28), rng)))
        assert min(totals) >= 0
        assert max(totals) <= LARGEST_TOTAL


def test_an_unknown_level_is_refused_by_name():
    with pytest.raises(ValueError, match="not 6"):
        tiny_problem(6, random.Random(0))
