"""The `openai` client against the server: what it asks for, and its own classes for what fails."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import openai
import pytest

from tests.serving.conftest import SMALL, require_idle, running
from tests.serving.test_refusals import ask
from workbench import PRM, BeamSearch, Engine, Problem, SamplingParams, run_search
from workbench.engine.memory import block_shape
from workbench.serving.protocol import Choice, CompletionRequest

SOLVER, PROBLEM = "tiny-solver", "Compute 7-3+12."
CHAT = [{"role": "user", "content": PROBLEM}]


def client_of(service, key="none"):
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(service):
    return client_of(service)


def twin(service, name):
    """The same weights in an engine of its own."""
    weights = service.thread.engines[name].weights
    return Engine(name, weights=weights, kv_memory="8MiB", max_model_len=512)


@pytest.fixture(scope="module")
def engine(service):
    return twin(service, SOLVER)


def told(service, path, body=None):
    """The JSON of an answer."""
    status, text = ask(service, path, body)
    assert status == 200, text
    return json.loads(text)


def test_a_seed_gives_the_engine_s_own_tokens(client, engine):
    """Completion and chat, whole, streamed or as the k-th of n: Engine.generate, token by token."""
    asked = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 24}
    params = SamplingParams(**asked, top_k=50, min_p=0.01, seed=7)
    asked["extra_body"] = {"top_k": 50, "min_p": 0.01, "return_token_ids": True}
    prompts = [PROBLEM, engine.tokenizer.encode(PROBLEM)]
    (wanted, _) = engine.generate(prompts, params)
    found = client.completions.create(model=SOLVER, prompt=prompts[1], seed=7, **asked)
    assert tuple(found.choices[0].token_ids) == wanted.token_ids
    both = client.completions.create(model=SOLVER, prompt=[PROBLEM] * 2, n=2, seed=6, **asked)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    for k in (1, 3):
        assert tuple(both.choices[k].token_ids) == wanted.token_ids
        assert both.choices[k].text == wanted.text
    assert both.usage.prompt_tokens == 2 * len(prompts[1])
    chat = engine.tokenizer.encode_chat(CHAT)
    (wanted,) = engine.generate([chat], params)
    asked |= {"messages": CHAT, "seed": 7, "stream_options": {"include_usage": True}}
    chunks = [*client.chat.completions.create(model=SOLVER, **asked, stream=True)]
    streamed = [token for chunk in chunks[:-1] for token in chunk.choices[0].token_ids]
    assert streamed == [*wanted.token_ids]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == wanted.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == len(wanted.token_ids)
    assert chunks[-1].usage.prompt_tokens == len(chat)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_before_them(client, engine, stream):
    """The text ends where the first begins; no stream shows a part; a stop id is no text either."""

    def said(**more):
        asked = {"model": SOLVER, "messages": CHAT, "temperature": 0, **more}
        if not stream:
            choice = client.chat.completions.create(**asked).choices[0]
            return choice.message.content, choice.finish_reason
        chunks = [c.choices[0] for c in client.chat.completions.create(**asked, stream=True)]
        return "".join(c.delta.content for c in chunks), chunks[-1].finish_reason

    whole, reason = said()
    assert reason == "stop" and "\n\n" in whole
    assert said(stop=["never there", "\n\n"]) == (whole.split("\n\n")[0], "stop")
    assert said(stop=whole[5:9]) == (whole[:5], "stop")
    assert said(max_tokens=2)[1] == "length"
    ids = engine.tokenizer.encode(whole)
    assert ids[7] not in ids[:7]
    found = said(extra_body={"stop_token_ids": [ids[7]]})
    assert found == (engine.tokenizer.decode(ids[:7]), "stop")


def test_logprobs_are_the_engine_s(client, engine):
    """Of the chosen tokens and the likeliest, in both endpoints' shapes."""
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3)
    (wanted,) = engine.generate([engine.tokenizer.encode_chat(CHAT)], params)
    asked = {"model": SOLVER, "temperature": 0, "max_tokens": 6}
    chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, **asked)
    content = chat.choices[0].logprobs.content
    assert "".join(each.token for each in content) == chat.choices[0].message.content
    for each, token, logprobs in zip(content, wanted.token_ids, wanted.logprobs, strict=True):
        assert each.logprob == pytest.approx(logprobs[token])
        best = sorted(logprobs.values(), reverse=True)[:3]
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(best)
    prompt = engine.tokenizer.encode_chat(CHAT)
    text = client.completions.create(prompt=prompt, logprobs=3, **asked).choices[0]
    assert text.logprobs.token_logprobs == pytest.approx([each.logprob for each in content])
    firsts = [token[:1] for token in text.logprobs.tokens]
    assert [text.text[k:][:1] for k in text.logprobs.text_offset] == firsts
    assert all(len(tops) == 3 for tops in text.logprobs.top_logprobs)


def test_every_sampled_token_has_its_log_probability(client):
    """The special one that ends a chat, too; in completions it stands among the likeliest."""
    asked = {"model": SOLVER, "extra_body": {"return_token_ids": True}}
    greedy = {"messages": CHAT, "temperature": 0, "logprobs": True, **asked}
    (chat,) = client.chat.completions.create(**greedy, max_tokens=99).choices
    assert chat.finish_reason == "stop" and len(chat.logprobs.content) == len(chat.token_ids)
    drawn = {"prompt": "Compute 1+1.", "temperature": 5, "seed": 1, "max_tokens": 9, **asked}
    (text,) = client.completions.create(logprobs=1, **drawn).choices
    tops = list(zip(text.logprobs.tokens, text.logprobs.token_logprobs, text.logprobs.top_logprobs))
    assert len(tops) == len(text.token_ids) and max(len(top) for *_, top in tops) == 2
    assert all(top[token] == logprob for token, logprob, top in tops)


def test_models_tokens_and_states(service, client):
    """What is served, /tokenize, /health, and vLLM's names in /metrics."""
    names = [model.id for model in client.models.list()]
    assert names[:4] == [SOLVER, "tiny-prm", "search/beam", "search/best_of_n"]
    assert client.models.retrieve("search/beam").id == "search/beam"
    tokenizer = service.thread.engines[SOLVER].tokenizer
    asked = {"model": SOLVER, "messages": CHAT, "return_token_strs": True}
    found = told(service, "/tokenize", asked)
    assert found["tokens"] == tokenizer.encode_chat(CHAT)
    assert found["count"] == len(found["tokens"])
    assert "".join(found["token_strs"]) == tokenizer.render_chat(CHAT)
    assert told(service, "/health") == {"status": "ok"}
    client.completions.create(model=SOLVER, prompt=PROBLEM, max_tokens=3)
    metrics = ask(service, "/metrics", None)[1].decode()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
                 "prefix_cache_queries_total", "prefix_cache_hits_total",
                 "time_to_first_token_seconds_count", "inter_token_latency_seconds_count",
                 "e2e_request_latency_seconds_count", "request_queue_time_seconds_count",
                 "generation_tokens_total"):  # fmt: skip
        assert f'vllm:{name}{{model_name="{SOLVER}"}} ' in metrics


def test_metrics_mean_what_vllm_s_mean():
    """A preempted request waits and is counted then, a token when sampled, whatever comes of it."""
    shape = block_shape(SOLVER, max_model_len=SMALL["max_model_len"])
    least = shape.floor_blocks * shape.block_bytes  # of one request, and too little for two
    with running((f"{SOLVER}={least * 5 // 4}",)) as service:
        engine, seen = service.thread.engines[SOLVER], list[tuple[dict[str, float], Any]]()
        submit = engine.executor.submit

        def watched(plan):
            seen.append((service.thread.state(SOLVER), engine.scheduler.counts))
            return submit(plan)

        engine.executor.submit = watched
        client = client_of(service)
        asked = {"model": SOLVER, "prompt": PROBLEM, "extra_body": {"ignore_eos": True}}
        gone = client.completions.create(**asked, max_tokens=400, stream=True)
        tokens = [next(gone) for _ in range(5)]
        gone.close()
        require_idle(service)
        labels = {"model_name": SOLVER}
        value = partial(service.thread.metrics.registry.get_sample_value, labels=labels)
        assert value("vllm:generation_tokens_total") >= len(tokens)
        assert value("vllm:prompt_tokens_total") == len(engine.tokenizer.encode(PROBLEM))
        client.completions.create(**asked, n=2, max_tokens=400)
        assert any(counts.waiting for _, counts in seen)
        for state, counts in seen:
            assert (state["running"], state["waiting"]) == (counts.running, counts.waiting)
        preempted = sum(counts.preempted for _, counts in seen)
        assert value("vllm:num_preemptions_total") == preempted > 0


def test_reward_models_answer_in_vllm_s_shapes(service):
    """/pooling gives [bad, good] after each step, /generative_scoring the same from its labels."""
    prm = PRM(twin(service, "tiny-prm"))
    first = prm.first_input(PROBLEM, "do 7-3=4, then 4+12")
    both = prm.next_input(first, "do 4+12=17, then 17")
    logits = prm.engine.score(both, [len(first) - 1, len(both) - 1], prm.columns).logits
    wanted = [*prm.scores(logits.tolist())]
    found = told(service, "/pooling", {"model": "tiny-prm", "input": [*both]})
    assert found["object"] == "list" and found["data"][0]["object"] == "pooling"
    rows = np.array(found["data"][0]["data"])
    assert rows.shape == (2, 2) and np.allclose(rows.sum(1), 1)
    assert np.allclose(rows[:, 1], wanted, atol=2**-16)
    labels = [*prm.columns]
    asked = {"model": "tiny-prm", "query": [*both[:9]], "label_token_ids": labels}
    items = [[*first[9:]], [*both[9:]]]
    scored = told(service, "/generative_scoring", asked | {"items": items})
    scores = [each["score"] for each in scored["data"]]
    assert np.allclose(scores, wanted, atol=2**-16)
    bare = told(service, "/generative_scoring", asked | {"items": items, "apply_softmax": False})
    assert all(0 < a["score"] < b for a, b in zip(bare["data"], scores, strict=True))
    longest = [[9] * (SMALL["max_model_len"] - 9)]  # what is scored needs no room for a token more
    assert told(service, "/generative_scoring", asked | {"items": longest})["data"]
    ended = {"model_name": "tiny-prm", "finished_reason": "stop"}
    value = service.thread.metrics.registry.get_sample_value
    assert value("vllm:request_success_total", ended) >= 5  # as vLLM calls what it pools


@pytest.mark.parametrize("stream", [False, True])
def test_a_search_is_a_model(service, client, stream):
    """run_search's solution with the same seed, while others ask the engines; its tree is kept."""
    llm, prm = (twin(service, name) for name in (SOLVER, "tiny-prm"))
    how = {"strategy": BeamSearch(n=8), "seed": 5}
    wanted = run_search(Problem("asked", PROBLEM), llm=llm, prm=PRM(prm), **how)
    total = wanted.problems["tokens"].sum()
    asked = {"model": "search/beam", "messages": CHAT, "seed": 5}
    asked["extra_body"] = {"search": {"n": 8}}
    other = client.chat.completions.create(model=SOLVER, messages=CHAT, stream=True)
    if stream:
        asked["stream_options"] = {"include_usage": True}
        *chunks, last = client.chat.completions.create(**asked, stream=True)
        assert {chunk.object for chunk in (*chunks, last)} == {"chat.completion.chunk"}
        assert last.choices == [] and last.usage.completion_tokens == total
        name, content = chunks[0].id, chunks[-1].choices[0].delta.content
        rounds = [c.choices[0].delta.reasoning_content for c in chunks[:-1]]
        assert len(rounds) > 2 and all(text.startswith("round ") for text in rounds)
    else:
        found = client.chat.completions.create(**asked)
        name, content = found.id, found.choices[0].message.content
        assert found.search["answer"] == wanted.answers["asked"]
        assert found.usage.completion_tokens == total
        assert found.usage.prompt_tokens == len(llm.tokenizer.encode_chat(CHAT))
    other.close()
    assert content in set(wanted.candidates["text"])
    tree = told(service, f"/search/{name}")
    assert tree["status"] == "finished" and tree["answer"] == wanted.answers["asked"]
    found = [(node["node_id"], node["text"], node["score"]) for node in tree["nodes"]]
    columns = wanted.tree[["node_id", "text", "score"]]
    assert found == [*columns.itertuples(index=False, name=None)]


def test_what_only_votes_has_no_scores_and_its_prompt_is_the_one_it_was_asked(service, client):
    own = {"n": 2, "max_tokens": 16, "instruction": "Think step by step. " * 8}
    asked = {"model": "search/self_consistency", "messages": CHAT, "seed": 5}
    found = client.chat.completions.create(**asked, extra_body={"search": own})
    plain = len(service.thread.engines[SOLVER].tokenizer.encode_chat(CHAT))
    assert found.usage.prompt_tokens > plain + 16
    assert {node["score"] for node in told(service, f"/search/{found.id}")["nodes"]} == {None}


def test_a_split_moves_pages_and_changes_no_token():
    """Again and again while both models are asked; the target is the last one."""
    shares = [{SOLVER: part, "tiny-prm": 1 - part} for part in (0.7, 0.3, 0.6)]
    seeds, splits = range(6), 0
    with running((f"{SOLVER}=16MiB", "tiny-prm=16MiB")) as service:
        steps = service.thread.engines[SOLVER].tokenizer.encode(PROBLEM) * 20
        prm = PRM(service.thread.engines["tiny-prm"])
        judged = [*prm.next_input(prm.first_input(PROBLEM, "do 7-3=4"), "do 4+12=16")]

        def answers(seed):
            asked = {"model": SOLVER, "prompt": steps, "seed": seed, "max_tokens": 60}
            asked |= {"ignore_eos": True, "return_token_ids": True}
            found = told(service, "/v1/completions", asked)["choices"][0]["token_ids"]
            return found, told(service, "/pooling", {"model": "tiny-prm", "input": judged})["data"]

        before = [answers(seed) for seed in seeds]
        with ThreadPoolExecutor(len(seeds)) as clients:
            asked = [clients.submit(answers, seed) for seed in [*seeds] * 3]
            while splits < 3 or not all(each.done() for each in asked):
                split = shares[splits % 3]
                moved = told(service, "/arena/split", {"shares": split})
                assert moved["outcome"] in ("reached", "later")
                splits += 1
            assert [each.result() for each in asked] == before * 3
        pages = told(service, "/arena")["pages"]
        assert answers(0) == before[0]  # a split is taken over with the next step
        assert abs(service.thread.arena.target[SOLVER] - split[SOLVER] * pages) <= 1


def test_heavy_work_is_not_the_event_loop_s(service, monkeypatch):
    """Tokenising, decoding, formats and whole answers are for worker threads."""
    seen, tokenizer = dict[str, str](), service.thread.engines[SOLVER].tokenizer
    judge = service.thread.engines["tiny-prm"].tokenizer

    def noted(name, work):
        def call(*given, **more):
            seen[name] = threading.current_thread().name
            return work(*given, **more)

        return call

    for place, name in ((tokenizer, "encode"), (tokenizer, "decode"), (Choice, "add")):
        monkeypatch.setattr(place, name, noted(name, getattr(place, name)))
    monkeypatch.setattr(judge, "encode", noted("encode of a format", judge.encode))
    assert ask(service, "/pooling", {"model": "tiny-prm", "input": [5]})[0] == 400  # no mark
    told(service, "/tokenize", {"model": SOLVER, "prompt": PROBLEM, "return_token_strs": True})
    told(service, "/v1/completions", {"model": SOLVER, "prompt": PROBLEM, "max_tokens": 3})
    assert seen.keys() == {"encode", "encode of a format", "decode", "add"}
    assert all(name.startswith(("asyncio_", "AnyIO")) for name in seen.values()), seen


def test_keys_deadlines_and_a_full_queue():
    """401, 504 with blocks freed, 503 whatever n is; a late stream ends with the client's error."""
    with running((SOLVER,), api_key="secret", max_queue=0) as service:
        with pytest.raises(openai.AuthenticationError) as wrong:
            client_of(service, "wrong").models.list()
        assert wrong.value.response.headers["www-authenticate"] == "Bearer"
        client = client_of(service, "secret")
        asked = {"model": SOLVER, "prompt": PROBLEM, "extra_body": {"ignore_eos": True}}
        places = service.thread.engines[SOLVER].config.max_num_seqs
        busy = client.completions.create(**asked, n=places, max_tokens=400, stream=True)
        next(busy)  # none waits, and the engine had a place
        with pytest.raises(openai.InternalServerError) as full:
            client.completions.create(**asked)
        assert full.value.status_code == 503 and full.value.response.headers["retry-after"] == "1"
        busy.close()
        require_idle(service)
        busy = client.completions.create(**asked, max_tokens=400, stream=True)
        next(busy)
        with pytest.raises(openai.InternalServerError, match=f"{places} more are too many"):
            client.completions.create(**asked, n=places)  # one of them would wait
        with pytest.raises(openai.BadRequestError) as never:
            client.completions.create(**asked, n=places + 1)
        assert never.value.param == "n"
        busy.close()
    with running((f"{SOLVER}=16MiB",), timeout=0.3) as service:
        client = client_of(service)
        executor = service.thread.engines[SOLVER].executor
        step = executor.submit
        executor.submit = lambda plan: time.sleep(0.05) or step(plan)
        asked = {"model": SOLVER, "prompt": PROBLEM, "max_tokens": 400}
        asked["extra_body"] = {"ignore_eos": True}
        with pytest.raises(openai.InternalServerError) as late:
            client.completions.create(**asked)
        assert late.value.status_code == 504
        with pytest.raises(openai.APIError, match="No answer within"):
            [*client.completions.create(**asked, stream=True)]
        tokenizer = service.thread.engines[SOLVER].tokenizer
        encode = tokenizer.encode
        tokenizer.encode = lambda *given: time.sleep(0.5) or encode(*given)
        with pytest.raises(openai.InternalServerError, match="No answer within"):
            client.completions.create(**asked | {"max_tokens": 1})
        require_idle(service)


def test_every_strategy_is_a_model(client):
    """Each answers; what only the search can refuse is the client's fault, not the server's."""
    names = [model.id for model in client.models.list() if model.id.startswith("search/")]
    assert len(names) == 9
    for name in names:
        asked = {"search": {"n": 4, "beam_width": 2, "max_depth": 3}}
        found = client.chat.completions.create(model=name, messages=CHAT, seed=0, extra_body=asked)
        assert found.choices[0].message.content is not None, name
    formats = [{"prm_format": name} for name in ("zzz", "math-shepherd")]
    for wrong in ({"n": 6, "beam_width": 4}, *formats):
        given = {"model": "search/dvts", "messages": CHAT, "extra_body": {"search": wrong}}
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(stream=stream, **given)
            assert refused.value.param == "search"


def test_a_fault_of_ours_is_told_once_and_leaves_nothing(service, client, monkeypatch):
    """Before the engine is asked: status 500. In the midst of a stream: its last event."""
    asked = {"model": SOLVER, "prompt": PROBLEM, "max_tokens": 40}
    asked["extra_body"] = {"ignore_eos": True}
    add = Choice.add

    def failing(choice, *given):
        if choice.num_sampled > 2:
            raise ZeroDivisionError
        return add(choice, *given)

    monkeypatch.setattr(Choice, "add", failing)
    with pytest.raises(openai.APIError, match="ZeroDivisionError"):
        [*client.completions.create(**asked, stream=True)]
    monkeypatch.setattr(CompletionRequest, "sampling", None)
    with pytest.raises(openai.InternalServerError, match="TypeError"):
        client.completions.create(**asked)
    require_idle(service)
