"""Continuous batching of `transformers` (generate_batch), on this interpreter's own packages.

How it is timed: by the stamps that it puts on every token itself. decode: from the latest first
token to the last token, over the tokens sampled in between. prefill: to the only token, its own
starting of a manager thread included. Settings: fp32, its paged sdpa attention, room for the whole
batch.
"""

from __future__ import annotations

import time
from typing import Any

PAGE = 32  # positions; as many whole pages as the largest batch needs are asked for


class Peer:
    """One model under transformers' continuous batching. model: a Hugging Face folder."""

    def __init__(
        self, model: str, threads: int, max_seqs: int, max_tokens: int, max_model_len: int
    ) -> None:
        import torch  # noqa: PLC0415 - a worker's imports are part of its load
        import transformers  # noqa: PLC0415

        torch.set_num_threads(threads)
        self.version = str(transformers.__version__)
        self._transformers = transformers
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._room: Any = transformers.ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=max_seqs * (-(-max_model_len // PAGE)),
            max_batch_tokens=max_tokens,
            allow_block_sharing=False,
        )

    def decode(self, prompts: list[list[int]], new_tokens: int) -> tuple[int, float]:
        """Tokens and seconds after every sequence's first token."""
        stamps = [output.timestamps for output in self._generate(prompts, new_tokens)]
        start = max(own[0] for own in stamps)
        later = [stamp for own in stamps for stamp in own if stamp > start]
        return len(later), max(later) - start

    def prefill(self, prompt: list[int]) -> tuple[int, float]:
        """Prompt tokens and seconds to the first token."""
        start = time.perf_counter()
        (output,) = self._generate([prompt], 1)
        return len(prompt), output.timestamps[0] - start

    def _generate(self, prompts: list[list[int]], new_tokens: int) -> list[Any]:
        rules = self._transformers.GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        outputs = self._model.generate_batch(
            prompts,
            generation_config=rules,
            continuous_batching_config=self._room,
            record_timestamps=True,
            progress_bar=False,
        )
        found = list(outputs.values())
        short = [o for o in found if len(o.generated_tokens) != new_tokens]
        if len(found) != len(prompts) or short:
            raise RuntimeError(f"{len(found)} of {len(prompts)} came, {len(short)} cut short")
        return found
