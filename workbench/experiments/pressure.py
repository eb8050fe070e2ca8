"""How short of room both models are, here and at thesis scale: working set over capacity.

The working set is the peak of active blocks where a model has the most room, problems in flight as
they are. At thesis scale nobody has measured it here, so one number is chosen: the tokens of a
problem there, such that the PRM is as short at the upper end as here. Whether the pair means the
same then shows in the other rows. What it does not do: count activations at thesis scale.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from workbench.config import SweepConfig
from workbench.experiments.feasible import feasibility
from workbench.experiments.plan import RunSpec
from workbench.experiments.profiles import sweep_config
from workbench.experiments.views import ENGINES, Tables

SHARES = (0.08, 0.3, 0.5)


def pressure_rows(sweep: Tables, config: SweepConfig) -> pd.DataFrame:
    """One row a share and model: needs and rooms in tokens, and their ratio.

    Columns: llm_share, model, need, room, ratio of this sweep; thesis_need, thesis_room,
    thesis_ratio of the thesis's pair. The PRM's last ratios are equal by choice.
    """
    need = working_set(sweep)
    here = pd.DataFrame([_room(config, share, model) for share in SHARES for model in ENGINES])
    there = pd.DataFrame([_room(thesis_pair(), s, model) for s in SHARES for model in ENGINES])
    rows = here.assign(need=here["model"].map(need), thesis_room=there["room"])
    rows["ratio"] = rows["need"] / rows["room"]
    last = rows[rows["model"] == "prm"].iloc[-1]
    longer = last["ratio"] * last["thesis_room"] / last["need"]
    rows["thesis_need"] = longer * rows["need"]
    rows["thesis_ratio"] = rows["thesis_need"] / rows["thesis_room"]
    columns = ["need", "room", "ratio", "thesis_need", "thesis_room", "thesis_ratio"]
    return rows[["llm_share", "model", *columns]]


def working_set(sweep: Tables) -> dict[str, int]:
    """Tokens of the blocks each model holds at most, at the share where it has the most room."""
    steps, block_size = sweep.table("steps"), int(sweep.runs["block_size"].iloc[0])
    found = {}
    for engine, own in steps.groupby("engine"):
        widest = own[own["blocks_total"] == own["blocks_total"].max()]
        found[str(engine)] = int(widest["blocks_active"].max()) * block_size
    return found


def in_flight(config: SweepConfig) -> int:
    """Problems in flight at once."""
    return min(config.num_problems, config.min_problem_batch)


def thesis_pair() -> SweepConfig:
    """The thesis profile, its models' sizes taken from the package and not from the hub."""
    config = sweep_config("thesis")
    return replace(config, llm=f"dummy:{config.llm}", prm=f"dummy:{config.prm}")


def pressure_sentence(rows: pd.DataFrame, config: SweepConfig) -> str:
    """What was chosen, and how near the LLM's end comes to the thesis's. Rows of pressure_rows."""
    first, last = rows.iloc[0], rows.iloc[-1]
    longer = last["thesis_need"] / last["need"] * in_flight(config) / in_flight(thesis_pair())
    return (
        f"With {in_flight(config)} problems in flight here and {in_flight(thesis_pair())} there, "
        f"the PRM at {last['llm_share']:.2f} holds **{last['ratio']:.2f}** of its room at once in "
        f"both if a problem there has **{longer:.1f}** times the tokens; the LLM at "
        f"{first['llm_share']:.2f} then wants **{first['ratio']:.2f}** of its room here and "
        f"**{first['thesis_ratio']:.2f}** there."
    )


def _room(config: SweepConfig, share: float, model: str) -> dict[str, object]:
    """How many tokens one model's cache holds at a share, as far as its config tells."""
    possible = feasibility(RunSpec(config, share, 0))
    needs = {"llm": (possible.llm, possible.llm_bytes), "prm": (possible.prm, possible.prm_bytes)}
    model_needs, budget = needs[model]
    room = model_needs.num_blocks(budget) * config.block_size
    return {"llm_share": share, "model": model, "room": room}
