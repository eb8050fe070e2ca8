"""A search as a model: the question in, the voted solution out, the tree kept to be asked for.

Each search plays its rounds in a thread of its own, over engines that others use at the same time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from typing import Any

from workbench.config import StrategyConfig
from workbench.core import Sequence as EngineSequence
from workbench.engine.foreign import ForeignEngine
from workbench.errors import ConfigError, ModelError
from workbench.experiments.execute import make_search, make_strategy
from workbench.experiments.plans import VOTE_ONLY
from workbench.experiments.settings import with_width
from workbench.search import variants
from workbench.search.answers import same_answer
from workbench.search.prm import known_format
from workbench.search.problems import Problem
from workbench.search.result import SearchResult
from workbench.search.search import chat_prompt, posed
from workbench.serving import protocol
from workbench.serving.engines import EngineThread, Job, ServedEngine
from workbench.serving.protocol import ChatRequest, Refused

STRATEGIES = {f"search/{name.removesuffix('_search')}": name for name in variants.STRATEGIES}
MOST_BEAMS = 256
TAKEN = {"model", "user", "messages", "temperature", "top_p", "top_k", "min_p", "seed", "search"}
TAKEN |= {"stream", "stream_options", "priority"}
ENDED = ("finished", "failed")
GIVEN_UP = "The search was given up."
SHOWN = ["node_id", "parent_id", "depth", "step_tokens", "score", "kept", "finished", "text"]


class EngineClient(ForeignEngine):
    """A served engine as one search sees it, with that search's requests alone.

    Used by one thread, which waits in `step`; `cancel` ends the wait from any other.
    """

    capabilities = frozenset({"token_identity"})

    def __init__(self, thread: EngineThread, engine: ServedEngine, priority: int) -> None:
        # without ForeignEngine's, which reads a model's files: the engine has
        self.name, self.architecture = engine.name, engine.architecture
        self.tokenizer, self.fingerprint = engine.tokenizer, engine.fingerprint
        self.max_model_len, self.value_outputs = engine.max_model_len, engine.value_outputs
        self.cache_room, self._vocab = engine.cache_room, engine.spec.vocab
        self._numbers, self._pending, self._held = count(), {}, {}
        self._thread, self._priority = thread, priority
        self._inbox: SimpleQueue[tuple[int, Job] | Refused] = SimpleQueue()
        self.refused: Refused | None = None  # once it was cancelled

    def _start(self, sequence: EngineSequence) -> None:
        if self.refused is not None:
            raise self.refused
        number = sequence.request_id
        own: dict[str, Any] = {"params": sequence.params, "score": sequence.score, "inner": True}
        own["priority"] = self._priority
        job = Job(self.name, sequence.token_ids, lambda job: self._inbox.put((number, job)), **own)
        self._thread.submit([job])
        self._pending[number] = job

    def _advance(self) -> None:
        """Raises what `cancel` was given."""
        while not self._held or not self._inbox.empty():
            news = self._inbox.get()
            if isinstance(news, Refused):
                raise news
            number, job = news
            if self._pending.pop(number, None) is not None:
                assert job.output is not None
                self._held[number] = replace(job.output, request_id=number)

    def cancel(self, why: Refused) -> None:
        """What the search waits for or asks next raises this; it then aborts what it asked for."""
        self.refused = why
        self._inbox.put(why)

    def abort(self, request_id: int) -> None:
        """As every engine; the served one is told."""
        if (job := self._pending.get(request_id)) is not None:
            self._thread.abort([job])
        super().abort(request_id)


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

    def __init__(self, body: ChatRequest, thread: EngineThread, pair: Pair) -> None:
        for name in sorted(body.model_dump(exclude=TAKEN, exclude_defaults=True)):
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
            self._config = StrategyConfig.from_dict(with_width(given | body.search))
        except (ValueError, OverflowError) as error:  # of a whole number beyond any float
            raise Refused(400, str(error), "search") from error
        asked = self._config.n * (self._config.critiques or 1)
        if asked > MOST_BEAMS or self._config.strategy != given["strategy"]:
            message = f"n times critiques is {MOST_BEAMS} at most; the model names the strategy."
            raise Refused(400, message, "search")
        self._seed = secrets.randbits(63) if body.seed is None else body.seed
        self._clients = [EngineClient(thread, engine, body.priority) for engine in pair]
        self._streams, self._num_asked = body.stream, 0
        kind = "chat.completion" + ".chunk" * body.stream
        self.head = protocol.head(kind, "search", body.model)
        self.state = {"id": self.head["id"], "model": body.model, "status": "waiting"}
        self.state["problem"] = self._question
        self.played: Future[None] | None = None  # once it was submitted

    def play(self, tell: Callable[[Any], None]) -> None:
        """Every round, in the thread that calls. tell: is handed events of an answer, of a stream's
        each round too, and None at their end; or what ends it.
        """
        llm, prm = self._clients
        config, self.state["status"] = self._config, "running"
        try:
            problem = Problem("asked", self._question)
            search = make_search([problem], llm, prm, config, self._seed, same=self._same)
            asked = posed(problem, make_strategy(config))
            self._num_asked = len(chat_prompt(asked, llm, config.system_prompt))
            while search.round():
                if self._streams:
                    done = search.progress
                    text = f"round {done.round}: {done.tokens} tokens, {done.seconds:.1f} s\n"
                    tell(self._chunk(None, reasoning_content=text))
            tell(self._solution(search.result()))
            tell(None)
        except Exception as error:
            self.state |= {"status": "failed", "error": str(error)}
            theirs = isinstance(error, ConfigError | ModelError)  # of settings not checked before
            tell(Refused(400, str(error), "search") if theirs else Refused.by(error))

    def cancel(self) -> None:
        """From any thread: it ends, and what it asked for is aborted."""
        for client in self._clients:
            client.cancel(Refused(503, GIVEN_UP))
        if self.played is not None and self.played.cancel():  # it had not begun
            self.state |= {"status": "failed", "error": GIVEN_UP}

    def _same(self, reference: str, given: str) -> bool:
        if (why := self._clients[0].refused) is not None:
            raise why
        return same_answer(reference, given)

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompt, and those sampled."""
        return protocol.usage(self._num_asked, self.state["tokens"])

    def _chunk(self, reason: str | None, **text: str) -> tuple[int, dict[str, Any]]:
        key = "delta" if self._streams else "message"
        choice = {"index": 0, key: text, "logprobs": None, "finish_reason": reason}
        return 0, {"choices": [choice]}

    def _solution(self, result: SearchResult) -> tuple[int, dict[str, Any]]:
        """The best beam of the voted answer; the tree is kept."""
        row, beams = result.problems.iloc[0], result.candidates
        voted = beams[beams["answer"] == row["predicted"]]
        best = (voted if len(voted) else beams).iloc[0]
        nodes = result.tree[SHOWN].to_dict("records")
        if self._config.strategy in VOTE_ONLY:
            nodes = [node | {"score": None} for node in nodes]
        counts = {name: int(row[name]) for name in ("iterations", "tokens")}
        found = {"answer": row["predicted"]} | counts
        self.state |= {"status": "finished", "nodes": nodes} | found
        reason = "stop" if best["finished"] else "length"
        number, chunk = self._chunk(reason, role="assistant", content=best["text"])
        return number, chunk | {"search": {"id": self.state["id"], "nodes": len(nodes)} | found}
