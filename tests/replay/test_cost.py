"""Costs of simulated steps: the formulas, the fit, the devices and their files."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from workbench.core import SamplingParams, StepPlan, StepResult
from workbench.engine.engine import Engine
from workbench.engine.executor import Executor
from workbench.errors import ConfigError, RecordingError
from workbench.replay import cost as costs
from workbench.replay.answers import Answers
from workbench.replay.cost import ModelWork, StepCost, StepWork, Terms, fit, work_of
from workbench.replay.devices import PRESETS, Device, load_device, write_device
from workbench.replay.simulator import Costs, MeasuredRun, calibrated, replay
from workbench.trace import Trace

MACHINE = Device("here", 1e11, 1e10, 2**30, "a test")


def test_step_counts_agree_with_the_trace(measured) -> None:
    """Tokens of each plan are the trace's; every decoded token reads its whole context."""
    meters = costs.MeteredCost(), costs.MeteredCost()
    replayed = replay(measured.answers, Costs(*meters))
    for name, meter in zip(("llm", "prm"), meters, strict=True):
        steps = replayed.trace.steps[replayed.trace.steps["engine"] == name]
        computed = steps["prefill_tokens"] + steps["decode_tokens"]
        assert [work.tokens for work in meter] == computed.tolist()
        assert all(work.keys >= work.tokens for work in meter)
    decodes = [w for w in meters[0] if w.tokens == w.sequences == w.sampled]
    assert decodes
    assert all(work.keys == work.context for work in decodes)


def test_work_of_a_step_is_the_sum_over_its_sequences(measured) -> None:
    """Operations follow ModelSpec.flops, sequence by sequence; bytes count weights once."""
    model = ModelWork.of(measured.recording.llm)
    parts = [(5, 0, 1), (1, 30, 1), (7, 12, 0)]  # new tokens, context before, logits
    keys = sum(n * c + n * (n + 1) // 2 for n, c, _ in parts)
    context = sum(n + c for n, c, _ in parts)
    work = StepWork(13, 3, keys, 2, 2, context, 13, keys, 0)
    assert model.flops(work) == sum(model.spec.flops(*part) for part in parts)
    assert model.bytes(work) == model.weight_bytes + model.kv_bytes_per_token * (13 + context)
    spec = costs.spec_of(measured.recording.llm)
    assert model.kv_bytes_per_token == spec.kv_bytes_per_token(4)


@pytest.mark.parametrize("name", ["tiny-solver", "tiny-prm"])
def test_operations_are_those_that_torch_counts(measured, monkeypatch, name) -> None:
    """Of an engine on plain torch, whose attention also multiplies what is masked: every step."""
    seen: list[tuple[StepPlan, int]] = []
    in_place = {torch.ops.aten.addmm_: lambda _, x, matrix, **__: 2 * math.prod(x) * matrix[1]}
    run = Executor._run

    def counted(self: Executor, plan: StepPlan) -> StepResult:
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            result = run(self, plan)
        seen.append((plan, counter.get_total_flops()))
        return result

    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 128}
    torch_alone = {"dtype": "bfloat16", "batch_invariant": False}
    engine = Engine(name, num_blocks=64, **torch_alone, **limits)
    monkeypatch.setattr(Executor, "_run", counted)
    prompts = [list(range(5, 5 + length)) for length in (70, 9, 33)]
    if name == "tiny-solver":
        engine.generate(prompts, SamplingParams(max_tokens=3, temperature=0))
    else:
        for prompt in prompts:
            engine.add_score(prompt, [len(prompt) - 3, len(prompt) - 1], [11, 12])
        engine.add_score([*range(3, 12)], [*range(2, 8)], [11])  # more than max_num_seqs
        while engine.has_work:
            engine.step()
    model = ModelWork(engine.spec, 1, 1)
    asked_of = [work_of(plan, limits["max_num_seqs"]).asked for plan, _ in seen]
    assert 0 in asked_of  # a chunk within a prompt
    assert name != "tiny-prm" or max(asked_of) > limits["max_num_seqs"]  # the whole last layer
    for plan, flops in seen:
        work, new = work_of(plan, limits["max_num_seqs"]), np.diff(plan.query_start)
        asked = np.concatenate([plan.sampling.rows, *(wanted.rows for wanted in plan.wanted)])
        owners = np.searchsorted(plan.query_start, asked, side="right") - 1
        asked_keys = int(plan.context_len[owners].sum())
        if plan.num_tokens == plan.num_seqs:
            asked_keys = int(plan.context_len.sum())
        elif len(set(asked)) > limits["max_num_seqs"]:
            asked_keys = int(new @ plan.context_len)
        masked = work._replace(keys=int(new @ plan.context_len), asked_keys=asked_keys)
        assert model.flops(masked) == flops


def test_a_decode_is_bound_by_bytes_and_a_prefill_by_operations(measured) -> None:
    """Of a thesis-size model on an A100: the roofline's two sides."""
    spec = replace(costs.spec_of(measured.recording.llm), layers=16, hidden=2048, intermediate=8192)
    model = ModelWork(spec, spec.weight_bytes(2), spec.kv_bytes_per_token(2))
    device = PRESETS["a100-80"]
    cost = StepCost(model, device)
    decode = StepWork(1, 1, 500, 1, 1, 500, 1, 500, 0)
    prefill = StepWork(4096, 1, 8_000_000, 1, 1, 4096, 1, 4096, 0)
    assert cost(decode) == pytest.approx(model.bytes(decode) / device.bytes_per_s)
    assert cost(prefill) == pytest.approx(model.flops(prefill) / device.flops_per_s)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 5), min_size=6, max_size=6), st.integers(0, 2**32 - 1))
def test_a_fit_finds_the_terms_that_made_the_times(measured, factors, seed) -> None:
    """Durations made from known terms, some of them zero, are explained to the last digits."""
    draw = np.random.default_rng(seed)
    works = [StepWork(*draw.integers(1, 500, 9).tolist()) for _ in range(40)]
    scale = (1.0, 1e-3, 1e-6, 1e-5, 1e-8, 1e-6)
    kept = [f * s if f > 0.5 else 0.0 for f, s in zip(factors, scale, strict=True)]
    model = ModelWork.of(measured.recording.llm)
    made = StepCost(model, MACHINE, Terms(*kept))
    seconds = [made(work) + 1e-9 for work in works]
    found = StepCost(model, MACHINE, fit(model, MACHINE, works, seconds))
    assert [found(work) for work in works] == pytest.approx(seconds, rel=1e-4)


def test_a_fit_keeps_the_total_whatever_held_steps_up(measured) -> None:
    """Some steps took thirty times as long as their equals: the sum is still the measured sum."""
    draw = np.random.default_rng(5)
    works = [StepWork(*draw.integers(1, 500, 9).tolist()) for _ in range(300)]
    model = ModelWork.of(measured.recording.llm)
    made = StepCost(model, MACHINE, Terms(1.0, step=1e-3, token=1e-5))
    held_up = np.where(draw.random(300) < 0.1, 30.0, 1.0)
    seconds = [made(work) * late for work, late in zip(works, held_up, strict=True)]
    found = StepCost(model, MACHINE, fit(model, MACHINE, works, seconds))
    assert sum(map(found, works)) == pytest.approx(sum(seconds), rel=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_least_squares_without_negative_factors_is_the_best(seed) -> None:
    """The optimum's conditions hold: no factor below 0, and no step downhill stays allowed."""
    draw = np.random.default_rng(seed)
    table, wanted = draw.normal(size=(12, 4)), draw.normal(size=12)
    found = costs.non_negative_least_squares(table, wanted)
    slope = table.T @ (table @ found - wanted)
    assert (found >= 0).all()
    assert (slope >= -1e-8).all()
    assert np.abs(slope * found).max() < 1e-8


def test_terms_of_a_device_are_used(measured, tmp_path) -> None:
    """A device that knows a model's terms, read back from its file, makes time by them."""
    terms = {"tiny-solver": asdict(Terms(0, step=0.5)), "tiny-prm": asdict(Terms(0, step=0.25))}
    device = replace(MACHINE, terms=terms | {"request": {"seconds": 2.0}})
    device = load_device(write_device(device, tmp_path / "here.json"))
    assert all(load_device(name).source for name in PRESETS)
    replayed = replay(measured.answers, device)
    counts = replayed.trace.steps["engine"].value_counts()
    wall = 0.5 * counts["llm"] + 0.25 * counts["prm"] + 2 * len(replayed.trace.requests)
    assert replayed.throughput.wall_s == pytest.approx(wall)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps(asdict(MACHINE) | change), said)
        for change, said in (
            ({"flops_per_s": None}, "flops_per_s is None; allowed: a number > 0"),
            ({"bytes_per_s": "fast"}, "bytes_per_s is 'fast'"),
            ({"memory_bytes": True}, "memory_bytes is True"),
            ({"flops_per_s": float("nan")}, "flops_per_s is nan"),
            ({"speed": 3}, "has no setting 'speed'"),
            ({"terms": {"tiny-solver": {"step": -1.0}}}, "Term step of tiny-solver is -1.0"),
            ({"terms": 4}, "has terms 4; give an object"),
        )
    ]
    + [('{"name": "a"}', "lacks flops_per_s"), ("[1]", "holds a list"), ("{", "cannot be read")],
)
def test_files_that_are_no_device_are_refused(tmp_path, text, said) -> None:
    """What is missing or no number is named, with what is allowed."""
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_device(tmp_path / "a.json")


def test_unknown_devices_and_terms_are_refused(tmp_path) -> None:
    for name, said in ((tmp_path / "none.json", "cannot be read"), ("h1000", "you mean 'h100'")):
        with pytest.raises(ConfigError, match=said):
            load_device(name)
    odd = replace(MACHINE, terms={"tiny-solver": {"steps": 1.0}})
    with pytest.raises(ConfigError, match=r"on 'here' has no setting 'steps'. Did you mean 'step'"):
        Terms.on(odd, "tiny-solver")


def test_nothing_is_fitted_to_nothing(measured) -> None:
    """No step, or one that took no time, is no measurement; an engine without shapes has none."""
    model = ModelWork.of(measured.recording.llm)
    work = StepWork(1, 1, 1, 1, 1, 1, 1, 1, 1)
    for works, seconds in (([], []), ([work], [0.0]), ([work], [1.0, 2.0])):
        with pytest.raises(ConfigError, match="give as many, at least one, each above 0"):
            fit(model, MACHINE, works, seconds)
    with pytest.raises(RecordingError, match="does not hold the spec of tiny-solver"):
        ModelWork.of(replace(measured.recording.llm, spec=None))


def test_known_terms_come_back_from_a_replayed_trace(measured) -> None:
    """Of two runs, for other settings; and a measured run takes as long as it was measured to."""
    terms = {"tiny-solver": {"step": 1e-3, "token": 1e-5}, "tiny-prm": {"roofline": 2.0}}
    made = Device("made", 1e11, 1e10, 2**30, "a test", terms | {"request": {"seconds": 1e-4}})
    roomy = {"num_blocks": 300}
    runs = [
        MeasuredRun(measured.answers, replay(measured.answers, made).trace),
        MeasuredRun(measured.answers, replay(measured.answers, made, llm=roomy).trace, roomy),
    ]
    found = calibrated(MACHINE, runs)
    other = {"prm": {"num_blocks": 200}, "llm": {"max_num_seqs": 5}, "min_problem_batch": 3}
    walls = [replay(measured.answers, d, **other).throughput.wall_s for d in (found, made)]
    assert walls[0] == pytest.approx(walls[1], rel=5e-3)
    device = calibrated(MACHINE, [MeasuredRun(measured.answers, measured.trace)])
    wall = measured.trace.steps["duration_s"].sum() + measured.trace.spans["duration_s"].sum()
    found = replay(measured.answers, device).throughput.wall_s
    assert found == pytest.approx(wall, rel=0.01)


def test_one_model_in_both_roles_has_one_fit(measured) -> None:
    """Of the steps of both: the PRM's, as long as 50 of the LLM's, do not stand for all."""
    own = measured.recording
    twice = replace(own, prm=replace(own.prm, name=own.llm.name, spec=own.llm.spec))
    answers = Answers(twice)
    trace = replay(answers, MACHINE).trace
    trace.steps["duration_s"] = np.where(trace.steps["engine"] == "llm", 0.01, 0.5)
    found = calibrated(MACHINE, [MeasuredRun(answers, trace)])
    assert found.is_fitted_to(own.llm.name) and not found.is_fitted_to(own.llm.name, "another")
    ratio = replay(answers, found).throughput.wall_s / trace.steps["duration_s"].sum()
    assert 0.5 < ratio < 2


def test_traces_of_other_runs_are_refused(measured) -> None:
    """Steps that differ in number or in what they did fit no recording; no run fits nothing."""
    trace = measured.trace
    short = Trace(trace.steps.iloc[:-1], trace.requests, trace.nodes, trace.spans)
    with pytest.raises(RecordingError, match="give the trace of the same search"):
        calibrated(MACHINE, [MeasuredRun(measured.answers, short)])
    with pytest.raises(RecordingError, match="the same settings"):
        calibrated(MACHINE, [MeasuredRun(measured.answers, trace, {"num_blocks": 100})])
    with pytest.raises(ConfigError, match="no run"):
        calibrated(MACHINE, [])
    other = replace(measured.recording, llm=replace(measured.recording.llm, name="another"))
    runs = [MeasuredRun(each, trace) for each in (measured.answers, Answers(other))]
    with pytest.raises(ConfigError, match="have no terms in common"):
        calibrated(MACHINE, runs)
