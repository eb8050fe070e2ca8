"""The process reward model: a scoring engine, the format in which it is asked, and what it scored.

The format follows from the model: from its architecture where that has a value head, else from its
name, since a language model's config does not say how it was trained to judge; or it is given.
The law of every format: the input of k + 1 steps, up to step k's position, is the input of k steps,
so a prefix cache serves a growing solution, and only a new step is ever tokenised, alone. A cached
position returns no score, so a score cache stands beside the prefix cache.

A generative verifier decodes before it judges: after the input of a solution it is asked for, it
samples critiques, and each one's verdict is read behind it. A critique's seed comes from the run's
seed, the problem, the steps and its number, so no batch, order or split of memory enters a score.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias

import numpy as np

from workbench.config import AtLeastOne, Checked, Range
from workbench.core import RequestOutput, SamplingParams, Tag, TokenEngine
from workbench.errors import ConfigError, ModelError, PromptError
from workbench.search.answers import UNSCORED, check_choice
from workbench.search.problems import Problem
from workbench.search.strategies import Beam

TokenIds: TypeAlias = "array[int]"  # of C integers: thousands of inputs are held at a time
GOOD, BAD = "+", "-"
"""Verdicts; the first is the assistant's every message in RLHFlow's chats."""


# -- formats: how a family of reward models is shown a partial solution --


class Format:
    """Inputs of one format over one tokenizer. Texts of steps come without white space around.

    columns: what to ask at a verdict's position: (good, bad), or a lone value.
    value_outputs: of the value head it reads; None: a language model's logits.
    head, between, mark: tokens before the question, before each later step, and after every step;
    a format's own constructor sets those it has, and head is the begin-of-sequence token if there
    is one.
    critique_stop: of a generative verifier, the texts that end a critique; None: it writes none.
    ask, lead: its tokens between a solution and a critique, and between that and the verdict.
    """

    value_outputs: int | None = None
    critique_stop: tuple[str, ...] | None = None
    columns: tuple[int, ...]

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        bos = tokenizer.bos_id
        self.head = array("i", () if bos is None else (bos,))
        self.between = self.mark = self.ask = self.lead = array("i")

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


class RLHFlow(Format):
    """A chat of (question + " " + step 0) -> "+", step 1 -> "+", ...: one turn a step.

    The verdict is the softmax over "+" and "-" where the assistant's "+" is predicted. A chat of k
    steps is head + content + mark (+ "+" + between + content + mark)*: the template is rendered
    once and cut at stand-in texts, so that each message is tokenised alone. Raises ModelError where
    it does not repeat itself from turn to turn. Source: RLHFlow/Llama3.1-8B-PRM-Deepseek-Data.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        contents = ["first marker", GOOD, "second marker", GOOD, "third marker", GOOD]
        messages = [
            {"role": ("user", "assistant")[k % 2], "content": text}
            for k, text in enumerate(contents)
        ]
        rest, gaps = tokenizer.render_chat(messages, add_generation_prompt=False), []
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
        self.first("question", "step")  # raises here what it would of a solution

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
        self.next(self.head, "step")  # raises here what it would of a solution

    def next(self, token_ids: TokenIds, step: str) -> TokenIds:
        # SentencePiece writes a text's beginning as if a space came before: the mark stands there.
        ids = self.ids(f"ки\n{step}")
        if ids[: len(self._line)] != self._line:
            raise ModelError(
                "The PRM's tokenizer joins the newline after 'ки' with a step's text; "
                f"Math-Shepherd scoring needs them apart. The step is {step!r}."
            )
        return token_ids + ids[1:] + self.mark


class ThinkPRM(Format):
    """A generative verifier: one user message shows question and steps; a critique is the reply.

    The verdict is the softmax over "yes" and "no" after the critique and the question whether the
    solution is correct. Steps are shown as they are, a line each. What both words begin with, if a
    tokenizer cuts them so, goes before the verdict. A critique is read as it was sampled; the
    source cuts off what ended it, and ends it at a question of its own, too. Raises ModelError
    where the tokenizer cannot write the words or tell them apart. Source: Khalifa et al. 2025,
    arXiv 2504.16828 (mukhal/ThinkPRM, prompt of utils/helper.py, decision of prm/thinkprm_api.py).
    GenPRM (Zhao et al. 2025, arXiv 2504.00891) reads its score alike, and averages critiques'.
    """

    critique_stop = ("</think>",)
    prompt = (
        "You are given a math problem and a proposed step-by-step solution:\n\n[Math Problem]\n\n"
        "{}\n\n[Solution]\n\n{}\n\nReview and critique each step in the proposed solution to "
        "determine whether each step is correct. If the solution is incomplete, only verify the "
        "provided steps."
    )

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        content = self.prompt.format("first marker", "second marker")
        chat = tokenizer.render_chat([{"role": "user", "content": content}])
        head, _, rest = chat.partition("first marker")
        self._middle, found, tail = rest.partition("second marker")
        if not found:
            raise ModelError(
                "The PRM's chat template drops the user's message; ThinkPRM scoring needs it."
            )
        good, bad = self.ids(" yes"), self.ids(" no")
        apart = [k for k, (one, other) in enumerate(zip(good, bad)) if one != other]
        written = [tokenizer.decode(list(ids)).strip() for ids in (good, bad)]
        if written != ["yes", "no"] or not apart:
            raise ModelError(
                f"The PRM's tokenizer writes ' yes' and ' no' as {list(good)} and {list(bad)}, "
                f"which say {' and '.join(map(repr, written))}; ThinkPRM scoring needs tokens of "
                "both words that differ. Give a verifier that has them, or another --prm-format."
            )
        self.columns = (good[apart[0]], bad[apart[0]])
        self.head, self.between = self.ids(head), self.ids("\n")
        self.ask = self.ids(f"{tail}\nLet's verify step by step:")
        self.lead = self.ids("\nIs the solution correct?") + good[: apart[0]]

    def first(self, question: str, step: str) -> TokenIds:
        return self.head + self.ids(question + self._middle) + self.ids(step)


FORMATS: dict[str, type[Format]] = {
    "rlhflow": RLHFlow,
    "qwen2.5-math-prm": Qwen25MathPRM,
    "skywork": Skywork,
    "math-shepherd": MathShepherd,
    "thinkprm": ThinkPRM,
}


# -- a reward model --

ARCHITECTURES = {
    "Qwen2ForProcessRewardModel": "qwen2.5-math-prm",
    "Qwen2ForPrmModel": "skywork",
}
"""Formats of reward models that their architecture tells."""

NAMES = {
    "tiny-prm": "rlhflow",
    "llama-3.1-8b-prm": "rlhflow",
    "llama3.1-8b-prm": "rlhflow",
    "rlhflow": "rlhflow",
    "math-shepherd": "math-shepherd",
    "thinkprm": "thinkprm",
}
"""Formats of language models by a part of their names, in lower case."""

SCORE_UNIT = 2**16
"""Scores are whole multiples of 1 / SCORE_UNIT, so that beams with equal texts tie exactly."""


def known_format(name: str, architecture: str) -> str | None:
    """The format of a model, by its architecture or by its name; None when neither tells it."""
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    end = "/".join(name.lower().rstrip("/").split("/")[-2:])  # owner/name, or a folder's end
    return next((format for part, format in NAMES.items() if part in end), None)


@dataclass(frozen=True, slots=True)
class Critiques(Checked):
    """How a generative verifier is asked: `count` critiques a step, whose verdicts are averaged."""

    count: AtLeastOne = 1
    tokens: AtLeastOne = 512  # of one critique, at most
    temperature: Annotated[float, Range(0)] = 0.7


class PRM:
    """A scoring engine together with its format; shared by any number of searches.

    format: None takes the one that fits the model. critiques: of a generative verifier; None: the
    defaults. Raises ConfigError for a format that is unknown, cannot be told, is not for this
    model's head, or writes no critiques where some are asked for; ModelError where tokenizer or
    chat template cannot express it.
    """

    critiques: Critiques | None = None  # None: the format writes none
    stop: tuple[str, ...] = ()

    def __init__(
        self, engine: TokenEngine, format: str | None = None, critiques: Critiques | None = None
    ) -> None:
        supported = f"supported: {', '.join(FORMATS)}"
        name = format or known_format(engine.name, engine.architecture)
        if name is None:
            raise ConfigError(
                f"The PRM format of {engine.name} ({engine.architecture}) cannot be told from its "
                f"name or architecture; {supported}. Give one: PRM(engine, format=...), or "
                "`workbench run --prm-format`."
            )
        check_choice("PRM format", name, tuple(FORMATS))
        wanted = FORMATS[name].value_outputs
        if wanted != engine.value_outputs:
            raise ConfigError(
                f"PRM format {name!r} reads {_head(wanted)}; {engine.name} "
                f"({engine.architecture}) has {_head(engine.value_outputs)}; {supported}."
            )
        self.engine, self.format = engine, name
        self.fingerprint = f"{engine.fingerprint}/{name}"
        self._inputs = inputs = FORMATS[name](engine.tokenizer)
        self.columns, self.ask, self.lead = inputs.columns, inputs.ask, inputs.lead
        if inputs.critique_stop is not None:
            own = self.critiques = critiques or Critiques()
            self.stop = inputs.critique_stop
            self.fingerprint += f"/{own.count}x{own.tokens}@{own.temperature}"
        elif critiques is not None:
            able = ", ".join(k for k, v in FORMATS.items() if v.critique_stop is not None)
            raise ConfigError(
                f"PRM format {name!r} writes no critiques, and {critiques} was given; formats that "
                f"do: {able}. Give one of them, or no critique settings."
            )

    def changed(self, format: str | None, **critiques: Any) -> PRM:
        """The same engine asked in another way; None: as it is. critiques: fields of Critiques."""
        given = {name: value for name, value in critiques.items() if value is not None}
        if format is None and not given:
            return self
        own = self.critiques if format in (None, self.format) else None
        asked = replace(own or Critiques(), **given) if given else own
        return PRM(self.engine, format or self.format, asked)

    @property
    def reserve(self) -> int:
        """Tokens that a request may come to have behind the input of its solution."""
        own = self.critiques
        return 0 if own is None else len(self.ask) + own.tokens + len(self.lead)

    def require_room(self) -> None:
        """ConfigError where max_model_len holds no solution and a critique."""
        if self.reserve >= self.engine.max_model_len:
            raise ConfigError(
                f"A critique takes up to {self.reserve} tokens with what surrounds it; "
                f"{self.engine.name} has max_model_len = {self.engine.max_model_len}. Give less "
                "critique_tokens, or raise it."
            )

    def first_input(self, question: str, step: str) -> TokenIds:
        """Token ids of a solution with one step; its verdict is read at the last position."""
        return self._inputs.first(question, step.strip())

    def next_input(self, token_ids: TokenIds, step: str) -> TokenIds:
        """Token ids of the solution `token_ids` with one more step; they are its beginning."""
        return self._inputs.next(token_ids, step.strip())

    def queue(self, request: ScoreRequest, tag: Tag | None = None) -> int:
        """Ask the engine for verdicts, or for a critique; returns the request id."""
        if request.params is not None:
            return self.engine.add(request.token_ids, request.params, tag=tag)
        places = request.positions
        return self.engine.add_score(request.token_ids, places, self.columns, tag=tag)

    @staticmethod
    def scores(logits: Iterable[Iterable[float]]) -> Iterator[float]:
        """A probability for each row, rounded to 2^-16.

        A row of two logits is (good, bad), and its softmax taken; of a lone value the sigmoid,
        which is the softmax of it and 0.
        """
        for good, *bad in logits:
            difference = min(max(float(bad[0] if bad else 0.0) - float(good), -700.0), 700.0)
            yield round(SCORE_UNIT / (1.0 + math.exp(difference))) / SCORE_UNIT


def _head(outputs: int | None) -> str:
    return "a vocabulary's logits" if outputs is None else f"a value head of {outputs} outputs"


Key = tuple[str, tuple[str, str], tuple[str, ...]]


class ScoreCache(dict[Key, float]):
    """(PRM's fingerprint, problem's id and text, steps) -> score of the last step.

    A run has one of its own unless it is given one.
    """


@dataclass(slots=True)
class Critique:
    """One sampled critique. score: the verdict after it, None until it is known."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    score: float | None = None

    @property
    def read(self) -> tuple[int, ...]:
        """The tokens before its verdict: no end of sequence is among them."""
        return self.tokens[:-1] if self.finish_reason == "eos" else self.tokens


@dataclass(slots=True, eq=False)
class StepNode:
    """A solution up to one step. token_ids: its PRM input, empty before any step, None: no room.

    steps: the texts so far, this one last; lineage: their nodes, this one last.
    asks: whether the PRM is to judge this step; otherwise its score is its parent's.
    """

    steps: tuple[str, ...]
    token_ids: TokenIds | None
    asks: bool
    lineage: list[StepNode] = field(default_factory=list)
    score: float | None = None
    asked: bool = False  # of the PRM, in this search
    in_flight: bool = False
    critiques: dict[int, Critique] = field(default_factory=dict)  # by number


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One request to the PRM engine: the last node's input, with the positions of `asked`.

    positions: of the last token before each asked step's verdict.
    params: how to sample a critique of the one asked step, whose verdict is then asked for; None:
    this request brings verdicts. critique: its number.
    """

    beam: Beam
    token_ids: TokenIds
    asked: tuple[StepNode, ...]
    positions: tuple[int, ...] = ()
    params: SamplingParams | None = None
    critique: int = 0


@dataclass(slots=True)
class ScoreCounts:
    """What scoring cost, as the problems table has it. prm_tokens_*: of the PRM's inputs, critiques
    among them; scores_*: one a beam and step, scores_without_room of distinct solutions.
    """

    prm_requests: int = 0
    prm_tokens_asked: int = 0
    # without what the PRM's prefix cache held; NaN: its engine does not tell
    prm_tokens_computed: float = 0
    prm_tokens_distinct: int = 0  # nodes of the trie of all inputs: the least to be computed
    prm_tokens_sampled: int = 0  # of critiques
    scores_asked: int = 0
    scores_cached: int = 0  # known from the score cache
    scores_shared: int = 0  # an equal beam in flight asks
    # steps that the PRM's max_model_len does not hold: the score before them stands for them
    scores_without_room: int = 0


class ProblemScores:
    """The PRM's view of one problem in one search. It keeps the question, not the answer.

    seed: the run's, from which critiques are sampled.
    """

    def __init__(self, prm: PRM, problem: Problem, cache: ScoreCache | None, seed: int = 0) -> None:
        self.prm, self._seed = prm, seed
        # critiques of another seed give other scores
        self._judge = f"{prm.fingerprint}/{seed}" if prm.critiques else prm.fingerprint
        self.cache = cache
        self.counts = ScoreCounts()
        self._problem = problem.id, problem.problem  # an id may be another file's, too
        self._nodes: dict[tuple[str, ...], StepNode] = {(): StepNode((), array("i"), asks=False)}

    def has_room(self, steps: tuple[str, ...]) -> bool:
        """Whether the PRM's max_model_len holds these steps."""
        return self._node(steps).token_ids is not None

    @property
    def beginning(self) -> TokenIds:
        """What the inputs of this problem begin with: the question, with an empty step."""
        return self.prm.first_input(self._problem[1], "")

    def require_room(self) -> None:
        """PromptError where the PRM's max_model_len does not hold a step of any solution."""
        least, engine = len(self.beginning) + self.prm.reserve, self.prm.engine
        if least >= engine.max_model_len:
            raise PromptError(
                f"Problem {self._problem[0]!r} takes {least} tokens of the PRM before any step; "
                f"{engine.name} has max_model_len = {engine.max_model_len}. Raise it or drop the "
                "problem."
            )

    def inputs(self, solutions: Iterable[tuple[str, ...]]) -> list[TokenIds]:
        """The PRM's inputs of these solutions, those left out that it has no room for."""
        found = (self._node(steps).token_ids for steps in solutions)
        return [token_ids for token_ids in found if token_ids]

    def spans(self, steps: tuple[str, ...]) -> Iterator[tuple[StepNode, tuple[int, int]]]:
        """The solutions on the way to this one, and where in its input the tokens of each lie."""
        start = 0
        for node in self._node(steps).lineage:
            end = len(node.token_ids or ())
            if end > start:
                yield node, (start, end)
                start = end

    def requests(self, beams: Sequence[Beam]) -> list[ScoreRequest]:
        """What must be asked for these beams, in their order; nothing twice with a score cache."""
        found, counts = [], self.counts
        for beam in beams:
            asked = []
            for node in self._node(beam.steps).lineage:
                if not node.asks:
                    continue
                if self.cache is not None and node.in_flight:
                    counts.scores_shared += 1
                elif self.cache is not None and node.score is not None:
                    counts.scores_cached += 1
                else:
                    node.asked = node.in_flight = True
                    asked.append(node)
            counts.scores_asked += len(asked)
            if asked and (own := self.prm.critiques) is not None:
                found += [
                    self._counted(self._critique_request(beam, node, number))
                    for node in asked
                    for number in range(own.count)
                ]
            elif asked:
                token_ids = asked[-1].token_ids
                assert token_ids
                places = tuple(len(node.token_ids or ()) - 1 for node in asked)
                request = ScoreRequest(beam, token_ids, tuple(asked), places)
                found.append(self._counted(request))
        return found

    def _critique_request(self, beam: Beam, node: StepNode, number: int) -> ScoreRequest:
        own = self.prm.critiques
        assert own is not None
        params = SamplingParams(
            temperature=own.temperature,
            max_tokens=own.tokens,
            stop=self.prm.stop,
            seed=critique_seed(self._seed, self._problem[0], node.steps, number),
        )
        token_ids = self.critique_input(node, number)
        return ScoreRequest(beam, token_ids, (node,), params=params, critique=number)

    def _counted(self, request: ScoreRequest) -> ScoreRequest:
        self.counts.prm_requests += 1
        self.counts.prm_tokens_asked += len(request.token_ids)
        return request

    def _count_computed(
        self, request: ScoreRequest, output: RequestOutput, sampled: int = 0
    ) -> None:
        cached = output.num_cached_tokens
        computed = math.nan if cached is None else len(request.token_ids) - cached + sampled
        self.counts.prm_tokens_computed += computed

    def verdict_request(self, request: ScoreRequest, output: RequestOutput) -> ScoreRequest:
        """The request for the verdict on a critique that was just sampled."""
        (node,), number, sampled = request.asked, request.critique, tuple(output.token_ids)
        node.critiques[number] = Critique(sampled, output.text, output.finish_reason)
        self.counts.prm_tokens_sampled += len(sampled)
        self._count_computed(request, output, len(sampled) - 1)  # the last is not read yet
        token_ids = self.verdict_input(node, number)
        places = (len(token_ids) - 1,)
        return self._counted(ScoreRequest(request.beam, token_ids, (node,), places, None, number))

    def receive(self, request: ScoreRequest, output: RequestOutput) -> None:
        """Keep the scores a finished request brought; a step's, once all its critiques have one."""
        self._count_computed(request, output)
        scores = list(self.verdicts(request, output))
        if (own := self.prm.critiques) is not None:
            critiques = request.asked[0].critiques
            (critiques[request.critique].score,) = scores
            known = [each.score for each in critiques.values() if each.score is not None]
            if len(known) < own.count:
                return
            scores = [round(SCORE_UNIT * sum(known) / own.count) / SCORE_UNIT]
        for node, score in zip(request.asked, scores, strict=True):
            node.score, node.in_flight = score, False
            if self.cache is not None:
                self.cache[self._judge, self._problem, node.steps] = score

    def replies(self, beams: Sequence[Beam]) -> list[tuple[float, ...]]:
        """One score for each step of each beam; every request must have been received."""
        found = []
        for beam in beams:
            scores, latest = [], UNSCORED
            for node in self._node(beam.steps).lineage:
                if node.asks:
                    assert node.score is not None
                    latest = node.score
                scores.append(latest)
            found.append(tuple(scores))
        return found

    def solutions(self) -> Iterator[StepNode]:
        """Every solution known so far but the empty one, each after the one it extends."""
        return (node for node in self._nodes.values() if node.steps)

    def finish(self) -> ScoreCounts:
        """Count the distinct tokens and let the inputs go."""
        asked = [node for node in self._nodes.values() if node.asked]
        self.counts.prm_tokens_distinct = self.distinct_tokens(asked)
        lost = (node.token_ids is None and node.steps[-1].strip() for node in self._nodes.values())
        self.counts.scores_without_room = sum(map(bool, lost))
        for node in self._nodes.values():
            node.lineage.clear()  # it holds the node itself: no cycle is left to be collected
        self._nodes.clear()
        return self.counts

    def _node(self, steps: tuple[str, ...]) -> StepNode:
        """The node of a solution; it is made, and what is missing on the way to it."""
        missing = []
        while (node := self._nodes.get(steps)) is None:
            missing.append(steps)
            steps = steps[:-1]
        for own in reversed(missing):
            parent, (token_ids, asks) = node, self.entered(node, own)
            node = self._nodes[own] = StepNode(own, token_ids, asks)
            node.lineage = [*parent.lineage, node]
            if asks and self.cache is not None:
                node.score = self.cache.get((self._judge, self._problem, own))
        return node

    # -- what a replay reads from a recording --

    def entered(self, parent: StepNode, steps: tuple[str, ...]) -> tuple[TokenIds | None, bool]:
        """A solution's input, None without room for it, and whether its last step is asked."""
        if parent.token_ids is None or not steps[-1].strip():
            return parent.token_ids, False
        if parent.token_ids:
            token_ids = self.prm.next_input(parent.token_ids, steps[-1])
        else:
            token_ids = self.prm.first_input(self._problem[1], steps[-1])
        fits = len(token_ids) + self.prm.reserve < self.prm.engine.max_model_len
        return token_ids if fits else None, fits

    def critique_input(self, node: StepNode, number: int) -> TokenIds:
        """What a critique of this solution is sampled after."""
        assert node.token_ids
        return node.token_ids + self.prm.ask

    def verdict_input(self, node: StepNode, number: int) -> TokenIds:
        """What the verdict after one of its critiques is read at the end of."""
        read = array("i", node.critiques[number].read)
        return self.critique_input(node, number) + read + self.prm.lead

    def verdicts(self, request: ScoreRequest, output: RequestOutput) -> Iterable[float]:
        """The scores of a request's asked steps, or of its critique."""
        assert output.logits is not None
        return self.prm.scores(output.logits.tolist())

    def distinct_tokens(self, asked: list[StepNode]) -> int:
        """Nodes of the trie of their inputs."""
        inputs = [node.token_ids for node in asked if node.token_ids]
        read = [self.verdict_input(node, number) for node in asked for number in node.critiques]
        return trie_size([*inputs, *read])


def critique_seed(run_seed: int, problem_id: str, steps: tuple[str, ...], number: int) -> int:
    """64-bit seed of a critique; equal solutions of a problem have equal critiques."""
    text = "\x1f".join(["critique", str(run_seed), problem_id, str(number), *steps])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def trie_size(inputs: Iterable[TokenIds]) -> int:
    """Nodes of the trie of these token sequences, its root not counted."""
    size = 0
    previous = np.empty(0, np.intc)
    for text in sorted({ids.tobytes() for ids in inputs}):  # prefixes lie together
        current = np.frombuffer(text, np.intc)
        shared = min(len(previous), len(current))
        differs = np.flatnonzero(previous[:shared] != current[:shared])
        size += len(current) - (int(differs[0]) if len(differs) else shared)
        previous = current
    return size
