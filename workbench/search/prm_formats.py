"""How each family of reward models is shown a partial solution, and where it gives its verdict.

Every input ends at the position whose logits are the last step's verdict. Steps are tokenised
alone: what tokens a step has does not depend on the steps after it, and only a new step is
tokenised.
"""

from __future__ import annotations

from array import array
from typing import Any, TypeAlias

from workbench.errors import ModelError

TokenIds: TypeAlias = "array[int]"  # of C integers: thousands of inputs are held at a time
GOOD, BAD = "+", "-"
"""Verdicts; the first is the assistant's every message in RLHFlow's chats."""


class Format:
    """Inputs of one format over one tokenizer. Texts of steps come without white space around.

    columns: what to ask at a verdict's position: (good, bad), or a lone value.
    value_outputs: of the value head it reads; None: a language model's logits.
    head, between, mark: tokens before the question, before each later step, and after every step;
    a format's own constructor sets those it has, and head is the begin-of-sequence token if there
    is one.
    """

    value_outputs: int | None = None
    columns: tuple[int, ...]

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        bos = tokenizer.bos_id
        self.head = array("i", () if bos is None else (bos,))
        self.between = self.mark = array("i")

    def first(self, question: str, step: str) -> TokenIds:
        """Token ids of a solution with one step."""
        return self.head + self.ids(f"{question} {step}") + self.mark

    def next(self, token_ids: TokenIds, step: str) -> TokenIds:
        """Token ids of the solution `token_ids` with one more step."""
        return token_ids + self.between + self.ids(step) + self.mark

    def ids(self, text: str, count: int | None = None) -> TokenIds:
        """Token ids of a piece of an input, no special ones; ModelError unless they are `count`."""
        ids = array("i", self.tokenizer.encode(text, add_special_tokens=False) if text else ())
        if count not in (None, len(ids)):
            raise ModelError(
                f"The PRM's tokenizer writes {text!r} as {len(ids)} tokens; {type(self).__name__} "
                f"scoring needs it to be {count}."
            )
        return ids


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


class RLHFlow(Format):
    """A chat of (question + " " + step 0) -> "+", step 1 -> "+", ...: one turn a step.

    The verdict is the softmax over "+" and "-" where the assistant's "+" is predicted. Each message
    is tokenised alone. Source: RLHFlow/Llama3.1-8B-PRM-Deepseek-Data.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        head, mark, between = chat_pieces(tokenizer)
        good = self.ids(GOOD, 1)
        self.columns = (*good, *self.ids(BAD, 1))
        self.head, self.mark = self.ids(head), self.ids(mark)
        self.between = good + self.ids(between)


class Qwen25MathPRM(Format):
    """One chat whose answer is the steps, `<extra_0>` after each; two labels are read there.

    The verdict is the softmax over the head's labels, 1 being good. Source: the model card of
    Qwen/Qwen2.5-Math-PRM-7B (its system prompt, its chat template, its `make_step_rewards`).
    """

    value_outputs = 2
    columns = (1, 0)
    system = "Please reason step by step, and put your final answer within \\boxed{}."

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.mark = self.ids("<extra_0>", 1)

    def first(self, question: str, step: str) -> TokenIds:
        texts = {"system": self.system, "user": question, "assistant": "<extra_0>"}
        messages = [{"role": role, "content": text} for role, text in texts.items()]
        chat = self.tokenizer.render_chat(messages, add_generation_prompt=False)
        head, found, _ = chat.rpartition("<extra_0>")
        if not found:
            raise ModelError(
                "The PRM's chat template drops the assistant's message; Qwen2.5-Math-PRM scoring "
                "needs it."
            )
        return self.next(self.ids(head), step)


class Skywork(Format):
    """The problem, then the steps, a newline after each; a value is read at each step's newline.

    The verdict is the sigmoid of the value. A newline inside a step ends no step. Source:
    SkyworkAI/skywork-o1-prm-inference (`prepare_input`, which tokenises each step alone).
    """

    value_outputs = 1
    columns = (0,)

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.mark = self.ids("\n", 1)

    def first(self, question: str, step: str) -> TokenIds:
        return self.next(self.head + self.ids(f"{question}\n"), step)


class MathShepherd(Format):
    """Question and steps as one text, " ки" after each step and a newline between.

    The verdict is the softmax over "+" and "-", as they follow a space, at the "ки". Source: the
    model card of peiyi9979/math-shepherd-mistral-7b-prm (ids 648, 387 and 12902 there).
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.columns = tuple(self.ids(f"{GOOD} {BAD}", 2))
        self.mark, self._line = self.ids("ки", 1), self.ids("ки\n")

    def next(self, token_ids: TokenIds, step: str) -> TokenIds:
        # SentencePiece writes a text's beginning as if a space came before: the mark stands there.
        ids = self.ids(f"ки\n{step}")
        if ids[: len(self._line)] != self._line:
            raise ModelError(
                "The PRM's tokenizer joins the newline after 'ки' with a step's text; "
                f"Math-Shepherd scoring needs them apart. The step is {step!r}."
            )
        return token_ids + ids[1:] + self.mark


FORMATS: dict[str, type[Format]] = {
    "rlhflow": RLHFlow,
    "qwen2.5-math-prm": Qwen25MathPRM,
    "skywork": Skywork,
    "math-shepherd": MathShepherd,
}
