"""What generating text costs one engine: with and without a KV cache, in static and in continuous
batches, in blocks and in one piece a sequence; the rows of notebook 13.

Every request is random tokens, greedy, its end of sequence ignored, no prefix shared. Contenders
take turns, repeat by repeat; a value is the median, its bounds the slowest and the fastest.

A contiguous cache reserves the longest sequence for each request. Its bytes are counted; its time
is that of the same kernels over blocks so long that one of them holds all of a request.
"""

from __future__ import annotations

import gc
import math
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from tqdm.auto import tqdm

from workbench.bench.kernels import attention_rates, gpu_ceiling
from workbench.bench.record import Ceiling, in_turn
from workbench.config import AtLeastOne, check, format_size, parse_size, refused
from workbench.core import SamplingParams, StepResult
from workbench.core import Sequence as Request
from workbench.engine.engine import Engine, Weights
from workbench.engine.sampling import StopChecker
from workbench.engine.scheduler import Scheduler
from workbench.errors import OutOfMemory
from workbench.experiments.provenance import counted, describe, machine_facts
from workbench.host import available_memory
from workbench.kvcache.manager import KVCacheManager
from workbench.models.loading import arithmetic_dtype, require_device
from workbench.models.registry import model_spec
from workbench.models.spec import ModelSpec
from workbench.trace import Recorder

STATIC, CONTINUOUS = "static", "continuous"
PAGED, CONTIGUOUS = "paged", "contiguous"
PARTS = ("forward", "sampling", "scheduling", "other")
BLOCK_SIZE = 16
_LISTS = ("prompt_tokens", "new_tokens", "batches", "counted_batches", "block_sizes", "lengths")
_STEP_TOKENS = 2048  # of one step, at least one a sequence
_WARM_UP = 8  # new tokens before the first that is timed


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """What is measured, of one model; lengths in tokens.

    stride: without a cache a step's time follows from its length, whatever the prompt; every
    so-manieth length is measured, those between are interpolated. lengths: shortest and longest
    prompt, and as many new tokens, of a request in a batch, each drawn evenly.
    """

    model: str = "dummy:gpt2"
    device: str = "cpu"
    prompt_tokens: tuple[int, ...] = (16, 64, 256, 512)
    new_tokens: tuple[int, ...] = (200, 500, 1000)
    stride: AtLeastOne = 50
    batches: tuple[int, ...] = (1, 4, 16, 64)
    counted_batches: tuple[int, ...] = (1, 4, 16, 64, 256, 512)
    block_sizes: tuple[int, ...] = (1, 4, 16, 64, 128)
    block_batch: AtLeastOne = 16  # of the engines whose blocks are timed
    lengths: tuple[int, ...] = (16, 96)
    kv_memory: int | str = "4GiB"  # in which sequences are counted until it is full
    repeats: AtLeastOne = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)
        parse_size(self.kv_memory)
        for name in _LISTS:
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise refused(type(self), name, getattr(self, name), "one or more, each from 1")
        if self.longest > (most := self.spec.max_model_len):
            raise refused(type(self), "lengths", self.lengths, f"at most half of {most} tokens")
        if min(self.prompt_tokens) + min(self.new_tokens) > most:
            allowed = f"with new_tokens at most the {most} positions of {self.model}"
            raise refused(type(self), "prompt_tokens", self.prompt_tokens, allowed)

    @property
    def spec(self) -> ModelSpec:
        """The model's shapes."""
        return model_spec(self.model)

    @property
    def longest(self) -> int:
        """Tokens of the longest request of a batch."""
        return 2 * max(self.lengths)

    def requests(self, count: int) -> list[tuple[int, int]]:
        """(prompt, new) tokens of each request: the first of more are those of fewer."""
        ends = min(self.lengths), max(self.lengths) + 1
        drawn = np.random.default_rng(self.seed).integers(*ends, (count, 2)).tolist()
        return [(prompt, new) for prompt, new in drawn]


_FEWER: Any = {"prompt_tokens": (16,), "new_tokens": (100, 200), "batches": (1, 8),
               "lengths": (16, 32)}  # fmt: skip
PROFILES = {
    "quick": GenerationPlan("tiny-solver", stride=10, kv_memory="64MiB", batches=(1, 4, 16)),
    "default": GenerationPlan(**_FEWER, block_sizes=(1, 16, 128), block_batch=4, repeats=2),
    "full": GenerationPlan(),
}
PROFILES["thesis"] = replace(PROFILES["full"], device="cuda")


def provenance(plan: GenerationPlan, *notes: str) -> str:
    """What a figure says was measured."""
    spec, machine = plan.spec, describe(machine_facts(plan.device))
    kind = "random weights" if plan.model.startswith("dummy:") else "its own weights"
    name = plan.model.removeprefix("dummy:")
    told = f"{name} ({kind}, {spec.parameters() / 1e6:,.1f} M parameters), {plan.device}; "
    told += f"{counted(plan.repeats, 'repeat')}, seed {plan.seed}; {machine}."
    return "\n".join([told, *notes])


def ceiling_of(plan: GenerationPlan) -> Ceiling:
    """Operations and bytes a second that the device reaches, measured now; float32 on a CPU."""
    if plan.device == "cpu":
        from workbench.bench import ceilings  # noqa: PLC0415 - needs numba, a GPU does not

        return ceilings.multiply_add_ceiling()
    dtype = arithmetic_dtype("auto", plan.device, plan.spec)
    return gpu_ceiling(require_device(plan.device), dtype)


def _params(new_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)


def _engine(
    plan: GenerationPlan,
    batch: int,
    longest: int,
    weights: Weights | None = None,
    block_size: int = BLOCK_SIZE,
    **settings: Any,
) -> Engine:
    """One with room for a batch of the longest requests; OutOfMemory where there is none."""
    num_blocks = batch * -(-longest // block_size)
    if plan.device == "cpu":  # a system promises more memory than it has
        needed, room = num_blocks * plan.spec.block_bytes(block_size, 4), available_memory()
        if needed > room:
            told = f"{format_size(needed)} of KV for {batch} sequences"
            raise OutOfMemory(f"{told}; {format_size(room)} are available.")
    return Engine(
        plan.model,
        device=plan.device,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=batch,
        max_num_batched_tokens=max(_STEP_TOKENS, batch, longest),
        max_model_len=longest,
        enable_prefix_caching=False,
        watermark=0.0,  # else the last of a batch waits for blocks that nothing needs
        weights=weights,
        **settings,
    )


def _add(engine: Engine, requests: Sequence[tuple[int, int]], seed: int) -> None:
    """Queue random prompts, the same for the same seed."""
    draw = np.random.default_rng(seed)
    for prompt, new in requests:
        engine.add(draw.integers(0, engine.spec.vocab, prompt).tolist(), _params(new))


def _seconds(engine: Engine) -> float:
    """Of all that it has to do."""
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def _spread(values: ArrayLike) -> dict[str, float]:
    low, value, high = np.quantile(np.asarray(values, np.float64), (0, 0.5, 1)).tolist()
    return {"value": value, "low": low, "high": high}


# -- a KV cache, on and off --


def cache_rows(plan: GenerationPlan) -> pd.DataFrame:
    """Seconds until so many tokens of one request alone, with and without a KV cache.

    Columns prompt_tokens, new_tokens, metric (seconds | ratio: without over with), kv_cache,
    computed_tokens, value, low, high. What the model has no positions for is left out.
    """
    pairs = [(p, n) for p, n in product(plan.prompt_tokens, plan.new_tokens)
             if p + n <= plan.spec.max_model_len]  # fmt: skip
    longest, shortest = max(map(sum, pairs)), min(pairs)[0]
    kept = _engine(plan, 1, longest)
    anew = _engine(plan, 1, longest, kept.weights, use_kv_cache=False)
    generated: dict[int, list[NDArray[np.float64]]] = {prompt: [] for prompt, _ in pairs}
    steps = []
    for repeat in tqdm(range(plan.repeats), desc="with and without a KV cache"):
        seed = plan.seed + repeat
        for cached in in_turn((True, False), repeat):
            if not cached:
                steps.append(_computed_anew(anew, range(shortest, longest), seed, plan.stride))
                continue
            for prompt, stamps in generated.items():
                stamps.append(_stamps(kept, prompt, max(n for p, n in pairs if p == prompt), seed))
    rows = []
    for prompt, new in pairs:
        on = [stamps[new - 1] for stamps in generated[prompt]]
        off = [seconds[prompt - shortest :][:new].sum() for seconds in steps]
        own = {"prompt_tokens": prompt, "new_tokens": new, "metric": "seconds", "kv_cache": True}
        rows.append({**own, "computed_tokens": prompt + new - 1, **_spread(on)})
        own |= {"kv_cache": False, "computed_tokens": new * prompt + new * (new - 1) // 2}
        rows.append({**own, **_spread(off)})
        rows.append({**own, "metric": "ratio", **_spread(np.divide(off, on))})
    return pd.DataFrame(rows)


def _stamps(engine: Engine, prompt: int, new: int, seed: int) -> NDArray[np.float64]:
    """Seconds from the start until each of the new tokens was there, [new]."""
    _add(engine, [(prompt, _WARM_UP)], seed)
    _seconds(engine)
    gc.collect()
    _add(engine, [(prompt, new)], seed)
    start, found = time.perf_counter(), []
    while engine.has_work:  # a token each step
        engine.step()
        found.append(time.perf_counter() - start)
    return np.array(found)


def _computed_anew(engine: Engine, lengths: range, seed: int, stride: int) -> NDArray[np.float64]:
    """Seconds of a step without a cache at each of the lengths, [lengths]: it computes what a
    prompt as long does, whatever part of it was generated. Those between strides are interpolated.
    """
    measured, taken = sorted({*lengths[::stride], lengths[-1]}), []
    for length in (measured[0], *measured):  # the first time is not counted
        _add(engine, [(length, 1)], seed)
        taken.append(_seconds(engine))
    seconds: NDArray[np.float64] = np.interp(lengths, measured, taken[1:])
    return seconds


# -- batches --


def batch_rows(plan: GenerationPlan, ceiling: Ceiling) -> pd.DataFrame:
    """The same requests, queued at once, in continuous and in static batches of so many.

    Columns batch, kind, metric, part, value, low, high, error. metric tokens_per_s: of generated
    ones; mfu: operations that the requests need, by time and the ceiling; padding: of the tokens
    computed, those that no request needs; share: of the time, by part. value is NaN and `error`
    says why where a batch does not fit the memory.
    """
    rows: list[dict[str, Any]] = []
    weights = _engine(plan, 1, plan.longest).weights
    for batch in tqdm(plan.batches, desc="batches"):
        engines = {}
        for kind in (CONTINUOUS, STATIC):
            try:
                engines[kind] = _engine(plan, batch, plan.longest, weights, batching=kind)
            except OutOfMemory as error:
                cannot = {"metric": "tokens_per_s", "value": math.nan, "error": str(error)}
                rows.append({"batch": batch, "kind": kind, **cannot})
        requests = plan.requests(max(4, 2 * batch))
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in engines}
        for repeat in range(plan.repeats):
            for kind in in_turn(engines, repeat):
                _batched(engines[kind], [(prompt, 2) for prompt, _ in requests[:batch]], 0)
                found[kind].append(_batched(engines[kind], requests, plan.seed + repeat))
        flops = sum(plan.spec.flops(p + new - 1, 0, logits=new) for p, new in requests)
        needed, sampled = sum(map(sum, requests)) - len(requests), sum(new for _, new in requests)
        for kind, repeats in found.items():
            seconds = np.array([each["seconds"] for each in repeats])
            told: dict[str, ArrayLike] = {
                "tokens_per_s": sampled / seconds,
                "mfu": flops / seconds / ceiling.flops_per_s,
                "padding": [1 - needed / each["computed"] for each in repeats],
            }
            own = {"batch": batch, "kind": kind}
            rows += [{**own, "metric": name, **_spread(each)} for name, each in told.items()]
            for part in PARTS:
                shares = [each[part] for each in repeats] / seconds
                rows.append({**own, "metric": "share", "part": part, **_spread(shares)})
    return pd.DataFrame(rows)


def _batched(engine: Engine, requests: Sequence[tuple[int, int]], seed: int) -> dict[str, float]:
    """Seconds of all requests, as a whole and by part, and tokens computed."""
    recorder, before = Recorder("batch"), (engine.forward_s, engine.sampling_s)
    engine.trace_as(recorder, "batch")
    _add(engine, requests, seed)
    gc.collect()
    seconds, steps = _seconds(engine), recorder.trace().steps
    told = {"forward": engine.forward_s - before[0], "sampling": engine.sampling_s - before[1]}
    told["scheduling"] = float(steps["schedule_s"].sum())
    told["other"] = seconds - sum(told.values())
    computed = int(steps[["prefill_tokens", "decode_tokens"]].to_numpy().sum())
    return {**told, "seconds": seconds, "computed": computed}


# -- blocks --


def held(plan: GenerationPlan, batch: int, block_size: int = BLOCK_SIZE) -> pd.DataFrame:
    """Steps of a continuous batch as scheduler and cache manager count them, without a model.

    Columns running, blocks_active, tokens_held.
    """
    num_blocks = batch * -(-plan.longest // block_size)
    scheduler = Scheduler(
        KVCacheManager(num_blocks, block_size, enable_prefix_caching=False),
        np.arange(num_blocks),
        max_num_seqs=batch,
        max_num_batched_tokens=max(_STEP_TOKENS, batch),
        max_model_len=plan.longest,
        watermark=0.0,
        stops=StopChecker([b""], ()),
    )
    for number, (prompt, new) in enumerate(plan.requests(max(4, 2 * batch))):
        scheduler.add(Request(number, [0] * prompt, prompt, _params(new)))
    counts = []
    while (step := scheduler.schedule()) is not None:
        counts.append(scheduler.counts)
        scheduler.update(step, StepResult(np.zeros(len(step.sampling), np.int64)))
    return pd.DataFrame(counts)[["running", "blocks_active", "tokens_held"]]


def memory_rows(plan: GenerationPlan) -> pd.DataFrame:
    """Bytes of KV at the fullest step of each batch, and room wasted; exactly counted.

    Columns metric, kind (paged, in blocks of 16 | contiguous, max_model_len for each), batch,
    block_size, value. metric bytes: over `batch`; most: the largest batch that kv_memory holds, its
    value; waste: of the room taken, what holds no token, over all steps of the largest batch.
    """
    spec, room = plan.spec, parse_size(plan.kv_memory)
    itemsize = arithmetic_dtype("auto", plan.device, spec).itemsize
    whole = spec.kv_bytes_per_token(itemsize) * spec.max_model_len
    block = spec.block_bytes(BLOCK_SIZE, itemsize)

    def paged(batch: int) -> int:
        return block * int(held(plan, batch)["blocks_active"].max())

    rows: list[dict[str, Any]] = []
    for batch in plan.counted_batches:
        for kind, value in ((PAGED, paged(batch)), (CONTIGUOUS, batch * whole)):
            rows.append({"metric": "bytes", "kind": kind, "batch": batch, "value": value})
    # what is held is taken to grow with the batch, of which each has a block
    fits = bisect_right(range(1, room // block + 2), room, key=paged)
    for kind, batch in ((PAGED, fits), (CONTIGUOUS, room // whole)):
        rows.append({"metric": "most", "kind": kind, "batch": batch, "value": room})
    largest = max(plan.counted_batches)
    for size in plan.block_sizes:
        steps = held(plan, largest, size).sum()
        taken = {"kind": PAGED, "block_size": size}
        value = 1 - steps["tokens_held"] / (steps["blocks_active"] * size)
        rows.append({"metric": "waste", **taken, "value": value})
    taken = {"kind": CONTIGUOUS, "block_size": spec.max_model_len}
    value = 1 - steps["tokens_held"] / (steps["running"] * spec.max_model_len)
    rows.append({"metric": "waste", **taken, "value": value})
    return pd.DataFrame(rows)


def block_rows(plan: GenerationPlan) -> pd.DataFrame:
    """Decoding's seconds over the block size, beside those of one block for each sequence.

    Columns metric (seconds | ratio: over contiguous), kind, block_size, value, low, high; of
    `block_batch` requests, each of the longest prompt and as many new tokens. metric attention, on
    a CPU: time of all layers' attention alone, in blocks of 16, over that of torch's
    scaled_dot_product_attention over contiguous keys and values, contexts half grown.
    """
    contiguous = 1 << (plan.longest - 1).bit_length()  # a power of two, as GPU kernels want it
    weights, engines = None, {}
    for size in (*plan.block_sizes, contiguous):
        engines[size] = _engine(plan, plan.block_batch, plan.longest, weights, size)
        weights = engines[size].weights
    half = plan.longest // 2
    found: dict[int, list[float]] = {size: [] for size in engines}
    for repeat in tqdm(range(-1, plan.repeats), desc="block sizes"):  # the first is not counted
        for size in in_turn(engines, repeat):
            engine, new = engines[size], _WARM_UP if repeat < 0 else half
            _add(engine, [(half, new)] * plan.block_batch, plan.seed + max(0, repeat))
            engine.step()
            while (counts := engine.scheduler.counts) is not None and counts.prefill_tokens:
                engine.step()
            if (seconds := _seconds(engine)) and repeat >= 0:
                found[size].append(seconds)
    rows = []
    for size, times in found.items():
        own = {"kind": CONTIGUOUS if size == contiguous else PAGED, "block_size": size}
        rows.append({**own, "metric": "seconds", **_spread(times)})
        rows.append({**own, "metric": "ratio", **_spread(np.divide(times, found[contiguous]))})
    if plan.device == "cpu":
        model, cached = engines[contiguous].executor.model, plan.longest * 3 // 4
        sizes = plan.block_batch, cached, BLOCK_SIZE
        own = {"metric": "attention", "kind": PAGED, "block_size": BLOCK_SIZE}
        ours, theirs = attention_rates(model, *sizes, 9 * plan.repeats)
        rows.append({**own, **_spread(np.divide(theirs, ours))})
    return pd.DataFrame(rows)
