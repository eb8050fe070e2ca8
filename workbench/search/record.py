"""What a replay needs of a search: its tokens as tries, its scores, its order, its settings.

Two tries a problem: sampled steps below the prompt, and solutions as the PRM saw them, each entry
holding its own tokens only. Kept while the search runs, by a search that looks over its own
shoulder; record_file.py writes it. What it does not do: keep times, which the trace has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from workbench.core import SamplingParams, TokenEngine
from workbench.search.active import ActiveSearch
from workbench.search.prm import PRM
from workbench.search.problems import Problem
from workbench.search.requests import Path, Strategy
from workbench.search.scoring import ProblemScores
from workbench.trace import RequestRow


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One sampled node. tokens: its own; round: in which it was asked for, from 1.

    finish_reason: what the strategy was told; request_reason: how the request ended, "" when there
    was none (no room for a token).
    """

    path: Path
    tokens: tuple[int, ...]
    text: str
    slot: int
    round: int
    finish_reason: str
    request_reason: str


@dataclass(frozen=True, slots=True)
class RecordedSolution:
    """One solution as the PRM sees it. tokens: its last step's part of the PRM's input.

    asks: whether the PRM judges the last step; fits: whether it has room for the solution; score:
    of the last step, None where nobody asked.
    """

    steps: tuple[str, ...]
    tokens: tuple[int, ...]
    asks: bool
    fits: bool
    score: float | None


@dataclass(frozen=True, slots=True)
class RecordedProblem:
    """One problem's tries. Parents come before their children; steps are in sampling order."""

    problem: Problem
    prompt: tuple[int, ...]
    steps: tuple[RecordedStep, ...]
    solutions: tuple[RecordedSolution, ...]


@dataclass(frozen=True, slots=True)
class RecordedEngine:
    """What an engine was. From config on: None where an engine does not tell."""

    name: str
    architecture: str
    fingerprint: str
    max_model_len: int
    value_outputs: int | None
    config: Mapping[str, Any] | None = None  # fields of EngineConfig
    spec: Mapping[str, Any] | None = None  # fields of ModelSpec
    num_blocks: int | None = None
    weight_bytes: int | None = None
    block_bytes: int | None = None

    @classmethod
    def of(cls, engine: TokenEngine, sizes: Collection[int] = ()) -> RecordedEngine:
        """What this engine tells about itself. sizes: the blocks it had in this search.

        num_blocks is None when they changed, as they do when a memory is split anew.
        """
        config, spec, memory = (getattr(engine, n, None) for n in ("config", "spec", "memory"))
        return cls(
            name=engine.name,
            architecture=engine.architecture,
            fingerprint=engine.fingerprint,
            max_model_len=engine.max_model_len,
            value_outputs=engine.value_outputs,
            config=None if config is None else config.to_dict(),
            spec=None if spec is None else asdict(spec),
            num_blocks=None if memory is None or len(sizes) > 1 else memory.num_blocks,
            weight_bytes=None if memory is None else memory.weights,
            block_bytes=None if memory is None else memory.block_bytes,
        )


@dataclass(frozen=True, slots=True)
class RecordedSettings:
    """How the search was run. strategy: its class's name, and its fields.

    switches: fields of SearchSwitches; those not named are at their defaults.
    """

    strategy: str
    strategy_settings: Mapping[str, Any]
    seed: int
    min_problem_batch: int
    score_cache: bool
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_step_tokens: int
    voting: str
    score_shuffle_seed: int | None
    prm_format: str
    prm_fingerprint: str
    prm_columns: tuple[int, ...]
    switches: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, strategy: Strategy, params: SamplingParams, prm: PRM, **others: Any
    ) -> RecordedSettings:
        """The settings of one search; others: the fields that are its own arguments."""
        known = is_dataclass(strategy) and not isinstance(strategy, type)
        return cls(
            strategy=type(strategy).__name__,
            strategy_settings=asdict(strategy) if known else {},  # type: ignore[call-overload]
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            max_step_tokens=params.max_tokens,
            prm_format=prm.format,
            prm_fingerprint=prm.fingerprint,
            prm_columns=tuple(prm.columns),
            **others,
        )


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole search, in the order of its problems."""

    settings: RecordedSettings
    llm: RecordedEngine
    prm: RecordedEngine
    problems: tuple[RecordedProblem, ...]


class RecordingSearch(ActiveSearch):
    """A search that keeps what it was told when its answer is there. round_of: the present one."""

    def __init__(self, *given: Any, round_of: Callable[[], int]) -> None:
        super().__init__(*given)
        self._round_of = round_of
        self._rounds: dict[Path, int] = {}
        self._kept: tuple[tuple[int, ...], tuple[RecordedSolution, ...]] = ((), ())

    def advance(self) -> None:
        """As every search; notes in which round each node is asked for."""
        super().advance()
        if self.request is not None:
            for beam in self.request.beams:
                self._rounds.setdefault(beam.path, self._round_of())

    def finish(self, now_s: float) -> None:
        """As every search; what it lets go is kept here."""
        self._kept = (tuple(self.prompt), _solutions(self.scores))
        super().finish(now_s)

    def recorded(self, reasons: Mapping[tuple[str, str], str]) -> RecordedProblem:
        """Everything of this problem. reasons: how the requests of its nodes ended."""
        prompt, solutions = self._kept
        rows = self.tree.rows(self.problem.id)
        steps = tuple(_step(row, self._rounds, reasons) for row in rows)
        return RecordedProblem(self.problem, prompt, steps, solutions)


def request_reasons(rows: Iterable[RequestRow]) -> dict[tuple[str, str], str]:
    """(problem id, node id) -> how the request that sampled it ended, from a trace."""
    return {(r.problem_id, r.node_id): r.finish_reason for r in rows if r.kind == "generate"}


def _step(
    row: Mapping[str, Any], rounds: Mapping[Path, int], reasons: Mapping[tuple[str, str], str]
) -> RecordedStep:
    path = tuple(map(int, row["path"].split("/")))
    told = row["finish_reason"]
    fallback = told if row["token_ids"] else ""
    return RecordedStep(
        path=path,
        tokens=tuple(row["token_ids"]),
        text=row["text"],
        slot=row["beam"],
        round=rounds[path],
        finish_reason=told,
        request_reason=reasons.get((row["problem_id"], row["node_id"]), fallback),
    )


def _solutions(scores: ProblemScores) -> tuple[RecordedSolution, ...]:
    """Every solution the PRM's side knows, each after the one it extends."""
    found = []
    lengths: dict[tuple[str, ...], int] = {(): 0}
    for node in scores.solutions():
        fits = node.token_ids is not None
        tokens = node.token_ids if node.token_ids is not None else ()
        start = lengths[node.steps[:-1]]
        lengths[node.steps] = max(start, len(tokens))
        found.append(
            RecordedSolution(node.steps, tuple(tokens[start:]), node.asks, fits, node.score)
        )
    return tuple(found)
