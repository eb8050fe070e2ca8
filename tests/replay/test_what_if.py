"""One function for every question: memory, shares, policies, models; and what it refuses."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from workbench.engine.engine import Engine
from workbench.engine.memory import block_shape
from workbench.errors import ConfigError, OutOfMemory, RecordingError
from workbench.kvcache.arena import KVArena
from workbench.models.registry import model_spec
from workbench.replay.cost import spec_of
from workbench.replay.devices import load_device
from workbench.replay.simulator import POLICIES, events, recorded_strategy, replay
from workbench.replay.what_if import what_if
from workbench.replay.workload import load_recording
from workbench.search.prm import PRM
from workbench.search.recording import write_recording
from workbench.search.search import run_search

LIMITS = {"max_num_seqs": 16, "max_num_batched_tokens": 256}
BESIDE = "num_blocks beside a memory"


def run_again(recording, llm, prm, **how):
    """The recorded search, by these engines."""
    problems, strategy = [p.problem for p in recording.problems], recorded_strategy(recording)
    return run_search(problems, llm=llm, prm=PRM(prm), strategy=strategy, **how)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_measured_run_over_an_arena_replays_to_the_same_events(measured, policy) -> None:
    """Under every policy, pages that move between the models included."""
    memory, share = "1600KiB", 0.22
    names = ("tiny-solver", "tiny-prm")
    shapes = [block_shape(name, max_model_len=512) for name in names]
    chosen = POLICIES[policy]()
    given = {"kv_share": share} if chosen.keeps_split else {}
    arena = KVArena(memory, shapes, chosen, **given)
    llm, prm = (Engine(name, arena=arena, max_model_len=512, **LIMITS) for name in names)
    result = run_again(measured.recording, llm, prm, min_problem_batch=2)
    asked = {"device": "h100", "kv_memory": memory, "policy": policy}
    found = what_if(measured.answers, **asked, **given)
    steps = events(result.trace.steps)
    assert events(found.trace.steps).equals(steps)
    assert steps["evicted"].sum() > 0, "the run is too easy"


@pytest.mark.parametrize(
    ("search", "engine"),
    [
        ({"request_order": "slot"}, {}),
        ({"request_order": "prefix", "problem_batching": "static"}, {}),
        ({"problem_batching": "adaptive"}, {}),
        ({}, {"reuse_partial_blocks": True}),
        ({"min_problem_batch": 3, "score_cache": False},
         {"num_blocks": 70, "block_size": 8, "max_num_seqs": 5}),
    ],
)  # fmt: skip
def test_what_if_is_what_would_be(measured, search, engine) -> None:
    """A replay equals a measured run that has those settings."""
    blocks = {"num_blocks": 60} | engine
    limits = {"max_model_len": 512, **LIMITS, **blocks}
    pair = (Engine(name, **limits) for name in ("tiny-solver", "tiny-prm"))
    result = run_again(measured.recording, *pair, **{"min_problem_batch": 2} | search)
    found = what_if(measured.answers, device="h100", llm=blocks, prm=blocks, **search)
    assert events(found.trace.steps).equals(events(result.trace.steps))
    plain = {"num_blocks": 60}
    usual = what_if(measured.answers, device="h100", llm=plain, prm=plain)
    assert not events(found.trace.steps).equals(events(usual.trace.steps))


def test_nothing_given_is_the_recorded_run(measured, tmp_path) -> None:
    """From a path, or a recording that is read; what is found can be sent to a process."""
    path = write_recording(measured.recording, tmp_path / "search.parquet")
    for source in (path, measured.recording):
        found = what_if(source, device="a100-40")
        assert events(found.trace.steps).equals(events(measured.trace.steps))
        nodes = measured.trace.nodes.drop(columns="run_id")
        assert found.tree.drop(columns="run_id").equals(nodes)
        assert [part.num_blocks for part in found.memory] == [40, 34]
    answer = pickle.loads(pickle.dumps(found))
    assert answer.throughput == found.throughput


def test_memory_is_divided_by_a_share(measured) -> None:
    """Of everything with weights, or of the KV alone; the recorded share where none is given."""
    llm, prm = measured.recording.llm, measured.recording.prm
    weights, recorded = llm.weight_bytes + prm.weight_bytes, 40 * llm.block_bytes
    recorded += 34 * prm.block_bytes
    for asked, (llm_kv, prm_kv) in (
        ({"total_memory": "48MiB", "llm_share": 0.25},
         ((12 << 20) - llm.weight_bytes, (36 << 20) - prm.weight_bytes)),
        ({"kv_memory": "4MiB", "kv_share": 0.25}, (1 << 20, 3 << 20)),
        ({"kv_memory": 2 * recorded}, (80 * llm.block_bytes, 68 * prm.block_bytes)),
        ({"total_memory": weights + recorded}, (40 * llm.block_bytes, 34 * prm.block_bytes)),
    ):  # fmt: skip
        found = what_if(measured.answers, device="h100", **asked).memory
        blocks = [llm_kv // llm.block_bytes, prm_kv // prm.block_bytes]
        assert [part.num_blocks for part in found] == blocks, asked


def test_other_models_take_other_memory_and_time(measured) -> None:
    """Llama-3.2-1B and an 8B PRM in 40 GiB: the same search, their blocks and their seconds."""
    specs = {"llm_spec": model_spec("llama-3.2-1b"), "prm_spec": model_spec("llama-3.1-8b-prm")}
    where = {"device": "a100-40", "total_memory": "40GiB"} | specs
    large = what_if(measured.answers, llm_share=0.3, **where)
    assert large.memory[0].block_bytes == 16 * 2 * 16 * 8 * 64 * 2
    assert large.memory[1].weight_bytes > 14 * 2**30
    small = what_if(measured.answers, device="a100-40")
    assert large.tree.equals(small.tree)
    assert large.throughput.tokens_per_s < small.throughput.tokens_per_s
    named = {"llm_name": "llama-3.2-1b", "prm_name": "llama-3.1-8b-prm"}
    shared = what_if(measured.answers, policy="first_come", **where, **named)
    assert [part.name for part in shared.memory] == list(named.values())


def test_a_callback_stops_a_replay(measured) -> None:
    """Called after each round with its progress; what it raises ends the replay."""
    seen = []

    def stop(progress) -> None:
        seen.append(progress)
        if progress.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        what_if(measured.answers, device="h100", on_round=stop)
    assert [progress.round for progress in seen] == [1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"device": "h10"}, ConfigError, "Did you mean 'h100'"),
        ({"shares": 0.3}, ConfigError, "no setting 'shares'"),
        ({"forget_pruned": True}, ConfigError, "Replay with forget_pruned=Fa"),
        ({"request_order": "any"}, ConfigError, "request_order is 'any'"),
        ({"llm_share": 0.3}, ConfigError, "give both"),
        ({"kv_memory": 1, "total_memory": 1}, ConfigError, "give one of them"),
        ({"kv_share": 1.5}, ConfigError, r"kv_share is 1.5; allowed: a number"),
        ({"policy": "Fair"}, ConfigError, "policy is 'Fair'; allowed: static, first"),
        ({"total_memory": "1KiB"}, OutOfMemory, "its weights take"),
        ({"kv_memory": "64KiB"}, OutOfMemory, "cannot hold one request"),
        ({"kv_memory": "1KiB"}, OutOfMemory, "whose blocks take"),
        ({"device": None}, ConfigError, "device is None; allowed: a preset's name"),
        ({"llm": [1]}, ConfigError, r"llm is \[1\]; allowed: settings by name"),
        ({"prm_spec": {}}, ConfigError, "prm_spec is {}; allowed: a ModelSpec"),
        ({"kv_memory": "2MiB", "kv_share": 0.3, "policy": "first_come"}, ConfigError,
         "keeps no split"),
        ({"device": "rtx-4090", "kv_memory": "24GiB"}, OutOfMemory, r"RTX 4090 has 24\.0"),
        ({"block_size": 0}, ConfigError, "block_size is 0"),
        ({"kv_memory": "9MiB", "kv_share": 0.3, "llm": {"num_blocks": 99}}, ConfigError, BESIDE),
        ({"block_size": "abc"}, ConfigError, "WhatIf.block_size is 'abc'; allow"),
        ({"min_problem_batch": 2.5}, ConfigError, "min_problem_batch is 2.5"),
        ({"dtype_bytes": 0}, ConfigError, "dtype_bytes is 0"),
        ({"dtype_bytes": 1}, ConfigError, "dtype_bytes alone"),
        ({"policy": "static", "llm": {"num_blocks": 50}}, ConfigError, BESIDE),
    ],
)  # fmt: skip
def test_questions_that_make_no_sense_are_refused(measured, settings, error, said) -> None:
    """By name, with what is allowed."""
    with pytest.raises(error, match=said):
        what_if(measured.answers, **{"device": "h100"} | settings)
    with pytest.raises(ConfigError, match="needs device="):
        what_if(measured.answers)


def test_recorded_memory_must_fit_the_device_too(measured) -> None:
    """Also where no memory is given, and the recorded split is what is replayed."""
    small = replace(load_device("rtx-4090"), memory_bytes=1 << 20)
    with pytest.raises(OutOfMemory, match=r"has 1\.0 MiB"):
        what_if(measured.answers, device=small)


@pytest.mark.parametrize("read", ["max_model_len", "sliding_window"])
def test_a_length_in_which_what_was_sampled_has_no_room_is_refused(read: str) -> None:
    """A shorter node was never sampled: none of its tokens may be counted as if it were. Another
    model reads no more than it can.
    """
    recording = load_recording("tiny-16-n16-self-consistency")
    with pytest.raises(RecordingError, match=r"leaves it \d+. A shorter one was not recorded"):
        what_if(recording, device="a100-40", max_model_len=858)
    short = replace(spec_of(recording.llm), **{read: 858})
    with pytest.raises(RecordingError, match=r"leaves it \d+. A shorter one was not recorded"):
        what_if(recording, device="a100-40", llm_spec=short, llm={"num_blocks": 4000})


@pytest.mark.parametrize("count", [0, -1, 2.5, True])
@pytest.mark.parametrize("name", ["max_rounds", "min_problem_batch"])
def test_a_count_that_is_none_is_refused(measured, name: str, count: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {count}; allowed: whole numbers >= 1"):
        replay(measured.answers, load_device("h100"), **{name: count})
