"""Laws of beam search, whatever a model samples and a PRM says."""

from hypothesis import given
from hypothesis import strategies as st

from workbench.search.answers import aggregate
from workbench.search.problems import Problem
from workbench.search.requests import Generate, Step
from workbench.search.strategies import BeamSearch

REASONS = ("stop", "stop", "stop", "length", "eos", "context")


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
        assert len(beam.steps) == len(beam.step_scores) == len(beam.path)
        assert not beam.can_grow or len(beam.path) == depth == strategy.max_depth
