"""The engine as a user holds it: outputs, streaming, aborts, failures, errors with a remedy."""

import numpy as np
import pytest

from workbench.core import SamplingParams, Tag
from workbench.engine.engine import Engine
from workbench.engine.memory import block_shape
from workbench.errors import ConfigError, ModelError, OutOfMemory, PromptError, StepError
from workbench.kvcache.arena import KVArena

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
CHAT = [{"role": "user", "content": "Compute 7-3+12+9."}]


@pytest.fixture(scope="module")
def engine():
    return Engine("tiny-solver", num_blocks=256, max_num_seqs=16, max_num_batched_tokens=256)


@pytest.fixture
def prompt(engine):
    return engine.tokenizer.encode_chat(CHAT)


def test_text_is_all_that_was_sampled_but_the_end_of_sequence(engine, prompt):
    """A stop string ends it and stays in it; streamed pieces are the same text."""
    params = SamplingParams(temperature=0.0, max_tokens=400)
    out = engine.generate([prompt], params)[0]
    assert out.finish_reason == "eos" and out.token_ids[-1] in engine.tokenizer.eos_ids
    assert out.text == engine.tokenizer.decode(out.token_ids[:-1])
    assert "".join(engine.stream(prompt, params)) == out.text
    out = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=200, stop="\n\n"))[0]
    assert out.finish_reason == "stop" and out.text.endswith("\n\n")
    assert out.text.count("\n\n") == 1


def test_max_tokens_and_max_model_len_end_with_length(engine, prompt):
    ignoring = SamplingParams(temperature=0.0, max_tokens=10_000, ignore_eos=True)
    five = engine.generate([prompt], SamplingParams(max_tokens=5, ignore_eos=True))[0]
    assert (len(five.token_ids), five.finish_reason) == (5, "length")
    out = engine.generate([prompt], ignoring)[0]
    assert out.finish_reason == "length"
    assert len(prompt) + len(out.token_ids) == engine.max_model_len


def test_generate_loses_no_other_request_and_an_aborted_one_never_answers(engine, prompt):
    mine = engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=2))
    engine.generate([prompt], GREEDY)
    assert engine.has_work and [o.request_id for o in engine.step()] == [mine]
    request_id = engine.add(prompt, GREEDY)
    engine.step()
    engine.abort(request_id)
    engine.abort(request_id)
    assert engine.step() == [] and engine.cache.num_active == 0 and not engine.has_work
    engine.cache.check()


def test_the_trace_has_a_row_a_step_and_a_row_a_request(prompt):
    engine = Engine("tiny-solver", num_blocks=256)
    out = engine.generate([prompt] * 3, GREEDY)
    engine.add(prompt, GREEDY, tag=Tag("p", "n"))
    while engine.has_work:
        engine.step()
    steps, requests = engine.trace.steps, engine.trace.requests
    total = steps.blocks_active + steps.blocks_cached + steps.blocks_free
    assert (total == steps.blocks_total).all() and (steps.duration_s > 0).all()
    assert len(requests) == 4 and requests.problem_id.tolist() == ["", "", "", "p"]
    assert requests.output_tokens.tolist() == [len(o.token_ids) for o in out] + [24]
    assert requests.cached_tokens.tolist()[1:] == [160, 160, 160]


@pytest.mark.parametrize(
    ("settings", "error", "complaint"),
    [
        ({"model": "tiny-solvr"}, ModelError, "tiny-solver"),
        ({"block_sise": 8}, ConfigError, "block_size"),
        ({"batching": "static"}, ConfigError, "enable_prefix_caching"),
        ({"num_blocks": 4}, OutOfMemory, "max_model_len"),
        ({"memory": "1MiB"}, OutOfMemory, "bytes are missing"),
        ({"max_model_len": 4096}, ConfigError, "2048"),
        ({"max_num_batched_tokens": 10**13}, OutOfMemory, "no room for a step of the largest size"),
    ],
)
def test_an_engine_that_cannot_be_built_says_why(settings, error, complaint):
    with pytest.raises(ConfigError, match="arena_name='llm' and no arena; give both or neither"):
        Engine("tiny-solver", arena_name="llm")
    with pytest.raises(error, match=complaint):
        Engine(**{"model": "tiny-solver"} | settings)


def test_weights_of_another_model_are_refused(engine):
    with pytest.raises(ConfigError, match=r"model='tiny-prm' and weights loaded with model='ti"):
        Engine("tiny-prm", weights=engine.weights)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"params": SamplingParams(stop_token_ids=(10**11,))}, "Stop id 100000000000 is not in"),
        ({"params": None}, "give SamplingParams"),
        ({"prompt": [1.5, 2.0]}, "token ids are .1.5, 2.0.; allowed: whole numbers"),
        ({"prompt": 7}, "token ids are 7"),
        ({"prompt": b"3+4"}, "give text, or a list of token ids"),
        ({"prompt": []}, "empty"),
        ({"prompt": [0] * 2048}, "2047"),
        ({"prompt": [0, 10**6]}, "vocabulary"),
        ({"prompt": [-1]}, "vocabulary"),
        ({"prompt": "a\ud800"}, "at character 1, half of a surrogate pair"),
        ({"tag": "p"}, "a Tag or None"),
        ({"salt": "text"}, "and bytes"),
    ],
)
def test_a_bad_request_changes_nothing_and_the_next_one_is_served(engine, prompt, given, complaint):
    """Refused before anything is queued: an engine is not lost to one request."""
    expected = engine.generate([prompt], GREEDY)[0].token_ids
    with pytest.raises(PromptError, match=complaint):
        engine.add(**{"prompt": prompt, "params": GREEDY} | given)
    assert not engine.has_work
    assert engine.generate([prompt], GREEDY)[0].token_ids == expected


@pytest.mark.parametrize(
    ("positions", "columns", "complaint"),
    [
        ([1], [], "no column"),
        ([], [1], "empty"),
        ([1.5], [1], "positions are"),
        ([2, 1], [1], "ascending"),
        ([1], ["a"], "columns are"),
        ([1], [10**9], "Column 1000000000 is not in"),
    ],
)
def test_a_bad_scoring_request_is_refused_by_name(engine, prompt, positions, columns, complaint):
    with pytest.raises(PromptError, match=complaint):
        engine.score(prompt, positions, columns)
    assert not engine.has_work
    assert engine.score(prompt, [3], [1]).logits.shape == (1, 1)


def test_logits_that_are_not_finite_end_the_step_and_name_the_requests(engine, prompt, monkeypatch):
    """Nothing is sampled from NaN; the error says whose row it was, for tokens and for scores."""
    forward = engine.executor.model.forward

    def damaged(*arguments):
        hidden = forward(*arguments)
        hidden[-1] = float("nan")
        return hidden

    few = prompt[:5]
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor.model, "forward", damaged)
        for ask in (lambda: engine.add(few, GREEDY), lambda: engine.add_score(few, [1, 4], [2])):
            ids = [ask(), ask()]
            outputs = engine.step()
            assert [output.request_id for output in outputs] == ids
            assert all(isinstance(output.error, StepError) for output in outputs)
            assert f"At fault: request {ids[1]}." in str(outputs[0].error)
    engine.cache.check()


def test_what_is_no_list_of_prompts_with_params_is_refused(engine):
    """A single text, a number, no params, too many params."""
    for asked in (("1+1", GREEDY), (3, GREEDY), ([[1]], None), ([[1]], [GREEDY] * 2)):
        with pytest.raises(PromptError, match="list of prompts, and one SamplingParams or as many"):
            engine.generate(*asked)
    assert not engine.has_work


# -- partial blocks reused: fewer tokens are computed, and every token is the same --

REUSE = {"num_blocks": 64, "reuse_partial_blocks": True}


def test_of_a_text_scored_again_the_last_token_alone_is_computed():
    """Its logits are wanted; they have the same bits as when all of the text was computed."""
    engine = Engine("tiny-prm", **REUSE, max_model_len=768)
    text = engine.tokenizer.encode("What is 12 + 30? Answer in steps.")
    assert len(text) % 16 > 2, "the last block is to be partly filled"
    last = len(text) - 1
    first = engine.score(text, [last], [5, 6]).logits
    again = [engine.add_score(text, [last], [5, 6]) for _ in range(4)]
    outputs = engine.step()
    assert sorted(output.request_id for output in outputs) == again
    assert all(np.array_equal(output.logits, first) for output in outputs)
    assert all(output.num_cached_tokens == last for output in outputs)
    assert engine.trace.steps["prefill_tokens"].iloc[-1] == 4
    earlier = engine.score(text, [last - 1, last], [5, 6])
    assert earlier.num_cached_tokens == last - 1, "the first wanted position is computed again"
    llm = Engine("tiny-solver", **REUSE, max_model_len=768)
    params = SamplingParams(max_tokens=21, ignore_eos=True)
    whole = [*text, *llm.generate([text], params)[0].token_ids]
    found = llm.generate([whole], params)[0]
    assert found.num_cached_tokens == len(whole) - 1, "all but the last, which was only sampled"


def test_what_is_no_request_id_is_refused_and_the_engine_goes_on() -> None:
    """A list in an id's place, as `abort(ids)` would be."""
    engine = Engine("tiny-solver", num_blocks=64, max_model_len=256)
    number = engine.add([1, 2, 3], SamplingParams(max_tokens=4))
    with pytest.raises(TypeError):
        engine.abort([number])
    engine.abort(number)
    assert not engine.has_work and engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))


def test_an_engine_that_an_arena_refuses_leaves_it_as_it_was() -> None:
    arena = KVArena("4MiB", [block_shape("tiny-solver", max_model_len=256)])
    with pytest.raises(ConfigError, match="the arena was made for"):
        Engine("tiny-solver", arena=arena, block_size=32, max_model_len=256)
    step = {"max_num_batched_tokens": 10**13}
    with pytest.raises(OutOfMemory, match="no room for a step of the largest size"):
        Engine("tiny-solver", arena=arena, max_model_len=256, **step)
    Engine("tiny-solver", arena=arena, max_model_len=256, reuse_partial_blocks=True)
    for asked, said in (({"block_size": 0}, "block_size"), ({"max_model_len": 10**6}, "exceeds"),
                        ({"device": "gpu"}, "device is 'gpu'")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            block_shape("tiny-solver", **asked)
