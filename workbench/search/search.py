"""`Search` and `run_search`: the door to everything in this package.

Checks what it is given, tokenises the prompts, plays the rounds and collects the result. The answer
of a problem is read when the result is collected and at no other time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.config import SearchConfig
from workbench.core import SamplingParams, TokenEngine
from workbench.errors import ConfigError, PromptError
from workbench.search.answers import aggregate, extract_answer, group_answers, same_answer, vote
from workbench.search.prm import PRM, ProblemScores, ScoreCache
from workbench.search.problems import Problem
from workbench.search.recording import RecordingSearch, record_search, require_destination
from workbench.search.result import SearchResult, Throughput, node_id
from workbench.search.rounds import ActiveSearch, OnRound, Progress, Rounds
from workbench.search.strategies import Step, Strategy
from workbench.trace import Recorder

Row = dict[str, Any]
SYSTEM_PROMPTS = {
    "search-and-learn": (
        "Solve the following math problem efficiently and clearly:\n\n"
        "- For simple problems (2 steps or fewer):\n"
        "Provide a concise solution with minimal explanation.\n\n"
        "- For complex problems (3 steps or more):\nUse this step-by-step format:\n\n"
        "## Step 1: [Concise description]\n[Brief explanation and calculations]\n\n"
        "## Step 2: [Concise description]\n[Brief explanation and calculations]\n\n...\n\n"
        "Regardless of the approach, always conclude with:\n\n"
        "Therefore, the final answer is: $\\boxed{answer}$. I hope it is correct.\n\n"
        "Where [answer] is just the final number or expression that solves the problem."
    )
}
"""As their authors publish them, for runs to be compared with theirs. search-and-learn: Beeching,
Tunstall and Rush 2024 (github.com/huggingface/search-and-learn)."""


class SearchRecorder(Recorder):
    """before: by name, what an engine recorded to when it was taken; the last counts."""

    before: dict[str, list[tuple[Recorder, str]]]

    def own(self, name: str) -> list[tuple[Recorder, str]]:
        """What this engine recorded to before any search that left it; none where it is not taken.

        Two searches that left one may each have found the other there.
        """
        found, seen = [*self.before[name]], list[tuple[Recorder, str]]()
        while found:
            recorder, its_name = own = found.pop()
            if not isinstance(recorder, SearchRecorder):
                return [own]
            if own not in seen:
                seen.append(own)
                found += recorder.before.get(its_name, ())
        return []


def require_recordable(
    record: str | os.PathLike[str], cache: ScoreCache | None, engines: Mapping[str, TokenEngine]
) -> None:
    """ConfigError unless a file can be written there, and nothing is known of another run: a replay
    begins with empty caches.
    """
    require_destination(record)
    if cache:
        raise ConfigError(
            f"score_cache holds {len(cache)} scores of another run, and record={str(record)!r} "
            "would lack their requests; give score_cache=True or False to record a search."
        )
    for name, engine in engines.items():
        if held := getattr(getattr(engine, "cache", None), "num_cached", 0):
            raise ConfigError(
                f"The {name}'s cache holds {held} blocks of earlier requests, and "
                f"record={str(record)!r} would lack these; call its cache.reset() first."
            )


def whole_seed(seed: Any) -> int:
    """A seed, numpy's too, as Python's; ConfigError for what is no whole number."""
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise ConfigError(f"seed is {seed!r}; give a whole number.")
    return int(seed)


def require_players(llm: Any, prm: Any, strategy: Any) -> None:
    """ConfigError unless these can be searched with."""
    if not isinstance(prm, PRM):
        raise ConfigError(f"prm is {prm!r:.200}; give PRM(engine).")
    for name, engine in (("llm", llm), ("the PRM's engine", prm.engine)):
        if not hasattr(engine, "add_score"):
            raise ConfigError(f"{name} is {engine!r:.200}; give an Engine.")
    if llm is prm.engine:
        raise ConfigError(
            "llm and prm are one engine; give each its own: a search reads their steps apart."
        )
    if isinstance(strategy, type) or not hasattr(strategy, "search"):
        raise ConfigError(
            f"strategy is {strategy!r:.200}; give one with its sizes, e.g. BeamSearch(n=16)."
        )


class Search:
    """A search of several problems over two engines, a round at a time; `run_search` plays all.

    settings: fields of SearchConfig; score_cache may also be a ScoreCache shared with other runs.
    record: a Parquet file to be written at the end, from which the search can be replayed. Of one
    that fails the problems answered by then are recorded, beside it as NAME.partial.parquet.
    on_round: called with its Progress at the end of each round; may raise to stop the search.
    same: whether two answers mean the same; a server's has a time limit.
    Seconds count inside `round` only, so two searches of one process can take rounds in turn, each
    as if it were alone. Raises ConfigError or PromptError before anything runs.
    """

    def __init__(
        self,
        problems: Problem | Sequence[Problem],
        *,
        llm: TokenEngine,
        prm: PRM,
        strategy: Strategy,
        seed: int = 0,
        record: str | os.PathLike[str] | None = None,
        on_round: OnRound | None = None,
        same: Callable[[str, str], bool] = same_answer,
        **settings: Any,
    ) -> None:
        problems = as_problems(problems)
        require_players(llm, prm, strategy)
        seed = whole_seed(seed)
        cache = settings.get("score_cache", True)
        if isinstance(cache, ScoreCache):
            settings["score_cache"] = True
        self.config = config = SearchConfig.from_dict(settings)
        if not isinstance(cache, ScoreCache):
            cache = ScoreCache() if config.score_cache else None
        strategy = of_run(strategy, config.aggregation, seed)
        prm = prm.changed(
            config.prm_format,
            count=config.critiques,
            tokens=config.critique_tokens,
            temperature=config.critique_temperature,
        )
        if asks_scores := getattr(strategy, "asks_scores", True):
            prm.require_room()
        if record is not None:
            require_recordable(record, cache, {"LLM": llm, "PRM": prm.engine})
        if config.forget_pruned and hasattr(strategy, "lookahead"):
            raise ConfigError(
                "forget_pruned is for strategies that go on from what was just scored; a lookahead "
                "goes back to what it sampled before. Leave one of them out."
            )
        self._strategy, self._record, self._on_round, self._same = strategy, record, on_round, same
        self._engines, self._cache = {"llm": llm, "prm": prm.engine}, cache
        self._recorder = SearchRecorder("search")
        self._recorder.before = {}
        names = ("temperature", "top_p", "top_k", "min_p")
        sampling = {name: getattr(config, name) for name in names}
        self._rounds = Rounds(
            llm,
            prm,
            seed=seed,
            params=SamplingParams(max_tokens=config.max_step_tokens, **sampling),
            min_problem_batch=config.min_problem_batch,
            recorder=self._recorder,
            switches=config,
        )
        self._rounds.clock.resume("tokenising")
        kind = ActiveSearch if record is None else RecordingSearch
        self._searches = [
            kind(
                problem,
                chat_prompt(posed(problem, strategy), llm, config.system_prompt),
                strategy,
                ProblemScores(prm, problem, cache, seed),
                config.score_shuffle_seed,
            )
            for problem in problems
        ]
        if asks_scores:
            for search in self._searches:
                search.scores.require_room()
        self._rounds.queue.extend(self._searches)
        self._rounds.clock.pause()
        self._result: SearchResult | None = None

    def round(self) -> bool:
        """Play one round; whether there is more to do.

        What an engine or on_round raises ends the search: its requests are aborted, both engines
        stay usable, and it has what `keep_answered` gives it.
        """
        rounds, recorder = self._rounds, self._recorder
        if self._record is not None and rounds.round == 0:  # what came since this was made
            engines = {name.upper(): engine for name, engine in self._engines.items()}
            require_recordable(self._record, self._cache, engines)
        try:
            for name, engine in self._engines.items():
                if "trace" in engine.capabilities:
                    recorder.before.setdefault(name, []).append(engine.trace_as(recorder, name))
                    recorder.before[name] = recorder.own(name)  # as long as others know it
            more = rounds.play_round(self._on_round)
        except BaseException as error:
            self.keep_answered(error)
            raise
        finally:
            try:
                self._set_back()
            finally:
                self._set_back()  # whatever an interrupt of the first left
        if rounds.answered == len(self._searches):
            self._write_recording()
        return more

    def _write_recording(self) -> None:
        """Write what `record` asks for, of the problems answered by now, unless it was written."""
        if self._record is None:
            return
        answered = [search for search in self._searches if search.is_answered]
        path = Path(self._record)
        if len(answered) < len(self._searches):  # an older, whole one may be there
            path = path.with_suffix(f".partial{path.suffix}")
        record_search(path, answered, self._rounds, self._strategy, self.config)
        if len(answered) == len(self._searches):
            self._record = None

    def _set_back(self) -> None:
        """Let engines record to what they did before this search, and before any that left them."""
        for name in self._recorder.before:
            for own in self._recorder.own(name):
                self._engines[name].trace_as(*own)
        self._recorder.before.clear()

    @property
    def progress(self) -> Progress:
        """How far it is after its last round; seconds are its own."""
        return self._rounds.progress

    def play(self) -> SearchResult:
        """Play every round that is left; the result.

        An error or interrupt that ends it has what `keep_answered` gives it.
        """
        try:
            while self.round():
                pass
            return self.result()
        except BaseException as error:
            self.keep_answered(error)
            raise

    def keep_answered(self, error: BaseException) -> None:
        """Of what ended the search: `.search` is this, `.result` that of the problems answered by
        then, or None, and a note says how many these are. Their recording is written, too, or the
        note says why not.
        """
        if getattr(error, "search", None) is self:  # `play` is told of what ended a round
            return
        self._set_back()  # whatever a second interrupt left
        done = sum(search.is_answered for search in self._searches)
        error.search, error.result = self, None  # type: ignore[attr-defined]
        where = ": see .result (in a notebook: sys.last_value.result)" if done else ""
        if done:
            try:
                error.result = self.result(partial=True)  # type: ignore[attr-defined]
            except Exception as problem:  # answers that cannot be compared
                where = f"; .search.result(partial=True) raises {type(problem).__name__}: {problem}"
            try:
                self._write_recording()
            except Exception as problem:  # a full disk
                where += f"; no recording is written: {type(problem).__name__}: {problem}"
        error.add_note(f"{done} of {len(self._searches)} problems were answered{where}.")

    def result(self, *, partial: bool = False) -> SearchResult:
        """Answers, tree and measurements; partial: of the problems answered by now (throughput and
        trace tell of all). Raises ConfigError while problems are not answered; partial: none is.
        """
        rounds = self._rounds
        answered = [search for search in self._searches if search.is_answered]
        if not answered or (len(answered) < len(self._searches) and not partial):
            raise ConfigError(
                f"{len(answered)} of {len(self._searches)} problems are answered; call round() "
                "until it returns False, start anew a search that was stopped, or take "
                "result(partial=True) once there are some."
            )
        if self._result is not None:
            return self._result
        recorder, voting = self._recorder, self.config.voting
        problems, candidates, steps = list[Row](), list[Row](), list[Step]()
        recorder.node_rows.clear()
        for search in answered:
            assert search.outcome is not None
            beams, problem = search.outcome.beams, search.problem
            answers = [extract_answer(beam.text) for beam in beams]
            groups = group_answers(answers, self._same)
            reference = problem.answer  # looked at here alone
            right = {
                answer: reference is not None and self._same(reference, answer)
                for answer in dict.fromkeys(answers)
            }
            scores = [aggregate(b.step_scores, self._strategy.aggregation) for b in beams]
            candidates += [
                {
                    "problem_id": problem.id,
                    "rank": rank,
                    "node_id": node_id(beam.path),
                    "answer": answers[rank],
                    "group": groups[rank],
                    "score": scores[rank],
                    "correct": right[answers[rank]],
                    "finished": beam.finished,
                    "ended": beam.ended,
                    "text": beam.text,
                }
                for rank, beam in enumerate(beams)
            ]
            chosen, finished = vote(answers, scores, groups, voting), sum(b.finished for b in beams)
            is_right = chosen is not None and right[answers[chosen]]
            row: Row = {
                "run_id": recorder.run_id,
                "problem_id": problem.id,
                "level": problem.level,
                "subject": problem.subject,
                "problem": problem.problem,
                "answer": reference,
                "predicted": "" if chosen is None else answers[chosen],
                "correct": None if reference is None else is_right,
                "tokens": search.tree.tokens,
                "iterations": search.tree.iterations,
                "seconds": search.answered_s - search.admitted_s,
                "finished": finished > 0,
                "finished_beams": finished,
                "candidates": len(beams),
                "correct_candidates": sum(map(right.__getitem__, answers)),
            }
            problems.append(row | asdict(search.scores.counts))
            recorder.node_rows += search.tree.rows(recorder.run_id, search.problem.id)
            steps += [node.step for node in search.tree]
        trace = recorder.trace()
        result = SearchResult(
            problems=pd.DataFrame(problems).astype({"correct": "boolean", "level": "Int64"}),
            candidates=pd.DataFrame(candidates),
            tree=trace.nodes.assign(
                finish_reason=[step.finish_reason for step in steps],
                text=[step.text for step in steps],
            ),
            throughput=Throughput.of(rounds.marks, rounds.llm_busy_s, rounds.prm_busy_s),
            trace=trace,
            voting=voting,
        )
        if len(answered) == len(self._searches):
            self._result = result
        return result


def run_search(
    problems: Problem | Sequence[Problem],
    *,
    llm: TokenEngine,
    prm: PRM,
    strategy: Strategy,
    seed: int = 0,
    record: str | os.PathLike[str] | None = None,
    on_round: OnRound | None = None,
    **settings: Any,
) -> SearchResult:
    """Search every problem; answers, tree and measurements in one result. Arguments: see Search.

    Whatever ends it before its time (Ctrl-C, an engine that fails, a server that is gone), what is
    raised has as `.result` the SearchResult of the problems answered by then, or None.
    """
    return Search(
        problems,
        llm=llm,
        prm=prm,
        strategy=strategy,
        seed=seed,
        record=record,
        on_round=on_round,
        **settings,
    ).play()


def of_run(strategy: Strategy, aggregation: str | None, seed: int) -> Strategy:
    """The strategy with what the run decides: how scores are aggregated, and whence it draws."""
    given: dict[str, Any] = {} if aggregation is None else {"aggregation": aggregation}
    if getattr(strategy, "seed", seed) is None:
        given["seed"] = seed
    return replace(strategy, **given) if given else strategy  # type: ignore[type-var]


def posed(problem: Problem, strategy: Strategy) -> Problem:
    """The problem in the words that the strategy asks it in; most take it as it is."""
    words = getattr(strategy, "posed", None)
    return problem if words is None else words(problem.without_answer())


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


FIELDS: tuple[tuple[str, Any, str], ...] = (
    ("id", str, "a text"),
    ("answer", str | None, "a text such as '2', or None"),
    ("level", Integral | None, "a whole number, or None"),
)
"""Of a Problem: what each is, and in words."""


def as_problems(given: Problem | Iterable[Problem]) -> list[Problem]:
    """One problem or several as a list; ConfigError for anything else, and for ids that repeat."""
    if isinstance(given, str) or not isinstance(given, Problem | Iterable):
        raise ConfigError(
            f"problems is {given!r:.200}; give Problems: load_problems({str(given)!r:.40}), or "
            "[Problem('mine', 'Compute 1+1.')]."
        )
    problems = [given] if isinstance(given, Problem) else list(given)
    if not problems:
        raise ConfigError(
            "run_search got no problem; give at least one, e.g. load_problems('tiny', 4)."
        )
    seen: set[str] = set()
    for place, problem in enumerate(problems):
        if not isinstance(problem, Problem):
            raise ConfigError(
                f"Problem {place} is {problem!r:.200}; give a Problem, e.g. "
                "Problem('mine', 'Compute 1+1.', answer='2')."
            )
        for name, kind, allowed in FIELDS:
            if not isinstance(value := getattr(problem, name), kind):
                raise ConfigError(f"Problem {place} has the {name} {value!r:.100}; give {allowed}.")
        if not isinstance(problem.problem, str) or not problem.problem.strip():
            raise ConfigError(
                f"Problem {problem.id!r} has the text {problem.problem!r}; give one with something "
                "in it."
            )
        if problem.id in seen:
            raise ConfigError(
                f"run_search got two problems with id {problem.id!r}; ids must differ, because "
                "the seed of every node is made from its problem's id."
            )
        seen.add(problem.id)
        if problem.level is not None:
            problems[place] = replace(problem, level=int(problem.level))  # of numpy's, too
    return problems
