"""Aggregation, votes and pass@k by their formulas."""

from itertools import combinations

import pytest

from workbench.errors import ConfigError
from workbench.search.answers import aggregate, pass_at_k, vote


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("last", 0.5), ("min", 0.25), ("prod", 0.125), ("mean", 7 / 12)]
)
def test_aggregations(aggregation, expected):
    """Four ways from step scores to one number."""
    assert aggregate((1.0, 0.25, 0.5), aggregation) == pytest.approx(expected)


def test_no_step_aggregates_to_a_half():
    """A PRM that has seen nothing says neither yes nor no."""
    assert aggregate((), "prod") == 0.5


@pytest.mark.parametrize(
    ("voting", "winner"), [("majority", "5"), ("weighted", "7"), ("naive", "9")]
)
def test_votings_differ_where_they_should(voting, winner):
    """Most votes, largest sum, best single score; each from the same beams."""
    answers = ["9", "7", "7", "5", "5", "5", ""]
    scores = [0.9, 0.7, 0.6, 0.2, 0.2, 0.2, 1.0]
    assert vote(answers, scores, [0, 1, 1, 2, 2, 2, 3], voting) == winner


@pytest.mark.parametrize("voting", ["majority", "weighted", "naive"])
def test_ties_go_to_the_first_seen_and_empty_answers_never_vote(voting):
    """Beams come best first, so the first seen is the better one."""
    assert vote(["b", "a"], [0.5, 0.5], [0, 1], voting) == "b"
    assert vote(["", "a", ""], [0.9, 0.1, 0.9], [0, 1, 0], voting) == "a"
    assert vote(["", ""], [0.9, 0.9], [0, 0], voting) == ""


def test_a_group_is_named_by_its_first_member():
    """Equal answers in two spellings count together and keep the first spelling."""
    assert vote(["1/2", "3", "0.5"], [0.3, 0.5, 0.3], [0, 1, 0], "weighted") == "1/2"


@pytest.mark.parametrize(("n", "correct", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (4, 4, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, correct, k):
    """Unbiased: the mean over all subsets of size k."""
    subsets = list(combinations(range(n), k))
    share = sum(any(member < correct for member in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(n, correct, k) == pytest.approx(share)


def test_pass_at_more_than_n_is_refused():
    """Never silently the largest k there is."""
    with pytest.raises(ConfigError, match="k is 9, n is 8"):
        pass_at_k(8, 1, 9)
