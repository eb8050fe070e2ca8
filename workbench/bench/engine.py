"""How fast the engine is, beside other engines on the same weights, threads and prompts.

Input (CONTRACTS: numbers): distinct random prompts of 128 tokens, 64 new ones, greedy, end of
sequence ignored, prefix caching off; decoding is timed apart from prefill; all contenders take the
same fresh prompts in turn, in an order that alternates from repeat to repeat. prefill_512 is one
prompt of 512 tokens in one step against one forward that computes the last position's logits only.
The ceiling of a row is the model's matrix products alone, measured in the same repeats.

Peers: `transformers` in this process; those of `make bench-peers` (rows @vllm, @llama.cpp) and the
continuous batching of `transformers` (@transformers_cb) each in its own, only one busy at a time.
Kernels that are batch-invariant anyway, as the CPU's are, are measured once for both modes.
paged_over_contiguous is the time of decoding over blocks of 16 over that with a sequence in one
block, so that its keys and values lie in one piece: the same code but for the block size.

With `--device cuda` gpu_engine.py's rows instead, in bfloat16, against that GPU's own ceilings.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from workbench.bench.contenders import Contender, Ours, Prompts
from workbench.bench.gpu_engine import EngineBench, StepSizes
from workbench.bench.gpu_timing import CeilingSizes, measure_gpu_ceiling, require_gpu
from workbench.bench.lineup import ALL, CEILING, CONTIGUOUS, TRANSFORMERS, Lineup, Sizes
from workbench.bench.machine_ceiling import measure_ceiling
from workbench.bench.peer_process import PeerError
from workbench.bench.record import Row
from workbench.bench.rows import plain_row, rate_row
from workbench.models.registry import model_spec

WARM_UP_TOKENS = 4  # new tokens of the repeat that is not counted
BATCHES = (1, 16, 64)
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
    machine = measure_ceiling()
    yield Row("gemm_flops_per_s", machine.flops_per_s, "FLOP/s")
    yield Row("read_bytes_per_s", machine.bytes_per_s, "B/s")
    with Lineup(model, MODES, SIZES) as lineup:
        lineup.bring(peers)
        large = lineup.spec.parameters() > LARGE
        times = repeats or (REPEATS_LARGE if large else REPEATS)[profile]
        random = np.random.default_rng(seed)
        for batch in BATCHES:
            yield from _decode_rows(batch, lineup, times, random)
        yield from _prefill_rows(lineup, PREFILLS * times, random)


def mode_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """How a record of this run was made."""
    dtype = "float32" if settings["device"] == "cpu" else GPU_DTYPE
    return {"batch_invariant": {"no suffix": False, "+invariant": True}, "dtype": dtype}


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


def _decode_rows(
    batch: int, lineup: Lineup, repeats: int, random: np.random.Generator
) -> Iterator[Row]:
    largest = batch == SIZES.sequences

    def decode(contender: Contender, prompts: Prompts, warm_up: bool) -> float:
        return contender.decode(prompts, WARM_UP_TOKENS if warm_up else SIZES.new)

    names = [name for name in lineup.contenders if largest or name != CONTIGUOUS]
    draw = _prompts(random, (batch, SIZES.prompt), lineup)
    rates = _interleave(lineup, names, decode, repeats, draw, f"b{batch}")
    yield from _rows(f"decode_b{batch}", rates, lineup)
    if largest:
        yield from _bookkeeping(f"bookkeeping_share_b{batch}", lineup, repeats)
        times = [whole / paged for whole, paged in zip(rates[CONTIGUOUS], rates[""], strict=True)]
        yield plain_row("paged_over_contiguous", times, "x")


def _prefill_rows(lineup: Lineup, repeats: int, random: np.random.Generator) -> Iterator[Row]:
    def prefill(contender: Contender, prompts: Prompts, warm_up: bool) -> float:
        return contender.prefill(prompts)

    names = [name for name in lineup.contenders if name != CONTIGUOUS]
    draw = _prompts(random, (1, SIZES.prefill), lineup)
    rates = _interleave(lineup, names, prefill, repeats, draw, "prefill")
    yield from _rows(f"prefill_{SIZES.prefill}", rates, lineup)


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


def _rows(name: str, rates: dict[str, list[float]], lineup: Lineup) -> Iterator[Row]:
    """Ours in each mode against `transformers` and the ceiling; the fast mode against the rest."""
    bound = median(rates[CEILING])
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
