"""Recorded searches that come with the package, found by name: load_recording("tiny-128").

data/README.md says how each was made. What it does not do: make them (`workbench record NAME`).
"""

from __future__ import annotations

from pathlib import Path

from workbench.errors import RecordingError, nearest
from workbench.search.recording import Recording, read_recording

FOLDER = Path(__file__).parent / "data"


def recording_names() -> list[str]:
    """Names of all that are there."""
    return sorted(path.stem for path in FOLDER.glob("*.parquet"))


def recording_path(name: str) -> Path:
    """Where a recording of the package lies; RecordingError for a name it does not have."""
    names = recording_names()
    if name not in names:
        raise RecordingError(
            f"There is no recording {name!r}; known: {', '.join(names)}."
            f"{nearest(name, names)} Another one is read by read_recording(path)."
        )
    return FOLDER / f"{name}.parquet"


def load_recording(name: str) -> Recording:
    """A recording of the package; RecordingError for a name it does not have."""
    return read_recording(recording_path(name))
