"""Worked solutions of the tiny family with slips and true labels, and the tokenizer for them.

A step merges the first two terms and restates what is left; now and then it only checks, and
restates without progress. The student often forgets a carry, always in the same direction, so
wrong answers agree with each other and a majority vote is no way out; rarer slips scatter. After
a slip the solution goes on consistently from the wrong rest. A step is labelled right when it makes
progress and what it leaves has the value of the problem: a verifier that praised mere restating
would have a search restate for ever.

The tokenizer of both embedded models is byte-level BPE in which every digit is a token. Signs and
"\\n\\n" are tokens of their own, words take the space behind them, any other text falls back to
bytes. Its chat template carries the default system message and never closes a turn: the rendering
of k + 1 turns begins with the rendering of k, which is what PRM scoring over a cached prefix needs.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from workbench.search.problems import Terms, draw_terms, format_terms, is_held_out, problem_text
from workbench.search.strategies import STEP_END

MERGE_WORDINGS = (
    "take {pair}={result}, left {rest}",
    "now {pair}={result}, giving {rest}",
    "next {pair}={result}, so {rest}",
    "do {pair}={result}, then {rest}",
    "put {pair}={result}, which leaves {rest}",
    "use {pair}={result}, rest {rest}",
)
CHECK_WORDINGS = ("check {rest}", "again {rest}", "still {rest}")
_CHECKING = tuple(wording.split(" ")[0] for wording in CHECK_WORDINGS)
VERBOSE_WORDING = "slowly {pair}: {work}, hence {pair}={result}, left {rest}"
ANSWER_WORDING = "The answer is \\boxed{{{answer}}}."

_REST = re.compile(r"(?:^|\s)(-?\d+(?:[+-]\d+)*)$")
_ANSWER = re.compile(r"\\boxed\{(-?\d+)\}")
_TERM = re.compile(r"[+-]?\d+")


@dataclass(frozen=True, slots=True)
class StudentRates:
    """How often the student does what; probabilities per opportunity."""

    dropped_carry: float = 0.42
    scattered_slip: float = 0.01
    verbose: float = 0.3
    check: float = 0.06
    check_again: float = 0.2
    longest_check: int = 12  # terms left at most when a check begins, so its text stays short


@dataclass(frozen=True, slots=True)
class WorkedStep:
    """One step: its text without STEP_END, the terms it leaves, whether it is labelled right.

    The last step leaves its answer as the only term.
    """

    text: str
    left: Terms
    correct: bool
    kind: str
    slipped: bool = False


@dataclass(frozen=True, slots=True)
class WorkedSolution:
    """A problem and its steps."""

    problem: str
    terms: Terms
    steps: tuple[WorkedStep, ...]

    @property
    def completion(self) -> str:
        """What the LLM is trained to write; every step but the last ends in STEP_END."""
        return STEP_END.join(step.text for step in self.steps)


STUDENT = StudentRates()
DISTRACTED_STUDENT = StudentRates(dropped_carry=0.15, scattered_slip=0.1)


def work_out(terms: Terms, rng: random.Random, rates: StudentRates = STUDENT) -> WorkedSolution:
    """One sampled solution of a chain, slips and labels included."""
    truth, left, steps = sum(terms), terms, []
    checking = False
    while len(left) > 1:
        if checking:
            checking = rng.random() < rates.check_again
        else:
            checking = len(left) <= rates.longest_check and rng.random() < rates.check
        if checking:
            text = rng.choice(CHECK_WORDINGS).format(rest=format_terms(left))
            steps.append(WorkedStep(text, left, correct=False, kind="check"))
        else:
            steps.append(_merge_step(left, truth, rng, rates))
            left = steps[-1].left
    answer = ANSWER_WORDING.format(answer=left[0])
    steps.append(WorkedStep(answer, left, left[0] == truth, "answer"))
    return WorkedSolution(problem_text(terms), terms, tuple(steps))


def _merge_step(left: Terms, truth: int, rng: random.Random, rates: StudentRates) -> WorkedStep:
    """The first pair merged: choosing among several made a model of this size miscopy."""
    first, second, *others = left
    dropped = has_carry(first, second) and rng.random() < rates.dropped_carry
    result, rest = first + second - 10 * dropped, tuple(others)
    verbose = max(abs(first), abs(second)) >= 10 and rng.random() < rates.verbose
    slipped = dropped
    if rng.random() < rates.scattered_slip:
        slipped = True
        result, rest = _slip(result, rest, first - second, rng)
    after = (result, *rest)
    fields = {"pair": format_terms((first, second)), "result": result, "rest": format_terms(after)}
    work = _spelled_out(first, second, dropped) if verbose else ""
    wording = VERBOSE_WORDING if work else rng.choice(MERGE_WORDINGS)
    text = wording.format(work=work, **fields)
    kind = "verbose" if work else "merge"
    return WorkedStep(text, after, sum(after) == truth, kind, slipped)


def has_carry(first: int, second: int) -> bool:
    """Whether a carry can be forgotten here: two positive terms whose ones reach ten."""
    return first > 0 and second > 0 and first % 10 + second % 10 >= 10


def _slip(result: int, rest: Terms, difference: int, rng: random.Random) -> tuple[int, Terms]:
    """A rare slip: a wrong result, or (where there is another term) one of the others miscopied."""
    one, misread = rng.choice((-1, 1)), rng.choice((-1, 1)) * rng.randint(2, 9)
    if rest and rng.random() < 0.35:
        index = rng.randrange(len(rest))
        term = rest[index]
        wrong = rng.choice(((term + one,), (term + misread,), (-term,), ()))
        return result, (*rest[:index], *wrong, *rest[index + 1 :])
    results = (result + one, result + 10 * one, difference, result + misread)
    return rng.choices(results, (0.5, 0.15, 0.2, 0.15))[0], rest


def _spelled_out(first: int, second: int, dropped: bool) -> str:
    """The working of a sum of two positive numbers, or of taking a two-digit number away."""
    if first > 0 and second > 0:
        ones, carried = first % 10 + second % 10, has_carry(first, second) and not dropped
        tens = first // 10 + second // 10 + carried
        carry = "+1" if carried else ""
        ones_work = f"ones {first % 10}+{second % 10}={ones}"
        return f"{ones_work}, tens {first // 10}+{second // 10}{carry}={tens}"
    if first > 0 and second <= -10:
        round_part = -(-second // 10) * 10
        halfway = first + round_part
        return f"{first}{round_part}={halfway}, {halfway}-{-second % 10}={first + second}"
    return ""


def training_solutions(
    operations: Sequence[int], rng: random.Random, rates: Sequence[StudentRates] = (STUDENT,)
) -> Iterator[WorkedSolution]:
    """An endless stream of worked solutions; a held-out problem is never among them."""
    while True:
        terms = draw_terms(rng.choice(operations), rng)
        if not is_held_out(problem_text(terms)):
            yield work_out(terms, rng, rng.choice(rates))


def value_left(step: str) -> int | None:
    """The value of what a step's text leaves (or answers); None where nothing can be read."""
    found = _ANSWER.search(step) or _REST.search(step.strip())
    return sum(map(int, _TERM.findall(found.group(1)))) if found else None


def is_right(step: str, answer: int) -> bool:
    """The true label of a step, by its text: it makes progress, and leaves the answer."""
    return not step.strip().startswith(_CHECKING) and value_left(step) == answer


SPECIAL_TOKENS = ("<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>")
BOS, SYSTEM, USER, ASSISTANT, END, PAD = SPECIAL_TOKENS
VOCABULARY_SIZE = 640
# Fixed here, so that the vocabulary does not change with what the solver is to imitate.
TALKATIVE_STUDENT = StudentRates(check=0.06, check_again=0.76, longest_check=10)
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
