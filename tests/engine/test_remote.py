"""RemoteEngine against our own server, and against small ones that are down, slow or wrong."""

import json
import threading
import time
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from tests.serving.conftest import SMALL, require_idle, running
from workbench import PRM, BeamSearch, Engine, RemoteEngine, SamplingParams, load_problems
from workbench.errors import ConfigError, ModelError, PromptError, RemoteError
from workbench.search.search import run_search

SOLVER, JUDGE = "tiny-solver", "tiny-prm"
PROMPT = "Compute 7-3+12."
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def service():
    with running() as service:
        yield service
        require_idle(service)


@pytest.fixture(scope="module")
def pair(service):
    engines = RemoteEngine(service.url, SOLVER), RemoteEngine(f"{service.url}/v1/", JUDGE)
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def ours():
    return [Engine(name, num_blocks=200, **SMALL) for name in (SOLVER, JUDGE)]


def search(llm, prm, **settings):
    given = {"llm": llm, "prm": PRM(prm), "strategy": BeamSearch(n=4, beam_width=2, max_depth=6)}
    return run_search(load_problems("tiny", 3), **given, **settings)


# -- our server --


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_search_over_a_server_is_the_search_here(ours, pair, temperature):
    """Every node and answer; scores to what a probability keeps of logits; PRM work is unknown."""
    mine, other = (search(*each, temperature=temperature) for each in (ours, pair))
    columns = ["problem_id", "node_id", "token_ids", "finish_reason", "kept"]
    assert mine.tree[columns].to_dict("records") == other.tree[columns].to_dict("records")
    assert np.abs(mine.tree["score"] - other.tree["score"]).max() <= 2**-15
    assert mine.answers == other.answers
    assert mine.prm_tokens["distinct"] == other.prm_tokens["distinct"]
    assert other.prm_tokens["computed"] is None
    assert other.problems["prm_tokens_computed"].isna().all()
    assert mine.problems["prm_tokens_computed"].notna().all()


def test_every_setting_of_a_request_arrives(ours, pair):
    """Filters, stops by text and by id, a seed of 64 bits, no end: tokens, text and reason."""
    eos = min(ours[0].tokenizer.eos_ids)
    params = [
        SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, seed=2**63 + 5,
                       max_tokens=30),
        SamplingParams(temperature=0.0, stop=("\n\n", "="), max_tokens=40),
        SamplingParams(temperature=0.8, seed=3, ignore_eos=True, max_tokens=60),
        SamplingParams(temperature=0.8, seed=3, stop_token_ids=(eos, 34), max_tokens=60),
    ]  # fmt: skip
    for mine, other in zip(*(each[0].generate([PROMPT] * 4, params) for each in (ours, pair))):
        assert (mine.token_ids, mine.text) == (other.token_ids, other.text)
        assert mine.finish_reason == other.finish_reason
    assert other.num_cached_tokens is not None


def test_scores_are_logits_up_to_a_constant_of_each_position(ours, pair):
    """Of two columns and of three, at several positions."""
    ids = ours[1].tokenizer.encode(PROMPT)
    for columns in ([5, 9], [5, 9, 11]):
        mine, other = (each[1].score(ids, [0, 4, 6], columns).logits for each in (ours, pair))
        apart = (mine - mine[:, :1]) - (other - other[:, :1])
        assert np.abs(apart).max() < 1e-4


def test_many_requests_are_in_flight_and_each_ends_once(pair):
    """More than there are places; one is aborted; what else ends meanwhile is returned by step."""
    llm, _ = pair
    beside = llm.add(PROMPT, GREEDY)
    numbers = [llm.add(PROMPT, SamplingParams(max_tokens=4, seed=k)) for k in range(100)]
    llm.abort(numbers.pop())
    assert len(llm.generate([PROMPT] * 3, GREEDY)) == 3
    found = []
    while llm.has_work:
        found += [output.request_id for output in llm.step()]
    assert sorted(found) == [beside, *numbers]
    assert llm.step() == []


def test_what_it_lacks_is_refused_by_name(service, pair):
    """Before the server is asked, where that can be."""
    llm, prm = pair
    for setting, said in (
        ({"forget_pruned": True}, f"capabilities of {SOLVER} are: none. Give forget_pruned=False"),
        ({"problem_batching": "adaptive"}, f"asks how much room a cache has; {SOLVER}"),
    ):
        with pytest.raises(ConfigError, match=said):
            search(llm, prm, **setting)
    with pytest.raises(PromptError, match="not in tiny-solver's vocabulary"):
        llm.add([10**6], GREEDY)
    with pytest.raises(RemoteError, match="no logprobs"):
        llm.generate([PROMPT], SamplingParams(logprobs=1))
    with pytest.raises(ModelError, match=r"does not serve 'tiny-solve'.*'tiny-solver'"):
        RemoteEngine(service.url, "tiny-solve", files=SOLVER)
    with pytest.raises(ModelError, match="not of one model"):
        RemoteEngine(service.url, SOLVER, files="smollm2-135m")
    for given in ({"url": "127.0.0.1:8000"}, {"in_flight": 0}, {"timeout": 0.0}):
        with pytest.raises(ConfigError):
            RemoteEngine(**{"url": service.url, "model": SOLVER, **given})


def test_a_closed_engine_says_so(service):
    """Its thread has ended, whatever was in flight."""
    before = threading.active_count()
    engine = RemoteEngine(service.url, SOLVER)
    engine.add(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
    engine.close()
    engine.close()
    assert threading.active_count() == before and not engine.has_work
    with pytest.raises(ConfigError, match="closed"):
        engine.add(PROMPT, GREEDY)


# -- servers that fail --

FINE = {"model": SOLVER, "choices": [{"token_ids": [5, 6, 7, 8], "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3}}  # fmt: skip
FOUR = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Fake:
    """A server whose completions are what `script` says, one entry a call, the last for ever.

    An entry: a JSON object, (status, headers, body), seconds to wait, or "drop" the connection.
    """

    def __init__(self, *script):
        self.script, self.bodies = list(script), []

    def answer(self, handler, path, body):
        if path == "/v1/models":
            return {"data": [{"id": SOLVER, "max_model_len": 512}]}
        if path == "/tokenize":
            return {"tokens": self.tokens}
        self.bodies.append(body)
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


@contextmanager
def served(fake, **how):
    """A RemoteEngine of the fake."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send(fake.answer(self, self.path, None))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send(fake.answer(self, self.path, body))

        def send(self, told):
            if told == "drop":  # half an answer
                self.send_response(200)
                self.send_header("Content-Length", "100")
                self.end_headers()
                self.wfile.write(b'{"model":')
                self.close_connection = True
                return
            if isinstance(told, float):
                time.sleep(told)
                told = FINE
            status, headers, text = told if isinstance(told, tuple) else (200, {}, told)
            text = text if isinstance(text, bytes) else json.dumps(text).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(text))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args):
            pass

    from workbench.engine.remote import PROBE
    from workbench.models.registry import EMBEDDED
    from workbench.tokenizer import Tokenizer

    ours = Tokenizer.from_folder(EMBEDDED / SOLVER)
    fake.tokens = ours.encode(PROBE, add_special_tokens=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        with closing(RemoteEngine(url, SOLVER, **{"timeout": 20.0, **how})) as engine:
            yield engine
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


BUSY = (503, {"Retry-After": "0"}, {"error": {"message": "queue full"}})


@pytest.mark.parametrize("trouble", ["drop", BUSY, (502, {}, b"gateway")])
def test_what_passes_is_asked_again_and_answered_once(trouble):
    """A connection lost in the middle, a busy server: the same body again, one output."""
    fake = Fake(trouble, trouble, FINE)
    with served(fake) as engine:
        (output,) = engine.generate([[1, 2, 3]], FOUR)
        assert output.token_ids == (5, 6, 7, 8) and output.finish_reason == "length"
        assert output.num_cached_tokens is None
        assert len(fake.bodies) == 3 and fake.bodies[0] == fake.bodies[1] == fake.bodies[2]
        assert not engine.has_work


def other(**changes):
    return FINE | changes


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, {}, b"<html>"), "no JSON object"),
        ([1], "no JSON object"),
        ({}, "cannot be read"),
        (other(model="another"), "for the model 'another'"),
        (other(usage={"prompt_tokens": 4}), "and 4 tokens of prompt, not for 'tiny-solver' and 3"),
        (other(choices=[{"token_ids": [5, 10**6]}]), "token ids .* of a model with"),
        (other(choices=[{"token_ids": ["5"]}]), "token ids .* of a model with"),
        (other(choices=[{"token_ids": None}]), "cannot be read"),
        (other(choices=[{"token_ids": [5], "finish_reason": "abort"}]), "1 of 4 tokens"),
        ((400, {}, {"error": {"message": "too long"}}), "refused with status 400.*too long"),
        ((500, {}, b"oops"), "refused with status 500: oops"),
        (1.0, "gave no answer, asked for 0.4 s"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_pass_is_a_named_error_and_the_engine_goes_on(answer, said):
    """Nothing else that is in flight is lost, and the next request is served."""
    how = {"timeout": 0.4} if isinstance(answer, float) else {}
    with served(Fake(answer, FINE), in_flight=1, **how) as engine:
        first = engine.add([1, 2, 3], FOUR)
        second = engine.add([1, 2, 3], FOUR)
        found = {}
        while engine.has_work:
            found |= {output.request_id: output for output in engine.step()}
        assert found[first].finish_reason == "error"
        with pytest.raises(RemoteError, match=said):
            raise found[first].error
        assert found[second].token_ids == (5, 6, 7, 8)
        assert engine.generate([[1, 2, 3]], FOUR)[0].token_ids == (5, 6, 7, 8)


@pytest.mark.parametrize("scores", [[], [0.5], [0.5, 1.5], [0.5, None]])
def test_scores_that_are_no_probabilities_are_refused(scores):
    """As many as positions, each in 0 to 1."""
    told = {"model": SOLVER, "data": [{"score": each} for each in scores]}
    fake, said = Fake(told | {"usage": {"prompt_tokens": 5}}), "not 2 rows of probabilities"
    with served(fake) as engine, pytest.raises(RemoteError, match=said):
        engine.score([5, 6, 7], [1, 2], [5, 9])


def test_tokens_after_a_stop_are_cut():
    """A server that samples several tokens at a time may go beyond a stop."""
    with served(Fake(FINE)) as engine:
        params = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=(6,))
        (output,) = engine.generate([[1, 2, 3]], params)
    assert output.token_ids == (5, 6) and output.finish_reason == "stop"


def test_a_search_over_a_server_that_fails_ends_with_its_error(ours):
    """The search's other requests are dropped."""
    with served(Fake((500, {}, b"oops"))) as engine:
        with pytest.raises(RemoteError, match="oops"):
            search(engine, ours[1])
        assert not engine.has_work


def test_a_server_that_is_down(monkeypatch):
    """It is asked a few times, with pauses between."""
    monkeypatch.setattr("workbench.engine.remote.FIRST_PAUSE", 0.01)
    with pytest.raises(RemoteError, match=r"asked 5 times; last: ConnectError"):
        RemoteEngine("http://127.0.0.1:9", SOLVER)
    fake = Fake(FINE)
    with served(fake) as engine:
        url = engine.url
        assert engine.generate([[1, 2, 3]], FOUR)
    with pytest.raises(RemoteError, match="gave no answer"):
        RemoteEngine(url, SOLVER)
