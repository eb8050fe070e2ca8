"""What changes do: the thesis's modifications one after the other (section 5.3), sampling to the
end at the depth limit, each value that the thesis leaves open set otherwise; policies over the
split, techniques alone and together, and memory over time.
"""

from __future__ import annotations

from itertools import count, product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots import theme
from workbench.plots.theme import MODELS, Style, finish, legend_at, say, series

GAIN = "gain"
PANELS = {  # metric: (axis title, colour); the gain has no bars
    GAIN: ("gain over the<br>step before, times", theme.VERMILION),
    "problems_per_min": ("problems<br>/min", theme.GREEN),
    "tokens_per_s": ("generated<br>tokens/s", theme.BLACK),
    "accuracy": ("accuracy", theme.ORANGE),
}
FINISHING = {
    "finishes": Style("sampled to the end", theme.PURPLE, symbol="diamond"),
    "stops": Style("stopped, unfinished", theme.BLACK, "dash"),
}
_HATCHED = {"fillmode": "overlay", "fgcolor": "white", "size": 7, "solidity": 0.35}
_FOOT, _HEAD = 0.46, 0.25  # of the drawing: the ablation above, the depth limits below
_LADDER_CAPTION = (
    "The thesis's modifications (section 5.3), each setting the one before with one more switch; "
    "hatched, the last with the LLM's requests in static, padded batches of as many as surely fit, "
    "without a prefix cache. Left: times the problems/min of the setting before (hatched: of the "
    "last), problem by problem; exactly 1 where both did the same work; open: over a longer queue, "
    "in runs of its own. Tokens/s counts tokens sampled to the end too. Below: accuracy of the "
    "last two at several depth limits. Bars: 95 % intervals, of accuracies Wilson's, of the rest a "
    "bootstrap over problems with the machine's noise."
)


def modifications(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Gain, problems/min, tokens/s and accuracy of every step; accuracy over the depth limit below.

    rows: setting, label, metric (those of PANELS and of FINISHING), value, low, high, max_depth,
    queued (whether a gain is of runs over a longer queue); with a column rung the gains of every
    pair of models, and of the first all else.
    """
    gains = rows[rows["metric"] == GAIN]
    if "rung" in rows:
        rows = rows[rows["rung"] == rows["rung"].iloc[0]]
    specs = [[{}, {}, {}, {}], [{"colspan": 4}, None, None, None]]
    fig = make_subplots(2, 4, specs=specs, shared_yaxes=True, column_widths=[0.38, 0.22, 0.2, 0.2],
                        horizontal_spacing=0.05)  # fmt: skip
    labels = rows[rows["metric"] == "problems_per_min"].set_index("setting")["label"]
    order = list(labels.index)
    for column, (metric, (title, _)) in enumerate(PANELS.items(), start=1):
        wanted = gains if metric == GAIN else rows[rows["metric"] == metric]
        own = wanted[wanted["setting"].isin(order)]
        own = own.assign(place=own["setting"].map(order.index))
        if metric == GAIN:
            _gains(fig, own)
        else:
            _bars(fig, own, metric, column)
        fig.update_xaxes(title={"text": title, "standoff": 6}, nticks=3, row=1, col=column)
        ticks = {"tickmode": "array", "tickvals": list(range(len(order))), "showgrid": False}
        reach = [len(order) - 0.5, -0.5]
        fig.update_yaxes(**ticks, range=reach, domain=[_FOOT, 1], row=1, col=column)
    fig.update_yaxes(ticktext=[labels[setting] for setting in order], row=1, col=1)
    ends = rows[rows["metric"].isin(FINISHING)]
    limits = sorted(ends["max_depth"].unique())
    for shift, (metric, style) in zip((-0.04, 0.04), FINISHING.items()):  # bars do not cover
        own = ends[ends["metric"] == metric].sort_values("max_depth")
        own = own.assign(place=[limits.index(limit) + shift for limit in own["max_depth"]])
        series(fig, own, "place", style, "accuracy %{y:.2f}", 2, 1, marker_size=9)
    ticks = {"tickvals": list(range(len(limits))), "ticktext": [f"{limit}" for limit in limits]}
    title, reach = "depth limit: reasoning steps a beam may have", [-0.5, len(limits) - 0.5]
    fig.update_xaxes(title_text=title, range=reach, **ticks, row=2, col=1)
    fig.update_yaxes(title_text="accuracy", range=[0, 1.05], domain=[0, _HEAD], row=2, col=1)
    legend_at(fig, "legend", _HEAD + 0.01)
    title = "Modifications of the baseline, one after another"
    return finish(fig, title, _LADDER_CAPTION, provenance, 620, left=182)


def _gains(fig: go.Figure, rows: pd.DataFrame) -> None:
    """Paired factors of the settings on a logarithmic axis; the first pair's with their numbers."""
    several = rows.get("rung", pd.Series("", rows.index))
    for number, (rung, own) in enumerate(rows.groupby(several, sort=False)):
        colour = (PANELS[GAIN][1], theme.BLUE, theme.PURPLE)[number % 3]
        longer, shape = own["queued"], ("diamond", "square", "circle")[number % 3]
        shapes = [shape + "-open" * each for each in longer]
        text = np.where(longer, "longer queue:<br>", "") + own["value"].map("×{:.2f}".format)
        points = go.Scatter(
            x=own["value"],
            y=own["place"] + 0.22 * number,
            error_x=theme.interval(own, colour),
            mode="markers" if number else "markers+text",
            text=text,
            textposition="top center",
            marker={"symbol": shapes, "size": 9, "color": colour},
            name=str(rung) or "gain",
            showlegend=several.nunique() > 1,
            legend="legend2",
            hovertemplate="×%{x:.2f}<extra></extra>",
        )
        fig.add_trace(points, row=1, col=1)
    if several.nunique() > 1:
        legend_at(fig, "legend2", 1.01)
    fig.add_vline(1, line={"color": theme.GREY, "dash": "dot", "width": 1}, row=1, col=1)
    known = rows[["value", "low", "high"]].replace([np.inf, -np.inf], np.nan)
    ends = [min(0.5, 0.6 * known.min().min()), max(2.0, 1.4 * known.max().max())]
    fig.update_xaxes(type="log", range=np.log10(ends).tolist(), row=1, col=1)
    ticks = [tick for tick in (0.1, 0.3, 1, 3, 10, 30, 100) if ends[0] <= tick <= ends[1]]
    fig.update_xaxes(tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks], row=1, col=1)


def _bars(fig: go.Figure, rows: pd.DataFrame, metric: str, column: int) -> None:
    title, colour = PANELS[metric]
    name = title.replace("<br>", " " if metric == "tokens_per_s" else "")
    patterns = ["/" if setting == "static_requests" else "" for setting in rows["setting"]]
    bar = go.Bar(
        x=rows["value"],
        y=rows["place"],
        error_x=theme.interval(rows, theme.BLACK if colour != theme.BLACK else theme.GREY),
        orientation="h",
        width=0.5,
        customdata=rows[["low", "high"]],
        name=name,
        showlegend=False,
        marker={"color": colour, "pattern": {"shape": patterns, **_HATCHED}},
        hovertemplate="%{x:,.2f} (95 %: %{customdata[0]:,.2f} to %{customdata[1]:,.2f})",
    )
    fig.add_trace(bar, row=1, col=column)
    reach = 1.05 * (1 if metric == "accuracy" else theme.highest(rows))
    fig.update_xaxes(range=[0, reach], row=1, col=column)


# -- the answer about the split when one value is another --

LOSSES = ["loss_low", "loss_mid", "loss_high"]
ENDS = {"loss_low": ("llm", "low"), "loss_high": ("prm", "high")}
_SETTINGS_CAPTION = (
    "The memory split with one value at a time set otherwise, replayed; the first row is what is "
    "taken. Left: the plateau, the shares of the LLM that lose less than 2 % of the best tokens/s "
    "of those replayed, as a bar (between which nothing is known), and the best of them; grey, the "
    "plateau of what is taken; dotted, the thesis's 0.3. Right: what the lowest and the highest "
    "share lose to the best, 0.08 and 0.5 where both fit; dotted, 2 %. The value that changes most "
    "what is lost there or at 0.3 comes first, of several alike the first of the table."
)


def sensitivity(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Plateau and losses at the ends of the interval for each setting of each value.

    rows: kind (only `setting` is drawn), value, setting, best, plateau_low, plateau_high, low, high
    (shares), loss_low, loss_mid, loss_high (fractions); no pair that does not fit has a best.
    """
    own = rows[rows["kind"] == "setting"]  # in order: taken, then what changes the losses most
    is_taken = own["value"] == "taken"
    change = own[LOSSES] - own.loc[is_taken, LOSSES].iloc[0].astype(float)
    effect = change.abs().max(axis=1).fillna(0.0).groupby(own["value"]).transform("max")
    own = own.assign(effect=-effect.round(3).mask(is_taken, np.inf))
    own = own.assign(nth=pd.factorize(own["value"])[0])
    own = own.sort_values(["effect", "nth"], ignore_index=True)  # stable, of two columns
    places = [-number for number in range(len(own))]
    labels = [
        "<b>taken</b>" if value == "taken" else f"{str(value).split(',')[0]}: {setting}"
        for value, setting in own[["value", "setting"]].to_numpy()
    ]
    own = own.assign(place=places, label=labels)
    fig = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.05)
    turns = own["value"].ne(own["value"].shift()).cumsum()
    for number, (_, group) in enumerate(own.groupby(turns)):  # every other value on a ground
        if number % 2:
            reach = {"y0": group["place"].min() - 0.5, "y1": group["place"].max() + 0.5}
            look = {"fillcolor": "#F2F2F2", "line_width": 0, "layer": "below"}
            fig.add_shape(x0=0, x1=1, xref="paper", yref="y", **reach, **look)
    fits = own[own["best"].notna()]
    ends, at = fits[["plateau_low", "plateau_high"]].to_numpy(), fits["place"]
    name = "plateau: within 2 % of the best"
    bars = theme.segments(ends, zip(at, at), theme.GREEN, 6, name=name)
    best = go.Scatter(
        x=fits["best"],
        y=at,
        mode="markers",
        marker={"symbol": "diamond", "size": 8, "color": theme.BLACK},
        name="best of those replayed",
        customdata=fits[["label", "plateau_low", "plateau_high"]],
        hovertemplate="%{customdata[0]}: best %{x:.2f}, plateau %{customdata[1]:.2f} to "
        "%{customdata[2]:.2f}<extra></extra>",
    )
    fig.add_traces([bars, best], rows=[1, 1], cols=[1, 1])
    for column, (model, end) in ENDS.items():
        style = MODELS[model]
        lost = go.Scatter(
            x=100 * fits[column],
            y=fits["place"],
            mode="markers",
            marker={"symbol": style.symbol, "color": style.colour, "size": 8},
            name=f"loss at the {'lower' if end == 'low' else 'upper'} end ({style.label} short)",
            customdata=fits[["label", end]],
            hovertemplate="%{customdata[0]}: %{x:.1f} % at %{customdata[1]:.2f}<extra></extra>",
        )
        fig.add_trace(lost, row=1, col=2)
    # after the traces: plotly leaves out what is drawn across an empty panel
    taken = own.iloc[0]
    band = {"fillcolor": theme.GREY, "opacity": 0.22, "line_width": 0, "layer": "below"}
    fig.add_vrect(taken["plateau_low"], taken["plateau_high"], **band, row=1, col=1)
    dotted = {"line": {"color": theme.BLACK, "width": 1, "dash": "dot"}}
    fig.add_vline(0.3, **dotted, row=1, col=1)
    fig.add_vline(2.0, **dotted, row=1, col=2)  # per cent: the plateau
    small = {"yanchor": "middle", "font": {"size": 11, "color": "#555555"}}
    for place in own.loc[own["best"].isna(), "place"]:
        say(fig, "does not fit", 0.1, place, **small, row=1, col=1)
    axis = {"tickvals": places, "ticktext": labels, "range": [places[-1] - 0.7, 0.7]}
    fig.update_yaxes(**axis, showgrid=False)
    fig.update_xaxes(title_text="LLM share", range=[0.05, 0.53], row=1, col=1)
    most = 100 * float(fits[["loss_low", "loss_high"]].max().max())
    title = "lost to the best (%)"
    fig.update_xaxes(title_text=title, range=[-3, 1.06 * max(most, 3.0)], row=1, col=2)
    title, room = "What the split's answer depends on", {"top": 84, "left": 262, "legend": 6}
    return finish(fig, title, _SETTINGS_CAPTION, provenance, 15 * len(own) + 12, **room)


# -- policies and techniques for two models in one memory --

STATIC, ELASTIC, NONE, ALL = "static", "marginal_value", "none", "all"
POLICIES = {
    STATIC: "static",
    "first_come": "first come",
    "phase_aware": "phase-aware",
    ELASTIC: "marginal value",
}
TECHNIQUES = {
    NONE: "none",
    "partial_blocks": "partial blocks",
    "forget_pruned": "pruned forgotten",
    "adaptive": "adaptive batching",
    "prefix_order": "prefix-aware order",
    ALL: "all techniques",
}
BUDGETS = {"circle": theme.VERMILION, "square": theme.BLUE, "diamond": theme.GREEN}
MIB = 2**20
_LINE_PX, _MEMORY_PX, _BETWEEN_PX = 19, 120, 92
_POLICIES_CAPTION = (
    "Left: generated tokens/s over those of the best static split of the same KV memory, with 95 % "
    "intervals of that ratio on the same problems; no room: a model has less than one request. W "
    "is the LLM's peak of KV plus the PRM's, memory uncapped, which need not fall together. Right: "
    "tokens that both models computed again because memory was short (exact). Below: what each "
    "model holds (line), uses (area) and should come to (dotted) in one search under marginal "
    "value, at the smallest memory."
)


def optimisation(rows: pd.DataFrame, provenance: str = "") -> go.Figure:
    """Every policy and technique as times the best static split's tokens/s, beside it what was
    computed again, and memory over time below; in words, accuracy and sameness of the settings.

    rows: metric, setting, budget, policy, kv_share, technique, value, low, high, model, second;
    metrics tokens_per_s, accuracy, same, recomputed, infeasible, held, active, target. Drawn are at
    most three budgets, the smallest.
    """
    rows = rows[rows["technique"].isin(list(TECHNIQUES))]
    lines = _lines(rows)
    rows = rows.assign(place=rows["setting"].str.partition("/")[2].map(dict(zip(lines, count()))))
    panels = _LINE_PX * len(lines) + _BETWEEN_PX + _MEMORY_PX
    fig = make_subplots(2, 2, specs=[[{}, {}], [{"colspan": 2}, None]], shared_yaxes=True,
                        column_widths=[0.6, 0.4], horizontal_spacing=0.04)  # fmt: skip
    budgets = sorted(rows["budget"].dropna().unique())
    caption, more = _POLICIES_CAPTION, ", ".join(f"{each:g}" for each in budgets[len(BUDGETS) :])
    caption += f" Measured and not drawn: {more} W." if more else ""
    budgets = budgets[: len(BUDGETS)]
    for number, (budget, look) in enumerate(zip(budgets, BUDGETS.items())):
        shift = 0.25 * (number - (len(budgets) - 1) / 2)
        own = rows[(rows["budget"] == budget) & rows["place"].notna()]
        _points(fig, own.assign(place=own["place"] + shift), *look, f"{budget:g} W")
    for place, own in rows.query("metric == 'infeasible' and technique == 'none'").groupby("place"):
        text = f" no room at {', '.join(own['budget'].map('{:g}'.format))} W"
        say(fig, text, 0, place, yanchor="middle", font_size=11, row=1, col=1)
    fig.add_vline(1, line={"color": theme.GREY, "dash": "dot", "width": 1}, row=1, col=1)
    ticks = {"tickvals": list(range(len(lines))), "ticktext": list(lines.values())}
    reach, ground = [len(lines) - 0.5, -0.5], 1 - _LINE_PX * len(lines) / panels
    fig.update_yaxes(**ticks, range=reach, domain=[ground, 1], row=1)
    for column, text in enumerate(("tokens/s, times the best static", "tokens computed again"), 1):
        title = {"text": text, "standoff": 4}
        fig.update_xaxes(title=title, rangemode="tozero", nticks=6, row=1, col=column)
    _memory(fig, rows)
    fig.update_yaxes(domain=[0, _MEMORY_PX / panels], row=2)
    legend_at(fig, "legend2", _MEMORY_PX / panels + 6 / panels)
    for line, text in enumerate(words := theme.wrapped(_sameness(rows), 88)):
        say(fig, text, 0, 0, yanchor="top", yshift=-46 - 16 * line)
    room = {"top": 66, "bottom": 48 + 18 * len(words), "left": 206}
    return finish(fig, "Two models, one memory", caption, provenance, panels, **room)


def _lines(rows: pd.DataFrame) -> dict[str, str]:
    """What is drawn as a line, without its budget, and its label: static shares, policies, each
    technique at the static share nearest the thesis's, all of them under the elastic policy.
    """
    known = rows[rows["metric"].isin(["tokens_per_s", "infeasible"])].drop_duplicates("setting")
    known = known.assign(
        key=known["setting"].str.partition("/")[2],
        policy=pd.Categorical(known["policy"], list(POLICIES)),
        technique=pd.Categorical(known["technique"], list(TECHNIQUES)),
    ).drop_duplicates("key")
    extra, static = known["technique"] != NONE, known["policy"] == STATIC
    shares = known.loc[extra & static, "kv_share"]
    near = min(shares, key=lambda share: abs(share - 0.3), default=None)
    known = known.assign(extra=extra)[~extra | ~static | (known["kv_share"] == near)]
    known = known.sort_values(["extra", "policy", "kv_share", "technique"])

    def label(row: Any) -> str:
        name = POLICIES[row.policy] + (f" {row.kv_share:g}" if row.policy == STATIC else "")
        return name if row.technique == NONE else f"{name} + {TECHNIQUES[row.technique]}"

    return {f"{row.key}": label(row) for row in known.itertuples()}


def _points(fig: go.Figure, rows: pd.DataFrame, symbol: str, colour: str, name: str) -> None:
    """One budget: ratios to its best static split left, tokens computed again right."""
    speed, again = (rows[rows["metric"] == each] for each in ("tokens_per_s", "recomputed"))
    static = speed[(speed["policy"] == STATIC) & (speed["technique"] == NONE)]
    best = static["value"].max()  # of no feasible share: no ratio
    ratio = speed.assign(**{each: speed[each] / best for each in ("value", "low", "high")})
    for column, (own, hover) in enumerate(((ratio, "×%{x:.2f}"), (again, "%{x:,.0f} tokens")), 1):
        points = go.Scatter(
            x=own["value"],
            y=own["place"],
            error_x=theme.interval(own, colour) if column == 1 else None,
            mode="markers",
            marker={"symbol": symbol, "size": 8, "color": colour},
            name=name,
            showlegend=column == 1,
            hovertemplate=f"{hover}<extra>{name}</extra>",
        )
        fig.add_trace(points, row=1, col=column)


def _memory(fig: go.Figure, rows: pd.DataFrame) -> None:
    """What both models hold, use and should come to under the elastic policy."""
    held = rows[rows["policy"] == ELASTIC].sort_values("second")
    looks: dict[str, tuple[str, dict[str, Any]]] = {
        "active": ("in use", {"width": 0}),
        "held": ("held", {"width": 2}),
        "target": ("targets (dotted)", {"width": 1, "dash": "dot"}),
    }
    for model, (metric, (label, look)) in product(reversed(MODELS), looks.items()):
        style = MODELS[model]  # the smaller area in front
        drawn = held[(held["model"] == model) & (held["metric"] == metric)]
        trace = go.Scatter(
            x=drawn["second"],
            y=drawn["value"] / MIB,
            mode="lines",
            line={"color": style.soft if metric == "active" else style.colour, **look},
            fill="tozeroy" if metric == "active" else None,
            fillcolor=style.soft,
            opacity=0.8,
            name=label if metric == "target" else f"{style.label} {label}",
            showlegend=metric != "target" or model == "llm",
            legend="legend2",
            hovertemplate="%{x:.1f} s: %{y:.2f} MiB",
        )
        fig.add_trace(trace, row=2, col=1)
    title = {"text": "seconds of a search, marginal value", "standoff": 4}
    fig.update_xaxes(title=title, row=2, col=1)
    fig.update_yaxes(title_text="KV, MiB", rangemode="tozero", row=2, col=1)


def _sameness(rows: pd.DataFrame) -> str:
    """Whether the settings sampled the uncapped search's tokens and scores, and their accuracy."""
    right = rows[rows["metric"] == "accuracy"].set_index("setting")["value"]
    same = rows[rows["metric"] == "same"].set_index("setting")["value"].reindex(right.index) == 1
    if right.empty:
        return ""
    text = f"{same.sum()} of {len(right)} settings sample the same tokens and scores"
    if same.any():
        text += f", accuracy {right[same].iloc[0]:.2f}"
    others = [f"{name} ({value:.2f})" for name, value in right[~same].items()]
    return f"{text}. Not the same: {', '.join(others)}." if others else f"{text}."
