"""How fast the engine is on a GPU, beside what the GPU could do at best, and `transformers`.

Random weights at true size (`dummy:llama-3.2-1b`) time as real ones do. Steps are timed as a user
meets them: scheduling, launching, waiting for the sampled tokens. step_bN is one decode step of N
sequences over its memory floor: every weight that a step reads and the keys and values of its
contexts, at the measured read ceiling. prefill_N is a prompt in one step, against the measured
product ceiling. No suffix: the fastest kernels; `+invariant`: those whose rows have the same bits
in whatever batch; invariant_cost_*: time of the second over time of the first. memory_*: bytes, as
the profiling pass measured them. Where `transformers` did not run, a row's peer says why. What it
does not do: look for a GPU (gpu_timing.py).
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from workbench.bench.contenders import Contender, Ours, Prompts
from workbench.bench.gpu_contenders import TransformersOnDevice
from workbench.bench.machine_ceiling import Ceiling
from workbench.bench.peer_process import PeerError
from workbench.bench.record import Row
from workbench.bench.rows import memory_rows, middle_half, plain_row, rate_row
from workbench.engine.engine import Engine
from workbench.models.registry import model_spec

FAST, INVARIANT, TRANSFORMERS = "", "+invariant", "transformers"
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What is timed: batches of decodes, tokens of prompts before and after, and of prefills."""

    batches: tuple[int, ...] = (1, 16, 64)
    prompt: int = 128
    new: int = 64
    prefills: tuple[int, ...] = (512, 2048)

    @property
    def longest(self) -> int:
        """Positions of the longest sequence."""
        return max(self.prompt + self.new, *(size + 1 for size in self.prefills))

    @property
    def step(self) -> int:
        """Tokens of the largest step: every prompt of the largest batch at once."""
        return max(max(self.batches) * self.prompt, *self.prefills)

    @property
    def blocks(self) -> int:
        """Of the cache: the largest batch, or the longest request."""
        a_batch = max(self.batches) * -(-(self.prompt + self.new) // BLOCK_SIZE)
        return max(a_batch, -(-(self.longest + 1) // BLOCK_SIZE))


class EngineBench:
    """Our engine in both modes and `transformers`, of one model on one device."""

    def __init__(
        self,
        model: str,
        device: str,
        dtype: str,
        ceiling: Ceiling,
        sizes: StepSizes,
        repeats: int,
        seed: int = 0,
        peer: bool = True,
    ) -> None:
        """Raises OutOfMemory, with the numbers, where the device is too small for the model."""
        self._sizes, self._ceiling, self._repeats = sizes, ceiling, repeats
        self.spec = model_spec(model)
        self._random = np.random.default_rng(seed)
        self._ours = {
            suffix: Ours(_engine(model, device, dtype, suffix == INVARIANT, sizes))
            for suffix in (FAST, INVARIANT)
        }
        self._contenders: dict[str, Contender] = dict(self._ours)
        self._missing: str | None = None  # why there is no peer, where one is wanted
        if not peer:
            return
        try:
            self._contenders[TRANSFORMERS] = TransformersOnDevice(
                model, torch.device(device), dtype
            )
        except PeerError as problem:
            self._drop_peer(problem)

    def rows(self) -> Iterator[Row]:
        """Steps by batch, prefills by size, what invariance costs, and where the memory went."""
        yield from memory_rows("memory_", self._ours[FAST].engine.memory)
        for batch in self._sizes.batches:
            yield from self._decode_rows(batch)
        for tokens in self._sizes.prefills:
            yield from self._prefill_rows(tokens)

    def floor_s(self, batch: int) -> float:
        """Seconds that reading a step's weights, keys and values takes: contexts half grown."""
        model = self._ours[FAST].engine.executor.model
        weights = sum(product.nbytes for product in model.products)
        context = self._sizes.prompt + self._sizes.new // 2
        cached = batch * context * self.spec.kv_bytes_per_token(model.dtype.itemsize)
        return (weights + cached) / self._ceiling.bytes_per_s

    def _decode_rows(self, batch: int) -> Iterator[Row]:
        new, floor = self._sizes.new, self.floor_s(batch)
        shape = (batch, self._sizes.prompt)
        rates = self._measured(shape, lambda contender, prompts: contender.decode(prompts, new))
        yield from self._rate_rows(f"decode_b{batch}", rates, batch / floor)
        for suffix in self._ours:
            steps = [1e3 * batch / rate for rate in rates[suffix]]
            value, spread = median(steps), middle_half(steps)
            share = 1e3 * floor / value
            yield Row(
                f"step_b{batch}{suffix}", value, "ms", None, None, None, 1e3 * floor, share,
                len(steps), spread,
            )  # fmt: skip
            outside = self._ours[suffix].bookkeeping[-self._repeats :]
            yield plain_row(f"bookkeeping_share_b{batch}{suffix}", outside, "fraction")
        yield _cost(f"b{batch}", rates)

    def _prefill_rows(self, tokens: int) -> Iterator[Row]:
        best = tokens / (self.spec.flops(tokens, 0) / self._ceiling.flops_per_s)
        rates = self._measured((1, tokens), lambda contender, prompts: contender.prefill(prompts))
        yield from self._rate_rows(f"prefill_{tokens}", rates, best)
        yield _cost(f"prefill_{tokens}", rates)

    def _rate_rows(self, name: str, rates: dict[str, list[float]], ceiling: float) -> Iterator[Row]:
        for suffix in self._ours:
            ours, theirs = rates[suffix], rates.get(TRANSFORMERS)
            if theirs is not None:
                against = (theirs, "tokens/s", TRANSFORMERS, ceiling)
                yield rate_row(f"{name}{suffix}", ours, *against)
                continue
            value = median(ours)
            share, spread = value / ceiling, middle_half(ours)
            own = ("tokens/s", self._missing, None, None, ceiling, share, len(ours), spread)
            yield Row(f"{name}{suffix}", value, *own)

    def _measured(
        self, shape: tuple[int, int], measure: Callable[[Contender, Prompts], float]
    ) -> dict[str, list[float]]:
        """Each repeat all contenders on the same fresh prompts, in alternating order.

        Two repeats are not counted: kernels are compiled in the first, and graphs captured.
        """
        rates: dict[str, list[float]] = {name: [] for name in self._contenders}
        for repeat in range(-2, self._repeats):
            prompts = self._random.integers(0, self.spec.vocab, shape)
            gc.collect()
            for name in list(rates)[:: 1 if repeat % 2 else -1]:
                try:
                    rate = measure(self._contenders[name], prompts)
                except PeerError as problem:
                    self._drop_peer(problem)
                    del rates[name]
                    continue
                if repeat >= 0:
                    rates[name].append(rate)
        return rates

    def _drop_peer(self, problem: PeerError) -> None:
        """It takes no part from now on, and rows say why."""
        self._contenders.pop(TRANSFORMERS, None)
        self._missing = f"no {TRANSFORMERS}: {problem}"
        warnings.warn(f"Rows have {self._missing}", stacklevel=2)


def _cost(name: str, rates: dict[str, list[float]]) -> Row:
    """Time of the invariant mode over time of the fast one."""
    times = [fast / same for fast, same in zip(rates[FAST], rates[INVARIANT], strict=True)]
    return plain_row(f"invariant_cost_{name}", times, "x")


def _engine(model: str, device: str, dtype: str, invariant: bool, sizes: StepSizes) -> Engine:
    return Engine(
        model,
        device=device,
        dtype=dtype,
        block_size=BLOCK_SIZE,
        num_blocks=sizes.blocks,
        max_num_seqs=max(sizes.batches),
        max_num_batched_tokens=sizes.step,
        max_model_len=sizes.longest + 1,
        enable_prefix_caching=False,
        batch_invariant=invariant,
    )
