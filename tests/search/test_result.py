"""The result's tables, measures and views."""

import pandas as pd
import pytest

from workbench.errors import ConfigError
from workbench.search.answers import UNSCORED
from workbench.search.prm import PRM
from workbench.search.problems import Problem, load_problems
from workbench.search.result import Mark, Throughput
from workbench.search.search import run_search
from workbench.search.strategies import STEP_END, BeamSearch, BestOfN
from workbench.search.variants import Lookahead
from workbench.trace import NodeRow


@pytest.fixture
def result(fake_engine):
    pair, problems = {"llm": fake_engine(), "prm": PRM(fake_engine())}, load_problems("tiny", 6)
    strategy = BeamSearch(n=6, beam_width=3, max_depth=6)
    return run_search(problems, **pair, strategy=strategy, min_problem_batch=2)


def voters(fake_engine, voting="weighted"):
    """Four completions of one problem: 1, 1, 2 and no box, with scores by their text."""
    texts = ["\\boxed{1}<eos>", "so \\boxed{01}<eos>", "\\boxed{2}<eos>", "nothing<eos>"]
    served = iter(texts)
    llm, prm = fake_engine(lambda text, seed: next(served), batch=1), fake_engine()
    by_text = {"\\boxed{1}": -1.0, "so \\boxed{01}": -1.0, "\\boxed{2}": 0.1, "nothing": 9.0}

    def judge(ids):
        text = prm.tokenizer.decode(ids)
        return next(v for k, v in reversed(by_text.items()) if k in text), 0.0

    prm.judge = judge
    problem = Problem("p", "How?", "2", 1)
    strategy = BestOfN(n=4)
    return run_search(problem, llm=llm, prm=PRM(prm), strategy=strategy, voting=voting)


@pytest.mark.parametrize(
    ("voting", "answer"), [("majority", "1"), ("naive", "2"), ("weighted", "1")]
)
def test_votes_over_real_candidates(fake_engine, voting, answer):
    """Equal answers in two spellings vote together; the best text has no box and no vote."""
    result = voters(fake_engine, voting)
    assert result.answers == {"p": answer}
    assert result.accuracy == float(answer == "2")
    assert result.correct_by("naive").tolist() == [True]
    assert result.correct_by("majority").tolist() == [False]
    assert [result.pass_at_k(k) for k in (1, 2, 4)] == pytest.approx([0.25, 0.5, 1.0])
    with pytest.raises(ConfigError, match="k is 5"):
        result.pass_at_k(5)


def test_each_candidate_is_compared_with_the_reference(fake_engine):
    """Also where its group is named by another text; one is right, whatever the other is."""
    texts = iter(["\\boxed{50\\%}<eos>", "\\boxed{0.5}<eos>", "\\boxed{50}<eos>", "none<eos>"])
    llm = fake_engine(lambda text, seed: next(texts), batch=1)
    problem, strategy = Problem("p", "How?", "0.5", 1), BestOfN(n=4)
    result = run_search(problem, llm=llm, prm=PRM(fake_engine()), strategy=strategy)
    told = result.candidates.set_index("answer")["correct"]
    assert told.to_dict() == {"50\\%": True, "0.5": True, "50": False, "": False}


@pytest.mark.parametrize("lookahead", [1, 2])
def test_all_that_survive_are_kept(fake_engine, lookahead):
    """Also where the one place left for a survivor is the child that was sampled ahead."""
    strategy = Lookahead(n=4, beam_width=2, max_depth=6, lookahead=lookahead)
    llm = fake_engine(lambda text, seed: f"{seed % 97}{'<eos>' if seed % 11 == 0 else STEP_END}")
    problems = load_problems("tiny", limit=24)
    result = run_search(problems, llm=llm, prm=PRM(fake_engine()), strategy=strategy)
    alone = 0
    for _, tree in result.tree.groupby("problem_id"):
        judged = tree[tree["depth"] == 1]
        for depth in range(1, strategy.max_depth):
            growing = judged[~judged["finished"]]
            kept = growing[growing["kept"]]["node_id"]
            assert len(kept) == min(2, len(growing))
            judged = tree[(tree["depth"] == depth + 1) & tree["parent_id"].isin(kept)]
            alone += (judged.groupby("parent_id").size() == 1).sum()
    assert alone, "a survivor has one child"


def test_what_lies_between_a_beam_and_what_it_is_judged_by_has_its_own_score(fake_engine):
    """Of two steps ahead the PRM is asked about the second alone, and answers for both."""
    strategy = Lookahead(n=4, beam_width=2, max_depth=4, lookahead=2)
    llm, prm = fake_engine(), PRM(fake_engine())
    result = run_search(load_problems("tiny", limit=2), llm=llm, prm=prm, strategy=strategy)
    assert result.tree["depth"].max() > 2 and result.tree["score"].ne(UNSCORED).all()


def test_the_tree_is_a_tree(result):
    """Only kept nodes have children; tokens add up; its columns are trace.nodes' and two more."""
    assert list(result.trace.nodes.columns) == list(NodeRow._fields)
    assert list(result.tree.columns) == [*NodeRow._fields, "finish_reason", "text"]
    assert result.tree["score"].notna().all()
    nodes = result.tree.set_index(["problem_id", "node_id"])
    for (problem, _), node in nodes.iterrows():
        if node["parent_id"]:
            parent = nodes.loc[(problem, node["parent_id"])]
            assert parent["kept"]
            assert not parent["finished"]
            assert node["depth"] == parent["depth"] + 1
            assert node["total_tokens"] == parent["total_tokens"] + node["step_tokens"]
        else:
            assert node["depth"] == 1
        assert node["step_tokens"] == len(node["token_ids"])
        assert "/".join(map(str, node["path"])) == node.name[1]
        assert len(node["path"]) == node["depth"]
    outcome = result.candidates.set_index(["problem_id", "node_id"]).index
    assert nodes.loc[outcome, "kept"].all()
    assert len(result.candidates) == 6 * 6


def test_problems_table(result):
    """One row a problem in the order given; tokens are those of the tree, pruned ones included."""
    problems = result.problems
    assert problems["problem_id"].tolist() == [p.id for p in load_problems("tiny", limit=6)]
    sampled = result.tree.groupby("problem_id", sort=False)["step_tokens"].sum()
    assert problems["tokens"].tolist() == sampled.tolist()
    depths = result.tree.groupby("problem_id", sort=False)["depth"].max()
    assert problems["iterations"].tolist() == depths.tolist()
    assert (problems["seconds"] > 0).all()
    assert (problems["finished"] == (problems["finished_beams"] > 0)).all()
    assert result.throughput.tokens == problems["tokens"].sum()
    assert result.throughput.problems == 6


def test_unknown_answers_leave_accuracy_open(fake_engine):
    """A problem nobody knows the answer to is neither right nor wrong."""
    pair = {"llm": fake_engine(), "prm": PRM(fake_engine())}
    result = run_search(Problem("p", "How?"), **pair, strategy=BestOfN(n=2))
    assert result.problems["correct"].isna().all()
    assert pd.isna(result.accuracy)
    assert pd.isna(result.pass_at_k(1))


def test_views_and_files(result, tmp_path):
    """A short repr, a table in a notebook, Parquet with the schema version inside."""
    assert repr(result).startswith("SearchResult(6 problems, accuracy 0.")
    assert "<table" in result._repr_html_()
    files = result.to_parquet(tmp_path)
    assert {f.stem for f in files} == {"candidates", "nodes", "problems"}
    assert len(pd.read_parquet(tmp_path / "nodes.parquet")) == len(result.tree)


def test_throughput_and_its_steady_state():
    """Slow ends are in the total and not in the steady state."""
    marks = [Mark(10, 0, 0), Mark(11, 0, 0), Mark(19, 800, 4), Mark(20, 800, 6)]
    speed = Throughput.of(marks, 5.0, 3.0)
    assert speed.tokens_per_s == pytest.approx(80)
    assert speed.problems_per_min == pytest.approx(36)
    assert speed.steady_tokens_per_s == pytest.approx(100)
    assert speed.steady_problems_per_min == pytest.approx(30)
    assert (speed.wall_s, speed.llm_busy_s, speed.prm_busy_s) == (10, 5.0, 3.0)


@pytest.fixture
def traced(fake_engine):
    llm, prm = (fake_engine(batch=4, traced=True) for _ in range(2))
    problems = load_problems("tiny", limit=24)
    return run_search(problems, strategy=BeamSearch(n=6), llm=llm, prm=PRM(prm))


def test_steps_and_spans_add_up_to_wall_time(traced):
    """Nothing between the first and the last moment is unaccounted for, nothing counted twice."""
    steps, spans = traced.trace.steps, traced.trace.spans
    both = pd.concat([steps[["start_s", "duration_s"]], spans[["start_s", "duration_s"]]])
    wall = (both["start_s"] + both["duration_s"]).max() - both["start_s"].min()
    assert both["duration_s"].sum() == pytest.approx(wall, rel=0.01)
    assert set(steps["engine"]) == {"llm", "prm"}
    assert set(spans["kind"]) == {"strategy", "tokenising", "bookkeeping"}
    assert set(spans["lane"]) == {"search"}
    assert (spans["duration_s"] >= 0).all()


def test_score_cache_hits_stand_in_the_prms_steps(traced):
    """Every hit once, in a step of the PRM."""
    hits = traced.trace.steps.groupby("engine")["score_cache_hits"].sum()
    assert hits["prm"] == traced.problems["scores_cached"].sum() > 0
    assert hits["llm"] == 0
