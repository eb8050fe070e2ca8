"""Answers are read from the last box, compared as mathematics, and voted on."""

import os
import resource
import sys
import time
from itertools import combinations
from unittest.mock import Mock

import pytest

from workbench.errors import ConfigError, WorkbenchError
from workbench.search import answers
from workbench.search.answers import (
    PROOF_SECONDS,
    Proofs,
    aggregate,
    extract_answer,
    group_answers,
    pass_at_k,
    same_answer,
    vote,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is \\boxed{42}.", "42"),
        ("\\boxed{1} and then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\left\\{1, 2\\right\\}}", "\\left\\{1, 2\\right\\}"),
        ("\\fbox{7}", "7"),
        ("so \\boxed 9$ then", "9"),
        ("so \\boxed 9 then", "9"),
        ("$\\boxed 3.5$", "3.5"),
        ("\\boxed 9 apples at $3 each", "9"),
        ("It costs $3.\n\nSo $\\boxed 4 + 5$", "4 + 5"),
        ("at \\$3 each: $$\\boxed 4 + 5$$", "4 + 5"),
        ("at $2$ or \\boxed $-.5 x$ each", "-.5 x"),
        ("$\\boxed 5\\$$ or \\$6", "5\\$"),
        ("it is \\boxed 5\\$.", "5\\$"),
        ("$\\boxed (1, 2)$.", "(1, 2)"),
        ("$\\boxed\\frac12$", "\\frac12"),
        ("\\boxed{5 \\\\}", "5 \\\\"),
        ("\\boxed{3} but \\boxed{4 is cut", "3"),
        ("no box, 17", ""),
        ("\\boxed{}", ""),
        ("so \\boxed{5}. That is the \\boxed answer.", "5"),
        ("\\boxed{a}\\boxed $", "a"),
        ("", ""),
    ],
)
def test_the_last_complete_box_is_the_answer(text, answer):
    """A box that was cut off holds no answer; nothing outside a box is one."""
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("reference", "given", "same"),
    [
        ("42", " 42 ", True),
        ("7", "07", True),
        ("7", "+7", True),
        ("7", "-7", False),
        ("$5$", "5", True),
        ("\\frac{1}{2}", "0.5", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})", True),
        ("p - q", "p-q", True),
        ("\\sqrt{2}", "\\sqrt{3}", False),
        ("(x+1)^2 (x-1)^2", "(x-1)^2(x+1)^2", True),
        ("2^{10}", "1024", True),
        ("\\text{June 20}", "June 20", True),
        ("\\text{rat}", "\\text{art}", False),
        ("12", "12.", True),
        ("(1,2)", "(1, 2).", True),
        ("2^{n^2}", "2^{n^{2}}", True),
        ("(n-1)!", "(n - 1)!", True),
        ("", "", False),
        ("5", "", False),
        ("5", "5\\$", True),
        ("\\$5", "5\\$", True),
        ("5\\", "5\\$", False),
        ("2", "2d", False),  # what could be a unit may be a variable
        ("a^2+2ab", "a^2+2", False),
        ("a + b + c", "a + b + d", False),
        ("a + b + c", "c + b + a", True),
        ("10\\text{ AM}", "10\\text{ PM}", False),
        ("864", "864 \\mbox{ inches}^2", True),
        ("12 \\text{ cm}", "12", True),
        ("12 inches", "12", True),
        ("5.4 \\text{ cents}", "5.4", True),
        ("5 km", "5 m", False),
        ("10 kg", "10 g", False),
        ("5", "5\\text{ million}", False),
        ("7", "7\\text{ or more}", False),
    ],
)
def test_answers_are_compared_as_mathematics(reference, given, same):
    """Empty equals nothing, not even itself; equal ones share a group, which a vote counts."""
    assert same_answer(reference, given) is same
    shares = same or reference == given
    assert group_answers([reference, "17", given]) == [0, 1, 0 if shares else 2]


def test_whole_numbers_need_no_extra_and_others_name_it(monkeypatch):
    """The tiny family is searched without math-verify; MATH says what to install."""
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert same_answer("12", "012")
    with pytest.raises(WorkbenchError, match="pip install math-verify"):
        Proofs()("x+1", "1+x+0")


def test_a_group_s_answers_are_all_equal_either_way_round():
    """What math-verify finds equal in one order alone, or of only some of a group, is apart."""
    assert group_answers(["1<x<2", "(1,2)"]) == [0, 1]
    assert group_answers(["50\\%", "50", "0.5"]) == [0, 0, 1]
    assert group_answers(["50", "50\\%", "0.5"]) == [0, 0, 1]


def test_what_takes_for_ever_is_told_apart_in_time_and_the_next_is_compared():
    """Numbers in exponents are what the guard knows; sympy has more ways to compute for ever."""
    proofs = Proofs()
    assert proofs("x+1", "1+x+0")  # its process is there
    began = time.monotonic()
    assert not proofs("7", "\\sum_{k=1}^{100000} \\frac{1}{k}")
    assert time.monotonic() - began < 3 * PROOF_SECONDS
    assert proofs("x+1", "1+x+0")


def test_answers_are_compared_however_many_files_are_open():
    """As in a server of a thousand connections."""
    soft, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"no more than {hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1050)]
    try:
        assert Proofs()("x+1", "1+x+0")
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_proof_that_is_interrupted_spoils_no_other(monkeypatch):
    """Ctrl-C, and then what was answered by then is compared: not by what comes late."""
    proofs = Proofs()
    assert proofs("x+1", "1+x+0")
    with monkeypatch.context() as patch:
        patch.setattr("workbench.search.answers.wait", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            proofs("2x", "3x")
    assert proofs("x+1", "0+x+1")
    proofs._process.kill()
    proofs._process.wait()
    assert proofs("x+1", "x+1+0"), "one that ended is begun anew"


def test_a_pair_that_had_no_time_is_compared_again(monkeypatch):
    """Guards votes and accuracy from one moment in which the machine was busy."""
    proofs = Proofs()
    with monkeypatch.context() as patch:
        patch.setattr(answers, "PROOF_SECONDS", 0)
        assert not proofs("x+1", "1+x+0")
    assert proofs("x+1", "1+x+0")
    with monkeypatch.context() as patch:
        patch.setattr(proofs, "_answer", Mock(side_effect=AssertionError))
        assert proofs("x+1", "1+x+0"), "what was told is kept"


ENDLESS = ["9^" * 200 + "9", "9^{9^{9^9}}", "9^9^9", "2^{1000000000}", "((9^{999})^{999})^{999}"]


@pytest.mark.parametrize("endless", [*ENDLESS, "99999!"])
def test_an_endless_answer_equals_only_itself(endless):
    """A model may write anything in a box; comparing it must not take for ever."""
    assert same_answer(endless, endless)
    assert not same_answer("12", endless)


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("last", 0.5), ("min", 0.25), ("prod", 0.125), ("mean", 7 / 12)]
)
def test_aggregations(aggregation, expected):
    """Four ways from step scores to one number; without a step it is neither yes nor no."""
    assert aggregate((1.0, 0.25, 0.5), aggregation) == pytest.approx(expected)
    assert aggregate((), aggregation) == 0.5


@pytest.mark.parametrize(
    ("voting", "winner"), [("majority", "5"), ("weighted", "7"), ("naive", "9")]
)
def test_votings_differ_where_they_should(voting, winner):
    """Ties go to the first seen, by which a group is named; empty answers never vote."""
    answers = ["9", "7", "7", "5", "5", "5", ""]
    scores = [0.9, 0.7, 0.6, 0.2, 0.2, 0.2, 1.0]
    assert answers[vote(answers, scores, [0, 1, 1, 2, 2, 2, 3], voting)] == winner
    assert vote(["b", "a"], [0.5, 0.5], [0, 1], voting) == 0
    assert vote(["", "a", ""], [0.9, 0.1, 0.9], [0, 1, 0], voting) == 1
    assert vote(["", ""], [0.9, 0.9], [0, 0], voting) is None
    assert vote(["1/2", "3", "0.5"], [0.3, 0.3, 0.3], [0, 1, 0], voting) == 0


@pytest.mark.parametrize(("n", "correct", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (4, 4, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, correct, k):
    """Unbiased: the mean over all subsets of size k; never silently the largest k there is."""
    subsets = list(combinations(range(n), k))
    share = sum(any(member < correct for member in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(n, correct, k) == pytest.approx(share)
    with pytest.raises(ConfigError, match="k is 9, n is 8"):
        pass_at_k(8, 1, 9)
