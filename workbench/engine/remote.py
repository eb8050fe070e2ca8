"""An engine that is a server: vLLM's, `workbench serve`, llama.cpp's or SGLang's.

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
from abc import ABC, abstractmethod
from collections.abc import Collection, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import httpx
import numpy as np

from workbench.config import EngineConfig
from workbench.core import RequestOutput, SamplingParams, Sequence
from workbench.engine.foreign import ForeignEngine, Logits
from workbench.engine.requests import Ids, length_limit, output_of
from workbench.errors import ConfigError, ModelError, RemoteError, WorkbenchError, nearest
from workbench.models.registry import DUMMY, find_model, open_source

TRIES = 5  # of a request whose connection fails
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0  # seconds before the second try, then twice as long each
BUSY = (429, 502, 503)  # statuses of a server that may answer later
LEAST = 1e-38  # of a probability whose logarithm is taken
LEAST_TEMPERATURE = 0.01  # of vLLM, which raises lower ones to it
BIAS = 100.0  # in nats: labels so much less likely than another token are still found
FILTERS = ("temperature", "top_k", "top_p", "min_p")
# else a server takes those of the model's generation_config
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
PROBE = "Compute 7-3+12.\n\n## Step 1: \\boxed{été}"
JSONObject = Mapping[str, Any]
Sampled = tuple[list[Any], int | None, Any]  # of ServerKind.sample


class Connection:
    """A server asked from an event loop in a thread of its own, many requests at a time.

    url: without /v1. timeout: seconds to an answer, all tries and waiting for a busy server
    included; waiting for one of the `in_flight` places is not.
    """

    def __init__(self, url: str, key: str | None, in_flight: int, timeout: float) -> None:
        self.url, self._timeout = url, timeout
        headers = {"Authorization": f"Bearer {key}"} if key else {}
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

    async def request(self, path: str, body: Mapping[str, Any] | None = None) -> JSONObject:
        """The object that the server answers a GET (body None) or POST with.

        A connection that fails is tried again TRIES times in all, a busy server until the time is
        over; pauses are drawn at random about a doubling mean, or what the server asks for.
        RemoteError when that is of no use, for any other status, and for what is no JSON object.
        """
        where, why, failed = f"{self.url}{path}", "nothing came", 0
        async with self._places:
            try:
                async with asyncio.timeout(self._timeout):
                    for tried in count(1):
                        pause = min(FIRST_PAUSE * 2 ** min(tried - 1, 10), LONGEST_PAUSE)
                        try:
                            method = "GET" if body is None else "POST"
                            response = await self._client.request(method, where, json=body)
                        except httpx.TransportError as error:
                            why = f"{type(error).__name__} {error}".strip()
                            failed += 1
                            if failed == TRIES:
                                break
                        except (httpx.RequestError, httpx.InvalidURL) as error:
                            told = f"{type(error).__name__} {error}".strip()
                            raise RemoteError(f"{where} cannot be asked: {told}.") from error
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


def _object(where: str, response: httpx.Response) -> JSONObject:
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


class ServerKind(ABC):
    """One kind of server: what it is asked about a model, and how its answers are read.

    capabilities: of "seeds" (by which it samples), "ignore_eos", "values" (of a value head).
    counted: keys of an answer's prompt tokens. most_places: of one call for scores.
    """

    capabilities: frozenset[str]
    counted: tuple[str, ...]
    most_places = 1

    def __init__(
        self, name: str, server: Connection, model: str, owner: str, others: Collection[str] = ()
    ) -> None:
        """owner: what the server says it is. others: names of the model that it may answer by."""
        self.name, self._server, self.model, self.owner = name, server, model, owner
        self._names = {model, *others}

    def wrong(self, what: str | Exception) -> RemoteError:
        """The error for an answer that is wrong, or whose reading raised this."""
        if isinstance(what, Exception):
            what = f"what cannot be read ({type(what).__name__}: {what})"
        asked = f"It is asked as a server of kind {self.name!r}; give kind= where it is another."
        return RemoteError(f"{self._server.url} answered {what}. {asked}")

    async def _asked(self, path: str, prompt_tokens: int, body: JSONObject) -> JSONObject:
        """An answer by this model, to as many prompt tokens as it was sent."""
        told = used = await self._server.request(path, body)
        for key in self.counted:
            used = used[key]
        model = told.get("model", self.model)  # not every kind says it
        if model not in self._names or used != prompt_tokens:
            raise self.wrong(f"for the model {model!r:.100} and {used} tokens of prompt, not for "
                             f"{self.model!r} and {prompt_tokens}")  # fmt: skip
        return told

    async def max_model_len(self, card: JSONObject) -> Any:
        """Tokens of a request at most, if it says so. card: of /v1/models."""
        return card.get("max_model_len")

    async def tokens(self, text: str) -> Any:
        """Those of a text, without special ones around it."""
        asked = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return (await self._server.request("/tokenize", asked))["tokens"]

    @abstractmethod
    async def sample(self, prompt: list[int], params: SamplingParams) -> Sampled:
        """Tokens to the first stop or beyond, at most max_tokens; how many of the prompt were
        cached; what ended it: "eos", an end token of its own, else in its words. stop_token_ids has
        the model's end tokens, unless ignore_eos.
        """

    @abstractmethod
    async def label_probabilities(self, ids: list[int], places: Ids, columns: Ids) -> Any:
        """Probabilities [places, columns] of tokens after each place, up to a factor of its own."""

    async def value_probabilities(self, ids: list[int], places: Ids) -> Any:
        """Probabilities [places, outputs] of a value head, where the kind is capable of them."""
        raise AssertionError(f"{self.name} was asked for values")


class Vllm(ServerKind):
    """vLLM's endpoints (0.32 was tried), which `workbench serve` has too."""

    capabilities = frozenset({"seeds", "ignore_eos", "values"})
    counted = ("usage", "prompt_tokens")
    most_places = 128

    async def sample(self, prompt: list[int], params: SamplingParams) -> Sampled:
        seed = (params.seed + 2**63) % 2**64 - 2**63  # int64, the same bits
        if self.owner == "vllm" and 0 < params.temperature < LEAST_TEMPERATURE:
            raise RemoteError(
                f"vLLM samples at {LEAST_TEMPERATURE} where a temperature is lower; given: "
                f"{params.temperature}. Give 0, or one of {LEAST_TEMPERATURE} and more."
            )
        if self.owner == "vllm" and params.temperature and seed == -1:
            raise RemoteError(
                f"vLLM takes seed -1 for a random one; given: {params.seed}. Give another seed."
            )
        told = await self._asked("/v1/completions", len(prompt), {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": params.max_tokens,
            **{name: getattr(params, name) for name in FILTERS},
            **NO_PENALTIES,
            "seed": seed,
            "stop": list(params.stop),
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,  # whose ids are among the stop ids
            "return_token_ids": True,
        })  # fmt: skip
        choice, details = told["choices"][0], told["usage"].get("prompt_tokens_details") or {}
        return choice["token_ids"], details.get("cached_tokens"), choice.get("finish_reason")

    async def label_probabilities(self, ids: list[int], places: Ids, columns: Ids) -> Any:
        """By /generative_scoring: of two columns, between them; of others, in the vocabulary, a
        call for each.
        """
        start = places[0]
        items = [ids[start : place + 1] for place in places]
        asked = {"model": self.model, "query": ids[:start], "items": items}
        sent = len(items) * start + sum(map(len, items))

        async def of(labels: list[int], among: bool) -> Any:
            how = {"label_token_ids": labels, "apply_softmax": among}
            told = await self._asked("/generative_scoring", sent, asked | how)
            return _probabilities([[each["score"]] for each in told["data"]], len(places), 1)

        if len(columns) == 2:
            first = await of([*columns], True)
            return np.concatenate([first, 1 - first], axis=1)
        return np.concatenate([await of([column], False) for column in columns], axis=1)

    async def value_probabilities(self, ids: list[int], places: Ids) -> Any:
        """By /pooling, of the last token of each beginning, which ends in a step's mark."""
        beginnings = [ids[: place + 1] for place in places]
        asked = {"input": beginnings, "task": "token_classify", "encoding_format": "float"}
        sent = sum(map(len, beginnings))
        told = await self._asked("/pooling", sent, {"model": self.model} | asked)
        found = [each["data"] for each in told["data"]]
        if any(len(more) <= len(rows) for rows, more in pairwise(found)):
            raise ValueError("a place that is no step's mark has no verdict of its own")
        return [rows[-1] for rows in found]


class LlamaCpp(ServerKind):
    """llama.cpp's own endpoints; tried with the server of xllamacpp 2026.10.11549.

    It stops at texts and at what it holds for end tokens, not at other ids: what comes after one is
    cut. Batches and its prefix cache change its arithmetic, so a seed's tokens may differ.
    """

    capabilities = frozenset({"seeds"})
    counted = ("tokens_evaluated",)

    async def max_model_len(self, card: JSONObject) -> Any:
        return (await self._server.request("/props"))["default_generation_settings"]["n_ctx"]

    async def tokens(self, text: str) -> Any:
        asked = {"content": text, "add_special": False}
        return (await self._server.request("/tokenize", asked))["tokens"]

    async def sample(self, prompt: list[int], params: SamplingParams) -> Sampled:
        told = await self._asked("/completion", len(prompt), {
            "prompt": prompt,
            "n_predict": params.max_tokens,
            **{name: getattr(params, name) for name in FILTERS},
            "samplers": list(FILTERS),  # in this order, and no others
            "seed": params.seed % (2**32 - 1),  # 2**32 - 1 is a random one
            "stop": list(params.stop),
            "return_tokens": True,
        })  # fmt: skip
        return told["tokens"], told.get("timings", {}).get("cache_n"), told["stop_type"]

    async def label_probabilities(self, ids: list[int], places: Ids, columns: Ids) -> Any:
        """By /completion: a large bias, the same for all, makes them the likeliest tokens, and
        leaves the odds between them.
        """
        told = await self._asked("/completion", places[0] + 1, {
            "prompt": ids[: places[0] + 1],
            "n_predict": 1,
            "n_probs": len(columns),
            "post_sampling_probs": True,
            "samplers": [],
            "logit_bias": [[column, BIAS] for column in columns],
        })  # fmt: skip
        likely = told["completion_probabilities"][0]["top_probs"]
        found = {each["id"]: each["prob"] for each in likely}
        return [[found[column] for column in columns]]


class Sglang(ServerKind):
    """SGLang's own endpoints, as its sources of 2026 have them: there was none to try.

    It samples by seed where it was started with --enable-deterministic-inference. Of requests with
    ignore_eos it does not know the stop ids: what comes after one is cut.
    """

    capabilities = frozenset({"ignore_eos"})
    counted = ("meta_info", "prompt_tokens")

    async def max_model_len(self, card: JSONObject) -> Any:
        """As it says beside whether it takes seeds."""
        told = await self._server.request("/server_info")
        if told.get("enable_deterministic_inference"):
            self.capabilities |= {"seeds"}
        return told.get("max_req_input_len")

    async def sample(self, prompt: list[int], params: SamplingParams) -> Sampled:
        told = await self._asked("/generate", len(prompt), {
            "input_ids": prompt,
            "sampling_params": {
                "max_new_tokens": params.max_tokens,
                **{name: getattr(params, name) for name in FILTERS},
                "top_k": params.top_k or -1,
                **NO_PENALTIES,
                "sampling_seed": params.seed % 2**31,
                "stop": list(params.stop),
                "stop_token_ids": list(params.stop_token_ids),
                "ignore_eos": params.ignore_eos,
                "no_stop_trim": True,
            },
        })  # fmt: skip
        meta = told["meta_info"]
        ended = meta["finish_reason"]
        if ended["type"] == "stop" and isinstance(ended["matched"], int):
            ended = "eos"
        return told["output_ids"], meta.get("cached_tokens"), ended

    async def label_probabilities(self, ids: list[int], places: Ids, columns: Ids) -> Any:
        """By /generate, of the first token that is generated: over the likeliest column's."""
        plain = {"max_new_tokens": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}
        told = await self._asked("/generate", places[0] + 1, {
            "input_ids": ids[: places[0] + 1],
            "sampling_params": plain | NO_PENALTIES,
            "return_logprob": True,
            "token_ids_logprob": list(columns),
        })  # fmt: skip
        first = told["meta_info"]["output_token_ids_logprobs"][0]
        found = {token: logprob for logprob, token, *_ in first}
        likely = np.array([found[column] for column in columns], np.float64)
        return np.exp(likely - likely.max())


KINDS: dict[str, type[ServerKind]] = {"vllm": Vllm, "llama.cpp": LlamaCpp, "sglang": Sglang}
OWNERS = {"vllm": "vllm", "workbench": "vllm", "llamacpp": "llama.cpp", "sglang": "sglang"}
"""Kinds by the owned_by of /v1/models."""


class RemoteEngine(ForeignEngine):
    """A model that a server serves; one engine for one model.

    url: "http://host:8000". model: as the server names it. files: the same model by a name that
    Engine knows, of which config and tokenizer are read here; None: `model` is one. kind: "vllm"
    (and `workbench serve`), "llama.cpp" or "sglang"; None: the server is asked. `capabilities` are
    those of the kind, and what it lacks is refused. in_flight: requests that the server has at a
    time. timeout: seconds to an answer. Scores are logarithms of probabilities: logits up to a
    constant for each position. Nothing is known of the server's weights and arithmetic, so no two
    engines have the same fingerprint. Raises RemoteError for a server that cannot be asked,
    ModelError for a model that it does not serve, or serves with another tokenizer. A request that
    fails ends with a RemoteError in `.error`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        files: str | None = None,
        kind: str | None = None,
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
        EngineConfig(max_model_len=max_model_len)  # a number at least; its end is the server's
        named = (files or model).removeprefix(DUMMY)
        source = open_source(find_model(named, weights=False))
        super().__init__(model, source, dummy=named != (files or model))
        self.url = place[1]
        self._server = Connection(self.url, api_key, in_flight, timeout)
        self._end = weakref.finalize(self, self._server.close)
        self._done: dict[int, RequestOutput] = {}  # filled by the thread
        self._news = threading.Condition()  # over these two, _pending and _held
        self._closed = False
        self.fingerprint = f"remote/{self.url}/{model}/{secrets.token_hex(4)}"
        try:
            served = self._require_served(kind, max_model_len)
            self._kind: ServerKind = self._server.start(served).result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Drop every request and end the thread, as when the engine is dropped."""
        with self._news:
            self._closed = True
            self._pending.clear()
            self._held.clear()
            self._news.notify_all()
        self._end()

    async def _require_served(self, kind: str | None, max_model_len: int | None) -> ServerKind:
        """The server's kind, once it has this model with this tokenizer; notes what that can do."""
        listed = await self._server.request("/v1/models")
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
        card = cards[self.name]
        named = OWNERS.get(str(card.get("owned_by"))) if kind is None else kind
        if named not in KINDS:
            raise ConfigError(
                f"kind is {kind!r}, and {self.url} says owned_by {card.get('owned_by')!r}; give a "
                f"kind of {', '.join(KINDS)}."
            )
        root = card.get("root")  # of vLLM, which answers by the first name of a model
        same = [name for name, each in cards.items() if root and each.get("root") == root]
        found = KINDS[named](named, self._server, self.name, str(card.get("owned_by")), same)
        if self.value_outputs is not None and "values" not in found.capabilities:
            raise ModelError(
                f"{self.name!r} has a value head, whose values no server of kind {named!r} "
                "returns; serve it with vLLM."
            )
        try:
            served = await found.max_model_len(card)
            theirs = await found.tokens(PROBE)
        except (KeyError, TypeError, AttributeError) as error:
            raise found.wrong(error) from error
        longest = served if isinstance(served, int) else max_model_len
        if longest is None:
            raise ConfigError(f"{self.url} tells no longest length; give max_model_len.")
        self.max_model_len = longest if max_model_len is None else max_model_len
        if not 2 <= self.max_model_len <= longest:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}; {self.url} serves at most {longest}."
            )
        ours = self.tokenizer.encode(PROBE, add_special_tokens=False)
        if theirs != ours:
            raise ModelError(
                f"{self.url} writes {PROBE!r} as tokens {theirs!r:.100}, the tokenizer of "
                f"{self.name!r} here as {ours!r:.100}: they are not of one model. Give files= "
                "the model that is served."
            )
        self.capabilities = found.capabilities
        return found

    # -- requests --

    def _start(self, sequence: Sequence) -> None:
        with self._news:  # no answer is taken in before its request is known
            self._pending[sequence.request_id] = self._server.start(self._carried_out(sequence))

    async def _carried_out(self, sequence: Sequence) -> None:
        number, work = sequence.request_id, self._score if sequence.params is None else self._sample
        try:
            output = await work(sequence)
        except Exception as error:
            if not isinstance(error, WorkbenchError):
                error = self._kind.wrong(error)
            output = RequestOutput(number, (), "", "error", error=error)
        with self._news:
            self._done[number] = output
            self._news.notify_all()

    @property
    def has_work(self) -> bool:
        """Whether any request waits, runs or was not returned."""
        with self._news:  # another thread's step may be moving one
            return super().has_work

    def _take_held(self) -> dict[int, RequestOutput]:
        with self._news:
            return super()._take_held()

    def _advance(self) -> None:
        with self._news:
            asked = {*self._pending}
            while asked and asked <= self._pending.keys() and not self._closed:
                self._news.wait_for(
                    lambda: self._done or self._closed or not asked <= self._pending.keys()
                )
                for number, output in self._done.items():
                    if self._pending.pop(number, None) is not None:  # no aborted one's
                        self._held[number] = output
                self._done.clear()
            if self._closed:  # what was queued beside it
                self._pending.clear()

    def abort(self, request_id: int) -> None:
        """As every engine; the server sees its client leave."""
        with self._news:
            future = self._pending.get(request_id)
            super().abort(request_id)
            self._news.notify_all()
        if future is not None:
            future.cancel()

    async def _sample(self, sequence: Sequence) -> RequestOutput:
        """Tokens from the server; where they end, our own conditions say."""
        params, prompt = sequence.params, list(sequence.token_ids)
        assert params is not None
        wanted = {"logprobs": params.logprobs is not None, "seeds": params.temperature > 0}
        for name, is_wanted in (wanted | {"ignore_eos": params.ignore_eos}).items():
            if is_wanted and name not in self.capabilities:
                able = ", ".join(sorted(self.capabilities)) or "none"
                raise RemoteError(f"{self!r} has no {name}; its capabilities: {able}.")
        last = length_limit(sequence, self.max_model_len)
        eos = () if params.ignore_eos else self.tokenizer.eos_ids
        stops, most = tuple(sorted({*params.stop_token_ids, *eos})), last - len(prompt)
        asked = replace(params, max_tokens=most, stop_token_ids=stops)
        ids, cached, ended = await self._kind.sample(prompt, asked)
        if any(type(k) is not int or not 0 <= k < self._vocab for k in ids):
            raise self._kind.wrong(f"token ids {ids!r:.200} of a model with {self._vocab}")
        if cached is not None and not (type(cached) is int and 0 <= cached <= len(prompt)):
            told = f"that {cached!r:.100} of {len(prompt)} prompt tokens were cached"
            raise self._kind.wrong(told)
        reason = None
        self._stops.add(sequence.request_id, params)
        for token in ids:  # a server may have sampled on before it saw the stop
            sequence.token_ids.append(token)
            reason = self._stops.finish_reason(sequence)
            if reason or len(sequence.token_ids) == last:
                break
        self._stops.remove(sequence.request_id)
        if reason is None and len(sequence.token_ids) < last:
            reason = ended
            if ended != "eos":
                told = f"{len(ids)} of {most} tokens ({ended!r}), and no stop among them"
                raise self._kind.wrong(told)
        return output_of(sequence, reason or "length", self._token_bytes, num_cached_tokens=cached)

    async def _score(self, sequence: Sequence) -> RequestOutput:
        score, ids, outputs = sequence.score, sequence.token_ids, self.value_outputs
        assert score is not None
        places, columns, parts = score.positions, list(score.columns), list[Logits]()
        for first in range(0, len(places), self._kind.most_places):
            some = places[first : first + self._kind.most_places]
            if outputs is None:
                labels = await self._kind.label_probabilities(ids, some, columns)
                found = _probabilities(labels, len(some), len(columns))
            else:
                values = await self._kind.value_probabilities(ids, some)
                found = _probabilities(values, len(some), outputs)
                if outputs == 1:  # a sigmoid: the odds, whose logarithm is the value
                    found = found / np.maximum(1 - found, LEAST)
                found = found[:, columns]
            parts.append(np.log(np.maximum(found, LEAST)))
        logits: Logits = np.concatenate(parts).astype(np.float32)
        return RequestOutput(sequence.request_id, (), "", "score", None, logits=logits)


def _probabilities(given: Any, rows: int, columns: int) -> Any:
    """float64 [rows, columns]; ValueError for anything else."""
    found = np.asarray(given, np.float64).reshape(-1, columns)
    if len(found) != rows or not ((found >= 0) & (found <= 1)).all():  # nor NaN
        raise ValueError(f"{given!r:.200} are not {rows} rows of probabilities")
    return found
