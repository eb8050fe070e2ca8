"""An engine that is a server: vLLM's endpoints (0.32 was tried), which `workbench serve` has too.

Prompts and answers are token ids, so nothing is tokenised twice and no chat template of the server
enters. Requests are in flight at once, from an event loop in a thread; each is a pure function of
what is sent, its seed included, so one that a network lost is asked again, and has one output.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
import threading
import weakref
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from itertools import count
from typing import Any

import httpx
import numpy as np

from workbench.core import RequestOutput, Sequence
from workbench.engine.foreign import ForeignEngine, Ids, Logits
from workbench.errors import ConfigError, ModelError, RemoteError, WorkbenchError, nearest
from workbench.models.registry import DUMMY, find_model, open_source

TRIES = 5  # of a request whose connection fails
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0  # seconds before the second try, then twice as long each
BUSY = (429, 502, 503, 504)  # statuses of a server that may answer later
MOST_ITEMS = 128  # of one scoring request
LEAST = 1e-38  # of a probability whose logarithm is taken
PROBE = "Compute 7-3+12.\n\n## Step 1: \\boxed{été}"
Answer = Mapping[str, Any]


class Connection:
    """A server asked from an event loop in a thread of its own, many requests at a time.

    url: without /v1. timeout: seconds to an answer, all tries and waiting for a busy server
    included; waiting for one of the `in_flight` places is not.
    """

    def __init__(self, url: str, key: str | None, in_flight: int, timeout: float) -> None:
        self.url, self._timeout = url, timeout
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=in_flight)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None)
        self._places = asyncio.Semaphore(in_flight)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run it in the loop."""
        if self._loop.is_closed():
            work.close()
            raise ConfigError(f"The engine of {self.url} is closed; make a new one.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Drop what is in flight, and end the thread."""
        if self._loop.is_closed():
            return
        ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        if threading.current_thread() is not self._thread:  # a collection may run there
            ended.result()
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()
        self._loop.call_soon(self._loop.stop)

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """The object that the server answers a GET (body None) or POST with.

        A connection that fails is tried again TRIES times in all, a busy server until the time is
        over; pauses are drawn at random about a doubling mean, or what the server asks for.
        RemoteError when that is of no use, for any other status, and for what is no JSON object.
        """
        where, why = f"{self.url}{path}", "nothing came"
        async with self._places:
            try:
                async with asyncio.timeout(self._timeout):
                    for tried in count(1):
                        pause = min(FIRST_PAUSE * 2 ** (tried - 1), LONGEST_PAUSE)
                        try:
                            method = "GET" if body is None else "POST"
                            response = await self._client.request(method, where, json=body)
                        except httpx.TransportError as error:
                            why = f"{type(error).__name__} {error}".strip()
                            if tried == TRIES:
                                break
                        else:
                            if response.status_code not in BUSY:
                                return _object(where, response)
                            why = f"status {response.status_code}: {response.text:.200}"
                            asked = response.headers.get("Retry-After", "")
                            if re.fullmatch(r"\d{1,9}", asked):
                                pause = max(float(asked), FIRST_PAUSE)
                        await asyncio.sleep(pause * random.uniform(0.75, 1.25))
                    told = f"{TRIES} times"
            except TimeoutError:
                told = f"for {self._timeout:g} s"
        raise RemoteError(
            f"{where} gave no answer, asked {told}; last: {why}. Is the server up, and fast enough "
            "for timeout and in_flight?"
        )


def _object(where: str, response: httpx.Response) -> Answer:
    """The JSON object of a response; RemoteError for another status or body."""
    text = f"{response.text:.300}"
    if response.status_code != 200:
        raise RemoteError(f"{where} refused with status {response.status_code}: {text}")
    try:
        told = response.json()
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise RemoteError(f"{where} answered what is no JSON object: {text!r}")
    return told


class RemoteEngine(ForeignEngine):
    """A model that a server of vLLM's endpoints serves; one engine for one model.

    url: "http://host:8000". model: as the server names it. files: the same model by a name that
    Engine knows, of which config and tokenizer are read here; None: `model` is one. in_flight:
    requests that the server has at a time. timeout: seconds to an answer. Scores are logarithms of
    probabilities: logits up to a constant for each position. Nothing is known of the server's
    weights and arithmetic, so no two engines have the same fingerprint. Raises RemoteError for a
    server that cannot be asked, ModelError for a model that it does not serve, or serves with
    another tokenizer. A request that fails ends with a RemoteError in `.error`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        files: str | None = None,
        api_key: str | None = None,
        in_flight: int = 64,
        timeout: float = 300.0,
        max_model_len: int | None = None,
    ) -> None:
        place = re.fullmatch(r"(https?://[^/?#]+[^?#]*?)(/v1)?/*", url)
        if place is None or in_flight < 1 or not timeout > 0:
            raise ConfigError(
                f"RemoteEngine got url={url!r}, in_flight={in_flight} and timeout={timeout}; give "
                "a url such as 'http://127.0.0.1:8000', at least one place, and seconds above 0."
            )
        named = (files or model).removeprefix(DUMMY)
        source = open_source(find_model(named, weights=False))
        super().__init__(model, source, dummy=named != (files or model))
        self.url = place[1]
        self._server = Connection(self.url, api_key, in_flight, timeout)
        self._end = weakref.finalize(self, self._server.close)
        self._done: dict[int, RequestOutput] = {}  # filled by the thread
        self._news = threading.Event()
        self.fingerprint = f"remote/{self.url}/{model}/{secrets.token_hex(4)}"
        try:
            self._require_served(max_model_len)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Drop every request and end the thread, as when the engine is dropped."""
        self._pending.clear()
        self._held.clear()
        self._end()

    def _require_served(self, max_model_len: int | None) -> None:
        """The server has this model, with this tokenizer; how long its requests may be."""
        listed = self._server.start(self._server.ask("/v1/models")).result()
        try:
            cards = {str(card["id"]): card for card in listed["data"]}
        except (KeyError, TypeError) as error:
            raise RemoteError(f"{self.url}/v1/models answered {listed!r:.300}.") from error
        if self.name not in cards:
            raise ModelError(
                f"{self.url} does not serve {self.name!r}.{nearest(self.name, list(cards))} "
                f"Served: {', '.join(cards) or 'nothing'}; files= names the files of a model that "
                "is served under another name."
            )
        lengths = [max_model_len, cards[self.name].get("max_model_len")]
        self.max_model_len = min((n for n in lengths if isinstance(n, int)), default=0)
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {lengths} (given, served); give 2 or more.")
        body = {"model": self.name, "prompt": PROBE, "add_special_tokens": False}
        told = self._server.start(self._server.ask("/tokenize", body)).result()
        ours = self.tokenizer.encode(PROBE, add_special_tokens=False)
        if told.get("tokens") != ours:
            raise ModelError(
                f"{self.url} writes {PROBE!r} as tokens {told.get('tokens')!r:.100}, the tokenizer "
                f"of {self.name!r} here as {ours!r:.100}: they are not of one model. Give files= "
                "the model that is served."
            )

    # -- requests --

    def _started(self, sequence: Sequence) -> Future[None]:
        return self._server.start(self._carried_out(sequence))

    async def _carried_out(self, sequence: Sequence) -> None:
        number, work = sequence.request_id, self._score if sequence.params is None else self._sample
        try:
            output = await work(sequence)
        except Exception as error:
            if not isinstance(error, WorkbenchError):
                error = self._wrong(f"what cannot be read ({type(error).__name__}: {error})")
            output = RequestOutput(number, (), "", "error", error=error)
        self._done[number] = output
        self._news.set()

    def _advance(self) -> None:
        while not self._done:
            self._news.wait()
            self._news.clear()
        for number, output in list(self._done.items()):
            if number in self._pending:
                self._held[number] = output
                del self._pending[number]
            del self._done[number]

    def abort(self, request_id: int) -> None:
        """As every engine; the server sees its client leave."""
        if (future := self._pending.get(request_id)) is not None:
            future.cancel()
        super().abort(request_id)

    async def _asked(self, path: str, prompt_tokens: int, body: Mapping[str, Any]) -> Answer:
        """An answer by this model, to as many prompt tokens as it was sent."""
        told = await self._server.ask(path, {"model": self.name, **body})
        used, model = told["usage"]["prompt_tokens"], told.get("model")
        if model != self.name or used != prompt_tokens:
            raise self._wrong(f"for the model {model!r:.100} and {used} tokens of prompt, not for "
                              f"{self.name!r} and {prompt_tokens}")  # fmt: skip
        return told

    def _wrong(self, what: str) -> RemoteError:
        return RemoteError(f"{self.url} answered {what}. Is it a server in vLLM's shapes?")

    async def _sample(self, sequence: Sequence) -> RequestOutput:
        """Tokens by /v1/completions; where they end, our own conditions say."""
        params, prompt = sequence.params, list(sequence.token_ids)
        assert params is not None
        if params.logprobs is not None:
            raise RemoteError(f"{self!r} returns no logprobs; leave them out.")
        same = ("temperature", "top_p", "top_k", "min_p")
        last, eos = self._last(sequence), () if params.ignore_eos else self.tokenizer.eos_ids
        told = await self._asked("/v1/completions", len(prompt), {
            "prompt": prompt,
            "max_tokens": last - len(prompt),
            **{name: getattr(params, name) for name in same},
            # else a server takes those of the model's generation_config
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "seed": (params.seed + 2**63) % 2**64 - 2**63,  # int64, the same bits
            "stop": list(params.stop),
            "stop_token_ids": sorted({*params.stop_token_ids, *eos}),
            "ignore_eos": True,  # whose ids are among the stop ids
            "return_token_ids": True,
        })  # fmt: skip
        ids = told["choices"][0]["token_ids"]
        if any(type(k) is not int or not 0 <= k < self._vocab for k in ids):
            raise self._wrong(f"token ids {ids!r:.200} of a model with {self._vocab}")
        reason = None
        self._stops.add(sequence.request_id, params)
        for token in ids:  # a server may have sampled on before it saw the stop
            sequence.token_ids.append(token)
            reason = self._stops.finish_reason(sequence)
            if reason or len(sequence.token_ids) == last:
                break
        self._stops.remove(sequence.request_id)
        if reason is None and len(sequence.token_ids) < last:
            ended = told["choices"][0].get("finish_reason")
            most = last - len(prompt)
            raise self._wrong(f"{len(ids)} of {most} tokens ({ended!r}), and no stop among them")
        details = told["usage"].get("prompt_tokens_details") or {}
        return self._sampled(sequence, reason or "length", details.get("cached_tokens"))

    async def _score(self, sequence: Sequence) -> RequestOutput:
        score, ids = sequence.score, sequence.token_ids
        assert score is not None
        read = self._labels if self.value_outputs is None else self._values
        places, parts = score.positions, list[Logits]()
        for first in range(0, len(places), MOST_ITEMS):
            some = places[first : first + MOST_ITEMS]
            parts.append(np.log(np.maximum(await read(ids, some, score.columns), LEAST)))
        logits: Logits = np.concatenate(parts).astype(np.float32)
        return RequestOutput(sequence.request_id, (), "", "score", None, logits=logits)

    async def _labels(self, ids: list[int], places: Ids, columns: Ids) -> Logits:
        """Probabilities [places, columns] of next tokens by /generative_scoring: of two columns,
        between them; of others, in the vocabulary, a call for each.
        """
        start = places[0]
        items = [ids[start : place + 1] for place in places]
        asked = {"query": ids[:start], "items": items}
        sent = len(items) * start + sum(map(len, items))

        async def of(labels: list[int], among: bool) -> Logits:
            how = {"label_token_ids": labels, "apply_softmax": among}
            told = await self._asked("/generative_scoring", sent, asked | how)
            return _probabilities([[each["score"]] for each in told["data"]], len(places), 1)

        if len(columns) == 2:
            first = await of([*columns], True)
            return np.concatenate([first, 1 - first], axis=1)
        return np.concatenate([await of([column], False) for column in columns], axis=1)

    async def _values(self, ids: list[int], places: Ids, columns: Ids) -> Logits:
        """Probabilities [places, columns] by /pooling, of the last token of each beginning."""
        beginnings = [ids[: place + 1] for place in places]
        body = {"input": beginnings, "task": "token_classify", "encoding_format": "float"}
        told = await self._asked("/pooling", sum(map(len, beginnings)), body)
        last = [each["data"][-1] for each in told["data"]]
        assert self.value_outputs is not None
        found = _probabilities(last, len(places), self.value_outputs)
        if self.value_outputs == 1:  # a sigmoid: the odds, whose logarithm is the value
            found = found / np.maximum(1 - found, LEAST)
        return found[:, list(columns)]


def _probabilities(given: Any, rows: int, columns: int) -> Any:
    """float64 [rows, columns]; ValueError for anything else."""
    found = np.asarray(given, np.float64).reshape(-1, columns)
    if len(found) != rows or not ((found >= 0) & (found <= 1)).all():  # nor NaN
        raise ValueError(f"{given!r:.200} are not {rows} rows of probabilities")
    return found
