"""The requests of one recorded search, to be asked again of engines with other batch limits.

Both engines are listened to while they search; what they were asked, in order, and what they
answered is kept. Tokens do not depend on batches, so every engine asked again must answer the same.
What it does not do: measure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.core import RequestOutput, SamplingParams, Tag
from workbench.engine.engine import Engine
from workbench.experiments.identity import sweep_problems
from workbench.experiments.plan import RunSpec
from workbench.experiments.run import ENGINES, build_engine, search
from workbench.search.prm import trie_size


@dataclass(slots=True)
class Asked:
    """One request and its answer. positions: asked of a PRM; params: of an LLM."""

    token_ids: list[int]
    params: SamplingParams | None = None
    positions: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    sampled: tuple[int, ...] = ()
    logits: NDArray[np.float32] | None = None

    @property
    def num_steps(self) -> int:
        """Reasoning steps it samples or judges."""
        return len(self.positions) or 1

    @property
    def num_rows(self) -> int:
        """Rows of a forward pass it needs: its last sampled token is never computed."""
        if self.positions:
            return self.positions[-1] + 1
        return len(self.token_ids) + len(self.sampled) - 1

    def ask(self, engine: Engine) -> int:
        """Queue it; answers the request id."""
        if self.params is not None:
            return engine.add(self.token_ids, self.params)
        return engine.add_score(self.token_ids, self.positions, self.columns)

    def is_answered_by(self, output: RequestOutput) -> bool:
        """Whether the answer is the recorded one, token by token or bit by bit."""
        if self.logits is None or output.logits is None:
            return tuple(output.token_ids) == self.sampled
        return np.array_equal(self.logits, output.logits)


@dataclass(slots=True)
class Listener:
    """An engine that keeps what it is asked and what it answers; all else is the engine's."""

    engine: Engine
    asked: dict[int, Asked] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def add(
        self, prompt: SequenceOf[int], params: SamplingParams, *, tag: Tag | None = None
    ) -> int:
        """As Engine.add."""
        number = self.engine.add(prompt, params, tag=tag)
        self.asked[number] = Asked(list(prompt), params)
        return number

    def add_score(
        self,
        token_ids: SequenceOf[int],
        positions: SequenceOf[int],
        columns: SequenceOf[int],
        *,
        tag: Tag | None = None,
    ) -> int:
        """As Engine.add_score."""
        number = self.engine.add_score(token_ids, positions, columns, tag=tag)
        self.asked[number] = Asked(list(token_ids), None, tuple(positions), tuple(columns))
        return number

    def step(self) -> list[RequestOutput]:
        """As Engine.step."""
        outputs = self.engine.step()
        for output in outputs:
            asked = self.asked[output.request_id]
            asked.sampled, asked.logits = tuple(output.token_ids), output.logits
        return outputs


@dataclass(frozen=True, slots=True)
class Workload:
    """What one model is asked, in the order of the search.

    tokens: sampled by an LLM; of a PRM's inputs the distinct ones, which somebody must read.
    """

    requests: tuple[Asked, ...]

    def thinned(self, every: int) -> Workload:
        """Each so many-th request, from the first."""
        return Workload(self.requests[::every])

    @property
    def tokens(self) -> int:
        """Tokens the work comes to: sampled ones, or distinct ones that are scored."""
        sampled = sum(len(request.sampled) for request in self.requests)
        return sampled or trie_size([array("i", r.token_ids) for r in self.requests])

    @property
    def steps(self) -> int:
        """Reasoning steps sampled or judged."""
        return sum(request.num_steps for request in self.requests)


def record_requests(spec: RunSpec) -> dict[str, Workload]:
    """Search once with the study's own limits; what each model was asked, by "llm" and "prm"."""
    listeners = [Listener(build_engine(RunSpec.engine(spec, role))) for role in ENGINES]
    llm, prm = listeners
    search(sweep_problems(spec.config), llm, prm, spec.search, spec.seed)  # type: ignore[arg-type]
    pairs = zip(ENGINES, listeners, strict=True)
    return {role: Workload(tuple(heard.asked.values())) for role, heard in pairs}
