"""`workbench record`: a kept recording, made anew."""

from __future__ import annotations

import argparse
from pathlib import Path

from workbench.bench.recordings import make_recording
from workbench.cli.settings import terminal


def run(given: argparse.Namespace) -> int:
    """Search, write the recording, say what it holds; answers 0."""
    path = Path(given.out or f"{given.name}.parquet")
    result = make_recording(given.name, path, given.problems)
    kilobytes = path.stat().st_size / 1000
    terminal().print(
        f"{path}: {len(result.problems)} problems, {len(result.tree):,} nodes, {kilobytes:,.0f} kB"
    )
    return 0
