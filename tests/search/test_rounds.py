"""Many searches over two fake engines: sameness, order, rounds, limits, and no leaked answer."""

from collections import Counter, deque
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.search.conftest import pick, tree
from workbench.core import SamplingParams, ScoreParams, node_seed
from workbench.errors import ConfigError, PromptError
from workbench.search.prm import PRM
from workbench.search.problems import Problem, load_problems
from workbench.search.recording import read_recording
from workbench.search.search import Search, run_search
from workbench.search.strategies import BeamSearch, BestOfN
from workbench.search.variants import Lookahead, SelfConsistency

STRATEGY = BeamSearch(n=6, beam_width=3, max_depth=5)
PROBLEM = Problem("p", "How?")


@pytest.fixture
def problems():
    return load_problems("tiny", limit=7)


@pytest.fixture
def search(fake_engine, problems):
    """Run a search over fresh fake engines; the result and the two engines."""

    def run(given=None, *, strategy=STRATEGY, llm=None, prm=None, **settings):
        llm, prm = llm or fake_engine(), prm or fake_engine()
        given = problems if given is None else given
        return run_search(given, llm=llm, prm=PRM(prm), strategy=strategy, **settings), llm, prm

    return run


def test_scores_do_not_depend_on_the_score_cache(search, problems):
    """Without it every step of every beam is asked; with it nothing is computed twice."""
    with_cache, without = search()[0], search(score_cache=False)[0]
    tokens = search(problems[4])[0].prm_tokens
    assert tokens["distinct"] <= tokens["computed"] <= 1.1 * tokens["distinct"]
    assert tree(with_cache) == tree(without)
    assert without.problems["scores_asked"].sum() == without.tree["depth"].sum()
    assert without.problems["prm_requests"].sum() == len(without.tree)
    assert without.prm_tokens["computed"] > 2 * with_cache.prm_tokens["computed"]
    assert without.prm_tokens["distinct"] == with_cache.prm_tokens["distinct"]


def test_requests_are_submitted_by_problem_depth_and_path(search, problems):
    """Engines see siblings side by side, in an order that no clock decides."""
    _, llm, prm = search(min_problem_batch=3)
    place = {problem.id: index for index, problem in enumerate(problems)}
    for engine in (llm, prm):
        tags = [(place[tag.problem_id], tag.node_id) for _, _, tag in engine.asked]
        assert len(set(tags)) == len(tags)
        depths = {}
        for problem, node in tags:  # within a problem: deeper later, siblings in path order
            path = tuple(map(int, node.split("/")))
            assert (len(path), path) > depths.get(problem, (0, ()))
            depths[problem] = (len(path), path)
        first_round = [problem for problem, node in tags if "/" not in node and problem < 3]
        assert first_round == sorted(first_round)


def test_seed_and_parameters_of_a_request(search, problems):
    """seed(node) from run seed, problem and path; the prompt is the chat and what was sampled."""
    given, seed = {"temperature": 0.7, "top_p": 0.9}, node_seed(11, problems[0].id, (0,))
    settings = given | {"max_step_tokens": 33, "system_prompt": "Be brief."}
    _, llm, _ = search(problems[0], seed=11, **settings)
    by_node = {tag.node_id: (tokens, params) for tokens, params, tag in llm.asked}
    tokens, params = by_node["0"]
    assert params == SamplingParams(max_tokens=33, stop=("\n\n",), seed=seed, **given)
    texts = {"system": "Be brief.", "user": problems[0].problem}
    chat = llm.tokenizer.encode_chat([{"role": r, "content": text} for r, text in texts.items()])
    assert list(tokens) == chat
    deeper = next(node for node in by_node if node.count("/") == 2)
    assert list(by_node[deeper][0][: len(chat)]) == chat
    assert by_node[deeper][1].seed == node_seed(11, problems[0].id, map(int, deeper.split("/")))


def test_sampled_tokens_are_never_retokenised(search):
    """A child's prompt is its parent's prompt and exactly the tokens that were sampled."""
    result, llm, _ = search()
    prompts = {(tag.problem_id, tag.node_id): tokens for tokens, _, tag in llm.asked}
    sampled = result.tree.set_index(["problem_id", "node_id"])["token_ids"]
    for (problem, node), tokens in prompts.items():
        parent = node.rpartition("/")[0]
        if parent:
            assert tokens == prompts[problem, parent] + tuple(sampled[problem, parent])


def test_problems_in_flight_stay_at_the_minimum_batch(search):
    """Never more; the queue refills a place the round after it is free."""
    seen = []
    alone = BeamSearch(n=1, beam_width=1, max_depth=12)  # problems end at different rounds
    search(min_problem_batch=3, on_round=seen.append, strategy=alone)
    assert max(progress.in_flight for progress in seen) == 3
    assert seen[-1].answered == seen[-1].problems == 7
    assert [p.round for p in seen] == list(range(1, len(seen) + 1))
    refilled = 0
    for earlier, later in pairwise(seen):
        waiting = earlier.problems - earlier.answered - earlier.in_flight
        taken = later.in_flight + later.answered - earlier.answered  # who played the later round
        assert taken == min(3, earlier.in_flight + waiting)
        refilled += 0 < earlier.in_flight < taken
    assert refilled, "a problem joined others that went on"
    assert seen[-1].tokens > 0


def test_no_answer_leaks_into_a_prompt_or_a_score(search, fake_engine):
    """An answer no one could guess is in no request, and does not change one token or score."""

    class Watching(BeamSearch):
        def search(self, problem):
            assert problem.answer is None
            return super().search(problem)

    strategy, secret = Watching(n=4, beam_width=2, max_depth=4), "7391846520"
    result, llm, prm = search(Problem("p", "How?", secret), strategy=strategy)
    texts = [engine.tokenizer.decode(ids) for engine in (llm, prm) for ids, _, _ in engine.asked]
    assert not any(secret in text for text in texts)
    assert tree(result) == tree(search(Problem("p", "How?", "1"), strategy=strategy)[0])


@pytest.mark.parametrize(
    ("step", "llm_room", "prm_length"),
    [("step\n\n", 16, 4096), ("a step of some length\n\n", 4000, 110)],
    ids=["llm", "prm"],
)
def test_a_beam_at_a_models_limit_ends_unfinished(search, fake_engine, step, llm_room, prm_length):
    """The reason stands in the tree; a step without room takes its parent's score, visibly."""
    prompt = len(fake_engine().tokenizer.encode_chat([{"role": "user", "content": "How?"}]))
    llm = fake_engine(lambda text, seed: step, max_model_len=prompt + llm_room)
    result, _, prm = search(PROBLEM, llm=llm, prm=fake_engine(max_model_len=prm_length))
    assert set(result.candidates["ended"]) == {"context"}
    assert not result.problems["finished"].any()
    ended = result.tree[result.tree["finish_reason"] == "context"]
    assert all(len(tokens) < e.max_model_len for e in (llm, prm) for tokens, _, _ in e.asked)
    if prm_length < 4096:
        parents = result.tree.set_index("node_id").loc[ended["parent_id"]]
        assert ended["score"].tolist() == parents["score"].tolist()
    else:
        assert set(ended["depth"]) == {3} and result.tree["total_tokens"].max() == llm_room


def test_best_of_n_splits_and_scores_whole_completions(search, fake_engine):
    """One request a completion for each model; the node's score is the aggregate of its steps."""
    llm = fake_engine(lambda text, seed: f"one\n\ntwo {seed % 5}\n\n\\boxed{{{seed % 2}}}<eos>")
    result, llm, prm = search(strategy=BestOfN(n=8, max_tokens=99), aggregation="min", llm=llm)
    assert len(llm.asked) == 7 * 8
    assert {params.stop for _, params, _ in llm.asked} == {()}
    assert {params.max_tokens for _, params, _ in llm.asked} == {99}
    assert all(isinstance(params, ScoreParams) for _, params, _ in prm.asked)
    assert max(len(params.positions) for _, params, _ in prm.asked) == 3
    assert (result.tree["depth"] == 1).all()
    merged = result.tree.merge(result.candidates, on=["problem_id", "node_id"])
    assert (merged["score_x"] == merged["score_y"]).all()


@pytest.mark.parametrize("which", ["llm", "prm"])
def test_a_failed_request_ends_the_search_and_leaves_no_request(search, fake_engine, which):
    """The engine's own error is raised; both engines are left without this search's requests."""
    engines = {"llm": fake_engine(batch=4), "prm": fake_engine(batch=4)}
    engines[which].fail_on = 5
    with pytest.raises(MemoryError, match="forward failed"):
        search(**engines)
    assert not any(engine.has_work for engine in engines.values())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temprature": 1.0}, r"'temprature'.*Did you mean 'temperature'"),
        ({"aggregation": "lst"}, "Did you mean 'last'"),
        ({"max_step_tokens": 0}, "max_step_tokens is 0"),
        ({"given": []}, "no problem"),
        ({"given": [Problem("p", "a"), Problem("p", "b")]}, "two problems with id"),
        ({"given": ["1+1"]}, "Problem 0 is '1\\+1'; give a Problem"),
        ({"given": "tiny"}, "load_problems\\('tiny'\\)"),
        ({"given": 3}, "problems is 3"),
        ({"given": [Problem("p", "  ")]}, "Problem 'p' has the text '  '"),
        ({"given": [Problem("p", "1+1", 2)]}, "Problem 0 has the answer 2; give a text such as"),
        ({"given": [Problem("p", "1+1", "2", "3")]}, "Problem 0 has the level '3'; give a whole"),
        ({"given": [Problem(7, "1+1")]}, "Problem 0 has the id 7; give a text"),
        ({"strategy": BeamSearch}, "strategy is .*BeamSearch"),
        ({"strategy": "beam_search"}, "strategy is 'beam_search'"),
        ({"given": [Problem("p", "x" * 9999)]}, "Problem 'p' is 10"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(search, fake_engine, settings, said):
    """A named error, and not one request."""
    llm = fake_engine()
    with pytest.raises(PromptError if "is 10" in said else ConfigError, match=said):
        search(llm=llm, **settings)
    short = PRM(fake_engine(max_model_len=40))
    with pytest.raises(PromptError, match=r"'p' takes \d+ tokens of the PRM before any step"):
        run_search(Problem("p", "x" * 40), llm=llm, prm=short, strategy=STRATEGY)
    other = PRM(fake_engine())
    for pair, said in (  # what is no engine, or one for both
        ((llm, llm), r"prm is .*; give PRM\(engine\)"),
        ((other.engine, other), "one engine; give each its own"),
        (("tiny-solver", other), "llm is 'tiny-solver'; give an Engine"),
    ):
        with pytest.raises(ConfigError, match=said):
            run_search(PROBLEM, llm=pair[0], prm=pair[1], strategy=STRATEGY)
    assert not llm.asked


def test_shuffled_scores_change_the_search_but_not_the_prm(search):
    """The control: other beams survive, by the seed; the scores and what the tree shows stay."""
    plain, control = search()[0], search(score_shuffle_seed=1)[0]
    assert tree(plain) != tree(control)
    assert tree(control) == tree(search(score_shuffle_seed=1)[0])
    depths = Counter(plain.tree.loc[plain.tree["depth"] == 1, "score"])
    assert depths == Counter(control.tree.loc[control.tree["depth"] == 1, "score"])
    assert tree(control) != tree(search(score_shuffle_seed=2)[0])
    samples, dealt = (search(strategy=BestOfN(n=6), score_shuffle_seed=k)[0] for k in (None, 1))
    assert Counter(samples.candidates["score"]) == Counter(dealt.candidates["score"])


@pytest.mark.parametrize(
    "strategy",
    [
        BestOfN(n=6, max_tokens=64),
        Lookahead(n=6, beam_width=3, max_depth=5),
        BeamSearch(n=4, beam_width=2, max_depth=2, finish_at_limit=True),
    ],
)
def test_shuffled_scores_of_beams_of_unequal_depth(fake_engine, strategy):
    """A beam gets as many scores as it has steps, whichever beam's they were."""
    llm = fake_engine(lambda _, seed: "step\n\n" * (pick(seed) % 4) + "so \\boxed{1}<eos>")
    prm = PRM(fake_engine())
    found = run_search(PROBLEM, llm=llm, prm=prm, strategy=strategy, score_shuffle_seed=1)
    steps = {text.count("\n\n") for text in found.candidates["text"]}
    assert len(steps) > 1 and found.candidates["score"].between(0, 1).all()


@pytest.mark.parametrize("lookahead", [1, 3])
def test_iterations_are_the_depth_of_the_tree(search, lookahead):
    """What is sampled ahead is no iteration of its own."""
    found = search(strategy=Lookahead(n=6, beam_width=3, max_depth=5, lookahead=lookahead))[0]
    depths = found.tree.groupby("problem_id")["depth"].max()
    assert found.problems.set_index("problem_id")["iterations"].to_dict() == depths.to_dict()


def test_a_strategy_that_asks_no_score_needs_no_room_of_the_prm(search, fake_engine):
    short = fake_engine(max_model_len=40)
    found = search(Problem("p", "x" * 60), strategy=SelfConsistency(n=2), prm=short)[0]
    assert len(found.candidates) == 2 and not short.asked


@pytest.mark.parametrize("seed", [None, 1.0, True, "1"])
def test_a_seed_that_is_no_whole_number_is_refused(search, fake_engine, seed):
    """1.0 would be another run than 1."""
    llm = fake_engine()
    with pytest.raises(ConfigError, match=r"seed is .*; give a whole number"):
        search(llm=llm, seed=seed)
    assert not llm.asked


def test_numpy_s_numbers_are_as_good(search, tmp_path):
    """Guards a recording that could not be written once all was searched."""
    given = replace(PROBLEM, level=np.int64(3)), np.int64(1)
    found = search(given[0], seed=given[1], record=tmp_path / "it.parquet")[0]
    own = read_recording(tmp_path / "it.parquet")
    assert (own.problems[0].problem.level, own.settings.seed) == (3, 1)
    assert tree(found) == tree(search(replace(PROBLEM, level=3), seed=1)[0])


def test_a_search_stopped_in_a_round_keeps_what_was_answered(fake_engine, problems, tmp_path):
    """Whoever plays the rounds: the recording of those answered, and how many there were."""

    def stop(progress):
        if progress.answered >= 2:
            raise TimeoutError

    pair = {"llm": fake_engine(), "prm": PRM(fake_engine())}
    how = {"strategy": STRATEGY, "min_problem_batch": 2, "record": tmp_path / "it.parquet"}
    own = Search(problems, **pair, **how, on_round=stop)
    assert own.round()  # one that goes on
    with pytest.raises(TimeoutError) as stopped:
        deque(iter(own.round, False))
    answered = len(stopped.value.result.problems)
    assert 2 <= answered < len(problems) == own.progress.problems
    assert len(read_recording(tmp_path / "it.partial.parquet").problems) == answered
    assert own.progress.in_flight == 0 and len(stopped.value.__notes__) == 1
