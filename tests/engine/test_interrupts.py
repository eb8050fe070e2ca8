"""Whatever is raised wherever, in a step or beside it: the engine goes on, and nothing is lost.

A fault is raised at a line of the engine, its scheduler, its cache or its arena, one line after
the other, as an interrupt of the user is: between two of them.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from linecache import getline
from types import FrameType

import pytest

from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.engine.memory import block_shape
from workbench.kvcache.arena import KVArena

FILES = tuple(
    f"workbench/{name}.py"
    for name in (
        *("engine/engine", "engine/scheduler", "engine/static_batch", "engine/executor"),
        *("kvcache/manager", "kvcache/pool", "kvcache/arena", "kvcache/storage"),
    )
)
PROMPTS = [[7, 3, number, *range(2, 22)] for number in (1, 1, 2, 3)]


@contextmanager
def fault_after(lines: int) -> Iterator[list[str]]:
    """KeyboardInterrupt at the line of FILES that comes after so many; where, if it was reached.

    Not at the return of what has ended: there CPython never raises what a signal asks for.
    """
    left, where = count(lines, -1), []

    def at_line(frame: FrameType, event: str, _: object) -> object:
        if event == "line" and not where and next(left) <= 0:
            place = frame.f_code.co_filename, frame.f_lineno
            if getline(*place).strip() != "return outputs":
                where.append("{}:{}".format(*place))
                raise KeyboardInterrupt
        return at_line

    def at_call(frame: FrameType, *_: object) -> object:
        return at_line if frame.f_code.co_filename.endswith(FILES) else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield where
    finally:
        sys.settrace(before)


def finish(engines: list[Engine], faults: tuple[int, ...] = ()) -> tuple[dict, list[str]]:
    """Outputs of all requests by engine and request id; faults: each after so many lines more.

    After a fault another engine goes on first. Returns where those were that were reached, too.
    """
    found, reached, order = {}, [], [*enumerate(engines)]

    def steps() -> None:
        while any(engine.has_work for engine in engines):
            for place, engine in order:
                found.update(((place, output.request_id), output) for output in engine.step())

    for fault in faults:
        with suppress(KeyboardInterrupt), fault_after(fault) as where:
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


def in_arena(model: str, **settings: object) -> list[Engine]:
    """Two engines that take each other's pages."""
    limits = {"block_size": 4, "max_model_len": 40}
    shapes = [block_shape(model, name=name, **limits) for name in ("one", "two")]
    room = sum(shape.block_bytes * shape.floor_blocks for shape in shapes)
    arena = KVArena(room + room // 4, shapes)
    names = [shape.name for shape in shapes]
    return [Engine(model, arena=arena, arena_name=name, **limits, **settings) for name in names]


@pytest.mark.parametrize(
    ("make", "settings", "stride"),
    [
        (alone, {"reuse_partial_blocks": True}, 101),
        (alone, {"batching": "static", "enable_prefix_caching": False, "max_num_seqs": 1}, 101),
        (in_arena, {}, 211),
    ],
)
def test_a_fault_anywhere_in_a_step_loses_nothing(small_model, make, settings, stride) -> None:
    """All requests end as without it, the laws hold, and nothing is left in use."""
    engines = make(small_model, **settings)
    queue(engines)
    expected = told(finish(engines)[0], [0] * len(engines))
    assert len(expected) >= len(PROMPTS) * len(engines)
    for fault in count(3, stride):
        first = [engine._next_id for engine in engines]
        queue(engines)
        found, where = finish(engines, (fault, fault % 89))
        assert told(found, first) == expected, where
        for engine in engines:
            engine.cache.check()
            assert engine.cache.num_active == 0, where
        if len(where) < 2:
            break
