"""Replays against measured runs: the same tree and, settings being equal, the same events."""

from dataclasses import replace

import pytest

from workbench.core import SamplingParams, Tag
from workbench.engine.engine import Engine
from workbench.errors import ConfigError, OutOfMemory, RecordingError
from workbench.replay.answers import Answers, RecordedPRM, RecordedScores
from workbench.replay.simulator import Costs, events, replay, settings_of
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.recording import read_recording
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch, BestOfN
from workbench.search.variants import Lookahead, ParticleFilter

FREE = Costs(lambda _: 0.001, lambda _: 0.002)
BEAMS = BeamSearch(n=4, beam_width=2, max_depth=3)
UNCACHED = {"enable_prefix_caching": False}


def without_times(requests):
    times = [c for c in requests.columns if c.endswith("_s")]
    return requests.drop(columns=["run_id", *times])


def test_a_replay_is_the_measured_run(measured) -> None:
    """Every count of every step of both engines, every node, every request with its fate."""
    replayed = replay(measured.answers, FREE).trace
    steps = events(measured.trace.steps)
    assert events(replayed.steps).equals(steps)
    for name in ("hit_tokens", "evicted", "thrashed", "preempted", "recomputed_tokens_evicted"):
        assert steps[name].sum() > 0, f"the run is too easy: nothing {name}"
    nodes = measured.trace.nodes.drop(columns="run_id")
    assert replayed.nodes.drop(columns="run_id").equals(nodes)
    assert without_times(replayed.requests).equals(without_times(measured.trace.requests))


def test_other_settings_change_events_and_not_the_tree(measured) -> None:
    """Memory, limits, block size, batch and score cache may change: the search stays the same."""
    nodes = measured.trace.nodes.drop(columns="run_id")
    for changes in (
        {"llm": {"num_blocks": 500}, "prm": {"num_blocks": 500}},
        {"llm": {"block_size": 8}, "prm": {"block_size": 32}},
        {"llm": {"max_num_seqs": 3, "max_num_batched_tokens": 32}},
        {"prm": {"enable_prefix_caching": False}},
        {"min_problem_batch": 3},
        {"score_cache": False},
    ):
        replayed = replay(measured.answers, FREE, **changes)
        found = replayed.trace.nodes.drop(columns="run_id")
        order = ["problem_id", "path"]
        assert found.sort_values(order).equals(nodes.sort_values(order)), changes
        assert not events(replayed.trace.steps).equals(events(measured.trace.steps)), changes
        replayed.llm.cache.check()
        assert replayed.llm.cache.num_active == replayed.prm.cache.num_active == 0


@pytest.mark.parametrize(
    ("level", "strategy", "limits"),
    [
        (1, BestOfN(n=4, max_tokens=80), {"num_blocks": 40, "max_num_seqs": 3}),
        (2, BEAMS, UNCACHED | {"batching": "static", "max_num_seqs": 4}),
        (2, BEAMS, UNCACHED | {"use_kv_cache": False}),
        (2, Lookahead(n=4, beam_width=2, max_depth=3), {"num_blocks": 60}),
        (2, ParticleFilter(n=4, max_depth=4), {"num_blocks": 60}),
    ],
    ids=["one-shot completions", "static batches", "no cache", "unequal depths", "draws"],
)
def test_other_searches_replay(level, strategy, limits, tmp_path) -> None:
    """Several pieces a node, padded batches, other strategies: the same events and requests."""
    path = tmp_path / "search.parquet"
    llm, prm = (Engine(f"tiny-{n}", max_model_len=256, **limits) for n in ("solver", "prm"))
    how = {"strategy": strategy, "max_step_tokens": 40, "record": path}
    result = run_search(load_problems("tiny", 1, levels=[level]), llm=llm, prm=PRM(prm), **how)
    replayed = replay(read_recording(path), FREE).trace
    assert events(replayed.steps).equals(events(result.trace.steps))
    assert without_times(replayed.requests).equals(without_times(result.trace.requests))


def test_simulated_time_is_the_cost(measured) -> None:
    """Steps last what they cost, one after the other, and nothing else takes time unless said."""
    replayed = replay(measured.answers, FREE)
    steps = replayed.trace.steps
    lasts = steps["engine"].map({"llm": 0.001, "prm": 0.002})
    assert steps["duration_s"].to_numpy() == pytest.approx(lasts.to_numpy())
    assert replayed.throughput.wall_s == pytest.approx(lasts.sum())
    slower = replay(measured.answers, Costs(lambda _: 0.001, lambda _: 0.002, 0.5))
    outside = slower.throughput.wall_s - replayed.throughput.wall_s
    assert slower.trace.spans["duration_s"].sum() == pytest.approx(outside)


def test_no_block_is_hashed_twice(measured, monkeypatch) -> None:
    """Replaying again, or with other memory, hashes nothing; another block size hashes once."""
    from workbench.kvcache import manager

    answers = Answers(measured.recording)
    hashed = []

    def counting(content=b""):
        hashed.append(content)
        return sha256(content)

    sha256 = manager.sha256
    monkeypatch.setattr(manager, "sha256", counting)
    replay(answers, FREE)
    blocks = [content for content in hashed if len(content) == 32 + 4 * 16]
    nodes = sum(len(p.steps) + len(p.solutions) + 1 for p in measured.recording.problems)
    assert len(blocks) <= len(set(blocks)) + nodes  # siblings with equal texts are two entries
    hashed.clear()
    replay(answers, FREE, llm={"num_blocks": 60})
    assert len([content for content in hashed if len(content) > 64]) == 0


def test_changes_that_cannot_be_made_are_refused(measured) -> None:
    """Unknown settings, wrong types, too few blocks: named errors, as the engines give them."""
    for changes, error, said in (
        ({"num_block": 50}, ConfigError, "Did you mean 'num_blocks'"),
        ({"num_blocks": "many"}, ConfigError, "num_blocks is 'many'"),
        ({"block_size": 0}, ConfigError, "block_size is 0"),
        ({"block_size": "abc"}, ConfigError, "block_size is 'abc'; allowed: a whole number"),
        ({"num_blocks": 3}, OutOfMemory, "3 KV blocks of 16 tokens cannot hold"),
    ):
        with pytest.raises(error, match=said):
            replay(measured.answers, FREE, llm=changes)
    unsized = replace(measured.recording.llm, num_blocks=None), measured.recording.prm
    with pytest.raises(ConfigError, match="or they changed in the search; give num_blocks"):
        replay(measured.answers, FREE, models=unsized, llm={"block_size": 8})
    assert settings_of(unsized[0], {"num_blocks": 50}).num_blocks == 50
    with pytest.raises(ConfigError, match="min_problem_batch is 0"):
        replay(measured.answers, FREE, min_problem_batch=0)


def test_what_was_not_recorded_is_refused(measured) -> None:
    """A wider search, a node nobody sampled: RecordingError says what to do."""
    with pytest.raises(RecordingError, match="has no tokens of node"):
        replay(measured.answers, FREE, strategy=BeamSearch(n=16, beam_width=4))
    engine = replay(measured.answers, FREE).llm
    with pytest.raises(RecordingError, match="node '9/9'"):
        engine.add([1, 2], SamplingParams(), tag=Tag("nobody", "9/9"))
    first = measured.recording.problems[0]
    scores = RecordedScores(RecordedPRM(None, measured.recording), first, measured.answers, None)
    said = f"no score of 1 steps of problem {first.problem.id!r}"
    with pytest.raises(RecordingError, match=said):
        scores.has_room(("Nobody said this.",))
    settings = settings_of(measured.recording.llm, {"block_size": 8})
    assert settings.num_blocks == 80, "the memory stays when the block size changes"
