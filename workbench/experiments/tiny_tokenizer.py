"""The one tokenizer of both embedded models: byte-level BPE in which every digit is a token.

Signs and "\\n\\n" are tokens of their own, words take the space behind them, any other text falls
back to bytes. The chat template carries the default system message, is shared by both models,
and never closes a turn: the rendering of k + 1 turns begins with the rendering of k, token by
token, which is what PRM scoring over a cached prefix needs.
"""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from workbench.experiments.tiny_corpus import STEP_END, StudentRates, training_solutions

SPECIAL_TOKENS = ("<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>")
BOS, SYSTEM, USER, ASSISTANT, END, PAD = SPECIAL_TOKENS
VOCABULARY_SIZE = 640
TALKATIVE_STUDENT = StudentRates(check=0.06, check_again=0.76, longest_check=10)
"""Fixed here, so that the vocabulary does not change with what the solver is to imitate."""
PIECES = r"\n\n|[0-9+\-=]|[A-Za-z]+ ?|[^A-Za-z0-9+\-=\n]+|\n"
DEFAULT_SYSTEM_MESSAGE = (
    "Work out the sum, one small step at a time. Combine two neighbours, mind the carry, and "
    "write down all that is left. You may also pause and check. End each step with an empty "
    "line. When one number is left, box it. A step is good when what it leaves still has the "
    "value of the whole."
)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages and messages[0]['role'] == 'system' %}"
    "{{ '<|system|>' + messages[0]['content'] }}"
    "{% else %}{{ '<|system|>' + " + json.dumps(DEFAULT_SYSTEM_MESSAGE) + " }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] in ('user', 'assistant') %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(seed: int = 0, solutions: int = 2000) -> Tokenizer:
    """Train the tokenizer on sampled solutions and the system message; equal for equal seeds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    stream = islice(
        training_solutions(range(2, 11), random.Random(seed), (TALKATIVE_STUDENT,)), solutions
    )
    texts = [f"{work.problem} {work.completion}{STEP_END}" for work in stream]
    tokenizer.train_from_iterator([*texts, DEFAULT_SYSTEM_MESSAGE], trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def system_prefix(tokenizer: Tokenizer) -> list[int]:
    """The tokens every prompt begins with: bos, the system mark and the default message."""
    return tokenizer.encode(f"{BOS}{SYSTEM}{DEFAULT_SYSTEM_MESSAGE}").ids
