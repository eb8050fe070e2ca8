"""A verifier that decodes: what it is asked, its seeds, its scores, and that nothing is lost."""

import re

import pytest

from tests.search.conftest import tree
from workbench.core import SamplingParams, ScoreParams
from workbench.engine.engine import Engine
from workbench.errors import ConfigError, ModelError, RecordingError
from workbench.replay import workload
from workbench.replay.simulator import Costs, events, replay
from workbench.replay.workload import load_recording, with_critiques
from workbench.search.prm import FORMATS, PRM, Critiques, ScoreCache
from workbench.search.problems import Problem, load_problems
from workbench.search.recording import read_recording, write_recording
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch, BestOfN
from workbench.tokenizer import ByteTokenizer

PROBLEMS = [Problem(f"p{k}", f"Compute {k}+{k}.", str(2 * k), k) for k in range(3)]
BEAMS = BeamSearch(n=4, beam_width=2, max_depth=3)
TWO = Critiques(count=2, tokens=60)
YES, NO = ord("y"), ord("n")


def canned(text: str, seed: int) -> str:
    """A critique that finds steps of odd numbers wrong, and now and then forgets to."""
    wrong = re.search(r"step [135]", text.partition("[Solution]")[2]) and seed % 4
    return f"Critique {seed % 97}: {'wrong' if wrong else 'fine'}</think> never read"


@pytest.fixture
def verifier(fake_engine):
    """A fake verifier of canned critiques, whose verdict is what the critique before it says."""

    def make(critiques=TWO, batch=3, **options):
        engine = fake_engine(canned, batch=batch, **options)
        engine.judge = lambda ids: (0.0, 3.0 if "wrong" in engine.tokenizer.decode(ids) else -3.0)
        return PRM(engine, "thinkprm", critiques)

    return make


def search(fake_engine, prm, problems=PROBLEMS, batch=3, strategy=BEAMS, **options):
    llm = fake_engine(batch=batch)
    options = {"min_problem_batch": 2, "seed": 3} | options
    return run_search(problems, llm=llm, prm=prm, strategy=strategy, **options)


def test_each_step_gets_critiques_and_then_their_verdicts(fake_engine, verifier) -> None:
    """A critique follows the question and the steps, its verdict the critique; scores are means."""
    prm = verifier()
    result = search(fake_engine, prm)
    decode, asked = prm.engine.tokenizer.decode, prm.engine.asked
    sampled = [(ids, p) for ids, p, _ in asked if isinstance(p, SamplingParams)]
    judged = [decode(ids) for ids, p, _ in asked if isinstance(p, ScoreParams)]
    assert len(sampled) == len(judged) == 2 * result.problems["scores_asked"].sum() > 8
    assert len({p.seed for _, p in sampled}) == len(sampled)
    for ids, p in sampled:
        text = decode(ids)
        assert "[Math Problem]\n\nCompute " in text and "[Solution]\n\ns" in text
        assert text.endswith("Let's verify step by step:")
        critique = canned(text, p.seed).partition(" never")[0]
        assert f"{text}{critique}\nIs the solution correct? " in judged
        assert (p.max_tokens, p.temperature) == (60, 0.7)
    assert {p.columns for _, p, _ in asked if isinstance(p, ScoreParams)} == {(YES, NO)}
    high, low = (next(PRM.scores([pair])) for pair in ((0.0, -3.0), (0.0, 3.0)))
    means = {high, low, round(2**15 * (high + low)) / 2**16}
    assert set(result.tree["score"]) <= means | {0.5} and low in set(result.tree["score"])
    counts = result.problems[["prm_tokens_sampled", "prm_tokens_asked"]].sum()
    written = [canned(decode(ids), p.seed).partition(" never")[0] for ids, p in sampled]
    assert counts["prm_tokens_sampled"] == sum(map(len, written))
    assert counts["prm_tokens_asked"] == sum(len(ids) for ids, _, _ in asked)


@pytest.mark.parametrize("batch", [1, 50])
def test_nothing_but_the_seed_changes_a_critique(fake_engine, verifier, batch) -> None:
    """Batches, problems in flight, the order of requests, and the score cache change no score."""
    expected = tree(search(fake_engine, verifier()))
    for more in ({"min_problem_batch": batch}, {"request_order": "slot"}, {"score_cache": False}):
        found = search(fake_engine, verifier(batch=batch), batch=batch, **more)
        assert tree(found) == expected
    assert tree(search(fake_engine, verifier(), seed=4)) != expected


def test_settings_of_a_search_change_the_verifier(fake_engine, verifier) -> None:
    """critiques, critique_tokens, critique_temperature; None leaves them as the PRM was made."""
    prm = verifier()
    more = {"critiques": 1, "critique_tokens": 9, "critique_temperature": 0.0}
    search(fake_engine, prm, **more)
    params = {p for _, p, _ in prm.engine.asked if isinstance(p, SamplingParams)}
    assert {(p.max_tokens, p.temperature) for p in params} == {(9, 0.0)}
    search(fake_engine, again := verifier(), prm_format="thinkprm")
    asked = [p for _, p, _ in again.engine.asked if isinstance(p, SamplingParams)]
    assert {p.max_tokens for p in asked} == {60}


def test_a_shared_score_cache_knows_the_seed(fake_engine, verifier) -> None:
    """The same seed finds every score; another seed, or other critiques, none."""
    cache = ScoreCache()
    search(fake_engine, verifier(), score_cache=cache)
    for prm, seed, known in ((verifier(), 3, True), (verifier(Critiques(1, 60)), 3, False)):
        again = search(fake_engine, prm, score_cache=cache, seed=seed)
        assert (again.problems["prm_requests"].sum() == 0) == known
    before = len(cache)
    search(fake_engine, verifier(), score_cache=cache, seed=4)
    assert len(cache) > before


@pytest.mark.parametrize("strategy", [BEAMS, BestOfN(n=3, max_tokens=60)], ids=["beams", "samples"])
def test_a_language_model_verifies_and_the_replay_is_the_run(strategy, tmp_path) -> None:
    """Rows, trace and recording hold the critiques; the replay has every event, also scarce."""
    path, limits = tmp_path / "search.parquet", {"max_num_seqs": 8, "max_num_batched_tokens": 128}
    llm = Engine("tiny-solver", num_blocks=80, max_model_len=512, **limits)
    prm = Engine("tiny-solver", num_blocks=50, max_model_len=768, **limits)
    more = {"critiques": 2, "critique_tokens": 24, "critique_temperature": 0.9}
    more |= {"record": path, "max_step_tokens": 40, "strategy": strategy}
    pair = {"llm": llm, "prm": PRM(prm, "thinkprm")}
    result = run_search(load_problems("tiny", 2, levels=[1]), **pair, **more)
    requests, steps = result.trace.requests, result.trace.steps
    own = requests[(requests["engine"] == "prm") & (requests["kind"] == "generate")]
    sampled = result.problems["prm_tokens_sampled"].sum()
    assert own["output_tokens"].sum() == sampled > 100
    assert steps.loc[steps["engine"] == "prm", "decode_tokens"].sum() > 0.8 * sampled
    recording = read_recording(path)
    assert sum(len(c.tokens) for p in recording.problems for c in p.critiques) == sampled
    assert read_recording(write_recording(recording, tmp_path / "again.parquet")) == recording
    costs = Costs(lambda _: 0.001, lambda _: 0.002)
    replayed = replay(recording, costs).trace
    assert events(replayed.steps).equals(events(steps))
    times = [name for name in requests if name.endswith("_s")]
    bare = [table.drop(columns=["run_id", *times]) for table in (requests, replayed.requests)]
    assert bare[0].equals(bare[1])
    other = replay(recording, costs, prm={"num_blocks": 400}, min_problem_batch=1).trace
    order = ["problem_id", "path"]
    nodes = [t.nodes.drop(columns="run_id").sort_values(order) for t in (result.trace, other)]
    assert nodes[0].reset_index(drop=True).equals(nodes[1].reset_index(drop=True))
    lost = [*recording.problems[0].critiques[1:]]
    object.__setattr__(recording.problems[0], "critiques", tuple(lost))
    with pytest.raises(RecordingError, match="no score"):
        replay(recording, costs)


def test_a_recorded_search_gets_drawn_critiques(monkeypatch) -> None:
    """The same tree, and a PRM that decodes as many tokens as were drawn; one median, one most."""
    plain = load_recording("tiny-16-n4")
    monkeypatch.setattr(workload, "CRITIQUE_MEDIAN", 30.0)
    drawn = with_critiques(plain, Critiques(1, 50))
    lengths = [len(c.tokens) for p in drawn.problems for c in p.critiques]
    judged = sum(s.score is not None for p in plain.problems for s in p.solutions)
    assert len(lengths) == judged and max(lengths) == 50 and 25 < sorted(lengths)[judged // 2] < 35
    costs, roomy = Costs(lambda _: 0.001, lambda _: 0.002), {"num_blocks": 4000}
    before, after = (replay(each, costs, prm=roomy).trace for each in (plain, drawn))
    assert before.nodes.drop(columns="run_id").equals(after.nodes.drop(columns="run_id"))
    prm = after.requests[after.requests["engine"] == "prm"]
    assert prm["output_tokens"].sum() == sum(lengths)


class Wordless(ByteTokenizer):
    """Bytes without small letters."""

    def encode(self, text, **options):
        return super().encode(text.upper(), **options)


def test_what_cannot_be_a_verifier_is_refused(fake_engine, verifier) -> None:
    """Tokens of "yes" and "no", room for a critique, a format that writes any: each named."""
    engine = fake_engine()
    engine.tokenizer = Wordless()
    with pytest.raises(ModelError, match=r"' yes' and ' no' as .*'YES' and 'NO'.*--prm-format"):
        PRM(engine, "thinkprm")
    with pytest.raises(ConfigError, match=r"'rlhflow' writes no critiques.*formats that do: think"):
        PRM(fake_engine(), critiques=Critiques())
    with pytest.raises(ConfigError, match="writes no critiques"):
        search(fake_engine, PRM(fake_engine()), critique_tokens=5)
    with pytest.raises(ConfigError, match=r"up to \d+ tokens .* max_model_len = 512"):
        search(fake_engine, verifier(Critiques(1, 400), max_model_len=512))
    with pytest.raises(ConfigError, match=r"Critiques\.count is 0"):
        Critiques(count=0)
    assert [name for name, kind in FORMATS.items() if kind.critique_stop] == ["thinkprm"]
