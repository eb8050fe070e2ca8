"""llama.cpp through its C interface, as llama-cpp-python binds it.

How it is timed. decode: from the end of the call that computed every prompt's last position to the
end of the last step, over the tokens sampled in between; a step is one llama_decode of a token a
sequence and the largest logit of each. prefill: one prompt in one call, last logits only, and its
first token. Settings: the quantised file itself, flash attention and fp16 keys and values as
llama.cpp chooses by default, the same threads for one token and for many.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_COMPUTE = 512  # tokens computed at a time, llama.cpp's own default (n_ubatch)


class Peer:
    """One model in a llama.cpp context. model: a .gguf file."""

    def __init__(
        self, model: str, threads: int, max_seqs: int, max_tokens: int, max_model_len: int
    ) -> None:
        import llama_cpp  # noqa: PLC0415 - a worker's imports are part of its load

        self._api: Any = llama_cpp
        self.version = str(llama_cpp.__version__)
        self._max_seqs, self._max_tokens, self._positions = max_seqs, max_tokens, max_model_len
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            model.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context = self._open(threads)
        self._batch = llama_cpp.llama_batch_init(max_tokens, 0, 1)

    def _open(self, threads: int) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx = self._max_seqs * self._positions
        params.n_seq_max = self._max_seqs
        params.n_batch = self._max_tokens
        params.n_ubatch = LARGEST_COMPUTE
        params.n_threads = params.n_threads_batch = threads
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp has no room for {params.n_ctx} positions")
        return context

    def decode(self, prompts: list[list[int]], new_tokens: int) -> tuple[int, float]:
        """Tokens and seconds after every sequence's first token."""
        self._forget()
        tokens = self._step(prompts, 0)
        position, start = len(prompts[0]), time.perf_counter()
        for step in range(new_tokens - 1):
            tokens = self._step([[int(token)] for token in tokens], position + step)
        return len(prompts) * (new_tokens - 1), time.perf_counter() - start

    def prefill(self, prompt: list[int]) -> tuple[int, float]:
        """Prompt tokens and seconds to the first token."""
        self._forget()
        start = time.perf_counter()
        self._step([prompt], 0)
        return len(prompt), time.perf_counter() - start

    def _forget(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)

    def _step(self, rows: list[list[int]], position: int) -> NDArray[np.int64]:
        """Computes each sequence's next tokens; the likeliest token after each, [sequences]."""
        batch, place = self._batch, 0
        for sequence, tokens in enumerate(rows):
            for offset, token in enumerate(tokens):
                batch.token[place] = token
                batch.pos[place] = position + offset
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = sequence
                batch.logits[place] = offset == len(tokens) - 1
                place += 1
        batch.n_tokens = place
        code = self._api.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode answered {code} for {place} tokens")
        logits = np.ctypeslib.as_array(
            self._api.llama_get_logits(self._context), shape=(len(rows), self._vocab)
        )
        return logits.argmax(axis=1)
