"""Requests that are wrong: each a 4xx that names the field, and the server goes on."""

import http.client
import json
import tracemalloc
from shutil import copytree
from urllib.parse import urlsplit

import pytest
from openai.types.chat import ChatCompletionMessage

from tests.serving.conftest import require_idle, running
from workbench.errors import ConfigError
from workbench.models.registry import find_model
from workbench.serving.server import ServeConfig, Service

LONG, NESTED = "9" * 90_000, b"[" * 90_000
LONG_CHAT = [{"role": "user", "content": "9" * 3000}]
CHAT = {"model": "tiny-solver", "messages": [{"role": "user", "content": "Compute 1+1."}]}
TEXT = {"model": "tiny-solver", "prompt": "Compute 1+1."}
PRM = {"model": "tiny-prm", "query": [1], "items": [[2]], "label_token_ids": [3, 4]}
POOL = {"model": "tiny-prm", "input": "1+1=2"}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TEXTS = {  # of a field of completions: values that are refused
    "model": [None, 7, "no-such-model", "\u0000", "search/beam"],
    "prompt": [None, "", [], 7, {"a": 1}, [1, "a"], [[]], [-1], [2**40], LONG, [[1], "x", 5]],
    "max_tokens": [0, -1, 1.5, "3", True, 2**40],
    "temperature": [-0.1, "hot", float("nan"), float("inf"), []],
    "top_p": [0, 1.01],
    "top_k": [-2, 0.5],
    "min_p": [1, -1],
    "n": [0, 129, 10**30, "2"],
    "seed": [2**63, 0.5, "x"],
    "stop": ["", [""], [1], ["a"] * 17, {"a": 1}],
    "stop_token_ids": [[10**6], [-1]],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}],
    "logprobs": [21, -1, True],
    "priority": ["high"],
    "best_of": [3],
    "echo": [True],
    "logit_bias": [{"5": 1}],
    "suffix": ["end"],
    "temprature": [1],
}
MESSAGES = [
    [], "hi", [{"role": "user"}], [{"role": "robot", "content": "x"}], [{"content": "x"}], [7],
    [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "user", "content": "x", "name": "me"}], [{"role": "user", "content": LONG}],
]  # fmt: skip
CASES = [
    *((COMPLETIONS, TEXT | {field: value}, field) for field in TEXTS for value in TEXTS[field]),
    *((CHATS, CHAT | {"messages": value}, "messages") for value in MESSAGES),
    (CHATS, CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
    (CHATS, CHAT | {"tools": [{"type": "function"}]}, "tools"),
    (CHATS, CHAT | {"frequency_penalty": 0.5}, "frequency_penalty"),
    (CHATS, CHAT | {"top_logprobs": 2}, "top_logprobs"),
    (CHATS, CHAT | {"search": {"n": 2}}, "search"),
    (CHATS, CHAT | {"model": "search/beam", "search": {"m": 2}}, "search"),
    (CHATS, CHAT | {"model": "search/beam", "search": {"n": 10**6}}, "search"),
    (CHATS, CHAT | {"model": "search/beam", "search": {"system_prompt": "\ud800"}}, "search"),
    (CHATS, CHAT | {"model": "search/beam", "search": {"temperature": 10**400}}, "search"),
    (CHATS, CHAT | {"model": "search/beam", "messages": LONG_CHAT}, "messages"),
    (CHATS, CHAT | {"model": "search/beam", "stop": "x"}, "stop"),
    (CHATS, CHAT | {"model": "search/beam", "stop": "x", "n": 2, "logprobs": True}, "logprobs"),
    (CHATS, CHAT | {"model": "search/beam", "messages": CHAT["messages"] * 2}, "messages"),
    ("/generative_scoring", PRM | {"label_token_ids": [10**6]}, "label_token_ids"),
    ("/generative_scoring", PRM | {"items": []}, "items"),
    ("/generative_scoring", PRM | {"items": [[10**6]]}, "items"),
    ("/pooling", POOL | {"model": "tiny-solver"}, "model"),
    ("/pooling", POOL, "input"),
    ("/pooling", POOL | {"encoding_format": "base64"}, "encoding_format"),
    ("/tokenize", {"model": "tiny-solver"}, "messages"),
    ("/arena/split", {"shares": {"tiny-solver": 2.0}}, "shares"),
    ("/arena/split", {"shares": {"tiny-solver": 0.9999, "tiny-prm": 0.0001}}, "shares"),
    ("/search/none", None, "id"),
]


def ask(service, path, body, headers=()):
    """Status and body of one request; a body of bytes goes as it is."""
    connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=30)
    given = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    told = {"Content-Type": "application/json", **dict(headers)}
    chunked = "Transfer-Encoding" in told  # which does not tell its length
    connection.request(
        "GET" if body is None else "POST", path, iter([given]) if chunked else given, told,
        encode_chunked=chunked)  # fmt: skip
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("thinkprm-tiny", "writes critiques before it judges"),
        ("math-shepherd-tiny", "MathShepherd scoring needs it to be 2"),
    ],
)
def test_a_verifier_without_marks_has_no_verdicts_to_pool(tmp_path, name, said):
    """Its verdict follows a critique, or its tokenizer lacks the marks of its name's family."""
    verifier = tmp_path / name
    copytree(find_model("tiny-solver"), verifier)
    with running((str(verifier),)) as service:
        asked = POOL | {"model": next(iter(service.thread.engines))}
        status, text = ask(service, "/pooling", asked)
    error = json.loads(text)["error"]
    assert (status, error["param"]) == (400, "model")
    assert said in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"), CASES, ids=[f"{k}-{case[2]}" for k, case in enumerate(CASES)]
)
def test_what_is_wrong_is_refused_by_name(service, path, body, field):
    """A 4xx with the field in `param`, no traceback."""
    status, text = ask(service, path, body)
    error = json.loads(text)["error"]
    assert 400 <= status < 500, text
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"].split(".")[0] == field
    assert error["message"] and "Traceback" not in error["message"]


def test_what_asks_for_nothing_is_as_good_as_absent(service):
    """A chat goes on with a reply of the `openai` client, nulls and all; so do defaults."""
    reply = ChatCompletionMessage(role="assistant", content="2").model_dump()
    assert None in reply.values()
    part = {"type": "text", "text": "Compute 1+1.", "image_url": None}
    chat = [{"role": "user", "content": [part]}, reply, *CHAT["messages"]]
    status, text = ask(service, CHATS, CHAT | {"messages": chat, "max_tokens": 2})
    assert status == 200, text
    nothing = {"n": 1, "logprobs": False, "stop": [], "ignore_eos": False}
    search = {"model": "search/best_of_n", "search": {"n": 4}}
    status, text = ask(service, CHATS, CHAT | search | nothing)
    assert status == 200, text


def test_parts_of_a_message_are_lines_as_they_are_of_vllm(service):
    """Guards words that run together where one part ends and the next begins."""
    parts = [{"type": "text", "text": text} for text in ("Compute 1+1.", "Show steps.")]
    whole = {"messages": [{"role": "user", "content": "Compute 1+1.\nShow steps."}]}
    asked = CHAT | {"temperature": 0, "max_tokens": 4}
    told = [
        json.loads(ask(service, CHATS, asked | given)[1])
        for given in (whole, {"messages": [{"role": "user", "content": parts}]})
    ]
    first, second = (each["usage"]["prompt_tokens"] for each in told)
    assert first == second and told[0]["choices"] == told[1]["choices"]


def test_json_sent_as_a_form_is_told_to_be_so(service):
    """As curl does with -d alone: the body is right, its header is not."""
    header = {"Content-Type": "application/x-www-form-urlencoded"}
    status, text = ask(service, CHATS, CHAT, header)
    error = json.loads(text)["error"]
    assert (status, error["param"]) == (400, "body")
    assert "Content-Type: application/json" in error["message"]


def test_critiques_count_as_beams(service):
    """Guards that a search is refused by what it may ask for at a time, as its n is."""
    body = CHAT | {"model": "search/beam", "search": {"n": 64, "critiques": 5}}
    status, text = ask(service, CHATS, body)
    assert status == 400 and b"n times critiques is 256 at most" in text


def test_the_nearest_field_is_named(service):
    """Guards that an unknown field is refused with the nearest one of the same endpoint, if any."""
    for path, body, hint in (
        (COMPLETIONS, TEXT | {"temprature": 1}, " Did you mean 'temperature'?"),
        ("/tokenize", TEXT | {"temprature": 1}, ""),
        (COMPLETIONS, TEXT | {"echo": True}, ""),
    ):
        told = json.loads(ask(service, path, body)[1])["error"]["message"]
        assert told.endswith(f"leave it out.{hint}"), told


@pytest.mark.parametrize(
    ("body", "headers", "status", "param"),
    [
        *((text, (), 400, "body") for text in (b"", b"{", b"[]", b"null", b"\xff\xfe", NESTED)),
        (b'{"model": "tiny-solver", "prompt": "\\ud800"}', (), 400, "prompt"),
        (b'{"model": "a\x01"}', (), 400, "body"),
        (b'{"model": "a", "model": "a"}', (), 400, "prompt"),
        (b'{"model": "a"}', [("Content-Type", "text/plain")], 400, "body"),
        (b"1" * 200_000, (), 413, "body"),
        (b"1" * 200_000, [("Transfer-Encoding", "chunked")], 413, "body"),
    ],
)
def test_what_is_no_request_is_refused(service, body, headers, status, param):
    """Broken JSON, broken text, another type, too much: a 4xx in OpenAI's shape."""
    found, text = ask(service, COMPLETIONS, body, headers)
    error = json.loads(text)["error"]
    assert found == status and error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param and error["type"] == "invalid_request_error"


def test_what_is_too_long_is_refused_before_it_is_copied(service):
    """A long query before many items: memory for one of them at a time."""
    body = PRM | {"query": [1] * 30_000, "items": [[2]] * 128}
    tracemalloc.start()
    status, _ = ask(service, "/generative_scoring", body)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert status == 400 and most < 20e6


def test_what_is_no_http_is_refused(service):
    """By the HTTP library, before there is a body."""
    assert ask(service, COMPLETIONS, b"", [("Content-Length", "-1")])[0] == 400  # nothing unread


def test_paths_and_the_server_afterwards(service):
    """404 and 405 in the same shape; after all of this the server answers and is described."""
    for path, body, status, param in (
        ("/nothing", None, 404, "path"),
        ("/health", b"{}", 405, "method"),
        (COMPLETIONS, TEXT | {"model": "gpt-4o"}, 404, "model"),
        (COMPLETIONS, TEXT | {"model": "search/beam"}, 400, "model"),
    ):
        found, text = ask(service, path, body)
        assert found == status and json.loads(text)["error"]["param"] == param
    described = json.loads(ask(service, "/openapi.json", None)[1])
    assert {COMPLETIONS, CHATS, "/pooling", "/arena/split"} <= described["paths"].keys()
    status, text = ask(service, COMPLETIONS, TEXT | {"frequency_penalty": 0, "suffix": None})
    assert status == 200 and json.loads(text)["choices"][0]["text"]
    require_idle(service)


def test_a_model_is_no_setting_of_all_models():
    with pytest.raises(ConfigError, match="its models are arguments"):
        Service(ServeConfig(("tiny-solver",), port=0), {"model": "tiny-prm"})
