"""The GPU's kernels: bytes and operations a second, beside torch's and what the GPU can do.

decode_attention: one new row for each of many long contexts, whose keys and values are read once;
prefill_attention: whole prompts; cascade_attention: siblings over a shared prefix, against the same
step with the prefix read for each. `@flash`, `@cudnn`, `@efficient`: torch's attention by that
backend, over contiguous keys and values. `+invariant`: tiles that give a row the same bits wherever
it is computed. `_error`: the largest difference from the plain torch twin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from workbench.bench.ceilings import (
    Ceiling,
    CeilingSizes,
    Timer,
    Work,
    graph_seconds,
    measure_gpu_ceiling,
    require_gpu,
)
from workbench.bench.record import Row, median_row
from workbench.kernels import ForwardContext, Kernels, LayerCache
from workbench.kernels.reference import ReferenceKernels

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
REPEATS = {"quick": 10, "default": 50, "full": 100}
MODE = {"dtype": "bfloat16", "shape": "32 query and 8 key-value heads of 128, blocks of 16"}


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention heads, and how a cache keeps them."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is timed. layers: each with keys and values of its own, so that no cache holds what is
    read.
    """

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


def run(profile: str = "default", repeats: int | None = None) -> Iterator[Row]:
    """The rows of `workbench bench kernels`.

    Raises ConfigError without a GPU or triton, OutOfMemory on a GPU that is too small.
    """
    sizes = Sizes()
    if profile == "quick":
        sizes = Sizes(decodes=(64, 1024), decode_layers=2, prompts=(2, 1024), sibling_layers=8)
    device = require_gpu(sizes.needed_bytes)
    bench = KernelBench(device, torch.bfloat16, sizes, graph_seconds, repeats or REPEATS[profile])
    yield from bench.rows()


@dataclass(frozen=True, slots=True)
class TimedStep:
    """Random rows and caches [layers] of one step of attention."""

    shape: Shape
    qkv: torch.Tensor
    out: torch.Tensor
    caches: tuple[LayerCache, ...]
    context: ForwardContext

    @property
    def flops(self) -> int:
        """Of one layer's attention: two products, each a multiplication and an addition."""
        seen = int((self.context.positions + 1).sum())
        return 4 * self.shape.heads * self.shape.head_dim * seen

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one layer, each sequence's once."""
        position = 2 * self.shape.kv_heads * self.shape.head_dim * self.qkv.element_size()
        return int(self.context.context_len.sum()) * position

    def attend(self, kernels: Kernels) -> None:
        """Every layer's attention."""
        for cache in self.caches:
            kernels.attend(self.qkv, self.out, cache, self.context)


def timed_step(
    shape: Shape,
    sequences: Sequence[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    layers: int = 1,
    shared: int = 0,
) -> TimedStep:
    """(cached, new) tokens of each sequence, in shuffled blocks; the first `shared` tokens of all
    sequences lie in the same blocks."""
    draw = np.random.default_rng(0)
    new, ends = [n for _, n in sequences], [sum(pair) for pair in sequences]
    blocks = [-(-end // shape.block_size) for end in ends]
    block_elements = 2 * shape.block_size * shape.kv_heads * shape.head_dim
    names = draw.permutation(sum(blocks)) * block_elements
    tables = np.zeros((len(ends), max(blocks)), np.int64)
    for s, (last, count) in enumerate(zip(np.cumsum(blocks), blocks)):
        tables[s, :count] = names[last - count : last]
    tables[:, : shared // shape.block_size] = tables[0, : shared // shape.block_size]
    context = ForwardContext(
        positions=np.concatenate([np.arange(c, c + n, dtype=np.int64) for c, n in sequences]),
        sequence=np.repeat(np.arange(len(new), dtype=np.int64), new),
        query_start=np.cumsum([0, *new]).astype(np.int32),
        context_len=np.array(ends, np.int32),
        block_offsets=tables,
    )
    slab = sum(blocks) * block_elements
    data = torch.randn(layers * slab, device=device, dtype=dtype)
    caches = tuple(
        LayerCache(data, i * slab, shape.block_size, shape.kv_heads, shape.head_dim)
        for i in range(layers)
    )
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = torch.randn(sum(new), width, device=device, dtype=dtype)
    out = torch.empty(sum(new), shape.heads * shape.head_dim, device=device, dtype=dtype)
    return TimedStep(shape, qkv, out, caches, context)


class KernelBench:
    """Rows of one device and type, with whatever timer; triton is imported here, an extra."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, sizes: Sizes, timer: Timer, repeats: int
    ) -> None:
        from workbench.kernels.triton import TritonKernels  # noqa: PLC0415 - an extra

        self.device, self.dtype, self.sizes = device, dtype, sizes
        self._timer, self._repeats = timer, repeats
        made = partial(TritonKernels, device, dtype)
        self.kernels, self.invariant = made(batch_invariant=False), made(batch_invariant=True)
        self.unshared = made(share=False)
        self.twin = ReferenceKernels(device, dtype, self.kernels.keys_by_position)

    def rows(self) -> Iterator[Row]:
        """Ceilings first, then kernel by kernel."""
        ceiling = measure_gpu_ceiling(
            self.device, self.dtype, self._timer, self._repeats, self.sizes.ceiling
        )
        yield Row("read_ceiling", ceiling.bytes_per_s / 1e9, "GB/s", repeats=self._repeats)
        yield Row("product_ceiling", ceiling.flops_per_s / 1e12, "TFLOP/s", repeats=self._repeats)
        yield from self._attention_rows(ceiling)
        yield from self._sibling_rows()
        yield from self._other_rows(ceiling)

    def _attention_rows(self, ceiling: Ceiling) -> Iterator[Row]:
        """Decoding by GB/s of keys and values, prompts by TFLOP/s of the unmasked half."""
        count, positions = self.sizes.decodes
        decodes = self._step([(positions - 1, 1)] * count, self.sizes.decode_layers)
        prompts = self._step([(0, self.sizes.prompts[1])] * self.sizes.prompts[0])
        moved = len(decodes.caches) * decodes.kv_bytes / 1e9
        peers = self._torch(self.sizes.decodes, 1, len(decodes.caches))
        top = ceiling.bytes_per_s / 1e9
        yield from self._attention("decode_attention", decodes, moved, "GB/s", peers, top)
        peers = self._torch(self.sizes.prompts, self.sizes.prompts[1], 1)
        work, top = prompts.flops / 1e12, ceiling.flops_per_s / 1e12
        yield from self._attention("prefill_attention", prompts, work, "TFLOP/s", peers, top)

    def _attention(
        self,
        name: str,
        step: TimedStep,
        amount: float,
        unit: str,
        peers: Mapping[str, Work],
        top: float,
    ) -> Iterator[Row]:
        yield from self._compared(
            name, partial(step.attend, self.kernels), amount, unit, peers, top
        )
        fast = {"fast_tiles": partial(step.attend, self.kernels)}
        same = partial(step.attend, self.invariant)
        yield from self._compared(f"{name}+invariant", same, amount, unit, fast)
        yield self._error(name, step)

    def _sibling_rows(self) -> Iterator[Row]:
        """Siblings sharing a prefix: rows per second."""
        siblings, prefix, own = self.sizes.siblings
        step = self._step([(prefix + own - 1, 1)] * siblings, self.sizes.sibling_layers, prefix)
        amount, name = float(len(step.caches) * len(step.qkv)), "cascade_attention"
        ours, theirs = (partial(step.attend, each) for each in (self.kernels, self.unshared))
        yield from self._compared(name, ours, amount, "rows/s", {"plain_decode": theirs})
        yield self._error(name, step)

    def _other_rows(self, ceiling: Ceiling) -> Iterator[Row]:
        """Storing and norms by GB/s, products in fixed tiles by TFLOP/s, logits by calls."""
        sizes, shape, (sequences, tokens) = self.sizes, self.sizes.shape, self.sizes.prompts
        reads, products = ceiling.bytes_per_s / 1e9, ceiling.flops_per_s / 1e12
        step = self._step([(0, tokens)] * sequences)
        cosine = torch.ones(tokens, shape.head_dim // 2, device=self.device, dtype=self.dtype)
        moved = len(step.qkv) * shape.head_dim * self.dtype.itemsize / 1e9
        rotated, stored = 2 * (shape.heads + shape.kv_heads), 3 * shape.kv_heads
        where = step.caches[0], step.context
        store = partial(self.kernels.store_kv, step.qkv, cosine, 0 * cosine, *where)
        yield from self._compared("store_kv", store, moved * (rotated + stored), "GB/s", {}, reads)

        hidden = self._random(sequences * tokens, sizes.hidden)
        weight, out = self._random(sizes.hidden), torch.empty_like(hidden)
        norm = partial(self.kernels.rms_norm, hidden, weight, 1e-5, out)
        peers: dict[str, Work] = {"torch": lambda: rms_norm(hidden, weight.shape, weight, 1e-5)}
        yield from self._compared("rms_norm", norm, 2 * hidden.nbytes / 1e9, "GB/s", peers, reads)

        inputs, outputs = sizes.hidden, 4 * sizes.hidden
        matrix = self.invariant.pack([self._random(outputs, inputs)])
        for count in (sizes.decodes[0], tokens):
            given = self._random(count, inputs), matrix, self._random(count, outputs)
            name, work = f"product_{count}_rows+invariant", 2 * count * inputs * outputs / 1e12
            peers = {"torch": partial(self.kernels.multiply, *given)}
            ours = partial(self.invariant.multiply, *given)
            yield from self._compared(name, ours, work, "TFLOP/s", peers, products)

        head = self.kernels.pack([self._random(sizes.vocabulary, inputs)])
        rows = torch.arange(min(64, len(hidden)), device=self.device)
        columns = torch.tensor([sizes.vocabulary - 1, 7], device=self.device)
        logits = torch.empty(len(rows), 2, device=self.device, dtype=self.dtype)
        select = partial(self.kernels.selected_logits, hidden, rows, head, columns, logits)
        peers = {"torch": lambda: hidden[rows] @ head.weight[:, columns]}
        yield from self._compared("selected_logits", select, 1.0, "calls/s", peers)

    def _compared(
        self,
        name: str,
        work: Work,
        amount: float,
        unit: str,
        peers: Mapping[str, Work],
        ceiling: float | None = None,
    ) -> Iterator[Row]:
        """Our rate against the best peer, then against each."""
        ours = self._rates(work, amount)
        theirs = {peer: self._rates(other, amount) for peer, other in peers.items()}
        best = max(theirs, key=lambda peer: median(theirs[peer]), default=None)
        named = {name: best} | ({f"{name}@{p}": p for p in theirs} if len(theirs) > 1 else {})
        for row, peer in named.items():
            rates = theirs[peer] if peer else None
            yield median_row(row, ours, unit, peer=peer, peers=rates, ceiling=ceiling)

    def _rates(self, work: Work, amount: float) -> list[float]:
        return [amount / seconds for seconds in self._timer(work, self._repeats)]

    def _error(self, name: str, step: TimedStep) -> Row:
        """The largest difference from the twin, over the first layer."""
        expected = torch.empty_like(step.out)
        first = replace(step, caches=step.caches[:1])
        first.attend(self.kernels)
        replace(first, out=expected).attend(self.twin)
        worst = (step.out.float() - expected.float()).abs().max().item()
        return Row(f"{name}_error", worst, "absolute", peer="reference")

    def _torch(self, sequences: tuple[int, int], new: int, layers: int) -> dict[str, Work]:
        """torch's backends that take (sequences, positions), of which the last `new` are rows: one
        row that sees all positions, or a whole prompt, causal.
        """
        (count, positions), shape = sequences, self.sizes.shape
        query = self._random(count, shape.heads, new, shape.head_dim)
        kept = (2, count, shape.kv_heads, positions, shape.head_dim)
        caches = [self._random(*kept) for _ in range(layers)]
        scores = partial(scaled_dot_product_attention, is_causal=new > 1, enable_gqa=True)

        def attend(backend: SDPBackend) -> None:
            with sdpa_kernel(backend):
                for key, value in caches:
                    scores(query, key, value)

        found: dict[str, Work] = {}
        for name, backend in BACKENDS.items():
            try:
                attend(backend)
            except RuntimeError:
                continue  # it does not take these shapes on this device
            found[name] = partial(attend, backend)
        return found

    def _step(
        self, sequences: Sequence[tuple[int, int]], layers: int = 1, shared: int = 0
    ) -> TimedStep:
        return timed_step(self.sizes.shape, sequences, self.device, self.dtype, layers, shared)

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=self.device, dtype=self.dtype)
