"""How fast the engine is, beside `transformers` on the same weights, threads and prompts.

Input (CONTRACTS: numbers): distinct random prompts of 128 tokens, 64 new ones, greedy, end of
sequence ignored, prefix caching off; decoding is timed apart from prefill; the order of the two
alternates from repeat to repeat. prefill_512 is one prompt of 512 tokens in one step against one
forward that computes the last position's logits only.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from workbench.bench.machine_ceiling import Ceiling, decode_seconds, measure_ceiling
from workbench.bench.record import Row
from workbench.bench.rows import plain_row, rate_row
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.models.names import resolve

PROMPT_TOKENS, NEW_TOKENS, PREFILL_TOKENS = 128, 64, 512
BATCHES = (1, 16, 64)
REPEATS = {"quick": 3, "default": 9, "full": 21}
MODES = {"": False, "+invariant": True}  # row suffix -> batch_invariant
MODE = {"batch_invariant": {"no suffix": False, "+invariant": True}, "dtype": "float32"}


def run(model: str = "tiny-solver", profile: str = "default", seed: int = 0) -> Iterator[Row]:
    """The rows of `workbench bench engine`, each as soon as it is measured."""
    ceiling = measure_ceiling()
    yield Row("gemm_flops_per_s", ceiling.flops_per_s, "FLOP/s")
    yield Row("read_bytes_per_s", ceiling.bytes_per_s, "B/s")
    peer = _transformers(model)
    engines = {suffix: _engine(model, invariant) for suffix, invariant in MODES.items()}
    random = np.random.default_rng(seed)
    for batch in BATCHES:
        yield from _decode_rows(batch, engines, peer, ceiling, REPEATS[profile], random)
    yield from _prefill_rows(engines, peer, ceiling, REPEATS[profile], random)


def _engine(model: str, batch_invariant: bool) -> Engine:
    largest = max(BATCHES)
    per_prompt = -(-(PROMPT_TOKENS + NEW_TOKENS) // 16) + 1
    return Engine(
        model,
        num_blocks=max(largest * per_prompt, 2048),
        max_num_seqs=largest,
        max_num_batched_tokens=largest * PROMPT_TOKENS,
        enable_prefix_caching=False,
        batch_invariant=batch_invariant,
    )


def _transformers(model: str) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - optional extra

    return AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.float32).eval()


def _decode_rows(
    batch: int,
    engines: dict[str, Engine],
    peer: Any,
    ceiling: Ceiling,
    repeats: int,
    random: np.random.Generator,
) -> Iterator[Row]:
    spec = engines[""].spec
    shares: dict[str, list[float]] = {suffix: [] for suffix in engines}

    def ours(suffix: str) -> Callable[[np.ndarray], float]:
        def timed(prompts: np.ndarray) -> float:
            rate, share = engine_decode(engines[suffix], prompts)
            shares[suffix].append(share)
            return rate

        return timed

    contenders = {suffix: ours(suffix) for suffix in engines}
    contenders["peer"] = lambda prompts: peer_decode(peer, prompts)
    shape = (batch, PROMPT_TOKENS)
    rates = _interleave(
        contenders, repeats, lambda: _prompts(random, shape, spec.vocab), f"b{batch}"
    )
    bound = batch / decode_seconds(ceiling, spec, batch, PROMPT_TOKENS + NEW_TOKENS // 2)
    for suffix in engines:
        yield rate_row(
            f"decode_b{batch}{suffix}",
            rates[suffix],
            rates["peer"],
            "tokens/s",
            "transformers",
            bound,
        )
        if batch == max(BATCHES):
            yield plain_row(
                f"bookkeeping_share_b{batch}{suffix}", shares[suffix][-repeats:], "fraction"
            )


def _prefill_rows(
    engines: dict[str, Engine],
    peer: Any,
    ceiling: Ceiling,
    repeats: int,
    random: np.random.Generator,
) -> Iterator[Row]:
    spec = engines[""].spec
    contenders = {suffix: _prefill_of(engine) for suffix, engine in engines.items()}
    contenders["peer"] = lambda prompts: peer_prefill(peer, prompts)
    draw = lambda: _prompts(random, (1, PREFILL_TOKENS), spec.vocab)  # noqa: E731
    rates = _interleave(contenders, 3 * repeats, draw, "prefill")
    flops = PREFILL_TOKENS * spec.flops(1, PREFILL_TOKENS // 2)
    bound = PREFILL_TOKENS / ceiling.seconds(flops, spec.weight_bytes(4))
    for suffix in engines:
        name = f"prefill_{PREFILL_TOKENS}{suffix}"
        yield rate_row(name, rates[suffix], rates["peer"], "tokens/s", "transformers", bound)


def _prefill_of(engine: Engine) -> Callable[[np.ndarray], float]:
    return lambda prompts: engine_prefill(engine, prompts)


def _interleave(
    contenders: dict[str, Callable[[np.ndarray], float]],
    repeats: int,
    draw: Callable[[], np.ndarray],
    label: str,
) -> dict[str, list[float]]:
    """Each repeat: every contender on the same fresh prompts, in alternating order; one warm-up."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in tqdm(range(-1, repeats), desc=label, leave=False):
        prompts = draw()
        gc.collect()
        for name in list(contenders)[:: 1 if repeat % 2 else -1]:
            rate = contenders[name](prompts)
            if repeat >= 0:
                rates[name].append(rate)
    return rates


def _prompts(random: np.random.Generator, shape: tuple[int, int], vocab_size: int) -> np.ndarray:
    return random.integers(0, vocab_size, shape)


def engine_decode(engine: Engine, prompts: np.ndarray) -> tuple[float, float]:
    """Tokens/s of the steps that only decode; bookkeeping: 1 - (forward + sampling) / wall."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for prompt in prompts.tolist():
        engine.add(prompt, params)
    engine.step()  # all prompts fit one step: the first token of each
    busy, start = engine.forward_s + engine.sampling_s, time.perf_counter()
    while engine.has_work:
        engine.step()
    wall = time.perf_counter() - start
    busy = engine.forward_s + engine.sampling_s - busy
    return len(prompts) * (NEW_TOKENS - 1) / wall, 1 - busy / wall


def engine_prefill(engine: Engine, prompts: np.ndarray) -> float:
    """Prompt tokens/s of one step over one prompt, last logits and first token included."""
    start = time.perf_counter()
    engine.generate(
        prompts.tolist(), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    )
    return prompts.size / (time.perf_counter() - start)


def peer_decode(model: Any, prompts: np.ndarray) -> float:
    """Tokens/s of `generate` after its first token: static batch, greedy, its own cache on."""
    stamps: list[float] = []

    def stamp(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        stamps.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)

    ids = torch.from_numpy(prompts)
    with torch.inference_mode():
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, stopping_criteria=[stamp], **_greedy(model))
    return len(prompts) * (len(stamps) - 1) / (stamps[-1] - stamps[0])


def _greedy(model: Any) -> dict[str, Any]:
    """Settings of `generate` without an end-of-sequence rule, which would cost it time."""
    from transformers import GenerationConfig  # noqa: PLC0415 - optional extra

    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    return {"max_new_tokens": NEW_TOKENS, "do_sample": False}


def peer_prefill(model: Any, prompts: np.ndarray) -> float:
    """Prompt tokens/s of one forward with a key-value cache and the last position's logits only."""
    ids = torch.from_numpy(prompts)
    start = time.perf_counter()
    with torch.inference_mode():
        model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)
    return prompts.size / (time.perf_counter() - start)
