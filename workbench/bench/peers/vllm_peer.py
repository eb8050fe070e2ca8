"""vLLM's CPU build through its offline engine, stepped by hand in this process.

How it is timed. decode: from the end of the step in which the last sequence got its first token to
the end of the last step, over the tokens sampled in between. prefill: from handing the prompt over
to its first token. Settings: fp32, prefix caching off, all prompts of a batch in one step, no
detokenisation, torch.compile as vLLM has it by default, threads bound to this process's cores.
"""

from __future__ import annotations

import os
import time
from typing import Any


class Peer:
    """One model in vLLM's engine. model: a Hugging Face folder with safetensors."""

    def __init__(
        self, model: str, threads: int, max_seqs: int, max_tokens: int, max_model_len: int
    ) -> None:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_AOT_COMPILE": "0",  # 0.32 cannot load what it saves: compiles anew
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        import vllm  # noqa: PLC0415 - reads the environment when it is imported

        self.version = str(vllm.__version__)
        self._sampling = vllm.SamplingParams
        self._engine: Any = vllm.LLM(
            model=model,
            dtype="float32",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_seqs=max_seqs,
            max_num_batched_tokens=max_tokens,
            max_model_len=max_model_len,
        ).llm_engine
        self._next = 0

    def decode(self, prompts: list[list[int]], new_tokens: int) -> tuple[int, float]:
        """Tokens and seconds after every sequence's first token."""
        self._add(prompts, new_tokens)
        lengths: dict[str, int] = {}
        while len(lengths) < len(prompts):
            self._step(lengths)
        before, start = sum(lengths.values()), time.perf_counter()
        while self._engine.has_unfinished_requests():
            self._step(lengths)
        return sum(lengths.values()) - before, time.perf_counter() - start

    def prefill(self, prompt: list[int]) -> tuple[int, float]:
        """Prompt tokens and seconds to the first token."""
        start = time.perf_counter()
        self._add([prompt], 1)
        lengths: dict[str, int] = {}
        while self._engine.has_unfinished_requests():
            self._step(lengths)
        return len(prompt), time.perf_counter() - start

    def _add(self, prompts: list[list[int]], new_tokens: int) -> None:
        params = self._sampling(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        for prompt in prompts:
            self._engine.add_request(str(self._next), {"prompt_token_ids": prompt}, params.clone())
            self._next += 1

    def _step(self, lengths: dict[str, int]) -> None:
        for output in self._engine.step():
            lengths[output.request_id] = len(output.outputs[0].token_ids)
