"""`transformers` as the engine benchmark's peer on a GPU: in half precision, random weights there.

What it does not do: time our engine (contenders.py).
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workbench.bench.contenders import Prompts, TransformersGenerate
from workbench.bench.peer_process import PeerError
from workbench.models.registry import DUMMY, find_model

# Of an installation that does not fit, of a config, and torch.OutOfMemoryError.
_FAILURES = (ImportError, RuntimeError, ValueError, OSError, TypeError)
_SHOWN = 200  # characters of what a failure says


class TransformersOnDevice(TransformersGenerate):
    """`transformers` with the weights that its own initialisation draws.

    Raises PeerError, with the reason, where it is not installed, has no room, or fails.
    """

    def __init__(self, model: str, device: torch.device, dtype: str) -> None:
        kind = getattr(torch, dtype)
        with _failures_told(), device:
            from transformers import (  # noqa: PLC0415 - optional extra
                AutoConfig,
                AutoModelForCausalLM,
            )

            folder = find_model(model.removeprefix(DUMMY), weights=False)
            config = AutoConfig.from_pretrained(folder)
            self._model = AutoModelForCausalLM.from_config(config, dtype=kind).to(kind).eval()
        self._device = device

    def decode(self, prompts: Prompts, new_tokens: int) -> float:
        """Between the stamps that a stopping criterion takes once every token is there."""
        stamps: list[float] = []

        def stamp(ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
            self._wait()
            stamps.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        ids = torch.from_numpy(prompts).to(self._device)
        settings = self._greedy() | {"max_new_tokens": new_tokens, "stopping_criteria": [stamp]}
        with _failures_told(), torch.inference_mode():
            self._model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return len(prompts) * (len(stamps) - 1) / (stamps[-1] - stamps[0])

    def prefill(self, prompts: Prompts) -> float:
        """One forward with a key-value cache and the last position's logits only."""
        start = time.perf_counter()
        ids = torch.from_numpy(prompts).to(self._device)
        with _failures_told(), torch.inference_mode():
            self._model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        self._wait()
        return prompts.size / (time.perf_counter() - start)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextmanager
def _failures_told() -> Iterator[None]:
    try:
        yield
    except _FAILURES as problem:
        told = textwrap.shorten(str(problem), _SHOWN, placeholder=" ...")
        raise PeerError(f"{type(problem).__name__}: {told}") from problem
