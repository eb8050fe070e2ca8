"""The GPU's kernels, in Triton; `Kernels` says what they mean and is their twin.

Products are torch's, or in fixed tiles where bits must not depend on the batch; in attention they
never do. What is not written in Triton is the reference's. Float32, float16 and bfloat16. Every
launch is asynchronous, and nothing here waits for the device.

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

import torch

from workbench.errors import ConfigError

try:
    import triton
except ImportError as error:
    raise ConfigError(
        "The Triton kernels need the package triton, which is not installed; it exists for Linux: "
        "pip install -e '.[gpu]' in the checkout."
    ) from error

from workbench.kernels import Angles, ForwardContext, LayerCache, Part
from workbench.kernels.reference import Dense, Kernels
from workbench.kernels.triton import attention, products, rows
from workbench.kernels.triton.attention import SMALLEST, Shape, Tiles, attend
from workbench.kernels.triton.graphs import (
    ROW_SIZES,
    SPAN_SIZES,
    Capture,
    DeviceWork,
    GraphCapture,
    RecordedWork,
    StepWork,
    at_least,
    place,
    plan_work,
    sizes_up_to,
)
from workbench.kernels.triton.products import ADD, GATED, PLAIN, FixedTiles

INTERPRETED = not isinstance(rows.rms_norm, triton.JITFunction)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = range(16, 129, 8)
BLOCK_SIZES = [1 << power for power in range(9)]  # what a span is made of
OLDEST = (8, 0)  # compute capability: tensor cores that take bfloat16


class TritonKernels(Kernels):
    """One GPU's kernels for one floating point type.

    batch_invariant: products in fixed tiles. share: what siblings have in common is worked on once.
    Blocks keep a key's dimensions side by side: a new key is then one piece to write, and keys are
    loaded 16 bytes at a time, where the transpose would be loaded two at a time on Hopper.
    """

    name = "triton"

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        tiles: Tiles | None = None,
        share: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        """Raises ConfigError for a dtype or a device that they do not run on."""
        require_served(device, dtype)
        super().__init__(device, dtype, keys_by_position=True)
        full, self.share, self.batch_invariant = dtype.itemsize > 2, share, batch_invariant
        half = attention.INVARIANT if batch_invariant else Tiles()
        self.tiles = tiles or (attention.FULL_PRECISION if full else half)
        self.products = products.FULL_PRECISION if full else FixedTiles()
        self.held: tuple[ForwardContext, Shape, DeviceWork] | None = None
        self._capture: Capture = GraphCapture(device) if device.type == "cuda" else lambda w: w

    def pack(self, parts: Sequence[Part], gated: bool = False) -> Dense:
        """Each output's weights side by side, as files have them; quantised parts dequantised."""
        return Dense(self.joined(parts).t(), gated)

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
        grid = (len(x), triton.cdiv(size, rows.OUTPUTS.value))
        rows.gate[grid](x @ matrix.weight, out, out.stride(0), size)

    def columns(self, matrix: Dense, numbers: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(matrix.weight.t(), 0, numbers, out=out)

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
            *(hidden.shape[1], len(numbers), count),
        )

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        """Computed in float32, as Llama does."""
        size = x.shape[1]
        rows.rms_norm[(len(x),)](
            *(x, x.stride(0), weight, out, out.stride(0), epsilon, size),
            num_warps=8 if size > 2048 else 4,
        )

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        rows.layer_norm[(len(x),)](
            *(x, x.stride(0), weight, out, out.stride(0), epsilon, x.shape[1])
        )

    def gelu(self, row: torch.Tensor, out: torch.Tensor) -> None:
        size = out.shape[1]
        rows.gelu[(len(out), triton.cdiv(size, rows.OUTPUTS.value))](row, out, out.stride(0), size)

    def store_kv(
        self, qkv: torch.Tensor, angles: Angles, cache: LayerCache, context: ForwardContext
    ) -> None:
        """One kernel rotates and stores."""
        heads = qkv.shape[1] // cache.head_dim - 2 * cache.kv_heads
        work = self._work(context, cache, heads)
        at_once = rows.HEADS_AT_ONCE.value
        rows.rotate_and_store[(len(qkv), triton.cdiv(heads + cache.kv_heads, at_once))](
            *(qkv, qkv.stride(0), angles, (work.positions, work.sequence, work.tables)),
            *(work.tables.shape[1], cache.data[cache.base :], work.shape),
        )

    def attend(
        self, qkv: torch.Tensor, out: torch.Tensor, cache: LayerCache, context: ForwardContext
    ) -> None:
        """Prefill in tiles of rows, decode in spans, what siblings share once for all of them."""
        work = self._work(context, cache, out.shape[1] // cache.head_dim)
        attend(self.tiles.fitting(work.shape), qkv, out, cache, work)

    choose = staticmethod(rows.choose)

    def likely(self, logits: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows at once, by keys in the order of logits, and of ids among equal ones."""
        bits = (logits.float() + 0.0).view(torch.int32)  # -0.0 is 0.0
        keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
        keys -= torch.arange(logits.shape[1], device=logits.device)
        return keys.topk(most).indices, rows.log_totals(logits)

    def rows_launched(self, rows: int, most: int) -> int:
        """One of a few sizes, for which cuBLAS and graphs are then set up."""
        return at_least(rows, sizes_up_to(most, ROW_SIZES))

    def contexts_recorded(self, longest: int) -> list[int]:
        """A CUDA graph each, for each number of rows: a dozen at most."""
        spans = sizes_up_to(triton.cdiv(longest, self.tiles.span), SPAN_SIZES)
        return [min(count * self.tiles.span, longest) for count in reversed(spans)]

    def require_takes(self, block_size: int, head_dim: int) -> None:
        """Head sizes and block sizes that tiles and spans have room for."""
        require_served(self.device, self.dtype, head_dim, block_size)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph for each size of context. work: of one row a sequence, over one context."""
        return RecordedWork(self, work, self._capture)

    def plan(self, context: ForwardContext, shape: Shape) -> StepWork:
        """A step's lists."""
        return plan_work(context, shape, self.tiles.fitting(shape), self.share)

    def _work(self, context: ForwardContext, cache: LayerCache, heads: int) -> DeviceWork:
        """A step's lists on the device: made for its first layer, kept for the others."""
        head_shape = cache.kv_heads, heads // cache.kv_heads, cache.head_dim
        shape = Shape(*head_shape, cache.block_size, cache.aligned)
        if self.held is None or self.held[0] is not context or self.held[1] != shape:
            assert cache.data.dtype == self.dtype, (cache.data.dtype, self.dtype)
            lists = self.plan(context, shape)
            self.held = (context, shape, place(lists, context, shape, self.device))
        return self.held[2]


def require_served(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int | None = None,
    block_size: int | None = None,
) -> None:
    """Raises ConfigError unless kernels of this type run on this device.

    And, where they are given, for heads that no tile and for blocks that no span has room for.
    """
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
    if head_dim is not None and head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"head_dim={head_dim}; the Triton kernels take multiples of {HEAD_DIMS.step} "
            f"from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}."
        )
    if block_size is not None and block_size not in BLOCK_SIZES:
        raise ConfigError(
            f"block_size={block_size}; the Triton kernels take powers of two up to "
            f"{BLOCK_SIZES[-1]}."
        )
