"""Trace tables: columns exactly as agreed, one clock, whole files that say their version."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from workbench.core import SamplingParams, ScoreParams, Sequence, Tag
from workbench.errors import RunStoreError
from workbench.trace import NodeRow, Recorder, StepCounts, Trace, read_table, write_table

STEPS = """run_id, engine, step, start_s, duration_s, schedule_s, prefill_tokens, decode_tokens,
cached_tokens, running, waiting, preempted, blocks_total, blocks_active, blocks_cached, blocks_free,
allocated, evicted, thrashed, thrash_events, query_tokens, hit_tokens, readmit_hit_tokens,
tokens_held, recomputed_tokens_evicted, recomputed_tokens_preempted, recomputed_tokens_partial,
score_requests, score_cache_hits, blocks_target"""
REQUESTS = """run_id, engine, request_id, kind, problem_id, node_id, seed, arrival_s, scheduled_s,
first_token_s, finished_s, prompt_tokens, cached_tokens, readmit_cached_tokens, output_tokens,
preemptions, finish_reason"""
NODES = """run_id, problem_id, node_id, parent_id, path, depth, beam, step_tokens, total_tokens,
score, kept, finished, token_ids"""
SPANS = "run_id, lane, kind, start_s, duration_s"
COLUMNS = {"steps": STEPS, "requests": REQUESTS, "nodes": NODES, "spans": SPANS}
COUNTS = StepCounts(*range(1, 1 + len(StepCounts._fields)))


def names(text: str) -> list[str]:
    return text.replace("\n", " ").replace(" ", "").split(",")


def recorded() -> Recorder:
    """A row of each table, two engines, a clock that does not start at 0."""
    recorder = Recorder("run7", origin=1000.0)
    recorder.step("llm", 0, 1000.5, 0.25, 0.01, COUNTS)
    recorder.step("prm", 0, 1001.0, 0.25, 0.01, COUNTS, blocks_target=5)
    params, tag = SamplingParams(seed=-1), Tag("p1", "0/2")
    generated = Sequence(4, [1, 2, 3, 4], 3, params, tag=tag, arrival_s=1000.25)
    generated.scheduled_s, generated.first_token_s = 1000.5, 1001.5
    recorder.request("llm", generated, "stop", 1002.0)
    scored = Sequence(5, [1, 2], 2, score=ScoreParams((1,), (7,)), arrival_s=1002.0)
    recorder.request("prm", scored, "score", 1003.0)
    recorder.node_rows.append(
        NodeRow("run7", "p1", "0/2", "0", (0, 2), 2, 1, 2, 5, 0.5, True, False, (8, 9))
    )
    recorder.span("llm", "waiting", 1004.0, 0.5)
    return recorder


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "empty"])
@pytest.mark.parametrize("table", COLUMNS)
def test_columns_and_types_are_the_agreed_ones_with_and_without_rows(
    table: str, rows: bool
) -> None:
    trace = (recorded() if rows else Recorder()).trace()
    frame = getattr(trace, table)
    assert list(frame.columns) == names(COLUMNS[table])
    numbers = [c for c in frame.columns if c.endswith("_s") or c == "score"]
    assert all(frame[c].dtype == np.float64 for c in numbers)
    counts = [c for c in names(STEPS)[6:] if c in frame.columns and table == "steps"]
    assert all(frame[c].dtype == np.int64 for c in counts)


def test_rows_say_what_was_given_and_times_count_from_the_run_s_origin() -> None:
    trace = recorded().trace()
    assert trace.steps.start_s.tolist() == [0.5, 1.0]
    assert trace.steps.blocks_target.tolist() == [COUNTS.blocks_total, 5]
    assert trace.steps.evicted.tolist() == [COUNTS.evicted] * 2
    request = trace.requests.iloc[0]
    times = [request.arrival_s, request.scheduled_s, request.first_token_s, request.finished_s]
    assert times == [0.25, 0.5, 1.5, 2.0]
    assert trace.spans.start_s.tolist() == [4.0]
    generated, scored = recorded().trace().requests.to_dict("records")
    names = ("kind", "problem_id", "node_id", "seed", "prompt_tokens", "output_tokens")
    assert [generated[name] for name in names] == ["generate", "p1", "0/2", 2**64 - 1, 3, 1]
    assert scored["kind"] == "score"
    assert pd.isna(scored["seed"])
    assert pd.isna(scored["first_token_s"])


def test_what_is_written_is_read_back_the_same(tmp_path: Path) -> None:
    trace = recorded().trace()
    trace.to_parquet(tmp_path / "run")
    read = Trace.read(tmp_path / "run")
    for table in COLUMNS:
        one, other = getattr(trace, table), getattr(read, table)
        assert one.dtypes.astype(str).tolist() == other.dtypes.astype(str).tolist()
        lists = [c for c in ("path", "token_ids") if c in one]
        pd.testing.assert_frame_equal(one.drop(columns=lists), other.drop(columns=lists))
        assert all(list(a) == list(b) for c in lists for a, b in zip(one[c], other[c]))


def test_newer_foreign_missing_and_cut_files_are_refused(tmp_path: Path) -> None:
    path = write_table(recorded().steps, tmp_path / "newer.parquet")
    content = pq.read_table(path)
    assert content.schema.metadata[b"workbench_schema_version"] == b"1"
    pq.write_table(content.replace_schema_metadata({b"workbench_schema_version": b"2"}), path)
    with pytest.raises(RunStoreError, match="schema version 2; this workbench reads version 1"):
        read_table(path)
    recorded().steps.to_parquet(tmp_path / "foreign.parquet")
    with pytest.raises(RunStoreError, match="schema version none"):
        read_table(tmp_path / "foreign.parquet")
    with pytest.raises(RunStoreError, match="missing"):
        read_table(tmp_path / "nothing.parquet")
    whole = write_table(recorded().steps, tmp_path / "steps.parquet").read_bytes()
    (tmp_path / "steps.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunStoreError, match="no readable Parquet"):
        read_table(tmp_path / "steps.parquet")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch
) -> None:
    path = write_table(recorded().steps, tmp_path / "steps.parquet")
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_table(Recorder().steps, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["steps.parquet"]
