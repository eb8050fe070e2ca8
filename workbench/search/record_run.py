"""What `run_search(..., record=path)` does beside searching: what it runs, and what it writes.

Nothing here runs when nothing is recorded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial

from workbench.errors import ConfigError
from workbench.search.active import ActiveSearch
from workbench.search.record import (
    RecordedEngine,
    RecordedSettings,
    Recording,
    RecordingSearch,
    request_reasons,
)
from workbench.search.record_file import require_destination, write_recording
from workbench.search.requests import Strategy
from workbench.search.rounds import Rounds
from workbench.search.score_cache import ScoreCache
from workbench.trace import Recorder

Destination = str | os.PathLike[str]


def require_recordable(record: Destination | None, cache: ScoreCache | None) -> None:
    """ConfigError for a place that cannot be written, and for scores of another run."""
    if record is None:
        return
    require_destination(record)
    if cache is not None and len(cache):
        raise ConfigError(
            f"score_cache holds {len(cache)} scores of another run, and record={str(record)!r} "
            "would lack their requests; give score_cache=True or False to record a search."
        )


def search_kind(record: Destination | None, rounds: Rounds) -> Callable[..., ActiveSearch]:
    """What makes a search: one that keeps what it is told when it is to be recorded."""
    if record is None:
        return ActiveSearch
    return partial(RecordingSearch, round_of=lambda: rounds.round)


def write_record(
    record: Destination | None,
    searches: Iterable[ActiveSearch],
    rounds: Rounds,
    recorder: Recorder,
    strategy: Strategy,
    *,
    score_cache: bool,
    voting: str,
    score_shuffle_seed: int | None,
) -> None:
    """Write the finished searches, unless nothing is to be recorded."""
    if record is None:
        return
    settings = RecordedSettings.of(
        strategy,
        rounds.params,
        rounds.prm,
        seed=rounds.seed,
        min_problem_batch=rounds.min_problem_batch,
        score_cache=score_cache,
        voting=voting,
        score_shuffle_seed=score_shuffle_seed,
        switches=rounds.switches.to_dict(),
    )
    reasons = request_reasons(recorder.request_rows)
    kept = [search for search in searches if isinstance(search, RecordingSearch)]
    problems = tuple(search.recorded(reasons) for search in kept)
    sizes: dict[str, set[int]] = {"llm": set(), "prm": set()}
    for row in recorder.step_rows:
        sizes[row.engine].add(row.counts.blocks_total)
    llm = RecordedEngine.of(rounds.llm, sizes["llm"])
    prm = RecordedEngine.of(rounds.prm.engine, sizes["prm"])
    write_recording(Recording(settings, llm, prm, problems), record)
