"""Trace tables: columns exactly as agreed, one clock, whole files that say their version."""

import math
import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from workbench.core import SamplingParams, ScoreParams, Sequence, Tag
from workbench.errors import RunStoreError
from workbench.trace import NodeRow, Recorder, StepCounts, read_rows, read_table, write_table

COLUMNS = {
    "steps": """run_id engine step start_s duration_s schedule_s prefill_tokens decode_tokens
        cached_tokens running waiting preempted blocks_total blocks_active blocks_cached blocks_free
        allocated evicted thrashed thrash_events query_tokens hit_tokens readmit_hit_tokens
        tokens_held recomputed_tokens_evicted recomputed_tokens_preempted recomputed_tokens_partial
        score_requests score_cache_hits blocks_target""",
    "requests": """run_id engine request_id kind problem_id node_id seed arrival_s scheduled_s
        first_token_s finished_s prompt_tokens cached_tokens readmit_cached_tokens output_tokens
        preemptions finish_reason""",
    "nodes": """run_id problem_id node_id parent_id path depth beam step_tokens total_tokens
        score kept finished token_ids""",
    "spans": "run_id lane kind start_s duration_s",
}
COUNTS = StepCounts(*range(1, 1 + len(StepCounts._fields)))


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
    node = NodeRow("run7", "p1", "0/2", "0", (0, 2), 2, 1, 2, 5, 0.5, True, False, (8, 9))
    recorder.node_rows.append(node)
    recorder.span("llm", "waiting", 1004.0, 0.5)
    return recorder


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "empty"])
@pytest.mark.parametrize("table", COLUMNS)
def test_columns_and_types_are_the_agreed_ones_with_and_without_rows(table: str, rows: bool):
    frame = getattr((recorded() if rows else Recorder()).trace(), table)
    assert list(frame.columns) == COLUMNS[table].split()
    for column in frame.columns:
        if column.endswith("_s") or column == "score":
            assert frame[column].dtype == np.float64
        elif table == "steps" and column not in ("run_id", "engine"):
            assert frame[column].dtype == np.int64


def test_rows_say_what_was_given_and_times_count_from_the_run_s_origin() -> None:
    trace = recorded().trace()
    assert trace.steps.start_s.tolist() == [0.5, 1.0]
    assert trace.steps.blocks_target.tolist() == [COUNTS.blocks_total, 5]
    assert trace.steps.evicted.tolist() == [COUNTS.evicted] * 2
    times = ["arrival_s", "scheduled_s", "first_token_s", "finished_s"]
    assert trace.requests.iloc[0][times].tolist() == [0.25, 0.5, 1.5, 2.0]
    assert trace.spans.start_s.tolist() == [4.0]
    generated, scored = recorded().trace().requests.to_dict("records")
    names = ("kind", "problem_id", "node_id", "seed", "prompt_tokens", "output_tokens")
    assert [generated[name] for name in names] == ["generate", "p1", "0/2", 2**64 - 1, 3, 1]
    assert scored["kind"] == "score"
    assert pd.isna(scored["seed"]) and pd.isna(scored["first_token_s"])


def test_a_bounded_trace_keeps_the_last_rows_and_says_how_many_it_lacks(tmp_path: Path) -> None:
    """In memory and in its files' `dropped_rows`; without a bound all are kept."""
    bounded, whole = Recorder(most_rows=10), Recorder()
    for number in range(95):
        for recorder in (bounded, whole):
            recorder.step("llm", number, 0.0, 0.0, 0.0, COUNTS)
            recorder.span("llm", "waiting", number, 0.0)
        kept = len(bounded.step_rows)
        assert min(number + 1, 10) <= kept <= 20
    trace = bounded.trace()
    assert trace.dropped == {"steps": 95 - kept, "requests": 0, "nodes": 0, "spans": 95 - kept}
    read = read_table(write_table(trace.steps, tmp_path / "steps.parquet"))
    for steps in (trace.steps, read):
        assert steps["step"].tolist() == [*range(95 - kept, 95)]
        assert steps.attrs == {"dropped_rows": 95 - kept}
    assert whole.trace().steps["step"].tolist() == [*range(95)]
    assert not any(whole.trace().dropped.values())


def test_what_is_written_is_read_back_the_same(tmp_path: Path) -> None:
    for table in COLUMNS:
        one = getattr(recorded().trace(), table)
        other = read_table(write_table(one, tmp_path / f"{table}.parquet"))
        assert one.dtypes.astype(str).tolist() == other.dtypes.astype(str).tolist()
        lists = [c for c in ("path", "token_ids") if c in one]
        one, other = (each.assign(**each[lists].map(list)) for each in (one, other))
        pd.testing.assert_frame_equal(one, other)


def test_a_file_that_is_not_a_whole_one_of_this_schema_is_refused(tmp_path, monkeypatch) -> None:
    """Foreign, missing, cut and damaged ones, and another schema, which is named beside ours."""
    path, foreign = tmp_path / "steps.parquet", tmp_path / "foreign.parquet"
    recorded().steps.to_parquet(foreign)
    whole = write_table(recorded().steps, path).read_bytes()
    assert pq.read_schema(path).metadata[b"workbench_schema_version"] == b"1"
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    plain = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pq.read_table(path), where := tmp_path / "damaged.parquet", **plain)
    column = pq.ParquetFile(where).metadata.row_group(0).column(3)  # seconds
    damaged = bytearray(where.read_bytes())
    damaged[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    where.write_bytes(damaged)
    assert len(pq.read_table(where)), "what nothing but its checksum tells"
    for name, said in (
        ("foreign", "schema version none"),
        ("nothing", "missing"),
        ("cut", "no readable Parquet"),
        ("damaged", "no readable Parquet"),
    ):
        with pytest.raises(RunStoreError, match=said):
            read_table(tmp_path / f"{name}.parquet")
    monkeypatch.setattr("workbench.trace.SCHEMA_VERSION", 2)
    with pytest.raises(RunStoreError, match="schema version 1; this workbench reads version 2"):
        read_table(path)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = write_table(recorded().steps, tmp_path / "steps.parquet")
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_table(Recorder().steps, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["steps.parquet"]


@pytest.mark.parametrize("rows", [0, 2])
def test_rows_are_those_of_the_frame(tmp_path, rows):
    """Numbers, texts and what is missing among them, by value and type, in the columns' order."""
    columns = {"count": [1, 2], "share": [0.5, None], "said": ["a", None], "is_so": [True, False]}
    frame = pd.DataFrame(columns | {"none": [None, None], "of_no_row": [math.nan] * 2})
    file = write_table(frame[:rows], tmp_path / "some.parquet")
    assert repr(read_rows(file)) == repr(read_table(file).to_dict("records"))
