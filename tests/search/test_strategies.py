"""Beam search and best-of-N: canned replies, then laws whatever a model samples and a PRM says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import ConfigError
from workbench.search.answers import aggregate
from workbench.search.problems import Problem
from workbench.search.strategies import BeamSearch, BestOfN, Generate, Score, Step, split_steps

PROBLEM = Problem("p", "What is 1+1?")


def drive(search, step_of, score_of):
    """Run a search with functions for replies; the outcome and everything it asked."""
    asked, reply = [], None
    try:
        while True:
            request = search.send(reply)
            asked.append(request)
            if isinstance(request, Generate):
                reply = [step_of(beam) for beam in request.beams]
            else:
                reply = [tuple(score_of(beam)) for beam in request.beams]
    except StopIteration as end:
        return end.value, asked


def going(beam):
    return Step((len(beam.path),), f"s{beam.path[-1]}\n\n", "stop")


def flat(beam):
    return [0.5] * len(beam.steps)


def generated(asked):
    return [[beam.path for beam in r.beams] for r in asked if isinstance(r, Generate)]


@pytest.mark.parametrize(
    ("scores", "best"), [((0.1, 0.9, 0.3, 0.8), (1, 3)), ((0.5, 0.5, 0.5, 0.5), (0, 1))]
)
def test_children_cycle_over_survivors_in_index_order(scores, best):
    """The k-th copy of a survivor is its child k, whatever its slot; ties keep the lowest index."""
    search = BeamSearch(n=4, beam_width=2, max_depth=2).search(PROBLEM)
    _, asked = drive(search, going, lambda b: [scores[b.path[0]]] * len(b.steps))
    first, second = best
    children = [(first, 0), (second, 0), (first, 1), (second, 1)]
    assert generated(asked) == [[(0,), (1,), (2,), (3,)], children]


def test_finished_beams_keep_their_places_and_active_ones_are_refilled_to_the_rest():
    """n minus the finished ones are active; a finished beam takes no survivor's place."""

    def step_of(beam):
        finishes = beam.path in {(0,), (3,), (1, 1)}
        return Step((7,), "x", "eos") if finishes else going(beam)

    search = BeamSearch(n=4, beam_width=2, max_depth=3).search(PROBLEM)
    outcome, asked = drive(search, step_of, flat)
    assert generated(asked) == [
        [(0,), (1,), (2,), (3,)],
        [(1, 0), (2, 0)],  # two places left, both survivors have one
        [(1, 0, 0), (2, 0, 0)],
    ]
    assert len(outcome.beams) == 4
    assert sum(beam.finished for beam in outcome.beams) == 2


def test_finish_at_limit_samples_the_last_step_to_the_end():
    """Search and Learn's way: no stop string in the last iteration, and more tokens."""
    search = BeamSearch(n=2, beam_width=1, max_depth=2, finish_at_limit=True, limit_tokens=99)
    _, asked = drive(search.search(PROBLEM), going, flat)
    requests = [request for request in asked if isinstance(request, Generate)]
    assert [(r.stop, r.max_tokens) for r in requests] == [(("\n\n",), None), ((), 99)]


def test_completions_are_split_at_blank_lines():
    """Search and Learn would score an empty last step; ours has 1, 2, 2, 2 steps."""
    assert split_steps("a") == ("a",)
    assert split_steps("a\n\nb") == split_steps("a\n\n\n\nb") == ("a\n\n", "b")
    assert split_steps("a\n\nb\n\n") == ("a\n\n", "b\n\n")
    assert split_steps("") == split_steps(" \n\n ") == ()


def test_best_of_n_asks_once_and_sorts():
    """n samples without a stop string, one scoring pass, best first."""
    texts = {(0,): "a\n\nb", (1,): "c", (2,): ""}
    scores = {(0,): [0.1, 0.4], (1,): [0.8], (2,): []}
    search = BestOfN(n=3, max_tokens=50).search(PROBLEM)
    outcome, asked = drive(
        search, lambda b: Step((1, 2), texts[b.path], "eos"), lambda b: scores[b.path]
    )
    assert [type(request) for request in asked] == [Generate, Score]
    assert (asked[0].stop, asked[0].max_tokens) == ((), 50)
    assert [beam.path for beam in outcome.beams] == [(1,), (2,), (0,)]  # no step counts 0.5


@pytest.mark.parametrize("kind", [BeamSearch, BestOfN])
@pytest.mark.parametrize("wrong", [{"n": 0}, {"aggregation": "lst"}])
def test_impossible_settings_are_refused(kind, wrong):
    """A named error instead of a search that does something else."""
    with pytest.raises(ConfigError, match="allowed"):
        kind(**wrong)


REASONS = ("stop", "stop", "stop", "length", "eos", "context")


@settings(deadline=None)
@given(
    n=st.integers(1, 9),
    beam_width=st.integers(1, 5),
    max_depth=st.integers(1, 5),
    aggregation=st.sampled_from(["last", "min", "prod", "mean"]),
    random=st.randoms(use_true_random=False),
)
def test_laws(n, beam_width, max_depth, aggregation, random):
    """Places, depths, paths and survivors obey the rules at every iteration."""
    strategy = BeamSearch(n, beam_width, max_depth, aggregation=aggregation)
    search, reply = strategy.search(Problem("p", "How?")), None
    seen, ended, previous, depth = set(), 0, [], 0
    try:
        while True:
            request = search.send(reply)
            if isinstance(request, Generate):
                depth += 1
                check_iteration(request.beams, previous, depth, n - ended, strategy, seen)
                reply = [Step((1,), "s\n\n", random.choice(REASONS)) for _ in request.beams]
                continue
            reply = [tuple(random.choice((0.25, 0.5, 1)) for _ in b.steps) for b in request.beams]
            previous = [b.scored(row) for b, row in zip(request.beams, reply)]
            ended += sum(not beam.can_grow for beam in previous)
    except StopIteration as end:
        check_outcome(end.value.beams, strategy, depth)


def check_iteration(beams, previous, depth, places, strategy, seen):
    assert depth <= strategy.max_depth
    assert len(beams) == places
    paths = [beam.path for beam in beams]
    assert len(set(paths)) == len(paths)
    assert not seen & set(paths)
    seen.update(paths)
    assert {len(path) for path in paths} == {depth}
    for path in paths:  # ordinals count up from 0 without a gap
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in seen
    if previous:
        check_survivors({path[:-1] for path in paths}, previous, strategy)


def check_survivors(parents, previous, strategy):
    growing = {
        b.path: aggregate(b.step_scores, strategy.aggregation) for b in previous if b.can_grow
    }
    assert parents <= set(growing)
    assert len(parents) == min(len(growing), max(1, strategy.n // strategy.beam_width))
    pruned = [score for path, score in growing.items() if path not in parents]
    assert all(growing[path] >= score for path in parents for score in pruned)


def check_outcome(beams, strategy, depth):
    assert len(beams) == strategy.n
    keys = [(-aggregate(b.step_scores, strategy.aggregation), b.path) for b in beams]
    assert keys == sorted(keys)
    for beam in beams:
        assert len(beam.steps) == len(beam.step_scores) == len(beam.path) == len(beam.token_ids)
        assert beam.text == "".join(beam.steps)
        assert not beam.can_grow or len(beam.path) == depth == strategy.max_depth
