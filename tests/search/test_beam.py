"""Beam search and best-of-N driven by hand: canned replies, no engine, no tokenizer."""

from itertools import count

import pytest

from workbench.errors import ConfigError
from workbench.search.problems import Problem
from workbench.search.requests import Beam, Generate, Score, Step
from workbench.search.rounds import shuffle_scores
from workbench.search.strategies import BeamSearch, BestOfN, best, refill, split_steps

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


def test_children_cycle_over_survivors_in_index_order():
    """Survivors keep their order; the k-th copy of one is its child k, whatever its slot."""
    scores = {(0,): 0.1, (1,): 0.9, (2,): 0.3, (3,): 0.8}
    search = BeamSearch(n=4, beam_width=2, max_depth=2).search(PROBLEM)
    _, asked = drive(search, going, lambda b: [scores[b.path[:1]]] * len(b.steps))
    assert generated(asked) == [[(0,), (1,), (2,), (3,)], [(1, 0), (3, 0), (1, 1), (3, 1)]]


def test_ties_keep_the_lowest_index():
    """Equal scores must not depend on sorting accidents."""
    _, asked = drive(BeamSearch(n=4, beam_width=2, max_depth=2).search(PROBLEM), going, flat)
    assert generated(asked)[1] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_best_and_refill_are_plain_functions():
    """The two rules of an iteration, apart."""
    beams = [Beam((k,), step_scores=(s,)) for k, s in enumerate((0.2, 0.7, 0.7, 0.1))]
    assert [b.path for b in best(beams, 1, "last")] == [(1,)]
    assert [b.path for b in best(beams, 3, "last")] == [(0,), (1,), (2,)]
    assert [b.path for b in refill(beams[:2], 3)] == [(0, 0), (1, 0), (0, 1)]


def test_n_below_beam_width_keeps_one_survivor():
    """max(1, n // beam_width): a search never dies out."""
    assert BeamSearch(n=4, beam_width=8).num_survivors == 1
    _, asked = drive(BeamSearch(n=3, beam_width=8, max_depth=2).search(PROBLEM), going, flat)
    assert generated(asked)[1] == [(0, 0), (0, 1), (0, 2)]


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


def test_nothing_is_scheduled_once_n_are_finished():
    """The last Score is the last thing asked."""
    outcome, asked = drive(
        BeamSearch(n=3).search(PROBLEM), lambda b: Step((1,), "done", "eos"), flat
    )
    assert len(asked) == 2
    assert isinstance(asked[-1], Score)
    assert all(beam.finished for beam in outcome.beams)


def test_depth_limit_leaves_beams_unfinished():
    """The text so far is returned, marked unfinished; no step beyond max_depth is asked."""
    outcome, asked = drive(BeamSearch(n=4, max_depth=3).search(PROBLEM), going, flat)
    assert [len(paths[0]) for paths in generated(asked)] == [1, 2, 3]
    assert not any(beam.finished for beam in outcome.beams)
    assert {len(beam.steps) for beam in outcome.beams} == {3}
    assert {request.stop for request in asked if isinstance(request, Generate)} == {("\n\n",)}


def test_finish_at_limit_samples_the_last_step_to_the_end():
    """Search and Learn's way: no stop string in the last iteration, and more tokens."""
    search = BeamSearch(n=2, beam_width=1, max_depth=2, finish_at_limit=True, limit_tokens=99)
    _, asked = drive(search.search(PROBLEM), going, flat)
    requests = [request for request in asked if isinstance(request, Generate)]
    assert [(r.stop, r.max_tokens) for r in requests] == [(("\n\n",), None), ((), 99)]


def test_outcome_is_best_first_with_ties_by_path():
    """Votes read beams in this order: ties go to the first seen."""
    scores = {(0,): 0.5, (1,): 0.9, (2,): 0.5}
    search = BeamSearch(n=3).search(PROBLEM)
    outcome, _ = drive(search, lambda b: Step((1,), "a", "eos"), lambda b: [scores[b.path]])
    assert [beam.path for beam in outcome.beams] == [(1,), (0,), (2,)]


def test_a_beam_without_room_ends_unfinished_and_keeps_its_place():
    """ "context": either model is full; the beam is neither extended nor dropped."""

    def step_of(beam):
        return Step((7,), "cut", "context") if beam.path == (1,) else going(beam)

    outcome, asked = drive(BeamSearch(n=4, max_depth=2).search(PROBLEM), step_of, flat)
    assert len(generated(asked)[1]) == 3
    cut = next(beam for beam in outcome.beams if beam.path == (1,))
    assert (cut.finished, cut.ended) == (False, "context")


def test_a_step_cut_by_its_length_goes_on():
    """max_step_tokens ends a step, not a beam."""
    search = BeamSearch(n=2, max_depth=2).search(PROBLEM)
    outcome, _ = drive(search, lambda b: Step((1,), "no end yet", "length"), flat)
    assert {beam.text for beam in outcome.beams} == {"no end yetno end yet"}


def test_beams_hold_what_was_sampled():
    """token_ids, text and steps grow together; scores arrive one a step."""
    numbers = count()
    search = BeamSearch(n=1, beam_width=1, max_depth=3).search(PROBLEM)
    outcome, _ = drive(
        search, lambda b: Step((next(numbers), 9), f"t{len(b.path)}\n\n", "stop"), flat
    )
    (beam,) = outcome.beams
    assert beam.token_ids == (0, 9, 1, 9, 2, 9)
    assert beam.steps == ("t1\n\n", "t2\n\n", "t3\n\n")
    assert beam.text == "".join(beam.steps)
    assert len(beam.step_scores) == 3


def test_aggregation_decides_who_survives():
    """ "min" remembers a bad step that "last" forgets."""
    scores = {(0,): [0.2, 0.9], (1,): [0.6, 0.7], (2,): [0.1, 0.1], (3,): [0.1, 0.1]}

    beams = [Beam(path, step_scores=tuple(row)) for path, row in scores.items()]
    assert [best(beams, 1, name)[0].path for name in ("last", "min")] == [(0,), (1,)]
    for name, path in (("last", (0, 0)), ("min", (1, 0))):
        search = BeamSearch(n=4, beam_width=4, max_depth=3, aggregation=name).search(PROBLEM)
        next(search)
        search.send([Step((1,), "a\n\n", "stop")] * 4)
        request = search.send([scores[(k,)] for k in range(4)])
        assert request.beams[0].path == path


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a", ("a",)),
        ("a\n\nb", ("a\n\n", "b")),
        ("a\n\nb\n\n", ("a\n\n", "b\n\n")),
        ("a\n\n\n\nb", ("a\n\n", "b")),
        ("", ()),
        (" \n\n ", ()),
    ],
)
def test_completions_are_split_at_blank_lines(text, pieces):
    """Search and Learn would score an empty last step; ours has 1, 2, 2, 2 steps."""
    assert split_steps(text) == pieces


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


def test_shuffled_scores_are_the_same_scores_in_a_seeded_order():
    """The control changes who gets a score, never the scores; equal seeds shuffle alike."""
    ladder = {(k,): [k / 10] for k in range(6)}

    def scores_given(seed):
        search = shuffle_scores(BeamSearch(n=6, max_depth=1).search(PROBLEM), seed, "p")
        outcome, _ = drive(search, going, lambda b: ladder[b.path])
        return {beam.path: beam.step_scores for beam in outcome.beams}

    assert sorted(scores_given(1).values()) == sorted(map(tuple, ladder.values()))
    assert scores_given(1) == scores_given(1)
    assert len({str(sorted(scores_given(seed).items())) for seed in range(5)}) > 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: BeamSearch(n=0),
        lambda: BeamSearch(max_depth=0),
        lambda: BeamSearch(aggregation="lst"),
        lambda: BestOfN(n=0),
        lambda: BestOfN(aggregation="first"),
    ],
)
def test_impossible_settings_are_refused(make):
    """A named error instead of a search that does something else."""
    with pytest.raises(ConfigError, match="allowed"):
        make()
