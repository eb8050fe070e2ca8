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
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from workbench.config import SearchConfig, SearchSwitches
from workbench.core import TokenEngine
from workbench.errors import ConfigError, RecordingError
from workbench.search.problems import Problem
from workbench.search.result import node_id
from workbench.search.rounds import ActiveSearch, Rounds
from workbench.search.strategies import NodePath, Strategy
from workbench.trace import write_atomically


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One sampled node. tokens: its own; round: in which it was asked for, from 1.

    finish_reason: what the strategy was told; request_reason: how the request ended, "" when there
    was none (no room for a token).
    """

    path: NodePath
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
class RecordedCritique:
    """One critique of a generative verifier. key: its solution's steps, then its number.

    tokens: those sampled; score: of the verdict after it.
    """

    key: tuple[Any, ...]
    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    score: float | None

    @property
    def request_reason(self) -> str:
        """How the request ended: as the search was told."""
        return self.finish_reason


@dataclass(frozen=True, slots=True)
class RecordedProblem:
    """One problem's tries. Parents come before their children; steps are in sampling order."""

    problem: Problem
    prompt: tuple[int, ...] = ()
    steps: tuple[RecordedStep, ...] = ()
    solutions: tuple[RecordedSolution, ...] = ()
    critiques: tuple[RecordedCritique, ...] = ()


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
        names = ("name", "architecture", "fingerprint", "max_model_len", "value_outputs")
        told = {name: getattr(engine, name) for name in names} | dict(engine.description)
        if sizes:
            told["num_blocks"] = None if len(sizes) > 1 else next(iter(sizes))
        return cls(**told)


@dataclass(frozen=True, slots=True)
class RecordedSettings:
    """How the search was run. strategy: its class's name, and its fields.

    switches: fields of SearchSwitches; those not named are at their defaults.
    prm_critiques: fields of Critiques, of a generative verifier; prm_ask, prm_lead: its tokens
    before and after a critique.
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
    prm_critiques: Mapping[str, Any] | None = None
    prm_ask: tuple[int, ...] = ()
    prm_lead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole search, in the order of its problems."""

    settings: RecordedSettings
    llm: RecordedEngine
    prm: RecordedEngine
    problems: tuple[RecordedProblem, ...]


class RecordingSearch(ActiveSearch):
    """A search that keeps its prompt and the PRM's solutions once its answer is there."""

    recorded: RecordedProblem

    def finish(self, now_s: float) -> None:
        """As every search; what it lets go is kept here."""
        solutions, critiques = [], []
        for node in self.scores.solutions():  # each after the one it extends
            before = node.lineage[-2].token_ids or () if len(node.lineage) > 1 else ()
            solution = RecordedSolution(
                steps=node.steps,
                tokens=tuple(node.token_ids or ())[len(before) :],
                asks=node.asks,
                fits=node.token_ids is not None,
                score=node.score,
            )
            solutions.append(solution)
            for number, c in sorted(node.critiques.items()):
                key = (*node.steps, number)
                kept = RecordedCritique(key, c.tokens, c.text, c.finish_reason, c.score)
                critiques.append(kept)
        self.recorded = RecordedProblem(
            self.problem,
            tuple(self.prompt),
            solutions=tuple(solutions),
            critiques=tuple(critiques),
        )
        super().finish(now_s)


RECORDING_VERSION = 1
_VERSION_KEY = b"workbench_recording_version"
_SETTINGS_KEY = b"workbench_recording"
_DIGEST_KEY = b"workbench_recording_sha256"
_NAME = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    {
        "kind": _NAME,  # prompt | step | solution | critique
        "problem": pa.int32(),
        "parent": pa.int32(),  # row number; null for a prompt and a solution of one step
        "tokens": pa.list_(pa.int32()),
        "text": _NAME,
        "ordinal": pa.int32(),  # steps, to round, and critiques: among their parent's children
        "slot": pa.int32(),
        "round": pa.int32(),
        "finish_reason": _NAME,
        "request_reason": _NAME,
        "asks": pa.bool_(),  # solutions, to score
        "fits": pa.bool_(),
        "score": pa.float64(),  # of critiques too
    }
)
_ENTRIES: dict[str, tuple[type, str]] = {
    "step": (RecordedStep, "ordinal"),
    "solution": (RecordedSolution, "text"),
    "critique": (RecordedCritique, "ordinal"),
}
"""Entries of a kind, and the column of their key's last part: of a path, or of texts of steps."""
_ABOVE = {
    "prompt": (None,),
    "step": ("prompt", "step"),
    "solution": (None, "solution"),
    "critique": ("solution",),
}
"""Kinds that a row's parent may have."""


def require_destination(path: str | os.PathLike[str]) -> None:
    """ConfigError for a place where no file can be written."""
    place = Path(path)
    above = next((p for p in place.parents if p.exists()), None)
    if place.is_dir() or (above is not None and not above.is_dir()):
        raise ConfigError(f"{str(path)!r} cannot be written; give the path of a file.")


def write_recording(recording: Recording, path: str | os.PathLike[str]) -> Path:
    """Write it atomically; returns the path."""
    rows: list[dict[str, Any]] = []
    for number, problem in enumerate(recording.problems):
        prompt = len(rows)
        rows.append({"kind": "prompt", "problem": number, "tokens": problem.prompt})
        places: dict[tuple[Any, ...], int | None] = {(): prompt}
        for kind in _ENTRIES:
            if kind == "solution":  # critiques, which come after, have solutions above them
                places = {(): None}
            for entry in getattr(problem, f"{kind}s"):
                (_, key), *own = ((f.name, getattr(entry, f.name)) for f in fields(entry))
                row = {"kind": kind, "problem": number, "parent": places[key[:-1]], **dict(own)}
                places[key] = len(rows)
                rows.append(row | {_ENTRIES[kind][1]: key[-1]})
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


def read_header(path: str | os.PathLike[str]) -> Recording:
    """A recording without its problems' tries, read at once; RecordingError as below."""
    with _opened(path) as file:
        return _header(path, file.schema_arrow)[0]


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """The search that was recorded; RecordingError if missing, cut, foreign, newer or damaged."""
    with _opened(path) as file:
        content = file.read()
        header, written = _header(path, content.schema)
        if len(content) != written:
            raise ValueError(f"{len(content)} rows where {written} were written")
        found: dict[str, list[list[Any]]] = {kind: [[] for _ in header.problems] for kind in _ABOVE}
        keys, kinds = list[tuple[Any, ...]](), list[str]()
        for place, row in enumerate(content.to_pylist()):
            kind, parent = row["kind"], row["parent"]
            missing = parent is not None and not 0 <= parent < place
            if missing or (None if parent is None else kinds[parent]) not in _ABOVE[kind]:
                raise ValueError(f"row {place} has parent {parent}")
            entry, key = tuple(row["tokens"]), () if parent is None else keys[parent]
            if kind != "prompt":
                made_of, last = _ENTRIES[kind]
                row["tokens"], key = entry, (*key, row[last])
                entry = made_of(key, *(row[f.name] for f in fields(made_of)[1:]))
            found[kind][row["problem"]].append(entry)
            keys.append(key)
            kinds.append(kind)
        problems = (
            replace(
                each, prompt=prompt, **{f"{kind}s": tuple(own) for kind, own in zip(_ENTRIES, rest)}
            )
            for each, (prompt,), *rest in zip(header.problems, *found.values(), strict=True)
        )
        return replace(header, problems=tuple(problems))


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[pq.ParquetFile]:
    """The file; RecordingError for whatever is wrong with it, or found so by its reader."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
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


def _header(path: str | os.PathLike[str], schema: pa.Schema) -> tuple[Recording, int]:
    """What a file's metadata say of a search, and how many rows were written.

    Switches of earlier versions, which are gone, must have been off.
    """
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
    written = json.loads(metadata[_SETTINGS_KEY])
    settings = written["settings"]
    for name in ("prm_columns", "prm_ask", "prm_lead"):
        settings[name] = tuple(settings.get(name, ()))
    known, switches = {f.name for f in fields(SearchSwitches)}, settings.get("switches", {})
    switches["stop_when_decided"] = settings.pop("stop_when_decided", False)
    for name, value in switches.items():
        if name not in known and value:
            raise RecordingError(
                f"The search was recorded with {name}={value!r}, which this workbench does not "
                "have; record it again."
            )
    settings["switches"] = {name: value for name, value in switches.items() if name in known}
    header = Recording(
        settings=RecordedSettings(**settings),
        llm=RecordedEngine(**written["llm"]),
        prm=RecordedEngine(**written["prm"]),
        problems=tuple(RecordedProblem(Problem(**each)) for each in written["problems"]),
    )
    return header, written["rows"]


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
    reasons = {(r.problem_id, r.node_id): r.finish_reason for r in rows if r.engine == "llm"}
    problems = []
    for search in searches:
        assert isinstance(search, RecordingSearch)
        steps = []
        for node in search.tree:
            tokens, text, told = node.step.token_ids, node.step.text, node.step.finish_reason
            name = (search.problem.id, node_id(node.path))
            step = RecordedStep(
                path=node.path,
                tokens=tuple(tokens),
                text=text,
                slot=node.beam,
                round=node.round,
                finish_reason=told,
                request_reason=reasons.get(name, told if tokens else ""),
            )
            steps.append(step)
        problems.append(replace(search.recorded, steps=tuple(steps)))
    sizes: dict[str, set[int]] = {"llm": set(), "prm": set()}
    for row in rounds.recorder.step_rows:
        sizes[row.engine].add(row.counts.blocks_total)
    names = {f.name for f in fields(RecordedSettings)} & {f.name for f in fields(config)}
    settings = RecordedSettings(
        strategy=type(strategy).__name__,
        strategy_settings=asdict(strategy) if is_dataclass(strategy) else {},  # type: ignore
        seed=rounds.seed,
        prm_format=rounds.prm.format,
        prm_fingerprint=rounds.prm.fingerprint,
        prm_columns=tuple(rounds.prm.columns),
        prm_critiques=None if rounds.prm.critiques is None else asdict(rounds.prm.critiques),
        prm_ask=tuple(rounds.prm.ask),
        prm_lead=tuple(rounds.prm.lead),
        switches={f.name: getattr(config, f.name) for f in fields(SearchSwitches)},
        **{name: getattr(config, name) for name in names - {"prm_format"}},
    )
    recording = Recording(
        settings=settings,
        llm=RecordedEngine.of(rounds.llm, sizes["llm"]),
        prm=RecordedEngine.of(rounds.prm.engine, sizes["prm"]),
        problems=tuple(problems),
    )
    write_recording(recording, path)
