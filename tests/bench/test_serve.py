"""The load client against a real server: its fields, both ways of arrival, nothing lost."""

import asyncio
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.bench import serve
from workbench.bench.peers import PeerError
from workbench.errors import ConfigError


def test_a_load_has_the_fields_of_vllm_bench_serve(monkeypatch) -> None:
    """A closed loop of two clients: every request is answered, percentiles are in order, the sum of
    what clients waited for fits the wall time, and in process stands beside.
    """
    monkeypatch.setattr(serve, "TOKENS", 8)
    monkeypatch.setattr(serve, "NEW", 32)
    broken = serve.Command("", [sys.executable, "-c", "raise SystemExit('no model')"], os.environ)
    twin = replace(serve.ours(["tiny-solver"], 2), label="our twin")
    peers = {"twin": twin, "broken": broken}
    monkeypatch.setattr(serve, "peer_commands", lambda *_: peers)
    with pytest.warns(UserWarning, match="no broken: .*no model"):
        found = [*serve.run("quick", clients="1,2", part="distinct")]
    rows = {row.name: row for row in found}
    assert len(rows) == len(found)
    beside = rows["tokens_per_s_c2@twin"]
    assert beside.peer == "our twin" and beside.ratio == beside.value / beside.peer_value
    assert rows["ttft_p95_c2@twin"].peer_value > 0 == rows["lost_c2@twin"].peer_value
    gain = rows["over_sequential_c2"]
    assert gain.value == rows["tokens_per_s_c2"].value / rows["tokens_per_s_c1"].value
    assert rows["lost_c2"].value == rows["refused_c2"].value == rows["late_c2"].value == 0
    assert rows["lost_c2"].repeats == 4
    rate = rows["tokens_per_s_c2"]
    assert rate.value > 0 and rate.peer == "in process"
    assert rate.ratio == pytest.approx(rate.value / rate.peer_value)
    for name in ("ttft", "itl", "e2e", "health"):
        values = [rows[f"{name}_p{share}_c2"].value for share in serve.SHARES]
        assert all(map(math.isfinite, values)) and values == sorted(values)
    assert rows["ttft_p50_c2"].value <= rows["e2e_p99_c2"].value
    assert rate.value <= 4 * 32 / rows["e2e_p50_c2"].value  # no more than both clients could get


def test_two_models_are_asked_at_once(monkeypatch) -> None:
    """Both models' requests are answered, beside the same engines in this process."""
    monkeypatch.setattr(serve, "TOKENS", 8)
    monkeypatch.setattr(serve, "NEW", 8)
    rows = {row.name: row for row in serve.run("quick", clients="2", part="two")}
    rate, lost = rows["tokens_per_s_two_c2"], rows["lost_two_c2"]
    assert rate.ratio == rate.value / rate.peer_value > 0
    assert lost.value == rows["refused_two_c2"].value == 0 and lost.repeats == 2 * 4


def test_what_a_server_refuses_is_counted_and_not_lost() -> None:
    """503, 504 and a broken connection are counted apart; percentiles are of answers alone."""
    answers = [serve.Answer(0.0, 200, [0.5, 0.75], 1.0), serve.Answer(0.0, 503, [], 0.1)]
    answers += [serve.Answer(0.0, 504, [], 4.0), serve.Answer(0.0, 0, [], 0.2)]
    rows = {row.name: row.value for row in serve.rows_of(answers, [0.01], "c4", 100.0)}
    assert (rows["refused_c4"], rows["late_c4"], rows["lost_c4"]) == (1, 1, 1)
    assert rows["tokens_per_s_c4"] == serve.NEW / 4.0
    assert rows["ttft_p99_c4"] == 0.5 and rows["itl_p50_c4"] == 0.25 and rows["e2e_p50_c4"] == 1
    assert rows["goodput_c4"] == 0  # its tokens are 0.25 s apart


def test_a_peer_that_answered_nothing_has_no_ratio() -> None:
    """Its rows are there, and say so."""
    good, none = [serve.Answer(0.0, 200, [0.5, 0.75], 1.0)], [serve.Answer(0.0, 0, [], 0.2)]
    mine, theirs = ({r.name: r for r in serve.rows_of(a, [0.1], "c1", 9.0)} for a in (good, none))
    rows = {r.name: r for r in serve.compared(mine, theirs, "peer", "a peer", "c1")}
    assert math.isnan(rows["tokens_per_s_c1@peer"].ratio) and rows["lost_c1@peer"].peer_value == 1


def test_arrivals_and_parts() -> None:
    """Poisson arrivals against a server that is not there: all lost, in about the time they take;
    an unknown part is refused.
    """
    place = serve.placed("http://127.0.0.1:9")
    answers = asyncio.run(serve.load(place, [{"prompt": [1]}] * 20, 1, 200.0, 0))
    assert [answer.status for answer in answers] == [0] * 20
    assert 0.02 < answers[-1].sent - answers[0].sent < 2
    with pytest.raises(ConfigError, match="part"):
        next(serve.run("quick", part="other"))


def test_a_peer_s_server_is_started_by_its_own_interpreter(monkeypatch, tmp_path) -> None:
    """The command line of each: the interpreter once, then its server; a peer that is not installed
    or reads no such file is left out with the reason.
    """

    def interpreter(name: str, folder: Path, threads: int) -> tuple[Path, dict[str, str]]:
        if name == "llama.cpp":
            raise PeerError("llama.cpp is not installed")
        return Path(name, "python"), {"OMP_NUM_THREADS": str(threads)}

    monkeypatch.setattr(serve, "interpreter", interpreter)
    monkeypatch.setattr(serve, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(serve, "searchable", lambda model: (tmp_path, tmp_path / "own.gguf"))
    with pytest.warns(UserWarning, match="no llama.cpp: llama.cpp is not installed"):
        found = serve.peer_commands("own", 4, ["llama.cpp", "vllm"])
    assert [*found] == ["vllm", "vllm-bfloat16"]
    words = [str(word) for word in found["vllm-bfloat16"].words]
    assert words[:3] == ["vllm/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert words[words.index("--dtype") + 1] == "bfloat16" and words[-1] == "--port"
    assert words[words.index("--model") + 1] == str(tmp_path)
    monkeypatch.setattr(serve, "searchable", lambda model: (tmp_path, None))
    with pytest.warns(UserWarning, match="no llama.cpp: own is no .gguf file"):
        assert serve.peer_commands("own", 4, ["llama.cpp"]) == {}
