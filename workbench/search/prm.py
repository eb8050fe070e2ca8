"""The process reward model: a scoring engine and the format in which it is asked.

The format follows from the model: from its architecture where that has a value head, else from its
name, since a language model's config does not say how it was trained to judge; or it is given.
The law of every format: the input of k + 1 steps, up to step k's position, is the input of k steps,
so a prefix cache serves a growing solution, and only a new step is ever tokenised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from workbench.core import TokenEngine
from workbench.errors import ConfigError, nearest
from workbench.search.prm_formats import FORMATS, TokenIds

ARCHITECTURES = {
    "Qwen2ForProcessRewardModel": "qwen2.5-math-prm",
    "Qwen2ForPrmModel": "skywork",
}
"""Formats of reward models that their architecture tells."""

NAMES = {
    "tiny-prm": "rlhflow",
    "llama-3.1-8b-prm": "rlhflow",
    "llama3.1-8b-prm": "rlhflow",
    "rlhflow": "rlhflow",
    "math-shepherd": "math-shepherd",
}
"""Formats of language models by a part of their names, in lower case."""

SCORE_UNIT = 2**16
"""Scores are whole multiples of 1 / SCORE_UNIT, so that beams with equal texts tie exactly."""


def known_format(name: str, architecture: str) -> str | None:
    """The format of a model, by its architecture or by its name; None when neither tells it."""
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    tail = "/".join(name.lower().rstrip("/").split("/")[-2:])  # owner/name, or a folder's end
    return next((format for part, format in NAMES.items() if part in tail), None)


class PRM:
    """A scoring engine together with its format; shared by any number of searches.

    format: None takes the one that fits the model. Raises ConfigError for a format that is unknown,
    cannot be told, or is not for this model's head; ModelError where tokenizer or chat template
    cannot express it.
    """

    def __init__(self, engine: TokenEngine, format: str | None = None) -> None:
        self.engine = engine
        self.format = _chosen(engine, format)
        self.fingerprint = f"{engine.fingerprint}/{self.format}"
        self._inputs = FORMATS[self.format](engine.tokenizer)
        self.columns = self._inputs.columns

    def first_input(self, question: str, step: str) -> TokenIds:
        """Token ids of a solution with one step; its verdict is read at the last position."""
        return self._inputs.first(question, step.strip())

    def next_input(self, token_ids: TokenIds, step: str) -> TokenIds:
        """Token ids of the solution `token_ids` with one more step; they are its beginning."""
        return self._inputs.next(token_ids, step.strip())

    def fits(self, token_ids: TokenIds) -> bool:
        """Whether the engine takes a scoring request of this length."""
        return len(token_ids) < self.engine.max_model_len

    @staticmethod
    def scores(logits: Iterable[Iterable[float]]) -> Iterator[float]:
        """A probability for each row, rounded to 2^-16.

        A row of two logits is (good, bad), and its softmax taken; of a lone value the sigmoid,
        which is the softmax of it and 0.
        """
        for good, *bad in logits:
            difference = min(max(float(bad[0] if bad else 0.0) - float(good), -700.0), 700.0)
            yield round(SCORE_UNIT / (1.0 + math.exp(difference))) / SCORE_UNIT


def _chosen(engine: TokenEngine, given: str | None) -> str:
    """The format given, or the known one; ConfigError lists the supported ones."""
    supported = f"supported: {', '.join(FORMATS)}"
    name = given or known_format(engine.name, engine.architecture)
    if name is None:
        raise ConfigError(
            f"The PRM format of {engine.name} ({engine.architecture}) cannot be told from its name "
            f"or architecture; {supported}. Give one: PRM(engine, format=...), or "
            "`workbench run --prm-format`."
        )
    if name not in FORMATS:
        raise ConfigError(f"PRM format is {name!r}; {supported}.{nearest(name, tuple(FORMATS))}")
    wanted = FORMATS[name].value_outputs
    if wanted != engine.value_outputs:
        raise ConfigError(
            f"PRM format {name!r} reads {_head(wanted)}; {engine.name} ({engine.architecture}) "
            f"has {_head(engine.value_outputs)}; {supported}."
        )
    return name


def _head(outputs: int | None) -> str:
    return "a vocabulary's logits" if outputs is None else f"a value head of {outputs} outputs"
