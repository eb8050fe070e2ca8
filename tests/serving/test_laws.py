"""The server's law: whatever clients, clocks and steps do, each request ends once, wholly."""

import asyncio
import heapq
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest

from tests.serving.conftest import require_idle, running, until
from tests.serving.test_refusals import CHAT, ask
from workbench.core import SamplingParams
from workbench.core import Sequence as EngineSequence
from workbench.errors import StepError
from workbench.models.registry import EMBEDDED
from workbench.serving import searches, server
from workbench.serving.engines import EngineThread, Job, News
from workbench.serving.protocol import ChatRequest, Refused
from workbench.serving.searches import SearchRun

REQUESTS, AT_A_TIME, SECONDS = 500, 40, 20.0


def a_request(random_):
    """A random request: path, body, and after how many seconds its client goes away, if it does."""
    gone = random_.choice([None, None, None, random_.uniform(0, 0.3)])
    seed, length = random_.randrange(100), random_.choice([1, 5, 40, 400])
    chat = [{"role": "user", "content": f"Compute {random_.randrange(9)}+{seed}."}]
    body = {"model": random_.choice(["tiny-solver", "tiny-solver", "tiny-prm"]), "seed": seed}
    kind = random_.randrange(8)
    if kind == 0:
        ids = [random_.randrange(200) for _ in range(random_.choice([3, 50]))]
        return "/generative_scoring", {"model": body["model"], "query": ids, "items": [[1], [2]],
                                       "label_token_ids": [3, 4]}, gone  # fmt: skip
    if kind == 1:
        body |= {"model": "search/beam", "messages": chat, "search": {"n": 4, "max_depth": 4}}
        return "/v1/chat/completions", body | {"stream": random_.random() < 0.5}, gone
    body |= {"n": random_.choice([1, 1, 3]), "max_tokens": length, "priority": seed % 3}
    body |= {"stream": random_.random() < 0.5, "ignore_eos": random_.random() < 0.5}
    if kind < 5:
        return "/v1/completions", body | {"prompt": chat[0]["content"] * (1 + seed % 5)}, gone
    if kind == 5:
        body["temperature"] = -1
    return "/v1/chat/completions", body | {"messages": chat}, gone


async def ending_of(port, path, body, gone):
    """How one request ended: a status, "done" or "error" of a stream, or "gone". Once, in all."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    text = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    writer.write((head + text).encode())
    try:
        answer = (await asyncio.wait_for(reader.read(-1), gone or SECONDS)).decode()
    except TimeoutError:
        assert gone is not None, "an answer never came"
        return "gone"
    finally:
        writer.close()
    status, _, rest = answer.partition("\r\n")
    headers, _, content = rest.partition("\r\n\r\n")
    assert answer.count("HTTP/1.1 ") == 1
    if "text/event-stream" not in headers:
        assert ("error" in json.loads(content)) == (" 200 " not in status)
        return int(status.split()[1])
    ends = content.count("data: [DONE]"), content.count('data: {"error"')
    assert sum(ends) == 1, content[-500:]
    return "done" if ends[0] else "error"


def test_every_request_ends_once_and_leaves_nothing():
    """Disconnects, deadlines, a full queue, steps that raise, a split that moves."""
    random_ = random.Random(11)
    with running(max_queue=12, timeout=0.8) as service:
        for engine in service.thread.engines.values():
            whole, step = engine.step, engine.executor.submit

            def submit(plan, step=step):
                if random_.random() < 0.02:
                    raise StepError("A test lets this step fail.")
                time.sleep(0.002)
                return step(plan)

            def failing(whole=whole):
                if random_.random() < 0.005:
                    raise ZeroDivisionError
                return whole()

            engine.executor.submit, engine.step = submit, failing
        port = int(service.url.rpartition(":")[2])

        async def load():
            places = asyncio.Semaphore(AT_A_TIME)

            async def one(number):
                async with places:
                    if number % 25 == 0:
                        share = random_.uniform(0.3, 0.7)
                        service.thread.arena.resplit({"tiny-solver": share, "tiny-prm": 1 - share})
                    return await ending_of(port, *a_request(random_))

            return await asyncio.gather(*map(one, range(REQUESTS)))

        endings = Counter(asyncio.run(load()))
        require_idle(service)
        assert endings.total() == REQUESTS
        assert {200, 400, 503, 504, "done", "error", "gone"} <= endings.keys(), endings
        for broken, wanted in ((True, 500), (False, 200)):
            for engine in service.thread.engines.values():
                engine.executor.submit = None  # a step that cannot but raise
                if not broken:
                    del engine.executor.submit, engine.step
            assert asyncio.run(_one_more(port)) == [wanted]


async def _one_more(port):
    body = {"model": "tiny-solver", "prompt": "Compute 1+1.", "max_tokens": 4}
    return [await ending_of(port, "/v1/completions", body, None)]


def test_an_end_finishes_what_is_in_flight_or_says_503():
    """Told to end: a request that can finish within the grace does, one that cannot gets 503."""
    for grace, wanted in ((20, 200), (0, 503)):
        with running(("tiny-solver",), grace=grace) as service:
            port = int(service.url.rpartition(":")[2])
            submit = service.thread.engines["tiny-solver"].executor.submit

            def slow(plan, submit=submit):
                time.sleep(0.01)
                return submit(plan)

            service.thread.engines["tiny-solver"].executor.submit = slow

            async def ending(service=service, port=port):
                body = {"model": "tiny-solver", "prompt": "1", "max_tokens": 60, "ignore_eos": True}
                asked = asyncio.create_task(ending_of(port, "/v1/completions", body, None))
                while not service.calls:
                    await asyncio.sleep(0.01)
                service.on_failure()  # as a signal would
                return await asked

            assert asyncio.run(ending()) == wanted
        assert json.loads(asyncio.run(service.health()).body) == {"status": "closing"}


def test_a_body_that_does_not_end_is_late_and_holds_up_no_end():
    """Guards that its 504 comes in time, and that the server's end is told to it like to others."""

    def half_a_request(port):
        head = "POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(f"{head}Content-Length: 99\r\n\r\n{{".encode())
            return int(client.recv(1000).split()[1])

    with running(("tiny-solver",), timeout=2.0, grace=0) as service, ThreadPoolExecutor(1) as one:
        port = int(service.url.rpartition(":")[2])
        assert half_a_request(port) == 504
        until(lambda: not service.calls)
        last = one.submit(half_a_request, port)
        until(lambda: service.calls)
        service.on_failure()  # as a signal would
        assert last.result(timeout=30) == 503


def test_the_command_serves_and_ends_with_a_signal():
    """`workbench serve`: health says when it is ready; SIGTERM ends it with status 0."""
    call = "import sys; from workbench.cli import main; sys.exit(main())"
    words = ["serve", "tiny-solver", "--port", "0", "--set", "max_model_len=128"]
    command = [sys.executable, "-c", call, *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said = []
    while "ready" not in "".join(said):
        said.append(process.stderr.readline())
        assert said[-1], "".join(said)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert "Traceback" not in process.stderr.read()


def test_one_that_waits_long_puts_none_of_its_kind_first():
    """Guards a request of low priority, beside which later ones would pass every search's."""
    thread = EngineThread(SimpleNamespace(models=["m"]), dict, 9, print, print)
    thread.engines = {"m": SimpleNamespace(config=SimpleNamespace(max_num_seqs=1))}
    kinds = ((9, False), (0, True), (0, False))
    low, inner, own = (Job("m", [5], print, priority=p, inner=i) for p, i in kinds)
    thread.submit([low])
    thread._turn["m"] = 50  # of searches' jobs, which left meanwhile
    thread.submit([inner])
    thread.submit([own])
    assert heapq.heappop(thread._waiting["m"])[-1] is inner


def test_a_model_that_cannot_be_loaded_ends_the_command(tmp_path, says):
    """Its error in one block, status 2; a bad choice of models or options likewise, before that."""
    folder = shutil.copytree(EMBEDDED / "tiny-solver", tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"no weights")
    for words, said in (
        ([str(folder)], "model.safetensors"),
        (["tiny-solver", "tiny-solver"], "give each once"),
        (["tiny-solver=8MiB", "tiny-prm"], "NAME=SIZE"),
        (["tiny-solver", "--memory", "512KiB"], "one request"),
        (["tiny-solver", "--set", "max_seqs=3"], "max_seqs"),
        (["tiny-solver", "--timeout", "0"], "timeout"),
        (["tiny-solver", "--set", "device=cuda:99"], "CUDA device"),
    ):
        shown = says("serve", *words, "--port", "0", status=2)
        assert said in shown and "Traceback" not in shown


def test_a_port_in_use_ends_the_command_before_it_loads(monkeypatch, says):
    """Guards that it is named, with status 2."""
    monkeypatch.setattr(server, "Server", None)  # which would load
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        shown = says("serve", "tiny-solver", "--port", port, status=2)
    assert f"port {port}" in shown and "Traceback" not in shown


def test_when_the_engine_thread_dies_nothing_hangs():
    """A fault outside a step: what is in flight gets 503, and the server ends with the fault."""
    with running(("tiny-solver",)) as service:
        port = int(service.url.rpartition(":")[2])
        service.thread._step = None  # the next call of it fails
        assert asyncio.run(_one_more(port)) == [503]
        assert isinstance(service.failure, TypeError)
        assert json.loads(asyncio.run(service.health()).body) == {"status": "failed"}


def test_a_request_that_cannot_be_admitted_fails_alone(service):
    """Its 500 says so, also when taking it back fails; those beside it and after it are served."""
    port, engine = int(service.url.rpartition(":")[2]), service.thread.engines["tiny-solver"]
    for count, *names in ((3, "add"), (3, "add", "recover"), (1, "add", "recover", "recover")):
        lacks = [*names]

        def failing(*given, name, do, lacks=lacks):
            if name in lacks:
                lacks.remove(name)
                raise MemoryError
            return do(*given)

        for name in {*names}:
            do = getattr(engine.scheduler, name)
            setattr(engine.scheduler, name, partial(failing, name=name, do=do))

        async def several(count=count):
            return await asyncio.gather(*(_one_more(port) for _ in range(count)))

        assert sorted(asyncio.run(several())) == [[200]] * (count - 1) + [[500]]
        until(lambda lacks=lacks: not lacks)
        for name in {*names}:
            delattr(engine.scheduler, name)
        assert asyncio.run(_one_more(port)) == [200]
    engine.scheduler.add = None  # another fault, and what is told of it
    status, text = ask(service, "/v1/completions", {"model": "tiny-solver", "prompt": "1"})
    del engine.scheduler.add
    error = json.loads(text)["error"]
    assert status == 500 and error["message"].startswith("The request could not be admitted: Type")
    assert service.failure is None
    require_idle(service)


def test_the_last_token_is_not_taken_before_the_end(service, monkeypatch):
    """Whenever it is taken: a stop string would else be shown, as more could follow."""
    taken, metrics = list[News](), service.thread.metrics
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    job = Job("tiny-solver", [5], lambda job: None, params, streams=True)
    sampled = metrics.sampled

    def watched(*given):  # in the midst of what a step brings
        taken.append(job.take())
        return sampled(*given)

    monkeypatch.setattr(metrics, "sampled", watched)
    service.thread.submit([job])
    until(lambda: job.output is not None)
    require_idle(service)
    taken.append(job.take())
    assert sum(len(news.token_ids) for news in taken) == 5
    last = next(news for news in reversed(taken) if news.token_ids)
    assert last.output is not None


def test_a_token_that_a_repair_takes_back_comes_later():
    """Taken meanwhile or not, each comes once."""
    for early in (False, True):
        job = Job("tiny-solver", [9], lambda job: None)
        job.sequence = EngineSequence(0, [9, 1], 1)  # of two that were sampled
        job.reached = 2, None
        found = [*job.take().token_ids] if early else []
        job.sequence.token_ids.append(2)
        assert [*found, *job.take().token_ids, *job.take().token_ids] == [1, 2]


def test_the_queue_goes_by_priority(service):
    """What waits is served by priority, equals in order of arrival."""
    ended = []

    def jobs(priority):
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        places = service.thread.engines["tiny-solver"].config.max_num_seqs
        sink = partial(lambda name, event: ended.append(name), priority)
        return [Job("tiny-solver", [5], sink, params, priority=priority) for _ in range(places)]

    first, low, high = jobs(0), jobs(5), jobs(-1)
    service.thread.submit(first)
    until(lambda: first[-1].sequence is not None)
    service.thread.submit([*low, *high])
    until(lambda: len(ended) == len(first) * 3)
    assert ended == [0] * len(first) + [-1] * len(high) + [5] * len(low)


def test_requests_and_searches_wait_in_turn():
    """What a search asks for fills no queue of requests, and neither starves the other."""
    ended, inner = list[str](), 200
    with running(("tiny-solver",), max_queue=4) as service:
        params = SamplingParams(max_tokens=8, ignore_eos=True)

        def job(kind):
            return Job("tiny-solver", [5], lambda event: ended.append(kind), params,
                       inner=kind == "inner")  # fmt: skip

        engine, full = service.thread.engines["tiny-solver"], threading.Event()
        step, places = engine.executor.submit, engine.config.max_num_seqs
        engine.executor.submit = lambda plan: full.wait(30) and step(plan)
        for kind in ["inner"] * inner + ["own"] * 4:
            service.thread.submit([job(kind)])
        with pytest.raises(Refused, match="4 requests wait"):
            service.thread.submit([job("own")])
        full.set()
        until(lambda: len(ended) == inner + 4)
    last = len(ended) - 1 - ended[::-1].index("own")
    assert ended.index("own") < 2 * places and last < 3 * places  # among those that wait first


def test_a_search_that_runs_is_kept(service, monkeypatch):
    """However many begin after it, its tree can be asked for."""
    monkeypatch.setattr(server, "KEPT_SEARCHES", 1)
    body = CHAT | {"model": "search/best_of_n", "search": {"n": 4}}
    held, names, play = threading.Event(), list[str](), SearchRun.play

    def waiting(run, told):
        names.append(run.head["id"])
        assert len(names) > 1 or held.wait(30)
        return play(run, told)

    monkeypatch.setattr(SearchRun, "play", waiting)
    first = threading.Thread(target=ask, args=(service, "/v1/chat/completions", body))
    first.start()
    until(lambda: names)
    for _ in range(3):
        assert ask(service, "/v1/chat/completions", body)[0] == 200
    assert ask(service, f"/search/{names[0]}", None)[0] == 200
    assert ask(service, f"/search/{names[1]}", None)[0] == 404
    held.set()
    first.join(timeout=30)
    assert ask(service, f"/search/{names[0]}", None)[0] == 200


def test_what_a_client_that_is_gone_did_not_read_is_dropped():
    """The reason comes first, whatever waits: nothing is rendered for nobody."""

    async def gone():
        return {"type": "http.disconnect"}

    async def scenario():
        service = SimpleNamespace(config=SimpleNamespace(timeout=60.0, max_body=9), calls=set())
        call = server.Call(service, gone)
        for token in range(1000):
            call.put(token)
        await asyncio.sleep(0.01)
        with pytest.raises(Refused, match="closed the connection"):
            await anext(call.news(lambda: None, lambda: None))
        call.close()

    asyncio.run(scenario())


def unplayed(service):
    """A search that was asked for and not begun."""
    body = ChatRequest(**(CHAT | {"model": "search/best_of_n"}))
    pair = searches.pair_of([*service.thread.engines.values()])
    return SearchRun(body, service.thread, pair)


def test_a_search_given_up_while_it_waits_leaves_its_place(service, monkeypatch):
    """Its state says so at once, and it is never begun."""
    held, begun = threading.Event(), list[str]()
    monkeypatch.setattr(SearchRun, "play", lambda run, told: begun.append("") or held.wait(30))
    pool = service._searchers
    for _ in range(server.MOST_SEARCHES):
        pool.submit(SearchRun.play, None, None)
    until(lambda: len(begun) == server.MOST_SEARCHES)
    run = unplayed(service)
    run.played = pool.submit(run.play, None)
    run.cancel()
    assert run.state["status"] == "failed" and "given up" in run.state["error"]
    held.set()
    assert run.played.cancelled() and len(begun) == server.MOST_SEARCHES


def test_a_search_given_up_asks_for_nothing_more(service, monkeypatch):
    """Guards that one which is cancelled before it submits does not fill the queue."""
    asked, told = list[Job](), list[Refused]()
    monkeypatch.setattr(service.thread, "submit", asked.extend)
    run = unplayed(service)
    run.cancel()
    run.play(told.append)
    assert not asked and run.state["status"] == "failed" and told[0].status == 503
