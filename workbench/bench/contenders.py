"""Who takes part in the engine benchmark inside this process, behind one pair of methods.

decode(prompts, new_tokens) and prefill(prompts) answer tokens/s: decoding from every sequence's
first token on, prefill to the first token. Ours steps the engine; `transformers` runs `generate`
and its bare forward; Linears is no engine: torch's products of the model's shapes alone. Peers
in processes of their own are peer_process.py's.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.models.spec import ModelSpec

Prompts = NDArray[np.int64]  # [sequences, tokens]
PASS_SECONDS = 0.3  # the ceiling's products are repeated for this long


class Contender(Protocol):
    """One engine on one model."""

    def decode(self, prompts: Prompts, new_tokens: int) -> float:
        """Tokens/s of all sequences together, after each has its first token."""

    def prefill(self, prompts: Prompts) -> float:
        """Prompt tokens/s of one prompt, [1, tokens], to its first token."""


class Ours:
    """The engine itself. bookkeeping: one share a decode, 1 - (forward + sampling) / wall."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.bookkeeping: list[float] = []

    def decode(self, prompts: Prompts, new_tokens: int) -> float:
        """The steps after the one that computes all prompts."""
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
        """One step over one prompt, last logits and first token included."""
        start = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        self.engine.generate(prompts.tolist(), params)
        return prompts.size / (time.perf_counter() - start)


class TransformersGenerate:
    """`transformers`: generate with a static batch and its own cache; its forward for prefill."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - optional extra

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def decode(self, prompts: Prompts, new_tokens: int) -> float:
        """Between the stamps that a stopping criterion takes after every token."""
        stamps: list[float] = []

        def stamp(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            stamps.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.from_numpy(prompts)
        settings = self._greedy() | {"max_new_tokens": new_tokens, "stopping_criteria": [stamp]}
        with torch.inference_mode():
            self._model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return len(prompts) * (len(stamps) - 1) / (stamps[-1] - stamps[0])

    def _greedy(self) -> dict[str, Any]:
        """Settings of `generate` without an end-of-sequence rule, which would cost it time."""
        from transformers import GenerationConfig  # noqa: PLC0415 - optional extra

        self._model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
        return {"do_sample": False}

    def prefill(self, prompts: Prompts) -> float:
        """One forward with a key-value cache and the last position's logits only."""
        ids = torch.from_numpy(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            self._model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        return prompts.size / (time.perf_counter() - start)


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
        self._layers = [torch.randn(shape) for _ in range(spec.layers) for shape in shapes]
        self._head = torch.randn(spec.vocab, spec.hidden)

    def decode(self, prompts: Prompts, new_tokens: int) -> float:
        """Tokens/s of a decode step's products: a row a sequence, all with logits."""
        return self._rate(len(prompts), len(prompts))

    def prefill(self, prompts: Prompts) -> float:
        """Tokens/s of the products of all rows, logits of the last one only."""
        return self._rate(prompts.size, 1)

    def _rate(self, rows: int, logit_rows: int) -> float:
        inputs = {w.shape[1]: torch.randn(rows, w.shape[1]) for w in self._layers}
        last = torch.randn(logit_rows, self._head.shape[1])
        passes, start = 0, time.perf_counter()
        with torch.inference_mode():
            while passes == 0 or time.perf_counter() - start < PASS_SECONDS:
                for weight in self._layers:
                    torch.nn.functional.linear(inputs[weight.shape[1]], weight)
                torch.nn.functional.linear(last, self._head)
                passes += 1
        return passes * rows / (time.perf_counter() - start)
