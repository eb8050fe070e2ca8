"""RemoteEngine against our own server, and small ones of each kind: sound, down, slow or wrong."""

import json
import shutil
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from tests.engine.conftest import search
from tests.serving.conftest import SMALL, require_idle, running
from workbench import Engine, RemoteEngine, SamplingParams
from workbench.engine.remote import PROBE
from workbench.errors import ConfigError, ModelError, PromptError, RemoteError, StepError
from workbench.models.registry import EMBEDDED
from workbench.tokenizer import Tokenizer

SOLVER, JUDGE = "tiny-solver", "tiny-prm"
PROMPT = "Compute 7-3+12."
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("workbench.engine.remote.FIRST_PAUSE", 0.01)


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
        ({"forget_pruned": True}, f"capabilities of {SOLVER} are: ignore_eos, seeds, values. Give"),
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
    for given in ({"url": "127.0.0.1:8000"}, {"in_flight": 0}, {"timeout": 0.0}, {"kind": "tgi"}):
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


@pytest.mark.parametrize("what", ["close", "abort"])
def test_another_thread_that_drops_requests_wakes_all_who_wait_for_them(what):
    """generate() then raises a StepError, and neither waits for ever nor raises a KeyError."""
    raised = []

    def wait():
        try:
            engine.generate([PROMPT], FOUR)
        except StepError as error:
            raised.append(str(error))

    with served(Fake(5.0)) as engine:
        threads = [threading.Thread(target=wait, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        while len(engine._pending) < len(threads):
            time.sleep(0.01)
        for number in range(2) if what == "abort" else ():
            engine.abort(number)
        if what == "close":
            engine.close()
        for thread in threads:
            thread.join(timeout=4)
    assert len(raised) == 2 and all("1 of 1 requests to Remote" in told for told in raised)


# -- servers that fail --

PROBED = Tokenizer.from_folder(EMBEDDED / SOLVER).encode(PROBE, add_special_tokens=False)
FOUR = SamplingParams(temperature=0, max_tokens=4)
OWNERS = {"vllm": "vllm", "llama.cpp": "llamacpp", "sglang": "sglang"}
KINDS = list(OWNERS)
PLACES = {  # of the model, the prompt's tokens, the sampled ones, how they ended, what was cached
    "vllm": ("model", "usage.prompt_tokens", "choices.0.token_ids", "choices.0.finish_reason",
             "usage.prompt_tokens_details.cached_tokens"),
    "llama.cpp": ("model", "tokens_evaluated", "tokens", "stop_type", "timings.cache_n"),
    "sglang": (None, "meta_info.prompt_tokens", "output_ids", "meta_info.finish_reason",
               "meta_info.cached_tokens"),
}  # fmt: skip
FINE = {
    "vllm": {"model": SOLVER, "choices": [{}], "usage": {"prompt_tokens_details": {}}},
    "llama.cpp": {"model": SOLVER, "timings": {}},
    "sglang": {"meta_info": {}},
}


def fine(kind, ids=(5, 6, 7, 8), ended=None, prompt=3, model=SOLVER, cached=None):
    """What a server of this kind answers; ended: as it writes it, None: for length."""
    if ended is None:
        ended = {"vllm": "length", "llama.cpp": "limit", "sglang": {"type": "length"}}[kind]
    told = json.loads(json.dumps(FINE[kind]))
    for place, value in zip(PLACES[kind], (model, prompt, ids, ended, cached), strict=True):
        *path, last = (place or "unread").split(".")
        there = told
        for key in path:
            there = there[int(key) if key.isdigit() else key]
        there[last] = value
    return told


class Fake:
    """A server whose completions are what `script` says, one entry a call, the last for ever.

    An entry: a JSON object, (status, headers, body), seconds to wait, or "drop" the connection.
    """

    def __init__(self, *script, kind="vllm", **about):
        self.script, self.paths, self.bodies, self.kind = list(script), [], [], kind
        self.others = []  # cards before its own
        self.card = {"id": SOLVER, "max_model_len": 512, "owned_by": OWNERS.get(kind, kind)}
        self.about = {"/props": {"default_generation_settings": {"n_ctx": 512}}} | {
            "/server_info": {"max_req_input_len": 512, "enable_deterministic_inference": True}
        }
        self.about |= about

    def answer(self, handler, path, body):
        if path == "/v1/models":
            return {"data": [*self.others, self.card]}
        if path in self.about:
            return self.about[path]
        if path == "/tokenize":
            asked = "content" if self.kind == "llama.cpp" else "prompt"
            return {"tokens": PROBED if asked in body else []}
        self.paths.append(path)
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
                told = fine(fake.kind)
            status, headers, text = told if isinstance(told, tuple) else (200, {}, told)
            text = text if isinstance(text, bytes) else json.dumps(text).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(text))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # its end is seen so soon
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trouble", ["drop", BUSY, (502, {}, b"gateway")])
def test_what_passes_is_asked_again_and_answered_once(trouble, kind):
    """A connection lost in the middle, a busy server: the same body again, one output."""
    fake = Fake(trouble, trouble, fine(kind), kind=kind)
    with served(fake) as engine:
        (output,) = engine.generate([[1, 2, 3]], FOUR)
        assert output.token_ids == (5, 6, 7, 8) and output.finish_reason == "length"
        assert output.num_cached_tokens is None
        assert len(fake.bodies) == 3 and fake.bodies[0] == fake.bodies[1] == fake.bodies[2]
        assert not engine.has_work


def test_an_empty_key_is_none():
    """As of WORKBENCH_API_KEY= before a command."""
    with served(Fake(fine("vllm")), api_key="") as engine:
        assert engine.generate([[1, 2, 3]], FOUR)[0].token_ids == (5, 6, 7, 8)


@pytest.mark.parametrize("root", ["folder", None])
def test_another_name_of_the_same_model_may_answer(root):
    """As vLLM does, by the first of --served-model-name; where the files are told to be one."""
    fake = Fake(fine("vllm", model="first"))
    fake.others, fake.card["root"] = [{"id": "first", "root": root}], root
    with served(fake) as engine:
        if root is not None:
            assert engine.generate([[1, 2, 3]], FOUR)[0].token_ids == (5, 6, 7, 8)
            return
        with pytest.raises(RemoteError, match="for the model 'first'"):
            engine.generate([[1, 2, 3]], FOUR)


def test_a_server_that_gives_up_a_request_is_not_asked_again():
    """504 of a server's own deadline: the same request would take as long again."""
    fake = Fake((504, {}, {"error": {"message": "the request was aborted"}}), fine("vllm"))
    with served(fake) as engine, pytest.raises(RemoteError, match=r"status 504.*was aborted"):
        engine.generate([[1, 2, 3]], FOUR)
    assert len(fake.bodies) == 1


def test_a_server_that_was_busy_and_is_gone_is_given_up(monkeypatch):
    """TRIES counts lost connections, whatever came before them."""
    monkeypatch.setattr("workbench.engine.remote.FIRST_PAUSE", 0.001)  # it doubles twelve times
    fake = Fake(*[BUSY] * 7, *["drop"] * 9)
    with served(fake) as engine, pytest.raises(RemoteError, match="gave no answer, asked 5 times"):
        engine.generate([[1, 2, 3]], FOUR)
    assert len(fake.bodies) == 7 + 5


WRONG = [
    ((200, {}, b"<html>"), "no JSON object"),
    ([1], "no JSON object"),
    ({}, "cannot be read"),
    ({"model": "another"}, "for the model 'another'"),
    ({"prompt": 4}, "and 4 tokens of prompt, not for 'tiny-solver' and 3"),
    ({"ids": [5, 10**6]}, "token ids .* of a model with"),
    ({"ids": ["5"]}, "token ids .* of a model with"),
    ({"ids": None}, "cannot be read"),
    ({"cached": "many"}, "that 'many' of 3 prompt tokens were cached"),
    ({"cached": 4}, "that 4 of 3 prompt tokens were cached"),
    ({"ids": [5], "ended": {"type": "abort"}}, "1 of 4 tokens .*abort"),
    ((400, {}, {"error": {"message": "too long"}}), "refused with status 400.*too long"),
    ((500, {}, b"oops"), "refused with status 500: oops"),
    (1.0, "gave no answer, asked for 0.4 s"),
]


@pytest.mark.parametrize(
    ("kind", "answer", "said"),
    [
        (kind, *case)
        for kind in KINDS
        for case in WRONG
        if (kind, case[0]) != ("sglang", {"model": "another"})  # it does not say
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_pass_is_a_named_error_and_the_engine_goes_on(kind, answer, said):
    """Nothing else that is in flight is lost, and the next request is served."""
    how = {"timeout": 0.4} if isinstance(answer, float) else {}
    if isinstance(answer, dict) and answer:
        answer = fine(kind, **answer)
    with served(Fake(answer, fine(kind), kind=kind), in_flight=1, **how) as engine:
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


def test_each_kind_is_asked_in_its_own_words():
    """Every setting arrives, in the place and range that its documentation has for it."""
    params = SamplingParams(
        temperature=0.7, top_k=0, top_p=0.9, min_p=0.1, seed=2**63 + 5, stop=("\n\n",),
        stop_token_ids=(34,), max_tokens=4,
    )  # fmt: skip
    common = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "stop": ["\n\n"]}
    wanted = {
        "vllm": ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4, "top_k": 0,
                                     "seed": 5 - 2**63, "stop_token_ids": [4, 34]}),
        "llama.cpp": ("/completion", {"prompt": [1, 2, 3], "n_predict": 4, "top_k": 0,
                                      "seed": (2**63 + 5) % (2**32 - 1), "return_tokens": True,
                                      "samplers": ["temperature", "top_k", "top_p", "min_p"]}),
        "sglang": ("/generate", {"max_new_tokens": 4, "top_k": -1, "sampling_seed": 5,
                                 "stop_token_ids": [4, 34], "ignore_eos": False}),
    }  # fmt: skip
    for kind, (path, own) in wanted.items():
        fake = Fake(fine(kind), kind=kind)
        with served(fake) as engine:
            assert engine.generate([[1, 2, 3]], params)[0].token_ids == (5, 6, 7, 8)
            assert engine.max_model_len == 512
        (body,) = fake.bodies
        assert fake.paths == [path] and body.get("input_ids", [1, 2, 3]) == [1, 2, 3]
        settings = body.get("sampling_params", body)
        assert {name: settings.get(name) for name in common | own} == common | own
        assert ("model" in body) == (kind == "vllm")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_an_end_token_of_the_server_s_own_ends_a_request(kind):
    """llama.cpp and SGLang hold for ends what our tokenizer does not; a text that ends is none."""
    token, text = {"llama.cpp": ("eos", "word"), "sglang": (
        {"type": "stop", "matched": 6}, {"type": "stop", "matched": "NaN happened"}
    )}[kind]  # fmt: skip
    with served(Fake(fine(kind, [5, 6], token), fine(kind, [5, 6], text), kind=kind)) as engine:
        (output,) = engine.generate([[1, 2, 3]], FOUR)
        assert (output.token_ids, output.finish_reason) == ((5, 6), "eos")
        with pytest.raises(RemoteError, match=r"2 of 4 tokens .*no stop among them"):
            engine.generate([[1, 2, 3]], FOUR)


def judged(kind, found, prompt):
    """What it answers to a request for labels after a prompt, probabilities by token id."""
    if kind == "llama.cpp":
        likely = [{"id": token, "prob": p} for token, p in found.items()]
        told = {"completion_probabilities": [{"top_probs": likely}]}
        return told | {"model": SOLVER, "tokens_evaluated": prompt}
    logs = {token: float(np.log(p)) if isinstance(p, float) else p for token, p in found.items()}
    rows = [[value, token, None] for token, value in logs.items()]
    return {"meta_info": {"prompt_tokens": prompt, "output_token_ids_logprobs": [rows]}}


@pytest.mark.parametrize("kind", KINDS[1:])
def test_labels_are_scored_a_call_for_each_place(kind):
    """Their odds are those of the server's probabilities, in the order asked for."""
    fake = Fake(judged(kind, {9: 0.3, 5: 0.1}, 2), judged(kind, {5: 0.25, 9: 0.75}, 3), kind=kind)
    with served(fake) as engine:
        logits = engine.score([5, 6, 7], [1, 2], [5, 9]).logits
    assert np.allclose(logits[:, 1] - logits[:, 0], np.log(3), atol=1e-6)
    if kind == "llama.cpp":
        assert [body["prompt"] for body in fake.bodies] == [[5, 6], [5, 6, 7]]
        (one, bias), (other, same) = fake.bodies[0]["logit_bias"]
        assert (one, other) == (5, 9) and bias == same >= 50
        assert fake.bodies[0]["samplers"] == [] and fake.bodies[0]["post_sampling_probs"]
    else:
        assert [body["input_ids"] for body in fake.bodies] == [[5, 6], [5, 6, 7]]
        assert fake.bodies[0]["token_ids_logprob"] == [5, 9] and fake.bodies[0]["return_logprob"]
        assert fake.bodies[0]["sampling_params"]["temperature"] == 1.0


@pytest.mark.parametrize("found", [{}, {5: 0.5}, {5: 0.5, 9: None}, {5: 0.5, 9: "x"}])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_labels_that_are_no_probabilities_are_refused(kind, found):
    """One that is missing, or no number."""
    fake, said = Fake(judged(kind, found, 3), kind=kind), "cannot be read"
    with served(fake) as engine, pytest.raises(RemoteError, match=said):
        engine.score([5, 6, 7], [2], [5, 9])


@pytest.mark.parametrize("scores", [[], [0.5], [0.5, 1.5], [0.5, None]])
def test_scores_that_are_no_probabilities_are_refused(scores):
    """As many as positions, each in 0 to 1."""
    told = {"model": SOLVER, "data": [{"score": each} for each in scores]}
    fake, said = Fake(told | {"usage": {"prompt_tokens": 5}}), "not 2 rows of probabilities"
    with served(fake) as engine, pytest.raises(RemoteError, match=said):
        engine.score([5, 6, 7], [1, 2], [5, 9])


@pytest.fixture(scope="module")
def with_value_head(root):
    """A folder of the solver's tokenizer and config, which says it has a value head."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / SOLVER / name, root)
    config = json.loads((root / "config.json").read_text())
    config["architectures"] = ["Qwen2ForProcessRewardModel"]
    (root / "config.json").write_text(json.dumps(config))
    return str(root)


def refused(error, said, kind, about=(), **how):
    """No engine is made of such a server."""
    with pytest.raises(error, match=said), served(Fake({}, kind=kind, **dict(about)), **how):
        pass


@pytest.mark.parametrize("given", [100_000, "384", 100.5, 1, True])
def test_a_length_that_is_not_served_is_refused(given):
    """Nothing is shortened silently; where the server does not say, it is to be given."""
    refused(ConfigError, "max_model_len is", "vllm", max_model_len=given)
    silent = Fake(fine("vllm"))
    silent.card["max_model_len"] = None
    with served(silent, max_model_len=400) as engine:
        assert engine.max_model_len == 400
    with pytest.raises(ConfigError, match="no longest length"), served(silent):
        pass


@pytest.mark.parametrize(
    ("params", "told"),
    [
        (SamplingParams(temperature=0.8, seed=2**64 - 1), "-1 for a random one"),
        (SamplingParams(temperature=0.8, seed=-1), "-1 for a random one"),
        (SamplingParams(temperature=0.001), "given: 0.001"),
    ],
)
def test_what_vllm_takes_for_something_else_is_not_sent(params, told):
    """A seed of its own, or another temperature; our own server takes both as they are."""
    fake = Fake(fine("vllm"))
    with served(fake) as engine:
        with pytest.raises(RemoteError, match=told):
            engine.generate([[1, 2, 3]], params)
        assert not fake.bodies
        greedy = engine.generate([[1, 2, 3]], replace(params, temperature=0.0, max_tokens=4))
        assert greedy[0].error is None
    fake.card["owned_by"] = "workbench"
    with served(fake) as engine:
        assert engine.generate([[1, 2, 3]], replace(params, max_tokens=4))[0].error is None


def test_an_answer_that_is_being_taken_in_is_seen_and_told_once():
    """By whichever thread steps; another that asks meanwhile waits."""

    class Slow(dict):
        def __setitem__(self, number, output):
            time.sleep(0.3)
            super().__setitem__(number, output)

    with served(Fake(fine("vllm"))) as engine:
        number = engine.add([1, 2, 3], FOUR)
        engine._held, told = Slow(), []
        other = threading.Thread(target=lambda: told.extend(engine.step()))
        other.start()
        time.sleep(0.15)
        told += engine.step() if engine.has_work else []
        other.join()
        assert [output.request_id for output in told] == [number]


def test_values_of_a_head_are_vllm_s_alone(with_value_head):
    """Read from /pooling; the other kinds are refused before anything is asked of them."""
    told = {"model": SOLVER, "usage": {"prompt_tokens": 5}}
    rows = [[0.5, 0.5], [0.9, 0.1], [0.25, 0.75]]
    told |= {"data": [{"data": rows[:2]}, {"data": rows}]}
    with served(Fake(told), files=with_value_head) as engine:
        logits = engine.score([5, 6, 7], [1, 2], [0, 1]).logits
    assert np.allclose(np.exp(logits), rows[1:])
    told["data"][1] = told["data"][0]  # the place between two marks
    unmarked = pytest.raises(RemoteError, match="no step's mark")
    with served(Fake(told), files=with_value_head) as engine, unmarked:
        engine.score([5, 6, 7], [1, 2], [0, 1])
    for kind in KINDS[1:]:
        refused(ModelError, f"no server of kind '{kind}' returns", kind, files=with_value_head)


def test_the_kind_is_what_the_server_says_or_is_given():
    """An owner that is not known is asked for, not guessed; so is what it lacks refused by name."""
    refused(ConfigError, r"owned_by 'tgi'; give a kind of vllm, llama\.cpp, sglang", "tgi")
    unsure = Fake(fine("llama.cpp"), kind="llama.cpp")
    unsure.card["owned_by"] = None
    with served(unsure, kind="llama.cpp") as engine:
        assert engine.capabilities == {"seeds"}
        assert engine.generate([[1, 2, 3]], FOUR)[0].token_ids == (5, 6, 7, 8)
        with pytest.raises(RemoteError, match="has no ignore_eos; its capabilities: seeds"):
            engine.generate([[1, 2, 3]], SamplingParams(temperature=0, ignore_eos=True))
    with served(Fake({}, kind="sglang", **{"/server_info": {"max_req_input_len": 90}})) as engine:
        assert engine.max_model_len == 90
        with pytest.raises(RemoteError, match="has no seeds; its capabilities: ignore_eos"):
            engine.generate([[1, 2, 3]], SamplingParams(temperature=0.5))
    refused(RemoteError, "cannot be read", "llama.cpp", {"/props": {}})
    refused(ModelError, "not of one model", "llama.cpp", files="smollm2-135m")


def test_tokens_after_a_stop_are_cut():
    """A server that samples several tokens at a time may go beyond a stop."""
    for kind in KINDS:
        with served(Fake(fine(kind), kind=kind)) as engine:
            params = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=(6,))
            (output,) = engine.generate([[1, 2, 3]], params)
        assert output.token_ids == (5, 6) and output.finish_reason == "stop"


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_killed_in_a_search_leaves_what_was_answered(kind, ours):
    """They are those of the whole search; once the server is back the engine goes on with it."""

    class Mortal(Fake):
        is_dead = False

        def answer(self, handler, path, body):
            told = super().answer(handler, path, body)
            if path not in ("/completion", "/generate", "/v1/completions"):
                return told
            prompt = body["input_ids"] if kind == "sglang" else body["prompt"]
            how = body.get("sampling_params", body)
            seed = how.get("seed", how.get("sampling_seed"))
            named = {"vllm": "max_tokens", "llama.cpp": "n_predict", "sglang": "max_new_tokens"}
            ids = [20 + seed % 7] * how[named[kind]]
            return "drop" if self.is_dead else fine(kind, ids, prompt=len(prompt))

    fake, settings = Mortal({}, kind=kind), {"min_problem_batch": 1, "max_step_tokens": 3}

    def kill(progress):
        fake.is_dead = progress.answered >= 1

    with served(fake) as engine:
        whole = search(engine, ours[1], **settings)
        with pytest.raises(RemoteError, match="gave no answer, asked 5 times") as caught:
            search(engine, ours[1], on_round=kill, **settings)
        assert not engine.has_work and not ours[1].has_work
        found, note = caught.value.result, caught.value.__notes__[0]
        assert list(found.problems["problem_id"]) == list(whole.problems["problem_id"])[:1]
        assert found.candidates["text"].tolist() == whole.candidates["text"].tolist()[:4]
        assert note.startswith("1 of 3 problems were answered: see .result")
        fake.is_dead = False
        assert search(engine, ours[1], **settings).answers == whole.answers


def test_a_server_that_hangs_ends_a_search_with_its_first_request(ours):
    """The twelve of a round, one in flight, are not all waited for, nor asked."""
    fake = Fake(9.0)
    with served(fake, in_flight=1, timeout=0.5) as engine:
        with pytest.raises(RemoteError, match=r"gave no answer, asked for 0\.5 s"):
            search(engine, ours[1], min_problem_batch=3)
        assert len(fake.bodies) < 6  # those begun before it was seen
        assert not engine.has_work and not ours[1].has_work


def test_a_server_that_is_down():
    """It is asked a few times, with pauses between."""
    with pytest.raises(RemoteError, match=r"asked 5 times; last: ConnectError"):
        RemoteEngine("http://127.0.0.1:9", SOLVER)
    fake = Fake(fine("vllm"))
    with served(fake) as engine:
        url = engine.url
        assert engine.generate([[1, 2, 3]], FOUR)
    with pytest.raises(RemoteError, match="gave no answer"):
        RemoteEngine(url, SOLVER)
