"""What a chat template writes around the messages of a chat that grows turn by turn.

Rendered once and cut at its messages, so that later each message is tokenised alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.errors import ModelError

GOOD = "+"
"""The assistant's every message, in RLHFlow's chats."""


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
