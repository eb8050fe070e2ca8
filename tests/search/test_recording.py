"""Recorded searches: what is kept, that it survives the file, and what is refused on reading."""

import os
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.errors import ConfigError, RecordingError
from workbench.search.prm import PRM, ScoreCache
from workbench.search.problems import Problem, load_problems
from workbench.search.recording import RecordedEngine, read_header, read_recording
from workbench.search.rounds import Progress
from workbench.search.search import Search, run_search
from workbench.search.strategies import BeamSearch, BestOfN

PROBLEMS = [Problem(f"p{k}", f"Compute {k}+{k}.", str(2 * k), k) for k in range(3)]
BEAMS = BeamSearch(n=4, beam_width=2, max_depth=4)


def search(fake_engine, path, strategy=BEAMS, length: int = 4096, **options):
    llm, prm = fake_engine(max_model_len=length), PRM(fake_engine())
    options = {"min_problem_batch": 2, "seed": 3} | options
    result = run_search(PROBLEMS, llm=llm, prm=prm, strategy=strategy, record=path, **options)
    return result, llm, prm.engine


@pytest.mark.parametrize(
    ("strategy", "length"), [(BEAMS, 4096), (BestOfN(n=3, max_tokens=60), 4096), (BEAMS, 120)]
)
def test_every_token_and_score_is_kept(fake_engine, tmp_path, strategy, length) -> None:
    """The two tries rebuild each node of the tree and each input that the PRM was asked."""
    path = tmp_path / "new" / "search.parquet"
    result, _, prm = search(fake_engine, path, strategy, length)
    recording = read_recording(path)
    tree = result.tree.set_index(["problem_id", "node_id"])
    inputs, texts = set(), {(): ()}
    for kept in recording.problems:
        for step in kept.steps:
            row = tree.loc[(kept.problem.id, "/".join(map(str, step.path)))]
            assert step.tokens == tuple(row["token_ids"])
            assert (step.text, step.finish_reason) == (row["text"], row["finish_reason"])
            assert step.slot == row["beam"]
            texts[step.path] = (*texts[step.path[:-1]], step.text)
            if strategy is BEAMS and step.finish_reason != "context":
                (judged,) = (s for s in kept.solutions if s.steps == texts[step.path])
                assert judged.score == row["score"]
        tokens = {(): ()}
        for solution in kept.solutions:
            tokens[solution.steps] = tokens[solution.steps[:-1]] + solution.tokens
            if solution.asks and solution.score is not None:
                inputs.add(tokens[solution.steps])
    assert len(tree) == sum(len(kept.steps) for kept in recording.problems)
    assert {tokens for tokens, _, _ in prm.asked} <= inputs
    assert [kept.problem for kept in recording.problems] == PROBLEMS


def test_settings_and_engines_are_kept(fake_engine, tmp_path) -> None:
    """Strategy, seed, batch, the engines; of a cache whose memory was split anew no size."""
    search(fake_engine, tmp_path / "a", score_cache=False, temperature=0.5)
    recording = read_recording(tmp_path / "a")
    kept = recording.settings
    assert (kept.strategy, kept.strategy_settings["beam_width"]) == ("BeamSearch", 2)
    assert (kept.seed, kept.min_problem_batch, kept.score_cache) == (3, 2, False)
    assert (kept.temperature, kept.prm_format) == (0.5, "rlhflow")
    assert (recording.llm.name, recording.llm.config) == ("fake-rlhflow", None)
    engine = fake_engine()
    engine.description = {"num_blocks": 40, "weight_bytes": 1000, "block_bytes": 64}
    assert RecordedEngine.of(engine, {40}).num_blocks == 40
    assert RecordedEngine.of(engine, {40, 30}).num_blocks is None


def test_the_header_says_what_the_recording_does(fake_engine, tmp_path) -> None:
    """Settings, engines and problems, without reading a token; neither reads a file that is cut."""
    path = tmp_path / "search.parquet"
    search(fake_engine, path)
    whole, header = read_recording(path), read_header(path)
    assert (header.settings, header.llm, header.prm) == (whole.settings, whole.llm, whole.prm)
    assert [p.problem for p in header.problems] == [p.problem for p in whole.problems]
    content = path.read_bytes()
    for length in (0, 3, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        for read in (read_header, read_recording):
            with pytest.raises(RecordingError, match=r"search\.parquet is no readable Parquet"):
                read(path)


def test_a_search_that_fails_leaves_the_old_file(fake_engine, tmp_path) -> None:
    """The file appears whole, at the end, or not at all."""
    path = tmp_path / "search.parquet"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        search(fake_engine, path, on_round=Mock(side_effect=KeyboardInterrupt))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["search.parquet"]


def test_of_a_search_that_fails_the_answered_problems_are_recorded(fake_engine, tmp_path) -> None:
    """As the whole search has them, in a file of its own, which reads like any."""
    path, part = tmp_path / "search.parquet", tmp_path / "search.partial.parquet"
    search(fake_engine, path)
    whole, content = read_recording(path), path.read_bytes()

    def stop(progress) -> None:
        if progress.answered:
            raise RuntimeError("the server is gone")

    with pytest.raises(RuntimeError, match="is gone") as caught:
        search(fake_engine, path, on_round=stop)
    kept = read_recording(part).problems
    assert [each.problem.id for each in kept] == list(caught.value.result.problems["problem_id"])
    assert set(kept) < set(whole.problems) and path.read_bytes() == content


def test_a_flipped_byte_is_noticed(fake_engine, tmp_path) -> None:
    """Whichever byte of the file changed: it is refused, or it meant nothing."""
    path = tmp_path / "search.parquet"
    search(fake_engine, path)
    whole, recording = path.read_bytes(), read_recording(path)
    refused = 0
    for place in range(4, len(whole), len(whole) // 150):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            assert read_recording(path) == recording, f"byte {place}"
        except RecordingError:
            refused += 1
    assert refused > 50


def test_missing_foreign_newer_and_damaged_files_are_refused(fake_engine, tmp_path) -> None:
    """Each says what it is: rows or columns that are missing, a parent below its child, too."""
    with pytest.raises(RecordingError, match="There is no recording"):
        read_recording(tmp_path / "none")
    pq.write_table(pa.table({"kind": ["prompt"]}), tmp_path / "foreign")
    with pytest.raises(RecordingError, match="no recorded search"):
        read_recording(tmp_path / "foreign")
    search(fake_engine, tmp_path / "a")
    content = pq.ParquetFile(tmp_path / "a").read()
    newer = content.schema.metadata | {b"workbench_recording_version": b"99"}
    pq.write_table(content.replace_schema_metadata(newer), tmp_path / "newer")
    with pytest.raises(RecordingError, match="version 99; this workbench reads version 1"):
        read_recording(tmp_path / "newer")
    parents = content["parent"].to_pylist()
    parents[1] = len(parents) - 1
    place = content.schema.get_field_index("parent")
    turned = content.set_column(place, "parent", pa.array(parents, pa.int32()))
    for damaged in (content.slice(0, 5), content.drop_columns(["score"]), turned):
        pq.write_table(damaged, tmp_path / "b")
        with pytest.raises(RecordingError, match="is damaged"):
            read_recording(tmp_path / "b")


def test_places_and_caches_that_cannot_be_recorded(fake_engine, tmp_path) -> None:
    """A folder is no file, scores of another run leave holes: refused before anything runs."""
    with pytest.raises(ConfigError, match="path of a file"):
        search(fake_engine, tmp_path)
    cache = ScoreCache()
    cache["another", "p", ("step",)] = 0.5
    with pytest.raises(ConfigError, match="1 scores of another run"):
        search(fake_engine, tmp_path / "a", score_cache=cache)


def test_a_record_is_of_caches_that_were_empty_and_as_large_as_they_were(tmp_path) -> None:
    """A replay begins with empty ones, of the size that the search had."""
    limits = {"num_blocks": 96, "max_model_len": 256}
    llm, prm = (Engine(name, **limits) for name in ("tiny-solver", "tiny-prm"))
    llm.cache.resize(80)
    how = {"llm": llm, "prm": PRM(prm), "strategy": BEAMS, "max_step_tokens": 32}
    problems = load_problems("tiny", 1, levels=[1])
    run_search(problems, record=tmp_path / "a.parquet", **how)
    assert read_recording(tmp_path / "a.parquet").llm.num_blocks == 80
    with pytest.raises(ConfigError, match=r"The LLM's cache holds \d+ blocks of earlier requests"):
        run_search(problems, record=tmp_path / "b.parquet", **how)
    llm.cache.reset(), prm.cache.reset()
    late = Search(problems, record=tmp_path / "c.parquet", **how)
    run_search(problems, record=tmp_path / "b.parquet", **how)
    with pytest.raises(ConfigError, match=r"The LLM's cache holds \d+ blocks of earlier requests"):
        late.round()  # they were empty when it was made
    llm.cache.reset(), prm.cache.reset()
    late.play()
    steps = [read_recording(tmp_path / f"{name}.parquet").problems[0].steps for name in "bc"]
    assert steps[0] == steps[1]


def test_a_round_that_others_requests_hindered_loses_no_record(fake_engine, tmp_path) -> None:
    """It can be played again, and the whole search is written, not what was answered by then."""
    llm, path = fake_engine(), tmp_path / "a.parquet"
    how = {"prm": PRM(fake_engine()), "strategy": BEAMS, "min_problem_batch": 1}
    rounds: list[Progress] = []
    found = Search(PROBLEMS, llm=llm, record=path, on_round=rounds.append, **how)
    while not rounds or not rounds[-1].answered:
        assert found.round()
    number = llm.add("hello", SamplingParams(max_tokens=2))
    with pytest.raises(ConfigError, match="none of this search's"):
        found.round()
    llm.abort(number)
    while found.round():
        pass
    assert len(read_recording(path).problems) == len(PROBLEMS)
