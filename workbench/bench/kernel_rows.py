"""Rows of `workbench bench kernels`: each kernel timed, beside its peers, and its error.

On whatever device and with whatever timer it is given, so that it also runs where there is no GPU.
What it does not do: choose sizes, or look for a GPU (kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch.nn.functional import rms_norm

from workbench.bench.gpu_timing import CeilingSizes, Timer, Work, measure_gpu_ceiling
from workbench.bench.kernel_peers import torch_attention
from workbench.bench.kernel_steps import Shape, TimedStep, timed_step
from workbench.bench.machine_ceiling import Ceiling
from workbench.bench.record import Row
from workbench.bench.rows import middle_half, plain_row, rate_row
from workbench.kernels import Kernels
from workbench.kernels.reference import ReferenceKernels


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is timed. layers: of the decodes, so that no cache holds what is read."""

    shape: Shape = field(default_factory=Shape)
    decodes: tuple[int, int] = (64, 2048)  # sequences, positions of each
    decode_layers: int = 4
    prompts: tuple[int, int] = (4, 2048)  # sequences, tokens of each
    siblings: tuple[int, int, int] = (16, 1024, 32)  # sequences, shared and own positions
    sibling_layers: int = 32
    hidden: int = 2048
    vocabulary: int = 128_256
    ceiling: CeilingSizes = field(default_factory=CeilingSizes)

    @property
    def needed_bytes(self) -> int:
        """GPU memory in half precision: the decodes' caches, torch's as large, and room."""
        sequences, positions = self.decodes
        position = 2 * self.shape.kv_heads * self.shape.head_dim * 2
        caches = 2 * self.decode_layers * sequences * positions * position
        return caches + 2 * self.ceiling.read_bytes + (2 << 30)


class KernelBench:
    """Rows of one device and type; triton is imported here, not with the module."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, sizes: Sizes, timer: Timer, repeats: int
    ) -> None:
        from workbench.kernels.triton import TritonKernels  # noqa: PLC0415 - an extra
        from workbench.kernels.triton.attention import Tuning, candidates, chosen  # noqa: PLC0415

        self.device, self.dtype, self.sizes = device, dtype, sizes
        self._timer, self._repeats = timer, repeats
        head_dim, width = sizes.shape.head_dim, dtype.itemsize
        self._fast = chosen(head_dim, width, batch_invariant=False)
        self._candidates = [t for t in candidates(self._fast) if t != self._fast]
        self._tuned: Callable[[Tuning], TritonKernels] = lambda t: TritonKernels(device, dtype, t)
        self.kernels = self._tuned(self._fast)
        self.invariant = TritonKernels(device, dtype, batch_invariant=True)
        self.unshared = TritonKernels(device, dtype, share=False)
        self.twin = ReferenceKernels(device, dtype, self.kernels.keys_by_position)

    def rows(self) -> Iterator[Row]:
        """Ceilings first, then kernel by kernel."""
        ceiling = measure_gpu_ceiling(
            self.device, self.dtype, self._timer, self._repeats, self.sizes.ceiling
        )
        yield Row("read_ceiling", ceiling.bytes_per_s / 1e9, "GB/s", repeats=self._repeats)
        yield Row("product_ceiling", ceiling.flops_per_s / 1e12, "TFLOP/s", repeats=self._repeats)
        yield from self.decode_rows(ceiling)
        yield from self.prefill_rows(ceiling)
        yield from self.combined_rows()
        yield from self.other_rows(ceiling)

    def decode_rows(self, ceiling: Ceiling) -> Iterator[Row]:
        """Decoding, by GB/s of keys and values."""
        step, name = self._decodes(), "decode_attention"
        size = len(step.caches) * step.kv_bytes / 1e9
        peers = self._torch(self.sizes.decodes, 1, len(step.caches))
        yield from self._compared(
            name, partial(step.attend, self.kernels), size, "GB/s", peers, ceiling.bytes_per_s / 1e9
        )
        yield self._invariant(name, step, size, "GB/s")
        yield self._error(name, step)

    def prefill_rows(self, ceiling: Ceiling) -> Iterator[Row]:
        """Prompts, by TFLOP/s of the two products, masked half left out."""
        sequences, tokens = self.sizes.prompts
        step = timed_step(self.sizes.shape, [(0, tokens)] * sequences, self.device, self.dtype)
        name, work = "prefill_attention", step.flops / 1e12
        peers = self._torch(self.sizes.prompts, tokens, 1)
        top = ceiling.flops_per_s / 1e12
        attend = partial(step.attend, self.kernels)
        yield from self._compared(name, attend, work, "TFLOP/s", peers, top)
        yield self._invariant(name, step, work, "TFLOP/s")
        yield self._error(name, step)

    def combined_rows(self) -> Iterator[Row]:
        """Siblings sharing a prefix: rows per second."""
        siblings, prefix, own = self.sizes.siblings
        sequences = [(prefix + own - 1, 1)] * siblings
        family = timed_step(
            *(self.sizes.shape, sequences, self.device, self.dtype),
            layers=self.sizes.sibling_layers,
            shared=prefix,
        )
        yield from self._against("cascade_attention", family, "plain_decode", self.unshared)

    def other_rows(self, ceiling: Ceiling) -> Iterator[Row]:
        """Storing and norms by GB/s, logits of two columns by calls per second."""
        sequences, tokens = self.sizes.prompts
        shape = self.sizes.shape
        step = timed_step(shape, [(0, tokens)] * sequences, self.device, self.dtype)
        cosine = torch.ones(tokens, shape.head_dim // 2, device=self.device, dtype=self.dtype)
        cache, context = step.caches[0], step.context
        moved = len(step.qkv) * shape.head_dim * self.dtype.itemsize / 1e9
        rotated, stored = 2 * (shape.heads + shape.kv_heads), 3 * shape.kv_heads
        top = ceiling.bytes_per_s / 1e9
        store = partial(self.kernels.store_kv, step.qkv, cosine, 0 * cosine, cache, context)
        yield from self._compared("store_kv", store, moved * (rotated + stored), "GB/s", {}, top)

        hidden = self._random(sequences * tokens, self.sizes.hidden)
        weight, out = self._random(self.sizes.hidden), torch.empty_like(hidden)
        norm = partial(self.kernels.rms_norm, hidden, weight, 1e-5, out)
        peers: dict[str, Work] = {"torch": lambda: rms_norm(hidden, weight.shape, weight, 1e-5)}
        yield from self._compared("rms_norm", norm, 2 * hidden.nbytes / 1e9, "GB/s", peers, top)

        yield from self.product_rows(ceiling)

        head = self.kernels.pack([self._random(self.sizes.vocabulary, self.sizes.hidden)])
        count = min(64, len(hidden))
        rows = torch.arange(count, device=self.device)
        columns = torch.tensor([self.sizes.vocabulary - 1, 7], device=self.device)
        logits = torch.empty(count, 2, device=self.device, dtype=self.dtype)
        ours = partial(self.kernels.selected_logits, hidden, rows, head, columns, logits)
        peers = {"torch": lambda: hidden[rows] @ head.weight[:, columns]}
        yield from self._compared("selected_logits", ours, 1.0, "calls/s", peers)

    def product_rows(self, ceiling: Ceiling) -> Iterator[Row]:
        """Products in fixed tiles against torch's, of few rows and of many: TFLOP/s."""
        same = self.invariant
        size = self.sizes.hidden
        matrix = same.pack([self._random(4 * size, size)])
        for count in (self.sizes.decodes[0], self.sizes.prompts[1]):
            x, out = self._random(count, size), self._random(count, 4 * size)
            peers: dict[str, Work] = {"torch": partial(self.kernels.multiply, x, matrix, out)}
            work = 2 * count * 4 * size * size / 1e12
            ours = partial(same.multiply, x, matrix, out)
            top = ceiling.flops_per_s / 1e12
            yield from self._compared(
                f"product_{count}_rows+invariant", ours, work, "TFLOP/s", peers, top
            )

    def candidate_rows(self) -> Iterator[Row]:
        """Decoding and prompts with each candidate of the table, named by what it changes."""
        sequences, tokens = self.sizes.prompts
        prompts = timed_step(self.sizes.shape, [(0, tokens)] * sequences, self.device, self.dtype)
        decodes = self._decodes()
        size = len(decodes.caches) * decodes.kv_bytes / 1e9
        for tuning in self._candidates:
            name, kernels = tuning.difference(self._fast), self._tuned(tuning)
            decode_s = self._seconds(partial(decodes.attend, kernels))
            yield plain_row(f"decode_attention+{name}", [size / s for s in decode_s], "GB/s")
            prefill_s = self._seconds(partial(prompts.attend, kernels))
            rates = [prompts.flops / s / 1e12 for s in prefill_s]
            yield plain_row(f"prefill_attention+{name}", rates, "TFLOP/s")

    def _decodes(self) -> TimedStep:
        count, positions = self.sizes.decodes
        sequences = [(positions - 1, 1)] * count
        layers = self.sizes.decode_layers
        return timed_step(self.sizes.shape, sequences, self.device, self.dtype, layers)

    def _seconds(self, work: Work) -> list[float]:
        return self._timer(work, self._repeats)

    def _compared(
        self,
        name: str,
        work: Work,
        amount: float,
        unit: str,
        peers: dict[str, Work],
        ceiling: float | None = None,
    ) -> Iterator[Row]:
        """Our rate against the best peer, then against each."""
        ours = [amount / s for s in self._seconds(work)]
        theirs = {peer: [amount / s for s in self._seconds(w)] for peer, w in peers.items()}
        if theirs:
            best = max(theirs, key=lambda peer: median(theirs[peer]))
            yield rate_row(name, ours, theirs[best], unit, best, ceiling)
        else:
            value = median(ours)
            share = None if ceiling is None else value / ceiling
            spread = middle_half(ours)
            yield Row(name, value, unit, None, None, None, ceiling, share, len(ours), spread)
        if len(theirs) > 1:
            for peer, rates in theirs.items():
                yield rate_row(f"{name}@{peer}", ours, rates, unit, peer, ceiling)

    def _against(self, name: str, step: TimedStep, peer: str, others: Kernels) -> Iterator[Row]:
        amount = float(len(step.caches) * len(step.qkv))
        peers: dict[str, Work] = {peer: partial(step.attend, others)}
        attend = partial(step.attend, self.kernels)
        yield from self._compared(name, attend, amount, "rows/s", peers)
        yield self._error(name, step)

    def _invariant(self, name: str, step: TimedStep, amount: float, unit: str) -> Row:
        """The same step with tiles of the same bits everywhere, against the fast ones."""
        fast = [amount / s for s in self._seconds(partial(step.attend, self.kernels))]
        rates = [amount / s for s in self._seconds(partial(step.attend, self.invariant))]
        return rate_row(f"{name}+invariant", rates, fast, unit, "fast_tiles")

    def _error(self, name: str, step: TimedStep) -> Row:
        """The largest difference from the twin, over the first layer."""
        expected = torch.empty_like(step.out)
        cache, context = step.caches[0], step.context
        self.kernels.attend(step.qkv, step.out, cache, context)
        self.twin.attend(step.qkv, expected, cache, context)
        worst = (step.out.float() - expected.float()).abs().max().item()
        return Row(f"{name}_error", worst, "absolute", peer="reference")

    def _torch(self, sequences: tuple[int, int], new: int, layers: int) -> dict[str, Work]:
        return torch_attention(self.sizes.shape, sequences, new, layers, self.device, self.dtype)

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=self.device, dtype=self.dtype)
