"""A recorded search: what a replay needs of it, and its file.

Two tries a problem: sampled steps below the prompt, and solutions as the PRM saw them, each entry
holding its own tokens only; beside them scores, rounds and settings. They are kept while the search
runs and written as one Parquet file: a row an entry, parents before their children and named by row
number, the settings in its metadata. It is read strictly: a file that is cut, foreign or newer is
refused by name. Times are the trace's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from hashlib import sha256
from pathlib import Path as FilePath
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from workbench.config import SearchConfig, SearchSwitches
from workbench.core import TokenEngine
from workbench.errors import ConfigError, RecordingError
from workbench.search.prm import PRM
from workbench.search.problems import Problem
from workbench.search.requests import Path, Strategy
from workbench.search.result import node_id
from workbench.search.rounds import ActiveSearch, Rounds
from workbench.trace import write_atomically


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One sampled node. tokens: its own; round: in which it was asked for, from 1.

    finish_reason: what the strategy was told; request_reason: how the request ended, "" when there
    was none (no room for a token).
    """

    path: Path
    tokens: tuple[int, ...]
    text: str
    slot: int
    round: int
    finish_reason: str
    request_reason: str


@dataclass(frozen=True, slots=True)
class RecordedSolution:
    """One solution as the PRM sees it. tokens: its last step's part of the PRM's input.

    asks: whether the PRM judges the last step; fits: whether it has room for the solution; score:
    of the last step, None where it was not asked for.
    """

    steps: tuple[str, ...]
    tokens: tuple[int, ...]
    asks: bool
    fits: bool
    score: float | None


@dataclass(frozen=True, slots=True)
class RecordedProblem:
    """One problem's tries. Parents come before their children; steps are in sampling order."""

    problem: Problem
    prompt: tuple[int, ...] = ()
    steps: tuple[RecordedStep, ...] = ()
    solutions: tuple[RecordedSolution, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedEngine:
    """What an engine was. From config on: None where an engine does not tell."""

    name: str
    architecture: str
    fingerprint: str
    max_model_len: int
    value_outputs: int | None
    config: Mapping[str, Any] | None = None  # fields of EngineConfig
    spec: Mapping[str, Any] | None = None  # fields of ModelSpec
    num_blocks: int | None = None
    weight_bytes: int | None = None
    block_bytes: int | None = None

    @classmethod
    def of(cls, engine: TokenEngine, sizes: Collection[int] = ()) -> RecordedEngine:
        """What this engine tells about itself. sizes: the blocks it had in this search.

        num_blocks is None when they changed, as they do when a memory is split anew.
        """
        told = dict(engine.description)
        if len(sizes) > 1:
            told["num_blocks"] = None
        return cls(
            name=engine.name,
            architecture=engine.architecture,
            fingerprint=engine.fingerprint,
            max_model_len=engine.max_model_len,
            value_outputs=engine.value_outputs,
            **told,
        )


@dataclass(frozen=True, slots=True)
class RecordedSettings:
    """How the search was run. strategy: its class's name, and its fields.

    switches: fields of SearchSwitches; those not named are at their defaults.
    """

    strategy: str
    strategy_settings: Mapping[str, Any]
    seed: int
    min_problem_batch: int
    score_cache: bool
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_step_tokens: int
    voting: str
    score_shuffle_seed: int | None
    prm_format: str
    prm_fingerprint: str
    prm_columns: tuple[int, ...]
    switches: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, strategy: Strategy, seed: int, prm: PRM, config: SearchConfig) -> RecordedSettings:
        """The settings of one search."""
        known = is_dataclass(strategy) and not isinstance(strategy, type)
        own = {f.name for f in fields(cls)} & {f.name for f in fields(config)} - {"prm_format"}
        return cls(
            strategy=type(strategy).__name__,
            strategy_settings=asdict(strategy) if known else {},  # type: ignore[call-overload]
            seed=seed,
            prm_format=prm.format,
            prm_fingerprint=prm.fingerprint,
            prm_columns=tuple(prm.columns),
            switches={f.name: getattr(config, f.name) for f in fields(SearchSwitches)},
            **{name: getattr(config, name) for name in own},
        )


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole search, in the order of its problems."""

    settings: RecordedSettings
    llm: RecordedEngine
    prm: RecordedEngine
    problems: tuple[RecordedProblem, ...]


class RecordingSearch(ActiveSearch):
    """A search that keeps what it was told when its answer is there."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._rounds: dict[Path, int] = {}
        self._kept: tuple[tuple[int, ...], tuple[RecordedSolution, ...]] = ((), ())

    def advance(self, round: int) -> None:
        """As every search; notes in which round each node is asked for."""
        super().advance(round)
        if self.request is not None:
            for beam in self.request.beams:
                self._rounds.setdefault(beam.path, round)

    def finish(self, now_s: float) -> None:
        """As every search; what it lets go is kept here."""
        solutions = []
        lengths: dict[tuple[str, ...], int] = {(): 0}
        for node in self.scores.solutions():  # each after the one it extends
            tokens, start = node.token_ids or (), lengths[node.steps[:-1]]
            lengths[node.steps] = max(start, len(tokens))
            solution = RecordedSolution(
                steps=node.steps,
                tokens=tuple(tokens[start:]),
                asks=node.asks,
                fits=node.token_ids is not None,
                score=node.score,
            )
            solutions.append(solution)
        self._kept = (tuple(self.prompt), tuple(solutions))
        super().finish(now_s)

    def recorded(self, reasons: Mapping[tuple[str, str], str]) -> RecordedProblem:
        """Everything of this problem. reasons: how the requests of its nodes ended."""
        prompt, solutions = self._kept
        steps = []
        for node in self.tree:
            told = node.step.finish_reason
            name = (self.problem.id, node_id(node.path))
            steps.append(
                RecordedStep(
                    path=node.path,
                    tokens=tuple(node.step.token_ids),
                    text=node.step.text,
                    slot=node.beam,
                    round=self._rounds[node.path],
                    finish_reason=told,
                    request_reason=reasons.get(name, told if node.step.token_ids else ""),
                )
            )
        return RecordedProblem(self.problem, prompt, tuple(steps), solutions)


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
    """Write it atomically; returns the path."""
    rows: list[Row] = []
    for number, problem in enumerate(recording.problems):
        places: dict[Key, int] = {(): len(rows)}
        rows.append({"kind": "prompt", "problem": number, "tokens": problem.prompt})
        for step in problem.steps:
            places[step.path] = len(rows)
            place: Row = {"parent": places[step.path[:-1]], "ordinal": step.path[-1]}
            rows.append({"kind": "step", "problem": number} | place | _own(step))
        places = {}
        for solution in problem.solutions:
            places[solution.steps] = len(rows)
            place = {"parent": places.get(solution.steps[:-1]), "text": solution.steps[-1]}
            rows.append({"kind": "solution", "problem": number} | place | _own(solution))
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


def _own(entry: RecordedStep | RecordedSolution) -> Row:
    """An entry's columns: all but its first field, which its parent and its last part say."""
    return {f.name: getattr(entry, f.name) for f in fields(entry)[1:]}


def _header(metadata: Mapping[str, Any]) -> Recording:
    """What a file's metadata say; KeyError or TypeError where they are of another kind.

    Switches of earlier versions, which are gone, must have been off.
    """
    settings = dict(metadata["settings"])
    settings["prm_columns"] = tuple(settings["prm_columns"])
    known, switches = {f.name for f in fields(SearchSwitches)}, settings.get("switches", {})
    for name, value in switches.items():
        if name not in known and value:
            raise RecordingError(
                f"The search was recorded with {name}={value!r}, which this workbench does not "
                "have; record it again."
            )
    settings["switches"] = {name: value for name, value in switches.items() if name in known}
    return Recording(
        settings=RecordedSettings(**settings),
        llm=RecordedEngine(**metadata["llm"]),
        prm=RecordedEngine(**metadata["prm"]),
        problems=tuple(RecordedProblem(Problem(**each)) for each in metadata["problems"]),
    )


def read_header(path: str | os.PathLike[str]) -> Recording:
    """Settings, engines and problems of a recording, read at once, without the problems' tries;
    RecordingError as below.
    """
    return _checked(path, lambda file: _header(_metadata(path, file.schema_arrow)))


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """The search that was recorded; RecordingError if missing, cut, foreign, newer or damaged."""

    def read(file: pq.ParquetFile) -> Recording:
        content = file.read()
        metadata = _metadata(path, content.schema)
        if len(content) != metadata["rows"]:
            raise ValueError(f"{len(content)} rows where {metadata['rows']} were written")
        header = _header(metadata)
        return replace(header, problems=_problems(content, header.problems))

    return _checked(path, read)


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
        what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise RecordingError(f"{path} is damaged ({what}); record the search again.") from error


def _metadata(path: str | os.PathLike[str], schema: pa.Schema) -> dict[str, Any]:
    """The settings of a file that is a recording of this version, whole."""
    metadata = schema.metadata or {}
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
    if not schema.equals(SCHEMA, check_metadata=False):
        raise ValueError(f"its columns are {', '.join(schema.names)}")
    if metadata.get(_DIGEST_KEY) != sha256(metadata[_SETTINGS_KEY]).digest():
        raise ValueError("its settings are not those that were written")
    found: dict[str, Any] = json.loads(metadata[_SETTINGS_KEY])
    return found


def _problems(
    content: pa.Table, problems: Sequence[RecordedProblem]
) -> tuple[RecordedProblem, ...]:
    """The problems with their tries; ValueError for a row whose parent cannot be its own."""
    prompts: dict[int, tuple[int, ...]] = {}
    steps: list[list[RecordedStep]] = [[] for _ in problems]
    solutions: list[list[RecordedSolution]] = [[] for _ in problems]
    names: list[Key] = []  # of each row: a path, or a solution's texts
    kinds: list[str] = []
    columns = [column.to_pylist() for column in content.columns]
    for place, values in enumerate(zip(*columns, strict=True)):
        row = dict(zip(SCHEMA.names, values))
        number, kind, parent = row["problem"], row["kind"], row["parent"]
        above = {"prompt": (), "step": ("prompt", "step"), "solution": ("solution",)}[kind]
        if parent is None:
            fine, before = kind != "step", ()
        else:
            fine = 0 <= parent < place and kinds[parent] in above
            before = names[parent] if fine else ()
        if not fine:
            raise ValueError(f"row {place} has parent {parent}")
        if kind == "prompt":
            name: Key = ()
            prompts[number] = tuple(row["tokens"])
        elif kind == "step":
            name = (*before, row["ordinal"])
            steps[number].append(_from(row, RecordedStep, path=name))
        else:
            name = (*before, row["text"])
            solutions[number].append(_from(row, RecordedSolution, steps=name))
        names.append(name)
        kinds.append(kind)
    return tuple(
        replace(each, prompt=prompts[i], steps=tuple(steps[i]), solutions=tuple(solutions[i]))
        for i, each in enumerate(problems)
    )


def _from(row: Row, kind: Callable[..., Any], **named: Key) -> Any:
    """An entry with the row's columns; `named` is what the row says through its parent."""
    own = {f.name: row[f.name] for f in fields(kind) if f.name not in named}  # type: ignore[arg-type]
    return kind(**(own | {"tokens": tuple(row["tokens"])} | named))


def record_search(
    path: str | os.PathLike[str],
    searches: Iterable[ActiveSearch],
    rounds: Rounds,
    strategy: Strategy,
    config: SearchConfig,
) -> None:
    """Write searches that have their answers."""
    rows = rounds.recorder.request_rows
    # (problem id, node id) -> how the request that sampled it ended.
    reasons = {(r.problem_id, r.node_id): r.finish_reason for r in rows if r.kind == "generate"}
    kept = [search for search in searches if isinstance(search, RecordingSearch)]
    sizes: dict[str, set[int]] = {"llm": set(), "prm": set()}
    for row in rounds.recorder.step_rows:
        sizes[row.engine].add(row.counts.blocks_total)
    recording = Recording(
        settings=RecordedSettings.of(strategy, rounds.seed, rounds.prm, config),
        llm=RecordedEngine.of(rounds.llm, sizes["llm"]),
        prm=RecordedEngine.of(rounds.prm.engine, sizes["prm"]),
        problems=tuple(search.recorded(reasons) for search in kept),
    )
    write_recording(recording, path)
