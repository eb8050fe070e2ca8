"""Speculated steps are child 0's own, nobody waits for them, and what is discarded is counted."""

from collections import Counter

import pytest

from tests.search.stepping_engine import SteppingEngine
from workbench.errors import ConfigError
from workbench.search.beam import BeamSearch
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.record_file import read_recording
from workbench.search.runner import run_search

STRATEGY = BeamSearch(n=4, beam_width=2, max_depth=5)
SIZES = [(8, 4000), (3, 4000), (8, 120), (8, 101), (5, 140)]  # rows, blocks


def uneven(text: str, seed: int) -> str:
    """Steps of very different lengths, so that rows stand empty while the longest run."""
    if seed % 7 == 0:
        return f"so \\boxed{{{seed % 3}}}<eos>"
    return f"{'long ' * (seed % 5 * 3)}step {seed % 11}\n\n"


@pytest.fixture
def search():
    """A search over fresh engines of so many rows and blocks; the result and both engines."""

    def run(rows=8, num_blocks=4000, strategy=STRATEGY, limit=2, **settings):
        llm = SteppingEngine(uneven, rows=rows, num_blocks=num_blocks)
        prm = settings.pop("prm", None) or SteppingEngine()
        settings = {"speculative_extension": True, "min_problem_batch": 2} | settings
        problems = load_problems("tiny", limit=limit)
        result = run_search(problems, llm=llm, prm=PRM(prm), strategy=strategy, **settings)
        return result, llm, prm

    return run


def tree(result):
    columns = ["problem_id", "node_id", "token_ids", "score", "kept", "finished"]
    return result.tree[columns].sort_values(["problem_id", "node_id"]).to_dict("records")


@pytest.mark.parametrize(("rows", "blocks"), SIZES)
@pytest.mark.parametrize("lookahead", [False, True])
def test_the_tree_is_the_plain_one(search, rows, blocks, lookahead):
    """Tokens, scores, survivors and answers, with ample and with little memory."""
    plain, *_ = search(speculative_extension=False)
    found, llm, _ = search(rows, blocks, lookahead_scoring=lookahead)
    assert tree(found) == tree(plain)
    assert found.answers == plain.answers
    assert found.throughput.tokens == plain.throughput.tokens
    llm.cache.check()
    assert llm.cache.num_active == 0
    assert not llm.has_work


class Watching(BeamSearch):
    """A beam search that says which nodes it has asked for."""

    def search(self, problem):
        searching, reply = super().search(problem), None
        while True:
            try:
                request = searching.send(reply)
            except StopIteration as end:
                return end.value
            self.asked.update((problem.id, beam.path) for beam in request.beams)
            reply = yield request


@pytest.mark.parametrize(("rows", "blocks"), SIZES)
def test_real_requests_are_neither_preempted_nor_delayed(search, rows, blocks, monkeypatch):
    """While one waits, preempted or not, no speculation runs; and no step is added."""
    asked, speculating = set(), []

    def is_real(sequence):
        path = tuple(map(int, sequence.tag.node_id.split("/")))
        return (sequence.tag.problem_id, path) in asked

    def watch(_, running, waiting):
        sampling = [sequence for sequence in running if sequence.params is not None]
        assert len(sampling) <= rows
        speculations = [sequence for sequence in sampling if not is_real(sequence)]
        speculating.append(len(speculations))
        if any(map(is_real, waiting)):
            assert not speculations

    monkeypatch.setattr(Watching, "asked", asked, raising=False)
    _, plain, _ = search(rows, blocks, speculative_extension=False)
    asked.clear()
    strategy = Watching(n=4, beam_width=2, max_depth=5)
    monkeypatch.setattr(SteppingEngine, "watch", watch)
    _, llm, _ = search(rows, blocks, strategy=strategy)
    assert len(llm.seen) <= len(plain.seen)
    assert sum(speculating) > 0


def test_something_is_speculated_adopted_and_discarded(search):
    """Where every child is a child 0 the LLM takes fewer steps; no node is asked for twice."""
    strategy = BeamSearch(n=4, beam_width=1, max_depth=5)
    _, llm, _ = search(strategy=strategy, limit=1)
    _, plain, _ = search(strategy=strategy, limit=1, speculative_extension=False)
    asked = Counter((tag.problem_id, tag.node_id) for *_, tag in llm.asked)
    assert len(llm.seen) < len(plain.seen)
    assert set(asked.values()) == {1}
    result, llm, _ = search()
    unwanted = {(tag.problem_id, tag.node_id) for *_, tag in llm.asked}
    unwanted -= set(zip(result.tree["problem_id"], result.tree["node_id"]))
    assert unwanted
    assert all(node.endswith("/0") for _, node in unwanted)


def test_a_speculated_request_is_the_one_the_node_would_get(search):
    """Prompt, seed, stop and lengths of each node are those of the plain search."""
    _, plain, _ = search(speculative_extension=False)
    _, llm, _ = search()
    expected = {(tag.problem_id, tag.node_id): (ids, params) for ids, params, tag in plain.asked}
    for token_ids, params, tag in llm.asked:
        node = (tag.problem_id, tag.node_id)
        assert expected.get(node, (token_ids, params)) == (token_ids, params)


@pytest.mark.parametrize("finish_at_limit", [False, True])
def test_nothing_is_speculated_that_no_strategy_could_ask_for(search, finish_at_limit):
    """No child of a finished beam, none below max_depth; the last step has its own limits."""
    strategy = BeamSearch(n=4, beam_width=2, max_depth=3, finish_at_limit=finish_at_limit)
    result, llm, _ = search(strategy=strategy)
    rows = result.tree.set_index(["problem_id", "node_id"])
    for _, params, tag in llm.asked:
        depth = tag.node_id.count("/") + 1
        assert depth <= 3
        assert (params.stop == ()) == (finish_at_limit and depth == 3)
        parent = (tag.problem_id, tag.node_id.rpartition("/")[0])
        assert depth == 1 or not rows.loc[parent, "finished"]


def test_discarded_tokens_have_a_place_of_their_own(search):
    """What the LLM sampled is what nodes hold and what was discarded, problem by problem."""
    result, _, _ = search()
    requests = result.trace.requests
    sampled = requests[requests["kind"] == "generate"].groupby("problem_id")["output_tokens"].sum()
    table = result.problems.set_index("problem_id")
    assert (table["tokens"] + table["discarded_tokens"]).to_dict() == sampled.to_dict()
    assert result.throughput.discarded_tokens == table["discarded_tokens"].sum() > 0
    assert result.throughput.tokens == table["tokens"].sum()


def test_nothing_is_speculated_while_memory_is_short(search):
    """A cache that loses what is wanted again gets no request beyond those the search needs."""
    result, llm, _ = search(num_blocks=101)
    _, ample, _ = search()
    extra = len(llm.asked) - len(result.tree)
    assert llm.cache.stats.thrashed > 0
    assert extra < (len(ample.asked) - len(result.tree)) / 2


def test_it_yields_to_the_other_model_too(search):
    """A PRM whose cache loses what is wanted again: the LLM's spare memory may be the same one."""
    result, llm, prm = search(prm=SteppingEngine(num_blocks=101))
    _, ample, _ = search()
    assert prm.cache.stats.thrashed > 0
    assert len(llm.asked) - len(result.tree) < len(ample.asked) - len(result.tree)


def test_a_search_that_is_stopped_leaves_no_speculation(search):
    """on_round raises while speculated requests are in the engine; it is idle and whole after."""

    def stop(progress):
        if progress.round == 3:
            raise KeyboardInterrupt

    llm = SteppingEngine(uneven)
    with pytest.raises(KeyboardInterrupt):
        run_search(
            load_problems("tiny", limit=2),
            llm=llm,
            prm=PRM(SteppingEngine()),
            strategy=STRATEGY,
            speculative_extension=True,
            on_round=stop,
        )
    assert not llm.has_work
    assert llm.cache.num_active == 0


def test_an_engine_that_does_not_tell_how_full_it_is_is_refused(search, fake_engine):
    """By name, before anything runs; and look-ahead needs what it looks ahead with."""
    given = {"strategy": STRATEGY, "prm": PRM(fake_engine())}
    llm, problems = fake_engine(), load_problems("tiny", limit=1)
    with pytest.raises(ConfigError, match="speculative_extension needs an LLM that tells"):
        run_search(problems, llm=llm, speculative_extension=True, **given)
    with pytest.raises(ConfigError, match=r"lookahead_scoring.*speculative_extension"):
        run_search(problems, llm=llm, lookahead_scoring=True, **given)
    ahead = {"speculative_extension": True, "lookahead_scoring": True}
    with pytest.raises(ConfigError, match=r"lookahead_scoring.*score_cache"):
        run_search(problems, llm=SteppingEngine(), score_cache=False, **ahead, **given)
    assert not llm.asked


def test_steps_scored_ahead_are_found_in_the_score_cache(search):
    """Fewer PRM requests, more steps found; every solution is still asked once."""
    strategy = BeamSearch(n=4, beam_width=1, max_depth=5)
    plain, _, prm = search(strategy=strategy)
    ahead, _, prm_ahead = search(strategy=strategy, lookahead_scoring=True)
    assert tree(ahead) == tree(plain)
    assert len(prm_ahead.asked) < len(prm.asked)
    assert ahead.problems["scores_cached"].sum() > plain.problems["scores_cached"].sum()
    asked = [(ids, p) for ids, params, _ in prm_ahead.asked for p in params.positions]
    judged = [ids[: p + 1] for ids, p in asked]
    assert len(set(judged)) == len(judged)


def test_a_recording_holds_the_steps_of_the_plain_search(search, tmp_path):
    """Speculated or not: a node's tokens, and how its one request that counts ended."""
    kept = []
    for name, wanted in (("plain", False), ("ahead", True)):
        path = tmp_path / f"{name}.parquet"
        search(speculative_extension=wanted, lookahead_scoring=wanted, record=path)
        recording = read_recording(path)
        kept.append([sorted(_without_round(p.steps)) for p in recording.problems])
        assert recording.settings.switches["speculative_extension"] == wanted
    assert kept[0] == kept[1]


def _without_round(steps):
    """Everything about recorded steps but when they were asked for."""
    return [(s.path, s.tokens, s.text, s.slot, s.finish_reason, s.request_reason) for s in steps]
