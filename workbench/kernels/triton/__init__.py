"""The GPU's kernels, in Triton; `Kernels` says what they mean, `reference` is their twin.

Products are torch's, or in fixed tiles where bits must not depend on the batch. What is not written
in Triton is the reference's. Float32, float16 and bfloat16. Every launch is asynchronous, and
nothing here waits for the device.

    attention.py    the kernels of attention, their tiles and launches
    graphs.py       which program does what of a step, and decoding steps as CUDA graphs
    products.py     matrix products that do not depend on the batch
    rows.py         norms, SwiGLU, rotation and storing, logits of some columns, tokens

With TRITON_INTERPRET=1, set before triton is first imported, every kernel runs on a CPU, slowly;
there no bfloat16, whose products it gets wrong without an error. Importing this without triton
raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from workbench.errors import ConfigError

try:
    import triton
except ImportError as error:
    raise ConfigError(
        "The Triton kernels need the package triton, which is not installed; it exists for Linux: "
        "pip install 'workbench[gpu]'."
    ) from error

from workbench.kernels import ForwardContext, LayerCache, Part, Quantised
from workbench.kernels.reference import Dense, ReferenceKernels, leave_out
from workbench.kernels.triton import rows
from workbench.kernels.triton.attention import SMALLEST, Tuning, attend, chosen
from workbench.kernels.triton.graphs import (
    Capture,
    DeviceWork,
    GraphCapture,
    RecordedWork,
    Shape,
    StepWork,
    as_it_is,
    place,
    plan_work,
)
from workbench.kernels.triton.products import ADD, GATED, PLAIN, fixed_tiles

INTERPRETED = not isinstance(rows.rms_norm, triton.JITFunction)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = range(16, 129, 8)
OLDEST = (8, 0)  # compute capability: tensor cores that take bfloat16
_FEW_ROWS = 8
_HEADS_AT_ONCE, _OUTPUTS_AT_ONCE, _DIMENSIONS_AT_ONCE = 8, 1024, 512


class TritonKernels(ReferenceKernels):
    """One GPU's kernels for one floating point type.

    batch_invariant: products in fixed tiles, and attention's tiles the same in every kernel.
    tuning: the tiles of attention, else `chosen`. share: what siblings have in common is worked on
    once. Blocks keep a key's dimensions side by side: a new key is then one piece to write, and
    keys are loaded 16 bytes at a time, where a decode over the transpose compiles, for Hopper, to
    loads of two bytes.
    """

    name, selects = "triton", True

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        tuning: Tuning | None = None,
        share: bool = True,
        batch_invariant: bool = False,
        head_dim: int | None = None,
    ) -> None:
        """Raises ConfigError for a dtype, a device or a head_dim that they do not run on.

        And for tiles that differ from kernel to kernel, where bits must not.
        """
        require_runs(device, dtype)
        if head_dim is not None:
            require_head_dim(head_dim)
        if batch_invariant and tuning is not None and not tuning.same_bits:
            raise ConfigError(
                f"batch_invariant=True with {tuning}; it takes joined=True, one number of queries "
                "and of warps for all, or the tiles that are chosen."
            )
        super().__init__(device, dtype, keys_by_position=True)
        self.tuning, self.share = tuning, share
        self.batch_invariant, self.products = batch_invariant, fixed_tiles(dtype.itemsize)
        self.held: tuple[ForwardContext, Shape, DeviceWork] | None = None
        self._capture: Capture = GraphCapture(device) if device.type == "cuda" else as_it_is

    def pack(self, parts: Sequence[Part], gated: bool = False) -> Dense:
        """Each output's weights side by side, as files have them; quantised parts dequantised."""
        tensors = [
            torch.from_numpy(part.dequantise()) if isinstance(part, Quantised) else part
            for part in parts
        ]
        return Dense(torch.cat([t.to(self.device, self.dtype) for t in tensors]).t(), gated)

    def multiply(self, x: torch.Tensor, matrix: Dense, out: torch.Tensor) -> None:
        if self.batch_invariant:
            self.products.multiply(x, matrix.weight.t(), out, PLAIN.value)
        else:
            super().multiply(x, matrix, out)

    def multiply_add(self, x: torch.Tensor, matrix: Dense, out: torch.Tensor) -> None:
        if self.batch_invariant:
            self.products.multiply(x, matrix.weight.t(), out, ADD.value)
        else:
            super().multiply_add(x, matrix, out)

    def multiply_gated(self, x: torch.Tensor, matrix: Dense, out: torch.Tensor) -> None:
        if self.batch_invariant:
            self.products.multiply(x, matrix.weight.t(), out, GATED.value)
            return
        size = matrix.shape[1]
        grid = (len(x), triton.cdiv(size, _OUTPUTS_AT_ONCE))
        rows.gate[grid](x @ matrix.weight, out, out.stride(0), SIZE=size, TAKEN=_OUTPUTS_AT_ONCE)

    def selected_logits(
        self,
        hidden: torch.Tensor,
        wanted: torch.Tensor,
        matrix: Dense,
        numbers: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """out [R, C] = hidden[wanted] @ the outputs `numbers` of matrix; both int64, not gated."""
        count = min(SMALLEST, triton.next_power_of_2(len(numbers)))
        rows.selected_logits[(len(wanted), triton.cdiv(len(numbers), count))](
            *(hidden, hidden.stride(0), wanted, matrix.weight.t(), numbers, out),
            SIZE=hidden.shape[1],
            COUNT=len(numbers),
            COLUMNS=count,
            TAKEN=_DIMENSIONS_AT_ONCE,
        )

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        """Computed in float32, as Llama does."""
        size = x.shape[1]
        rows.rms_norm[(len(x),)](
            *(x, x.stride(0), weight, out, out.stride(0), epsilon),
            SIZE=size,
            PADDED=triton.next_power_of_2(size),
            num_warps=8 if size > 2048 else 4,
        )

    def store_kv(
        self,
        qkv: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        cache: LayerCache,
        context: ForwardContext,
    ) -> None:
        """One kernel rotates and stores."""
        heads = qkv.shape[1] // cache.head_dim - 2 * cache.kv_heads
        work = self._work(context, cache, heads)
        half = cache.head_dim // 2
        rows.rotate_and_store[(len(qkv), triton.cdiv(heads + cache.kv_heads, _HEADS_AT_ONCE))](
            *(qkv, qkv.stride(0), cosine, sine, work.positions, work.sequence),
            *(work.tables, work.tables.shape[1], cache.data[cache.base :]),
            HEADS=heads,
            KV_HEADS=cache.kv_heads,
            HALF=half,
            PADDED=triton.next_power_of_2(half),
            BLOCK_SIZE=cache.block_size,
            TAKEN=_HEADS_AT_ONCE,
        )

    def attend(
        self, qkv: torch.Tensor, out: torch.Tensor, cache: LayerCache, context: ForwardContext
    ) -> None:
        """Prefill in tiles of rows, decode in spans, what siblings share once for all of them."""
        heads = out.shape[1] // cache.head_dim
        work = self._work(context, cache, heads)
        attend(self.tiles(cache.head_dim, heads // cache.kv_heads), qkv, out, cache, work)

    def choose(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        noise: torch.Tensor,
        filters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """In pieces of the vocabulary, added up in order; filters: by torch, a few rows at once."""
        if filters is not None:
            heat = torch.where(temperature > 0, temperature, 1.0)
            some = (each.split(_FEW_ROWS) for each in (logits, heat, filters))
            logits = torch.cat([leave_out(*each) for each in zip(*some, strict=True)])
        return rows.choose(logits, temperature, noise)

    def rows_launched(self, rows: int) -> int:
        """A power of two up to eight, then a multiple of eight: few graphs serve all sizes."""
        if rows <= _FEW_ROWS:
            return int(triton.next_power_of_2(rows))
        return int(triton.cdiv(rows, _FEW_ROWS)) * _FEW_ROWS

    def require_takes(self, block_size: int, head_dim: int) -> None:
        """Head sizes and block sizes that tiles and spans have room for."""
        require_head_dim(head_dim)
        require_block_size(block_size, self.tiles(head_dim, 1))

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph for each size of step. work: of one row a sequence, over one context."""
        return RecordedWork(self, work, self._capture)

    def tiles(self, head_dim: int, group: int) -> Tuning:
        """The tiles for a head size, with room for a row of all heads of a group."""
        tuning = self.tuning or chosen(head_dim, self.dtype.itemsize, self.batch_invariant)
        queries = triton.next_power_of_2(group)
        return replace(
            tuning,
            prefill_queries=max(queries, tuning.prefill_queries),
            span_queries=max(queries, tuning.span_queries),
            shared_queries=max(queries, tuning.shared_queries),
        )

    def plan(self, context: ForwardContext, shape: Shape) -> StepWork:
        """A step's lists."""
        group, block_size, tuning = shape
        return plan_work(context, group, block_size, tuning, self.share)

    def _work(self, context: ForwardContext, cache: LayerCache, heads: int) -> DeviceWork:
        """A step's lists on the device: made for its first layer, kept for the others."""
        group = heads // cache.kv_heads
        shape = (group, cache.block_size, self.tiles(cache.head_dim, group))
        if self.held is None or self.held[0] is not context or self.held[1] != shape:
            if cache.data.dtype != self.dtype:
                raise ConfigError(
                    f"Kernels of {self.dtype} over a cache of {cache.data.dtype}; make them one."
                )
            require_head_dim(cache.head_dim)
            require_block_size(cache.block_size, shape[-1])
            lists = self.plan(context, shape)
            self.held = (context, shape, place(lists, context, self.device))
        return self.held[2]


def require_runs(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError unless kernels of this type run on this device."""
    if dtype not in DTYPES:
        allowed = ", ".join(str(each) for each in DTYPES)
        raise ConfigError(f"Triton kernels of {dtype}; they take {allowed}.")
    if INTERPRETED and dtype == torch.bfloat16:
        raise ConfigError(
            "Triton's interpreter multiplies torch.bfloat16 wrongly; under TRITON_INTERPRET=1 "
            "take torch.float32 or torch.float16."
        )
    if not INTERPRETED and device.type != "cuda":
        raise ConfigError(
            f"Triton kernels on {device}; they run on a CUDA device, or anywhere, slowly, with "
            "TRITON_INTERPRET=1 set before triton is first imported."
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise ConfigError(
            f"Triton kernels on a GPU of compute capability {found}; they need 8.0 (Ampere) or "
            "later."
        )


def require_blocks(size: int, head_dim: int, dtype: torch.dtype, batch_invariant: bool) -> None:
    """Raises ConfigError for blocks that the table's spans are not made of."""
    require_block_size(size, chosen(head_dim, dtype.itemsize, batch_invariant))


def require_block_size(size: int, tuning: Tuning) -> None:
    """Raises ConfigError for blocks that spans are not made of."""
    if size < 1 or size & (size - 1) or size > tuning.span:
        raise ConfigError(
            f"block_size={size}; the Triton kernels take powers of two up to {tuning.span}."
        )


def require_head_dim(head_dim: int) -> None:
    """Raises ConfigError for heads that no tile has room for."""
    if head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"head_dim={head_dim}; the Triton kernels take multiples of {HEAD_DIMS.step} "
            f"from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}."
        )
