"""The load client against a real server: its fields, both ways of arrival, nothing lost."""

import asyncio
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.bench import serve
from workbench.bench.peers import PeerError
from workbench.errors import ConfigError, RemoteError
from workbench.models.registry import model_spec


def test_a_load_has_the_fields_of_vllm_bench_serve(monkeypatch) -> None:
    """Two clients in two turns: all is answered, and in process and peers stand beside."""
    monkeypatch.setattr(serve, "TOKENS", 8)
    monkeypatch.setattr(serve, "NEW", 32)
    broken = serve.Command("", [sys.executable, "-c", "raise SystemExit('no model')"], os.environ)
    twin = replace(serve.ours(["tiny-solver"], 2), label="our twin")
    peers = {"twin": twin, "broken": broken}
    monkeypatch.setattr(serve, "peer_commands", lambda *_: peers)
    asked, sides = list[tuple[str, str]](), dict[str, list]()  # warm-ups are left out
    loads, alone, median_row = serve.loads, serve.in_process, serve.median_row

    def watched(url, bodies, *how):
        if len(bodies[0]) > 1:
            asked.append((url, json.dumps([body["prompt"] for body in bodies[0]])))
        return loads(url, bodies, *how)

    def watched_alone(engines, prompts, count):
        if len(prompts[0]) > 1:
            asked.append(("alone", json.dumps(prompts[0].tolist())))
        return alone(engines, prompts, count)

    def kept(name, values, unit, **how):
        sides[name] = [values, how["peers"]]
        return median_row(name, values, unit, **how)

    monkeypatch.setattr(serve, "median_row", kept)
    monkeypatch.setattr(serve, "loads", watched)
    monkeypatch.setattr(serve, "in_process", watched_alone)
    with pytest.warns(UserWarning, match="no broken: .*no model"):
        found = [*serve.run("quick", clients="1,2", part="distinct", repeats=2)]
    order, prompts = zip(*asked)
    assert order[:6] == order[:3] * 2 and order[6:] == order[2::-1] * 2 and len({*order}) == 3
    assert len({*prompts}) == 4 and all(prompts[k] == prompts[3 * (k // 3)] for k in range(12))
    rows = {row.name: row for row in found}
    assert len(rows) == len(found) and {row.repeats for row in found} == {2}
    beside = rows["tokens_per_s_c2@twin"]
    assert beside.peer == "our twin" and beside.value == rows["tokens_per_s_c2"].value
    assert rows["ttft_p95_c2@twin"].peer_value > 0 == rows["lost_c2@twin"].peer_value
    for name, row in rows.items():
        if name.startswith("itl") and row.ratio is not None and math.isnan(row.ratio):
            assert row.spread is None
            continue  # a busy machine reads all chunks of an answer at once: no gaps
        assert (row.spread is None) is (row.ratio is None) is (name not in sides)
        if name in sides:
            assert row.ratio == pytest.approx(sum(row.spread) / 2)
            assert row.spread[0] < row.ratio < row.spread[1]
    one, two = (sides[f"tokens_per_s_c{count}"] for count in (1, 2))
    over = [[many / single for many, single in zip(*both)] for both in zip(two, one)]
    assert sides["over_sequential_c2"] == over
    assert rows["lost_c2"].value == rows["refused_c2"].value == rows["late_c2"].value == 0
    rate = rows["tokens_per_s_c2"]
    assert rate.value == pytest.approx(sum(two[0]) / 2) and rate.value > 0
    assert rate.peer_value == pytest.approx(sum(two[1]) / 2) and rate.peer == "in process"
    assert rate.ratio == pytest.approx((two[0][0] / two[1][0] + two[0][1] / two[1][1]) / 2)
    for name in ("ttft", "itl", "e2e", "health"):
        values = [rows[f"{name}_p{share}_c2"].value for share in serve.SHARES]
        assert all(map(math.isfinite, values)) and values == sorted(values)
    assert rows["ttft_p50_c2"].value <= rows["e2e_p99_c2"].value
    assert rate.value <= 4 * 32 / rows["e2e_p50_c2"].value  # no more than both clients could get


def test_turns_are_paired_and_put_together() -> None:
    """Rates and ratios are medians of turns, percentiles of all turns' requests, counts sums."""

    def turn(begin: float, seconds: float, *more: serve.Answer) -> list[serve.Answer]:
        times = [begin + seconds / 4, begin + seconds / 2]
        return [serve.Answer(begin, 200, times, begin + seconds), *more]

    ours = serve.Turns([turn(0, 1.0), turn(50, 4.0, serve.Answer(50, 503, [], 50.1)), turn(90, 2)])
    ours.health += [0.1, 0.2, 0.3]
    other = serve.Turns([turn(10, 3.0), turn(60, 4.0), turn(70, 4, serve.Answer(70, 0, [], 71))])
    rows = {row.name: row for row in serve.rows_of(ours, other, serve.ALONE, "c1")}
    rate, new = rows["tokens_per_s_c1"], serve.NEW
    assert (rate.value, rate.peer_value) == (new / 2, new / 4)
    assert rate.ratio == 2.0 and rate.spread == (1.0, 3.0) and rate.repeats == 3
    assert (rows["refused_c1"].value, rows["lost_c1"].value) == (1, 0)
    assert rows["ttft_p50_c1"].value == 0.5 and rows["health_p50_c1"].value == 0.2
    assert rows["ttft_p99_c1"].value == pytest.approx(1.0, rel=0.02)
    assert "served_c1" not in rows and "little_c1" not in rows
    beside = {row.name: row for row in serve.rows_of(ours, other, "a peer", "c1@peer")}
    first = beside["ttft_p95_c1@peer"]
    assert first.ratio == 2.0 and first.spread == (1.0, 3.0)
    assert first.value == rows["ttft_p95_c1"].value and first.peer_value == pytest.approx(1.0)
    assert beside["lost_c1@peer"].peer_value == 1 and beside["lost_c1@peer"].ratio is None
    single = serve.Turns([turn(0, 1.0)], [0.1])
    once = next(serve.rows_of(single, single, serve.ALONE, "c1"))
    assert once.ratio == 1.0 and once.spread is None


def test_two_models_are_asked_at_once(monkeypatch) -> None:
    """Both models' requests are answered, beside the same engines in this process."""
    monkeypatch.setattr(serve, "TOKENS", 8)
    monkeypatch.setattr(serve, "NEW", 8)
    rows = {row.name: row for row in serve.run("quick", clients="2", part="two")}
    rate, lost = rows["tokens_per_s_two_c2"], rows["lost_two_c2"]
    assert rate.ratio == rate.value / rate.peer_value > 0 and rate.spread is None
    assert lost.value == rows["refused_two_c2"].value == 0 and lost.repeats == 1


def test_what_a_server_refuses_is_counted_and_not_lost() -> None:
    """503, 504 and a broken connection are counted apart; percentiles are of answers alone."""
    answers = [serve.Answer(0.0, 200, [0.5, 0.75], 1.0), serve.Answer(0.0, 503, [], 0.1)]
    answers += [serve.Answer(0.0, 504, [], 4.0), serve.Answer(0.0, 0, [], 0.2)]
    alone = serve.Turns([[serve.Answer(0.0, 200, [1.0], 1.0)]])
    turns = serve.Turns([answers], [0.01])
    rows = {r.name: r.value for r in serve.rows_of(turns, alone, serve.ALONE, "c4")}
    assert (rows["refused_c4"], rows["late_c4"], rows["lost_c4"]) == (1, 1, 1)
    assert rows["tokens_per_s_c4"] == serve.NEW / 4.0
    assert rows["ttft_p99_c4"] == 0.5 and rows["itl_p50_c4"] == 0.25 and rows["e2e_p50_c4"] == 1
    assert rows["goodput_c4"] == 0  # its tokens are 0.25 s apart
    slower = serve.Turns([answers], [0.01], slo=(0.5, 0.25))
    assert slower.each("goodput") == [1 / 4.0]


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([b'data: {"a": 1}\n\n', b"data: [DONE]\n\n"], 200),
        ([b'data: {"a": 1}\n\ndata: {"err', b'or": {}}\n\n', b"data: [DONE]\n\n"], 0),
        ([b'data: {"error": {}}\n\ndata: [DONE]\n\n'], 0),  # as vLLM ends a stream that failed
        ([b"data: [DONE]\n\n"], 0),
        ([b'data: {"a": 1}\n\n'], 0),
    ],
)
def test_a_stream_that_ends_in_an_error_is_no_answer(pieces, status) -> None:
    """Guards what is counted as tokens: an error in the midst, none at all, no end."""

    async def asked() -> serve.Answer:
        async def reply(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for piece in [b"HTTP/1.1 200 OK\r\n\r\n", *pieces]:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.02)
            writer.close()

        async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await serve.ask(f"http://127.0.0.1:{port}", {"prompt": [1]})

    assert asyncio.run(asked()).status == status


def test_a_peer_that_answered_nothing_has_no_ratio() -> None:
    """Its rows are there, and say so."""
    good, none = [serve.Answer(0.0, 200, [0.5, 0.75], 1.0)], [serve.Answer(0.0, 0, [], 0.2)]
    mine, theirs = serve.Turns([good, good]), serve.Turns([good, none])
    rows = {r.name: r for r in serve.rows_of(mine, theirs, "a peer", "c1@peer")}
    for name in ("tokens_per_s_c1@peer", "ttft_p95_c1@peer"):
        assert math.isnan(rows[name].ratio) and rows[name].spread is None
    assert rows["lost_c1@peer"].peer_value == 1


def test_arrivals_and_parts() -> None:
    """Poisson arrivals where no server is: all lost, in their time; wrong parts are refused."""
    url = "http://127.0.0.1:9"
    answers = asyncio.run(serve.load(url, [{"prompt": [1]}] * 20, 1, 200.0, 0))
    assert [answer.status for answer in answers] == [0] * 20
    assert 0.02 < answers[-1].sent - answers[0].sent < 2
    with pytest.raises(ConfigError, match="part"):
        next(serve.run("quick", part="other"))
    for clients in ("1,x", "0,4", ""):
        with pytest.raises(ConfigError, match="clients"):
            next(serve.run("quick", clients=clients))


def test_a_server_that_is_not_there_or_answers_nothing_is_an_error() -> None:
    """And a peer that was asked for by name has a row that says so."""
    with pytest.raises(RemoteError, match=r"No server is ready at http://127.0.0.1:9/health"):
        next(serve.run("quick", url="http://127.0.0.1:9"))
    with pytest.raises(RemoteError, match="answered none of 2 requests"):
        serve.require_answers([serve.Answer(0.0)] * 2, "http://there")
    (row,) = serve.missing(["vllm"])
    assert row.failed and row.name == "peer@vllm"


def test_a_rate_is_one_load_beside_no_closed_loop(monkeypatch) -> None:
    """Guards that rows are named by the rate, and that nothing in process is set against them."""
    asked = list[tuple[float | None, int]]()

    async def loads(url, bodies, clients, rate=None, seed=0):
        asked.append((rate, len(bodies[0])))
        return [[serve.Answer(0.0, 200, [0.5, 0.55], 1.0)] * len(own) for own in bodies], [0.01]

    engine = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=9))
    monkeypatch.setattr(serve, "engines_of", lambda *_: [engine])
    monkeypatch.setattr(serve, "in_process", lambda *_: None)
    monkeypatch.setattr(serve, "loads", loads)
    monkeypatch.setattr(serve, "is_ready", lambda url: url == "http://there")
    given = {"clients": "1,4", "rate": 2.5, "url": "http://there", "slo_itl": 0.04}
    rows = {row.name: row for row in serve.run("quick", **given)}
    assert asked == [(None, 1), (2.5, 4 * serve.ROUNDS)]
    assert all(name.endswith("_rate2.5") and row.peer is None for name, row in rows.items())
    assert rows["goodput_rate2.5"].value == 0 < rows["tokens_per_s_rate2.5"].value


def test_the_key_of_the_environment_is_sent(monkeypatch) -> None:
    """Guards that a server which takes requests only with a key can be measured."""
    monkeypatch.setenv("WORKBENCH_API_KEY", "secret")
    seen = list[bytes]()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nrunning 3\n")
        writer.close()

    async def scenario() -> list[float]:
        async with await asyncio.start_server(answered, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await serve.ask(url, {"prompt": [1]})
            return await asyncio.to_thread(serve.metrics_of, url, "running")

    assert asyncio.run(scenario()) == [3.0]
    assert len(seen) == 2 and all(b"Authorization: Bearer secret\r\n" in head for head in seen)


def test_a_peer_s_server_is_started_by_its_own_interpreter(monkeypatch, tmp_path) -> None:
    """The command line of each; one that is not installed or reads no such file is left out."""

    def interpreter(name, folder, threads, kv_bytes=1):
        if name == "llama.cpp":
            raise PeerError("llama.cpp is not installed")
        return Path(name, "python"), {"KV": str(kv_bytes)}

    monkeypatch.setattr(serve, "interpreter", interpreter)
    monkeypatch.setattr(serve, "model_spec", lambda _: model_spec("tiny-solver"))
    monkeypatch.setattr(serve, "peer_dtypes", lambda: ("float32", "bfloat16"))
    monkeypatch.setattr(serve, "peer_files", lambda model: (tmp_path, tmp_path / "own.gguf"))
    with pytest.warns(UserWarning, match="no llama.cpp: llama.cpp is not installed"):
        found = serve.peer_commands("own", 4, ["llama.cpp", "vllm"])
    assert [*found] == ["vllm", "vllm-bfloat16"]
    words = [str(word) for word in found["vllm-bfloat16"].words]
    assert words[:3] == ["vllm/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert words[words.index("--dtype") + 1] == "bfloat16" and words[-1] == "--port"
    assert words[words.index("--model") + 1] == str(tmp_path)
    assert "--block-size" not in words
    with pytest.warns(UserWarning, match="no llama.cpp"):
        shared = serve.peer_commands("own", 4, ["llama.cpp", "vllm"], shared=True)["vllm"]
    assert shared.words[shared.words.index("--block-size") + 1] == "32", "of 96 tokens, not of 128"
    assert shared.label.endswith("a step, blocks of 32)")
    room = [int(command.environment["KV"]) for command in found.values()]
    assert room[0] == 2 * room[1] > 0, "as many tokens, in float32 and bfloat16"
    fast = tmp_path.with_name(f"{tmp_path.name}-Q4_0.gguf")
    fast.touch()
    monkeypatch.setattr(serve, "interpreter", lambda *_: (Path("python"), {}))
    own = serve.peer_commands("own", 4, ["llama.cpp"])["llama.cpp"]
    assert json.loads(own.words[-1])["model"] == str(fast) and "Q4_0.gguf" in own.label
    monkeypatch.setattr(serve, "peer_files", lambda model: (tmp_path, None))
    with pytest.warns(UserWarning, match="no llama.cpp: own is no .gguf file"):
        assert serve.peer_commands("own", 4, ["llama.cpp"]) == {}
