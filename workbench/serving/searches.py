"""A search as a model: the question in, the voted solution out, the tree kept to be asked for.

Each search plays its rounds in a thread of its own, over engines that others use at the same time.
"""

from __future__ import annotations

import multiprocessing
import secrets
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from itertools import count
from multiprocessing.pool import Pool
from queue import SimpleQueue
from typing import Any

from workbench.config import SearchConfig, StrategyConfig
from workbench.core import RequestOutput, SamplingParams, ScoreParams, Tag
from workbench.errors import ConfigError, PromptError
from workbench.experiments.execute import make_strategy
from workbench.search import variants
from workbench.search.answers import equal_mathematics, same_answer
from workbench.search.prm import PRM, known_format
from workbench.search.problems import Problem
from workbench.search.result import SearchResult
from workbench.search.rounds import Progress
from workbench.search.search import Search, chat_prompt
from workbench.serving import protocol
from workbench.serving.engines import EngineThread, Job, ServedEngine
from workbench.serving.protocol import ChatRequest, Refused

Ids = Sequence[int]
STRATEGIES = {f"search/{name.removesuffix('_search')}": name for name in variants.STRATEGIES}
MOST_BEAMS = 256
PROOF_SECONDS = 3.0  # of one comparison
TAKEN = {"model", "user", "messages", "temperature", "top_p", "top_k", "min_p", "seed", "search"}
TAKEN |= {"stream", "stream_options", "priority"}
ENDED = ("finished", "failed")
GIVEN_UP = "The search was given up."
SHOWN = ["node_id", "parent_id", "depth", "step_tokens", "score", "kept", "finished", "text"]


class EngineClient:
    """A served engine as one search sees it: a TokenEngine with that search's requests alone.

    What is not of requests it leaves to the engine. Used by one thread, which waits in `step`;
    `cancel` ends the wait from any other.
    """

    capabilities = frozenset({"token_identity"})

    def __init__(self, thread: EngineThread, engine: ServedEngine, priority: int) -> None:
        self._thread, self._engine, self._priority = thread, engine, priority
        self._numbers, self._jobs = count(), dict[int, Job]()
        self._inbox: SimpleQueue[tuple[int, Job] | Refused] = SimpleQueue()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, prompt: Ids, params: SamplingParams, *, tag: Tag | None = None) -> int:
        """Queue a prompt; returns its request id."""
        return self._submit(prompt, params=params)

    def add_score(
        self, token_ids: Ids, positions: Ids, columns: Ids, *, tag: Tag | None = None
    ) -> int:
        """Queue a request for logits [positions, columns]."""
        return self._submit(token_ids, score=ScoreParams(tuple(positions), tuple(columns)))

    def _submit(self, token_ids: Ids, **how: Any) -> int:
        number = next(self._numbers)

        def ended(job: Job) -> None:
            self._inbox.put((number, job))

        name, priority = self._engine.name, self._priority
        job = Job(name, token_ids, ended, priority=priority, inner=True, **how)
        self._jobs[number] = job
        self._thread.submit([job])
        return number

    def step(self) -> list[RequestOutput]:
        """Wait for requests that finish; raises what `cancel` was given."""
        outputs: list[RequestOutput] = []
        while not outputs or not self._inbox.empty():
            news = self._inbox.get()
            if isinstance(news, Refused):
                raise news
            number, job = news
            if self._jobs.pop(number, None) is not None:
                assert job.output is not None
                outputs.append(replace(job.output, request_id=number))
        return outputs

    def cancel(self, why: Refused) -> None:
        """The search's wait raises this; the search then aborts what it asked for."""
        self._inbox.put(why)

    def abort(self, request_id: int) -> None:
        """Drop a request; unknown or finished ids are ignored."""
        if (job := self._jobs.pop(request_id, None)) is not None:
            self._thread.abort([job])

    @property
    def has_work(self) -> bool:
        """Whether any of its requests waits or runs."""
        return bool(self._jobs)


class Proofs:
    """Answers compared as mathematics, in a process of its own, each pair within PROOF_SECONDS.

    sympy may compute for ever on what a model writes, and hold the interpreter meanwhile. A pair
    that takes longer is told apart.
    """

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._lock = threading.RLock()

    def __call__(self, reference: str, given: str) -> bool:
        """Whether they are equal, as far as can be told in time."""
        with self._lock:
            if self._pool is None:
                ignored = signal.SIGINT, signal.SIG_IGN  # as it is the server's to end
                self._pool = multiprocessing.get_context("spawn").Pool(1, signal.signal, ignored)
                self._pool.apply(equal_mathematics, ("1", "1"))  # it has started
            try:
                found = self._pool.apply_async(equal_mathematics, (reference, given))
                return found.get(PROOF_SECONDS)
            except multiprocessing.TimeoutError:
                self.close()
                return False

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._pool is not None:
                self._pool.terminate()
                self._pool = None


Pair = tuple[ServedEngine, ServedEngine]


def pair_of(engines: Sequence[ServedEngine]) -> Pair | None:
    """The first generator and the first reward model, where both are served."""
    prms = [e for e in engines if known_format(e.name, e.architecture)]
    llms = [e for e in engines if e not in prms and e.value_outputs is None]
    return (llms[0], prms[0]) if llms and prms else None


class SearchRun:
    """One search that a chat asks for. Raises Refused, by the field at fault, before it begins.

    state: what /search/{id} returns.
    """

    def __init__(self, body: ChatRequest, thread: EngineThread, pair: Pair, proofs: Proofs) -> None:
        for name in body.model_fields_set - TAKEN:
            message = f"{name} is no setting of {body.model}; its own are fields of `search`."
            raise Refused(400, message, name)
        chat = [message.model_dump() for message in body.messages]
        roles, self._question = [each["role"] for each in chat], chat[-1]["content"]
        if roles not in (["user"], ["system", "user"]) or not self._question.strip():
            message = "A search takes one user message, the problem; a system message may precede."
            raise Refused(400, message, "messages")
        given: dict[str, Any] = {"strategy": STRATEGIES[body.model]}
        if len(chat) > 1:
            given["system_prompt"] = chat[0]["content"]
        sampling = body.model_fields_set & {"temperature", "top_p", "top_k", "min_p"}
        given |= body.model_dump(include=sampling)
        try:
            "".join(v for v in body.search.values() if isinstance(v, str)).encode()  # whole ones
            self._config = StrategyConfig.from_dict(given | body.search)
        except (ValueError, OverflowError) as error:  # of a whole number beyond any float
            raise Refused(400, str(error), "search") from error
        if self._config.n > MOST_BEAMS or self._config.strategy != given["strategy"]:
            message = f"search.n is {MOST_BEAMS} at most, and the model names the strategy."
            raise Refused(400, message, "search")
        self._seed = secrets.randbits(63) if body.seed is None else body.seed
        self._clients = [EngineClient(thread, engine, body.priority) for engine in pair]
        self._proofs, self._given_up = proofs, False
        self.head = protocol.head("chat.completion", "search", body.model)
        self.state = {"id": self.head["id"], "model": body.model, "status": "waiting"}
        self.state["problem"] = self._question
        self.played: Future[dict[str, Any]] | None = None  # once it was submitted

    def play(self, told: Callable[[Progress], None]) -> dict[str, Any]:
        """Every round, in the thread that calls; what a chat completion says of the solution."""
        llm: Any  # TokenEngines, which leave most to the engine
        prm: Any
        llm, prm = self._clients
        config, self.state["status"] = self._config, "running"
        own = {each.name: getattr(config, each.name) for each in fields(SearchConfig)}
        try:
            scorer = PRM(prm, own.pop("prm_format"))
            problem, strategy = Problem("asked", self._question), make_strategy(config)
            own |= {"strategy": strategy, "seed": self._seed, "same": self._same}
            search = Search(problem, llm=llm, prm=scorer, **own)
            while search.round():
                told(search.progress)
            prompt = chat_prompt(problem, llm, config.system_prompt)
            return self._solution(search.result(), len(prompt))
        except BaseException as error:
            self.state |= {"status": "failed", "error": str(error)}
            if isinstance(error, ConfigError):  # of settings that only the search itself checks
                raise Refused(400, str(error), "search") from error
            if isinstance(error, PromptError):
                raise Refused(400, str(error), "messages") from error
            raise

    def cancel(self) -> None:
        """From any thread: it ends, and what it asked for is aborted."""
        self._given_up = True
        for client in self._clients:
            client.cancel(Refused(503, GIVEN_UP))
        if self.played is not None and self.played.cancel():  # it had not begun
            self.state |= {"status": "failed", "error": GIVEN_UP}

    def _same(self, reference: str, given: str) -> bool:
        if self._given_up:
            raise Refused(503, GIVEN_UP)
        return same_answer(reference, given, self._proofs)

    def _solution(self, result: SearchResult, asked: int) -> dict[str, Any]:
        """The best beam of the voted answer; the tree is kept."""
        row, beams = result.problems.iloc[0], result.candidates
        voted = beams[beams["answer"] == row["predicted"]]
        best = (voted if len(voted) else beams).iloc[0]
        nodes = result.tree[SHOWN].to_dict("records")
        counts = {name: int(row[name]) for name in ("iterations", "tokens")}
        found = {"answer": row["predicted"]} | counts
        self.state |= {"status": "finished", "nodes": nodes} | found
        message = {"role": "assistant", "content": best["text"]}
        reason = "stop" if best["finished"] else "length"
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        told = {"search": {"id": self.state["id"], "nodes": len(nodes)} | found}
        used = protocol.usage(asked, counts["tokens"])
        return self.head | {"choices": [choice], "usage": used} | told


async def chunks(
    news: Callable[[], Awaitable[Any]], with_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    """Of a stream: rounds as reasoning, then the solution. news: Progress, at last the Future."""
    while not isinstance(each := await news(), Future):
        text = f"round {each.round}: {each.tokens} tokens, {each.seconds:.1f} s\n"
        delta = {"reasoning_content": text}
        yield {"choices": [{"index": 0, "finish_reason": None, "delta": delta}]}
    result = each.result()
    (whole,) = result["choices"]
    last = {"index": 0, "finish_reason": whole["finish_reason"], "delta": whole["message"]}
    yield {"choices": [last], "search": result["search"]}
    if with_usage:
        yield {"choices": [], "usage": result["usage"]}
