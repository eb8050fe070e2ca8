"""Engines that are not ours behind `TokenEngine`: what they share, and `transformers`' own.

They have our requests, stop conditions and texts, and none of what needs our cache and scheduler:
a search that asks for that is refused, or has no such row or number.
"""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import count
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.config import EngineConfig
from workbench.core import CacheRoom, RequestOutput, SamplingParams, Sequence, Tag
from workbench.engine import requests
from workbench.engine.executor import sample
from workbench.engine.requests import Ids, Prompt
from workbench.engine.sampling import StopChecker, require_finite, rows_of
from workbench.errors import ConfigError, ModelError, StepError
from workbench.kernels import Kernels
from workbench.models import registry
from workbench.models.gguf import GGUFFile
from workbench.models.loading import open_weights, require_device
from workbench.models.spec import ARCHITECTURES

Logits = NDArray[np.float32]


class ForeignEngine(ABC):
    """What adapters to other engines have in common; a subclass says how requests are computed.

    source: the files of the model, of which config and tokenizer are read here.
    """

    capabilities: frozenset[str] = frozenset()
    cache_room: CacheRoom | None = None
    max_model_len: int
    fingerprint: str

    def __init__(self, name: str, source: registry.Source, *, dummy: bool = False) -> None:
        self.name = name
        self.tokenizer = registry.load_tokenizer(source, dummy=dummy)
        config = registry.hub_config(source)
        self.architecture = str((config.get("architectures") or ["unknown"])[0])
        known = ARCHITECTURES.get(self.architecture)
        self.value_outputs = None if not known or not known.value_head else known.value_head.outputs
        text = config.get("text_config", config)  # of a model that also sees
        self._vocab = int(text.get("vocab_size", self.tokenizer.vocab_size))
        known_bytes = self.tokenizer.token_bytes
        self._token_bytes = known_bytes + (b"",) * (self._vocab - len(known_bytes))
        self._stops = StopChecker(self._token_bytes, self.tokenizer.eos_ids)
        self._numbers = count()
        self._pending: dict[int, Any] = {}  # by request id, oldest first
        self._held: dict[int, RequestOutput] = {}  # finished, and not yet returned

    # -- requests --

    def add(self, prompt: Prompt, params: SamplingParams, *, tag: Tag | None = None) -> int:
        """Queue a prompt; its request id. PromptError as `Engine.add`."""
        return self._queue(prompt, tag, params=params)

    def add_score(
        self, token_ids: Ids, positions: Ids, columns: Ids, *, tag: Tag | None = None
    ) -> int:
        """Queue a scoring request; its request id. PromptError as `Engine.add_score`."""
        return self._queue(token_ids, tag, score=requests.score_params(positions, columns))

    def _queue(self, prompt: Prompt, tag: Tag | None, **wanted: Any) -> int:
        ids = requests.encoded(self.tokenizer, prompt)
        sequence = Sequence(next(self._numbers), ids, len(ids), tag=tag or Tag(), **wanted)
        requests.require_known(sequence, self, self._vocab)
        requests.require_servable(sequence, self.max_model_len)
        self._start(sequence)
        return sequence.request_id

    def _start(self, sequence: Sequence) -> None:
        """From now on it is pending, with what is kept of it."""
        self._pending[sequence.request_id] = sequence

    @abstractmethod
    def _advance(self) -> None:
        """Wait until a pending request has ended, and is held, or was dropped meanwhile."""

    def abort(self, request_id: int) -> None:
        """Drop a request, or what it came to; an unknown id is ignored."""
        self._pending.pop(request_id, None)
        self._held.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        """Whether any request waits, runs or was not returned."""
        return bool(self._pending or self._held)

    def step(self) -> list[RequestOutput]:
        """Requests that have finished, at least one where any is pending and none is dropped."""
        if self._pending:
            self._advance()
        return list(self._take_held().values())

    def _take_held(self) -> dict[int, RequestOutput]:
        ended, self._held = self._held, {}
        return ended

    def generate(
        self, prompts: SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams]
    ) -> list[RequestOutput]:
        """As `Engine.generate`: prompts run to their end; params: one for all, or a list."""
        return self._run_all(self.add, requests.paired(prompts, params))

    def score(self, token_ids: Ids, positions: Ids, columns: Ids) -> RequestOutput:
        """add_score, run to its end."""
        return self._run_all(self.add_score, [(token_ids, positions, columns)])[0]

    def _run_all(self, queue: Any, calls: Iterable[tuple[Any, ...]]) -> list[RequestOutput]:
        """Outputs in the calls' order, once all have ended; raises the first error among them, and
        StepError where another call dropped or took some.
        """
        ids: list[int] = []
        try:
            for arguments in calls:
                ids.append(queue(*arguments))
            for number in ids:
                while number in self._pending:
                    self._advance()
            found = [self._held.get(number) for number in ids]
            outputs = [output for output in found if output is not None]
        finally:
            for number in ids:
                self.abort(number)
        for output in outputs:
            if output.error is not None:
                raise output.error
        if gone := len(ids) - len(outputs):
            raise StepError(
                f"{gone} of {len(ids)} requests to {self!r} were dropped or taken by another call: "
                "close, abort or step. Send them again, to a new engine if it was closed."
            )
        return outputs

    # -- what they lack --

    @property
    def description(self) -> dict[str, Any]:
        """Nothing of a cache is known."""
        return {}

    def trace_as(self, recorder: Any, name: str) -> NoReturn:
        """Refused: ConfigError."""
        self._lacks("trace")

    def forget(self, lines: SequenceOf[Ids], kept: SequenceOf[Ids] = ()) -> NoReturn:
        """Refused: ConfigError."""
        self._lacks("forget")

    def _lacks(self, name: str) -> NoReturn:
        able = ", ".join(sorted(self.capabilities)) or "none"
        raise ConfigError(f"{self!r} cannot {name}; its capabilities: {able}. Take an Engine.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, max_model_len={self.max_model_len})"


class TransformersEngine(ForeignEngine):
    """A model as `transformers` computes it, any architecture of AutoModelForCausalLM; our sampler.

    A step finishes one request, computed alone: its tokens depend on nothing but itself and its
    seed. Within it the model's own KV cache is used, where it has one; between requests nothing is
    kept. So this is a second opinion, not a fast one. Our PRMs' value heads are put on its base
    model. model: as `Engine` takes it, no dummy. Raises ModelError or ConfigError.
    """

    capabilities = frozenset({"token_identity"})

    def __init__(
        self,
        model: str = "tiny-solver",
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_model_len: int | None = None,
    ) -> None:
        try:
            import transformers  # noqa: PLC0415 - optional extra
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"TransformersEngine needs {error.name}: pip install transformers."
            ) from error
        if model.startswith(registry.DUMMY):
            raise ConfigError(f"model is {model!r}; TransformersEngine takes no random weights.")
        kinds = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
        if dtype not in kinds:
            raise ConfigError(f"dtype is {dtype!r}; allowed: {', '.join(kinds)}.")
        EngineConfig(max_model_len=max_model_len)  # a number at least; its end follows the weights
        source = registry.open_source(registry.find_model(model))
        self._device = require_device(device)
        super().__init__(model, source)
        folder, file = source, None
        if isinstance(source, GGUFFile):
            folder, file = source.path.parent, source.path.name
        try:
            loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=file, dtype=kinds[dtype], local_files_only=True,
                output_loading_info=True,
            )  # fmt: skip
        except Exception as error:  # whatever its files or the library raise
            raise ModelError(f"transformers cannot load {model} ({folder}): {error}") from error
        has_head = self.value_outputs is not None
        lacks = {n for n in told["missing_keys"] if not has_head or not n.startswith("lm_head.")}
        if lacks:  # which transformers would draw at random
            raise ModelError(
                f"{model} ({self.architecture}) is no causal language model to transformers: its "
                f"files lack {len(lacks)} tensors, first {min(lacks)!r}."
            )
        self._model = loaded.to(self._device).eval()
        own = loaded.config.get_text_config()
        longest = getattr(own, "max_position_embeddings", None) or max_model_len
        if longest is None:
            raise ConfigError(f"{model}'s config has no longest length; give max_model_len.")
        self.max_model_len = longest if max_model_len is None else max_model_len
        if not 2 <= self.max_model_len <= longest:
            raise ConfigError(f"max_model_len is {max_model_len}; allowed: 2 to {longest}.")
        self._head = self._value_head(source, kinds[dtype]) if has_head else []
        self._keeps = "logits_to_keep" in inspect.signature(loaded.forward).parameters
        self._kernels = Kernels(self._device, torch.float32)
        told = f"{open_weights(source).digest()} {self.tokenizer.fingerprint} {dtype} {device}"
        told += f" {transformers.__version__} {torch.__version__} {torch.get_num_threads()}"
        self.fingerprint = f"transformers/{hashlib.sha256(told.encode()).hexdigest()[:16]}"

    def _value_head(self, source: registry.Source, dtype: torch.dtype) -> list[tuple[Any, Any]]:
        """Weights and biases of the linear layers, ReLU between, as models/spec.py has them."""
        spec, files = registry.read_spec(source), open_weights(source)
        assert spec.value_head is not None
        *inner, last = spec.value_head.names
        parts = []
        for name, rows in [*((n, spec.hidden) for n in inner), (last, spec.outputs)]:
            weight: Any = files.take(f"{name}.weight", (rows, spec.hidden))
            bias: Any = files.take(f"{name}.bias", (rows,))
            parts.append((weight.to(self._device, dtype), bias.to(self._device, dtype)))
        return parts

    def _advance(self) -> None:
        sequence = next(iter(self._pending.values()))
        try:
            with torch.inference_mode():
                output = self._generated(sequence) if sequence.params else self._scored(sequence)
        except Exception as error:  # the request's; the engine goes on
            if not isinstance(error, StepError):
                error = StepError(f"{self.name} failed: {type(error).__name__}: {error}")
            output = RequestOutput(sequence.request_id, (), "", "error", error=error)
        self._held[sequence.request_id] = output
        del self._pending[sequence.request_id]

    def _generated(self, sequence: Sequence) -> RequestOutput:
        params, ids, past = sequence.params, sequence.token_ids, None
        assert params is not None
        del ids[sequence.num_prompt_tokens :]  # of a step that was interrupted
        sequence.logprobs.clear()
        self._stops.add(sequence.request_id, params)
        new, reason = ids, None
        most = requests.length_limit(sequence, self.max_model_len)
        try:
            while reason is None:
                logits, past = self._forward(new, [len(new) - 1], past)
                row = rows_of(params, np.zeros(1, np.int64), np.array([len(ids)], np.int64))
                tokens, logprobs = sample(self._kernels, logits, row)
                ids.append(int(tokens[0]))
                sequence.logprobs += [each for each in logprobs if each is not None]
                reason = self._stops.finish_reason(sequence)
                reason = reason or ("length" if len(ids) >= most else None)
                new = ids if past is None else ids[-1:]
        finally:
            self._stops.remove(sequence.request_id)
        return requests.output_of(sequence, reason, self._token_bytes)

    def _scored(self, sequence: Sequence) -> RequestOutput:
        score = sequence.score
        assert score is not None
        places, ids = list(score.positions), sequence.token_ids[: sequence.num_to_compute]
        if self._head:
            inputs = torch.tensor([ids], device=self._device)
            out = self._model.base_model(input_ids=inputs).last_hidden_state[0, places]
            for number, (weight, bias) in enumerate(self._head):
                out = torch.nn.functional.linear(out.relu() if number else out, weight, bias)
        else:
            out, _ = self._forward(ids, places, None)
        logits: Logits = out[:, list(score.columns)].float().cpu().numpy()
        require_finite(logits, np.asarray(places))
        return RequestOutput(sequence.request_id, (), "", "score", logits=logits)

    def _forward(self, ids: list[int], places: list[int], past: Any) -> tuple[torch.Tensor, Any]:
        """Logits float32 [places, vocab] of these tokens, and the model's own cache, or None."""
        at = torch.tensor(places, device=self._device)
        how: dict[str, Any] = {"logits_to_keep": at} if self._keeps else {}
        how |= {} if past is None else {"past_key_values": past}
        inputs = torch.tensor([ids], device=self._device)
        found = self._model(input_ids=inputs, use_cache=True, **how)
        logits = found.logits[0] if self._keeps else found.logits[0, at]
        return logits.float(), found.get("past_key_values")
