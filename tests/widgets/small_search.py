"""A small recording for the what-if tests: the first problems of one of the package's."""

from dataclasses import replace
from pathlib import Path

from workbench.replay.answers import Answers
from workbench.replay.workload import load_recording
from workbench.search.recording import read_recording, write_recording
from workbench.widgets.what_if_answers import recording_basis
from workbench.widgets.what_if_position import kept_recordings, position_on

MEMORY, SHARE = "40MiB", 0.3


class SmallSearch:
    """Two recordings of few problems, n 4 and 16, and what a widget would know of the first."""

    def __init__(self, folder: Path) -> None:
        names = [str(_cut(folder, name, count)) for name, count in CUTS]
        self.kept = kept_recordings(names)
        self.first, self.second = self.kept.values()
        self.position = position_on(self.first, total_memory=MEMORY, llm_share=SHARE)
        self.answers = Answers(read_recording(self.first.path))
        self.basis = recording_basis(self.first, self.position, self.answers)


CUTS = (("tiny-16-n4", 3), ("tiny-16-n16", 1))


def _cut(folder: Path, name: str, count: int) -> Path:
    whole = load_recording(name)
    few = replace(whole, problems=whole.problems[:count])
    return write_recording(few, folder / f"{name}-few.parquet")
