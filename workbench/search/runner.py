"""`run_search`: the door to everything in this package.

Checks what it is given, tokenises the prompts, plays the rounds and collects the result. The answer
of a problem is read when the result is collected and at no other time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from workbench.config import SearchSwitches
from workbench.core import SamplingParams, TokenEngine
from workbench.errors import PromptError
from workbench.search.collect import collect
from workbench.search.given import (
    as_problems,
    require_models,
    require_strategy,
    require_whole,
)
from workbench.search.measure import Throughput
from workbench.search.prm import PRM
from workbench.search.problems import Problem
from workbench.search.record_run import require_recordable, search_kind, write_record
from workbench.search.requests import Strategy
from workbench.search.result import SearchResult
from workbench.search.rounds import OnRound, Progress, Rounds
from workbench.search.score_cache import ScoreCache
from workbench.search.scoring import ProblemScores
from workbench.search.voting import AGGREGATIONS, VOTINGS, check_choice
from workbench.trace import Recorder

__all__ = ["Progress", "SearchResult", "chat_prompt", "run_search"]


def run_search(
    problems: Problem | Sequence[Problem],
    *,
    llm: TokenEngine,
    prm: PRM,
    strategy: Strategy,
    seed: int = 0,
    min_problem_batch: int = 8,
    score_cache: bool | ScoreCache = True,
    temperature: float = 0.8,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    max_step_tokens: int = 256,
    aggregation: str | None = None,
    voting: str = "weighted",
    system_prompt: str | None = None,
    score_shuffle_seed: int | None = None,
    record: str | os.PathLike[str] | None = None,
    on_round: OnRound | None = None,
    request_order: str = "path",
    problem_batching: str = "continuous",
    speculative_extension: bool = False,
    lookahead_scoring: bool = False,
    overlap: bool = False,
    forget_pruned: bool = False,
) -> SearchResult:
    """Search every problem; answers, tree and measurements in one result.

    min_problem_batch: problems in flight, kept full from the queue.
    score_cache: False asks every step of every beam again; a ScoreCache is shared with other runs.
    max_step_tokens: tokens of a step, at most; the LLM's max_model_len may leave fewer. A beam for
        which either model has no room left ends unfinished, its last finish_reason is "context".
    aggregation: None is the strategy's own. system_prompt: None is the model template's default.
    score_shuffle_seed: the control experiment, see control.py.
    record: a Parquet file to be written at the end, from which the search can be replayed.
    on_round: called after each round; may raise to stop the search.
    request_order to forget_pruned: how the engines are used, the same tokens and scores whatever is
        chosen; rounds.py has the table. overlap: two groups share the problems in flight,
        unless a CPU has too few threads for both (lanes.py).
    Raises ConfigError or PromptError before anything runs. What an engine or on_round raises ends
    the search; its requests are aborted and both engines stay usable.
    """
    problems = as_problems(problems)
    require_models(llm, prm)
    require_strategy(strategy)
    require_whole(1, min_problem_batch=min_problem_batch, max_step_tokens=max_step_tokens)
    check_choice("voting", voting, VOTINGS)
    params = SamplingParams(
        temperature=temperature, max_tokens=max_step_tokens, top_k=top_k, top_p=top_p, min_p=min_p
    )
    strategy = _aggregating(strategy, aggregation)
    cache = _cache(score_cache)
    switches = SearchSwitches(
        request_order=request_order,
        problem_batching=problem_batching,
        speculative_extension=speculative_extension,
        lookahead_scoring=lookahead_scoring,
        overlap=overlap,
        forget_pruned=forget_pruned,
    )
    switches.require_usable(score_cache=cache is not None, min_problem_batch=min_problem_batch)
    require_recordable(record, cache)
    recorder = _recorder(llm=llm, prm=prm.engine)
    rounds = Rounds(
        llm,
        prm,
        seed=seed,
        params=params,
        min_problem_batch=min_problem_batch,
        recorder=recorder,
        switches=switches,
    )
    rounds.spans.switch("tokenising")
    new_search = search_kind(record, rounds)
    searches = [
        new_search(
            problem,
            chat_prompt(problem, llm, system_prompt),
            strategy,
            ProblemScores(prm, problem, cache),
            score_shuffle_seed,
        )
        for problem in problems
    ]
    rounds.run(searches, on_round)
    discarded = rounds.discarded_tokens
    busy = rounds.llm_busy_s, rounds.prm_busy_s
    speed = Throughput.of(rounds.marks, *busy, discarded.total())
    write_record(
        record,
        searches,
        rounds,
        recorder,
        strategy,
        score_cache=cache is not None,
        voting=voting,
        score_shuffle_seed=score_shuffle_seed,
    )
    how = {"aggregation": strategy.aggregation, "voting": voting}
    return collect(searches, **how, throughput=speed, recorder=recorder, discarded=discarded)


def _aggregating(strategy: Strategy, aggregation: str | None) -> Strategy:
    """The strategy with this aggregation; None is its own."""
    if aggregation is None:
        return strategy
    check_choice("aggregation", aggregation, tuple(AGGREGATIONS))
    return replace(strategy, aggregation=aggregation)  # type: ignore[type-var]


def _cache(wanted: bool | ScoreCache) -> ScoreCache | None:
    """The cache given, a fresh one, or none."""
    if isinstance(wanted, ScoreCache):
        return wanted
    return ScoreCache() if wanted else None


def _recorder(**engines: Any) -> Recorder:
    """A fresh trace, into which engines that can write their steps and requests from now on."""
    recorder = Recorder("search")
    for name, engine in engines.items():
        if "trace" in engine.capabilities:
            engine.trace_as(recorder, name)
    return recorder


def chat_prompt(problem: Problem, llm: TokenEngine, system_prompt: str | None = None) -> list[int]:
    """Token ids before anything is sampled. Raises PromptError when there are too many."""
    messages = [{"role": "user", "content": problem.problem}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    prompt = list(llm.tokenizer.encode_chat(messages))
    if len(prompt) >= llm.max_model_len:
        raise PromptError(
            f"Problem {problem.id!r} is {len(prompt)} tokens with its chat template; {llm.name} "
            f"takes fewer than max_model_len = {llm.max_model_len}. Raise it or drop the problem."
        )
    return prompt
