"""The figures of merit of the embedded pair, as its model cards print them: demanded and measured.

Two searches over fresh held-out problems on our own engine are enough: whole samples (pass@1,
votes, depth, the verifier's AUC on every sampled step) and beam search with and without shuffled
scores. Whether a step is right is computed from its text, by no model.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any

import numpy as np
import pandas as pd

from workbench.core import TokenEngine
from workbench.engine.engine import Engine
from workbench.experiments.statistics import bootstrap_mean
from workbench.search.prm import PRM, ScoreCache
from workbench.search.problems import load_problems
from workbench.search.result import SearchResult
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch, BestOfN, split_steps
from workbench.training.corpus import is_right

N, BEAM_WIDTH, DEPTH = 16, 4, 40


def embedded_card(num_problems: int, seed: int) -> str:
    """The pair's table as Markdown. Takes minutes on two cores with 128 problems."""
    llm, judge = (Engine(name, kv_memory="256MiB") for name in ("tiny-solver", "tiny-prm"))
    problems, prm, cache = load_problems("tiny", num_problems, seed=seed), PRM(judge), ScoreCache()
    common: dict[str, Any] = {"llm": llm, "prm": prm, "seed": seed}
    samples = run_search(problems, strategy=BestOfN(n=N), score_cache=cache, **common)
    strategy = BeamSearch(n=N, beam_width=BEAM_WIDTH, max_depth=DEPTH)
    beams = run_search(problems, strategy=strategy, **common)
    shuffled = run_search(problems, strategy=strategy, score_shuffle_seed=seed, **common)
    steps = pd.DataFrame(sampled_steps(samples, llm, prm, cache))
    level = samples.problems.set_index("problem_id")["level"]
    pass_1 = samples.candidates.groupby("problem_id")["correct"].mean().astype(float)
    majority, weighted = (samples.correct_by(v).astype(float) for v in ("majority", "weighted"))
    beam, chance = (
        found.problems.set_index("problem_id")["correct"].astype(float)
        for found in (beams, shuffled)
    )

    def interval(values: pd.Series) -> str:
        found = bootstrap_mean(values.to_numpy(float), list(values.index))
        return f"{found.estimate:.3f} [{found.low:.3f}, {found.high:.3f}]"

    def by_level(values: pd.Series, form: str = ".2f") -> str:
        means = values.groupby(level.loc[values.index].to_numpy()).mean()
        return ", ".join(f"{value:{form}}" for value in means.sort_index())

    # texts of the children of one node, where it has several: the share that is distinct
    children = beams.tree.groupby(["problem_id", "parent_id"])["text"].agg(["nunique", "size"])
    several = children[(children["size"] > 1) & (children.index.get_level_values(1) != "")]
    diversity = (several["nunique"] / several["size"]).mean()
    auc, low, high = auc_interval(steps)
    rows = [
        ("problems", "fresh, uniform over levels", str(len(beam))),
        ("pass@1, mean of 16", "0.25-0.60", interval(pass_1)),
        ("pass@1 by level", "", by_level(pass_1)),
        ("majority of 16", "", interval(majority)),
        ("best of 16, weighted", "", interval(weighted)),
        ("beam search, 16 beams", "", interval(beam)),
        ("beam search by level", "", by_level(beam)),
        ("beam search - pass@1", ">= 0.25", interval(beam - pass_1)),
        ("beam search - majority", ">= 0.05", interval(beam - majority)),
        ("beam search - shuffled scores", ">= 0.05", interval(beam - chance)),
        ("step AUC of the PRM", "0.80-0.95", f"{auc:.3f} [{low:.3f}, {high:.3f}]"),
        ("distinct siblings", ">= 0.60", f"{diversity:.2f}"),
    ]
    for model, demanded in (("llm", ""), ("prm", "mean >= 24")):
        tokens = steps[f"{model}_tokens"]
        parts = {"mean": tokens.mean()} | {f"p{q}": tokens.quantile(q / 100) for q in (50, 95, 99)}
        told = ", ".join(f"{name} {value:.0f}" for name, value in parts.items())
        rows.append((f"tokens a step, {model}", demanded, told))
    longest = max(longest_input(result, prm) for result in (samples, beams))
    rows.append(("longest PRM input, tokens", "< 2,048", f"{longest:,}"))
    texts = beams.candidates.set_index("problem_id")["text"]
    depths = texts.map(lambda text: len(split_steps(text)))
    rows.append(("steps of a beam by level", "level 5: >= 20", by_level(depths, ".1f")))
    deep = (depths[level.loc[depths.index].to_numpy() == 5] >= DEPTH).mean()
    rows.append(("level 5 beams at depth 40", "0.02-0.10", f"{deep:.3f}"))
    head = "| figure | demanded | measured |\n|---|---|---|"
    return "\n".join([head, *(f"| {' | '.join(row)} |" for row in rows)])


def sampled_steps(
    samples: SearchResult, llm: TokenEngine, prm: PRM, cache: ScoreCache
) -> Iterator[dict[str, Any]]:
    """One row a step of each sample: its true label, its score, its tokens in both models."""
    problems = samples.problems.set_index("problem_id")
    for sample in samples.candidates.itertuples():
        pieces = split_steps(str(sample.text))
        name = str(sample.problem_id)
        problem, answer = (str(problems.at[name, column]) for column in ("problem", "answer"))
        for count, piece in enumerate(pieces, start=1):
            yield {
                "problem_id": name,
                "correct": is_right(piece, int(answer)),
                "score": cache.get((prm.fingerprint, (name, problem), pieces[:count])),
                "llm_tokens": len(llm.tokenizer.encode(piece, add_special_tokens=False)),
                "prm_tokens": len(prm.next_input(array("i"), piece)),
            }


def auc_interval(steps: pd.DataFrame) -> tuple[float, ...]:
    """The AUC of all sampled steps and its 95 % bootstrap bounds, problems drawn anew 1,000 times.

    AUC: the chance that a right step scores above a wrong one, ties counted half (Mann-Whitney).
    """
    known = steps.dropna(subset=["score"])
    groups = [
        (frame["score"].to_numpy(float), frame["correct"].to_numpy(bool))
        for _, frame in known.groupby("problem_id")
    ]

    def auc(chosen: Iterable[int]) -> float:
        scores, labels = zip(*(groups[index] for index in chosen), strict=True)
        ranks, correct = pd.Series(np.concatenate(scores)).rank(), np.concatenate(labels)
        right, wrong = int(correct.sum()), int((~correct).sum())
        if not right or not wrong:
            return float("nan")
        return float((ranks[correct].sum() - right * (right + 1) / 2) / (right * wrong))

    generator = np.random.default_rng(0)
    drawn = [auc(generator.integers(len(groups), size=len(groups))) for _ in range(1000)]
    return auc(range(len(groups))), *np.nanpercentile(drawn, [2.5, 97.5])


def longest_input(result: SearchResult, prm: PRM) -> int:
    """Tokens of the longest PRM input among a search's final beams."""
    questions = dict(zip(result.problems["problem_id"], result.problems["problem"], strict=True))
    longest = 0
    for beam in result.candidates.itertuples():
        first, *others = split_steps(str(beam.text)) or ("",)
        ids = prm.first_input(questions[str(beam.problem_id)], first)
        longest = max(longest, len(reduce(prm.next_input, others, ids)))
    return longest
