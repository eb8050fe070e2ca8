"""Stored runs to look through: pick one or two, and see figures of the study that such runs have.

A pick is a whole sweep (runs that differ in share and seed alone), the cells of a batching study,
or one run. The rows are the study's own views, the drawings its own plots; a second pick is dotted
or hatched, with open markers, over the first, or cells beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import ipywidgets
import pandas as pd
import plotly.graph_objects as go

from workbench import plots
from workbench.config import SweepConfig, format_size, require_known
from workbench.errors import RunStoreError, nearest
from workbench.experiments import plans, settings
from workbench.experiments import rows as study_rows
from workbench.experiments.provenance import counted
from workbench.experiments.runs import FINISHED, RunTables, compare, load_runs, load_table
from workbench.experiments.settings import COUNTED, MEASURE, REPLAY, SENTINEL, TIMED
from workbench.experiments.study import measured_of, provenance
from workbench.plots.panels import by_rung
from workbench.widgets.parts import Drawing, FigureView, HtmlText, NumberSlider, labelled

CELLS = (TIMED, COUNTED)
KINDS = {MEASURE: "sweep", TIMED: "batching cells", REPLAY: "replayed sweep"}  # of groups, by role
SHOWN = ["role", "llm", "llm_share", "seed", "n", "num_problems", "tokens_per_s", "accuracy"]
ROOMS = ["llm_share", "llm_kv_tokens", "prm_kv_tokens"]
OF_ROOMS = ("llm", "prm", "total_memory", "block_size")  # settings that these follow from


@dataclass(eq=False)
class Pick(RunTables):
    """Runs to be looked at together, with the tables that the study's views read.

    all_runs: rows of load_runs, sentinels and failed ones too.
    """

    name: str
    all_runs: pd.DataFrame

    @property
    def is_batches(self) -> bool:
        """Whether it is cells of the batching study, which ask requests and search nothing."""
        return bool(self.all_runs["role"].isin(CELLS).all())

    @cached_property
    def runs(self) -> pd.DataFrame:
        """Finished runs by share and seed; sentinels and repetitions of searches only where there
        is nothing else.
        """
        done = self.all_runs[self.all_runs["status"] == FINISHED]
        once = (done["repeat"] == 0) | done["role"].isin(CELLS)
        first = done[once & (done["role"] != SENTINEL)]
        shown = first if len(first) else done
        return shown.sort_values(["llm_share", "seed"], ignore_index=True)

    @property
    def shares(self) -> list[float]:
        """The LLM's shares that were measured."""
        return sorted(map(float, self.runs["llm_share"].unique()))

    @property
    def provenance(self) -> str:
        """What was measured, as figures say it."""
        if not self.is_batches:
            return provenance(self.runs)
        return provenance(self.all_runs, None, study_rows.cells_provenance(self.all_runs))


def picks(runs: pd.DataFrame) -> dict[str, Pick]:
    """What can be picked of the rows of load_runs, by name: groups first, then single searches."""
    readable = runs[runs["status"] != "unreadable"] if len(runs) else runs
    if readable.empty:
        raise RunStoreError(
            "There is no stored run to explore; `workbench figures` makes some, and so does "
            "`workbench sweep`."
        )
    cells = readable["role"].isin(CELLS)
    of_a_cell = {*plans.LIMITS, "setting"}  # the cells of one study differ in these
    found = _groups(readable[~cells], set()) | _groups(readable[cells], of_a_cell)
    single = readable[~cells & (readable["status"] == FINISHED)]
    first = single.sort_values("role", key=lambda role: role != MEASURE, kind="stable")
    found |= {str(name): run for name, run in first.groupby("run_id", sort=False)}
    return {name: Pick(name, rows) for name, rows in found.items()}


def picked(found: dict[str, Pick], name: str | None) -> Pick:
    """The pick of this name, the first by default. RunStoreError for one that is not there."""
    first = next(iter(found))
    wanted = first if name is None else name
    if wanted not in found:
        hint = nearest(wanted, list(found))
        raise RunStoreError(f"There is no pick {wanted!r}.{hint} First: {first!r}.")
    return found[wanted]


def searched(llm_share: float, *of: Pick) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tables `problems` and `nodes` of the run nearest to a share, its first seed, of the first of
    these picks that has one.

    RunStoreError where no run of them kept its nodes: replays and batching cells sample nothing.
    """
    for runs in (pick.runs for pick in of):
        near = runs.assign(distance=(runs["llm_share"] - llm_share).abs())
        for folder in near.sort_values(["distance", "seed"])["folder"]:
            with suppress(RunStoreError):  # it has no such table
                nodes = load_table(folder, "nodes")
                if len(nodes):
                    return load_table(folder, "problems"), nodes
    raise RunStoreError(
        f"{of[0].name} has no run with sampled nodes; pick a measured search that is stored whole "
        "to see its trees."
    )


def runs_table(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs as a person picks from them, searches before cells, best known columns only."""
    order = runs.assign(cell=runs["role"].isin(CELLS)).sort_values(["cell", "role", "run_id"])
    return order.set_index("run_id").filter(items=[*SHOWN, "status"])


def _groups(runs: pd.DataFrame, varying: set[str]) -> dict[str, pd.DataFrame]:
    """Runs that share every setting but `varying`, share and seed; named by what differs."""
    if runs.empty:
        return {}
    varying = {"llm_share", "seed", "repeat"} | varying | settings.HOW_IT_IS_CARRIED_OUT
    known = [field.name for field in fields(SweepConfig) if field.name in runs]
    known += [name for name in ("setting", "code") if name in runs]
    keys = runs[[*(name for name in known if name not in varying), "machine"]].map(str)
    keys["role"] = runs["role"].replace({SENTINEL: MEASURE} | dict.fromkeys(CELLS, TIMED))
    groups = [rows for _, rows in runs.groupby([keys[name] for name in keys], sort=False)]
    groups.sort(key=lambda rows: MEASURE not in set(rows["role"]))
    names = []
    for rows in groups:
        first, shares = rows.iloc[0], sorted(rows["llm_share"].unique())
        role = keys["role"][rows.index[0]]
        kind = KINDS.get(role, f"{role} runs")
        span = f"{shares[0]:g}" if len(shares) == 1 else f"{shares[0]:g} to {shares[-1]:g}"
        names.append(
            f"{kind} {first['llm']} + {first['prm']}, {format_size(int(first['total_memory']))}, "
            f"n={first['n']}, {first['num_problems']} problems, share {span}, "
            f"{counted(len(rows), 'run')}"
        )
    alike = pd.concat([r for r, name in zip(groups, names) if names.count(name) > 1] or [runs[:0]])
    telling = [str(name) for name in keys if alike[name].map(str).nunique() > 1]
    found = {}
    for name, rows in zip(names, groups):
        own = {each: str(rows.iloc[0][each]) for each in telling if names.count(name) > 1}
        more = "".join(f", {each}={value}" for each, value in own.items() if value != "nan")
        found[name + more] = rows
    return found


Compared = tuple[str, tuple[pd.DataFrame, ...]]
Figure = tuple[Callable[[Pick, float], pd.DataFrame], Callable[[pd.DataFrame, str], go.Figure]]
OF_SEARCHES: dict[str, Figure] = {
    "memory_split": (lambda pick, _: study_rows.split_rows(pick), plots.memory_split),
    "prm_blocks": (study_rows.block_rows, plots.prm_blocks),
    "prefix_hits": (lambda pick, _: study_rows.prefix_hit_rows(pick), plots.prefix_hits),
    "thrashing": (lambda pick, _: study_rows.thrashing_rows(pick), plots.thrashing),
    "lost_time": (lambda pick, _: study_rows.lost_time_rows(pick), plots.lost_time),
}
OF_BATCHES: dict[str, Figure] = {
    "llm_batch": (lambda pick, _: study_rows.batch_rows(pick, "llm"), plots.batch_limits),
    "prm_batch": (lambda pick, _: study_rows.batch_rows(pick, "prm"), plots.batch_limits),
}
AT_ONE_SHARE = ("prm_blocks",)


def figures_of(a: Pick, b: Pick | None = None) -> list[str]:
    """Names of the figures that can be drawn of a pick, or of both."""
    if b is not None and a.is_batches != b.is_batches:
        return ["balance"]
    return list(OF_BATCHES if a.is_batches else OF_SEARCHES)


def explore(
    name: str, a: Pick, b: Pick | None = None, llm_share: float = 0.3, told: Compared | None = None
) -> Drawing:
    """The figure called `name` of one pick, or of two overlaid; its rows have a column `pick`.

    llm_share: of figures at one share, the nearest measured one. told: how the two compare, where
    that is known. ConfigError for a figure that is unknown or not of such runs.
    """
    require_known([name], figures_of(a, b), f"The pick {a.name!r}", "figure")
    chosen = [a] if b is None else [a, b]
    if b is not None and name == "balance":
        searches, cells = sorted(chosen, key=lambda pick: pick.is_batches)
        rows = study_rows.balance_rows(searches, cells.all_runs)
        of_both = provenance(searches.runs, beside=cells.all_runs)
        of_cells = study_rows.cells_provenance(study_rows.counted_search(cells.all_runs))
        measured = f"{of_both}\n{of_cells}"
        figure = plots.balance(rows, measured)
        words = f"{searches.name}; {cells.name}: {figure.layout.meta['caption']}"
        return Drawing(figure, rows, words, {}, measured=measured_of(searches.runs.iloc[0]))
    make, draw = (OF_SEARCHES | OF_BATCHES)[name]
    for pick in chosen:
        if not pick.shares:
            raise RunStoreError(f"{pick.name} holds no finished run.")
    shares = [min(pick.shares, key=lambda share: abs(share - llm_share)) for pick in chosen]
    tables = [make(pick, share) for pick, share in zip(chosen, shares)]
    for pick, table in zip(chosen, tables):
        if table.empty:
            raise RunStoreError(f"{pick.name} has nothing that {name} draws.")
    named = [table.assign(pick=pick.name) for table, pick in zip(tables, chosen)]
    rows = pd.concat(named, ignore_index=True)
    at_one = name in AT_ONE_SHARE  # of one run each
    where_from = [
        provenance(pick.runs, int(table["run_seed"].iloc[0])) if at_one else pick.provenance
        for pick, table in zip(chosen, tables)
    ]
    made = measured_of(a.runs.iloc[0])
    if b is None:
        figure = draw(tables[0], where_from[0])
        words = f"{a.name}: {figure.layout.meta['caption']}"
        return Drawing(figure, rows, words, {}, measured=made)
    first, second = (each.splitlines() for each in where_from)
    where = [f" (share {share:.2f})" if at_one else "" for share in shares]
    looks = f"A{where[0]}: solid lines, plain bars. B{where[1]}: dotted lines, hatched bars."
    lines = ["A: left. B: right." if a.is_batches else looks]
    bases = [settings.nearest_to_thesis(pick.runs["llm_share"]) for pick in chosen]
    if name == "memory_split" and bases[0] != bases[1]:
        lines.append(f"Ratios of A are over its {bases[0]:.2f}, of B over its {bases[1]:.2f}.")
    alike = not rows.reindex(columns=ROOMS).drop_duplicates()["llm_share"].duplicated().any()
    alike &= all(a.runs.iloc[0][each] == b.runs.iloc[0][each] for each in OF_ROOMS)
    lines += [] if alike else ["Room above: A's."]
    lines += [f"A: {line}" for line in first if line not in second]
    lines += [f"B: {line}" for line in second if line not in first]
    said = "\n".join([*lines, *(line for line in first if line in second)])
    if set(ROOMS) <= set(rows.columns):  # each gets the other's shares, for one axis
        places = rows[ROOMS].drop_duplicates("llm_share")
        if not alike:
            places = places[["llm_share"]]
        lacking = [places[~places["llm_share"].isin(table["llm_share"])] for table in tables]
        tables = [pd.concat(pair, ignore_index=True) for pair in zip(tables, lacking)]
    if a.is_batches:  # heat maps over limits of their own
        sides = [table.assign(rung=side) for side, table in zip("AB", tables)]
        figure = by_rung(draw, "One panel for each pick.")(pd.concat(sides), said)
    else:
        figure = overlaid(*(draw(table, said) for table in tables))
    words, differences = told or compared(a, b)
    words = f"A: {a.name}. B: {b.name}. {words}"
    return Drawing(figure, rows, words, {}, differences, made)


def compared(a: Pick, b: Pick) -> Compared:
    """What `workbench runs compare` says of the two, in words and in its tables; or why they do not
    compare, and no table.
    """
    try:
        found = compare(*(list(pick.all_runs["folder"]) for pick in (a, b)))
    except RunStoreError as problem:
        return str(problem), ()
    speed = found.differences.set_index("metric")["difference"]["tokens_per_s"]
    words = f"B minus A: {speed:+,.0f} tokens/s."
    return " ".join([words, *found.findings, *found.warnings]), found.tables


def overlaid(a: go.Figure, b: go.Figure) -> go.Figure:
    """B laid over A, which is changed; they come of one plot function, so their axes are alike."""
    for trace in a.data:
        trace.update(hoverlabel={"namelength": -1})
        if trace.type == "bar":
            trace.update(offsetgroup="A", width=None)
    for trace in b.data:
        is_note = trace.type == "scatter" and list(trace.x) == [None]  # of the legend alone
        if trace.xaxis != "x9" and not is_note:  # x9: the empty trace of theme.share_axes
            a.add_trace(_as_second(trace))
    for shape in b.layout.shapes:
        a.add_shape({**shape.to_plotly_json(), "opacity": 0.10})
    for name, axis in b.layout.to_plotly_json().items():
        own = a.layout[name].range if name.startswith(("xaxis", "yaxis")) else None
        if own is not None and axis.get("range"):  # reach as far as either
            (low, high), (least, most) = own, axis["range"]
            a.layout[name].range = [min(low, least), max(high, most)]
    return a


def _as_second(trace: Any) -> Any:
    """Dotted or hatched; its name is seen when it is pointed at."""

    def dotted(symbol: Any) -> Any:  # or each of several
        if symbol is None or isinstance(symbol, str):
            return symbol and f"{symbol.removesuffix('-open')}-open-dot"
        return [dotted(each) for each in symbol]

    trace.update(showlegend=False, name=f"B: {trace.name}", opacity=0.75)
    if trace.type == "bar":
        pattern = {"shape": "/", "size": 6, "solidity": 0.45}
        trace.update(offsetgroup="B", width=None, marker={"pattern": pattern})
    elif trace.type == "scatter":
        trace.line.dash = "dot"
        trace.marker.symbol = dotted(trace.marker.symbol)
        if trace.stackgroup:  # areas would hide the first's: their upper edges alone
            trace.update(stackgroup=f"{trace.stackgroup} B", fillcolor="rgba(0,0,0,0)", opacity=1)
            trace.line.width = 1.8
        if trace.fill == "tozeroy":
            trace.fill = "none"
    return trace


class ExplorerView(FigureView):
    """Table, menus and figure of the runs of a folder.

    a, b: names of the picks that are shown first (default: the first, and none), figure and
    llm_share: of what, and where. parameters: others of notebooks/10_explore.ipynb.
    """

    def __init__(
        self,
        runs_dir: str | Path,
        a: str | None = None,
        b: str | None = None,
        figure: str | None = None,
        llm_share: float = 0.3,
        **parameters: Any,
    ) -> None:
        runs = load_runs(runs_dir)
        self.picks = picks(runs)
        wide, names = ipywidgets.Layout(width="560px"), list(self.picks)
        at = picked(self.picks, a).name
        self.first = ipywidgets.Dropdown(options=names, value=at, layout=wide)
        self.second = ipywidgets.Dropdown(options=["none", *names], value=b or "none", layout=wide)
        self._comparison = self._compared()
        offered = figures_of(self._a, self._b)
        self.name = ipywidgets.Dropdown(options=offered, value=figure or offered[0])
        self._share_row, self._first_share = ipywidgets.VBox(), llm_share
        self._offer_shares()
        table = HtmlText(layout=ipywidgets.Layout(max_height="220px", overflow="auto"))
        table.say("", tables=[runs_table(runs).reset_index()])
        menus = {"A": self.first, "B, over A or beside it": self.second, "figure": self.name}
        rows = [table, *(labelled(*each) for each in menus.items()), self._share_row]
        parameters["runs_dir"] = str(runs_dir)
        super().__init__("10_explore", rows, self._drawings, parameters)
        for menu in (self.first, self.second):
            menu.observe(self._other_pick, names="value")
        self.name.observe(self.show, names="value")

    @property
    def _share(self) -> float:
        """Where the slider of shares stands, or is to."""
        return next((slider.value for slider in self._share_row.children), self._first_share)

    @property
    def _a(self) -> Pick:
        return self.picks[self.first.value]

    @property
    def _b(self) -> Pick | None:
        return self.picks.get(self.second.value)

    def pin(self) -> str:
        """What is A now becomes B, over whatever is picked as A next; returns what was pinned."""
        self.second.value = self.first.value
        return f"pinned as B: {self.first.value}"

    def _other_pick(self, _: Any) -> None:
        """Figures and shares are those that the picks have."""
        offered, before = figures_of(self._a, self._b), self.name.value
        self._comparison = self._compared()
        self._offer_shares()
        if list(self.name.options) != offered:
            self.name.unobserve(self.show, names="value")
            self.name.options = offered
            self.name.value = before if before in offered else offered[0]
            self.name.observe(self.show, names="value")
        self.show()

    def _compared(self) -> Compared | None:
        return None if self._b is None else compared(self._a, self._b)

    def _offer_shares(self) -> None:
        """A slider over the shares measured in either pick, where it stood before."""
        shares = {share for pick in (self._a, self._b) if pick is not None for share in pick.shares}
        name, before = "LLM share, where one is drawn", self._share
        slider = NumberSlider(name, sorted(shares) or [0.5], before, "{:.2f}")
        slider.slider.observe(self.show, names="value")
        if shares and self._share_row.children and slider.value != before:
            slider.say(f"{before:.2f} is of neither pick; {slider.value:.2f} is the nearest.")
        self._share_row.children = [slider]

    def _drawings(self) -> dict[str, Drawing]:
        name = self.name.value
        chosen = {"pick_a": self.first.value, "figure": name}
        if self._b is not None:
            chosen["pick_b"] = self.second.value
        if name in AT_ONE_SHARE:
            chosen["llm_share"] = self._share
        found = explore(name, self._a, self._b, self._share, self._comparison)
        return {"explored": replace(found, parameters=chosen)}
