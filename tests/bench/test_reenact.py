"""Re-enacted searches: real engines compute, and the tree and every event are the recorded ones."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from workbench.bench import reenact as module
from workbench.bench.reenact import reenact
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.errors import ConfigError
from workbench.replay.answers import Answers
from workbench.replay.devices import PRESETS
from workbench.replay.simulator import events, replay
from workbench.replay.workload import load_recording

LIMITS = {"num_blocks": 33, "max_num_seqs": 16, "max_num_batched_tokens": 256}  # preempts


@pytest.fixture
def pair() -> list[Engine]:
    return [Engine(f"dummy:tiny-{n}", **LIMITS, max_model_len=512) for n in ("solver", "prm")]


@pytest.fixture(scope="module")
def recorded() -> Answers:
    held = load_recording("tiny-16-n4")
    llm, prm = (replace(engine, max_model_len=512) for engine in (held.llm, held.prm))
    return Answers(replace(held, problems=held.problems[:3], llm=llm, prm=prm))


def test_random_weights_re_enact_the_recorded_search(recorded, pair) -> None:
    """Dummy engines give the recorded tree, and step by step the events that a replay foretells."""
    trace, speed = reenact(recorded, *pair)
    foretold = replay(recorded, PRESETS["h100"], llm=LIMITS, prm=LIMITS)
    columns = ["problem_id", "node_id", "step_tokens", "score"]
    assert trace.nodes[columns].equals(foretold.trace.nodes[columns])
    assert events(trace.steps).equals(events(foretold.trace.steps))
    assert speed.tokens == foretold.throughput.tokens
    assert (trace.steps["duration_s"] > 0).all() and trace.steps["preempted"].any()
    free = pair[0].generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    assert len(free.token_ids) == 4, "the engine samples for itself again"


def with_settings(answers: Answers, **changes) -> Answers:
    held = answers.recording
    return Answers(replace(held, settings=replace(held.settings, **changes)))


def test_nodes_are_sampled_as_recorded(recorded, pair, monkeypatch) -> None:
    """What a step costs depends on how it samples: top_p, top_k and min_p reach the engine."""
    kept = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.05}
    add = Mock(wraps=pair[0].add)
    monkeypatch.setattr(pair[0], "add", add)
    reenact(with_settings(recorded, **kept), *pair)
    asked = [call.args[1] for call in add.call_args_list]
    assert asked and all(getattr(p, name) == kept[name] for p in asked for name in kept)


def test_what_cannot_be_re_enacted_is_refused(recorded, pair) -> None:
    """A switch that no recording tells, and a vocabulary that lacks a token: before a run."""
    with pytest.raises(ConfigError, match="smollm2-135m is none of the search's models, which are"):
        next(module.run("smollm2-135m", "smollm2-135m"))
    with pytest.raises(ConfigError, match="dummy:tiny-solver is none of the search's models"):
        next(module.run(prm="dummy:tiny-solver"))
    with pytest.raises(ConfigError, match="forget_pruned=False"):
        reenact(with_settings(recorded, switches={"forget_pruned": True}), *pair)
    held = recorded.recording
    step = replace(held.problems[0].steps[0], tokens=(99_999,))
    problem = replace(held.problems[0], steps=(step, *held.problems[0].steps[1:]))
    foreign = Answers(replace(held, problems=(problem, *held.problems[1:])))
    with pytest.raises(ConfigError, match="token 99999; dummy:tiny-solver knows"):
        reenact(foreign, *pair)


def test_the_gain_of_a_split_stands_beside_the_foretold_one() -> None:
    """Of shares that are foretold to be equal the slowest is what a choice may give."""
    gain, chosen = module.split_rows([(10.0, 5.0), (20.0, 8.0), (20.0, 7.0)])
    assert (gain.value, gain.peer_value, gain.ratio) == (1.6, 2.0, 0.8)
    assert chosen.value == 7 / 8


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
