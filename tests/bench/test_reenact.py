"""Re-enacted searches: real engines compute, and the tree and every event are the recorded ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from workbench.bench import reenact as module
from workbench.bench import replay as benches
from workbench.bench.record import Ceiling
from workbench.bench.reenact import reenact
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.errors import ConfigError
from workbench.replay.answers import Answers
from workbench.replay.devices import PRESETS
from workbench.replay.simulator import events, replay
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.recording import read_recording
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch

LIMITS = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512}
GIB = 1 << 30
FEW = {"llm": {"num_blocks": 48}, "prm": {"num_blocks": 40}}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Answers:
    path = tmp_path_factory.mktemp("recording") / "search.parquet"
    run_search(
        load_problems("tiny", 3, levels=[2]),
        llm=Engine("tiny-solver", num_blocks=400, **LIMITS),
        prm=PRM(Engine("tiny-prm", num_blocks=400, **LIMITS)),
        strategy=BeamSearch(n=4, beam_width=4, max_depth=3),
        record=path,
    )
    return Answers(read_recording(path))


def test_random_weights_re_enact_the_recorded_search(recorded) -> None:
    """Dummy engines give the recorded tree, and step by step the events that a replay foretells."""
    llm = Engine("dummy:tiny-solver", **FEW["llm"], **LIMITS)
    prm = Engine("dummy:tiny-prm", **FEW["prm"], **LIMITS)
    trace, speed = reenact(recorded, llm, prm)
    foretold = replay(recorded, PRESETS["h100"], **FEW)
    columns = ["problem_id", "node_id", "step_tokens", "score"]
    assert trace.nodes[columns].equals(foretold.trace.nodes[columns])
    assert events(trace.steps).equals(events(foretold.trace.steps))
    assert speed.tokens == foretold.throughput.tokens
    assert (trace.steps["duration_s"] > 0).all()
    free = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    assert len(free.token_ids) == 4, "the engine samples for itself again"


def with_settings(answers: Answers, **changes) -> Answers:
    held = answers.recording
    return Answers(replace(held, settings=replace(held.settings, **changes)))


def test_nodes_are_sampled_as_recorded(recorded, monkeypatch) -> None:
    """What a step costs depends on how it samples: top_p, top_k and min_p reach the engine."""
    kept = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.05}
    llm = Engine("dummy:tiny-solver", num_blocks=64, **LIMITS)
    prm = Engine("dummy:tiny-prm", num_blocks=64, **LIMITS)
    add, asked = llm.add, []
    monkeypatch.setattr(
        llm, "add", lambda ids, params, **k: (asked.append(params), add(ids, params, **k))[1]
    )
    reenact(with_settings(recorded, **kept), llm, prm)
    assert asked
    assert all(getattr(params, name) == kept[name] for params in asked for name in kept)


def test_what_cannot_be_re_enacted_is_refused(recorded) -> None:
    """A switch that no recording tells, and a vocabulary that lacks a token: before a run."""
    llm = Engine("dummy:tiny-solver", num_blocks=64, **LIMITS)
    prm = Engine("dummy:tiny-prm", num_blocks=64, **LIMITS)
    with pytest.raises(ConfigError, match="forget_pruned=False"):
        reenact(with_settings(recorded, switches={"forget_pruned": True}), llm, prm)
    held = recorded.recording
    step = replace(held.problems[0].steps[0], tokens=(99_999,))
    problem = replace(held.problems[0], steps=(step, *held.problems[0].steps[1:]))
    foreign = Answers(replace(held, problems=(problem, *held.problems[1:])))
    with pytest.raises(ConfigError, match="token 99999; dummy:tiny-solver knows"):
        reenact(foreign, llm, prm)


@pytest.mark.slow
def test_a_share_s_row_stands_beside_its_roofline(monkeypatch) -> None:
    """The embedded pair at one share: memory by part, both rates, and every event foretold."""
    monkeypatch.setattr(module, "SHARES", (0.3,))
    rows = {row.name: row for row in module.run()}
    row = rows["reenact_030"]
    assert row.ratio == pytest.approx(row.value / row.peer_value)
    assert rows["reenact_events_identical"].value == 1
    assert rows["llm_weights"].value > 0
    assert module.mode_of({"llm": "dummy:tiny-solver", "profile": "quick"})["problems"] == 16


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is foretold."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"device='cuda', and torch .* finds no CUDA device"):
        next(module.run(device="cuda"))


def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own ceilings and memory, not this CPU's."""
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda _: "NVIDIA B999",
        "mem_get_info": lambda _: (60 * GIB, 64 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    rates = {"cuda:1": Ceiling(3e14, 1e12, 3e14)}
    monkeypatch.setattr(benches, "gpu_ceiling", lambda place: rates[str(place)])
    found = benches.this_machine("cuda:1")
    assert (found.name, found.flops_per_s, found.bytes_per_s) == ("NVIDIA B999", 3e14, 1e12)
    assert (found.memory_bytes, found.source) == (
        64 * GIB,
        "measured: a matrix product, a sum over memory",
    )
