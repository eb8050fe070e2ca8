"""A recorded search as one Parquet file: a row an entry of a trie, the settings in its metadata.

Parents come before their children and are named by row number, so an entry costs its own tokens
and one number. Read strictly: a file that is cut, foreign or newer is refused by name. What it does
not do: check that a replay's settings fit a recording (replay/).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path as FilePath
from typing import Any, NamedTuple, Self, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from workbench.errors import ConfigError, RecordingError
from workbench.search.problems import Problem
from workbench.search.record import (
    RecordedEngine,
    RecordedProblem,
    RecordedSettings,
    RecordedSolution,
    RecordedStep,
    Recording,
)
from workbench.trace import write_atomically

RECORDING_VERSION = 1
_VERSION_KEY = b"workbench_recording_version"
_SETTINGS_KEY = b"workbench_recording"
_DIGEST_KEY = b"workbench_recording_sha256"
_NAME = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    {
        "kind": _NAME,  # prompt | step | solution
        "problem": pa.int32(),
        "parent": pa.int32(),  # row number; null for a prompt and a solution of one step
        "tokens": pa.list_(pa.int32()),
        "text": _NAME,
        "ordinal": pa.int32(),  # steps, to round: among their parent's children
        "slot": pa.int32(),
        "round": pa.int32(),
        "finish_reason": _NAME,
        "request_reason": _NAME,
        "asks": pa.bool_(),  # solutions, to score
        "fits": pa.bool_(),
        "score": pa.float64(),
    }
)
Row = dict[str, Any]
_Read = TypeVar("_Read")
Key = tuple[Any, ...]


def require_destination(path: str | os.PathLike[str]) -> None:
    """ConfigError for a place where no file can be written."""
    place = FilePath(path)
    above = next((p for p in place.parents if p.exists()), None)
    if place.is_dir() or (above is not None and not above.is_dir()):
        raise ConfigError(f"{str(path)!r} cannot be written; give the path of a file.")


def write_recording(recording: Recording, path: str | os.PathLike[str]) -> FilePath:
    """Write it atomically; answers the path."""
    rows = [row for number in range(len(recording.problems)) for row in _rows(recording, number)]
    _number_parents(rows)
    settings = {
        "settings": asdict(recording.settings),
        "llm": asdict(recording.llm),
        "prm": asdict(recording.prm),
        "problems": [asdict(problem.problem) for problem in recording.problems],
        "rows": len(rows),
    }
    text = json.dumps(settings).encode()
    metadata = {
        _VERSION_KEY: str(RECORDING_VERSION).encode(),
        _SETTINGS_KEY: text,
        _DIGEST_KEY: sha256(text).digest(),  # pages have checksums, the footer has none
    }
    columns = {name: [row.get(name) for row in rows] for name in SCHEMA.names}
    content = pa.table(columns, schema=SCHEMA)
    return write_atomically(content.replace_schema_metadata(metadata), path)


def _rows(recording: Recording, number: int) -> Iterator[Row]:
    """One problem's entries; `self` and `parent` are names that become row numbers."""
    problem = recording.problems[number]
    yield {"kind": "prompt", "problem": number, "self": (number, ()), "tokens": problem.prompt}
    for step in problem.steps:
        yield {
            "kind": "step",
            "problem": number,
            "self": (number, step.path),
            "parent": (number, step.path[:-1]),
            "tokens": step.tokens,
            "text": step.text,
            "ordinal": step.path[-1],
            "slot": step.slot,
            "round": step.round,
            "finish_reason": step.finish_reason,
            "request_reason": step.request_reason,
        }
    for solution in problem.solutions:
        before = solution.steps[:-1]
        yield {
            "kind": "solution",
            "problem": number,
            "self": (number, "solution", solution.steps),
            "parent": (number, "solution", before) if before else None,
            "tokens": solution.tokens,
            "text": solution.steps[-1],
            "asks": solution.asks,
            "fits": solution.fits,
            "score": solution.score,
        }


def _number_parents(rows: list[Row]) -> None:
    places: dict[Key, int] = {}
    for place, row in enumerate(rows):
        places[row["self"]] = place
        if row.get("parent") is not None:
            row["parent"] = places[row["parent"]]


class Header(NamedTuple):
    """What a recording says of itself, without a token of it."""

    settings: RecordedSettings
    llm: RecordedEngine
    prm: RecordedEngine
    problems: tuple[Problem, ...]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """From a file's metadata; KeyError or TypeError where they are of another kind."""
        settings = dict(given["settings"])
        settings["prm_columns"] = tuple(settings["prm_columns"])
        engines = [RecordedEngine(**given[name]) for name in ("llm", "prm")]
        problems = tuple(Problem(**problem) for problem in given["problems"])
        return cls(RecordedSettings(**settings), engines[0], engines[1], problems)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Settings, engines and problems of a recording, read at once; RecordingError as above."""
    return _checked(path, lambda file: Header.of(_metadata(path, file.schema_arrow)))


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """The search that was recorded; RecordingError if missing, cut, foreign, newer or damaged."""
    return _checked(path, lambda file: _recording(path, file.read()))


def _checked(path: str | os.PathLike[str], read: Callable[[pq.ParquetFile], _Read]) -> _Read:
    """What is read of a file; RecordingError for whatever is wrong with it."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            return read(file)
    except FileNotFoundError as error:
        raise RecordingError(
            f"There is no recording {path}; make one with run_search(..., record=path)."
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise RecordingError(
            f"{path} is no readable Parquet file ({error}); it is cut or of another kind: record "
            "the search again."
        ) from error
    except RecordingError:
        raise
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _metadata(path: str | os.PathLike[str], schema: pa.Schema) -> dict[str, Any]:
    """The settings of a file that is a recording of this version, whole."""
    metadata = schema.metadata or {}
    _require_version(path, metadata)
    if not schema.equals(SCHEMA, check_metadata=False):
        raise _damaged(path, f"its columns are {', '.join(schema.names)}")
    if metadata.get(_DIGEST_KEY) != sha256(metadata[_SETTINGS_KEY]).digest():
        raise _damaged(path, "its settings are not those that were written")
    found: dict[str, Any] = json.loads(metadata[_SETTINGS_KEY])
    return found


def _require_version(path: str | os.PathLike[str], metadata: Mapping[bytes, bytes]) -> None:
    version = metadata.get(_VERSION_KEY)
    if version is None or _SETTINGS_KEY not in metadata:
        raise RecordingError(
            f"{path} is a Parquet file, but no recorded search; give one that "
            "run_search(..., record=path) wrote."
        )
    if version != str(RECORDING_VERSION).encode():
        raise RecordingError(
            f"{path} has recording version {version.decode(errors='replace')}; this workbench "
            f"reads version {RECORDING_VERSION}. Read it with the workbench that wrote it, or "
            "record the search again."
        )


def _damaged(path: str | os.PathLike[str], what: str) -> RecordingError:
    return RecordingError(f"{path} is damaged ({what}); record the search again.")


def _recording(path: str | os.PathLike[str], content: pa.Table) -> Recording:
    """The recording of a file's rows; ValueError and the like where they do not fit together."""
    given = _metadata(path, content.schema)
    if len(content) != given["rows"]:
        raise ValueError(f"{len(content)} rows where {given['rows']} were written")
    header = Header.of(given)
    problems = _problems(content, list(header.problems))
    return Recording(header.settings, header.llm, header.prm, problems)


def _problems(content: pa.Table, problems: list[Problem]) -> tuple[RecordedProblem, ...]:
    prompts: dict[int, tuple[int, ...]] = {}
    steps: list[list[RecordedStep]] = [[] for _ in problems]
    solutions: list[list[RecordedSolution]] = [[] for _ in problems]
    names: list[Key] = []  # of each row: a path, or a solution's texts
    kinds: list[str] = []
    for place, row in enumerate(_dicts(content)):
        number, kind, parent = row["problem"], row["kind"], row["parent"]
        if kind == "prompt":
            name: Key = ()
            prompts[number] = tuple(row["tokens"])
        elif kind == "step":
            _require_parent(parent, place, kinds, ("prompt", "step"))
            name = (*names[parent], row["ordinal"])
            steps[number].append(_from(row, RecordedStep, path=name))
        elif kind == "solution":
            if parent is not None:
                _require_parent(parent, place, kinds, ("solution",))
            name = (*(() if parent is None else names[parent]), row["text"])
            solutions[number].append(_from(row, RecordedSolution, steps=name))
        else:
            raise ValueError(f"row {place} is a {kind!r}")
        names.append(name)
        kinds.append(kind)
    return tuple(
        RecordedProblem(problem, prompts[i], tuple(steps[i]), tuple(solutions[i]))
        for i, problem in enumerate(problems)
    )


def _dicts(content: pa.Table) -> Iterator[Row]:
    columns = [column.to_pylist() for column in content.columns]
    return (dict(zip(SCHEMA.names, row)) for row in zip(*columns, strict=True))


def _require_parent(
    parent: int | None, place: int, kinds: list[str], allowed: tuple[str, ...]
) -> None:
    if parent is None or not 0 <= parent < place or kinds[parent] not in allowed:
        raise ValueError(f"row {place} has parent {parent}")


def _from(row: Row, kind: Callable[..., Any], **named: Key) -> Any:
    """An entry with the row's columns; `named` is what the row says through its parent."""
    own = {f.name: row[f.name] for f in fields(kind) if f.name not in named}  # type: ignore[arg-type]
    return kind(**(own | {"tokens": tuple(row["tokens"])} | named))
