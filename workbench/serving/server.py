"""The HTTP server: admission, deadlines, endpoints, and an orderly end.

The event loop parses, queues and writes streams; worker threads tokenise and render whole answers,
the engine thread takes steps.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from operator import itemgetter
from typing import Annotated, Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from numpy.typing import NDArray
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workbench.config import Checked, EngineConfig, Range, format_size, parse_size
from workbench.core import SamplingParams, ScoreParams
from workbench.engine.memory import block_shape, device_memory, peak_on
from workbench.errors import ConfigError, WorkbenchError
from workbench.kvcache.arena import KVArena
from workbench.kvcache.policies import MarginalValue, StaticSplit
from workbench.models.loading import require_device
from workbench.search.prm import FORMATS, known_format
from workbench.serving import protocol, searches
from workbench.serving.engines import CLOSING, EngineThread, Job, News, ServedEngine
from workbench.serving.protocol import Choice, Refused

log = logging.getLogger(__name__)
MOST_SEARCHES = 4  # at a time; others wait
KEPT_SEARCHES = 64  # of which the tree can be asked for
Told = dict[str, Any]
Logits = NDArray[np.float64]
ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


@dataclass(frozen=True, slots=True)
class ServeConfig(Checked):
    """One server. models: names, or all of them NAME=SIZE of KV cache; memory: of all KV caches.

    max_queue: sequences of a model that may wait, each of n choices one; with 0 each is taken at
    once or refused; timeout: seconds to an answer; grace: seconds for those in flight when the
    server is to end; max_body: bytes of a request.
    """

    models: tuple[str, ...]
    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65535, "[]")] = 8000
    max_queue: Annotated[int, Range(0)] = 256
    timeout: Annotated[float, Range(0, ends="()")] = 600.0
    grace: Annotated[float, Range(0)] = 10.0
    max_body: Annotated[int, Range(1)] = 2**20
    api_key: str | None = None
    memory: str | None = None


def make_arena(config: ServeConfig, engine: EngineConfig) -> KVArena:
    """The memory of all models. Without sizes it flows to the model that gains most; with sizes
    each keeps its own until POST /arena/split. By default what max_num_seqs of the longest requests
    of every model need, within a quarter of the device.
    """
    parts = [text.rpartition("=") for text in config.models]
    sizes = {name or size: parse_size(size) if name else 0 for name, _, size in parts}
    if len(sizes) < len(parts) or any(sizes.values()) != all(sizes.values()):
        raise ConfigError(
            f"The models are {', '.join(config.models)}; give each once, and all of them as "
            "NAME=SIZE or none."
        )
    own = {n: getattr(engine, n) for n in ("block_size", "max_model_len", "dtype", "device")}
    shapes, total = [block_shape(name, **own) for name in sizes], sum(sizes.values())
    if total:
        if config.memory is not None:
            raise ConfigError(f"memory is {config.memory}, and each model has a size; give one.")
        shares = {name: size / total for name, size in sizes.items()}
        return KVArena(total, shapes, StaticSplit(), shares if len(shares) > 1 else None)
    enough = sum(s.floor_blocks * s.block_bytes for s in shapes) * engine.max_num_seqs
    by_default = min(enough, device_memory(require_device(engine.device)) // 4)
    return KVArena(config.memory or by_default, shapes, MarginalValue())


class Call:
    """One HTTP request: its body, its news, and the one reason for which it may end before they do.

    A deadline, a client that is gone, a body that is too large and a server that ends all call
    `refuse`, once; that takes back the work that was begun.
    """

    def __init__(self, service: Service, receive: Receive) -> None:
        self._service, self._over = service, False
        self._undo: Callable[[], None] = lambda: None
        self._news = asyncio.Queue[Any]()
        self.put = self._news.put_nowait  # in the event loop
        loop, seconds = asyncio.get_running_loop(), service.config.timeout
        late = Refused(504, f"No answer within {seconds:g} s; the request was aborted.")
        self._timer = loop.call_later(seconds, self.refuse, late)
        self._watch = loop.create_task(self._listen(receive))
        service.calls.add(self)

    async def _listen(self, receive: Receive) -> None:
        """Put the body as it comes; then wait until the client is gone."""
        size, most = 0, self._service.config.max_body
        while (message := await receive())["type"] != "http.disconnect":
            size += len(message.get("body", b""))
            if size <= most:
                self.put(message)
            else:
                self.refuse(Refused(413, f"A body of more than {most} bytes."))
        self.refuse(Refused(499, "The client closed the connection."))

    async def receive(self) -> Message:
        """The next part of the body, as ASGI calls it. Raises what it was refused for."""
        found: Any = await self._news.get()
        if isinstance(found, Refused):
            raise HTTPException(found.status, str(found))  # FastAPI lets no other error pass here
        return found

    def refuse(self, why: Refused | None = None) -> None:
        """End it before its time, for a reason that is told; later calls are ignored."""
        if not self._over:
            self._over = True
            self._undo()
            while not self._news.empty():  # what nobody read in time
                self._news.get_nowait()
            self.put(why)

    async def news(self, begin: Callable[[], Any], undo: Callable[[], None]) -> AsyncIterator[Any]:
        """Begin what undo takes back, unless it was refused by now; then what is put, until that is
        None. Raises what it was refused for.
        """
        if not self._over:
            self._undo = undo
            begin()
        while (found := await self._news.get()) is not None:
            if isinstance(found, Exception):
                raise found
            yield found

    async def run(self, jobs: Sequence[Job]) -> AsyncIterator[tuple[int, News]]:
        """Submit jobs whose sink is `put`: the number of each that has news, until all have ended.
        Raises what ended one of them.
        """
        thread, left = self._service.thread, {job: k for k, job in enumerate(jobs)}
        begin, undo = partial(thread.submit, jobs), partial(thread.abort, jobs)
        async for job in self.news(begin, undo):
            news = job.take()
            if job not in left or not (news.token_ids or news.output):
                continue  # taken before it was told
            number = left[job]
            if news.output is not None:
                if news.output.error is not None:
                    raise Refused.by(news.output.error)
                del left[job]
                if not left:
                    self._over = True
                    self.put(None)
            yield number, news

    def close(self) -> None:
        """Answered, or refused: nothing of it is left."""
        self.refuse()
        self._timer.cancel()
        self._watch.cancel()
        self._service.calls.discard(self)


class EventStream(StreamingResponse):
    """Server-sent events; that the client has gone is its call's to see."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


class Service:
    """Engines, searches and calls of one server; its endpoints are methods."""

    def __init__(self, config: ServeConfig, settings: Mapping[str, Any]) -> None:
        self.config, self.calls, self.ready, self.closing = config, set[Call](), False, False
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        if "model" in settings:
            raise ConfigError("--set model=... is no setting of serve: its models are arguments.")
        arena = make_arena(config, EngineConfig.from_dict(settings))

        def make() -> dict[str, ServedEngine]:
            engines = {n: ServedEngine(n, arena=arena, **settings) for n in arena.models}
            for engine in engines.values():  # kernels are compiled before the first request
                engine.score([0], [0], [0])
                if engine.value_outputs is None:
                    engine.generate([[0]], SamplingParams(max_tokens=2))
            return engines

        def deliver(jobs: Sequence[Job]) -> None:
            for job in jobs:
                job.sink(job)

        queue = config.max_queue
        self.thread = EngineThread(arena, make, queue, partial(self._post, deliver), self._on_ready)
        self._pair: searches.Pair | None = None  # once they are loaded, where both are served
        self._searchers = ThreadPoolExecutor(MOST_SEARCHES, "search")
        self._searches = dict[str, dict[str, Any]]()

    # -- its life --

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Load in the engine thread, meanwhile say 503; at the end nothing is left."""
        self._loop = asyncio.get_running_loop()
        self.thread.start()
        yield
        self.refuse_all()
        await asyncio.to_thread(self.thread.close)
        await asyncio.to_thread(self._searchers.shutdown)

    def refuse_all(self) -> None:
        """The server ends: every call that is left is told."""
        for call in list(self.calls):
            call.refuse(Refused(503, CLOSING))

    async def refused(self, _: Any, error: Exception) -> Response:
        """The response that tells an error, which is counted."""
        why = Refused.by(error)
        self.thread.metrics.refused.labels(str(why.status)).inc()
        return JSONResponse(why.body, why.status, why.headers)

    def _post(self, do: Callable[..., Any], *arguments: Any) -> None:
        """From any thread: in the event loop, soon."""
        with suppress(RuntimeError):  # the loop has ended, and its calls before it
            self._loop.call_soon_threadsafe(do, *arguments)

    @property
    def state(self) -> str:
        """What /health says: ok, or why no request is taken."""
        if self.failure is not None:
            return "failed"
        return "closing" if self.closing else "ok" if self.ready else "loading"

    def _on_ready(self, failure: BaseException | None) -> None:
        self._pair = searches.pair_of([*self.thread.engines.values()])
        self.failure, self.ready = failure, failure is None
        if failure is not None:
            self._post(self.on_failure)
            return
        size = format_size(self.thread.arena.memory)
        log.info("ready: %s; %s of KV cache", ", ".join(self._models), size)

    # -- models and prompts --

    @property
    def _models(self) -> list[str]:
        return [*self.thread.engines, *(searches.STRATEGIES if self._pair else ())]

    def _engine(self, model: str) -> ServedEngine:
        if model in self.thread.engines:
            return self.thread.engines[model]
        if model in self._models:
            raise Refused(400, f"{model} is a search; ask /v1/chat/completions.", "model")
        raise self._unknown(model)

    def _unknown(self, model: str) -> Refused:
        message = f"The model {model!r:.100} is not served; served are: {', '.join(self._models)}."
        return Refused(404, message, "model", "model_not_found")

    def _require_room(self, engine: ServedEngine, number: int, param: str) -> None:
        """Refused where so many sequences of one request could never be taken."""
        most = min(protocol.MOST_CHOICES, self.config.max_queue + engine.config.max_num_seqs)
        if number > most:
            message = f"{param} asks for {number} sequences; allowed at once: {most}."
            raise Refused(400, message, param)

    # -- generating --

    async def completions(self, body: protocol.CompletionRequest, request: Request) -> Response:
        """POST /v1/completions."""
        engine, prompts = self._engine(body.model), protocol.one_by_one(body.prompt)
        given = engine, "prompt", prompts, body.add_special_tokens
        at_once = all(map(_are_ids, prompts))  # else there is work for a worker thread
        inputs = _inputs(*given) if at_once else await asyncio.to_thread(_inputs, *given)
        return await self._generate(request.scope["call"], body, engine, inputs, body.logprobs)

    async def chat(self, body: protocol.ChatRequest, request: Request) -> Response:
        """POST /v1/chat/completions."""
        call = request.scope["call"]
        if body.model in searches.STRATEGIES:
            return await self._search(call, body)
        engine = self._engine(body.model)
        if body.search:
            raise Refused(400, "search is for a model called search/...; leave it out.", "search")
        given = engine, "messages", [body.messages], body.add_generation_prompt
        inputs = await asyncio.to_thread(_inputs, *given)
        logprobs = body.top_logprobs if body.logprobs else None
        return await self._generate(call, body, engine, inputs, logprobs)

    async def _generate(
        self,
        call: Call,
        body: protocol.Sampled,
        engine: ServedEngine,
        inputs: Sequence[list[int]],
        logprobs: int | None,
    ) -> Response:
        """n choices after each input."""
        if engine.value_outputs is not None:
            message = f"{engine.name} has a value head and generates nothing; ask /pooling."
            raise Refused(400, message, "model")
        _known(body.stop_token_ids, engine.spec.vocab, "stop_token_ids")
        self._require_room(engine, len(inputs) * body.n, "n" if body.n > 1 else "prompt")
        jobs, choices = list[Job](), list[Choice]()
        for ids, k in product(inputs, range(body.n)):
            params = body.sampling(k, engine.max_model_len - len(ids), logprobs)
            how = params, None, body.stream, body.priority
            jobs.append(Job(engine.name, ids, call.put, *how))
            choices.append(Choice(len(choices), engine.tokenizer, body, logprobs))

        def told(number: int, news: News) -> Told:
            return {"choices": [choices[number].add(*news)]}

        def usage() -> Told:
            outputs = [job.output for job in jobs if job.output is not None]  # all, by now
            cached = sum(output.num_cached_tokens or 0 for output in outputs[:: body.n])
            sampled = sum(len(output.token_ids) for output in outputs)
            return protocol.usage(sum(map(len, inputs)), sampled, cached)

        is_chat = isinstance(body, protocol.ChatRequest)
        kind, prefix = ("chat.completion", "chatcmpl") if is_chat else ("text_completion", "cmpl")
        head = protocol.head(kind + ".chunk" * (is_chat and body.stream), prefix, engine.name)
        return await self._answer(call.run(jobs), head, told, usage, body)

    async def _search(self, call: Call, body: protocol.ChatRequest) -> Response:
        """A search for the solution of one problem."""
        if self._pair is None:
            raise self._unknown(body.model)
        run = searches.SearchRun(body, self.thread, self._pair)
        over = [k for k, state in self._searches.items() if state["status"] in searches.ENDED]
        if len(self._searches) - len(over) >= MOST_SEARCHES + self.config.max_queue:
            raise Refused(503, "Too many searches wait; try again.", code="queue_full")
        for name in over[: max(0, len(over) + 1 - KEPT_SEARCHES)]:
            del self._searches[name]

        def play() -> None:
            self._searches[run.head["id"]] = run.state
            run.played = self._searchers.submit(run.play, partial(self._post, call.put))

        chunks = call.news(play, run.cancel)
        return await self._answer(chunks, run.head, lambda _, chunk: chunk, run.usage, body)

    async def _answer(
        self,
        events: AsyncIterator[tuple[int, Any]],
        head: Told,
        told: Callable[[int, Any], Told],
        usage: Callable[[], Told],
        body: protocol.Sampled | None = None,
    ) -> Response:
        """What is told of each event, after what every answer begins with: as chunks where body
        asks for a stream, else together once all have come, by their numbers. An error before the
        first event is raised; one after it is the last of a stream.
        """
        if body is None or not body.stream:
            found = sorted([event async for event in events], key=itemgetter(0))

            def whole() -> Response:
                answer = dict(head)
                for name, value in chain.from_iterable(told(*each).items() for each in found):
                    rows = isinstance(value, list)  # of which each event tells some
                    answer[name] = answer.get(name, []) + value if rows else value
                return JSONResponse(answer | {"usage": usage()})

            return await asyncio.to_thread(whole)  # it may be large
        begin, first = f"{ENCODE(head)[:-1]},", await anext(events)

        async def lines() -> AsyncIterator[str]:
            event: Any = first
            try:
                while event is not None:
                    yield f"data: {begin}{ENCODE(told(*event))[1:]}\n\n"
                    event = await anext(events, None)
                if body.stream_options.get("include_usage"):
                    yield f"data: {begin}{ENCODE({'choices': [], 'usage': usage()})[1:]}\n\n"
                yield "data: [DONE]\n\n"
            except Exception as error:
                refused = await self.refused(None, error)
                yield f"data: {bytes(refused.body).decode()}\n\n"

        return EventStream(lines())

    # -- scoring, in vLLM's shapes --

    def tokenize(self, body: protocol.TokenizeRequest) -> Response:
        """POST /tokenize."""
        engine = self._engine(body.model)
        _, (text,), special = body.given("prompt")
        ids, decode = _encoded(engine, text, special), engine.tokenizer.decode
        told = {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids}
        names = [decode([token]) for token in ids] if body.return_token_strs else None
        return JSONResponse(told | {"token_strs": names})

    async def generative_scoring(self, body: protocol.ScoringRequest, request: Request) -> Response:
        """POST /generative_scoring."""
        engine = self._engine(body.model)
        outputs, special, first = engine.spec.outputs, body.add_special_tokens, body.item_first
        labels = _known(body.label_token_ids, outputs, "label_token_ids")
        columns = tuple(labels if body.apply_softmax else range(outputs))
        place = 0 if body.apply_softmax else labels[0]

        def asked() -> Iterator[tuple[list[int], ScoreParams]]:
            query = _encoded(engine, body.query, special and not first)
            for each in body.items:
                item = _encoded(engine, each, special and first)
                ids = _fitting(engine, [*item, *query] if first else [*query, *item], "items", 0)
                yield ids, ScoreParams((len(ids) - 1,), columns)

        def score(logits: Logits) -> Told:
            return {"object": "score", "score": _softmax(logits[0])[place]}

        kind = "generative-scoring", "items"
        return await self._scored(request.scope["call"], engine, *kind, asked, score)

    async def pooling(self, body: protocol.PoolingRequest, request: Request) -> Response:
        """POST /pooling: of each input [bad, good] after every step, or the lone value there."""
        engine = self._engine(body.model)
        format = known_format(engine.name, engine.architecture)
        if format is None:
            message = f"{engine.name} is no reward model of a known format: {', '.join(FORMATS)}."
            raise Refused(400, message, "model")

        def asked() -> Iterator[tuple[list[int], ScoreParams]]:
            rules = FORMATS[format](engine.tokenizer)
            if rules.critique_stop is not None:
                message = f"{engine.name} writes critiques before it judges; /pooling reads marks."
                raise Refused(400, message, "model")
            mark, size = list(rules.mark), len(rules.mark)
            for ids in _inputs(engine, *body.given("input"), room=0):
                ends = [k + size for k in range(len(ids)) if ids[k : k + size] == mark]
                if not ends:
                    message = f"An input has no mark of a step; {format} reads a verdict at each."
                    raise Refused(400, message, "input")
                yield ids, ScoreParams(tuple(end - 1 for end in ends), rules.columns)

        def verdict(row: Any) -> list[float]:  # of two [bad, good], of one its sigmoid
            return _softmax(row)[::-1] if len(row) > 1 else _softmax([*row, 0.0])[:1]

        def verdicts(logits: Logits) -> Told:
            return {"object": "pooling", "data": [*map(verdict, logits)]}

        return await self._scored(request.scope["call"], engine, "pool", "input", asked, verdicts)

    async def _scored(
        self,
        call: Call,
        engine: ServedEngine,
        prefix: str,
        param: str,
        asked: Callable[[], Iterable[tuple[list[int], ScoreParams]]],
        told: Callable[[Logits], Told],
    ) -> Response:
        """As vLLM lists it: what is told of the logits [positions, columns] of each that is asked,
        which a worker thread prepares.
        """
        every = await asyncio.to_thread(lambda: [*asked()])
        self._require_room(engine, len(every), param)
        jobs = [Job(engine.name, ids, call.put, score=score) for ids, score in every]
        used = protocol.usage(sum(len(ids) for ids, _ in every))

        def row(number: int, news: News) -> Told:
            output: Any = news.output
            return {"data": [{"index": number} | told(output.logits.astype(np.float64))]}

        head = protocol.head("list", prefix, engine.name)
        return await self._answer(call.run(jobs), head, row, lambda: used)

    # -- states --

    async def health(self) -> Response:
        """GET /health: 503 while no request is taken."""
        return JSONResponse({"status": self.state}, 200 if self.state == "ok" else 503)

    def metrics(self) -> Response:
        """GET /metrics, in Prometheus' text format."""
        text = generate_latest(self.thread.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> Told:
        """GET /v1/models."""
        return {"object": "list", "data": [await self.model(name) for name in self._models]}

    async def model(self, name: str) -> Told:
        """GET /v1/models/{name}."""
        if name not in self._models:
            raise self._unknown(name)
        engine = self.thread.engines.get(name)
        longest = None if engine is None else engine.max_model_len
        told = {"id": name, "object": "model", "created": 0, "owned_by": "workbench"}
        return told | {"max_model_len": longest}

    def tree(self, name: str) -> Response:
        """GET /search/{name}."""
        if (state := self._searches.get(name)) is None:  # once: another thread may drop it
            message = f"There is no search {name!r:.60}; the last {KEPT_SEARCHES} are kept."
            raise Refused(404, message, "id")
        return JSONResponse(dict(state))  # its search may be adding to it

    def arena(self) -> Told:
        """GET /arena: pages and blocks."""
        states = {name: self.thread.state(name) for name in self.thread.engines}
        return {"pages": self.thread.arena.num_pages, "models": states}

    def split(self, body: protocol.SplitRequest) -> Told:
        """POST /arena/split, taken over between steps."""
        if len(self.thread.engines) < 2:
            raise Refused(400, "One model is served: it has the whole arena.", "shares")
        try:
            answer = self.thread.arena.resplit(body.shares)
        except ConfigError as error:
            raise Refused(400, str(error), "shares") from error
        if answer.refused:
            raise Refused(409, f"The split was refused: {answer.reason}.", "shares")
        return {"outcome": answer.outcome, "reason": answer.reason}


def _encoded(engine: ServedEngine, given: Any, special: bool) -> list[int]:
    """Token ids of a text, of messages (special: with a generation prompt), or as given."""
    if isinstance(given, str):
        return engine.tokenizer.encode(given, special)
    if _are_ids(given):
        return list(given)
    return engine.tokenizer.encode_chat([each.model_dump() for each in given], special)


def _are_ids(given: Any) -> bool:
    return not isinstance(given, str) and (not given or isinstance(given[0], int))


def _inputs(
    engine: ServedEngine, field: str, texts: Sequence[Any], special: bool, room: int = 1
) -> list[list[int]]:
    """Token ids of each text of a field, or of each chat."""
    return [_fitting(engine, _encoded(engine, text, special), field, room) for text in texts]


def _fitting(engine: ServedEngine, ids: list[int], param: str, room: int = 1) -> list[int]:
    """These ids, if all are known and there is room for so many more."""
    most = engine.max_model_len - room
    if not 1 <= len(ids) <= most:
        message = f"{param} has {len(ids)} tokens; allowed: 1 to {most} for {engine.name}."
        raise Refused(400, message, param, "context_length_exceeded")
    return _known(ids, engine.spec.vocab, param)


def _known(ids: Sequence[int], size: int, param: str) -> list[int]:
    """These ids, if all are below size."""
    if max(ids, default=0) >= size:
        raise Refused(400, f"{param} has the id {max(ids)}; allowed: 0 to {size - 1}.", param)
    return [*ids]


def _softmax(row: Any) -> list[float]:
    likely = np.exp(np.subtract(row, np.max(row)))
    return [float(p) for p in likely / likely.sum()]


# -- the application --


class Guard:
    """Refuses a wrong key, and all while no request is taken; else opens the call of a request."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, app, why = self._service, self._app, None
        if scope["type"] != "http" or scope["path"] == "/health":
            await app(scope, receive, send)
            return
        key, given = service.config.api_key, dict(scope["headers"]).get(b"authorization", b"")
        if key is not None and not hmac.compare_digest(given, b"Bearer " + key.encode()):
            why = Refused(401, "No valid API key; send it as `Authorization: Bearer KEY`.")
        elif service.state != "ok":
            why = Refused(503, f"The server takes no request ({service.state}); try again.")
        if why is not None:
            app = await service.refused(scope, why)
        with closing(Call(service, receive)) as call:
            scope["call"] = call
            await app(scope, call.receive, send)


def make_app(service: Service) -> FastAPI:
    """The application over a service."""
    kinds = (WorkbenchError, RequestValidationError, HTTPException, Exception)
    handlers: Any = dict.fromkeys(kinds, service.refused)
    app = FastAPI(lifespan=service.lifespan, exception_handlers=handlers)
    app.add_middleware(Guard, service=service)
    app.get("/health")(service.health)
    app.get("/metrics")(service.metrics)
    app.get("/v1/models")(service.models)
    app.get("/v1/models/{name:path}")(service.model)
    app.post("/v1/completions")(service.completions)
    app.post("/v1/chat/completions")(service.chat)
    app.post("/tokenize")(service.tokenize)
    app.post("/generative_scoring")(service.generative_scoring)
    app.post("/pooling")(service.pooling)
    app.get("/search/{name}")(service.tree)
    app.get("/arena")(service.arena)
    app.post("/arena/split")(service.split)
    return app


class Server(uvicorn.Server):
    """uvicorn's; calls in flight are told when their grace is over, and cut five seconds later."""

    def __init__(self, service: Service) -> None:
        config = service.config
        how: dict[str, Any] = {"host": config.host, "port": config.port, "access_log": False}
        how |= {"log_config": None, "timeout_graceful_shutdown": int(config.grace) + 5}
        super().__init__(uvicorn.Config(make_app(service), **how))
        self.service = service
        service.on_failure = self.end

    def end(self) -> None:
        """As a signal would."""
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        """Finish what is in flight, or refuse it."""
        loop, service = asyncio.get_running_loop(), self.service
        service.closing = True
        timer = loop.call_later(service.config.grace, service.refuse_all)
        await super().shutdown(sockets)
        timer.cancel()


def serve(config: ServeConfig, settings: Mapping[str, Any]) -> None:
    """Serve until a signal. settings: of every engine. Raises what keeps it from serving."""
    service = Service(config, settings)
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listener = socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        raise ConfigError(f"{config.host}, port {config.port}: {error}; give another.") from error
    log.info("listening at %s, port %d", *listener.getsockname()[:2])
    if config.host not in ("127.0.0.1", "localhost", "::1") and config.api_key is None:
        log.warning("no API key, and bound to %s: all who reach it may use it", config.host)
    with peak_on(torch.device("cpu")):  # else torch's profiler complains of another thread
        pass
    gc.freeze()  # what was imported stays: going through it held all clients up for 0.17 s
    Server(service).run([listener])
    if service.failure is not None:
        raise service.failure
