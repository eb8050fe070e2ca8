"""What a strategy and the runner say to each other: plain data, no engine, no tokenizer, no torch.

A strategy is a generator. It yields `Generate` and is sent one `Step` a beam; it yields `Score` and
is sent, for each beam, one score for each of its steps; it returns an `Outcome`.
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any, Protocol

from workbench.search.problems import Problem

STEP_END = "\n\n"
Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Beam:
    """A partial solution: the node `path` of the tree and everything sampled on the way to it.

    token_ids: what was sampled, without the prompt, never re-tokenised and never cut.
    steps: the text of each step; step_scores: one score a step, once it was scored.
    finished: the model ended the solution. ended: why a beam that is not finished cannot go on.
    """

    path: Path = ()
    token_ids: tuple[int, ...] = ()
    text: str = ""
    step_scores: tuple[float, ...] = ()
    finished: bool = False
    steps: tuple[str, ...] = ()
    ended: str = ""

    @property
    def can_grow(self) -> bool:
        """Whether another step may be sampled."""
        return not self.finished and not self.ended

    def child(self, ordinal: int) -> Beam:
        """The node to be sampled as this beam's `ordinal`-th child; it holds nothing new yet."""
        return replace(self, path=(*self.path, ordinal))

    def grown(self, step: Step, pieces: SequenceOf[str] | None = None) -> Beam:
        """This node with what was sampled for it: one step, or the `pieces` its text is made of."""
        return replace(
            self,
            token_ids=self.token_ids + step.token_ids,
            text=self.text + step.text,
            finished=step.finish_reason == "eos",
            steps=self.steps + ((step.text,) if pieces is None else tuple(pieces)),
            ended="context" if step.finish_reason == "context" else "",
        )

    def scored(self, scores: SequenceOf[float]) -> Beam:
        """The same beam with the scores of all its steps."""
        return replace(self, step_scores=tuple(scores))


@dataclass(frozen=True, slots=True)
class Step:
    """What one Generate brought for one beam; `text` keeps the stop string.

    finish_reason: "stop", its stop string; "eos", the model ended the solution; "length",
    max_tokens; "context", a model has no room left (max_model_len), and the beam ends unfinished.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Generate:
    """Please sample one step for each beam. max_tokens None is the run's max_step_tokens."""

    beams: tuple[Beam, ...]
    stop: tuple[str, ...] = (STEP_END,)
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Please score every step of each beam."""

    beams: tuple[Beam, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a search ended: n beams, finished and unfinished, best first, ties by path."""

    beams: tuple[Beam, ...]


SearchGenerator = Generator[Generate | Score, Any, Outcome]


class Strategy(Protocol):
    """Frozen settings and one generator; needs no engine, no tokenizer and no torch."""

    @property
    def n(self) -> int:
        """Beams of the outcome."""
        ...

    @property
    def aggregation(self) -> str:
        """How a beam's step scores become one number."""
        ...

    def search(self, problem: Problem) -> SearchGenerator:
        """The search for one problem, whose answer it is never given."""
        ...
