"""Answers are read from the last box and compared as mathematics."""

import sys

import pytest

from workbench.errors import WorkbenchError
from workbench.search.answers import extract_answer, group_answers, same_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is \\boxed{42}.", "42"),
        ("\\boxed{1} and then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\left\\{1, 2\\right\\}}", "\\left\\{1, 2\\right\\}"),
        ("\\fbox{7}", "7"),
        ("so \\boxed 9$ then", "9"),
        ("\\boxed{3} but \\boxed{4 is cut", "3"),
        ("no box, 17", ""),
        ("\\boxed{}", ""),
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
        ("", "", False),
        ("5", "", False),
    ],
)
def test_answers_are_compared_as_mathematics(reference, given, same):
    """Empty equals nothing, not even itself."""
    assert same_answer(reference, given) is same


def test_equal_answers_share_a_group():
    """What a vote counts together."""
    assert group_answers(["1/2", "3", "0.5", "03", ""]) == [0, 1, 0, 1, 2]


def test_whole_numbers_need_no_extra_and_others_name_it(monkeypatch):
    """The tiny family is searched without math-verify; MATH says what to install."""
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert same_answer("12", "012")
    with pytest.raises(WorkbenchError, match=r"workbench\[search\]"):
        same_answer("x+1", "1+x+0")


@pytest.mark.parametrize(
    "endless",
    [
        "9^" * 200 + "9",
        "9^{9^{9^9}}",
        "9^9^9",
        "2^{1000000000}",
        "((9^{999})^{999})^{999}",
        "99999!",
    ],
)
def test_an_endless_answer_equals_only_itself(endless):
    """A model may write anything in a box; comparing it must not take for ever."""
    assert same_answer(endless, endless)
    assert not same_answer("12", endless)


def test_ordinary_powers_are_compared():
    """The guard against towers leaves what problems ask for alone."""
    assert same_answer("(x+1)^2 (x-1)^2", "(x-1)^2(x+1)^2")
    assert same_answer("2^{10}", "1024")
