"""How each family of reward models is shown a partial solution, and where it gives its verdict.

Every input ends at the position whose logits are the last step's verdict. Steps are tokenised
alone: what tokens a step has does not depend on the steps after it, and only a new step is
tokenised.
"""

from __future__ import annotations

from array import array
from typing import Any, Protocol, TypeAlias

from workbench.errors import ModelError

TokenIds: TypeAlias = "array[int]"  # of C integers: thousands of inputs are held at a time
GOOD, BAD = "+", "-"
"""Verdicts; the first is the assistant's every message in RLHFlow's chats."""


class Format(Protocol):
    """Inputs of one format over one tokenizer. Texts of steps come without white space around.

    columns: what to ask at a verdict's position: (good, bad), or a lone value.
    value_outputs: of the value head it reads; None: a language model's logits.
    """

    value_outputs: int | None
    columns: tuple[int, ...]

    def __init__(self, tokenizer: Any) -> None: ...

    def first(self, question: str, step: str) -> TokenIds:
        """Token ids of a solution with one step."""
        ...

    def next(self, token_ids: TokenIds, step: str) -> TokenIds:
        """Token ids of the solution `token_ids` with one more step."""
        ...


class Encoder:
    """A tokenizer for pieces of an input: it adds no special tokens and names what it lacks."""

    def __init__(self, tokenizer: Any, format: str) -> None:
        self._tokenizer, self._format = tokenizer, format

    def __call__(self, text: str) -> TokenIds:
        ids = self._tokenizer.encode(text, add_special_tokens=False) if text else ()
        return array("i", ids)

    def single(self, text: str) -> int:
        """The id of a text that must be one token."""
        return self.exactly(text, 1)[0]

    def exactly(self, text: str, count: int) -> TokenIds:
        """The ids of a text that must be so many tokens; ModelError when it is not."""
        ids = self(text)
        if len(ids) != count:
            raise ModelError(
                f"The PRM's tokenizer writes {text!r} as {len(ids)} tokens; {self._format} scoring "
                f"needs it to be {count}."
            )
        return ids

    def start(self) -> TokenIds:
        """The begin-of-sequence token, where the tokenizer has one."""
        bos = self._tokenizer.bos_id
        return array("i", () if bos is None else (bos,))


def chat_pieces(tokenizer: Any) -> tuple[str, str, str]:
    """What the chat template writes around the messages of a PRM chat: head, mark and between.

    A chat of k steps is head + content + mark (+ GOOD + between + content + mark)*. Rendered once
    and cut at stand-in texts, so that later each message is tokenised alone. Raises ModelError when
    the template does not repeat itself from turn to turn: then a longer solution's input would not
    begin with a shorter one's.
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
    head, first, second = gaps
    mark, found, between = first.rpartition(GOOD)
    if not found or first != second or not rest.startswith(mark + GOOD):
        raise ModelError(
            "The PRM's chat template writes a turn differently as the chat grows, so the input "
            "of k + 1 steps would not begin with that of k steps; RLHFlow scoring needs it to."
        )
    return head, mark, between


class RLHFlow:
    """A chat of (question + " " + step 0) -> "+", step 1 -> "+", ...: one turn a step.

    The verdict is the softmax over "+" and "-" where the assistant's "+" is predicted. Each message
    is tokenised alone. Source: RLHFlow/Llama3.1-8B-PRM-Deepseek-Data.
    """

    value_outputs: int | None = None

    def __init__(self, tokenizer: Any) -> None:
        self._ids = Encoder(tokenizer, "RLHFlow")
        head, mark, between = chat_pieces(tokenizer)
        self.columns: tuple[int, ...] = (self._ids.single(GOOD), self._ids.single(BAD))
        self._head, self._verdict_mark = self._ids(head), self._ids(mark)
        self._between = array("i", [self.columns[0]]) + self._ids(between)

    def first(self, question: str, step: str) -> TokenIds:
        return self._head + self._ids(f"{question} {step}") + self._verdict_mark

    def next(self, token_ids: TokenIds, step: str) -> TokenIds:
        return token_ids + self._between + self._ids(step) + self._verdict_mark


class Qwen25MathPRM:
    """One chat whose answer is the steps, `<extra_0>` after each; two labels are read there.

    The verdict is the softmax over the head's labels, 1 being good. Source: the model card of
    Qwen/Qwen2.5-Math-PRM-7B (its system prompt, its chat template, its `make_step_rewards`).
    """

    value_outputs: int | None = 2
    columns: tuple[int, ...] = (1, 0)
    mark = "<extra_0>"
    system = "Please reason step by step, and put your final answer within \\boxed{}."

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids = Encoder(tokenizer, "Qwen2.5-Math-PRM")
        self._mark = array("i", [self._ids.single(self.mark)])

    def first(self, question: str, step: str) -> TokenIds:
        texts = {"system": self.system, "user": question, "assistant": self.mark}
        messages = [{"role": role, "content": text} for role, text in texts.items()]
        chat = self._tokenizer.render_chat(messages, add_generation_prompt=False)
        head, found, _ = chat.rpartition(self.mark)
        if not found:
            raise ModelError(
                "The PRM's chat template drops the assistant's message; Qwen2.5-Math-PRM scoring "
                "needs it."
            )
        return self.next(self._ids(head), step)

    def next(self, token_ids: TokenIds, step: str) -> TokenIds:
        return token_ids + self._ids(step) + self._mark


class Skywork:
    """The problem, then the steps, a newline after each; a value is read at each step's newline.

    The verdict is the sigmoid of the value. A newline inside a step ends no step. Source:
    SkyworkAI/skywork-o1-prm-inference (`prepare_input`, which tokenises each step alone).
    """

    value_outputs: int | None = 1
    columns: tuple[int, ...] = (0,)

    def __init__(self, tokenizer: Any) -> None:
        self._ids = Encoder(tokenizer, "Skywork")
        self._newline = array("i", [self._ids.single("\n")])

    def first(self, question: str, step: str) -> TokenIds:
        return self.next(self._ids.start() + self._ids(f"{question}\n"), step)

    def next(self, token_ids: TokenIds, step: str) -> TokenIds:
        return token_ids + self._ids(step) + self._newline


class MathShepherd:
    """Question and steps as one text, " ки" after each step and a newline between.

    The verdict is the softmax over "+" and "-", as they follow a space, at the "ки". Source: the
    model card of peiyi9979/math-shepherd-mistral-7b-prm (ids 648, 387 and 12902 there).
    """

    value_outputs: int | None = None
    mark = "ки"

    def __init__(self, tokenizer: Any) -> None:
        self._ids = Encoder(tokenizer, "Math-Shepherd")
        self.columns: tuple[int, ...] = tuple(self._ids.exactly(f"{GOOD} {BAD}", 2))
        self._mark = array("i", [self._ids.single(self.mark)])
        self._line = self._ids(f"{self.mark}\n")

    def first(self, question: str, step: str) -> TokenIds:
        return self._ids.start() + self._ids(f"{question} {step}") + self._mark

    def next(self, token_ids: TokenIds, step: str) -> TokenIds:
        # SentencePiece writes a text's beginning as if a space came before: the mark stands there.
        ids = self._ids(f"{self.mark}\n{step}")
        if ids[: len(self._line)] != self._line:
            raise ModelError(
                f"The PRM's tokenizer joins the newline after {self.mark!r} with a step's text; "
                f"Math-Shepherd scoring needs them apart. The step is {step!r}."
            )
        return token_ids + ids[1:] + self._mark


FORMATS: dict[str, type[Format]] = {
    "rlhflow": RLHFlow,
    "qwen2.5-math-prm": Qwen25MathPRM,
    "skywork": Skywork,
    "math-shepherd": MathShepherd,
}
