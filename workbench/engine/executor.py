"""Carries out a step plan: owns weights, KV storage and buffers; returns tokens and logits.

The only part of the engine that computes. A plan that fails leaves the executor as it was: what the
failed step stored is in blocks that the scheduler then withdraws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, repeat
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.core import SamplingRows, StepPlan, StepResult, WantedLogits
from workbench.engine.sampling import (
    Logprobs,
    filters_of,
    require_finite,
    require_finite_rows,
    uniform,
)
from workbench.errors import StepError
from workbench.kernels import ForwardContext, Kernels, LayerCache
from workbench.kvcache.storage import BlockStorage
from workbench.models.llama import Buffers, LlamaModel


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A step that `submit` carried out, and what came of it."""

    outcome: StepResult | Exception

    def result(self) -> StepResult:
        """The step's result; StepError when its forward pass failed."""
        if isinstance(self.outcome, StepError):
            raise self.outcome
        if isinstance(self.outcome, Exception):
            raise StepError(
                f"The forward pass failed: {type(self.outcome).__name__}: {self.outcome}"
            ) from self.outcome
        return self.outcome


class Executor:
    """One model over its blocks.

    A step has at most max_num_batched_tokens rows of at most max_num_seqs sequences.
    """

    def __init__(
        self,
        model: LlamaModel,
        storage: BlockStorage,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
    ) -> None:
        """max_model_len: the longest context of a step; the model's own if not given."""
        self.model, self.storage = model, storage
        self.buffers = model.buffers(max_num_batched_tokens, max_num_seqs)
        shape = storage.block_size, storage.kv_heads, storage.head_dim
        aligned = not (storage.offsets % 16).any()
        self._caches = [
            LayerCache(storage.data, int(base), *shape, aligned) for base in storage.layer_base
        ]
        longest = max_model_len or model.spec.max_model_len
        self._decode_steps = DecodeSteps(model, self._caches, self.buffers, longest)

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step. Its errors are raised by the handle, not here."""
        try:
            with torch.inference_mode(), self._current_device():
                return StepHandle(self._run(plan))
        except Exception as error:  # what went wrong is the step's, and the engine goes on
            return StepHandle(error)

    def record_steps(self) -> None:
        """Record decoding steps of all sizes now, where kernels ask for it; before the first step.

        No cached key or value is written.
        """
        with torch.inference_mode(), self._current_device():
            self._decode_steps.record_all()

    def _current_device(self) -> AbstractContextManager[object]:
        """Kernels are launched on the current GPU, which may be another one."""
        device = self.model.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _run(self, plan: StepPlan) -> StepResult:
        """On a GPU the forward pass is launched in forward_s, and waited for in sampling_s."""
        started = perf_counter()
        asked = [plan.sampling.rows, *(each.rows for each in plan.wanted)]
        needed, distinct = None, np.unique(np.concatenate(asked))
        if plan.num_tokens > plan.num_seqs and len(distinct) <= self.buffers.logit_rows:
            needed, asked = distinct, [np.searchsorted(distinct, rows) for rows in asked]
        hidden = self._forward(plan, needed)
        places = [staged(rows, np.int64, hidden.device) for rows in asked]
        logits = hidden.new_empty(0, self.model.spec.outputs)
        if len(plan.sampling):  # on the device, valid until the next step
            logits = self.model.logits(hidden, places[0], self.buffers)
        wanted = tuple(map(self._wanted_logits, repeat(hidden), places[1:], plan.wanted))
        forwarded = perf_counter()
        tokens, logprobs = sample(self.model.kernels, logits, plan.sampling)
        return StepResult(tokens, logprobs, wanted, forwarded - started, perf_counter() - forwarded)

    def _forward(self, plan: StepPlan, needed: NDArray[np.int64] | None) -> torch.Tensor:
        """Last hidden states of the rows that are needed, or of all."""
        assert plan.num_tokens <= self.buffers.tokens, "a step of more than the buffers hold"
        assert int(plan.positions.max()) < self.model.spec.max_model_len, "no such position"
        tokens = staged(plan.tokens, np.int64, self.model.device)
        if plan.num_tokens == plan.num_seqs:
            return self._decode_steps.forward(tokens, plan)
        context = ForwardContext.of(plan)
        return self.model.forward(tokens, self._caches, context, self.buffers, needed)

    def _wanted_logits(
        self, hidden: torch.Tensor, rows: torch.Tensor, wanted: WantedLogits
    ) -> NDArray[np.float32]:
        """float32 [rows, columns]: of the vocabulary or the value head, the asked columns only.

        rows: where the plan's rows stand in the hidden states.
        """
        out = hidden.new_empty(len(wanted.rows), len(wanted.columns))
        columns = staged(wanted.columns, np.int64, hidden.device)
        self.model.selected_logits(hidden, rows, columns, out)
        logits: NDArray[np.float32] = out.float().cpu().numpy()
        require_finite(logits, wanted.rows)
        return logits


class DecodeSteps:
    """Steps of one row a sequence, of which decoding consists: passes recorded to be run again.

    A pass is recorded once for each number of rows, over arrays that stay in place, and then run
    without Python in between (as a CUDA graph is). On a GPU a few numbers of rows serve all: those
    beyond a step's own belong to no sequence.
    """

    def __init__(
        self, model: LlamaModel, caches: Sequence[LayerCache], buffers: Buffers, longest: int
    ) -> None:
        self._model, self._caches, self._buffers = model, caches, buffers
        self._longest, rows = longest, buffers.logit_rows
        self._positions = np.zeros(rows, np.int64)
        self._context_len = np.zeros(rows, np.int32)
        self._block_offsets = np.zeros((rows, -(-longest // caches[0].block_size)), np.int64)
        self._passes: dict[int, Callable[[], None]] = {}

    def forward(self, tokens: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """`LlamaModel.forward` of a plan whose sequences own one row each."""
        rows, blocks = plan.block_offsets.shape
        launched = self._model.kernels.rows_launched(rows, len(self._positions))
        self._positions[:rows] = plan.positions
        self._context_len[:rows] = plan.context_len
        self._block_offsets[:rows, :blocks] = plan.block_offsets
        self._positions[rows:launched] = -1  # no sequence's
        self._context_len[rows:launched] = 0
        self._model.embed(tokens, self._positions[:rows], self._buffers.residual[:rows])
        self._pass(launched)()
        return self._buffers.normed[:rows]

    def record_all(self) -> None:
        """The largest first: what they need beside their buffers then serves the smaller ones."""
        kernels, most = self._model.kernels, len(self._positions)
        contexts = kernels.contexts_recorded(self._longest)
        sizes = {kernels.rows_launched(rows + 1, most) for rows in range(most if contexts else 0)}
        self._positions[:] = -1  # no sequence's
        for rows in sorted(sizes, reverse=True):
            for length in contexts:
                self._context_len[:rows] = length
                self._pass(rows)()

    def _pass(self, rows: int) -> Callable[[], None]:
        """Unused entries of the table are of former steps: no row reads beyond its position.

        What is recorded does not hold on to this object, which would keep buffers until garbage is
        collected.
        """
        if rows in self._passes:
            return self._passes[rows]
        context = ForwardContext(
            positions=self._positions[:rows],
            sequence=np.arange(rows, dtype=np.int64),
            query_start=np.arange(rows + 1, dtype=np.int32),
            context_len=self._context_len[:rows],
            block_offsets=self._block_offsets[:rows],
        )
        model, caches, buffers = self._model, self._caches, self._buffers
        work = model.kernels.record(lambda: model.run_layers(rows, caches, context, buffers))
        self._passes[rows] = work
        return work


def staged(array: NDArray[Any], dtype: type[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device: on a CPU the same memory where it may be, else a copy under way."""
    if array.dtype != dtype or not (array.flags.c_contiguous and array.flags.writeable):
        array = np.require(array, dtype, ("C", "W"))
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def sample(
    kernels: Kernels, logits: torch.Tensor, rows: SamplingRows
) -> tuple[NDArray[np.int64], Logprobs]:
    """Tokens int64 [R] of logits [R, vocab], chosen where they are, and wanted log probabilities.

    What leaves the device is a number a row, and log probabilities, which are of the unfiltered
    distribution at temperature 1. Raises StepError naming rows whose logits are NaN or unbounded.
    """
    if not len(rows):
        return np.empty(0, np.int64), ()
    device, noise, filters = logits.device, rows.temperature, None
    if noise.any():  # else all is greedy, and any number will do
        noise = uniform(rows.seeds, rows.positions)
        filters = filters_of(rows, logits.shape[1])
    tokens, finite = (
        kernels.choose(
            logits,
            staged(rows.temperature, np.float64, device),
            staged(noise, np.float64, device),
            None if filters is None else staged(filters, np.float64, device),
        )
        .cpu()
        .numpy()
    )
    require_finite_rows(finite != 0, rows.rows)
    wanted = np.flatnonzero(rows.logprobs >= 0)
    if not len(wanted):
        return tokens, ()
    some = logits if len(wanted) == len(rows) else logits[torch.from_numpy(wanted).to(device)]
    counts = rows.logprobs[wanted].tolist()
    best, totals = kernels.likely(some, min(max(counts), logits.shape[1]))
    chosen = zip(tokens[wanted].tolist(), best.tolist(), counts, strict=True)
    ids = [[token, *others[:count]] for token, others, count in chosen]
    places = np.repeat(np.arange(len(ids)), [len(each) for each in ids])
    at = torch.from_numpy(places).to(device), torch.tensor([*chain(*ids)], device=device)
    values = iter((some[at].double() - totals[at[0]]).tolist())
    found: list[dict[int, float] | None] = [None] * len(rows)
    for row, each in zip(wanted, ids, strict=True):
        found[row] = dict(zip(each, values))
    return tokens, tuple(found)
