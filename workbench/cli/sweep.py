"""`workbench sweep`: the memory split, measured; one line a share at the end."""

from __future__ import annotations

import argparse

from workbench.cli.settings import print_preview, print_unfinished, sweep_of, table, terminal
from workbench.experiments.health import remarks
from workbench.experiments.sweep import Sweep, run_sweep

SHOWN = {
    "llm_share": "{:g}",
    "seed": "{:d}",
    "tokens_per_s": "{:,.0f}",
    "problems_per_min": "{:.1f}",
    "accuracy": "{:.3f}",
    "llm_kv_tokens": "{:,}",
    "prm_kv_tokens": "{:,}",
    "llm_hit_rate": "{:.3f}",
    "prm_hit_rate": "{:.3f}",
    "llm_preempted": "{:d}",
    "prm_evicted": "{:d}",
}


def run(given: argparse.Namespace) -> int:
    """Carry out the sweep; exit status 1 when a run failed."""
    config = sweep_of(given)
    if given.dry_run:
        print_preview(config, given.runs_dir, given.retry_failed)
        return 0
    sweep = run_sweep(config, given.runs_dir, retry_failed=given.retry_failed)
    return show(sweep)


def show(sweep: Sweep) -> int:
    """Finished runs as a table, then what failed or did not fit, each with its reason."""
    console, every, done = terminal(), sweep.all_runs, sweep.runs
    columns = [name for name in SHOWN if name in done]
    rows = [[SHOWN[name].format(row[name]) for name in columns] for row in done.to_dict("records")]
    console.print(table([name.replace("_", " ") for name in columns], rows))
    failed = print_unfinished(every, console)
    for remark in remarks(every):
        console.print(remark, style="yellow")
    return int(failed)
