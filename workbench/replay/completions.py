"""A recording made of published completions: what beam search kept, and what it must have dropped.

HuggingFaceH4's sets hold, for each problem, the n final beams (`completions`) with the scores of
their steps (`scores`), and nothing of what was pruned. Final beams are cut at blank lines and laid
into a trie; siblings that were pruned are modelled: as long as the problem's known steps, scored
below every step that was kept, and going on until all final beams are out. A final beam that finds
no place among the survivors of this package's beam search is left out. Columns as search-and-learn
writes them (Beeching, Tunstall and Rush 2024). What it does not do: fetch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import RecordingError
from workbench.replay.growth import Asked, DrawnStep, grow
from workbench.replay.thesis_pair import (
    MAX_MODEL_LEN,
    PRM_BETWEEN,
    PRM_HEAD,
    PRM_VERDICT,
    drawn_tokens,
    prm_template,
    prompt_of,
    recording_of,
)
from workbench.search.problems import Problem
from workbench.search.recording import RecordedProblem, Recording
from workbench.search.requests import STEP_END, Beam, Path
from workbench.search.strategies import BeamSearch

COLUMNS = ("problem", "completions", "scores")
Tokenize = Callable[[str], Sequence[int]]
Row = Mapping[str, Any]


def from_completions(
    rows: Iterable[Row],
    tokenize: Tokenize,
    *,
    beam_width: int = 4,
    max_depth: int = 40,
    seed: int = 0,
) -> Recording:
    """A search of the 1B + 8B pair whose kept beams are these. tokenize: of the generator.

    rows: of the data set; problem, completions (texts) and scores (a list a completion) are read,
    and unique_id, level and answer where there are any. All rows have as many completions: that is
    n. Raises RecordingError naming row and column.
    """
    given = list(rows)
    if not given:
        raise RecordingError("There are no completions; give one row or more.")
    for number, row in enumerate(given):
        _require(number, row)
    counts = {len(row["completions"]) for row in given}
    if len(counts) > 1:
        raise RecordingError(
            f"Rows have {', '.join(map(str, sorted(counts)))} completions; give rows of one n."
        )
    strategy = BeamSearch(counts.pop(), beam_width, max_depth)
    problems = [_grown(number, row, tokenize, strategy, seed) for number, row in enumerate(given)]
    return recording_of(problems, strategy, seed)


def _require(number: int, row: Row) -> None:
    for name in COLUMNS:
        if name not in row:
            known = ", ".join(map(str, row))
            raise RecordingError(f"Row {number} has no {name!r}; it has {known}.")
    texts, scores = row["completions"], row["scores"]
    if not len(texts) or len(texts) != len(scores):
        raise RecordingError(
            f"Row {number} has {len(texts)} completions and {len(scores)} lists of scores; give "
            "one list for each, at least one."
        )
    for place, text in enumerate(texts):
        if not _steps(text):
            raise RecordingError(f"Row {number}: Completion {place} is empty.")


def _steps(text: str) -> list[str]:
    """A completion's steps, each with the blank line that ends it."""
    pieces = [piece for piece in text.split(STEP_END) if piece.strip()]
    return [piece + STEP_END for piece in pieces[:-1]] + pieces[-1:]


@dataclass(slots=True)
class _Known:
    """A step of a final beam. following: by text. score: the published one; ending: beams that do
    here.
    """

    score: float = 0.0
    ending: int = 0
    following: dict[str, _Known] = field(default_factory=dict)


def _trie(row: Row) -> _Known:
    """The final beams, steps of equal beginnings as one; a score that lacks is the last one's."""
    root = _Known(score=0.5)
    for text, scores in zip(row["completions"], row["scores"], strict=True):
        node = root
        for place, step in enumerate(_steps(text)):
            score = float(scores[min(place, len(scores) - 1)]) if len(scores) else node.score
            node = node.following.setdefault(step, _Known(score))
        node.ending += 1
    return root


def _grown(
    number: int, row: Row, tokenize: Tokenize, strategy: BeamSearch, seed: int
) -> RecordedProblem:
    name = str(row.get("unique_id", number))
    own = tuple(int(token) for token in tokenize(row["problem"]))
    level = row.get("level")
    answer = None if row.get("answer") is None else str(row["answer"])
    problem = Problem(name, row["problem"], answer, None if level is None else int(level))
    draws = _Published(_trie(row), tokenize, f"{seed}/{name}", len(own))
    return grow(Asked(problem, prompt_of(own), own), prm_template(), strategy, draws)


class _Published:
    """Steps of one problem: the final beams' where there are any left, else modelled ones."""

    def __init__(self, root: _Known, tokenize: Tokenize, name: str, problem_tokens: int) -> None:
        self._tokenize, self._name = tokenize, name
        self._at: dict[Path, _Known | None] = {(): root}
        self._lengths = [len(tokenize(step)) for step in _all_steps(root)]
        self._least = min(_all_scores(root))
        self._left = _ends(root)  # final beams that are not out yet
        around = PRM_HEAD + PRM_VERDICT + problem_tokens
        self._room = MAX_MODEL_LEN - around - 256

    def __call__(self, beams: Sequence[Beam]) -> list[DrawnStep]:
        found = {beam.path: self._published(beam.path) for beam in beams}
        if not any(found.values()):
            self._left = 0  # what is left found no place among the survivors
        return [found[beam.path] or self._modelled(beam) for beam in beams]

    def _published(self, path: Path) -> DrawnStep | None:
        """The k-th child of a step takes its k-th continuation; equal beams come last."""
        parent, ordinal = self._at[path[:-1]], path[-1]
        known = _continuations(parent) if parent is not None else []
        self._at[path] = known[ordinal][1] if ordinal < len(known) else None
        if ordinal >= len(known):
            return None
        text, node = known[ordinal]
        tokens = tuple(int(token) for token in self._tokenize(text))
        ends = not node.following
        self._left -= ends
        return DrawnStep(tokens, text, min(max(node.score, 0.0), 1.0), ends)

    def _modelled(self, beam: Beam) -> DrawnStep:
        """A step nobody published: pruned, so it scores less than any that was kept.

        It ends its solution once all final beams are out, or where there is no room for another.
        """
        draws = random.Random(f"{self._name}/{beam.path}")
        used = len(beam.token_ids) + len(beam.steps) * (PRM_BETWEEN + PRM_VERDICT)
        count = max(1, draws.choice(self._lengths))
        ends = self._left < 1 or used + 2 * count > self._room
        score = self._least * draws.random()
        text = "modelled " + "/".join(map(str, beam.path)) + STEP_END
        return DrawnStep(drawn_tokens(draws, count), text, score, ends)


def _all_steps(root: _Known) -> list[str]:
    return [text for step, node in root.following.items() for text in (step, *_all_steps(node))]


def _all_scores(root: _Known) -> list[float]:
    return [score for node in root.following.values() for score in (node.score, *_all_scores(node))]


def _continuations(node: _Known) -> list[tuple[str, _Known]]:
    """What follows a step: each once, then beams equal to one before."""
    once = list(node.following.items())
    again = [pair for pair in once for _ in range(pair[1].ending - 1) if not pair[1].following]
    return once + again


def _ends(root: _Known) -> int:
    """Final beams that end where no other goes on."""
    below = sum(_ends(node) for node in root.following.values())
    return below + (root.ending if not root.following else 0)
