"""How fast the engine is, beside other engines on the same weights, threads and prompts.

Input (CONTRACTS: numbers): distinct random prompts of 128 tokens, 64 new ones, greedy, end of
sequence ignored, prefix caching off; decoding is timed apart from prefill; all contenders take the
same fresh prompts in turn, in an order that alternates from repeat to repeat. prefill_512 is one
prompt of 512 tokens in one step against one forward that computes the last position's logits only.
No suffix: the fastest kernels; `+invariant`: those whose rows have the same bits in whatever batch
(measured once where these are the same kernels, as on the CPU). The ceiling of a row is the larger
of bytes over bandwidth and operations over arithmetic, of the format that is read. Peers:
`transformers` in this process; those of `make bench-peers` (@vllm, @llama.cpp) each in its own.
`@products` is torch's F.linear of the same shapes alone, no attention.

On a CPU: tile_share_of_peak is a product's inner loop, its data in the first-level cache, of
multiply-adds on registers alone; `+busy` is beside one process that keeps a core busy;
paged_over_contiguous is the time of decoding over blocks of 16 over that with a sequence in one
block, the same code but for the block size.

With `--device cuda`, in bfloat16: steps are timed as a user meets them (scheduling, launching,
waiting for the sampled tokens), and random weights at true size (`dummy:llama-3.2-1b`) time as real
ones do. step_bN is one decode step of N sequences, over its floor; invariant_cost_* the time of the
invariant mode over that of the fast one; memory_* bytes, as the profiling pass measured them.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tqdm.auto import tqdm

from workbench.bench.ceilings import (
    Ceiling,
    CeilingSizes,
    measure_gpu_ceiling,
    multiply_add_ceiling,
    require_gpu,
)
from workbench.bench.peers import PEERS, PeerError, PeerProcess
from workbench.bench.record import Row, median_row, memory_rows, middle_half
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.errors import ConfigError, nearest
from workbench.models.gguf import GGUFFile, read_config
from workbench.models.loading import GGUFWeights
from workbench.models.registry import DUMMY, find_model, model_spec
from workbench.models.spec import ModelSpec

REPEATS = {"quick": 3, "default": 9, "full": 21}
REPEATS_LARGE = {"quick": 2, "default": 5, "full": 9}
LARGE = 50_000_000  # parameters
PREFILLS = 3  # prefills a repeat of decoding
MODES = ("", "+invariant")  # suffixes of rows
GPU_DTYPE = "bfloat16"
PRODUCTS, CONTIGUOUS, TRANSFORMERS = "products", "contiguous", "transformers"
PEERS_FOLDER = Path("build/peers")
BLOCK_SIZE = 16
FORCED = "WORKBENCH_ISA"  # the variable that makes kernels take a lesser instruction set
Prompts = NDArray[np.int64]  # [sequences, tokens]
Rates = dict[str, list[float]]  # tokens/s of each contender and repeat


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is timed: batches of decodes, tokens of their prompts and after, and of prefills.

    busy: batches that are timed again beside a busy process. warm_ups: repeats that are not
    counted, and the new tokens of each.
    """

    batches: tuple[int, ...] = (1, 16, 64)
    prompt: int = 128
    new: int = 64
    prefills: tuple[int, ...] = (512,)
    busy: tuple[int, ...] = (16, 64)
    warm_ups: tuple[int, int] = (1, 4)

    @property
    def longest(self) -> int:
        """Positions of the longest sequence, in whole blocks."""
        return _round_up(max(self.prompt + self.new, max(self.prefills) + 1))

    @property
    def step(self) -> int:
        """Tokens of the largest step: every prompt of the largest batch at once."""
        return max(max(self.batches) * self.prompt, *self.prefills)


CPU_SIZES = Sizes()
GPU_SIZES = Sizes(prefills=(512, 2048), warm_ups=(2, 64))  # kernels compile, graphs are captured


def _round_up(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


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
    spec = model_spec(model)  # an unknown one is refused before anything is measured
    large = device != "cpu" or spec.parameters() > LARGE
    times = repeats or (REPEATS_LARGE if large else REPEATS)[profile]
    if device != "cpu":
        place = require_gpu(2 * CeilingSizes().read_bytes, f"engine --device {device}", device)
        with torch.cuda.device(place):  # streams, graphs and events are the current one's
            ceiling = measure_gpu_ceiling(place, getattr(torch, GPU_DTYPE))
            torch.cuda.empty_cache()
            yield Row("read_ceiling", ceiling.bytes_per_s / 1e9, "GB/s")
            yield Row("product_ceiling", ceiling.flops_per_s / 1e12, "TFLOP/s")
            with EngineBench(model, GPU_SIZES, times, seed, peers, device, GPU_DTYPE) as bench:
                yield from gpu_rows(bench, ceiling)
        return
    from workbench.bench.tile_peak import tile_shares  # noqa: PLC0415 - needs numba, a GPU does not

    machine = multiply_add_ceiling()
    yield median_row("tile_share_of_peak", tile_shares(), "fraction")
    with EngineBench(model, CPU_SIZES, times, seed, peers) as bench:
        yield from cpu_rows(bench, machine)


def mode_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """How a record of this run was made."""
    dtype = "float32" if settings["device"] == "cpu" else GPU_DTYPE
    forced = {"peers_isa": "as ours; llama.cpp as it was compiled"} if FORCED in os.environ else {}
    return {"batch_invariant": {"no suffix": False, "+invariant": True}, "dtype": dtype} | forced


# -- contenders: decode(prompts, new_tokens) is the tokens/s of all sequences together after each
# has its first token; prefill(prompts) the prompt tokens/s of one, [1, tokens], to its first --


class Ours:
    """The engine itself. bookkeeping: one share a decode, 1 - (forward + sampling) / wall."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.bookkeeping: list[float] = []

    def decode(self, prompts: Prompts, new_tokens: int) -> float:
        engine = self.engine
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        for prompt in prompts.tolist():
            engine.add(prompt, params)
        engine.step()  # all prompts fit one step: the first token of each
        busy, start = engine.forward_s + engine.sampling_s, time.perf_counter()
        while engine.has_work:
            engine.step()
        wall = time.perf_counter() - start
        self.bookkeeping.append(1 - (engine.forward_s + engine.sampling_s - busy) / wall)
        return len(prompts) * (new_tokens - 1) / wall

    def prefill(self, prompts: Prompts) -> float:
        start = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        self.engine.generate(prompts.tolist(), params)
        return prompts.size / (time.perf_counter() - start)


class Transformers:
    """`transformers`: generate with a static batch and its own cache; its forward for prefill.

    folder: config and weights; None: the model's config alone, and weights as `transformers` draws
    them. Raises PeerError, with the reason, where it is not installed, has no room, or fails.
    """

    def __init__(self, model: str, folder: Path | None, device: str, dtype: str) -> None:
        self._device, kind = torch.device(device), getattr(torch, dtype)
        with _failures_told(), self._device:
            import transformers  # noqa: PLC0415 - optional extra

            kinds: Any = transformers.AutoModelForCausalLM
            if folder is None:
                named = find_model(model.removeprefix(DUMMY), weights=False)
                config = transformers.AutoConfig.from_pretrained(named)
                self._model: Any = kinds.from_config(config, dtype=kind)
            else:
                self._model = kinds.from_pretrained(folder, dtype=kind)
            self._model.to(self._device, kind).eval()
            # an end-of-sequence rule would cost time
            rules = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
            self._model.generation_config = rules

    def decode(self, prompts: Prompts, new_tokens: int) -> float:
        """Between the stamps that a stopping criterion takes once every token is there."""
        stamps: list[float] = []

        def stamp(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            stamps.append(self._now())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        ids = torch.from_numpy(prompts).to(self._device)
        settings = {"max_new_tokens": new_tokens, "stopping_criteria": [stamp]}
        with _failures_told(), torch.inference_mode():
            mask = torch.ones_like(ids)
            self._model.generate(ids, attention_mask=mask, do_sample=False, **settings)
        return len(prompts) * (len(stamps) - 1) / (stamps[-1] - stamps[0])

    def prefill(self, prompts: Prompts) -> float:
        """One forward with a key-value cache and the last position's logits only."""
        start = time.perf_counter()
        ids = torch.from_numpy(prompts).to(self._device)
        with _failures_told(), torch.inference_mode():
            self._model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        return prompts.size / (self._now() - start)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@contextmanager
def _failures_told() -> Iterator[None]:
    """PeerError for what an installation, a config or a full memory raises."""
    try:
        yield
    except (ImportError, RuntimeError, ValueError, OSError, TypeError) as problem:
        told = textwrap.shorten(str(problem), 200, placeholder=" ...")
        raise PeerError(f"{type(problem).__name__}: {told}") from problem


class Linears:
    """torch's own products: each of a step's, float32 F.linear, of the engine's fused shapes.

    Each layer has weights of its own, so they come from memory as an engine's do. No attention, no
    norms, no sampling.
    """

    def __init__(self, spec: ModelSpec) -> None:
        shapes = (
            (spec.qkv_columns, spec.hidden),
            (spec.hidden, spec.heads * spec.head_dim),
            (2 * spec.intermediate, spec.hidden),
            (spec.hidden, spec.intermediate),
        )
        self.layers = [torch.randn(shape) for _ in range(spec.layers) for shape in shapes]
        self.head = torch.randn(spec.vocab, spec.hidden)

    def decode(self, prompts: Prompts, new_tokens: int) -> float:
        """Of a decode step's products: a row a sequence, all with logits."""
        return self._rate(len(prompts), len(prompts))

    def prefill(self, prompts: Prompts) -> float:
        """Of the products of all rows, logits of the last one only."""
        return self._rate(prompts.size, 1)

    def _rate(self, rows: int, logit_rows: int) -> float:
        inputs = {w.shape[1]: torch.randn(rows, w.shape[1]) for w in self.layers}
        last = torch.randn(logit_rows, self.head.shape[1])
        passes, start = 0, time.perf_counter()
        with torch.inference_mode():
            while passes == 0 or time.perf_counter() - start < 0.3:
                for weight in self.layers:
                    torch.nn.functional.linear(inputs[weight.shape[1]], weight)
                torch.nn.functional.linear(last, self.head)
                passes += 1
        return passes * rows / (time.perf_counter() - start)


Contender = Ours | Transformers | Linears | PeerProcess


def peer_files(model: str, written: Path) -> tuple[Path, Path | None]:
    """A model as a Hugging Face folder, and its .gguf file where it is one.

    A .gguf file is written once as a folder under `written`, named by its content, with the same
    values in float32: `transformers` and vLLM are to compute with what our engine computes with.
    """
    where = find_model(model)
    if not where.is_file():
        return where, None
    opened = GGUFFile(where)
    weights = GGUFWeights(opened)
    folder = written / f"{where.stem}-{weights.digest()[:12]}"
    if folder.is_dir():
        return folder, where
    partial_ = written / f".{folder.name}.{os.getpid()}"
    shutil.rmtree(partial_, ignore_errors=True)
    partial_.mkdir(parents=True)
    tensors = {}
    for name in sorted(weights.names):
        stored = weights.read(name)
        if not isinstance(stored, torch.Tensor):
            stored = torch.from_numpy(stored.dequantise())
        tensors[name] = stored.float().contiguous()
    save_file(tensors, partial_ / "model.safetensors", metadata={"format": "pt"})
    kind = opened.metadata["general.architecture"]
    config = read_config(opened) | {"model_type": kind, "dtype": "float32"}
    (partial_ / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    partial_.replace(folder)
    return folder, where


def chosen_peers(peers: str) -> list[str]:
    """The names of "installed" (all), "none", or names joined by commas; ConfigError for others."""
    known = [TRANSFORMERS, *PEERS]
    if peers in ("installed", "none"):
        return known if peers == "installed" else []
    names = [name.strip() for name in peers.split(",")]
    for name in names:
        if name not in known:
            allowed = ", ".join(("installed", "none", *known))
            raise ConfigError(
                f"There is no peer {name!r}; allowed: {allowed}.{nearest(name, known)}"
            )
    return names


# -- a run --


class EngineBench:
    """Our engine in each mode beside its peers, of one model on one device.

    A context manager: it ends the peers' processes. A peer that is missing or fails is left out
    with a warning that says why; rows without `transformers` say it too. On a CPU `transformers`
    always takes part.
    """

    def __init__(
        self,
        model: str,
        sizes: Sizes,
        repeats: int,
        seed: int = 0,
        peers: str = "installed",
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        """Raises OutOfMemory, with the numbers, where the device is too small for the model."""
        wanted = chosen_peers(peers)
        self.model, self.sizes, self.repeats = model, sizes, repeats
        self.spec = model_spec(model)
        self._random = np.random.default_rng(seed)
        make = partial(self._engine, device=device, dtype=dtype)
        self.labels: dict[str, str] = {}  # peer's name in the rows -> with its version
        self.lacking: str | None = None  # why there is no `transformers`, where it is wanted
        self.contenders: dict[str, Contender] = {"": Ours(make(False))}
        self.modes = dict.fromkeys(MODES, "")  # row suffix -> contender
        if not self.ours("").engine.executor.model.kernels.batch_invariant:
            self.contenders["+invariant"] = Ours(make(True))
            self.modes = {mode: mode for mode in MODES}
        folder, gguf = None, None
        if not model.startswith(DUMMY):
            folder, gguf = peer_files(model, PEERS_FOLDER / "models")
        on_cpu = torch.device(device).type == "cpu"
        if on_cpu:
            self.contenders[PRODUCTS] = Linears(self.spec)
            one_block = _round_up(sizes.prompt + sizes.new)
            self.contenders[CONTIGUOUS] = Ours(make(False, block_size=one_block))
        if on_cpu or TRANSFORMERS in wanted:
            self._bring(TRANSFORMERS, lambda: Transformers(model, folder, device, dtype))
        self.labels |= {PRODUCTS: "torch's products alone"} if on_cpu else {}
        for name in [each for each in wanted if on_cpu and each != TRANSFORMERS]:
            self._bring(name, partial(self._peer, name, gguf if name == "llama.cpp" else folder))

    def _engine(self, invariant: bool, *, block_size: int = BLOCK_SIZE, **given: Any) -> Engine:
        sizes = self.sizes
        a_batch = max(sizes.batches) * -(-(sizes.prompt + sizes.new) // block_size)
        return Engine(
            self.model,
            block_size=block_size,
            num_blocks=max(a_batch, -(-sizes.longest // block_size)),
            max_num_seqs=max(sizes.batches),
            max_num_batched_tokens=sizes.step,
            max_model_len=sizes.longest,
            enable_prefix_caching=False,
            batch_invariant=invariant,
            **given,
        )

    def _peer(self, name: str, model: Path | None) -> PeerProcess:
        if model is None:
            raise PeerError(f"{self.model} has no files that {name} reads")
        sizes = self.sizes
        settings = {
            "model": str(model),
            "threads": torch.get_num_threads(),
            "max_seqs": max(sizes.batches),
            "max_tokens": sizes.step,
            "max_model_len": sizes.longest,
        }
        return PeerProcess(name, PEERS_FOLDER, settings)

    def _bring(self, name: str, make: Callable[[], Contender]) -> None:
        try:
            self.contenders[name] = peer = make()
        except PeerError as error:
            self.drop(name, error)
        else:
            version = getattr(peer, "version", None)
            self.labels[name] = name if version is None else f"{name} {version}"

    def drop(self, name: str, reason: PeerError) -> None:
        """Go on without a peer that failed."""
        self.labels.pop(name, None)
        peer = self.contenders.pop(name, None)
        if isinstance(peer, PeerProcess):
            peer.close()
        if name == TRANSFORMERS:
            self.lacking = f"no {TRANSFORMERS}: {reason}"
            warnings.warn(f"Rows have {self.lacking}", stacklevel=2)
        else:
            warnings.warn(f"No rows @{name}: {reason}", stacklevel=2)

    def __enter__(self) -> EngineBench:
        return self

    def __exit__(self, *error: object) -> None:
        for peer in self.contenders.values():
            if isinstance(peer, PeerProcess):
                peer.close()

    def ours(self, mode: str) -> Ours:
        """Our engine as a mode's rows have it."""
        found = self.contenders[self.modes[mode]]
        assert isinstance(found, Ours)
        return found

    def ceiling(self, machine: Ceiling, sequences: int, tokens: int, cached: int) -> float:
        """Tokens/s at most: each sequence has so many in the step, and so many cached before."""
        model = self.ours("").engine.executor.model
        weights = sum(product.nbytes for product in model.products)
        held = sequences * cached * self.spec.kv_bytes_per_token(model.dtype.itemsize)
        flops = sequences * self.spec.flops(tokens, cached)
        return sequences * tokens / machine.seconds(flops, weights + held)

    def decode_ceiling(self, machine: Ceiling, batch: int) -> float:
        """Of decoding, contexts half grown."""
        return self.ceiling(machine, batch, 1, self.sizes.prompt + self.sizes.new // 2)

    def decodes(self, batch: int, contiguous: bool = False) -> Rates:
        """Rates of every contender; contiguous: of the one with that memory, too."""
        return self._interleaved((batch, self.sizes.prompt), self.repeats, True, contiguous)

    def prefills(self, tokens: int, repeats: int) -> Rates:
        """Rates of every contender."""
        return self._interleaved((1, tokens), repeats, False)

    def _interleaved(
        self, shape: tuple[int, int], repeats: int, decode: bool, contiguous: bool = False
    ) -> Rates:
        """Each repeat: every contender on the same fresh prompts, in alternating order."""
        rates: Rates = {n: [] for n in self.contenders if contiguous or n != CONTIGUOUS}
        warm_ups, few = self.sizes.warm_ups
        for repeat in tqdm(range(-warm_ups, repeats), desc="x".join(map(str, shape)), leave=False):
            prompts = self._random.integers(0, self.spec.vocab, shape)
            gc.collect()
            for name in list(rates)[:: 1 if repeat % 2 else -1]:
                peer, new = self.contenders[name], self.sizes.new if repeat >= 0 else few
                try:
                    rate = peer.decode(prompts, new) if decode else peer.prefill(prompts)
                except PeerError as error:
                    self.drop(name, error)
                    del rates[name]
                    continue
                if repeat >= 0:
                    rates[name].append(rate)
        return rates

    def rows(self, name: str, rates: Rates, ceiling: float | None = None) -> Iterator[Row]:
        """Ours in each mode against `transformers` and the ceiling; the fast one against others."""
        row = partial(median_row, unit="tokens/s")
        theirs: dict[str, Any] = {"peer": self.lacking or self.labels.get(TRANSFORMERS)}
        theirs |= {"peers": rates.get(TRANSFORMERS), "ceiling": ceiling}
        for mode, contender in self.modes.items():
            yield row(f"{name}{mode}", rates[contender], **theirs)
        for peer in [each for each in self.labels if each != TRANSFORMERS and each in rates]:
            label = self.labels[peer]
            yield row(f"{name}@{peer}", rates[""], peer=label, peers=rates[peer])

    def bookkeeping(self, name: str, mode: str) -> Row:
        """The host's share of the last decodes."""
        shares = self.ours(mode).bookkeeping[-self.repeats :]
        return median_row(f"{name}{mode}", shares, "fraction")


def cpu_rows(bench: EngineBench, machine: Ceiling) -> Iterator[Row]:
    """Decoding and prefill against the ceilings, these, and both beside a busy process."""
    sizes, largest = bench.sizes, max(bench.sizes.batches)
    for batch in sizes.batches:
        machine = machine.best(multiply_add_ceiling())
        rates = bench.decodes(batch, contiguous=batch == largest)
        yield from bench.rows(f"decode_b{batch}", rates, bench.decode_ceiling(machine, batch))
        if batch == largest:
            yield from (bench.bookkeeping(f"bookkeeping_share_b{batch}", mode) for mode in MODES)
            pairs = zip(rates[CONTIGUOUS], rates[""], strict=True)
            yield median_row(
                "paged_over_contiguous", [whole / paged for whole, paged in pairs], "x"
            )
    machine = machine.best(multiply_add_ceiling())
    repeats = PREFILLS * bench.repeats
    for tokens in sizes.prefills:
        most = bench.ceiling(machine, 1, tokens, 0)
        yield from bench.rows(f"prefill_{tokens}", bench.prefills(tokens, repeats), most)
    yield Row("fma_flops_per_s", machine.flops_per_s, "FLOP/s")
    yield Row("gemm_flops_per_s", machine.gemm_flops_per_s, "FLOP/s")
    yield Row("read_bytes_per_s", machine.bytes_per_s, "B/s")
    for name in (PRODUCTS, CONTIGUOUS):
        del bench.contenders[name]
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for batch in sizes.busy:
            yield from bench.rows(f"decode_b{batch}+busy", bench.decodes(batch))
        for tokens in sizes.prefills:
            yield from bench.rows(f"prefill_{tokens}+busy", bench.prefills(tokens, repeats))
    finally:
        busy.kill()
        busy.wait()


def gpu_rows(bench: EngineBench, machine: Ceiling) -> Iterator[Row]:
    """Steps by batch, prefills by size, what invariance costs, and where the memory went."""
    yield from memory_rows("memory_", bench.ours("").engine.memory)
    for batch in bench.sizes.batches:
        most, rates = bench.decode_ceiling(machine, batch), bench.decodes(batch)
        yield from bench.rows(f"decode_b{batch}", rates, most)
        for mode, contender in bench.modes.items():
            steps = [1e3 * batch / rate for rate in rates[contender]]
            value, floor = median(steps), 1e3 * batch / most
            yield Row(
                f"step_b{batch}{mode}",
                value,
                "ms",
                ceiling=floor,
                share_of_ceiling=floor / value,
                repeats=len(steps),
                spread=middle_half(steps),
            )
            yield bench.bookkeeping(f"bookkeeping_share_b{batch}", mode)
        yield _cost(f"b{batch}", bench, rates)
    for tokens in bench.sizes.prefills:
        rates = bench.prefills(tokens, bench.repeats)
        yield from bench.rows(f"prefill_{tokens}", rates, bench.ceiling(machine, 1, tokens, 0))
        yield _cost(f"prefill_{tokens}", bench, rates)


def _cost(name: str, bench: EngineBench, rates: Rates) -> Row:
    fast, same = (rates[bench.modes[mode]] for mode in MODES)
    times = [quick / slow for quick, slow in zip(fast, same, strict=True)]
    return median_row(f"invariant_cost_{name}", times, "x")
