"""`transformers` as the engine benchmark's peer on a GPU: in half precision, random weights there.

What it does not do: time our engine (contenders.py).
"""

from __future__ import annotations

import time
import warnings
from importlib.util import find_spec

import torch

from workbench.bench.contenders import Prompts, TransformersGenerate
from workbench.models.folders import DUMMY, find_model


class TransformersOnDevice(TransformersGenerate):
    """`transformers` with the weights that its own initialisation draws."""

    def __init__(self, model: str, device: torch.device, dtype: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - optional extra

        folder = find_model(model.removeprefix(DUMMY), weights=False)
        kind = getattr(torch, dtype)
        with device:
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
        with torch.inference_mode():
            self._model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        return len(prompts) * (len(stamps) - 1) / (stamps[-1] - stamps[0])

    def prefill(self, prompts: Prompts) -> float:
        """One forward with a key-value cache and the last position's logits only."""
        start = time.perf_counter()
        ids = torch.from_numpy(prompts).to(self._device)
        with torch.inference_mode():
            self._model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        self._wait()
        return prompts.size / (time.perf_counter() - start)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def transformers_on(model: str, device: torch.device, dtype: str) -> TransformersOnDevice | None:
    """The peer; None, with a warning that says why, where it is not installed or has no room."""
    if find_spec("transformers") is None:
        warnings.warn("No rows against transformers: it is not installed.", stacklevel=2)
        return None
    try:
        return TransformersOnDevice(model, device, dtype)
    except RuntimeError as problem:  # torch.OutOfMemoryError among them
        warnings.warn(f"No rows against transformers: {problem}", stacklevel=2)
        return None
