"""A small search of the embedded models under memory pressure, measured and recorded once."""

from typing import NamedTuple

import pytest

from workbench.engine.engine import Engine
from workbench.replay.answers import Answers
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.recording import Recording, read_recording
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch
from workbench.trace import Trace

LIMITS = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512}


class Measured(NamedTuple):
    """A run's trace, its recording, and the recording ready to be replayed."""

    trace: Trace
    recording: Recording
    answers: Answers


@pytest.fixture(scope="session")
def measured(tmp_path_factory) -> Measured:
    """Three problems over caches too small for two: evictions, thrashes and preemptions."""
    path = tmp_path_factory.mktemp("recording") / "search.parquet"
    llm = Engine("tiny-solver", num_blocks=40, **LIMITS)
    pair = {"llm": llm, "prm": PRM(Engine("tiny-prm", num_blocks=34, **LIMITS))}
    strategy = BeamSearch(n=8, beam_width=4, max_depth=10)
    how = {"strategy": strategy, "min_problem_batch": 2, "record": path}
    result = run_search(load_problems("tiny", 3, levels=[3]), **pair, **how)
    recording = read_recording(path)
    return Measured(result.trace, recording, Answers(recording))
