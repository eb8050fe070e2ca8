"""How an engine's memory is divided, in bytes, and what engines that share one must know.

    kv = total - weights - activations - other        num_blocks = kv // block_bytes

Activations are measured by two steps, of the most tokens and of the longest contexts: what the
executor's buffers hold, the highest sum of what torch and numpy allocated beside them, and what
recorded decoding steps keep on a GPU. `other` is what a GPU's memory holds that is not torch's
(context, compiled kernels), charged to every engine of a process though they share it; 0 on a CPU:
the interpreter is not charged.
"""

from __future__ import annotations

import math
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.profiler import profile

from workbench.config import EngineConfig, format_size, parse_size
from workbench.core import SamplingParams, StepPlan, WantedLogits
from workbench.engine.executor import Executor
from workbench.engine.sampling import rows_of
from workbench.errors import ConfigError, DeviceOutOfMemory, OutOfMemory, StepError
from workbench.host import collection_paused, total_memory
from workbench.kvcache.arena import BlockShape, KVArena
from workbench.kvcache.storage import ArenaStorage, BlockStorage, KVStorage
from workbench.models.llama import LlamaModel
from workbench.models.loading import arithmetic_dtype
from workbench.models.registry import model_spec
from workbench.models.spec import ModelSpec

if TYPE_CHECKING:
    import pandas as pd

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler announces itself otherwise
_GRAIN = 1 << 16  # peaks are rounded up to it: Python's own allocations differ a little each time


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Where an engine's bytes go. The parts that `total` pays for add up to no more than it."""

    total: int
    weights: int
    activations: int
    other: int
    kv: int
    block_bytes: int
    num_blocks: int

    @property
    def table(self) -> pd.DataFrame:
        """One row a part: part, bytes, share of total."""
        import pandas as pd  # noqa: PLC0415 - slow, and an engine runs without

        parts = {n: getattr(self, n) for n in ("weights", "activations", "other", "kv", "total")}
        shares = [size / self.total for size in parts.values()]
        return pd.DataFrame({"part": list(parts), "bytes": list(parts.values()), "share": shares})

    def _repr_html_(self) -> str:
        return str(self.table.to_html(index=False))


def plan_memory(
    model: LlamaModel,
    config: EngineConfig,
    max_model_len: int,
    num_blocks: int | None = None,
    kv_held: bool = False,
) -> MemoryProfile:
    """The division of what `config` gives, all memory or the cache's alone; or of num_blocks.

    Where it gives neither, as many blocks as max_num_seqs requests of max_model_len need, within a
    quarter of the device. kv_held: the cache's bytes are taken already, as another engine's arena.
    Raises OutOfMemory when a device has not the room, and when one request of max_model_len would
    not fit: it names the model and the longest that does.
    """
    name, size = config.model, config.block_size
    with explain_out_of_memory(name, model):
        largest = config.max_num_batched_tokens, config.max_num_seqs, max_model_len
        activations = measure_activations(model, *largest, size)
    block_bytes = model.spec.block_bytes(size, model.dtype.itemsize)
    other, paid = non_torch_bytes(model.device), activations if config.activations_in_total else 0
    fixed = model.weight_bytes + paid + other
    if num_blocks is not None:
        kv = num_blocks * block_bytes
    elif config.kv_memory is not None:
        kv = parse_size(config.kv_memory)
    elif config.memory is not None:
        kv = total_bytes(config.memory, model.device) - fixed
    else:
        enough = config.max_num_seqs * math.ceil(max_model_len / size) * block_bytes
        kv = min(enough, device_memory(model.device) // 4 - fixed)
    profile = MemoryProfile(
        total=kv + fixed,
        weights=model.weight_bytes,
        activations=activations,
        other=other,
        kv=kv,
        block_bytes=block_bytes,
        num_blocks=max(0, kv // block_bytes),
    )
    _require_device_room(profile, model.device, kv_held, name)
    _require_one_request(profile, max_model_len, size, name)
    return profile


def total_bytes(memory: int | float | str, device: torch.device) -> int:
    """Bytes of a `memory` setting: a size, or a float in (0, 1], a share of the device's memory."""
    return int(memory * device_memory(device)) if isinstance(memory, float) else parse_size(memory)


@contextmanager
def explain_out_of_memory(
    name: str, model: LlamaModel, activations: int | None = None, kv: int | None = None
) -> Iterator[None]:
    """A device that runs out of memory inside raises OutOfMemory with the numbers.

    Bytes; None: not known yet.
    """
    try:
        yield
    except (RuntimeError, StepError) as error:
        cause = error.__cause__ or error
        on_host = "can't allocate memory" in str(cause)  # has no class of its own
        if not on_host and not isinstance(cause, torch.OutOfMemoryError):
            raise
        sizes = {"weights": model.weight_bytes, "activations": activations, "KV": kv}
        told = [f"{k} {format_size(n)}" for k, n in sizes.items() if n is not None]
        free = free_memory(model.device)
        told += [] if free is None else [f"free {format_size(free)}"]
        raise DeviceOutOfMemory(
            f"{name}: {model.device} has no room for a step of the largest size "
            f"({', '.join(told)}). Give a smaller max_num_batched_tokens or max_num_seqs, less "
            "`memory`, `kv_memory` or `num_blocks`, or end what else uses the device."
        ) from error


def _require_device_room(
    profile: MemoryProfile, device: torch.device, kv_held: bool, name: str
) -> None:
    """Before blocks are made, or memory is asked of a system that promises more than it has."""
    total, free = device_memory(device), free_memory(device)
    if free is None:
        needed, room, beside = profile.kv, total, ""
        where = f"this machine has {format_size(total)}"
    else:
        needed, room = profile.activations + (0 if kv_held else profile.kv), free
        beside = f" beside activations of {format_size(profile.activations)}"
        where = f"{device} has {format_size(total)}, of which {format_size(free)} are free"
    if needed > room:
        raise DeviceOutOfMemory(
            f"{name}: a KV cache of {format_size(profile.kv)}{beside} is asked for; {where}. "
            "Give less `memory`, `kv_memory` or `num_blocks`."
        )


def _require_one_request(profile: MemoryProfile, longest: int, block_size: int, name: str) -> None:
    needed = math.ceil(longest / block_size)
    if profile.num_blocks >= needed:
        return
    missing = needed * profile.block_bytes - profile.kv
    fits = profile.num_blocks * block_size
    named = ("weights", "activations", *(("other",) if profile.other else ()))
    parts = ", ".join(f"{part} {format_size(getattr(profile, part))}" for part in named)
    advice = ": no request fits." if fits < 2 else f", or max_model_len={fits} at most."
    raise OutOfMemory(
        f"{name}: {format_size(profile.total)} leave {profile.num_blocks} blocks of {block_size} "
        f"tokens ({parts}); one request of max_model_len={longest} needs {needed}. "
        f"{missing:,} bytes are missing. Give that much more{advice}"
    )


@collection_paused()
def measure_activations(
    model: LlamaModel,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int = 16,
) -> int:
    """Bytes beside weights and KV that the largest step needs: buffers, and what comes and goes.

    Steps are measured of the most tokens, evenly spread and of one prompt that is scored whole, and
    of the longest contexts: some kernels leave what they sum up of each part of a context beside
    it. They go through two layers: the others work in the same buffers, one after the other,
    and of the last one only what is asked for is computed. Not measured: logits of a vocabulary
    that scoring asks for.
    """
    spec, some = model.spec, model.first_layers(2)
    shape = len(some.layers), spec.kv_heads, spec.head_dim
    storage = KVStorage(1, block_size, *shape, model.dtype, model.device)
    executor = Executor(some, storage, max_num_batched_tokens, max_num_seqs, max_model_len)
    tokens = min(max_num_batched_tokens, max_num_seqs * max_model_len)
    samples = spec.value_head is None
    seqs = min(max_num_seqs, tokens)
    executor.submit(_even_plan(1, 1, samples)).result()  # first-call allocations are not the step's
    alone = min(max_num_batched_tokens, max_model_len)
    evenly, longest = (tokens, seqs, samples), (seqs, seqs, samples, max_model_len - 1)
    prompt = _even_plan(alone, 1, samples, max_model_len - alone, block_size)
    scored = (WantedLogits(np.arange(alone), np.zeros(1, np.int64)),)
    peaks = []
    for plan in (
        _even_plan(*evenly, block_size=block_size),
        _even_plan(*longest, block_size),
        replace(prompt, wanted=scored),
    ):
        with peak_on(model.device) as peak:
            executor.submit(plan).result()
        peaks.append(peak.bytes)
    return executor.buffers.nbytes + max(peaks) + measure_graphs(executor, spec.layers)


def measure_graphs(executor: Executor, layers: int) -> int:
    """Bytes of a GPU that recording the decoding steps of all sizes takes for good.

    What torch keeps for them is the same for any number of layers, which use it one after the
    other; what the driver keeps, beside torch, is for every launch: as much again for every layer.
    """
    device = executor.model.device
    if device.type == "cpu":
        return 0

    def held() -> tuple[int, int]:
        torch.cuda.empty_cache()  # what is idle would hide what is taken
        return torch.cuda.memory_reserved(device), non_torch_bytes(device)

    before = held()
    executor.record_steps()
    torchs, drivers = (max(0, now - then) for now, then in zip(held(), before))
    return torchs + drivers * layers // len(executor.model.layers)


def _even_plan(
    tokens: int, seqs: int, samples: bool, cached: int = 0, block_size: int = 1
) -> StepPlan:
    """A step of so many tokens; every block is the same one, since contents do not count.

    samples: each sequence samples a token; else each wants one output of a value head.
    cached: positions of each sequence before the step's.
    """
    lengths = np.full(seqs, tokens // seqs, np.int32)
    lengths[: tokens % seqs] += 1
    ends, context = np.cumsum(lengths), lengths + np.int32(cached)
    rows = (ends - 1 if samples else ends[:0]).astype(np.int64)
    filtered = SamplingParams(top_p=0.9)  # the filter that takes most room
    return StepPlan(
        step=0,
        tokens=np.zeros(tokens, np.int64),
        positions=np.concatenate([np.arange(cached, n, dtype=np.int64) for n in context]),
        query_start=np.concatenate([[0], ends]).astype(np.int32),
        context_len=context,
        block_offsets=np.zeros((seqs, math.ceil(int(context.max()) / block_size)), np.int64),
        sampling=rows_of(filtered, rows, context[: len(rows)].astype(np.int64)),
        wanted=() if samples else (WantedLogits(ends.astype(np.int64) - 1, np.zeros(1, np.int64)),),
    )


# -- what a device has, and what a step takes of it --


def device_memory(device: torch.device) -> int:
    """Bytes of the device's memory, of which shares are taken."""
    return total_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[1]


def free_memory(device: torch.device) -> int | None:
    """Bytes to be had now, torch's idle ones included; None where the system promises any."""
    if device.type == "cpu":
        return None
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + idle


def non_torch_bytes(device: torch.device) -> int:
    """Bytes taken of a GPU by what is not torch's: contexts, kernels, other processes; a CPU's 0.

    An interpreter of Python is not charged.
    """
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


@dataclass(slots=True)
class Peak:
    """What `peak_on` found. bytes: 0 until its `with` has ended."""

    bytes: int = 0


@contextmanager
def peak_on(device: torch.device) -> Iterator[Peak]:
    """Measures the most bytes held at one time, allocated inside: those of torch on a GPU, those of
    torch, Python and numpy on a CPU.

    A CPU's two peaks are added although they need not coincide: an upper bound, by little. torch's
    comes from its profiler's list of allocations and releases, so garbage must wait meanwhile: its
    release would count against what is held. Where Python's allocations are traced already they go
    on to be, with another peak.
    """
    peak = Peak()
    if device.type == "cpu":
        with profile(use_cpu=True, profile_memory=True, use_kineto=True) as profiled:
            if not (is_traced := tracemalloc.is_tracing()):
                tracemalloc.start()
            tracemalloc.reset_peak()
            traced = -tracemalloc.get_traced_memory()[0]
            try:
                yield peak
            finally:
                traced += tracemalloc.get_traced_memory()[1]
                if not is_traced:
                    tracemalloc.stop()
        results: Any = profiled.kineto_results
        events = [e for e in results.events() if e.name() == "[memory]"]
        changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
        highest = max(accumulate(changes, initial=traced))
    else:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        highest = torch.cuda.max_memory_allocated(device) - before
    peak.bytes = math.ceil(highest / _GRAIN) * _GRAIN


# -- one memory for several engines --


def longest_request(config: EngineConfig, spec: ModelSpec) -> int:
    """max_model_len, by default the model's own; ConfigError for more than the model can serve."""
    name, max_model_len = config.model, config.max_model_len or spec.max_model_len
    if max_model_len > spec.max_model_len:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds the {spec.max_model_len} positions of {name}; "
            "give at most that, or None."
        )
    if spec.sliding_window is not None and max_model_len > spec.sliding_window:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds the sliding window of {name}, in which a token "
            f"sees {spec.sliding_window} positions; sliding-window attention is not supported: "
            f"give max_model_len={spec.sliding_window} at most."
        )
    return max_model_len


def block_shape(
    model: str,
    *,
    name: str | None = None,
    block_size: int = 16,
    max_model_len: int | None = None,
    dtype: str = "auto",
    device: str = "cpu",
) -> BlockShape:
    """A model's blocks as an arena must know them; reads its config, no weights.

    name: in the arena, default the model's; two engines of one model need two. Its floor is one
    request of max_model_len (default: the model's own), a block's cost the operations of computing
    its tokens. Raises ModelError or ConfigError as Engine does.
    """
    spec = model_spec(model)
    own: Any = {"max_model_len": max_model_len, "dtype": dtype, "device": device}
    longest = longest_request(EngineConfig(model=model, block_size=block_size, **own), spec)
    element = arithmetic_dtype(dtype, device, spec).itemsize
    return BlockShape(
        name=name or model,
        layers=spec.layers,
        cell_bytes=spec.block_bytes(block_size, element) // spec.layers,
        element_bytes=element,
        floor_blocks=-(-longest // block_size),
        block_cost=float(spec.flops(block_size, 0)),
    )


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """An arena, and a model's name in it."""

    arena: KVArena
    name: str

    @contextmanager
    def unless_built(self) -> Iterator[None]:
        """An engine that cannot be built leaves no cache of its own behind."""
        is_new = not self.arena.has_cache(self.name)
        try:
            yield
        except BaseException:
            if is_new:
                self.arena.drop(self.name)
            raise

    def require_guaranteed(
        self, config: EngineConfig, max_model_len: int, model: LlamaModel
    ) -> None:
        """ConfigError unless the arena was made for the model's blocks, lies on its device and
        guarantees an engine's longest request.
        """
        own = ("memory", "kv_memory", "num_blocks")
        given = [name for name in own if getattr(config, name) is not None]
        if given:
            raise ConfigError(
                f"Engine got arena and {' and '.join(given)}; an engine in an arena has no memory "
                "of its own: the arena's size and kv_share say what it may hold."
            )
        shape = self.arena.packing(self.name).shape
        needed = -(-max_model_len // config.block_size)
        if shape.floor_blocks < needed:
            raise ConfigError(
                f"The arena guarantees {self.name!r} {shape.floor_blocks} blocks, one request of "
                f"max_model_len={max_model_len} needs {needed} of {config.block_size} tokens; give "
                "block_shape() and Engine the same max_model_len and block_size."
            )
        element = model.dtype.itemsize
        cell = model.spec.block_bytes(config.block_size, element) // model.spec.layers
        self.arena.require_cells(self.name, cell, element)
        where = model.device if self.arena.storage is None else self.arena.storage.bytes.device
        if where != model.device:
            raise ConfigError(
                f"The arena's memory is on {where}, {self.name!r} on {model.device}; give both "
                "engines of an arena one device."
            )

    def storage(self, config: EngineConfig, model: LlamaModel) -> BlockStorage:
        """This model's view of the arena's bytes, which the first engine asks for.

        ConfigError while another engine has its blocks under the same name.
        """
        if self.arena.storage is None:
            self.arena.storage = ArenaStorage(self.arena, model.device)
        bytes_: ArenaStorage = self.arena.storage
        if self.name in bytes_.users:
            raise ConfigError(
                f"An engine has its blocks under {self.name!r} in this arena already; give each "
                "its own name: block_shape(..., name=...) and Engine(..., arena_name=...)."
            )
        shape = (config.block_size, model.spec.kv_heads, model.spec.head_dim)
        return bytes_.model(self.name, *shape, model.dtype)
