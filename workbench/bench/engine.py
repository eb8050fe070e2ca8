"""How fast the engine is, beside other engines on the same weights, threads and prompts.

Input (CONTRACTS: numbers): distinct random prompts of 128 tokens, 64 new ones, greedy, end of
sequence ignored, prefix caching off; decoding is timed apart from prefill; all contenders take the
same fresh prompts in turn, in an order that alternates from repeat to repeat. prefill_512 is one
prompt of 512 tokens in one step against one forward that computes the last position's logits only.
The ceiling of a row is the larger of bytes over bandwidth and operations over arithmetic, of the
format that is read; `@products` is torch's F.linear of the same shapes alone, no attention.
tile_share_of_peak: a product's inner loop, its data in the first-level cache, of multiply-adds on
registers alone. `+busy`: beside one process that keeps a core busy, as on a laptop in use.

Peers: `transformers` in this process; those of `make bench-peers` (rows @vllm, @llama.cpp) and the
continuous batching of `transformers` (@transformers_cb) each in its own, only one busy at a time.
Kernels that are batch-invariant anyway, as the CPU's are, are measured once for both modes.
paged_over_contiguous is the time of decoding over blocks of 16 over that with a sequence in one
block, so that its keys and values lie in one piece: the same code but for the block size.

With `--device cuda` gpu_engine.py's rows instead, in bfloat16, against that GPU's own ceilings.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from workbench.bench.contenders import Contender, Ours, Prompts
from workbench.bench.gpu_engine import EngineBench, StepSizes
from workbench.bench.gpu_timing import CeilingSizes, measure_gpu_ceiling, require_gpu
from workbench.bench.lineup import ALL, CONTIGUOUS, PRODUCTS, TRANSFORMERS, Lineup, Sizes
from workbench.bench.machine_ceiling import Ceiling, measure_ceiling, tile_shares
from workbench.bench.peer_process import PeerError
from workbench.bench.record import Row
from workbench.bench.rows import plain_row, rate_row
from workbench.kernels.isa import VARIABLE
from workbench.models.folders import model_spec

WARM_UP_TOKENS = 4  # new tokens of the repeat that is not counted
BATCHES = (1, 16, 64)
BUSY_BATCHES = (16, 64)
FLOAT_BYTES = 4  # of keys and values
SIZES = Sizes(sequences=max(BATCHES), prompt=128, new=64, prefill=512)
PREFILLS = 3  # prefills a repeat of decoding
REPEATS = {"quick": 3, "default": 9, "full": 21}
REPEATS_LARGE = {"quick": 2, "default": 5, "full": 9}
LARGE = 50_000_000  # parameters
MODES = {"": False, "+invariant": True}  # row suffix -> batch_invariant
GPU_DTYPE = "bfloat16"
Measure = Callable[[Contender, Prompts, bool], float]  # the last: whether it is the warm-up


def run(
    model: str = "tiny-solver",
    profile: str = "default",
    seed: int = 0,
    repeats: int | None = None,
    peers: str = "installed",
    device: str = "cpu",
) -> Iterator[Row]:
    """The rows of `workbench bench engine`, each as soon as it is measured.

    repeats: instead of the profile's; peers: "installed", "none", or names joined by commas, of
    which a GPU's rows know transformers alone.
    """
    model_spec(model)  # an unknown one is refused before anything is measured
    if device != "cpu":
        times = repeats or REPEATS_LARGE[profile]
        yield from _gpu_rows(model, device, times, seed, peers in (ALL, TRANSFORMERS))
        return
    threads = torch.get_num_threads()
    machine = measure_ceiling(threads)
    yield plain_row("tile_share_of_peak", tile_shares(), "fraction")
    with Lineup(model, MODES, SIZES) as lineup:
        lineup.bring(peers)
        large = lineup.spec.parameters() > LARGE
        times = repeats or (REPEATS_LARGE if large else REPEATS)[profile]
        random = np.random.default_rng(seed)
        for batch in BATCHES:
            machine = machine.best(measure_ceiling(threads))
            yield from _decode_rows(batch, lineup, times, random, machine)
        machine = machine.best(measure_ceiling(threads))
        yield from _prefill_rows(lineup, PREFILLS * times, random, machine)
        yield Row("fma_flops_per_s", machine.flops_per_s, "FLOP/s")
        yield Row("gemm_flops_per_s", machine.gemm_flops_per_s, "FLOP/s")
        yield Row("read_bytes_per_s", machine.bytes_per_s, "B/s")
        for name in set(lineup.contenders) & {CONTIGUOUS, PRODUCTS}:
            del lineup.contenders[name]
        lineup.labels.pop(PRODUCTS)
        with _busy_process():
            for batch in BUSY_BATCHES:
                yield from _decode_rows(batch, lineup, times, random, busy="+busy")
            yield from _prefill_rows(lineup, PREFILLS * times, random, busy="+busy")


def mode_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """How a record of this run was made."""
    dtype = "float32" if settings["device"] == "cpu" else GPU_DTYPE
    forced = (
        {"peers_isa": "as ours; llama.cpp as it was compiled"} if VARIABLE in os.environ else {}
    )
    return {"batch_invariant": {"no suffix": False, "+invariant": True}, "dtype": dtype} | forced


def _gpu_rows(model: str, device: str, repeats: int, seed: int, peer: bool) -> Iterator[Row]:
    """The GPU's ceilings, then the engine's rows against them."""
    place = require_gpu(2 * CeilingSizes().read_bytes, f"engine --device {device}", device)
    with torch.cuda.device(place):  # streams, graphs and events are the current one's
        ceiling = measure_gpu_ceiling(place, getattr(torch, GPU_DTYPE))
        torch.cuda.empty_cache()
        yield Row("read_ceiling", ceiling.bytes_per_s / 1e9, "GB/s")
        yield Row("product_ceiling", ceiling.flops_per_s / 1e12, "TFLOP/s")
        bench = EngineBench(model, device, GPU_DTYPE, ceiling, StepSizes(), repeats, seed, peer)
        yield from bench.rows()


@contextmanager
def _busy_process() -> Iterator[None]:
    """One process that always computes."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def _decode_rows(
    batch: int,
    lineup: Lineup,
    repeats: int,
    random: np.random.Generator,
    machine: Ceiling | None = None,
    busy: str = "",
) -> Iterator[Row]:
    largest = batch == SIZES.sequences and CONTIGUOUS in lineup.contenders

    def decode(contender: Contender, prompts: Prompts, warm_up: bool) -> float:
        return contender.decode(prompts, WARM_UP_TOKENS if warm_up else SIZES.new)

    names = [name for name in lineup.contenders if largest or name != CONTIGUOUS]
    draw = _prompts(random, (batch, SIZES.prompt), lineup)
    rates = _interleave(lineup, names, decode, repeats, draw, f"b{batch}{busy}")
    context = SIZES.prompt + SIZES.new // 2
    bound = None if machine is None else batch / _step_seconds(machine, lineup, batch, 1, context)
    yield from _rows(f"decode_b{batch}{busy}", rates, lineup, bound)
    if largest:
        yield from _bookkeeping(f"bookkeeping_share_b{batch}", lineup, repeats)
        times = [whole / paged for whole, paged in zip(rates[CONTIGUOUS], rates[""], strict=True)]
        yield plain_row("paged_over_contiguous", times, "x")


def _step_seconds(
    machine: Ceiling, lineup: Lineup, sequences: int, tokens: int, context: int
) -> float:
    """The least that a step can take: tokens of each sequence, `context` cached before them."""
    ours, spec = lineup.contenders[""], lineup.spec
    assert isinstance(ours, Ours)
    looked_up = 0 if spec.tied else spec.vocab * spec.hidden * FLOAT_BYTES  # a row a token
    weights = max(0, ours.engine.memory.weights - looked_up)
    cached = sequences * context * spec.kv_bytes_per_token(FLOAT_BYTES)
    return machine.seconds(sequences * spec.flops(tokens, context), weights + cached)


def _prefill_rows(
    lineup: Lineup,
    repeats: int,
    random: np.random.Generator,
    machine: Ceiling | None = None,
    busy: str = "",
) -> Iterator[Row]:
    def prefill(contender: Contender, prompts: Prompts, warm_up: bool) -> float:
        return contender.prefill(prompts)

    names = [name for name in lineup.contenders if name != CONTIGUOUS]
    draw = _prompts(random, (1, SIZES.prefill), lineup)
    rates = _interleave(lineup, names, prefill, repeats, draw, f"prefill{busy}")
    bound = None
    if machine is not None:
        bound = SIZES.prefill / _step_seconds(machine, lineup, 1, SIZES.prefill, 0)
    yield from _rows(f"prefill_{SIZES.prefill}{busy}", rates, lineup, bound)


def _interleave(
    lineup: Lineup,
    names: list[str],
    measure: Measure,
    repeats: int,
    draw: Callable[[], Prompts],
    label: str,
) -> dict[str, list[float]]:
    """Each repeat: every contender on the same fresh prompts, in alternating order; one warm-up.

    A peer that fails is dropped, its rates with it.
    """
    rates: dict[str, list[float]] = {name: [] for name in names}
    for repeat in tqdm(range(-1, repeats), desc=label, leave=False):
        prompts = draw()
        gc.collect()
        for name in list(rates)[:: 1 if repeat % 2 else -1]:
            try:
                rate = measure(lineup.contenders[name], prompts, repeat < 0)
            except PeerError as error:
                lineup.drop(name, error)
                del rates[name]
                continue
            if repeat >= 0:
                rates[name].append(rate)
    return rates


def _rows(
    name: str, rates: dict[str, list[float]], lineup: Lineup, bound: float | None
) -> Iterator[Row]:
    """Ours in each mode against `transformers` and the ceiling; the fast mode against the rest."""
    for mode, ours in lineup.modes.items():
        against = (rates[TRANSFORMERS], "tokens/s", TRANSFORMERS, bound)
        yield rate_row(f"{name}{mode}", rates[ours], *against)
    for peer, label in lineup.labels.items():
        if peer != TRANSFORMERS:
            yield rate_row(f"{name}@{peer}", rates[""], rates[peer], "tokens/s", label)


def _bookkeeping(name: str, lineup: Lineup, repeats: int) -> Iterator[Row]:
    for mode, contender in lineup.modes.items():
        ours = lineup.contenders[contender]
        assert isinstance(ours, Ours)
        yield plain_row(f"{name}{mode}", ours.bookkeeping[-repeats:], "fraction")


def _prompts(
    random: np.random.Generator, shape: tuple[int, int], lineup: Lineup
) -> Callable[[], Prompts]:
    return lambda: random.integers(0, lineup.spec.vocab, shape)
