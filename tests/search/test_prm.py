"""The PRM: each step asked once, nothing for white space, what that costs; scores on a grid."""

import math
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core import RequestOutput
from workbench.search.prm import PRM, ProblemScores, ScoreCache, trie_size
from workbench.search.problems import Problem
from workbench.search.strategies import Beam

PROBLEM = Problem("p", "How?", "42")


def beam(*steps, path=(0,)):
    return Beam(path=path, steps=steps)


def answer(scores, requests, cached=0):
    """Play the engine: every asked step gets a score made from its input."""
    for request in requests:
        rows = [(sum(request.token_ids[: p + 1]) % 7 / 7, 0.0) for p in request.positions]
        output = RequestOutput(0, (), "", "score", cached, logits=np.array(rows, np.float32))
        scores.receive(request, output)


@pytest.fixture
def prm(fake_engine):
    return PRM(fake_engine())


@pytest.fixture
def scores(prm):
    return ProblemScores(prm, PROBLEM, ScoreCache())


def test_only_new_steps_are_asked(scores):
    """A grown beam asks one position; its earlier steps are known."""
    answer(scores, scores.requests([beam("a\n\n", "b\n\n")]))
    (request,) = scores.requests([beam("a\n\n", "b\n\n", "c\n\n")])
    assert request.positions == (len(request.token_ids) - 1,)
    answer(scores, [request])
    assert scores.counts.scores_asked == 3
    assert scores.counts.scores_cached == 2
    assert scores.requests([beam("a\n\n", "b\n\n", "c\n\n")]) == []


def test_equal_beams_in_flight_are_asked_once(scores):
    """Siblings that sampled the same text share a request and a score; "x" and "x " do not."""
    beams = [beam("a\n\n", "x\n\n", path=(0, k)) for k in range(3)] + [beam("a\n\n", "x \n\n")]
    requests = scores.requests(beams)
    assert [len(request.asked) for request in requests] == [2, 1]  # "a" is asked by the first alone
    answer(scores, requests)
    replies = scores.replies(beams)
    assert replies[0] == replies[1] == replies[2]
    assert replies[3][0] == replies[0][0]
    assert scores.counts.scores_shared == 5


def test_white_space_takes_its_parents_score(scores):
    """0.5 at the root; no request; the next real step's input does not contain it."""
    blank = beam("\n\n")
    assert scores.requests([blank]) == []
    assert scores.replies([blank]) == [(0.5,)]
    later = [beam("a\n\n", " \n\n", "b\n\n"), beam("a\n\n", "b\n\n")]
    requests = scores.requests(later)
    assert requests[0].token_ids == requests[1].token_ids
    answer(scores, requests)
    with_blank, without = scores.replies(later)
    assert with_blank == (without[0], without[0], without[1])
    judged = [each.scored(scores.replies([each])[0]).step_scores for each in (*later, blank)]
    assert judged == [without, without, ()], "what was not judged enters no minimum or product"


def test_steps_without_room_are_counted(fake_engine):
    """Their scores are their parent's, which nothing else would tell."""
    scores = ProblemScores(PRM(fake_engine(max_model_len=60)), PROBLEM, None)
    long = beam("a\n\n", "b" * 90, "c")
    answer(scores, scores.requests([long]))
    first, *rest = scores.replies([long])[0]
    assert rest == [first, first]
    assert scores.finish().scores_without_room == 2


def test_a_shared_cache_knows_problem_and_prm(prm):
    """Another problem, though of that id, or another PRM finds nothing; the same one finds all."""
    cache = ScoreCache()
    first = ProblemScores(prm, PROBLEM, cache)
    answer(first, first.requests([beam("a\n\n", "b")]))
    assert len(cache) == 2
    again = ProblemScores(prm, PROBLEM, cache)
    assert again.requests([beam("a\n\n", "b")]) == []
    assert again.replies([beam("a\n\n", "b")]) == first.replies([beam("a\n\n", "b")])
    assert again.finish().prm_tokens_distinct == 0 < first.finish().prm_tokens_distinct
    for other in (Problem("q", "How?"), Problem(PROBLEM.id, "Why?")):
        assert len(ProblemScores(prm, other, cache).requests([beam("a\n\n", "b")])) == 1
    prm.fingerprint = "another"
    assert len(ProblemScores(prm, PROBLEM, cache).requests([beam("a\n\n", "b")])) == 1


def test_distinct_tokens_are_the_trie_of_all_inputs(scores):
    """The ideal for computed tokens, which leave out what the prefix cache held."""
    requests = scores.requests([beam("ab\n\n", "c"), beam("ab\n\n", "d"), beam("ax\n\n")])
    answer(scores, requests, cached=4)
    counts, inputs = scores.finish(), [request.token_ids for request in requests]
    assert counts.prm_tokens_asked == sum(map(len, inputs)) == counts.prm_tokens_computed + 4 * 3
    assert counts.prm_tokens_distinct == trie_size(array("i", ids) for ids in inputs)


@given(st.lists(st.lists(st.integers(0, 300), max_size=8), max_size=12))
def test_trie_size_counts_distinct_prefixes(inputs):
    """Against the definition, written out."""
    prefixes = {tuple(ids[: k + 1]) for ids in inputs for k in range(len(ids))}
    assert trie_size(array("i", ids) for ids in inputs) == len(prefixes)


@given(st.floats(-80, 80, width=32), st.floats(-80, 80, width=32))
def test_scores_are_a_softmax_rounded_to_a_grid(good, bad):
    """Whole multiples of 2^-16, within half a unit of the softmax of the two logits."""
    (score,) = PRM.scores([(good, bad)])
    assert list(PRM.scores([(good,)])) == list(PRM.scores([(good, 0.0)]))  # its sigmoid
    top = max(good, bad)
    exact = math.exp(good - top) / (math.exp(good - top) + math.exp(bad - top))
    assert (score * 2**16).is_integer()
    assert abs(score - exact) <= 2**-17 + 1e-12
    assert 0 <= score <= 1
