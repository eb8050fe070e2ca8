"""Training examples of the embedded models: token ids, what to learn at each, where verdicts are.

The solver imitates whole completions; the PRM sees the RLHFlow chat of a solution, learns its text
and, after each step, the true label. Plain lists and the tokenizer, no torch: train_tiny has that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from tokenizers import Tokenizer

from workbench.experiments.tiny_corpus import (
    DISTRACTED_STUDENT,
    STEP_END,
    STUDENT,
    WorkedSolution,
    training_solutions,
)
from workbench.experiments.tiny_tokenizer import ASSISTANT, END, USER, system_prefix

IGNORED = -100
SHORT_OPERATIONS = tuple(range(2, 9))
TRAINED_OPERATIONS = (*range(2, 7), *range(4, 15), *range(7, 29))
LONG, EXCERPT_SHARE = 10, 0.75
"""Of solutions with more steps than LONG this share is learnt from its first few steps only."""


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, the id each position should predict (or IGNORED), and which are verdicts."""

    ids: list[int]
    targets: list[int]
    verdicts: list[int]


def solver_example(work: WorkedSolution, tokenizer: Tokenizer, prefix: list[int]) -> Example:
    """The chat prompt and the student's completion, which alone is learnt."""
    prompt = prefix + tokenizer.encode(f"{USER}{work.problem}{ASSISTANT}").ids
    close = END if work.steps[-1].kind == "answer" else STEP_END
    completion = tokenizer.encode(f"{work.completion}{close}").ids
    ids = prompt + completion
    return Example(ids, [IGNORED] * (len(prompt) - 1) + completion + [IGNORED], [])


def prm_example(
    work: WorkedSolution, tokenizer: Tokenizer, prefix: list[int], rng: random.Random
) -> Example:
    """The RLHFlow chat of a solution: the history always says "+", the targets the true labels.

    The text of every step that holds no slip is learnt. Most wrong solutions are cut some steps
    after their first wrong one.
    """
    texts = [work.problem + " " + work.steps[0].text, *(step.text for step in work.steps[1:])]
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    user, assistant, good, bad = (
        tokenizer.encode(mark).ids[0] for mark in (USER, ASSISTANT, "+", "-")
    )
    ids, targets, verdicts = list(prefix), [IGNORED] * len(prefix), []
    question = len(tokenizer.encode(work.problem + " ").ids)
    steps_after_error = 999 if rng.random() < 0.3 else rng.choice((0, 1, 2, 4, 8))
    for index, (step, text) in enumerate(zip(work.steps, encoded, strict=True)):
        ids += [user, *text, assistant, good]
        given = question if index == 0 else 0
        learnt = [IGNORED] * len(text) if step.slipped else [IGNORED] * given + text[given:]
        targets += [*learnt, IGNORED]
        verdicts.append(len(targets))
        targets += [good if step.correct else bad, IGNORED]
        steps_after_error -= not step.correct
        if steps_after_error < 0:
            break
    return Example(ids, targets, verdicts)


def without_prefix(example: Example, length: int) -> Example:
    """The same example without its first `length` tokens, which hold no target."""
    verdicts = [position - length for position in example.verdicts]
    return Example(example.ids[length:], example.targets[length:], verdicts)


def examples(
    name: str, tokenizer: Tokenizer, seed: int, operations: Sequence[int] = TRAINED_OPERATIONS
) -> Iterator[Example]:
    """The endless training stream of one model."""
    rng, prefix = random.Random(f"{name}-{seed}"), system_prefix(tokenizer)
    rates = (STUDENT,) if name == "tiny-solver" else (STUDENT, DISTRACTED_STUDENT)
    for work in training_solutions(operations, rng, rates):
        if len(work.steps) > LONG and rng.random() < EXCERPT_SHARE:
            work = replace(work, steps=work.steps[: rng.randint(4, LONG)])
        if name == "tiny-solver":
            yield solver_example(work, tokenizer, prefix)
        else:
            yield prm_example(work, tokenizer, prefix, rng)


def batches(
    stream: Iterator[Example], tokens: int, rng: random.Random, pool: int = 256
) -> Iterator[list[Example]]:
    """Batches of about `tokens` tokens of examples of like length, in random order."""
    while True:
        ready = sorted(islice(stream, pool), key=lambda example: len(example.ids))
        groups: list[list[Example]] = [[]]
        for example in ready:
            if groups[-1] and len(example.ids) * (len(groups[-1]) + 1) > tokens:
                groups.append([])
            groups[-1].append(example)
        rng.shuffle(groups)
        yield from groups
