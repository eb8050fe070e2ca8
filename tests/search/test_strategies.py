"""Beam search over canned replies; places and survivors: test_variants.py."""

from workbench.search.problems import Problem
from workbench.search.strategies import BeamSearch, Generate, Step, split_steps

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


def generated(asked):
    return [[beam.path for beam in r.beams] for r in asked if isinstance(r, Generate)]


def test_finish_at_limit_samples_the_last_step_to_the_end():
    """Search and Learn's way: no stop string in the last iteration, and more tokens."""
    search = BeamSearch(n=2, beam_width=1, max_depth=2, finish_at_limit=True, limit_tokens=99)
    step = Step((1,), "s\n\n", "stop")
    _, asked = drive(search.search(PROBLEM), lambda _: step, lambda beam: [0.5] * len(beam.steps))
    requests = [request for request in asked if isinstance(request, Generate)]
    assert [(r.stop, r.max_tokens) for r in requests] == [(("\n\n",), None), ((), 99)]


def test_completions_are_split_at_blank_lines():
    """Search and Learn would score an empty last step; ours has 1, 2, 2, 2 steps."""
    assert split_steps("a") == ("a",)
    assert split_steps("a\n\nb") == split_steps("a\n\n\n\nb") == ("a\n\n", "b")
    assert split_steps("a\n\nb\n\n") == ("a\n\n", "b\n\n")
    assert split_steps("") == split_steps(" \n\n ") == ()
