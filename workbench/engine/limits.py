"""What is refused at once, so that nothing waits for ever, and how far a request may go.

Independent of the memory split of the moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import pairwise
from operator import index
from typing import Any

from workbench.core import SamplingParams, Sequence, Tag
from workbench.engine.inputs import tokens_to_compute
from workbench.errors import ConfigError, OutOfMemory, PromptError
from workbench.kvcache.manager import KVCacheManager
from workbench.models.spec import ModelSpec


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


def paired(prompts: Any, params: Any) -> list[tuple[Any, SamplingParams]]:
    """Each prompt with its SamplingParams: one for all, or as many. Raises PromptError."""
    try:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if not isinstance(prompts, str):
            return list(zip(prompts, each, strict=True))
    except (TypeError, ValueError):  # no list, or not as many: one answer to the user
        pass
    raise PromptError(
        f"generate got the prompts {prompts!r:.100} and the params {params!r:.100}; give a list of "
        "prompts, and one SamplingParams or as many."
    )


def whole_numbers(given: Iterable[int], what: str) -> list[int]:
    """The numbers as ints; PromptError for one that is not whole. what: "token ids", ..."""
    try:
        return [*map(index, given)]
    except TypeError:
        raise PromptError(f"The {what} are {given!r:.200}; allowed: whole numbers.") from None


def require_text(prompt: str) -> None:
    """PromptError for a text with half a character, which no tokenizer can encode."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"The prompt has {prompt[error.start]!r} at character {error.start}, half of a "
            "surrogate pair; give valid Unicode."
        ) from None


def require_request(sequence: Sequence, spec: ModelSpec, name: str) -> None:
    """PromptError unless all of a request is what this model, the trace and the cache can use."""
    if not isinstance(sequence.tag, Tag) or not isinstance(sequence.salt, bytes):
        raise PromptError(
            f"tag is {sequence.tag!r:.200} and salt {sequence.salt!r:.200}; allowed: a Tag or "
            "None, and bytes."
        )
    _require_inside("Token id", sequence.token_ids, spec.vocab, f"{name}'s vocabulary")
    if sequence.score is None:
        _require_params(sequence.params, spec, name)
    elif not sequence.score.columns:
        raise PromptError("The request wants no column of the logits; give at least one.")
    else:
        kind = "vocabulary" if spec.value_head is None else "value head"
        _require_inside("Column", sequence.score.columns, spec.outputs, f"{name}'s {kind}")


def _require_params(params: SamplingParams | None, spec: ModelSpec, name: str) -> None:
    """PromptError for what is no SamplingParams, and for a model that cannot follow them."""
    if not isinstance(params, SamplingParams):
        raise PromptError(f"params is {params!r:.200}; give SamplingParams(...).")
    if spec.value_head is not None:
        raise PromptError(
            f"{name} ({spec.architecture}) has a value head, {spec.outputs} outputs in place of a "
            "vocabulary, and cannot generate; use it as a PRM, or ask score() for its columns."
        )
    _require_inside("Stop id", params.stop_token_ids, spec.vocab, f"{name}'s vocabulary")


def _require_inside(what: str, given: SequenceOf[int], size: int, where: str) -> None:
    if given and not 0 <= min(given) <= max(given) < size:
        bad = next(k for k in given if not 0 <= k < size)
        raise PromptError(f"{what} {bad} is not in {where}; allowed: 0 to {size - 1}.")


def require_served_length(max_model_len: int, spec: ModelSpec, name: str) -> None:
    """ConfigError when requests may be longer than the model has positions or sees of them."""
    if max_model_len > spec.max_model_len:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds the {spec.max_model_len} positions of {name}; "
            "give at most that, or None."
        )
    if spec.sliding_window is not None and max_model_len > spec.sliding_window:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds the sliding window of {name}, in which a token "
            f"sees {spec.sliding_window} positions; sliding-window attention is not supported: "
            f"give max_model_len={spec.sliding_window} at most."
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
