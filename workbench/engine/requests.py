"""Checks of a request that every engine shares, and what its output says. No torch.

PromptError says what was given and what is allowed; nothing is queued by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import pairwise
from operator import index
from typing import Any

from workbench.core import RequestOutput, SamplingParams, ScoreParams, Sequence, Tag
from workbench.errors import PromptError

Ids = SequenceOf[int]
Prompt = str | Ids


def encoded(tokenizer: Any, prompt: Prompt) -> list[int]:
    """A list of its own of the prompt's token ids; a text is tokenised as it is."""
    if isinstance(prompt, str):
        ids: list[int] = tokenizer.encode(prompt)
        return ids
    if isinstance(prompt, bytes | bytearray):
        raise PromptError(f"The prompt is {prompt!r:.200}; give text, or a list of token ids.")
    return whole_numbers(prompt, "token ids")


def paired(
    prompts: SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams]
) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its params: one for all, or a list of as many; PromptError for others."""
    try:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if isinstance(prompts, str):
            raise TypeError("one text is no list")
        return list(zip(prompts, each, strict=True))
    except (TypeError, ValueError):  # no list, or not as many: one message for both
        raise PromptError(
            f"generate got the prompts {prompts!r:.100} and the params {params!r:.100}; give a "
            "list of prompts, and one SamplingParams or as many."
        ) from None


def score_params(positions: Ids, columns: Ids) -> ScoreParams:
    """What a scoring request wants."""
    found = whole_numbers(positions, "positions"), whole_numbers(columns, "columns")
    return ScoreParams(tuple(found[0]), tuple(found[1]))


def whole_numbers(given: Iterable[int], what: str) -> list[int]:
    """The numbers as ints; PromptError for one that is not whole. what: "token ids", ..."""
    try:
        return [*map(index, given)]
    except TypeError:
        raise PromptError(f"The {what} are {given!r:.200}; allowed: whole numbers.") from None


def known_tokens(given: Iterable[int], vocab: int) -> list[int]:
    """The ids as ints; PromptError for one that is no whole number below `vocab`."""
    found = whole_numbers(given, "token ids")
    _require_inside("Token id", found, vocab, "the vocabulary")
    return found


def require_known(sequence: Sequence, engine: Any, vocab: int) -> None:
    """PromptError unless all of a request is what the engine's model, trace and cache can use.

    engine: its name, architecture and value_outputs are read. vocab: tokens its model knows.
    """
    name, outputs = engine.name, engine.value_outputs
    params, score = sequence.params, sequence.score
    if not isinstance(sequence.tag, Tag) or not isinstance(sequence.salt, bytes):
        raise PromptError(
            f"tag is {sequence.tag!r:.200} and salt {sequence.salt!r:.200}; allowed: a Tag or "
            "None, and bytes."
        )
    _require_inside("Token id", sequence.token_ids, vocab, f"{name}'s vocabulary")
    if score is not None:
        if not score.columns:
            raise PromptError("The request wants no column of the logits; give at least one.")
        kind, size = ("vocabulary", vocab) if outputs is None else ("value head", outputs)
        _require_inside("Column", score.columns, size, f"{name}'s {kind}")
        return
    if not isinstance(params, SamplingParams):
        raise PromptError(f"params is {params!r:.200}; give SamplingParams(...).")
    if outputs is not None:
        raise PromptError(
            f"{name} ({engine.architecture}) has a value head, {outputs} outputs in place of a "
            "vocabulary, and cannot generate; use it as a PRM, or ask score() for its columns."
        )
    _require_inside("Stop id", params.stop_token_ids, vocab, f"{name}'s vocabulary")


def _require_inside(what: str, given: Ids, size: int, where: str) -> None:
    if given and not 0 <= min(given) <= max(given) < size:
        bad = next(k for k in given if not 0 <= k < size)
        raise PromptError(f"{what} {bad} is not in {where}; allowed: 0 to {size - 1}.")


def length_limit(sequence: Sequence, max_model_len: int) -> int:
    """Tokens it may grow to: max_tokens, cut to max_model_len; of a score, those computed."""
    if sequence.params is None:
        return sequence.num_to_compute
    return min(sequence.num_prompt_tokens + sequence.params.max_tokens, max_model_len)


def require_servable(sequence: Sequence, max_model_len: int) -> None:
    """PromptError if it is empty or too long; a prompt must leave room for one token."""
    score, num_tokens = sequence.score, len(sequence.token_ids)
    if not num_tokens or (score is not None and not score.positions):
        raise PromptError("The request is empty; give a token (and a position to score).")
    if score is not None:
        places = score.positions
        if places[0] < 0 or places[-1] >= num_tokens or any(a >= b for a, b in pairwise(places)):
            raise PromptError(
                f"Logits are wanted at positions {places}; allowed are ascending ones from 0 "
                f"to {num_tokens - 1}, the request's last token."
            )
    length, most = sequence.num_to_compute, max_model_len - (score is None)
    if length > most:
        raise PromptError(
            f"The request has {length} tokens; allowed are at most {most} "
            f"(max_model_len={max_model_len}). Shorten it, or raise max_model_len."
        )


def output_of(
    sequence: Sequence, reason: str, token_bytes: SequenceOf[bytes], **more: Any
) -> RequestOutput:
    """What the caller is told of a request that has ended: its tokens, their text and log
    probabilities, and `more` fields. token_bytes: of each id, none of special tokens.
    """
    sampled = tuple(sequence.token_ids[sequence.num_prompt_tokens :])
    text = b"".join([token_bytes[k] for k in sampled]).decode(errors="replace")
    if sequence.params is not None and sequence.params.logprobs is not None:
        more["logprobs"] = tuple(sequence.logprobs)
    return RequestOutput(sequence.request_id, sampled, text, reason, **more)
