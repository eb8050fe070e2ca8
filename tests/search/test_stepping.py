"""A search played round by round: the same result, and seconds of its own."""

import random
import time
from itertools import count

import pytest

from tests.search.conftest import tree
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.errors import ConfigError, WorkbenchError
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.search import Search, run_search
from workbench.search.strategies import BeamSearch
from workbench.trace import Recorder

STRATEGY = BeamSearch(n=4, beam_width=2, max_depth=4)
LIMITS = {"num_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 384}


@pytest.fixture
def given(fake_engine):
    """What a search over fresh fake engines is given."""
    return lambda: {
        "llm": fake_engine(traced=True),
        "prm": PRM(fake_engine(traced=True)),
        "strategy": STRATEGY,
        "min_problem_batch": 2,
    }


@pytest.mark.parametrize("shared", [False, True])
def test_two_searches_in_turn_are_each_as_if_alone(given, shared):
    """Same nodes, and neither counts the other's seconds; they may share their engines."""
    problems = load_problems("tiny", limit=5)
    alone, engines = run_search(problems, **given()), given()
    first, second = (Search(problems, **(engines if shared else given())) for _ in range(2))
    more = True
    while more:
        more = first.round()
        time.sleep(0.05)
        assert not engines["llm"].has_work and not engines["prm"].engine.has_work
        assert second.round() == more
    for search in (first, second):
        found = search.result()
        assert tree(found) == tree(alone)
        assert len(found.trace.steps) == len(alone.trace.steps)
        assert search.progress.round > 2
        assert found.throughput.wall_s < 0.05 * search.progress.round
        spans = found.trace.spans
        assert (spans["start_s"] + spans["duration_s"]).max() < 0.05 * search.progress.round


def test_a_search_s_trace_is_whole_and_its_engines_go_on_with_their_own(given, monkeypatch):
    """What engines do between and after its rounds is no part of it, nor is it lost."""
    monkeypatch.setattr("workbench.engine.engine.MOST_ROWS", 4)  # fewer than its search has steps
    llm = Engine("tiny-solver", **LIMITS)
    found = given() | {"llm": llm, "prm": PRM(Engine("tiny-prm", **LIMITS))}
    search = Search(load_problems("tiny", limit=2), **found)
    assert search.round()
    llm.score([1, 2, 3], [2], [0])
    assert (len(llm.trace.steps), len(llm.trace.requests)) == (1, 1)
    trace = search.play().trace
    assert not any(trace.dropped.values())
    steps = trace.steps[trace.steps["engine"] == "llm"]["step"]
    assert len(steps) > 8 and set(range(steps.max())) - set(steps) == {llm.trace.steps["step"][0]}
    for _ in range(12):
        llm.score([1, 2, 3], [2], [0])
    own = llm.trace
    assert own.dropped["steps"] > 0 and len(own.steps) + own.dropped["steps"] == 13


def test_a_result_needs_all_rounds(given):
    """Before the end, and after a stop, there is none; progress is told at any time."""

    def stop(progress):
        if progress.round == 2:
            raise RuntimeError("enough")

    search = Search(load_problems("tiny", limit=3), on_round=stop, **given())
    now = search.progress
    assert (now.round, now.problems, now.answered, now.tokens, now.seconds) == (0, 3, 0, 0, 0.0)
    assert search.round()
    assert search.progress.seconds > 0
    with pytest.raises(ConfigError, match="0 of 3 problems are answered"):
        search.result()
    with pytest.raises(RuntimeError, match="enough"):
        search.round()
    assert not search.round()
    with pytest.raises(ConfigError, match="call round"):
        search.result()


def test_engines_record_to_their_own_whichever_searches_interrupts_left_in_them(given, monkeypatch):
    """A round may end without setting its engines back, and their own may change in between."""
    engines, dice, own = given(), random.Random(0), (None, "")
    llm, prm = engines["llm"], engines["prm"].engine
    searches = [Search(load_problems("tiny", limit=1), **engines) for _ in range(3)]
    give, calls = llm.trace_as, count()

    def interrupted(*to):
        if next(calls):  # the first one takes the engine
            raise KeyboardInterrupt
        return give(*to)

    for _ in range(400):
        search, what = dice.choice(searches), dice.choice(("round", "left", "left", "own"))
        if what == "own":
            own = Recorder(), "own"
            llm.trace_as(*own)
        elif what == "left":
            calls = count()
            with monkeypatch.context() as patch:
                patch.setattr(llm, "trace_as", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    search.round()
            assert llm.recorder is not own[0]
        else:
            search.round()
            assert (llm.recorder, llm.trace_name) == own
            assert (prm.recorder, prm.trace_name) == (None, "")


def test_a_recording_that_cannot_be_written_leaves_the_answers(given, tmp_path):
    """As on a full disk: the note says which of the two is lost."""

    where = tmp_path / "there" / "search.parquet"

    def stop(progress):
        if progress.answered:
            where.parent.touch()  # no folder
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run_search(load_problems("tiny", limit=4), on_round=stop, record=where, **given())
    (note,) = caught.value.__notes__
    assert len(caught.value.result.problems) and "see .result" in note
    assert "no recording is written: " in note


@pytest.mark.parametrize("what", ["interrupt", "on_round", "engine", "none answered"])
def test_what_ends_a_search_has_the_problems_answered_before(given, what):
    """Each as the whole search has it, its trace too; the engines go on as if nothing had been."""
    problems, answered = load_problems("tiny", limit=4), 0 if what == "none answered" else 2
    whole, engines = run_search(problems, **given()), given()
    llm = engines["llm"]

    def stop(progress):
        if progress.answered >= answered and what != "engine":
            raise KeyboardInterrupt if what == "interrupt" else RuntimeError("enough")
        if progress.answered >= answered:
            llm.fail_on = len(llm.asked)

    with pytest.raises((KeyboardInterrupt, RuntimeError, MemoryError)) as caught:
        run_search(problems, on_round=stop, **engines)
    found, (note,) = caught.value.result, caught.value.__notes__
    kept = [] if found is None else list(found.problems["problem_id"])
    assert note.startswith(f"{len(kept)} of 4 problems were answered")
    assert bool(kept) == bool(answered) and len(kept) < 4
    if kept:
        assert "sys.last_value.result" in note and found.throughput.problems == len(kept)
        for name in ("problems", "candidates", "tree"):
            mine, other = getattr(found, name), getattr(whole, name)
            other = other[other["problem_id"].isin(kept)].reset_index(drop=True)
            varying = [c for c in mine if c in ("run_id", "seconds")]
            assert mine.drop(columns=varying).equals(other.drop(columns=varying)), name
        assert len(found.trace.nodes) == len(found.tree) and len(found.trace.steps)
    llm.fail_on = None
    assert tree(run_search(problems, **engines)) == tree(whole)


def test_answers_that_cannot_be_compared_hide_no_error_and_lose_no_search(given):
    """Guards a search that is over against a missing package: what it found can be read later."""
    problems, able = load_problems("tiny", limit=3), []

    def same(one, other):
        if not able:
            raise WorkbenchError("comparing needs a package")
        return one == other

    search = Search(problems, same=same, **given())
    with pytest.raises(WorkbenchError, match="needs a package") as caught:
        search.play()
    (note,) = caught.value.__notes__
    assert caught.value.result is None and "3 of 3" in note and "needs a package" in note
    able.append(True)
    assert len(caught.value.search.result().problems) == 3

    def stop(progress):
        if progress.answered:
            raise RuntimeError("the network is gone")

    able.clear()
    with pytest.raises(RuntimeError, match="the network is gone"):
        Search(problems, same=same, on_round=stop, **given()).play()


def test_requests_of_others_are_refused_and_not_lost(given):
    """A search steps its engines to their end, so an output of another would come to nobody."""
    engines = given()
    llm = engines["llm"] = Engine("tiny-solver", **LIMITS)
    asked = llm.add("3+4=", SamplingParams(max_tokens=2))
    with pytest.raises(ConfigError, match=r"none of this search's.*or abort"):
        run_search(load_problems("tiny", limit=1), **engines)
    outputs = []
    while llm.has_work:
        outputs += llm.step()
    assert [output.request_id for output in outputs] == [asked]
    assert run_search(load_problems("tiny", limit=1), **engines).answers


def test_a_partial_result_is_there_while_the_search_goes_on(given):
    """Asked for between rounds it changes nothing of what comes."""
    problems, search = load_problems("tiny", limit=4), None
    whole = tree(run_search(problems, **given()))
    search, sizes = Search(problems, **given()), set()
    with pytest.raises(ConfigError, match="0 of 4 problems"):
        search.result(partial=True)
    while search.round():
        if search.progress.answered:
            sizes.add(len(search.result(partial=True).problems))
    assert min(sizes) < 4 and tree(search.result()) == whole
