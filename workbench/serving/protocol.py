"""What clients send and what they get back: OpenAI's and vLLM's shapes, as plain data.

A field that is unknown, or that this server does not implement, is refused by its name; one that is
null, or whose value asks for nothing (`frequency_penalty: 0`), is as good as absent.
"""

from __future__ import annotations

import codecs
import logging
import re
import reprlib
import secrets
import time
from collections.abc import Mapping, Sequence
from heapq import nlargest
from operator import itemgetter
from typing import Annotated, Any, Literal, Self

from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError, ValidationError
from starlette.exceptions import HTTPException

from workbench.core import RequestOutput, SamplingParams
from workbench.errors import ModelError, PromptError, WorkbenchError, nearest

log = logging.getLogger(__name__)
MOST_CHOICES = 128  # of one request: prompts times n
LEAST_LOGPROB = -9999.0  # JSON has no infinity
Logprobs = dict[int, float]
NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "audio": (), "best_of": (1,), "chat_template": (), "echo": (False,),
    "frequency_penalty": (0,), "function_call": ("none",), "functions": ([],),
    "length_penalty": (1,), "logit_bias": ({},), "metadata": ({},), "min_tokens": (0,),
    "modalities": (["text"],), "parallel_tool_calls": (True, False), "prediction": (),
    "presence_penalty": (0,), "prompt_logprobs": (), "reasoning_effort": (),
    "repetition_penalty": (1,), "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"), "skip_special_tokens": (True,), "store": (False,),
    "structured_outputs": (), "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],),
    "truncate_prompt_tokens": (), "use_beam_search": (False,), "web_search_options": (),
}  # fmt: skip
"""Fields that clients know and this server does not implement, with the values that ask nothing."""


class Refused(WorkbenchError):
    """A request that ends with an HTTP status of 400 or more. param: the field at fault."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        message, where = (t.encode(errors="replace").decode() for t in (message, param or ""))
        super().__init__(message)
        self.status = status
        told = {"message": message, "param": None if param is None else where, "code": code}
        told["type"] = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": told}
        headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}
        self.headers = headers.get(status, {})

    @classmethod
    def by(cls, error: BaseException) -> Refused:
        """What a client is told of an error: its own mistake, by the field, or ours."""
        if isinstance(error, Refused):
            return error
        if isinstance(error, RequestValidationError):
            return cls._of(error.errors()[0])
        if isinstance(error, HTTPException):
            wrong = {404: "path", 405: "method"}.get(error.status_code, "body")
            found = cls(error.status_code, str(error.detail), wrong)
            found.headers |= error.headers or {}  # of 405: what is allowed
            return found
        if isinstance(error, PromptError | ModelError):
            return cls(400, str(error), "messages" if isinstance(error, PromptError) else "model")
        if isinstance(error, WorkbenchError):
            return cls(500, str(error), code="step_failed")
        log.error("a request failed", exc_info=error)
        return cls(500, f"The server failed ({type(error).__name__}); its log says more.")

    @classmethod
    def _of(cls, found: Mapping[str, Any]) -> Refused:
        """Of the first thing that pydantic found wrong."""
        code, message, hint = found["type"], found["msg"], ""
        if code == "json_invalid":
            return cls(400, f"The body is no valid JSON: {found['ctx']['error']}.", "body")
        # without what names the kinds of a union: str, list[...], constrained-str
        place = [p for p in map(str, found["loc"][1:]) if re.fullmatch(r"(?!str$|int$)\w+", p)]
        param = ".".join(place) or "body"
        if code == "extra_forbidden" and param in NO_EFFECT:
            code, message = "unsupported_parameter", "it is not supported; leave it out"
        elif code == "extra_forbidden":
            code, hint = "unknown_parameter", message  # of `Strict`
            message = "there is no such field; leave it out"
        elif isinstance(found.get("input"), bytes):
            message = "it is read as JSON if sent with Content-Type: application/json"
        elif code != "missing":
            message += f", given {reprlib.repr(found.get('input'))}"  # cut short, however deep
        return cls(400, f"{param}: {message}.{hint}", param, code)


# -- requests --


Whole = Annotated[str, Field(min_length=0)]  # with a bound, half of a surrogate pair is refused
Scalar = Whole | bool | int | float | None
Id = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Id], Field(min_length=1, fail_fast=True)]  # else a mistake in each is told
Text = Whole | Ids
Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)]
Tokens = Annotated[int, Field(ge=1, lt=2**31)]
StopText = Annotated[Whole, Field(min_length=1, max_length=128)]


class Strict(BaseModel):
    """Nothing is converted, nothing unknown taken."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        asked = {name: value for name, value in given.items() if value is not None}
        asked = {n: value for n, value in asked.items() if value not in NO_EFFECT.get(n, ())}
        for name in (name for name in asked if name not in cls.model_fields):
            hint = PydanticCustomError("extra_forbidden", nearest(name, [*cls.model_fields]))
            wrong: Any = {"type": hint, "loc": (name,), "input": asked[name]}
            raise ValidationError.from_exception_data(cls.__name__, [wrong])
        return asked


class Asked(Strict):
    """What all requests have. user: accepted, since it changes no answer."""

    model: str
    user: str | None = None


class Sampled(Asked):
    """How to sample. The k-th of n choices has the seed seed + k; low priorities go first."""

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    # 0 and -1: all
    top_k: Annotated[int, Field(ge=-1, lt=2**31), AfterValidator(lambda k: max(0, k))] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_tokens: Tokens | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        list[StopText],
        Field(max_length=16, fail_fast=True),
        BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    ] = []
    stop_token_ids: Annotated[list[Id], Field(max_length=64, fail_fast=True)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool | None] = {}  # a last chunk counts tokens
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise Refused(400, "stream_options needs stream: true.", "stream_options")
        return self

    def sampling(self, choice: int, room: int, logprobs: int | None) -> SamplingParams:
        """The engine's parameters of one choice, where there is room for so many tokens."""
        seed = secrets.randbits(63) if self.seed is None else self.seed + choice
        same = {"temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"}
        own = self.model_dump(include=same) | {"seed": seed, "logprobs": logprobs}
        return SamplingParams(max_tokens=min(self.max_tokens or room, room), **own)


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    prompt: Texts
    max_tokens: Tokens = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool = True


class Part(Strict):
    """A piece of a message; texts only."""

    type: Literal["text"]
    text: Whole


class Message(Strict):
    """One turn of a chat; content: once it is validated, a text, of parts a line each as vLLM's."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[
        Whole | Annotated[list[Part], Field(max_length=256, fail_fast=True)],
        AfterValidator(
            lambda own: own if isinstance(own, str) else "\n".join(part.text for part in own)
        ),
    ]


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]


class ChatRequest(Sampled):
    """POST /v1/chat/completions. search: settings of a search, for a model "search/..."."""

    messages: Messages
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    max_completion_tokens: Tokens | None = None  # max_tokens, by its later name
    add_generation_prompt: bool = True
    search: dict[str, Scalar] = {}

    @model_validator(mode="after")
    def _as_completions_have_them(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise Refused(400, "top_logprobs needs logprobs: true.", "top_logprobs")
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self


class TextRequest(Asked):
    """A text or a chat, one of them."""

    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if len({"messages", "prompt", "input"} & self.model_fields_set) != 1:
            raise Refused(400, "Give one text (prompt, input), or messages.", "messages")
        return self

    def given(self, field: str) -> tuple[str, list[Any], bool]:
        """The field that was given, messages or else `field`; its chat or texts; special tokens."""
        if self.messages is not None:
            return "messages", [self.messages], self.add_generation_prompt
        return field, one_by_one(getattr(self, field)), self.add_special_tokens


class TokenizeRequest(TextRequest):
    """POST /tokenize."""

    prompt: Whole = ""
    return_token_strs: bool = False


class PoolingRequest(TextRequest):
    """POST /pooling: a reward model's verdict after each step of the input."""

    input: Texts = ""
    add_generation_prompt: bool = False
    encoding_format: Literal["float"] = "float"
    task: Literal["token_classify"] = "token_classify"


class ScoringRequest(Asked):
    """POST /generative_scoring: how likely the first label is as the token after query + item.

    apply_softmax: among the labels; otherwise in the vocabulary.
    """

    query: Whole | Annotated[list[Id], Field(fail_fast=True)]
    items: Annotated[list[Text], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)]
    label_token_ids: Annotated[list[Id], Field(min_length=1, max_length=64, fail_fast=True)]
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True


class SplitRequest(Strict):
    """POST /arena/split: each model's share of the pages."""

    shares: Annotated[dict[str, float], Field(max_length=64)]


def one_by_one(texts: Any) -> list[str | list[int]]:
    """The texts, or lists of token ids, of a field that may hold one or several."""
    return [texts] if isinstance(texts, str) or isinstance(texts[0], int) else texts


# -- answers --


class Choice:
    """One choice while its tokens come: text in whole characters, up to a stop string.

    What may turn out to begin a stop string is held back. logprobs: how many are shown; None: none.
    """

    def __init__(self, index: int, tokenizer: Any, body: Sampled, logprobs: int | None) -> None:
        self.index, self._tokenizer, self._logprobs = index, tokenizer, logprobs
        chat = isinstance(body, ChatRequest)
        self._key = "text" if not chat else "delta" if body.stream else "message"
        self._with_ids, self._stops = body.return_token_ids, [stop.encode() for stop in body.stop]
        self._stop_ids = body.stop_token_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text, self._num_sent, self._num_characters = bytearray(), 0, 0
        # Of tokens not sent yet: where their bytes and characters begin, and what is shown.
        self._pending: list[tuple[int, int, dict[str, Any]]] = []
        self.num_sampled = 0

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[Logprobs], output: RequestOutput | None
    ) -> dict[str, Any]:
        """New tokens, as the choice of an answer or of a chunk. output: of one that has ended."""
        for place, token in enumerate(token_ids):
            new = self._bytes(token)
            if self._logprobs is not None:
                found = logprobs[place]
                likeliest = dict(nlargest(self._logprobs, found.items(), itemgetter(1)))
                if self._key == "text":  # there it stands among them, in chats beside them
                    likeliest[token] = found[token]
                tops = {"top_logprobs": [self._shown(*each) for each in likeliest.items()]}
                shown = self._shown(token, found[token]) | tops
                self._pending.append((len(self._text), self._num_characters, shown))
                self._num_characters += sum(byte & 0xC0 != 0x80 for byte in new)  # begin one
            self._text += new
        role = {} if self.num_sampled else {"role": "assistant"}  # once
        self.num_sampled += len(token_ids)
        ended, begin, end = output and output.finish_reason, self._num_sent, len(self._text)
        ends: list[int] = []  # where stop strings begin
        if ended == "stop":
            ends = [p for stop in self._stops if (p := self._text.find(stop)) >= 0]
            last = [token for token in token_ids[-1:] if token in self._stop_ids]
            end = min([end - sum(len(self._bytes(token)) for token in last), *ends])
        elif ended is None:
            end -= max((_begun(self._text, stop) for stop in self._stops), default=0)
        text = self._decoder.decode(bytes(self._text[begin:end]), ended is not None)
        self._num_sent = end
        whole = ended is not None and not ends  # special tokens, of no bytes, begin at the end
        told = {
            "index": self.index,
            self._key: text if self._key == "text" else {"content": text} | role,
            "logprobs": None if self._logprobs is None else self._probabilities(end + whole),
            "finish_reason": "stop" if ended == "eos" else ended,
        }
        return told | ({"token_ids": list(token_ids)} if self._with_ids else {})

    def _bytes(self, token: int) -> bytes:
        known: Sequence[bytes] = self._tokenizer.token_bytes
        return known[token] if token < len(known) else b""

    def _shown(self, token: int, logprob: float) -> dict[str, Any]:
        known = self._bytes(token)  # none: a special token, shown by its name
        text = known.decode(errors="replace") if known else self._tokenizer.decode([token])
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(known)}

    def _probabilities(self, end: int) -> dict[str, Any]:
        """`logprobs` of the tokens that begin before `end`, in the endpoint's own shape."""
        tokens = [each for each in self._pending if each[0] < end]
        del self._pending[: len(tokens)]
        shown = [each for _, _, each in tokens]
        if self._key != "text":
            return {"content": shown}
        tops = [one["top_logprobs"] for one in shown]
        return {
            "tokens": [one["token"] for one in shown],
            "token_logprobs": [one["logprob"] for one in shown],
            "top_logprobs": [{each["token"]: each["logprob"] for each in top} for top in tops],
            "text_offset": [offset for _, offset, _ in tokens],
        }


def _begun(text: bytearray, stop: bytes) -> int:
    """Bytes at the end of a text with which a stop string may begin."""
    longest = min(len(stop) - 1, len(text))
    return next((k for k in range(longest, 0, -1) if text.endswith(stop[:k])), 0)


def head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """What every answer begins with."""
    name = f"{prefix}-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def usage(prompt: int, completion: int = 0, cached: int = 0) -> dict[str, Any]:
    """Tokens of a request."""
    told = {"prompt_tokens": prompt, "completion_tokens": completion}
    total = {"total_tokens": prompt + completion}
    return told | total | {"prompt_tokens_details": {"cached_tokens": cached}}
