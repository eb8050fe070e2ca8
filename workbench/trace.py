"""The record of a run: frozen row types, a recorder shared by its engines, Parquet files.

Every table has one row type, whose fields are its columns; seconds count from the run's one origin.
A row costs about a microsecond to append. pandas and pyarrow take half a second to import, so they
are imported where frames and files are made: an engine runs without.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from workbench.core import Sequence
from workbench.errors import RunStoreError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

SCHEMA_VERSION = 1
MOST_ROWS = 1 << 16
"""Rows of a table that an engine keeps of its own for certain, half a kilobyte each."""
_VERSION_KEY, _DROPPED = b"workbench_schema_version", "dropped_rows"


class StepCounts(NamedTuple):
    """What a scheduler did in one step. blocks_*: after scheduling; the rest: this step's counts.

    cached_tokens: found cached by this step's admissions, re-admissions included. tokens_held:
    tokens that the active blocks hold, shared ones once. prefill_tokens and decode_tokens: rows
    computed, in static batches their padding too. recomputed_*: computed in this step and
    once before, lost by eviction, by preemption of their request, or because their block was never
    full. score_requests: first admitted in this step.
    """

    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int
    running: int
    waiting: int
    preempted: int
    blocks_total: int
    blocks_active: int
    blocks_cached: int
    blocks_free: int
    allocated: int
    evicted: int
    thrashed: int
    thrash_events: int
    query_tokens: int
    hit_tokens: int
    readmit_hit_tokens: int
    tokens_held: int
    recomputed_tokens_evicted: int
    recomputed_tokens_preempted: int
    recomputed_tokens_partial: int
    score_requests: int


class StepRow(NamedTuple):
    """One step of one engine; in the table the columns of `counts` stand in its place.

    duration_s: the whole step; schedule_s: the scheduler's part.
    """

    run_id: str
    engine: str
    step: int
    start_s: float
    duration_s: float
    schedule_s: float
    counts: StepCounts
    score_cache_hits: int
    blocks_target: int


class RequestRow(NamedTuple):
    """One finished request. kind: generate | score; seed: None if it scores; time None: never."""

    run_id: str
    engine: str
    request_id: int
    kind: str
    problem_id: str
    node_id: str
    seed: int | None
    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    prompt_tokens: int
    cached_tokens: int
    readmit_cached_tokens: int
    output_tokens: int
    preemptions: int
    finish_reason: str


class NodeRow(NamedTuple):
    """One sampled node of a search tree (no root row). path: ordinals; token_ids: its own."""

    run_id: str
    problem_id: str
    node_id: str
    parent_id: str
    path: tuple[int, ...]
    depth: int
    beam: int
    step_tokens: int
    total_tokens: int
    score: float
    kept: bool
    finished: bool
    token_ids: tuple[int, ...]


class SpanRow(NamedTuple):
    """Time outside steps. lane: whose time; kind: tokenising, strategy, bookkeeping."""

    run_id: str
    lane: str
    kind: str
    start_s: float
    duration_s: float


ROW_TYPES: dict[str, type[NamedTuple]] = {
    "steps": StepRow,
    "requests": RequestRow,
    "nodes": NodeRow,
    "spans": SpanRow,
}
_DTYPES = {
    int: "int64",
    float: "float64",
    str: "str",
    bool: "bool",
    float | None: "float64",
    int | None: "UInt64",
}


class Recorder:
    """Collects the rows of a run, of all its engines, on one clock.

    Every time given to it is a reading of one monotonic clock (time.perf_counter unless the run
    says otherwise). origin: the clock's reading at second 0 (default: now). most_rows: of steps,
    requests and spans the last so many are kept, and never more than twice as many; the rest is
    dropped, and the trace says how many were (default: all are kept, as a run needs them).
    """

    def __init__(
        self, run_id: str = "run", origin: float | None = None, *, most_rows: int | None = None
    ) -> None:
        self.run_id, self.most_rows = run_id, most_rows
        self.dropped = dict.fromkeys(ROW_TYPES, 0)  # rows of each table
        self.origin = time.perf_counter() if origin is None else origin
        self.step_rows: list[StepRow] = []
        self.request_rows: list[RequestRow] = []
        self.node_rows: list[NodeRow] = []
        self.span_rows: list[SpanRow] = []
        each = self.step_rows, self.request_rows, self.node_rows, self.span_rows
        self._rows: dict[str, list[Any]] = dict(zip(ROW_TYPES, each))

    def step(
        self,
        engine: str,
        step: int,
        start_s: float,
        duration_s: float,
        schedule_s: float,
        counts: StepCounts,
        *,
        blocks_target: int | None = None,
    ) -> None:
        """One scheduling step; start_s is a clock reading, blocks_target default: blocks_total."""
        target = counts.blocks_total if blocks_target is None else blocks_target
        own = self.run_id, engine, step, start_s - self.origin, duration_s, schedule_s
        self._keep("steps", StepRow(*own, counts, 0, target))

    def request(
        self, engine: str, sequence: Sequence, finish_reason: str, finished_s: float
    ) -> None:
        """One finished request; finished_s and the sequence's own times are clock readings."""
        params, origin = sequence.params, self.origin
        readings = sequence.scheduled_s, sequence.first_token_s
        scheduled, first_token = (None if at is None else at - origin for at in readings)
        row = RequestRow(
            run_id=self.run_id,
            engine=engine,
            request_id=sequence.request_id,
            kind="score" if params is None else "generate",
            problem_id=sequence.tag.problem_id,
            node_id=sequence.tag.node_id,
            seed=None if params is None else params.seed & 0xFFFF_FFFF_FFFF_FFFF,
            arrival_s=sequence.arrival_s - origin,
            scheduled_s=scheduled,
            first_token_s=first_token,
            finished_s=finished_s - origin,
            prompt_tokens=sequence.num_prompt_tokens,
            cached_tokens=sequence.num_cached_tokens,
            readmit_cached_tokens=sequence.readmit_cached_tokens,
            output_tokens=sequence.num_output_tokens,
            preemptions=sequence.preemptions,
            finish_reason=finish_reason,
        )
        self._keep("requests", row)

    def span(self, lane: str, kind: str, start_s: float, duration_s: float) -> None:
        """Time outside steps; start_s is a clock reading."""
        self._keep("spans", SpanRow(self.run_id, lane, kind, start_s - self.origin, duration_s))

    def _keep(self, table: str, row: NamedTuple) -> None:
        rows = self._rows[table]
        rows.append(row)
        if self.most_rows is not None and len(rows) > 2 * self.most_rows:
            self.dropped[table] += len(rows) - self.most_rows
            del rows[: -self.most_rows]

    @property
    def steps(self) -> pd.DataFrame:
        """A row a step, so far."""
        return self._frame("steps")

    @property
    def requests(self) -> pd.DataFrame:
        """A row a request that ended, so far."""
        return self._frame("requests")

    def _frame(self, table: str) -> pd.DataFrame:
        found = frame(table, self._rows[table])
        if self.dropped[table]:
            found.attrs[_DROPPED] = self.dropped[table]
        return found

    def trace(self) -> Trace:
        """All that was recorded so far and not dropped, as frames."""
        return Trace(**{table: self._frame(table) for table in ROW_TYPES})


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The four tables of a run; all of their rows unless `dropped` says otherwise."""

    steps: pd.DataFrame
    requests: pd.DataFrame
    nodes: pd.DataFrame
    spans: pd.DataFrame

    @property
    def dropped(self) -> dict[str, int]:
        """Of each table the earlier rows that it lacks; in a frame's or a file's `dropped_rows`."""
        return {table: getattr(self, table).attrs.get(_DROPPED, 0) for table in ROW_TYPES}


def frame(table: str, rows: SequenceOf[NamedTuple]) -> pd.DataFrame:
    """A trace table with exactly its columns and types, also when there are no rows."""
    import pandas as pd  # noqa: PLC0415 - slow

    columns = {}
    for field, hint in get_type_hints(ROW_TYPES[table]).items():
        nested = get_type_hints(hint) if hint is StepCounts else {"": hint}
        for inner, kind in nested.items():
            values = map(attrgetter(f"{field}.{inner}" if inner else field), rows)
            dtype = _DTYPES.get(kind, "object")  # columns of lists are objects
            columns[inner or field] = pd.Series(list(values), dtype=dtype)
    return pd.DataFrame(columns)


def write_table(table: pd.DataFrame, path: str | os.PathLike[str]) -> Path:
    """Write one table atomically, the schema version in the file's metadata; returns the path."""
    import pyarrow as pa  # noqa: PLC0415 - slow

    content = pa.Table.from_pandas(table, preserve_index=False)
    metadata = {**(content.schema.metadata or {}), _VERSION_KEY: str(SCHEMA_VERSION).encode()}
    return write_atomically(content.replace_schema_metadata(metadata), path)


def write_atomically(content: pa.Table | str, path: str | os.PathLike[str]) -> Path:
    """Write a Parquet file, or a text, beside its target and move it there; returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if isinstance(content, str):
            beside.write_text(content, encoding="utf-8")
        else:
            import pyarrow.parquet as pq  # noqa: PLC0415 - slow

            pq.write_table(content, beside, compression="zstd", write_page_checksum=True)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def read_table(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read one table; RunStoreError if missing, damaged, or of another schema version."""
    return _stored(path).to_pandas()


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a small, wide table of plain values, as pandas 3 gives `read_table`'s, in a third
    of the time: what is missing is NaN among numbers and texts, else None.
    """
    import pyarrow.types as of  # noqa: PLC0415 - slow

    content = _stored(path)
    kinds = of.is_integer, of.is_floating, of.is_string, of.is_large_string
    lacks = {
        field.name: math.nan if any(is_kind(field.type) for is_kind in kinds) else None
        for field in content.schema
    }
    return [
        {name: lacks[name] if value is None else value for name, value in row.items()}
        for row in content.to_pylist()
    ]


def _stored(path: str | os.PathLike[str]) -> pa.Table:
    import pyarrow as pa  # noqa: PLC0415 - slow
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            content = file.read()
    except FileNotFoundError as error:
        raise RunStoreError(f"{path} is missing; the run is incomplete: run it again.") from error
    except (pa.ArrowException, OSError) as error:
        raise RunStoreError(
            f"{path} is no readable Parquet file ({error}); run it again."
        ) from error
    version = (content.schema.metadata or {}).get(_VERSION_KEY, b"none").decode()
    if version != str(SCHEMA_VERSION):
        raise RunStoreError(
            f"{path} has schema version {version}; this workbench reads version {SCHEMA_VERSION}. "
            "Read it with the workbench that wrote it, or run it again."
        )
    return content
