"""Decoding steps recorded once and launched again, over whatever their arrays hold by then."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import ANY, Mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")

from tests.kernels.synthetic import context_of, random_step
from tests.kernels.test_triton import DEVICE, SMALL, expected, kernels
from workbench.kernels.triton import TritonKernels
from workbench.kernels.triton.graphs import GraphCapture, RecordedWork


@pytest.mark.gpu
def test_recorded_steps_on_the_device() -> None:
    """CUDA graphs: the second step of a size is captured work, over contexts that grow."""
    step = random_step((8, 2, 64), [(530, 1), (520, 1), (300, 1)], 16, shared=256)
    step = step.to(torch.bfloat16, DEVICE)
    context, out = step.context, step.room()
    ours = TritonKernels(torch.device(DEVICE), torch.bfloat16)
    again = ours.record(partial(ours.attend, step.qkv, out, step.cache, context))
    for length in (280, 281, 282, 290, 301, 300):
        context.context_len[:] = length
        context.positions[:] = length - 1
        out.fill_(torch.nan)
        again()
        torch.testing.assert_close(out.float(), expected(step), rtol=2e-2, atol=2e-2)


def test_recorded_work_sees_what_its_arrays_hold_now() -> None:
    """Steps of changing contexts, some sharing a prefix, replay the launches of their size."""
    step = random_step((2, 1, 16), [(66, 1), (64, 1), (40, 1)], 8, shared=32)
    step, context = step.to(torch.float32, DEVICE), step.context
    out, ours = step.room(), kernels(torch.float32, SMALL)
    capture = Mock(side_effect=lambda work: work)
    attend = partial(ours.attend, step.qkv, out, step.cache, context)
    again = RecordedWork(ours, attend, capture)
    for lengths in ([3, 2, 1], [5, 9, 1], [7, 8, 2], [40, 30, 20], [67, 65, 41], [66, 64, 40]):
        context.context_len[:] = lengths
        context.positions[:] = context.context_len - 1
        again()
        torch.testing.assert_close(out, expected(step), rtol=2e-5, atol=2e-5)
    assert capture.call_count == 2  # up to two spans, and three: what is shared is no part of it


def test_a_capture_that_fails_is_ended_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the steps after it, which would else be captured too, and other engines' threads."""
    graph = Mock()
    for name in ("graph_pool_handle", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch, "zeros", Mock())
    capture = GraphCapture(torch.device("cuda"))
    graph.reset_mock()
    graph.capture_end.side_effect = RuntimeError("capture invalidated")
    with pytest.raises(ZeroDivisionError):  # the cause, not what follows from it
        capture(lambda: 1 // 0)
    graph.capture_begin.assert_called_once_with(pool=ANY, capture_error_mode="thread_local")
    graph.capture_end.assert_called_once_with()


def test_a_size_that_cannot_be_captured_is_launched_one_by_one() -> None:
    """A warning says why; its steps are right, and nobody tries again."""
    step = random_step((2, 1, 16), [(66, 1), (40, 1)], 8).to(torch.float32, DEVICE)
    out, ours = step.room(), kernels(torch.float32, SMALL)
    capture = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    attend = partial(ours.attend, step.qkv, out, step.cache, step.context)
    again = RecordedWork(ours, attend, capture)
    with pytest.warns(RuntimeWarning, match=r"one by one, slower: no CUDA graph \(CUDA out of"):
        again()
    for _ in range(2):
        out.fill_(torch.nan)
        again()
        torch.testing.assert_close(out, expected(step), rtol=2e-5, atol=2e-5)
    assert capture.call_count == 1


def test_rows_beyond_a_step_s_own_belong_to_nobody() -> None:
    """They store nothing, see nothing, and change no bit of the others."""
    alone = random_step((4, 2, 16), [(33, 1), (7, 1), (70, 1)], 8).to(torch.float32, DEVICE)
    ours = kernels(torch.float32, SMALL)
    own, ones = alone.room(), torch.ones(80, 8, device=DEVICE)
    angles = ones, 0 * ones
    kept = alone.cache.data.clone()
    ours.store_kv(alone.qkv, angles, alone.cache, alone.context)
    ours.attend(alone.qkv, own, alone.cache, alone.context)
    wider = torch.cat([alone.qkv, torch.full_like(alone.qkv[:1], 9.0)])
    tables = alone.context.block_offsets
    beyond = context_of([(33, 1), (7, 1), (70, 1), (-1, 1)], [*tables, tables[0]])
    cache = replace(alone.cache, data=kept)
    out = torch.full((4, own.shape[1]), torch.nan, device=DEVICE)
    ours.store_kv(wider, angles, cache, beyond)
    ours.attend(wider, out, cache, beyond)
    assert torch.equal(out[:3], own)
    assert torch.equal(cache.data.nan_to_num(7), alone.cache.data.nan_to_num(7))


@pytest.mark.parametrize("most", [1, 2, 3, 8, 64, 100, 512])
@pytest.mark.parametrize("longest", [16, 300, 2048, 131072])
def test_a_dozen_graphs_serve_every_decoding_step(most: int, longest: int) -> None:
    """Every number of rows and every context has one that is no smaller, nor much larger."""
    ours = TritonKernels(torch.device(DEVICE), torch.float32)
    sizes = {rows: ours.rows_launched(rows, most) for rows in range(1, most + 1)}
    contexts = ours.contexts_recorded(longest)
    assert len(set(sizes.values())) * len(contexts) <= 12
    assert sizes[most] == most and contexts[0] == longest
    assert contexts == sorted(contexts, reverse=True)
    ratio = most**0.25 + 1
    assert all(rows <= launched <= rows * ratio for rows, launched in sizes.items())
