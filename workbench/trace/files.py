"""Trace tables as DataFrames and as Parquet files with the schema version inside.

Files are written beside their target and moved over it, so a reader sees the old file or the new
one, never a part. pandas and pyarrow take half a second and are imported where they are needed: an
engine runs without. What it does not do: record (recorder.py), or know run folders
(experiments/store.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

from workbench.errors import RunStoreError
from workbench.trace.rows import ROW_TYPES

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

SCHEMA_VERSION = 1
_VERSION_KEY = b"workbench_schema_version"
_DTYPES = {
    "int": "int64",
    "float": "float64",
    "str": "str",
    "bool": "bool",
    "float | None": "float64",
    "int | None": "UInt64",
}


def _dtypes(table: str) -> dict[str, str]:
    """Column -> pandas dtype of a trace table; columns of lists are left as they are."""
    hints = get_type_hints(ROW_TYPES[table])
    names = {c: h.__name__ if isinstance(h, type) else str(h) for c, h in hints.items()}
    return {column: _DTYPES[name] for column, name in names.items() if name in _DTYPES}


def frame(table: str, rows: Sequence[tuple[object, ...]]) -> pd.DataFrame:
    """A trace table with exactly its columns and types, also when there are no rows."""
    import pandas as pd  # noqa: PLC0415 - slow

    columns = list(ROW_TYPES[table]._fields)
    by_column: Iterable[Sequence[object]] = zip(*rows) if rows else [()] * len(columns)
    dtypes = _dtypes(table)
    return pd.DataFrame(
        {c: pd.Series(list(v), dtype=dtypes.get(c, "object")) for c, v in zip(columns, by_column)}
    )


def write_table(table: pd.DataFrame, path: str | os.PathLike[str]) -> Path:
    """Write one table atomically, the schema version in the file's metadata; answers the path."""
    import pyarrow as pa  # noqa: PLC0415 - slow

    content = pa.Table.from_pandas(table, preserve_index=False)
    metadata = {**(content.schema.metadata or {}), _VERSION_KEY: str(SCHEMA_VERSION).encode()}
    return write_atomically(content.replace_schema_metadata(metadata), path)


def write_atomically(content: pa.Table, path: str | os.PathLike[str]) -> Path:
    """Write a Parquet file beside its target and move it there; answers the path."""
    import pyarrow.parquet as pq  # noqa: PLC0415 - slow

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        pq.write_table(content, beside, compression="zstd", write_page_checksum=True)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def read_table(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read one table; RunStoreError if missing, no Parquet, or of another schema version."""
    import pyarrow as pa  # noqa: PLC0415 - slow
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        content = pq.read_table(path)
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
    return content.to_pandas()


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The four tables of a run: columns as in rows.py, seconds from the run's origin."""

    steps: pd.DataFrame
    requests: pd.DataFrame
    nodes: pd.DataFrame
    spans: pd.DataFrame

    def to_parquet(self, folder: str | os.PathLike[str]) -> Path:
        """Write steps, requests, nodes and spans .parquet into the folder; answers it."""
        for table in ROW_TYPES:
            write_table(getattr(self, table), Path(folder) / f"{table}.parquet")
        return Path(folder)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Trace:
        """The trace that `to_parquet` wrote; RunStoreError as read_table."""
        return cls(**{t: read_table(Path(folder) / f"{t}.parquet") for t in ROW_TYPES})
