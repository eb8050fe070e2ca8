"""The figures of merit of the embedded pair, as its model cards print them: demanded and measured.

Two searches over fresh held-out problems on our own engine are enough: whole samples (pass@1,
votes, depth, the verifier's AUC on every sampled step) and beam search with and without shuffled
scores. Whether a step is right is computed from its text, by no model.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from workbench.core import TokenEngine
from workbench.engine.engine import Engine
from workbench.experiments.statistics import bootstrap_mean
from workbench.experiments.tiny_corpus import is_right
from workbench.search.prm import PRM, ScoreCache
from workbench.search.problems import Problem, load_problems
from workbench.search.result import SearchResult
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch, BestOfN, split_steps

N, BEAM_WIDTH, DEPTH = 16, 4, 40
DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Searches:
    """What the card is computed from: samples with the scores of their steps, and two beam runs."""

    samples: SearchResult
    steps: pd.DataFrame
    beams: SearchResult
    shuffled: SearchResult


def search_all(problems: Sequence[Problem], llm: TokenEngine, prm: PRM, seed: int = 0) -> Searches:
    """Sample, search, and search with shuffled scores."""
    cache = ScoreCache()
    common: dict[str, Any] = {"llm": llm, "prm": prm, "seed": seed}
    samples = run_search(problems, strategy=BestOfN(n=N), score_cache=cache, **common)
    strategy = BeamSearch(n=N, beam_width=BEAM_WIDTH, max_depth=DEPTH)
    beams = run_search(problems, strategy=strategy, **common)
    shuffled = run_search(problems, strategy=strategy, score_shuffle_seed=seed, **common)
    steps = pd.DataFrame(sampled_steps(samples, problems, llm, prm, cache))
    return Searches(samples, steps, beams, shuffled)


def sampled_steps(
    samples: SearchResult,
    problems: Sequence[Problem],
    llm: TokenEngine,
    prm: PRM,
    cache: ScoreCache,
) -> Iterator[dict[str, Any]]:
    """One row a step of each sample: its true label, its score, its tokens in both models."""
    levels = {problem.id: problem.level for problem in problems}
    answers = {problem.id: int(problem.answer or 0) for problem in problems}
    for sample in samples.candidates.itertuples():
        pieces = split_steps(str(sample.text))
        name = str(sample.problem_id)
        for count, piece in enumerate(pieces, start=1):
            yield {
                "problem_id": name,
                "level": levels[name],
                "sample": sample.node_id,
                "depth": count,
                "correct": is_right(piece, answers[name]),
                "score": cache.get(prm.fingerprint, name, pieces[:count]),
                "llm_tokens": len(llm.tokenizer.encode(piece, add_special_tokens=False)),
                "prm_tokens": len(prm.next_input(array("i"), piece)),
            }


def area_under_curve(scores: np.ndarray, correct: np.ndarray) -> float:
    """Chance that a right step scores above a wrong one, ties counted half (Mann-Whitney)."""
    ranks = pd.Series(scores).rank().to_numpy()
    right, wrong = int(correct.sum()), int((~correct).sum())
    if not right or not wrong:
        return float("nan")
    return float((ranks[correct].sum() - right * (right + 1) / 2) / (right * wrong))


def auc_interval(steps: pd.DataFrame, draws: int = DRAWS, seed: int = 0) -> tuple[float, ...]:
    """The AUC of all sampled steps and its 95 % bootstrap bounds, problems drawn anew."""
    known = steps.dropna(subset=["score"])
    groups = [
        (frame["score"].to_numpy(float), frame["correct"].to_numpy(bool))
        for _, frame in known.groupby("problem_id")
    ]
    generator = np.random.default_rng(seed)

    def auc(chosen: Iterable[int]) -> float:
        scores, correct = zip(*(groups[index] for index in chosen), strict=True)
        return area_under_curve(np.concatenate(scores), np.concatenate(correct))

    drawn = [auc(generator.integers(len(groups), size=len(groups))) for _ in range(draws)]
    return auc(range(len(groups))), *np.nanpercentile(drawn, [2.5, 97.5])


def sibling_diversity(tree: pd.DataFrame) -> float:
    """Mean share of distinct texts among the children of one node, where it has several."""
    children = tree.groupby(["problem_id", "parent_id"])["text"].agg(["nunique", "size"])
    several = children[(children["size"] > 1) & (children.index.get_level_values(1) != "")]
    return float((several["nunique"] / several["size"]).mean())


def depth_reached(result: SearchResult) -> pd.DataFrame:
    """By level: mean steps of an outcome's beams, and the share that reached DEPTH."""
    level = result.problems.set_index("problem_id")["level"]
    steps = result.candidates.assign(
        level=level.loc[result.candidates["problem_id"]].to_numpy(),
        steps=[len(split_steps(text)) for text in result.candidates["text"]],
    )
    steps["deep"] = steps["steps"] >= DEPTH
    return steps.groupby("level")[["steps", "deep"]].mean()


def longest_input(result: SearchResult, prm: PRM) -> int:
    """Tokens of the longest PRM input among a search's final beams."""
    questions = dict(zip(result.problems["problem_id"], result.problems["problem"], strict=True))
    longest = 0
    for beam in result.candidates.itertuples():
        pieces = split_steps(str(beam.text)) or ("",)
        ids = prm.first_input(questions[str(beam.problem_id)], pieces[0])
        for piece in pieces[1:]:
            ids = prm.next_input(ids, piece)
        longest = max(longest, len(ids))
    return longest


def card_rows(found: Searches, llm: TokenEngine, prm: PRM) -> Iterator[tuple[str, str, str]]:
    """(figure, demanded, measured) of everything STUDY demands of the pair."""
    pass_1 = _sample_accuracy(found.samples)
    votes = {name: found.samples.correct_by(name) for name in ("majority", "weighted")}
    beam = found.beams.problems.set_index("problem_id")["correct"].astype(float)
    chance = found.shuffled.problems.set_index("problem_id")["correct"].astype(float)
    majority = votes["majority"].astype(float)
    yield "problems", "fresh, uniform over levels", str(len(beam))
    yield "pass@1, mean of 16", "0.25-0.60", _interval(pass_1)
    yield "pass@1 by level", "", _by_level(found.samples, pass_1)
    yield "majority of 16", "", _interval(majority)
    yield "best of 16, weighted", "", _interval(votes["weighted"].astype(float))
    yield "beam search, 16 beams", "", _interval(beam)
    yield "beam search by level", "", _by_level(found.samples, beam)
    yield "beam search - pass@1", ">= 0.25", _interval(beam - pass_1)
    yield "beam search - majority", ">= 0.05", _interval(beam - majority)
    yield "beam search - shuffled scores", ">= 0.05", _interval(beam - chance)
    yield (
        "step AUC of the PRM",
        "0.80-0.95",
        "{:.3f} [{:.3f}, {:.3f}]".format(*auc_interval(found.steps)),
    )
    yield "distinct siblings", ">= 0.60", f"{sibling_diversity(found.beams.tree):.2f}"
    for model in ("llm", "prm"):
        demanded = "mean >= 24" if model == "prm" else ""
        yield f"tokens a step, {model}", demanded, _lengths(found.steps[f"{model}_tokens"])
    longest = max(longest_input(result, prm) for result in (found.samples, found.beams))
    yield "longest PRM input, tokens", "< 2,048", f"{longest:,}"
    depth = depth_reached(found.beams)
    yield "steps of a beam by level", "level 5: >= 20", _listed(depth["steps"], "{:.1f}")
    yield "level 5 beams at depth 40", "0.02-0.10", f"{depth['deep'].get(5, float('nan')):.3f}"


def _sample_accuracy(samples: SearchResult) -> pd.Series:
    order = list(samples.problems["problem_id"])
    return samples.candidates.groupby("problem_id")["correct"].mean().astype(float).loc[order]


def _interval(values: pd.Series) -> str:
    found = bootstrap_mean(values.to_numpy(float), list(values.index))
    return f"{found.estimate:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _by_level(samples: SearchResult, values: pd.Series) -> str:
    level = samples.problems.set_index("problem_id")["level"]
    return _listed(values.groupby(level.loc[values.index].to_numpy()).mean(), "{:.2f}")


def _listed(values: pd.Series, form: str) -> str:
    return ", ".join(form.format(value) for value in values.sort_index())


def _lengths(tokens: pd.Series) -> str:
    parts = {"mean": tokens.mean()} | {f"p{q}": tokens.quantile(q / 100) for q in (50, 95, 99)}
    return ", ".join(f"{name} {value:.0f}" for name, value in parts.items())


def card_table(
    problems: Sequence[Problem], llm: TokenEngine, prm: PRM, seed: int = 0
) -> pd.DataFrame:
    """The table of a model card. Takes minutes on two cores with 128 problems."""
    rows = card_rows(search_all(problems, llm, prm, seed), llm, prm)
    return pd.DataFrame(rows, columns=["figure", "demanded", "measured"])


def embedded_card(
    num_problems: int = 128, seed: int = 0, kv_memory: str = "256MiB"
) -> pd.DataFrame:
    """The table of the embedded pair, each model with `kv_memory` for its KV cache."""
    llm, prm = (Engine(name, kv_memory=kv_memory) for name in ("tiny-solver", "tiny-prm"))
    return card_table(load_problems("tiny", num_problems, seed=seed), llm, PRM(prm), seed)


def as_markdown(table: pd.DataFrame) -> str:
    """The table as GitHub shows it."""
    lines = ["| " + " | ".join(table.columns) + " |", "|---" * len(table.columns) + "|"]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in table.itertuples(index=False)]
    return "\n".join(lines) + "\n"
