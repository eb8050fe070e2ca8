"""RLHFlow inputs: rendered by the template, grown step by step, scored by two logits."""

import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment

import workbench
from workbench.errors import ConfigError, ModelError
from workbench.search.arithmetic import draw_terms
from workbench.search.chat_pieces import ChatPieces
from workbench.search.prm import PRM
from workbench.tokenizer import ByteTokenizer, Tokenizer
from workbench.training.corpus import STEP_END, work_out

EMBEDDED = Path(workbench.__file__).parent / "models" / "embedded"

TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "llama": "<|bos|><|system|>26 Jul 2024<|eot|>{% for m in messages %}<|h|>{{ m.role }}<|/h|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}",
    "mistral": "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
}


class Templated(ByteTokenizer):
    """Bytes, with a chat template of one's own."""

    def __init__(self, template):
        self.template = Environment(keep_trailing_newline=True).from_string(template)

    def render_chat(self, messages, add_generation_prompt=True):
        return self.template.render(messages=messages)


def chat(question, steps):
    messages = []
    for number, step in enumerate(steps):
        content = f"{question} {step.strip()}" if number == 0 else step.strip()
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": "+"}]
    return messages


def inputs(prm, question, steps):
    grown = [prm.first_input(question, steps[0])]
    for step in steps[1:]:
        grown.append(prm.next_input(grown[-1], step))
    return grown


@pytest.fixture
def prm_with(fake_engine):
    def make(template):
        engine = fake_engine()
        engine.tokenizer = Templated(TEMPLATES[template])
        return PRM(engine)

    return make


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_input_is_the_rendered_chat_up_to_the_last_verdict(prm_with, template):
    """Pieces put together are what the template writes for the whole chat."""
    prm, steps = prm_with(template), ["one\n\n", " two\n\n", "three"]
    rendered = prm.engine.tokenizer.render_chat(chat("How?", steps))
    expected = rendered[: rendered.rindex("+")]
    assert prm.engine.tokenizer.decode(inputs(prm, "How?", steps)[-1]) == expected


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_longer_input_begins_with_the_shorter_one(prm_with, template):
    """The law that lets a prefix cache serve a growing solution."""
    grown = inputs(prm_with(template), "How?", ["a\n\n", "b + c\n\n", "a\n\n", "d"])
    for shorter, longer in pairwise(grown):
        assert longer[: len(shorter)] == shorter
        assert longer[len(shorter)] == ord("+")


def test_the_embedded_prm_sees_the_chat_it_was_trained_on(fake_engine):
    """Message by message, the tokens are those of the whole chat tokenised at once."""
    engine = fake_engine()
    engine.tokenizer = Tokenizer.from_folder(EMBEDDED / "tiny-prm")
    prm, rng = PRM(engine), random.Random(7)
    for _ in range(20):
        work = work_out(draw_terms(rng.randint(2, 24), rng), rng)
        steps = [step.text + STEP_END for step in work.steps]
        whole = engine.tokenizer.encode_chat(chat(work.problem, steps), add_generation_prompt=False)
        *before, verdict = whole
        assert verdict == prm.columns[0]
        assert inputs(prm, work.problem, steps)[-1].tolist() == before


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}",  # numbers its turns
        "{% for m in messages %}{% if not loop.last %}|{% endif %}{{ m.content }}{% endfor %}",
        "{{ messages[-2].content }}{{ messages[-1].content }}",  # forgets the first turns
    ],
)
def test_a_template_that_rewrites_its_past_is_refused(template):
    """Better than scores at positions that mean something else."""
    with pytest.raises(ModelError, match="chat template"):
        ChatPieces.of(Templated(template))


def test_verdict_columns_are_plus_and_minus(prm_with):
    """Score columns: good first."""
    assert prm_with("plain").columns == (ord("+"), ord("-"))


def test_a_tokenizer_without_plus_is_refused(fake_engine):
    """Two tokens for "+" would have no one logit."""

    class Double(ByteTokenizer):
        def encode(self, text, add_special_tokens=True):
            return [byte for byte in text.encode() for _ in range(2)]

    engine = fake_engine()
    engine.tokenizer = Double()
    with pytest.raises(ModelError, match=r"'\+' as 2 tokens"):
        PRM(engine)


def test_unknown_format_is_named(fake_engine):
    """With the nearest one."""
    with pytest.raises(ConfigError, match="Did you mean 'rlhflow'"):
        PRM(fake_engine(), format="rlhflw")


@given(st.floats(-80, 80, width=32), st.floats(-80, 80, width=32))
def test_scores_are_a_softmax_rounded_to_a_grid(good, bad):
    """Whole multiples of 2^-16, within half a unit of the softmax of the two logits."""
    (score,) = PRM.scores([(good, bad)])
    top = max(good, bad)
    exact = math.exp(good - top) / (math.exp(good - top) + math.exp(bad - top))
    assert (score * 2**16).is_integer()
    assert abs(score - exact) <= 2**-17 + 1e-12
    assert 0 <= score <= 1
