"""What the study's notebooks share: one sweep, and figures kept under their fixed names.

A parameter left at None is the profile's own. What it does not do: choose what is drawn or said.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from workbench.config import SweepConfig
from workbench.experiments.batch_plan import batch_cells
from workbench.experiments.batch_study import BatchStudy, batch_grid, run_batches
from workbench.experiments.export import SavedFigure, save_figure
from workbench.experiments.face import measured
from workbench.experiments.ladder import LadderStudy, run_ladder
from workbench.experiments.ladder_plan import ladder_config, ladder_plan
from workbench.experiments.memory_parts import MemoryStudy
from workbench.experiments.paths import project_root
from workbench.experiments.policy_plan import policy_config, policy_plan
from workbench.experiments.policy_study import PolicyStudy, run_policies
from workbench.experiments.profiles import overridden, sweep_config
from workbench.experiments.sweep import Sweep, run_sweep

Study = Sweep | BatchStudy | LadderStudy | MemoryStudy | PolicyStudy


def study_config(profile: str = "default", **overrides: Any) -> SweepConfig:
    """The profile's sweep with the overrides that are not None; lists become tuples."""
    return sweep_config(profile, **overridden(overrides))


def study_sweep(
    profile: str = "default", runs_dir: str | Path | None = None, **overrides: Any
) -> Sweep:
    """The sweep of a profile: what is stored is read, what is missing is run now."""
    return run_sweep(study_config(profile, **overrides), runs_dir)


def study_batches(
    profile: str = "default",
    runs_dir: str | Path | None = None,
    *,
    grid: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> BatchStudy:
    """The batching study of a profile, as study_sweep; grid: fields of BatchGrid to override."""
    config = study_config(profile, **overrides)
    return run_batches(config, batch_grid(profile, **(grid or {})), runs_dir)


def study_ladder(
    profile: str = "default",
    runs_dir: str | Path | None = None,
    *,
    plan: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> LadderStudy:
    """The ladder of modifications of a profile, as study_sweep; plan: fields of LadderPlan to
    override.
    """
    config = study_config(profile, **overrides)
    return run_ladder(config, ladder_plan(profile, **(plan or {})), runs_dir)


def study_policies(
    profile: str = "default",
    runs_dir: str | Path | None = None,
    *,
    plan: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> PolicyStudy:
    """The study of policies of a profile, as study_sweep; plan: fields of PolicyPlan to change."""
    config = study_config(profile, **overrides)
    return run_policies(config, policy_plan(profile, **(plan or {})), runs_dir)


def figures_home(study: Study) -> Path:
    """Where figures of a sweep are kept: figures/ never mixes profiles or parameters.

    It holds the default profile as it stands; another has build/figures/PROFILE, and one with
    settings of its own build/figures/PROFILE-changed, which version control ignores.
    """
    profile = study.config.profile
    return profile_figures(profile if _is_its_profile(study) else f"{profile}-changed")


def profile_figures(name: str) -> Path:
    """The folder of a profile's figures."""
    if name == "default":
        return project_root() / "figures"
    return project_root() / "build" / "figures" / name


def _is_its_profile(study: Study) -> bool:
    """Whether a study is its profile's own, no setting overridden."""
    own = sweep_config(study.config.profile)
    if isinstance(study, BatchStudy):
        grid = batch_grid(study.config.profile)
        return study.grid == grid and study.config == batch_cells(own, grid)[0].config
    if isinstance(study, LadderStudy):
        plan = ladder_plan(study.config.profile)
        return study.plan == plan and study.config == ladder_config(own, plan)
    if isinstance(study, PolicyStudy):
        policies = policy_plan(study.config.profile)
        return study.plan == policies and study.config == policy_config(own, policies)
    return study.config == own


def keep_figure(
    fig: go.Figure,
    rows: pd.DataFrame,
    name: str,
    study: Study,
    folder: str | Path | None = None,
) -> SavedFigure:
    """Save a figure of the study in `folder` (default: figures_home)."""
    place = Path(folder) if folder else figures_home(study)
    parameters = study.config.to_dict()
    return save_figure(fig, rows, name, place, parameters, measured=measured(study.runs))
