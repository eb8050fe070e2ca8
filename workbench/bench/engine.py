"""How fast the engine is, beside other engines on the same weights, threads and prompts.

Input: distinct random prompts of 128 tokens, 64 new ones, greedy, end of sequence ignored, no
prefix cache; decoding is timed apart from prefill; all contenders take the same fresh prompts in
turn, in an order that alternates from repeat to repeat. prefill_512 is one prompt of 512 tokens in
one step against one forward that computes the last position's logits only. No suffix: the fastest
kernels; `+invariant`: those whose rows have the same bits in whatever batch, where these are others
(a CPU's all have). The ceiling of a row is the larger of bytes over bandwidth and operations over
arithmetic, of the format that is read; on a CPU the bandwidth of so many bytes, of which a cache
may hold all. Peers: `transformers` in this process; those of `make bench-peers` (@vllm, @llama.cpp)
each in its own, in float32 and the file's own format; `@PEER-VARIANT` is the same peer as it may be
faster: in bfloat16 where the processor multiplies it, in formats of llama.cpp's own quantiser.

On a CPU: `@products` is torch's F.linear of the same shapes alone; tile_share_of_peak is a
product's inner loop, its data in the first-level cache, of multiply-adds on registers alone;
`+busy` is beside one process that keeps a core busy (with vLLM and `transformers`, the others would
take half of the run); paged_over_contiguous is decoding's attention alone, keys and values read a
second from shuffled blocks of 16, beside torch's scaled_dot_product_attention over contiguous ones.
sample_*: 64 rows at temperature 0.8 of logits as spread as a model's, in sample_flat_* nearly
equal, of which filters keep most; with filters or log probabilities, beside the same without.

With `--device cuda`, in bfloat16: steps are timed as a user meets them (scheduling, launching,
waiting for the sampled tokens), and random weights at true size (`dummy:llama-3.2-1b`) time as real
ones do. memory_* are bytes, as the profiling pass measured them.
"""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tqdm.auto import tqdm

from workbench.bench.kernels import attention_rates, gpu_ceiling, require_gpu
from workbench.bench.peers import PEERS, PeerError, PeerProcess
from workbench.bench.record import (
    Ceiling,
    Row,
    compared_rows,
    in_turn,
    median_row,
    memory_rows,
    rates_in_turn,
)
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.engine.executor import sample
from workbench.engine.sampling import rows_of
from workbench.errors import ConfigError
from workbench.experiments.provenance import cpu_features
from workbench.kernels import load_kernels
from workbench.models.gguf import GGUFFile, TokenizerReader, read_config
from workbench.models.loading import GGUFWeights
from workbench.models.registry import DUMMY, find_model, model_spec
from workbench.models.spec import ModelSpec
from workbench.search.answers import check_choice

REPEATS = {"quick": 3, "default": 9, "full": 21}  # three times as many of a prefill
REPEATS_LARGE = {"quick": 2, "default": 5, "full": 9}
LARGE = 50_000_000  # parameters
INVARIANT = "+invariant"  # suffix of rows
GPU_DTYPE = "bfloat16"
PRODUCTS, TRANSFORMERS = "products", "transformers"
ATTENTION = {"attn_implementation": "sdpa"}
PEERS_FOLDER = Path("build/peers")
BFLOAT16 = {"avx512_bf16", "amx_tile"}  # processors that multiply it
BUSY = {TRANSFORMERS, "vllm", "vllm-bfloat16"}  # measured beside a busy process, too
VARIANTS = {TRANSFORMERS: ("bfloat16",), "vllm": ("bfloat16",), "llama.cpp": ("Q8_0", "Q4_0")}
BLOCK_SIZE = 16
FORCED = "WORKBENCH_ISA"  # the variable that makes kernels take a lesser instruction set
FAILURES = (ImportError, RuntimeError, ValueError, OSError, TypeError)  # of a peer
Prompts = NDArray[np.int64]  # [sequences, tokens]
Rates = dict[str, list[float]]  # tokens/s of each contender and repeat


@dataclass(frozen=True, slots=True)
class Work:
    """What a row times: decoding after each prompt, or, with one new token, the prefill."""

    sequences: int
    tokens: int  # of each prompt
    new: int = 1

    @property
    def decodes(self) -> bool:
        """Whether the prompts' own time is left out."""
        return self.new > 1

    def blocks(self) -> int:
        """Blocks of a whole sequence."""
        return -(-(self.tokens + self.new) // BLOCK_SIZE)

    @property
    def name(self) -> str:
        """The row's name."""
        return f"decode_b{self.sequences}" if self.decodes else f"prefill_{self.tokens}"


CPU_WORKS = (*(Work(batch, 128, 64) for batch in (1, 16, 64)), Work(1, 512))
GPU_WORKS = (*CPU_WORKS, Work(1, 2048))
SAMPLED: dict[str, dict[str, float]] = {
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 50},
    "min_p": {"min_p": 0.05},
    "all_filters": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
    "logprobs": {"logprobs": 5},
}
VOCABULARIES = (49_152, 128_256)
SPREADS = {"": 3.0, "flat_": 1e-3}  # of logits: their standard deviation
NEAR_BYTES = 256 << 20  # more than this no cache holds
WARM_UPS = (1, 4)  # repeats that are not counted, and at most so many new tokens of each
GPU_WARM_UPS = (2, 64)  # kernels compile, graphs are captured


def run(
    model: str = "tiny-solver",
    profile: str = "default",
    seed: int = 0,
    repeats: int | None = None,
    peers: str = "installed",
    device: str = "cpu",
) -> Iterator[Row]:
    """The rows of `workbench bench engine`, each as soon as it is measured."""
    spec, chosen = model_spec(model), chosen_peers(peers)  # refused before anything is measured
    named = peers not in ("installed", "none")
    if named and device != "cpu" and {*chosen} != {TRANSFORMERS}:
        raise ConfigError(f"--peers is {peers!r}; on a GPU {TRANSFORMERS} is the only peer.")
    large = device != "cpu" or spec.parameters() > LARGE
    times = repeats or (REPEATS_LARGE if large else REPEATS)[profile]
    if device == "cpu":
        from workbench.bench import ceilings  # noqa: PLC0415 - needs numba, a GPU does not

        place, works, measured = torch.device(device), CPU_WORKS, ceilings.multiply_add_ceiling
        yield from sampling_rows(place, 3 * times)
        yield median_row("tile_share_of_peak", ceilings.tile_shares(), "fraction")
    else:
        place, works = require_gpu(bench=f"engine --device {device}", name=device), GPU_WORKS
        measured = partial(lambda found, **_: found, gpu_ceiling(place))
        yield from sampling_rows(place, 3 * times)
    with (
        nullcontext() if device == "cpu" else torch.cuda.device(place),  # of its streams and graphs
        closing(EngineBench(model, works, times, seed, chosen, device)) as bench,
    ):
        yield from engine_rows(bench, measured)
        for name, (reason, had_begun) in bench.dropped.items():
            if named or had_begun:
                yield Row(f"peer@{name}", math.nan, f"failed: {reason}")


def mode_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """How a record of this run was made."""
    dtype = "float32" if settings["device"] == "cpu" else GPU_DTYPE
    forced: dict[str, str] = {}
    if name := os.environ.get(FORCED):
        own = "as ours; llama.cpp and vLLM's own operations as they were compiled"
        held = os.environ.get("ATEN_CPU_CAPABILITY") == name  # torch's name for it is ours
        forced["peers_isa"] = own if held else "the host's best"
    modes = True if settings["device"] == "cpu" else {"no suffix": False, INVARIANT: True}
    return {"batch_invariant": modes, "dtype": dtype} | forced


def engine_rows(bench: EngineBench, measured: Callable[..., Ceiling]) -> Iterator[Row]:
    """Decoding and prefill against the ceilings, measured before each; these; on a CPU the same
    beside a busy process, all but one sequence alone.
    """
    works, machine = bench.works, measured()
    largest = max(works, key=lambda work: work.sequences)
    if not bench.on_cpu:
        yield from memory_rows("memory_", bench.ours("").engine.memory)
    for work in works:
        machine = machine.best(measured())
        held = min(bench.step_bytes(work), NEAR_BYTES)
        near = machine.best(measured(read_bytes=held, repeats=20))
        rates = bench.rates(work)
        yield from bench.rows(work.name, rates, bench.ceiling(near, work))
        if work is not largest:
            continue
        for mode in bench.modes:
            shares = bench.ours(mode).bookkeeping[-bench.repeats :]
            yield median_row(f"bookkeeping_share_b{work.sequences}{mode}", shares, "fraction")
        if bench.on_cpu:
            yield bench.paged_over_contiguous(work)
    yield from machine.rows()
    if not bench.on_cpu:
        return
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for work in works:
            if work.sequences > 1 or not work.decodes:
                rates = bench.rates(work, without=[n for n in bench.labels if n not in BUSY])
                yield from bench.rows(f"{work.name}+busy", rates)
    finally:
        busy.kill()
        busy.wait()


def sampling_rows(device: torch.device, repeats: int) -> Iterator[Row]:
    """Rows drawn with a filter, or with log probabilities, beside the same rows without."""
    kernels, count = load_kernels(device, torch.float32, batch_invariant=False), 64
    plain = rows_of(SamplingParams(temperature=0.8), np.arange(count), np.arange(count))
    plain = replace(plain, seeds=np.arange(count, dtype=np.uint64))
    for vocab, (kind, spread) in product(VOCABULARIES, SPREADS.items()):
        drawn = torch.randn(count, vocab, generator=torch.Generator().manual_seed(0))
        logits = (drawn * spread).to(device)
        for name, asked in SAMPLED.items():
            rows = replace(plain, **{k: np.full(count, v) for k, v in asked.items()})
            works = [partial(sample, kernels, logits, each) for each in (rows, plain)]
            ours, peers = rates_in_turn(works, count, repeats)
            row = f"sample_{kind}{name}_{vocab}"
            yield median_row(row, ours, "rows/s", peer="unfiltered", peers=peers)


# -- contenders: timed(prompts, new_tokens) is tokens and seconds, of all sequences together after
# each has its first token; with one new token, of the prompts until it --


class Ours:
    """The engine itself. bookkeeping: one share a decode, 1 - (forward + sampling) / wall."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.bookkeeping: list[float] = []

    def timed(self, prompts: Prompts, new_tokens: int) -> tuple[int, float]:
        engine, start = self.engine, time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        for prompt in prompts.tolist():
            engine.add(prompt, params)
        engine.step()  # all prompts fit one step: the first token of each
        busy, first = engine.forward_s + engine.sampling_s, time.perf_counter()
        while engine.has_work:
            engine.step()
        end = time.perf_counter()
        if new_tokens == 1:
            return prompts.size, end - start
        worked = engine.forward_s + engine.sampling_s - busy
        self.bookkeeping.append(1 - worked / (end - first))
        return len(prompts) * (new_tokens - 1), end - first


class Transformers:
    """`transformers`: generate with a static batch and its own cache; its forward for prefill.

    folder: config and weights; None: the model's config, and weights as `transformers` draws them.
    Not compiled: torch.compile takes minutes for each batch size of a cache that grows.
    """

    def __init__(self, model: str, folder: Path | None, device: str, dtype: str) -> None:
        self._device, kind = torch.device(device), getattr(torch, dtype)
        with self._device:
            import transformers  # noqa: PLC0415 - optional extra

            kinds: Any = transformers.AutoModelForCausalLM
            if folder is None:
                named = find_model(model.removeprefix(DUMMY), weights=False)
                config = transformers.AutoConfig.from_pretrained(named)
                self._model: Any = kinds.from_config(config, dtype=kind, **ATTENTION)
            else:
                self._model = kinds.from_pretrained(folder, dtype=kind, **ATTENTION)
            self._model.to(self._device, kind).eval()
            # an end-of-sequence rule would cost time
            rules = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
            self._model.generation_config = rules
        settings = f"{dtype}, {torch.get_num_threads()} threads, SDPA, not compiled"
        self.version = f"{transformers.__version__} ({settings})"

    @torch.inference_mode()
    def timed(self, prompts: Prompts, new_tokens: int) -> tuple[int, float]:
        """Prefill: one forward with a key-value cache and the last position's logits only;
        decoding: between the stamps that a stopping criterion takes once every token is there.
        """
        start = time.perf_counter()
        ids = torch.from_numpy(prompts).to(self._device)
        if new_tokens == 1:
            self._model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)
            return prompts.size, self._now() - start
        stamps: list[float] = []

        def stamp(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            stamps.append(self._now())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        settings = {"max_new_tokens": new_tokens, "stopping_criteria": [stamp]}
        mask = torch.ones_like(ids)
        self._model.generate(ids, attention_mask=mask, do_sample=False, **settings)
        return len(prompts) * (len(stamps) - 1), stamps[-1] - stamps[0]

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class Linears:
    """torch's own products: each of a step's, float32 F.linear, of the engine's fused shapes.

    Each layer has weights of its own, so they come from memory as an engine's do.
    """

    def __init__(self, spec: ModelSpec) -> None:
        attention = (spec.qkv_columns, spec.hidden), (spec.hidden, spec.heads * spec.head_dim)
        wide = (1 if spec.gpt2 else 2) * spec.intermediate  # a gate beside it, but in GPT-2
        mlp = (wide, spec.hidden), (spec.hidden, spec.intermediate)
        shapes = (*attention, *mlp) * spec.layers
        self.layers = [torch.randn(shape) for shape in shapes]
        self.head = torch.randn(spec.vocab, spec.hidden)

    @torch.inference_mode()
    def timed(self, prompts: Prompts, new_tokens: int) -> tuple[int, float]:
        """A decoding step's products are of a row a sequence, a prefill's of all its rows; logits
        of each sequence once.
        """
        rows = len(prompts) if new_tokens > 1 else prompts.size
        inputs = {w.shape[1]: torch.randn(rows, w.shape[1]) for w in self.layers}
        last = torch.randn(len(prompts), self.head.shape[1])
        passes, start = 0, time.perf_counter()
        while passes == 0 or time.perf_counter() - start < 0.3:
            for weight in self.layers:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
            torch.nn.functional.linear(last, self.head)
            passes += 1
        return passes * rows, time.perf_counter() - start


Contender = Ours | Transformers | Linears | PeerProcess


def peer_dtypes() -> tuple[str, ...]:
    """What peers compute in, the fastest last: bfloat16 where this processor multiplies it, in the
    instruction set it is held to.
    """
    held = os.environ.get(FORCED, "avx512") != "avx512"
    return ("float32",) if held or BFLOAT16.isdisjoint(cpu_features()) else ("float32", "bfloat16")


def peer_files(model: str, written: Path = PEERS_FOLDER / "models") -> tuple[Path, Path | None]:
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
    TokenizerReader(opened).read().save(partial_)  # and chat template
    partial_.replace(folder)
    return folder, where


def chosen_peers(peers: str) -> list[str]:
    """The names of "installed" (all), "none", or names joined by commas; ConfigError for others."""
    known = [TRANSFORMERS, *PEERS]
    if peers in ("installed", "none"):
        return known if peers == "installed" else []
    names = [name.strip() for name in peers.split(",")]
    for name in names:
        check_choice("peers", name, ("installed", "none", *known))
    return names


# -- a run --


class EngineBench:
    """Our engine in each mode beside its peers, of one model on one device; close it when done.

    A peer that is missing or fails is left out with a warning that says why, as `dropped` does (and
    whether it had begun); rows without `transformers` say it too. On a CPU `transformers` always
    takes part; it is the only peer on a GPU.
    """

    def __init__(
        self,
        model: str,
        works: Sequence[Work],
        repeats: int,
        seed: int = 0,
        peers: Sequence[str] = (),
        device: str = "cpu",
    ) -> None:
        """Raises OutOfMemory, with the numbers, where the device is too small for the model."""
        self.model, self.works, self.repeats = model, works, repeats
        self.spec, self.on_cpu = model_spec(model), device == "cpu"
        dtype = "float32" if self.on_cpu else GPU_DTYPE
        self._place: dict[str, Any] = {"device": device, "dtype": dtype}
        self._random = np.random.default_rng(seed)
        self._limits: dict[str, Any] = {
            "max_num_seqs": max(work.sequences for work in works),
            "max_num_batched_tokens": max(work.sequences * work.tokens for work in works),
            "max_model_len": max(work.blocks() for work in works) * BLOCK_SIZE,
        }
        self.contenders: dict[str, Contender] = {"": self._engine(False)}
        self.labels: dict[str, str] = {}  # peer's name in the rows -> with its version
        self.dropped: dict[str, tuple[str, bool]] = {}
        if not self.ours("").engine.executor.model.kernels.batch_invariant:
            self.contenders[INVARIANT] = self._engine(True)
        self.modes = [*self.contenders]  # ours: suffixes of rows
        if self.on_cpu:
            self.contenders[PRODUCTS] = Linears(self.spec)
            self.labels[PRODUCTS] = "torch's products alone"
        files: tuple[Path | None, Path | None] = None, None
        if not model.startswith(DUMMY):
            files = peer_files(model)
        always = dict.fromkeys([TRANSFORMERS, *peers])
        for name in always if self.on_cpu else {TRANSFORMERS}.intersection(peers):
            self._add(name, name, *files)
            for variant in VARIANTS[name] if self.on_cpu and name in self.contenders else ():
                if variant != "bfloat16" or variant in peer_dtypes():
                    self._add(f"{name}-{variant}", name, *files, variant)

    def _engine(self, invariant: bool) -> Ours:
        return Ours(
            Engine(
                self.model,
                block_size=BLOCK_SIZE,
                num_blocks=max(work.sequences * work.blocks() for work in self.works),
                enable_prefix_caching=False,
                batch_invariant=invariant,
                **self._place,
                **self._limits,
            )
        )

    def _add(
        self, label: str, name: str, folder: Path | None, gguf: Path | None, variant: str = ""
    ) -> None:
        """A peer in one variant; without it if it fails."""
        dtype = {"dtype": variant} if variant == "bfloat16" else {}
        settings = self._limits | dtype | {"threads": torch.get_num_threads()}
        if variant and not dtype:
            settings |= {"quantised": variant, "written": f"{folder}-{variant}.gguf"}
        files = gguf if name == "llama.cpp" else folder
        try:
            if name == TRANSFORMERS:
                found: Contender = Transformers(self.model, folder, **self._place | dtype)
            elif files is None:
                raise PeerError(f"{self.model} has no files that {name} reads")
            else:
                held = self._limits["max_num_seqs"] * self._limits["max_model_len"]
                room = held * self.spec.kv_bytes_per_token(4)  # as much as ours has, in float32
                found = PeerProcess(name, PEERS_FOLDER, settings | {"model": str(files)}, room)
        except FAILURES as error:
            self._drop(label, error)
        else:
            self.contenders[label] = found
            self.labels[label] = f"{name} {getattr(found, 'version', '')}".rstrip()

    def close(self) -> None:
        """Ends the peers' processes."""
        for peer in self.contenders.values():
            if isinstance(peer, PeerProcess):
                peer.close()

    def _drop(self, name: str, error: Exception) -> None:
        """Go on without a peer that failed."""
        peer = self.contenders.pop(name, None)
        if isinstance(peer, PeerProcess):
            peer.close()
        reason = str(error)
        if not isinstance(error, PeerError):
            told = textwrap.shorten(reason, 200, placeholder=" ...")
            reason = f"{type(error).__name__}: {told}"
        self.dropped[name] = reason, peer is not None
        self.labels.pop(name, None)
        if name == TRANSFORMERS:
            self.labels[name] = f"no {name}: {reason}"
        warnings.warn(f"Rows have no {name}: {reason}", stacklevel=2)

    def ours(self, mode: str) -> Ours:
        """Our engine as a mode's rows have it."""
        found = self.contenders[mode]
        assert isinstance(found, Ours)
        return found

    def step_bytes(self, work: Work) -> int:
        """Weights, and keys and values, that a step reads; of decoding, contexts half grown."""
        model, cached = self.ours("").engine.executor.model, work.tokens + work.new // 2
        held = work.sequences * cached * self.spec.kv_bytes_per_token(model.dtype.itemsize)
        return sum(product.nbytes for product in model.products) + work.decodes * held

    def ceiling(self, machine: Ceiling, work: Work) -> float:
        """Tokens/s at most."""
        tokens, cached = (1, work.tokens + work.new // 2) if work.decodes else (work.tokens, 0)
        spec = self.spec  # a row leaves a prompt's last layer; of the others it has keys and values
        unseen = 4 * spec.heads * spec.head_dim * (tokens * (tokens - 1) // 2)  # by its attention
        rest = spec.layer_products() - spec.hidden * spec.qkv_columns
        left_out = 2 * (tokens - 1) * rest + unseen
        flops = work.sequences * (spec.flops(tokens, cached) - left_out)
        return work.sequences * tokens / machine.seconds(flops, self.step_bytes(work))

    def paged_over_contiguous(self, work: Work) -> Row:
        """Bytes of KV that decoding's attention reads a second, all layers, contexts half grown."""
        sizes = work.sequences, work.tokens + work.new // 2
        amount = sizes[0] * sizes[1] * self.spec.kv_bytes_per_token(4)
        model = self.ours("").engine.executor.model
        both = attention_rates(model, *sizes, BLOCK_SIZE, 3 * self.repeats)
        ours, peers = ([amount * rate for rate in each] for each in both)
        peer = "torch's SDPA, contiguous KV"
        return median_row("paged_over_contiguous", ours, "B/s", peer=peer, peers=peers)

    def rates(self, work: Work, without: Sequence[str] = ()) -> Rates:
        """Each repeat: every contender on the same fresh prompts, in alternating order."""
        found: Rates = {name: [] for name in self.contenders if name not in without}
        warm_ups, few = WARM_UPS if self.on_cpu else GPU_WARM_UPS
        repeats = self.repeats if work.decodes else 3 * self.repeats
        for repeat in tqdm(range(-warm_ups, repeats), desc=work.name, leave=False):
            prompts = self._random.integers(0, self.spec.vocab, (work.sequences, work.tokens))
            new = work.new if repeat >= 0 else min(few, work.new)
            gc.collect()
            for name in in_turn(found, repeat):
                peer = self.contenders[name]
                try:
                    tokens, seconds = peer.timed(prompts, new)
                except FAILURES as error:
                    if name not in self.labels:
                        raise  # our own
                    self._drop(name, error)
                    del found[name]
                    continue
                if repeat >= 0:
                    found[name].append(tokens / seconds)
        return found

    def rows(self, name: str, rates: Rates, ceiling: float | None = None) -> Iterator[Row]:
        """Ours in each mode against `transformers` and the ceiling; the fast one against others."""
        first = {n: rates.get(n, []) for n in self.labels if n == TRANSFORMERS}
        others = {n: rates[n] for n in self.labels if n in rates and n != TRANSFORMERS}
        for mode in self.modes:
            peers = first if mode else first | others
            row = f"{name}{mode}"
            yield from compared_rows(row, rates[mode], "tokens/s", peers, ceiling, self.labels)
