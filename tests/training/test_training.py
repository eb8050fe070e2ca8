"""Guards the training set-up: template laws, targets in place, a widening that loses nothing."""

import random
from itertools import islice, pairwise

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from workbench import PRM, BestOfN, Engine, load_problems, run_search
from workbench.errors import ConfigError
from workbench.search.prm import ScoreCache
from workbench.tokenizer import Tokenizer
from workbench.training import corpus
from workbench.training.card import sampled_steps
from workbench.training.corpus import build_tokenizer, system_prefix, training_solutions
from workbench.training.training import IGNORED, prm_example, solver_example, train_tiny, widened


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(solutions=300)


@pytest.fixture(scope="module")
def chat(tokenizer, root) -> Tokenizer:
    corpus.save_tokenizer(tokenizer, root)
    return Tokenizer.from_folder(root)


def test_digits_signs_and_step_ends_are_single_tokens_and_any_text_comes_back(tokenizer):
    for text in [*"0123456789", "+", "-", "\n\n"]:
        assert len(tokenizer.encode(text).ids) == 1
    strange = "Größe: \\frac{1}{2}\n\n\n x \t\u2713 12-3"
    assert tokenizer.decode(tokenizer.encode(strange).ids) == strange


def test_a_longer_chat_begins_with_the_shorter_one(tokenizer, chat):
    """And every chat with the default system message, which fills eight blocks."""
    assert len(system_prefix(tokenizer)) >= 128
    ids = chat.encode_chat([{"role": "user", "content": "Compute 1+2."}])
    prompt = tokenizer.encode(f"{corpus.USER}Compute 1+2.{corpus.ASSISTANT}").ids
    assert ids == system_prefix(tokenizer) + prompt
    steps = ["Compute 1+2-3. take 1+2=3, left 3-3", "do 3-3=0, then 0", "The answer is 0."]
    turns = [({"role": "user", "content": step}, {"role": "assistant", "content": "+"})
             for step in steps]  # fmt: skip
    renderings = [
        chat.encode_chat([message for turn in turns[:count] for message in turn], False)
        for count in (1, 2, 3)
    ]
    for shorter, longer in pairwise(renderings):
        assert longer[: len(shorter)] == shorter


def test_the_solver_learns_its_completion_and_nothing_of_the_prompt(tokenizer):
    work = next(training_solutions([4], random.Random(0)))
    example = solver_example(work, tokenizer, system_prefix(tokenizer))
    learnt = [target for target in example.targets if target != IGNORED]
    assert tokenizer.decode(learnt, skip_special_tokens=False) == f"{work.completion}{corpus.END}"
    for position, target in enumerate(example.targets[:-1]):
        assert target in (IGNORED, example.ids[position + 1])


def test_the_prm_reads_plus_in_the_history_and_is_asked_for_the_true_label(tokenizer):
    rng = random.Random(1)
    good, bad = tokenizer.token_to_id("+"), tokenizer.token_to_id("-")
    for work in islice(training_solutions(range(2, 9), rng), 60):
        example = prm_example(work, tokenizer, [], rng)
        labels = [step.correct for step in work.steps][: len(example.verdicts)]
        assert [example.targets[place] for place in example.verdicts] == [
            good if label else bad for label in labels
        ]
        assert all(example.ids[place + 1] == good for place in example.verdicts)
        for step, before, place in zip(work.steps[1:], example.verdicts, example.verdicts[1:]):
            text = example.targets[before + 2 : place]
            assert not step.slipped or set(text) == {IGNORED}  # never learnt as text
        for position, target in enumerate(example.targets[:-1]):
            if position not in example.verdicts:
                assert target in (IGNORED, example.ids[position + 1])


def test_a_widened_model_computes_nearly_what_the_narrow_one_does():
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "head_dim": 8, "vocab_size": 64, "rms_norm_eps": 1e-5,
             "tie_word_embeddings": True}  # fmt: skip
    narrow = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=1,
        initializer_range=0.2, **shape))  # fmt: skip
    wide = widened(narrow, transformers.LlamaConfig(
        hidden_size=72, intermediate_size=96, num_attention_heads=12, num_key_value_heads=4,
        initializer_range=0.002, **shape))  # fmt: skip
    ids = torch.randint(0, 64, (2, 20))
    with torch.no_grad():
        expected, got = narrow(ids).logits, wide(ids).logits
    assert (got - expected).abs().max() < 0.02 * expected.abs().max()


def test_an_unknown_model_or_a_missing_solver_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="tiny-poet"):
        train_tiny(tmp_path, 1.0, models=("tiny-poet",))
    with pytest.raises(ConfigError, match="train both"):
        train_tiny(tmp_path, 1.0, models=("tiny-prm",))


def test_the_card_reads_the_score_of_every_step_from_the_search_s_cache():
    """By the cache's own key; none found would leave its AUC without a step."""
    llm, judge = (Engine(name, num_blocks=400) for name in ("tiny-solver", "tiny-prm"))
    prm, cache = PRM(judge), ScoreCache()
    given = {"llm": llm, "prm": prm, "score_cache": cache}
    samples = run_search(load_problems("tiny", 2), strategy=BestOfN(n=2), **given)
    steps = [*sampled_steps(samples, llm, prm, cache)]
    assert len(steps) >= 4 and all(0 <= step["score"] <= 1 for step in steps)
