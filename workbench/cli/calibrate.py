"""`workbench calibrate`: this machine as a device preset, for replays."""

from __future__ import annotations

import argparse

from workbench.bench.cells import calibrate
from workbench.cli.settings import terminal
from workbench.replay.devices import write_device
from workbench.search.recording import require_destination


def run(given: argparse.Namespace) -> int:
    """Measure, write the preset, say what it holds; answers 0."""
    require_destination(given.out)
    device = calibrate(given.num_problems, given.repeats, given.seed)
    console = terminal()
    console.print(
        f"{device.name}: {device.flops_per_s / 1e9:,.0f} GFLOP/s, "
        f"{device.bytes_per_s / 1e9:,.1f} GB/s, terms of {', '.join(device.terms)}"
    )
    console.print(f"written: {write_device(device, given.out)}")
    return 0
