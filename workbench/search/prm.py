"""The process reward model: how a partial solution is shown to it, and what its logits mean.

RLHFlow's format (RLHFlow/Llama3.1-8B-PRM-Deepseek-Data) is a chat of (question + " " + step 0)
-> "+", step 1 -> "+", ...; a step's score is the softmax over the logits of "+" and "-" where the
assistant's "+" is predicted. Each message is tokenised alone and the chat grows step by step: the
input of a longer solution begins with the shorter one's, so a prefix cache serves it, and only a
new step is ever tokenised.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from workbench.core import TokenEngine
from workbench.errors import ConfigError, ModelError, nearest

TokenIds: TypeAlias = "array[int]"  # of C integers: thousands of inputs are held at a time
FORMATS = ("rlhflow",)
GOOD, BAD = "+", "-"
SCORE_UNIT = 2**16
"""Scores are whole multiples of 1 / SCORE_UNIT, so that beams with equal texts tie exactly."""


@dataclass(frozen=True, slots=True)
class ChatPieces:
    """What the chat template writes around the messages of a PRM chat, as text.

    A chat of k steps is head + content + verdict_mark (+ GOOD + between + content + verdict_mark)*.
    """

    head: str
    verdict_mark: str
    between: str

    @classmethod
    def of(cls, tokenizer: Any) -> ChatPieces:
        """Render a chat of stand-in texts and cut it at them.

        Raises ModelError when the template does not repeat itself from turn to turn: then a longer
        solution's input would not begin with a shorter one's.
        """
        contents = ["first marker", GOOD, "second marker", GOOD, "third marker", GOOD]
        roles = ("user", "assistant")
        messages = [{"role": roles[k % 2], "content": text} for k, text in enumerate(contents)]
        rest = tokenizer.render_chat(messages, add_generation_prompt=False)
        gaps = []
        for marker in contents[::2]:
            before, found, rest = rest.partition(marker)
            if not found:
                raise ModelError(
                    "The PRM's chat template drops a user message; RLHFlow scoring needs all."
                )
            gaps.append(before)
        gaps.append(rest)
        return cls._from_gaps(gaps)

    @classmethod
    def _from_gaps(cls, gaps: list[str]) -> ChatPieces:
        head, first, second, tail = gaps
        mark, found, between = first.rpartition(GOOD)
        if not found or first != second or not tail.startswith(mark + GOOD):
            raise ModelError(
                "The PRM's chat template writes a turn differently as the chat grows, so the input "
                "of k + 1 steps would not begin with that of k steps; RLHFlow scoring needs it to."
            )
        return cls(head, mark, between)


class PRM:
    """A scoring engine together with its format; shared by any number of searches.

    Raises ConfigError for an unknown format, ModelError where the tokenizer or the chat template
    cannot express the format.
    """

    def __init__(self, engine: TokenEngine, format: str = "rlhflow") -> None:
        if format not in FORMATS:
            raise ConfigError(
                f"PRM format is {format!r}; allowed: {', '.join(FORMATS)}."
                f"{nearest(format, FORMATS)}"
            )
        self.engine = engine
        self.format = format
        self.fingerprint = f"{engine.fingerprint}/{format}"
        self._encode = engine.tokenizer.encode
        pieces = ChatPieces.of(engine.tokenizer)
        self.columns = (self._verdict_id(GOOD), self._verdict_id(BAD))
        self._head = self._ids(pieces.head)
        self._verdict_mark = self._ids(pieces.verdict_mark)
        self._between = array("i", [self.columns[0]]) + self._ids(pieces.between)

    def first_input(self, question: str, step: str) -> TokenIds:
        """Token ids of a chat with one step; its last position predicts the verdict."""
        return self._head + self._ids(f"{question} {step.strip()}") + self._verdict_mark

    def next_input(self, token_ids: TokenIds, step: str) -> TokenIds:
        """Token ids of the chat `token_ids` with one more step; `token_ids` is their beginning."""
        return token_ids + self._between + self._ids(step.strip()) + self._verdict_mark

    def fits(self, token_ids: TokenIds) -> bool:
        """Whether the engine takes a scoring request of this length."""
        return len(token_ids) < self.engine.max_model_len

    @staticmethod
    def scores(logits: Iterable[Iterable[float]]) -> Iterator[float]:
        """Probability of "+" for each row of (good, bad) logits, rounded to 2^-16."""
        for good, bad in logits:
            difference = min(max(float(bad) - float(good), -700.0), 700.0)
            yield round(SCORE_UNIT / (1.0 + math.exp(difference))) / SCORE_UNIT

    def _ids(self, text: str) -> TokenIds:
        return array("i", self._encode(text, add_special_tokens=False) if text else ())

    def _verdict_id(self, text: str) -> int:
        ids = self._ids(text)
        if len(ids) != 1:
            raise ModelError(
                f"The PRM's tokenizer writes {text!r} as {len(ids)} tokens; "
                "RLHFlow scoring needs it to be one."
            )
        return ids[0]
