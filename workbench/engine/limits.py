"""What is refused at once, so that nothing waits for ever, and how far a request may go.

Independent of the memory split of the moment.
"""

from __future__ import annotations

from itertools import pairwise

from workbench.core import Sequence
from workbench.engine.inputs import tokens_to_compute
from workbench.errors import ConfigError, OutOfMemory, PromptError
from workbench.kvcache.manager import KVCacheManager


def require_room(cache: KVCacheManager, max_seqs: int, max_tokens: int, max_model_len: int) -> None:
    """ConfigError unless all can decode every step; OutOfMemory unless one request fits."""
    if not 1 <= max_seqs <= max_tokens:
        raise ConfigError(
            f"max_num_seqs={max_seqs} and max_num_batched_tokens={max_tokens}; allowed: "
            "1 <= max_num_seqs <= max_num_batched_tokens (all running sequences decode every step)."
        )
    needed = -(-max_model_len // cache.block_size)
    if cache.num_blocks < needed:
        raise OutOfMemory(
            f"{cache.num_blocks} KV blocks of {cache.block_size} tokens cannot hold one request of "
            f"max_model_len={max_model_len}, which needs {needed}. Give more memory, or set "
            f"max_model_len to at most {cache.num_blocks * cache.block_size}."
        )


def require_servable(sequence: Sequence, max_model_len: int) -> None:
    """PromptError if the request is empty or too long; a prompt must leave room for one token."""
    score = sequence.score
    if not sequence.token_ids or (score is not None and not score.positions):
        raise PromptError("The request is empty; give a token (and a position to score).")
    if score is not None:
        _require_positions(score.positions, len(sequence.token_ids))
    length, most = tokens_to_compute(sequence), max_model_len - (score is None)
    if length > most:
        raise PromptError(
            f"The request has {length} tokens; allowed are at most {most} "
            f"(max_model_len={max_model_len}). Shorten it, or raise max_model_len."
        )


def _require_positions(positions: tuple[int, ...], num_tokens: int) -> None:
    ascending = all(a < b for a, b in pairwise(positions))
    if not ascending or positions[0] < 0 or positions[-1] >= num_tokens:
        raise PromptError(
            f"Logits are wanted at positions {positions}; allowed are ascending ones from 0 to "
            f"{num_tokens - 1}, the request's last token."
        )


def length_limit(sequence: Sequence, max_model_len: int) -> int:
    """Number of tokens at which generation ends for length: max_tokens, cut to max_model_len."""
    if sequence.params is None:
        return max_model_len + 1
    return min(sequence.num_prompt_tokens + sequence.params.max_tokens, max_model_len)


def first_wanted(sequence: Sequence) -> int | None:
    """The first position whose logits a scoring request still lacks; None when it generates."""
    if sequence.score is None:
        return None
    return next(p for p in sequence.score.positions if p not in sequence.score_rows)
