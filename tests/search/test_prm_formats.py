"""Each PRM format writes what its model was trained on, step by step, and is found by its model."""

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import Environment

from tests.search.prm_tokenizers import mistral_like, qwen_like, save
from workbench.errors import ConfigError, ModelError
from workbench.models.registry import EMBEDDED
from workbench.search.prm import ARCHITECTURES, FORMATS, NAMES, PRM, Qwen25MathPRM, known_format
from workbench.search.problems import draw_terms
from workbench.search.strategies import STEP_END
from workbench.tokenizer import ByteTokenizer, Tokenizer
from workbench.training.corpus import work_out

TOKENIZERS = {
    "rlhflow": qwen_like,
    "qwen2.5-math-prm": qwen_like,
    "skywork": qwen_like,
    "math-shepherd": mistral_like,
    "thinkprm": qwen_like,
}
BOS = {"skywork": "<|endoftext|>", "math-shepherd": "<s>"}
STEPS = ["Step 1: 2 + 3 = 5.\n\n", " Step 2: so it is\n5.", "Step 1: 2 + 3 = 5.", "=-+"]
TEXTS = st.text("St 1+-=\n.", min_size=1, max_size=9).filter(str.strip)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    """The tokenizer of each format."""
    found = {}
    for name, make in TOKENIZERS.items():
        folder = tmp_path_factory.mktemp("tokenizer")
        save(make(), folder, BOS.get(name))
        found[name] = Tokenizer.from_folder(folder)
    return found


@pytest.fixture
def prm_of(fake_engine, tokenizers):
    """A PRM over a fake engine with a head as the format wants it."""

    def make(name: str, tokenizer=None) -> PRM:
        engine = fake_engine()
        engine.tokenizer = tokenizer or tokenizers[name]
        engine.value_outputs = FORMATS[name].value_outputs
        return PRM(engine, format=name)

    return make


def inputs(prm: PRM, question: str, steps: list[str]) -> list[list[int]]:
    """The input of 1, 2, ... steps."""
    grown = [prm.first_input(question, steps[0])]
    for step in steps[1:]:
        grown.append(prm.next_input(grown[-1], step))
    return [ids.tolist() for ids in grown]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(TEXTS, min_size=2, max_size=5), other=TEXTS)
def test_the_law_of_growing_inputs(prm_of, name, steps, other):
    """k + 1 steps begin with k steps, whatever the last one is; a step's tokens are its own."""
    prm = prm_of(name)
    grown = inputs(prm, "What is 2 + 3?", steps)
    for shorter, longer in pairwise(grown):
        assert longer[: len(shorter)] == shorter
    changed = inputs(prm, "What is 2 + 3?", [*steps[:-1], other])
    assert changed[:-1] == grown[:-1]
    again = inputs(prm, "Another?", [other, *steps[1:]])
    added = [longer[len(shorter) :] for shorter, longer in pairwise(grown)]
    assert added == [longer[len(shorter) :] for shorter, longer in pairwise(again)]


@pytest.mark.parametrize(
    ("name", "mark", "columns"),
    [("qwen2.5-math-prm", "<extra_0>", (1, 0)), ("math-shepherd", "ки", None)],
)
def test_the_input_is_the_model_card_text_cut_at_each_mark(prm_of, tokenizers, name, mark, columns):
    """The whole tokenised, with <extra_0> or "ки" after each step; a good verdict comes first."""
    tokenizer, steps = tokenizers[name], [step.strip() for step in STEPS]
    if name == "math-shepherd":
        text = "What is 2 + 3? " + " ки\n".join(steps) + " ки"
        bos = tokenizer.encode("<s>", add_special_tokens=False)[-1:]
        whole, columns = [*bos, *tokenizer.encode(text)], tuple(tokenizer.encode("+ -"))
    else:
        texts = {"system": Qwen25MathPRM.system, "user": "What is 2 + 3?"}
        texts["assistant"] = "<extra_0>".join(steps) + "<extra_0>"
        chat = [{"role": role, "content": text} for role, text in texts.items()]
        whole = tokenizer.encode_chat(chat, add_generation_prompt=False)
    (mark,) = tokenizer.encode(mark)
    ends = [k + 1 for k, token in enumerate(whole) if token == mark]
    prm = prm_of(name)
    assert inputs(prm, "What is 2 + 3?", STEPS) == [whole[:end] for end in ends]
    assert prm.columns == columns


def test_skywork_is_the_published_preparation(prm_of, tokenizers):
    """Begin-of-sequence, problem and newline in one; each step alone, then the newline's token."""
    encode = tokenizers["skywork"].encode
    expected, ids = [], encode("<|endoftext|>What is 2 + 3?\n")
    for step in STEPS:
        ids = ids + encode(step.strip()) + [encode("\n")[-1]]
        expected.append(ids)
    assert inputs(prm_of("skywork"), "What is 2 + 3?", STEPS) == expected


def test_a_tokenizer_without_the_marks_is_refused(prm_of):
    """A mark of several tokens would have no one logit."""
    with pytest.raises(ModelError, match="'<extra_0>' as 9 tokens"):
        prm_of("qwen2.5-math-prm", ByteTokenizer())
    with pytest.raises(ModelError, match=r"'\+ -' as 3 tokens"):
        prm_of("math-shepherd", ByteTokenizer())


def test_a_template_that_drops_the_answer_is_refused_before_a_search(prm_of, tokenizers):
    """Not at the first solution, after the LLM has sampled."""
    own = tokenizers["qwen2.5-math-prm"]
    lossy = SimpleNamespace(encode=own.encode, bos_id=own.bos_id, render_chat=lambda *_, **__: "q")
    with pytest.raises(ModelError, match="drops the assistant's message"):
        prm_of("qwen2.5-math-prm", lossy)


def test_formats_are_known_by_architecture_or_name():
    """Only the model's own name counts, not the folders above it."""
    for model, architecture, expected in (
        ("tiny-prm", "LlamaForCausalLM", "rlhflow"),
        ("dummy:llama-3.1-8b-prm", "LlamaForCausalLM", "rlhflow"),
        ("RLHFlow/Llama3.1-8B-PRM-Deepseek-Data", "LlamaForCausalLM", "rlhflow"),
        ("peiyi9979/math-shepherd-mistral-7b-prm", "MistralForCausalLM", "math-shepherd"),
        ("anything", "Qwen2ForProcessRewardModel", "qwen2.5-math-prm"),
        ("/models/skywork", "Qwen2ForPrmModel", "skywork"),
        ("smollm2-135m", "LlamaForCausalLM", None),
        ("math-shepherd/models/smollm2-135m", "LlamaForCausalLM", None),
    ):
        assert known_format(model, architecture) == expected
    assert set(ARCHITECTURES.values()) | set(NAMES.values()) == set(FORMATS)


def test_a_format_that_cannot_be_told_or_is_for_another_head_is_refused(fake_engine):
    """A language model has no labels, a value head no "+"; what is supported is listed."""
    engine = fake_engine()
    engine.name = "smollm2-135m"
    with pytest.raises(ConfigError, match="Did you mean 'rlhflow'"):
        PRM(engine, format="rlhflw")
    with pytest.raises(ConfigError, match=f"cannot be told .*supported: {', '.join(FORMATS)}"):
        PRM(engine)
    assert PRM(engine, format="rlhflow").format == "rlhflow"
    with pytest.raises(ConfigError, match=r"'skywork' reads a value head of 1 .* vocabulary"):
        PRM(engine, format="skywork")
    engine.value_outputs = 2
    with pytest.raises(ConfigError, match=r"'rlhflow' reads a vocabulary's .* 2 outputs"):
        PRM(engine, format="rlhflow")


# -- RLHFlow: rendered by the model's own chat template --

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


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_input_is_the_rendered_chat_up_to_the_last_verdict(prm_of, template):
    """Of one step and of more: pieces put together are what the template writes for the chat."""
    prm = prm_of("rlhflow", Templated(TEMPLATES[template]))
    steps = ["one\n\n", " two\n\n", "b + c\n\n", "three"]
    for count, ids in enumerate(inputs(prm, "How?", steps), 1):
        rendered = prm.engine.tokenizer.render_chat(chat("How?", steps[:count]))
        assert prm.engine.tokenizer.decode(ids) == rendered[: rendered.rindex("+")]
    assert prm.columns == (ord("+"), ord("-"))


def test_the_embedded_prm_sees_the_chat_it_was_trained_on(prm_of):
    """Message by message, the tokens are those of the whole chat tokenised at once."""
    tokenizer, rng = Tokenizer.from_folder(EMBEDDED / "tiny-prm"), random.Random(7)
    prm = prm_of("rlhflow", tokenizer)
    for _ in range(20):
        work = work_out(draw_terms(rng.randint(2, 24), rng), rng)
        steps = [step.text + STEP_END for step in work.steps]
        whole = tokenizer.encode_chat(chat(work.problem, steps), add_generation_prompt=False)
        *before, verdict = whole
        assert verdict == prm.columns[0]
        assert inputs(prm, work.problem, steps)[-1] == before


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}",  # numbers its turns
        "{% for m in messages %}{% if not loop.last %}|{% endif %}{{ m.content }}{% endfor %}",
        "{{ messages[-2].content }}{{ messages[-1].content }}",  # forgets the first turns
    ],
)
def test_a_template_that_rewrites_its_past_is_refused(prm_of, template):
    """Better than scores at positions that mean something else."""
    with pytest.raises(ModelError, match="chat template"):
        prm_of("rlhflow", Templated(template))
