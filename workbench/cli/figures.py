"""`workbench figures`: run what is missing, execute the notebooks, write the report; or only redraw
or look.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from rich.console import Console

from workbench.cli.settings import key_values, print_preview, terminal
from workbench.config import SweepConfig
from workbench.experiments.claims import claims_of
from workbench.experiments.export import replot
from workbench.experiments.face import face, rung
from workbench.experiments.notebooks import run_notebooks
from workbench.experiments.paths import project_root
from workbench.experiments.profiles import sweep_config
from workbench.experiments.report import write_report
from workbench.experiments.sweep import run_sweep
from workbench.plots import FIGURES


def run(given: argparse.Namespace) -> int:
    """One of three: redraw, look, or do it all."""
    console, parameters = terminal(), key_values(given.parameter, "-p")
    if given.replot:
        for saved in replot(project_root() / "figures", FIGURES, given.names or None):
            console.print(repr(saved), highlight=False)
        return 0
    config = sweep_config(given.profile, **sweep_settings(parameters))
    if given.dry_run:
        print_preview(config, given.runs_dir)
        return 0
    return _everything(given, config, parameters, console)


def _everything(
    given: argparse.Namespace, config: SweepConfig, parameters: dict[str, Any], console: Console
) -> int:
    """The sweep first, so that its progress is seen here; the notebooks then find its runs."""
    sweep = run_sweep(config, given.runs_dir)
    executed = run_notebooks(given.names or None, given.profile, parameters, given.out)
    claims = claims_of(sweep, rung(sweep.runs))
    index = write_report(executed, claims, face(sweep.runs), project_root() / "reports")
    console.print(f"figures: {project_root() / 'figures'}\nreport:  {index}", highlight=False)
    return 0


def sweep_settings(parameters: dict[str, Any]) -> dict[str, Any]:
    """Those notebook parameters that are settings of the sweep the notebooks ask for."""
    known = {field.name for field in fields(SweepConfig)} - {"profile"}
    return {name: value for name, value in parameters.items() if name in known}
