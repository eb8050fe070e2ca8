"""Re-enacted searches: real engines compute, and the tree and every event are the recorded ones."""

from dataclasses import replace

import pytest

from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.errors import ConfigError
from workbench.experiments.reenact import reenact
from workbench.replay.answers import Answers
from workbench.replay.devices import PRESETS
from workbench.replay.simulator import events, replay
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.recording import read_recording
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch

LIMITS = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512}
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
    found, foretold = reenact(recorded, llm, prm), replay(recorded, PRESETS["h100"], **FEW)
    columns = ["problem_id", "node_id", "step_tokens", "score"]
    assert found.trace.nodes[columns].equals(foretold.trace.nodes[columns])
    assert events(found.trace.steps).equals(events(foretold.trace.steps))
    assert found.throughput.tokens == foretold.throughput.tokens
    assert (found.trace.steps["duration_s"] > 0).all()
    free = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    assert len(free.token_ids) == 4, "the engine samples for itself again"


def with_settings(answers: Answers, **changes) -> Answers:
    held = answers.recording
    return Answers(replace(held, settings=replace(held.settings, **changes)))


def test_recorded_switches_are_re_enacted(recorded) -> None:
    """A recording's order of requests is the re-enactment's: its events are the replay's."""
    answers = with_settings(recorded, switches={"request_order": "prefix"}, min_problem_batch=3)
    foretold = events(replay(answers, PRESETS["h100"], **FEW).trace.steps)
    llm = Engine("dummy:tiny-solver", **FEW["llm"], **LIMITS)
    prm = Engine("dummy:tiny-prm", **FEW["prm"], **LIMITS)
    assert events(reenact(answers, llm, prm).trace.steps).equals(foretold)
    changed = reenact(answers, llm, prm, switches={"request_order": "path"})
    assert not events(changed.trace.steps).equals(foretold), "the switch does something here"


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


def test_a_switch_that_no_recording_tells_is_refused(recorded) -> None:
    """Nothing is dropped in silence: forget_pruned is named, and can be asked off."""
    answers = with_settings(recorded, switches={"forget_pruned": True}, min_problem_batch=2)
    llm = Engine("dummy:tiny-solver", num_blocks=64, **LIMITS)
    prm = Engine("dummy:tiny-prm", num_blocks=64, **LIMITS)
    with pytest.raises(ConfigError, match="forget_pruned=False"):
        reenact(answers, llm, prm)
    assert reenact(answers, llm, prm, switches={"forget_pruned": False}).throughput.tokens > 0


def test_a_recording_that_does_not_fit_is_refused(recorded) -> None:
    """Shorter requests than recorded, or a vocabulary that lacks a token: named before a run."""
    short = {**LIMITS, "max_model_len": 256}
    engine = Engine("dummy:tiny-solver", num_blocks=64, **LIMITS)
    with pytest.raises(ConfigError, match="max_model_len 256"):
        reenact(recorded, Engine("dummy:tiny-solver", num_blocks=64, **short), engine)
    held = recorded.recording
    step = replace(held.problems[0].steps[0], tokens=(99_999,))
    problem = replace(held.problems[0], steps=(step, *held.problems[0].steps[1:]))
    foreign = Answers(replace(held, problems=(problem, *held.problems[1:])))
    with pytest.raises(ConfigError, match="token 99999; dummy:tiny-solver knows"):
        reenact(foreign, engine, engine)
