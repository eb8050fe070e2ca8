"""`workbench train-tiny`: the embedded models, trained anew into a folder, or measured."""

from __future__ import annotations

import argparse
import logging

from rich.console import Console

from workbench.experiments.tiny_card import as_markdown, embedded_card
from workbench.experiments.train_tiny import train_tiny


def run(given: argparse.Namespace) -> int:
    """Train and name the folders, or print the model card's table; answers 0."""
    if given.card:
        print(as_markdown(embedded_card(given.num_problems, given.seed)))
        return 0
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    wanted = {"models": tuple(given.model)} if given.model else {}
    folders = train_tiny(given.out, minutes=given.minutes, seed=given.seed, **wanted)
    Console().print("\n".join(f"written: {folder}" for folder in folders))
    return 0
