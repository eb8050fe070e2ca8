"""`workbench train-tiny`: the embedded models, trained anew into a folder of their own."""

from __future__ import annotations

import argparse
import logging

from rich.console import Console

from workbench.experiments.train_tiny import train_tiny


def run(given: argparse.Namespace) -> int:
    """Train; answers 0 and names the folders."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    wanted = {"models": tuple(given.model)} if given.model else {}
    folders = train_tiny(given.out, minutes=given.minutes, seed=given.seed, **wanted)
    Console().print("\n".join(f"written: {folder}" for folder in folders))
    return 0
