"""Whatever is raised wherever, in a step or beside it: the engine goes on, and nothing is lost.

A fault is raised at a line of the engine, its scheduler, its cache or its arena, or of a search
over two engines, one line after the other, as an interrupt of the user is: between two of them.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, cycle, islice
from linecache import getline
from operator import attrgetter
from threading import Thread
from types import FrameType
from unittest.mock import Mock

import pytest

from workbench.core import RequestOutput, SamplingParams, StepPlan
from workbench.engine.engine import Engine
from workbench.engine.executor import StepHandle
from workbench.engine.memory import block_shape
from workbench.errors import PromptError, StepError
from workbench.kvcache.arena import KVArena, PageShape
from workbench.kvcache.policies import StaticSplit
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.search import Search
from workbench.search.strategies import BeamSearch

FILES = tuple(
    f"workbench/{name}.py"
    for name in (
        *("engine/engine", "engine/scheduler", "engine/static_batch", "engine/executor"),
        *("kvcache/manager", "kvcache/pool", "kvcache/arena", "kvcache/storage"),
        *("engine/requests", "engine/sampling", "kvcache/policies"),
    )
)
SEARCH = tuple(
    f"workbench/{name}.py"
    for name in ("search/search", "search/rounds", "search/strategies", "search/prm", "trace")
)
ENDED = (
    *("return outputs", "return sequence", "try:", "except BaseException:", "raise"),
    *("self._unwanted += ids", "self._unwanted += [sequence.request_id]"),
)
PROMPTS = [[7, 3, number, *range(2, 22)] for number in (1, 1, 2, 3)]


@contextmanager
def fault_after(*lines: int, files: tuple = FILES, once: bool = False) -> Iterator[list[str]]:
    """KeyboardInterrupt at the line of these files that comes after so many, and again at the one
    that comes after so many more, ...; where, of those that are reached.

    once: a line counts the first time only, and again after a fault.

    Not at the return of what has ended, at `try`, where an exception is caught or goes on, and at
    what is written so that nothing is called: there CPython never raises what a signal asks for.
    """
    left, where, seen = [*lines], list[str](), set[tuple[str, int]]()

    def at_line(frame: FrameType, event: str, _: object) -> object:
        place = frame.f_code.co_filename, frame.f_lineno
        if event != "line" or not left or (once and place in seen):
            return at_line
        seen.add(place)
        left[0] -= 1
        if left[0] < 0 and getline(*place).strip() not in ENDED:
            where.append("{}:{}".format(*place))
            del left[0]
            seen.clear()
            if left:
                sys.setprofile(trace_again)
            raise KeyboardInterrupt
        return at_line

    def at_call(frame: FrameType, *_: object) -> object:
        return at_line if frame.f_code.co_filename.endswith(files) else None

    def trace_again(frame: FrameType | None, *_: object) -> None:
        """Python drops a trace function that raises; this runs at the next call or return."""
        sys.setprofile(None)
        sys.settrace(at_call)
        while frame is not None:
            frame.f_trace = frame.f_trace or at_call(frame)
            frame = frame.f_back

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield where
    finally:
        sys.setprofile(None)
        sys.settrace(before)


def finish(
    engines: list[Engine], faults: tuple[int, ...] = (), *, once: bool = False
) -> tuple[dict, list[str]]:
    """Outputs of all requests by engine and request id; faults: each after so many lines more.

    An arena that keeps a static split is split anew before every step. After a fault another engine
    goes on first. Returns where those were that were reached, too.
    """
    found, reached, order, shares = {}, [], [*enumerate(engines)], cycle((0.6, 0.4, 0.4, 0.6))

    def steps() -> None:
        while any(engine.has_work for engine in engines):
            for place, engine in order:
                memory = engine.cache.pool.memory
                if isinstance(getattr(memory, "policy", None), StaticSplit):
                    memory.resplit(next(shares))
                found.update(((place, output.request_id), output) for output in engine.step())

    for fault in faults:
        with suppress(KeyboardInterrupt), fault_after(fault, once=once) as where:
            steps()
        reached += where
        order.reverse()
    steps()
    return found, reached


def queue(engines: list[Engine]) -> None:
    for engine in engines:
        for number, prompt in enumerate(PROMPTS):
            wanted = number % 2 or None
            engine.add(prompt, SamplingParams(max_tokens=6, seed=number, logprobs=wanted))
        if engine.config.batching == "continuous":
            engine.add_score(PROMPTS[0], [3, 11], [1, 2])


def told(outputs: dict, first: list[int]) -> dict:
    """What a caller reads of them, by engine and place among its requests."""
    return {
        (place, number - first[place]): (
            output.token_ids,
            output.finish_reason,
            output.logprobs,
            None if output.logits is None else output.logits.tolist(),
        )
        for (place, number), output in outputs.items()
    }


def alone(model: str, **settings: object) -> list[Engine]:
    return [Engine(model, num_blocks=14, block_size=4, max_model_len=40, **settings)]


def in_arena(model: str, blocks_a_page: int = 1, **settings: object) -> list[Engine]:
    """Two engines that take each other's pages; of several blocks, re-splits move those in use."""
    limits = {"block_size": 4, "max_model_len": 40}
    shapes = [block_shape(model, name=name, **limits) for name in ("one", "two")]
    room = sum(shape.block_bytes * shape.floor_blocks for shape in shapes)
    page = PageShape(shapes[0].layers, blocks_a_page * shapes[0].cell_bytes)
    policy = None if blocks_a_page == 1 else StaticSplit()
    arena = KVArena(room * 7 // 5, shapes, policy, page=page)
    names = [shape.name for shape in shapes]
    return [Engine(model, arena=arena, arena_name=name, **limits, **settings) for name in names]


PADDED = {"batching": "static", "enable_prefix_caching": False, "max_num_seqs": 1}
KINDS = {
    "partial": (alone, {"reuse_partial_blocks": True}, 101),
    "padded": (alone, PADDED, 101),
    "arena": (in_arena, {}, 211),
    "moves": (in_arena, {"blocks_a_page": 4}, 211),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "once"), [*((kind, False) for kind in KINDS), ("partial", True), ("moves", True)]
)
def test_a_fault_anywhere_in_a_step_loses_nothing(small_model, kind, once) -> None:
    """All requests end as without it, the laws hold, and nothing is left in use.

    At every so many lines that run, and a second one after it; once: at every line, when first run.
    """
    make, settings, stride = KINDS[kind]
    engines = make(small_model, **settings)
    queue(engines)
    expected = told(finish(engines)[0], [0] * len(engines))
    assert len(expected) >= len(PROMPTS) * len(engines)
    moved = [engine.cache.stats.copied for engine in engines]
    assert kind != "moves" or all(moved), "no block in use was moved"
    for fault in count() if once else count(3, stride):
        faults = (fault,) if once else (fault, fault % 89)
        first = [engine._next_id for engine in engines]
        queue(engines)
        found, where = finish(engines, faults, once=once)
        assert told(found, first) == expected, where
        for engine in engines:
            memory = engine.cache.pool.memory
            (memory if isinstance(memory, KVArena) else engine.cache).check()
            assert engine.cache.num_active == 0, where
        if len(where) < len(faults):
            break
    assert fault > 500


# -- calls that queue: whatever is raised in them, what they queued is gone and nothing else is --

PARAMS = SamplingParams(max_tokens=6, seed=5, stop=("\x01\x02",), logprobs=1)


def half_a_stream(engine: Engine) -> list[str]:
    """A consumer that drops a stream half-way."""
    stream = engine.stream(PROMPTS[2], PARAMS)
    pieces = [next(stream), next(stream)]
    stream.close()
    return pieces


CALLS: dict[str, Callable[[Engine], object]] = {
    "generate": lambda engine: [o.token_ids for o in engine.generate(PROMPTS[1:3], PARAMS)],
    "score": lambda engine: engine.score(PROMPTS[0], [3, 11], [1, 2]).logits.tolist(),
    "stream": lambda engine: list(engine.stream(PROMPTS[2], PARAMS)),
    "half a stream": half_a_stream,
}


def started(engine: Engine) -> int:
    """Another caller's request, which runs."""
    number = engine.add(PROMPTS[0], SamplingParams(max_tokens=9, seed=3))
    assert engine.step() == []
    return number


def only(engine: Engine, number: int) -> tuple[int, ...]:
    """The tokens of this request, the only one that is left; nothing is in use after it."""
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [(output.request_id, output.finish_reason) for output in outputs] == [(number, "length")]
    engine.cache.check()
    assert engine.cache.num_active == 0
    return outputs[0].token_ids


TWICE = pytest.mark.parametrize("again", [[], range(13)], ids=["once", "twice"])


@TWICE
@pytest.mark.parametrize("call", CALLS)
def test_a_fault_anywhere_in_a_call_leaves_what_others_queued(small_model, call, again) -> None:
    """And the same call comes to the same afterwards. again: lines to a second fault, in turn."""
    engine, turns = alone(small_model, reuse_partial_blocks=True)[0], cycle(again)
    expected, others = CALLS[call](engine), only(engine, started(engine))
    for fault in count(1, 101 if again else 31):
        number = started(engine)
        with suppress(KeyboardInterrupt), fault_after(fault, *islice(turns, 1)) as where:
            CALLS[call](engine)
        assert only(engine, number) == others, where
        assert CALLS[call](engine) == expected, where
        if not where:
            break
    assert fault > (101 if again else 31), "faults came"


@TWICE
def test_a_request_whose_add_is_cut_short_is_not_queued(small_model, again) -> None:
    """Wherever it is; what runs goes on, and what is queued later is not taken for it."""
    engine, turns = alone(small_model)[0], cycle(again)
    others = only(engine, started(engine))
    for fault in count(1):
        number, added = started(engine), None
        with suppress(KeyboardInterrupt), fault_after(fault, *islice(turns, 1)) as where:
            added = engine.add(PROMPTS[2], PARAMS)
        if added is not None:
            engine.abort(added)
        assert only(engine, number) == others, where
        if not where:
            break
    assert fault > 1, "faults came"


@pytest.mark.parametrize("place", ["submit", "forward"])
@pytest.mark.parametrize("call", ["generate", "score", "stream"])
def test_memory_that_runs_out_is_told_by_the_call(small_model, call, place, monkeypatch) -> None:
    """In the forward pass it ends all requests of the step, beside it none but the call's."""
    engine = alone(small_model)[0]
    expected, others = CALLS[call](engine), only(engine, started(engine))
    number = started(engine)
    where = engine.executor if place == "submit" else engine.executor.model
    with monkeypatch.context() as patch:
        patch.setattr(where, place, Mock(side_effect=MemoryError("no room")))
        with pytest.raises(MemoryError if place == "submit" else StepError, match="no room"):
            CALLS[call](engine)
    if place == "submit":
        assert only(engine, number) == others
    else:
        assert [(o.request_id, o.finish_reason) for o in engine.step()] == [(number, "error")]
        assert not engine.has_work and engine.cache.num_active == 0
    assert CALLS[call](engine) == expected


def test_what_is_refused_leaves_nothing_queued_and_nothing_computed_again(small_model) -> None:
    """The second prompt of a list: the first is gone; what is no token to forget; and what runs
    goes on where it was.
    """
    engine = alone(small_model)[0]
    others = only(engine, started(engine))
    number, steps = started(engine), len(engine.trace.steps)
    for bad in ([10**6], [], [0] * 40):
        with pytest.raises(PromptError):
            engine.generate([PROMPTS[1], bad], PARAMS)
    with pytest.raises(PromptError, match="allowed: whole numbers"):
        engine.forget([[1, "2"]])
    with pytest.raises(PromptError, match="2147483648 is not in the vocabulary"):
        engine.forget([[2**31]])
    assert only(engine, number) == others
    assert engine.trace.steps["prefill_tokens"][steps:].sum() == 0


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "place", ["executor.submit", "scheduler._take_in", "scheduler._account.close",
              "scheduler._account.admit", "_recorder.step"]
)  # fmt: skip
def test_what_is_computed_again_was_admitted_once(small_model, monkeypatch, place, first) -> None:
    """Guards the trace after an interrupt, of the first step too: queue time and look-ups are those
    of the admission.
    """
    engine = alone(small_model)[0]
    number = engine.add(PROMPTS[0], PARAMS) if first else started(engine)
    scored = engine.add_score(PROMPTS[1][:8], [7], [1])
    *path, name = place.split(".")
    with monkeypatch.context() as patch:
        interrupted = Mock(side_effect=KeyboardInterrupt)
        patch.setattr(attrgetter(".".join(path))(engine), name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    found = dict[int, RequestOutput]()
    while engine.has_work:
        found |= {output.request_id: output for output in engine.step()}
    assert {number, scored} <= found.keys()
    row = engine.trace.requests.set_index("request_id").loc[number]
    assert row["arrival_s"] <= row["scheduled_s"] <= row["first_token_s"]
    steps, stats = engine.trace.steps, engine.cache.stats
    assert steps["query_tokens"].sum() == stats.query_tokens == len(PROMPTS[0]) + 8
    assert steps["allocated"].sum() == stats.allocated
    assert steps["score_requests"].sum() == 1


def test_an_interrupt_is_no_preemption(small_model, monkeypatch) -> None:
    """Nothing lacked pages: a policy that learns moves none, and goes on to lend."""
    engine, other = in_arena(small_model)
    number, arena = started(engine), engine.cache.pool.memory
    before = arena.target, [pool.grant.limit for pool in arena.pools]
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "submit", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    only(engine, number)
    assert (arena.target, [pool.grant.limit for pool in arena.pools]) == before
    assert [pool.preemptions for pool in arena.pools] == [0, 0] and not other.has_work


def test_a_stream_ends_where_another_call_took_or_dropped_its_request(small_model) -> None:
    (engine,) = alone(small_model)
    (whole,) = engine.generate([PROMPTS[2]], PARAMS)
    stream = engine.stream(PROMPTS[2], PARAMS)
    begun, taken = next(stream), []
    while engine.has_work:
        taken += engine.step()
    assert begun + "".join(stream) == taken[0].text == whole.text
    stream = engine.stream(PROMPTS[2], PARAMS)
    begun = next(stream)
    engine.abort(taken[0].request_id + 1)
    assert whole.text.startswith(begun + "".join(stream)) and not engine.has_work


@pytest.mark.parametrize("make", [alone, in_arena])
def test_a_stream_that_garbage_collection_closes_in_a_step(small_model, make, monkeypatch) -> None:
    """It is in a cycle, and the collector runs whenever it likes: its request is dropped later."""
    engines = make(small_model)
    first, last = engines[0], engines[-1]
    others = only(last, started(last))
    number, plan, gone = started(last), last.scheduler.schedule, []
    cycle: list[object] = [first.stream(PROMPTS[2], PARAMS)]
    cycle.append(cycle)
    next(cycle[0])

    def schedule() -> object:
        gone.append(gc.collect())
        return plan()

    monkeypatch.setattr(last.scheduler, "schedule", schedule)
    gc.disable()
    try:
        del cycle
        assert only(last, number) == others
    finally:
        gc.enable()
    assert gone[0] and not first.has_work
    assert first.cache.num_active == 0
    first.cache.check()


# -- searches: whatever is raised in a round, both engines are as they were before it --


def searched(llm: Engine, prm: Engine) -> Search:
    strategy, problems = BeamSearch(n=2, beam_width=2, max_depth=2), load_problems("tiny", limit=1)
    return Search(problems, llm=llm, prm=PRM(prm), strategy=strategy, max_step_tokens=6)


def recorders(engines: list[Engine]) -> list[tuple[object, str]]:
    return [(engine._recorder, engine._trace_name) for engine in engines]


@pytest.fixture(scope="module")
def shared() -> list[Engine]:
    """The two models' engines over one arena."""
    names, limits = ("tiny-solver", "tiny-prm"), {"max_model_len": 384}
    shapes = [block_shape(name, **limits) for name in names]
    arena = KVArena(2 * sum(shape.block_bytes * shape.floor_blocks for shape in shapes), shapes)
    return [Engine(name, arena=arena, **limits) for name in names]


ALL = (*SEARCH, *FILES, "/contextlib.py")


@pytest.mark.parametrize(
    ("faults", "files", "once"),
    [
        (lambda k: (k,), SEARCH, True),
        (lambda k: (5 + 29 * k, 37 * k % 61), ALL, True),
        (lambda k: (5 + 1499 * k, 37 * k % 401), ALL, False),
    ],
    ids=["one, once a line", "two, once a line", "two"],
)
def test_faults_in_a_search_leave_nothing_in_its_engines(shared, faults, files, once) -> None:
    """One at any line, or two in a row, the second mostly while the first is seen to: nothing waits
    or is in use, the laws hold, engines record to what they did, the same search comes to the same.
    """
    own, both = recorders(shared), 0
    expected = searched(*shared).play().tree["token_ids"].tolist()
    for number in count():
        lines = faults(number)
        with suppress(KeyboardInterrupt), fault_after(*lines, files=files, once=once) as where:
            searched(*shared).play()
        assert recorders(shared) == own, where
        for engine in shared:
            assert not engine.has_work and engine.cache.num_active == 0, where
        shared[0].cache.pool.memory.check()
        if not where:
            break
        both += len(where) == 2
        if number % 8 == 0:
            assert searched(*shared).play().tree["token_ids"].tolist() == expected, where
    assert both > number / 2 if files == ALL else number > 200


def test_another_thread_asks_for_work_and_changes_nothing(small_model, monkeypatch) -> None:
    """`has_work` in the middle of a step, from elsewhere, neither repairs it nor is wrong."""
    engine = alone(small_model)[0]
    want = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=9, seed=3))[0].token_ids
    number, submit, told = started(engine), engine.executor.submit, list[bool]()

    def asked(plan: StepPlan) -> StepHandle:
        asker = Thread(target=lambda: told.append(engine.has_work))
        asker.start()
        asker.join()
        return submit(plan)

    monkeypatch.setattr(engine.executor, "submit", asked)
    assert only(engine, number) == want
    assert all(told) and len(told) == 8
