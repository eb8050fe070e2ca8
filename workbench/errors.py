"""The errors raised on bad input: each says what was given, what is allowed and what to do.

Imported by every layer, imports nothing. Errors of our own making (a broken invariant) are plain
`assert`s.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class WorkbenchError(Exception):
    """The root: `except WorkbenchError` catches all bad input and nothing else."""


class ConfigError(WorkbenchError, ValueError):
    """A setting that is unknown, of the wrong type, or outside what is allowed."""


class ModelError(WorkbenchError):
    """A model that is unknown, incomplete, corrupt, or of an unsupported architecture."""


class PromptError(WorkbenchError, ValueError):
    """A request the engine can never serve: empty, too long, or with unknown token ids."""


class OutOfMemory(WorkbenchError, MemoryError):
    """A budget that leaves a model without blocks for one request of max_model_len."""


class DeviceOutOfMemory(OutOfMemory):
    """A device that has not the memory asked for, now; another time, or another, may have it."""


class ProblemFileError(WorkbenchError, ValueError):
    """A problem file with a row that cannot be read; the row is named."""


class RunStoreError(WorkbenchError):
    """A run folder that is missing, incomplete or of another schema version."""


class RecordingError(WorkbenchError, ValueError):
    """A recorded search that cannot be read, or does not hold what a replay asks of it."""


class StepError(WorkbenchError, RuntimeError):
    """A forward pass failed; the requests of that step finish with it, the engine goes on.

    rows: of the step's flat batch, those at fault where that is known.
    """

    def __init__(self, message: str, rows: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class RemoteError(StepError):
    """A server that cannot be reached, is too slow, refuses, or answers what it cannot mean.

    The request that asked it ends with this; the engine goes on.
    """


class WorkerError(WorkbenchError, RuntimeError):
    """Workers ended in the middle of a group of runs, as often as it was tried."""


class BrokenLaw(WorkbenchError, RuntimeError):
    """What a long check found broken in the engine; no input's fault."""


class NotebookError(WorkbenchError, RuntimeError):
    """A notebook stopped at a cell that failed; the cell is named, and what was written by then."""


def nearest(given: object, known: list[str] | tuple[str, ...]) -> str:
    """` Did you mean 'x'?` when a known name is close to the given one, else an empty text."""
    lower = {name.lower(): name for name in known}
    close = get_close_matches(str(given).lower(), lower, n=1, cutoff=0.5)
    return f" Did you mean {lower[close[0]]!r}?" if close else ""
