"""A step's lists and its context on a device: one tensor, one copy, no waiting.

Room for more than a step has (`padded`) lets later steps be put where the first one was, which is
what a recorded launch reads: an item of no members is a program that ends at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from workbench.kernels.context import ForwardContext
from workbench.kernels.triton.work import Integers, StepWork

ALIGNMENT = 16  # elements; block offsets that are multiples of it allow wide loads


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """StepWork and the context's arrays, int64, as views of `buffer`."""

    buffer: torch.Tensor
    prefill: torch.Tensor
    own: torch.Tensor
    shared: torch.Tensor
    members: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor  # [T]
    sequence: torch.Tensor  # [T]
    tables: torch.Tensor  # [S, blocks]
    spans: int
    aligned: bool

    def refill(self, work: StepWork, context: ForwardContext) -> None:
        """Another step of the same sizes and alignment, put where this one is."""
        assert work.spans == self.spans and len(work.own) == len(self.own)
        self.buffer.copy_(_staged(work, context, self.buffer.device), non_blocking=True)


def place(work: StepWork, context: ForwardContext, device: torch.device) -> DeviceWork:
    """Copy lists and context to a device."""
    buffer = _staged(work, context, device).to(device, non_blocking=True)
    arrays = _arrays(work, context)
    views = {
        name: buffer[start : start + array.size].view(array.shape)
        for start, (name, array) in zip(_starts(arrays), arrays.items())
    }
    return DeviceWork(buffer, **views, spans=work.spans, aligned=is_aligned(context))


def is_aligned(context: ForwardContext) -> bool:
    """Whether every block begins where wide loads may."""
    return not (context.block_offsets % ALIGNMENT).any()


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of lists that many decoding steps fit: each a power of two times the rows, or none."""

    own: int
    shared: int
    members: int
    spans: int

    @classmethod
    def of(cls, work: StepWork) -> Capacity:
        """The least that fits this step, of which nothing is prefilled."""
        assert len(work.prefill) == 0
        rows, spans = len(work.slots), _power_of_two(work.spans)
        shared = _power_of_two(len(work.shared)) if len(work.shared) else 0
        return cls(rows * spans, shared, rows + (rows * spans if shared else 0), spans)


def padded(work: StepWork, capacity: Capacity) -> StepWork:
    """The same work, its lists filled up with items of no members."""
    return replace(
        work,
        own=_filled(work.own, capacity.own),
        shared=_filled(work.shared, capacity.shared),
        members=_filled(work.members, capacity.members),
        spans=capacity.spans,
    )


def _filled(array: Integers, length: int) -> Integers:
    room = np.zeros((length, *array.shape[1:]), np.int64)
    room[: len(array)] = array
    return room


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _arrays(work: StepWork, context: ForwardContext) -> dict[str, Integers]:
    return {
        "prefill": work.prefill,
        "own": work.own,
        "shared": work.shared,
        "members": work.members,
        "slots": work.slots,
        "positions": context.positions,
        "sequence": context.sequence,
        "tables": context.block_offsets,
    }


def _starts(arrays: dict[str, Integers]) -> list[int]:
    """Where each array begins: at a multiple of 16 bytes; then the end of all."""
    room = [-(-array.size // 2) * 2 for array in arrays.values()]
    starts: list[int] = np.cumsum([0, *room]).tolist()
    return starts


def _staged(work: StepWork, context: ForwardContext, device: torch.device) -> torch.Tensor:
    """All arrays in one host tensor, from which a GPU copies by itself."""
    arrays = _arrays(work, context)
    *starts, end = _starts(arrays)
    host = torch.empty(end, dtype=torch.int64, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays.values()):
        host.numpy()[start : start + array.size] = array.reshape(-1)
    return host
