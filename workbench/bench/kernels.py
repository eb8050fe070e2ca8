"""The GPU's kernels: bytes and operations a second, beside torch's and what the GPU can do.

decode_attention: one new row for each of many long contexts, whose keys and values are read once;
prefill_attention: whole prompts; cascade_attention: siblings over a shared prefix, against the same
step with the prefix read for each; product_N_rows+invariant: the invariant mode's fixed tiles.
Attention stands against the best of torch's backends, over contiguous keys and values; `@flash`,
`@cudnn`, `@efficient` are the others. Work is recorded as a CUDA graph and timed by the device's
own clock: what Python and launching cost is left out, as a decode step replays a graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from workbench.bench.record import (
    Ceiling,
    Row,
    Timer,
    Work,
    compared_rows,
    measure_ceiling,
    rates_in_turn,
)
from workbench.errors import ConfigError, OutOfMemory
from workbench.host import aligned_zeros
from workbench.kernels import ForwardContext, Kernels, LayerCache
from workbench.models.llama import LlamaModel
from workbench.models.loading import require_device

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
REPEATS = {"quick": 10, "default": 50, "full": 100}
MODE = {"dtype": "bfloat16", "shape": "32 query and 8 key-value heads of 128, blocks of 16"}
READ_BYTES, SIDE = 2 << 30, 8192  # a ceiling's: bytes to read, the side of square matrices


# -- the device --


def require_gpu(
    needed_bytes: int = 2 * READ_BYTES, bench: str = "kernels", name: str = "cuda"
) -> torch.device:
    """A CUDA device. Raises ConfigError where it is not there, OutOfMemory without the room."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"bench {bench} measures a GPU, and torch finds no CUDA device here. Run it on a "
            "machine with one and a CUDA build of torch; bench engine with --device cpu measures "
            "the CPU."
        )
    place = require_device(name)
    free, total = torch.cuda.mem_get_info(place)
    if free < needed_bytes:
        raise OutOfMemory(
            f"bench {bench} needs {needed_bytes:,} bytes of GPU memory; {free:,} of {total:,} are "
            "free. End what else uses the GPU, or give --profile quick."
        )
    return place


def graph_seconds(work: Work, repeats: int) -> list[float]:
    """Seconds of each of `repeats` replays of the work, recorded once after warming up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    seconds = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds


def gpu_ceiling(place: torch.device, dtype: torch.dtype = torch.bfloat16) -> Ceiling:
    """Of a GPU, by default in half precision."""
    with torch.cuda.device(place):
        ceiling = measure_ceiling(place, dtype, graph_seconds, 10, SIDE, READ_BYTES)
        torch.cuda.empty_cache()
    return ceiling


# -- kernels --


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is timed. layers: each with its own keys and values, so that no cache holds them."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    decodes: tuple[int, int] = (64, 2048)  # sequences, positions of each
    decode_layers: int = 4
    prompts: tuple[int, int] = (4, 2048)  # sequences, tokens of each
    siblings: tuple[int, int, int] = (16, 1024, 32)  # sequences, shared and own positions
    sibling_layers: int = 32
    hidden: int = 2048
    read_bytes: int = READ_BYTES
    side: int = SIDE

    @property
    def position_elements(self) -> int:
        """Of a position's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def needed_bytes(self) -> int:
        """GPU memory in half precision: the decodes' caches, torch's as large, and room."""
        sequences, positions = self.decodes
        caches = 2 * self.decode_layers * sequences * positions * 2 * self.position_elements
        return caches + 2 * self.read_bytes + (2 << 30)


def run(profile: str = "default", repeats: int | None = None) -> Iterator[Row]:
    """The rows of `workbench bench kernels`.

    Raises ConfigError without a GPU or triton, OutOfMemory on a GPU that is too small.
    """
    sizes = Sizes()
    if profile == "quick":
        sizes = Sizes(decodes=(64, 1024), decode_layers=2, prompts=(2, 1024), sibling_layers=8)
    gpu = require_gpu(sizes.needed_bytes)
    yield from KernelBench(gpu, torch.bfloat16, sizes, repeats=repeats or REPEATS[profile]).rows()


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Random rows and caches [layers] of one step of attention."""

    qkv: torch.Tensor
    out: torch.Tensor
    caches: tuple[LayerCache, ...]
    context: ForwardContext

    def attend(self, kernels: Kernels) -> None:
        """Every layer's attention."""
        for cache in self.caches:
            kernels.attend(self.qkv, self.out, cache, self.context)


@dataclass(frozen=True, slots=True)
class KernelBench:
    """Rows of one device and type, with whatever timer; `rows` alone needs triton, an extra."""

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    timer: Timer = graph_seconds
    repeats: int = 1

    def rows(self) -> Iterator[Row]:
        """Ceilings first, then kernel by kernel: decoding by GB/s of keys and values, prompts by
        TFLOP/s of the unmasked half, siblings by rows a second, products by TFLOP/s.
        """
        from workbench.kernels.triton import TritonKernels  # noqa: PLC0415 - an extra

        made, sizes = partial(TritonKernels, self.device, self.dtype), self.sizes
        kernels, invariant = made(batch_invariant=False), made(batch_invariant=True)
        given = self.device, self.dtype, self.timer, self.repeats, sizes.side, sizes.read_bytes
        ceiling = measure_ceiling(*given)
        yield from ceiling.rows()
        size, tokens = self.dtype.itemsize, sizes.prompts[1]
        for name, sequences, new, layers, unit in (
            ("decode_attention", sizes.decodes, 1, sizes.decode_layers, "GB/s"),
            ("prefill_attention", sizes.prompts, tokens, 1, "TFLOP/s"),
        ):
            count, positions = sequences
            read = layers * count * positions * sizes.position_elements * size
            pairs = layers * count * (new * (positions - new) + new * (new + 1) // 2)
            flops = 4 * sizes.heads * sizes.head_dim * pairs
            step = self.step([(positions - new, new)] * count, layers)
            peers = self.torch_attention(sequences, new, layers)
            ours, least = partial(step.attend, kernels), ceiling.seconds(flops, read)
            amount = read / 1e9 if unit == "GB/s" else flops / 1e12
            yield from self._compared(name, ours, amount, unit, peers, least)

        (count, prefix, own), layers = sizes.siblings, sizes.sibling_layers
        step = self.step([(prefix + own - 1, 1)] * count, layers, prefix)
        ours, theirs = (partial(step.attend, each) for each in (kernels, made(share=False)))
        peers = {"plain_decode": theirs}
        yield from self._compared("cascade_attention", ours, layers * count, "rows/s", peers)

        inputs, outputs = sizes.hidden, 4 * sizes.hidden
        matrices = [
            invariant.pack([self._random(outputs, inputs)]) for _ in range(2 * sizes.decode_layers)
        ]  # more than a cache keeps

        def multiply(by: Kernels, left: torch.Tensor, right: torch.Tensor) -> None:
            for matrix in matrices:
                by.multiply(left, matrix, right)

        for count in (sizes.decodes[0], tokens):
            rows = self._random(count, inputs), self._random(count, outputs)
            name, flops = f"product_{count}_rows+invariant", 2 * count * inputs * outputs
            work = flops, (inputs * outputs + count * (inputs + outputs)) * size
            least, amount = (
                len(matrices) * each for each in (ceiling.seconds(*work), flops / 1e12)
            )
            peers = {"torch": partial(multiply, kernels, *rows)}
            ours = partial(multiply, invariant, *rows)
            yield from self._compared(name, ours, amount, "TFLOP/s", peers, least)

    def step(
        self, sequences: Sequence[tuple[int, int]], layers: int = 1, shared: int = 0
    ) -> AttentionStep:
        """(cached, new) tokens of each sequence, in shuffled blocks; the first `shared` tokens of
        all sequences lie in the same blocks.
        """
        sizes = self.sizes
        new, ends = [n for _, n in sequences], [sum(pair) for pair in sequences]
        blocks = [-(-end // sizes.block_size) for end in ends]
        block_elements = sizes.block_size * sizes.position_elements
        names = np.random.default_rng(0).permutation(sum(blocks)) * block_elements
        tables = np.zeros((len(ends), max(blocks)), np.int64)
        for s, (last, count) in enumerate(zip(np.cumsum(blocks), blocks)):
            tables[s, :count] = names[last - count : last]
        tables[:, : shared // sizes.block_size] = tables[0, : shared // sizes.block_size]
        context = ForwardContext(
            positions=np.concatenate([np.arange(c, c + n, dtype=np.int64) for c, n in sequences]),
            sequence=np.repeat(np.arange(len(new), dtype=np.int64), new),
            query_start=np.cumsum([0, *new]).astype(np.int32),
            context_len=np.array(ends, np.int32),
            block_offsets=tables,
        )
        shape = sizes.block_size, sizes.kv_heads, sizes.head_dim
        slab, aligned = sum(blocks) * block_elements, not (tables % 16).any()
        data = self._random(layers * slab)
        caches = tuple(LayerCache(data, i * slab, *shape, aligned) for i in range(layers))
        qkv = self._random(sum(new), (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim)
        out = self._random(sum(new), sizes.heads * sizes.head_dim)
        return AttentionStep(qkv, out, caches, context)

    def _compared(
        self,
        name: str,
        work: Work,
        amount: float,
        unit: str,
        peers: Mapping[str, Work],
        least_s: float | None = None,
    ) -> Iterator[Row]:
        """Our rate, `amount` by seconds, against the best peer's, then against the others'."""
        ceiling = None if least_s is None else amount / least_s
        ours, *others = (
            [amount / seconds for seconds in self.timer(each, self.repeats)]
            for each in (work, *peers.values())
        )
        theirs = sorted(zip(peers, others), key=lambda peer: -median(peer[1]))
        yield from compared_rows(name, ours, unit, dict(theirs), ceiling)

    def torch_attention(self, sequences: tuple[int, int], new: int, layers: int) -> dict[str, Work]:
        """torch's backends that take (sequences, positions), of which the last `new` are rows: one
        row that sees all positions, or a whole prompt, causal.
        """
        (count, positions), sizes = sequences, self.sizes
        query = self._random(count, sizes.heads, new, sizes.head_dim)
        kept = (2, count, sizes.kv_heads, positions, sizes.head_dim)
        caches = [self._random(*kept) for _ in range(layers)]
        forms = {"": (query, {"is_causal": new > 1, "enable_gqa": True})}
        if new == 1:  # a group's heads as rows of one query: faster on a CPU
            forms[", packed"] = query.view(count, sizes.kv_heads, -1, sizes.head_dim), {}

        def attend(backend: SDPBackend, rows: torch.Tensor, how: dict[str, Any]) -> None:
            with sdpa_kernel(backend):
                for key, value in caches:
                    scaled_dot_product_attention(rows, key, value, **how)

        found: dict[str, Work] = {}
        for (name, backend), (form, asked) in product(BACKENDS.items(), forms.items()):
            work = partial(attend, backend, *asked)
            try:
                with warnings.catch_warnings(action="ignore"):  # why each other one is not used
                    work()
            except RuntimeError:
                continue  # it does not take these shapes on this device
            found[name + form] = work
        return found

    def _random(self, *size: int) -> torch.Tensor:
        drawn = torch.randn(*size, device=self.device, dtype=self.dtype)
        if drawn.is_cuda:
            return drawn
        kept = torch.from_numpy(aligned_zeros(drawn.nbytes)).view(self.dtype)  # as a cache is
        return kept.copy_(drawn.view(-1)).view(size)


def attention_rates(
    model: LlamaModel, count: int, positions: int, block_size: int, repeats: int
) -> list[list[float]]:
    """How often a second all layers' attention decodes for `count` sequences of so many positions:
    over shuffled blocks, and by torch's best over contiguous keys and values, in turn.
    """
    spec, kernels = model.spec, model.kernels
    sizes = Sizes(spec.heads, spec.kv_heads, spec.head_dim, block_size)
    bench = KernelBench(model.device, model.dtype, sizes)
    step = bench.step([(positions - 1, 1)] * count, spec.layers)
    peers = bench.torch_attention((count, positions), 1, spec.layers).values()
    own = kernels.record(partial(step.attend, kernels))
    ours, *others = rates_in_turn([own, *peers], 1, repeats)
    return [ours, max(others, key=median)]
