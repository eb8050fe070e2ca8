"""Two groups on two engines at once: the same searches, the same order, and a clean end."""

import threading
from types import SimpleNamespace

import pytest

from tests.search.stepping_engine import SteppingEngine
from workbench.errors import ConfigError
from workbench.search import lanes
from workbench.search.beam import BeamSearch
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.runner import run_search

STRATEGY = BeamSearch(n=4, beam_width=2, max_depth=4)


@pytest.fixture
def search():
    """A search over fresh engines that step; the result and both engines."""

    def run(limit=5, llm=None, prm=None, **settings):
        llm, prm = llm or SteppingEngine(), prm or SteppingEngine()
        settings = {"overlap": True, "min_problem_batch": 3} | settings
        problems = load_problems("tiny", limit=limit)
        result = run_search(problems, llm=llm, prm=PRM(prm), strategy=STRATEGY, **settings)
        return result, llm, prm

    return run


def tree(result):
    columns = ["problem_id", "node_id", "token_ids", "score", "kept", "finished"]
    return result.tree[columns].sort_values(["problem_id", "node_id"]).to_dict("records")


def test_a_cpu_with_few_threads_is_not_overlapped(search, monkeypatch):
    """There it would lose; the same tree, and one thread."""
    monkeypatch.setattr(lanes, "FEWEST_THREADS", 4)
    engines = Meeting(), Meeting()
    for engine in engines:
        engine.executor = SimpleNamespace(num_threads=2, share=lambda parts: None)
    found, llm, prm = search(llm=engines[0], prm=engines[1])
    assert llm.threads == prm.threads == {threading.current_thread().name}
    assert tree(found) == tree(search(overlap=False)[0])


@pytest.mark.parametrize(
    ("limit", "switches"),
    [
        (5, {}),
        (1, {}),
        (5, {"min_problem_batch": 8}),
        (5, {"problem_batching": "static"}),
        (5, {"speculative_extension": True, "lookahead_scoring": True, "request_order": "prefix"}),
    ],
)
def test_the_tree_is_the_plain_one(search, limit, switches):
    """Whatever else is switched on, and with nothing to overlap with."""
    plain, *_ = search(limit, overlap=False)
    found, llm, prm = search(limit, **switches)
    assert tree(found) == tree(plain)
    assert found.answers == plain.answers
    for engine in (llm, prm):
        assert not engine.has_work
        assert engine.cache.num_active == 0


class Meeting(SteppingEngine):
    """An engine that notes in which thread it steps, and waits in a step for the other engine."""

    def __init__(self) -> None:
        super().__init__()
        self.met: threading.Event = threading.Event()
        self.other: Meeting | None = None
        self.threads = set()

    def step(self):
        self.threads.add(threading.current_thread().name)
        self.met.set()
        if self.other is not None and self.other.has_work:
            assert self.other.met.wait(20)
        return super().step()


def test_both_engines_are_in_a_step_at_the_same_time(search):
    """Each waits inside a step until the other is in one too: alone, none would go on."""
    llm, prm = Meeting(), Meeting()
    llm.other, prm.other = prm, llm
    search(llm=llm, prm=prm)
    assert llm.threads == {threading.current_thread().name}
    assert len(prm.threads) == 1
    assert llm.threads.isdisjoint(prm.threads)


def test_problems_in_flight_are_those_of_both_groups(search):
    """Never more than the minimum batch together; a group of one place has one problem."""
    seen = []
    search(on_round=seen.append)
    assert max(progress.in_flight for progress in seen) == 3
    assert seen[-1].answered == 5


def test_events_come_in_the_same_order_every_time(search):
    """Steps and requests of both engines, as the trace has them, whatever the threads did."""
    (first, *_), (second, *_) = search(), search()
    for name in ("steps", "requests"):
        one, two = (getattr(result.trace, name) for result in (first, second))
        kept = [column for column in one if not column.endswith("_s") and column != "run_id"]
        assert one[kept].equals(two[kept])
    assert list(first.trace.steps["engine"].unique()) == ["llm", "prm"]


def test_each_lane_adds_up_to_the_wall_time(search):
    """Steps of an engine and spans of its lane, waiting for the other one included."""
    result, *_ = search()
    steps, spans = result.trace.steps, result.trace.spans
    assert set(spans["lane"]) == {"llm", "prm"}
    assert "waiting" in set(spans["kind"])
    begin, end = spans["start_s"].min(), (spans["start_s"] + spans["duration_s"]).max()
    for lane in ("llm", "prm"):
        inside = steps.loc[steps["engine"] == lane, "duration_s"].sum()
        outside = spans.loc[spans["lane"] == lane, "duration_s"].sum()
        assert inside + outside == pytest.approx(end - begin, rel=0.02)


@pytest.mark.parametrize("failing", ["llm", "prm"])
def test_an_error_in_either_lane_ends_both(search, failing):
    """It is raised as it is; no request is left, and both engines write into one trace again."""
    engines = {"llm": SteppingEngine(), "prm": SteppingEngine()}
    steps, plain = [], engines[failing].step

    def fail():
        steps.append(len(steps))
        if len(steps) == 4:
            raise KeyboardInterrupt
        return plain()

    engines[failing].step = fail
    with pytest.raises(KeyboardInterrupt):
        search(**engines)
    for engine in engines.values():
        assert not engine.has_work
        assert engine.cache.num_active == 0
    assert engines["llm"].recorder is engines["prm"].recorder
    engines[failing].step = plain
    assert tree(search(**engines)[0]) == tree(search(overlap=False)[0])


def test_what_on_round_raises_ends_the_search(search):
    """Between rounds no thread runs; nothing stays behind."""
    llm, prm = SteppingEngine(), SteppingEngine()

    def stop(progress):
        if progress.round == 3:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        search(llm=llm, prm=prm, on_round=stop, speculative_extension=True)
    assert not llm.has_work
    assert not prm.has_work


def test_one_problem_at_a_time_cannot_overlap(search):
    """A switch that could do nothing is refused by name."""
    with pytest.raises(ConfigError, match=r"overlap.*min_problem_batch=1"):
        search(min_problem_batch=1)
