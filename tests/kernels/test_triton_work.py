"""The lists that attention is launched over: every row and position once, shared spans shared."""

from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")
pytest.importorskip("hypothesis", reason="hypothesis is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.synthetic import context_of
from workbench.kernels.triton.attention import Shape, Tiles
from workbench.kernels.triton.graphs import DecodeLists, StepWork, padded, plan_work, shared_spans

TILES = Tiles(queries=16, tile=16, span=16)
BLOCK = 8


def covered(work: StepWork, group: int) -> dict[tuple[int, int], int]:
    """How often each (row, position) is worked on, by key-value head."""
    times: dict[tuple[int, int], int] = {}
    pieces = [(range(f, f + n), s, 0, end) for f, n, s, _, end in work.prefill.tolist()]
    for first, count, s, begin, end in work.decoded.tolist():
        assert count * group <= TILES.queries
        rows = work.slots[work.members[first : first + count]].tolist()
        pieces.append((rows, s, begin, end))
    for rows, _, begin, end in pieces:
        for row in rows:
            for position in range(begin, end):
                times[row, position] = times.get((row, position), 0) + 1
    return times


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), min_size=1, max_size=6),
    parents=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    common=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    group=st.sampled_from([1, 3, 8, 16]),
)
def test_every_row_sees_every_position_once(sequences, parents, common, group) -> None:
    """Whatever is shared with whom, each row meets each position up to its own exactly once."""
    tables: list[list[int]] = []
    for s, (cached, new) in enumerate(sequences):
        blocks = -(-(cached + new) // BLOCK)
        own = [1000 * (s + 1) + 16 * b for b in range(blocks)]
        parent = tables[parents[s]] if parents[s] < s else []
        shared = parent[: min(common[s], cached // BLOCK)]
        tables.append(shared + own[len(shared) :])
    step = context_of(sequences, tables)
    times = covered(plan_work(step, Shape(1, group, 16, BLOCK), TILES), group)
    for row, position in enumerate(step.positions.tolist()):
        assert all(times.get((row, p)) == 1 for p in range(position + 1))
    assert set(times.values()) == {1}


def test_siblings_share_what_their_tables_share() -> None:
    """A trunk of all, a branch of two; a span that one of them has not filled is its own."""
    trunk, branch = [16, 32], [48, 64]
    tables = [[*trunk, *branch, 80], [*trunk, *branch, 96], [*trunk, 112, 128], [*trunk, *branch]]
    step = context_of([(35, 1), (33, 1), (30, 1), (29, 1)], tables)
    assert shared_spans(step, [0, 1, 2, 3], BLOCK, 16) == [([0, 1, 2, 3], 0), ([0, 1], 1)]
    work = plan_work(step, Shape(1, 4, 16, BLOCK), TILES)
    assert work.decoded.tolist() == [
        [4, 4, 0, 0, 16],
        [8, 2, 0, 16, 32],
        [0, 1, 0, 32, 36],
        [1, 1, 1, 32, 34],
        [2, 1, 2, 16, 31],
        [3, 1, 3, 16, 30],
    ]
    assert len(work.prefill) == 0


@settings(max_examples=60, deadline=None)
@given(
    changes=st.lists(
        st.none() | st.tuples(*[st.integers(0, 3)] * 2, st.integers(0, 99), st.integers(0, 12)),
        min_size=1,
        max_size=30,
    )
)
def test_lists_of_steps_in_a_row_are_those_of_each_alone(changes) -> None:
    """Contexts grow by a position; now and then one is replaced by a branch of another, or none."""
    shape, lengths = Shape(1, 2, 16, BLOCK), [30, 17, 3, 40]
    context = context_of([(length - 1, 1) for length in lengths], np.zeros((4, 13), np.int64))
    context.block_offsets[:] = np.arange(52).reshape(4, 13)
    plan = Mock(side_effect=partial(plan_work, tiles=TILES))
    lists = DecodeLists(plan, TILES.span)
    for number, change in enumerate(changes):
        context.context_len[:] += context.context_len > 0
        if change is not None:
            row, parent, length, shared = change
            context.context_len[row] = length
            context.block_offsets[row] = 1000 * (number + 1) + np.arange(13)
            context.block_offsets[row, :shared] = context.block_offsets[parent, :shared]
        np.minimum(context.context_len, 13 * BLOCK, out=context.context_len)
        found, calls = lists.of(context, shape), plan.call_count
        alone = padded(plan_work(context, shape, TILES), found.spans)
        for name in ("decoded", "members", "slots"):
            np.testing.assert_array_equal(getattr(found, name), getattr(alone, name))
        context.context_len[:] += (context.context_len % TILES.span) % 15 > 0  # none fills a span
        assert lists.of(context, shape) is found and plan.call_count == calls
        alone = padded(plan_work(context, shape, TILES), alone.spans)
        np.testing.assert_array_equal(found.decoded, alone.decoded)


def test_long_prefills_come_first() -> None:
    """Tiles of rows are ordered by the positions they see, most first."""
    step = context_of([(0, 10), (12, 12)], [[16, 32], [48, 64, 80]])
    work = plan_work(step, Shape(1, 4, 16, BLOCK), TILES)
    assert work.prefill[:, 4].tolist() == [24, 20, 16, 10, 8, 4]
    assert len(work.decoded) == 0
