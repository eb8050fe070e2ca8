"""The report: one page that needs nothing beside it, and its numbers and tables for LaTeX.

The prose stands in report.html, a Jinja template, and quotes numbers by name. `named_numbers` reads
each of them from the rows beside the figures; the page and numbers.tex are made of the same ones.
A part whose figures are not drawn, or lack what it tells, is left out.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from workbench.config import format_size, parse_size
from workbench.experiments import claims as judged
from workbench.experiments import sensitivity, settings
from workbench.experiments.export import tex_escaped, write_together
from workbench.experiments.provenance import counted, project_root
from workbench.experiments.settings import THESIS_SHARE, sweep_config
from workbench.models.registry import model_spec

TEMPLATE = Path(__file__).with_name("report.html")
TINY = "measured tiny"
Named = dict[str, str]


@dataclass(frozen=True)
class Drawn:
    """The figures of a folder: their rows, records, images and captions."""

    folder: Path

    def has(self, *names: str) -> bool:
        """Whether the rows of these figures are there."""
        return all((self.folder / f"{name}.parquet").is_file() for name in names)

    def rows(self, name: str) -> pd.DataFrame:
        """Of a figure; where it has panels of several rungs, of the measured embedded pair."""
        rows = pd.read_parquet(self.folder / f"{name}.parquet")
        return rows[rows["rung"] == TINY] if TINY in set(rows.get("rung", ())) else rows

    def parameters(self, name: str) -> dict[str, Any]:
        """What a figure was made with."""
        record = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        found: dict[str, Any] = record["parameters"]
        return found

    @cached_property
    def sweep(self) -> dict[str, Any]:
        """The settings of the memory split."""
        return self.parameters("memory_split")

    @cached_property
    def claims(self) -> list[judged.Claim]:
        """Each as judged for each rung."""
        return judged.claims_of_figures(self.folder)

    def image(self, name: str) -> str:
        """A figure as a piece of the page, with its caption; empty where it has no image."""
        picture, page = (self.folder / f"{name}{ending}" for ending in (".svg", ".html"))
        if not picture.is_file():
            return ""
        found = re.search(r"<figcaption>(.*?)</figcaption>", page.read_text(encoding="utf-8"))
        caption, code = found[1] if found else name, base64.b64encode(picture.read_bytes()).decode()
        return (
            f'<figure id="{name}"><img alt="{caption}" src="data:image/svg+xml;base64,{code}">\n'
            f"<figcaption><b>{name}</b>. {caption}</figcaption></figure>"
        )


# -- numbers, by name: each function's are told in one part of the page --


def percent(value: float, digits: int = 0) -> str:
    """A fraction as text: 17 %."""
    return f"{100 * value:.{digits}f} %"


def _at(rows: pd.DataFrame, share: float) -> Any:
    """The row at a share, the nearest one."""
    return rows.iloc[int((rows["llm_share"] - share).abs().to_numpy().argmin())]


def _interval(row: Any, digits: int = 2, scale: float = 1.0) -> str:
    low, high = scale * row["low"], scale * row["high"]
    return f"{low:,.{digits}f} to {high:,.{digits}f}"


def setting_numbers(drawn: Drawn) -> Named:
    """What was searched, from the record of the memory split."""
    told, split = drawn.sweep, drawn.rows("memory_split")
    return {
        "profile": told["profile"],
        "problems": f"{told['num_problems']}",
        "seeds": counted(len(told["seeds"]), "seed"),
        "beams": f"{told['n']}",
        "width": f"{told['beam_width']}",
        "inFlight": f"{told['min_problem_batch']}",
        "totalMemory": format_size(parse_size(told["total_memory"])),
        "lowEnd": f"{split['llm_share'].min():.2f}",
        "highEnd": f"{split['llm_share'].max():.2f}",
    }


def memory_numbers(drawn: Drawn) -> Named:
    """What fits, on both scales."""
    blocks, parts, found = drawn.rows("kv_blocks"), drawn.rows("memory_parts"), Named()
    for how, name in (("measured", "tiny"), ("computed", "thesis")):
        first = blocks[blocks["how"] == how].iloc[0]
        found[f"{name}FeasibleLow"] = f"{first['low_end']:.3f}"
        found[f"{name}FeasibleHigh"] = f"{first['high_end']:.3f}"
        own = parts[(parts["how"] == how) & (parts["part"] == "weights")]
        for model, rows in own.groupby("model"):
            found[f"{name}{str(model).capitalize()}Weights"] = format_size(rows["bytes"].iloc[0])
    room = _at(parts[parts["how"] == "computed"], THESIS_SHARE)
    for model in ("llm", "prm"):
        found[f"thesis{model.capitalize()}Tokens"] = f"{room[f'{model}_kv_tokens']:,.0f}"
    return found


def split_numbers(drawn: Drawn) -> Named:
    """Where throughput is highest on the measured rung, how sure that is, what the ends lose."""
    rows, lost = drawn.rows("memory_split"), drawn.rows("lost_time")
    peak, same = judged.peak_and_plateau(rows)
    rate = rows[rows["metric"] == "tokens_per_s"].set_index("llm_share").sort_index()
    alike = rate.loc[same["low"] : same["high"], "value"]
    best, middle = float(alike.mean()), settings.nearest_to_thesis(rate.index)
    again = judged.recomputed_part(lost, "recomputed_evicted", "recomputed_preempted")
    found = {
        "plateauLow": f"{same['low']:.2f}",
        "plateauHigh": f"{same['high']:.2f}",
        "peakLow": f"{peak['low']:.2f}",
        "peakHigh": f"{peak['high']:.2f}",
        "bestRate": f"{best:,.0f}",
        "machineNoise": percent(float(alike.max() / alike.min()) - 1, 1),
        "spread": percent((rate["high"] - rate["low"]).mean() / 2 / best),
    }
    # at each end one model is short of room
    for end, model, share in (("low", "llm", rate.index[0]), ("high", "prm", rate.index[-1])):
        ratios = rate.loc[share][["ratio", "ratio_high", "ratio_low"]].astype(float)
        loss, least, most = 100 * (1 - ratios)
        bounds = "" if ratios.isna().any() else f" (95 %: {least:.1f} to {most:.1f} %)"
        found[f"{end}Loss"] = f"{loss:.0f} %{bounds}"
        found[f"{end}Again"] = percent(again[share])
        tokens = rate[f"{model}_kv_tokens"][share]
        found[f"{end}{model.capitalize()}Tokens"] = f"{tokens:,.0f}"
    found["midPrmTokens"] = f"{rate['prm_kv_tokens'][middle]:,.0f}"
    found["midAgain"] = percent(again[middle])
    return found


def replayed_numbers(drawn: Drawn) -> Named:
    """The split of the thesis's own pair: what is taken for the missing values, and a whole search
    in its place.
    """
    rows = drawn.rows(sensitivity.FIGURE)
    own = rows[rows["kind"] == "setting"].set_index("value")
    base = drawn.parameters(sensitivity.FIGURE)
    found = {
        "farInFlight": f"{base['asked']['in_flight']}",
        "farSteps": f"{base['rounds'] // 2}",
        "farMemory": format_size(parse_size(base["asked"]["total"])),
    }
    for name, value in (("far", sensitivity.TAKEN), ("deep", "depth of the search")):
        row = own.loc[[value]].iloc[0]
        found[f"{name}PlateauLow"] = f"{row['plateau_low']:.2f}"
        found[f"{name}PlateauHigh"] = f"{row['plateau_high']:.2f}"
        found[f"{name}LowLoss"] = percent(row["loss_low"])
        found[f"{name}HighLoss"] = percent(row["loss_high"])
    taken = rows[(rows["value"] == sensitivity.TAKEN) & (rows["kind"] == "replay")]
    taken = taken[taken["what"] == "share"]
    for end, model, share in (("Low", "llm", 0.08), ("High", "prm", 0.5)):
        row = _at(taken, share)
        found[f"far{end}Lacks"] = f"{row[f'{model}_lacks_tokens']:,.0f}"
        found[f"far{end}Again"] = f"{row[f'{model}_computed_again']:,.0f}"
    return found


def cache_numbers(drawn: Drawn) -> Named:
    """Hits, thrashing and its cost, and whether the policy is to blame."""
    hits, rows = drawn.rows("prefix_hits"), drawn.rows("thrashing")
    events = rows[rows["metric"] == "events_per_1000"]
    rare = events.groupby("llm_share")["value"].max() < judged.RARE_EVENTS
    found = {
        "rareCount": f"{rare.sum()}",
        "shareCount": f"{len(rare)}",
        "rareShares": ", ".join(f"{share:.2f}" for share in rare.index[rare]) or "none",
    }
    for model, own in hits.groupby("engine"):
        worst = own.sort_values("value").iloc[0]
        name = str(model).capitalize()
        found[f"least{name}Hits"] = percent(worst["value"], 1)
        found[f"least{name}HitsInterval"] = _interval(worst, 1, 100) + " %"
        found[f"least{name}HitsShare"] = f"{worst['llm_share']:.2f}"
        most = events[events["engine"] == model].sort_values("value").iloc[-1]
        found[f"most{name}Thrash"] = f"{most['value']:,.0f}"
        found[f"most{name}ThrashInterval"] = _interval(most, 0)
        found[f"most{name}ThrashShare"] = f"{most['llm_share']:.2f}"
    sizes = drawn.rows("miss_ratio")
    cached = sizes.pivot_table("hit_ratio", ["engine", "num_blocks"], "kind")
    gap = cached["optimum"] - cached["lru"]
    found["policyGap"] = f"{100 * gap.max():.1f}"
    return found


def batch_numbers(drawn: Drawn) -> Named:
    """What the limits of a batch gain each model, and batching that never waits."""
    found = Named()
    for model in ("llm", "prm"):
        rows = drawn.rows(f"{model}_batch")
        done = rows[rows["status"] == "finished"]
        rates = done.pivot_table("steps_per_s", "max_num_seqs", "kind", aggfunc="max")
        ends = rates[settings.CONTINUOUS].dropna()
        found[f"{model}SeqsGain"] = f"{ends.iloc[-1] / ends.iloc[0]:.1f}"
        found[f"{model}FewSeqs"], found[f"{model}ManySeqs"] = map(str, ends.index[[0, -1]])
        gain = rates[settings.UNCACHED] / rates[settings.STATIC_BATCH]
        found[f"{model}PaddedLeast"] = f"{gain.min():.2f}"
        found[f"{model}PaddedMost"] = f"{gain.max():.2f}"
    rows = drawn.rows("balance")
    busy = rows[rows["metric"] == "steps_per_busy_s"]
    for name, share in (("mid", THESIS_SHARE), ("high", float(busy["llm_share"].max()))):
        for role, own in busy.groupby("model"):
            found[f"{name}{str(role).capitalize()}Steps"] = f"{_at(own, share)['value']:,.0f}"
    return found


def ablation_numbers(drawn: Drawn) -> Named:
    """What each of the thesis's modifications gains."""
    rows, plan = drawn.rows("modifications"), drawn.parameters("modifications")["plan"]
    found = {"ablationProblems": f"{plan['num_problems']}"}
    for name, key, metric in (("oneRuntime", "one_runtime", "gain"),
                              ("scoreCache", settings.BATCHED[0], "gain"),
                              ("problemBatching", settings.BATCHED[1], "gain"),
                              ("padded", settings.BESIDE, "gain"),
                              ("whole", "stop_at_limit", "whole")):  # fmt: skip
        row = rows[(rows["setting"] == key) & (rows["metric"] == metric)].iloc[0]
        found[f"{name}Gain"], found[f"{name}Interval"] = f"{row['value']:.2f}", _interval(row)
    return found


def policy_numbers(drawn: Drawn) -> Named:
    """What the policies and techniques compute again at the smallest budget, of the figure."""
    rows = drawn.rows("optimisation")
    again = rows[rows["metric"] == "recomputed"]
    again = again[again["budget"] == again["budget"].min()].sort_values("value")
    by_policy = again.set_index(["policy", "technique"])
    best = by_policy.loc[[(settings.STATIC, settings.NONE)]].iloc[0]
    everything = by_policy.loc[[(settings.ELASTIC, settings.ALL)]].iloc[0]
    same = rows.loc[rows["metric"] == "same", "value"]
    return {
        "budget": f"{best['budget']:g}",
        "leastStaticShare": f"{best['kv_share']:g}",
        "againBefore": f"{best['value']:,.0f}",
        "againAfter": f"{everything['value']:,.0f}",
        "sameSettings": f"{int((same == 1).sum())}",
        "allSettings": f"{len(same)}",
    }


def gain_numbers(drawn: Drawn) -> Named:
    """What they gain, of `workbench bench memory`, in which both sides take turns: the mean ratio,
    and the least and the most over seeds.
    """
    record = json.loads((project_root() / "reports/bench/memory.json").read_text(encoding="utf-8"))
    rows, found = {row["name"]: row for row in record["rows"]}, Named()
    for name, row in (("elastic", "elastic_vs_best_static"), ("all", "all_vs_baseline")):
        for budget, said in (("0.5", "Half"), ("1", "One"), ("2", "Two")):
            own = rows[f"{row}@{budget}W"]
            low, high = own["spread"]
            found[f"{name}{said}"] = f"{own['ratio']:.2f}"
            found[f"{name}{said}Range"] = f"{low:.2f} to {high:.2f}"
    return found


def missing_numbers(drawn: Drawn) -> Named:
    """How many of the missing values leave the conclusion standing."""
    table = sensitivity.missing_values(drawn.rows(sensitivity.FIGURE))
    kept = table["conclusion"] == sensitivity.SURVIVES
    others = table[~kept]
    first = others["value"] + " (" + others["told"].str.partition(";")[0] + ")"
    return {"missingCount": f"{len(table)}", "missingKept": f"{kept.sum()}",
            "missingNames": "; ".join(first) or "none"}  # fmt: skip


def claim_numbers(drawn: Drawn) -> Named:
    """How the claims of the measured rung were judged, and whether the others agree."""
    own = [claim.verdict for claim in drawn.claims if claim.rung == TINY]
    verdicts = {"Holds": judged.HOLDS, "Fails": judged.FAILS, "Depends": judged.DEPENDS}
    found = {f"claims{name}": f"{own.count(verdict)}" for name, verdict in verdicts.items()}
    split = pd.read_parquet(drawn.folder / "memory_split.parquet")
    return found | {"rungsAgree": judged.rungs_in_words(split)}


PARTS: dict[str, tuple[Callable[[Drawn], Named], tuple[str, ...]]] = {
    "setting": (setting_numbers, ("memory_split",)),
    "memory": (memory_numbers, ("kv_blocks", "memory_parts")),
    "split": (split_numbers, ("memory_split", "lost_time")),
    "replayed": (replayed_numbers, ("sensitivity",)),
    "caches": (cache_numbers, ("prefix_hits", "thrashing", "miss_ratio")),
    "batches": (batch_numbers, ("llm_batch", "prm_batch", "balance")),
    "ablation": (ablation_numbers, ("modifications",)),
    "policies": (policy_numbers, ("optimisation",)),
    "gains": (gain_numbers, ("optimisation",)),
    "missing": (missing_numbers, ("sensitivity",)),
    "claims": (claim_numbers, ("memory_split",)),
}
"""Parts of the page: what reads the numbers that are told there, and of which figures."""


def named_numbers(drawn: Drawn) -> dict[str, Named]:
    """The numbers by part and name. A part is left out whose figures are not drawn, or whose runs
    did not all finish.
    """
    found = {}
    for part, (read, figures) in PARTS.items():
        if drawn.has(*figures):
            with suppress(LookupError, FileNotFoundError):  # what did not run has no rows
                found[part] = read(drawn)
    return found


# -- tables, for the page and for LaTeX --


def models_table() -> pd.DataFrame:
    """The models of both scales by their shapes."""
    tiny, thesis, rows = sweep_config("default"), sweep_config("thesis"), []
    for config, width in ((tiny, 4), (thesis, 2)):
        for role, name in (("LLM", config.llm), ("PRM", config.prm)):
            spec = model_spec(name)
            rows.append({
                "model": name, "role": role, "layers": f"{spec.layers}",
                "hidden": f"{spec.hidden:,}", "KV heads": f"{spec.kv_heads}",
                "weights": format_size(spec.weight_bytes(width)),
                "KV a token": format_size(spec.block_bytes(1, width)),
            })  # fmt: skip
    return pd.DataFrame(rows)


SETTINGS = {
    "total_memory": "total memory", "activations_in_total": "activations in the total",
    "problems": "problems", "num_problems": "number of problems", "n": "n",
    "beam_width": "beam width", "max_depth": "steps at most", "temperature": "temperature",
    "top_p": "top_p", "max_step_tokens": "tokens per step at most",
    "min_problem_batch": "problems in flight", "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens", "block_size": "block size",
    "voting": "voting",
}  # fmt: skip


def setting_table(drawn: Drawn) -> pd.DataFrame:
    """What was drawn beside the thesis profile."""
    thesis = sweep_config("thesis").to_dict()
    pairs = [(label, drawn.sweep.get(name), thesis[name]) for name, label in SETTINGS.items()]
    cells = [[label, *map(sensitivity.as_text, own)] for label, *own in pairs]
    return pd.DataFrame(cells, columns=["setting", "measured", "thesis profile"])


def memory_table(drawn: Drawn) -> pd.DataFrame:
    """Parts of the memory of each model at the thesis's share."""
    rows = drawn.rows("memory_parts")
    own = rows[rows["llm_share"] == settings.nearest_to_thesis(rows["llm_share"])]
    names = own["name"].str.removeprefix("dummy:")
    own = own.assign(size=own["bytes"].map(format_size), name=names)
    wide = own.pivot(index=["how", "model", "name"], columns="part", values="size")
    heads = {"weights": "weights", "activations_longest": "activations, longest request",
             "activations_limits": "activations, batch limits", "kv": "KV"}  # fmt: skip
    wide = wide[list(heads)].rename(columns=heads).rename_axis(columns=None).reset_index()
    wide = wide.drop(columns="model").rename(columns={"name": "model"})
    return wide.sort_values("how", ascending=False, kind="stable")


def ablation_table(drawn: Drawn) -> pd.DataFrame:
    """What each modification gains over the setting before."""
    rows = drawn.rows("modifications")
    gains = rows[rows["metric"] == "gain"]
    columns = {
        "modification": gains["label"].str.replace("<br>", " "),
        "times the problems/min": gains["value"].map("{:.2f}".format),
        "95 % interval": [_interval(row) for _, row in gains.iterrows()],
    }
    return pd.DataFrame(columns)


def missing_table(drawn: Drawn) -> pd.DataFrame:
    """The missing values."""
    rows = sensitivity.missing_values(sensitivity.stored(drawn.folder)[0])
    return rows.rename(columns={"told": "numbers"})


def tables(drawn: Drawn) -> dict[str, pd.DataFrame]:
    """Those whose figures are drawn, by the names of their files; models and claims always."""
    makers: dict[str, tuple[Callable[[Drawn], pd.DataFrame], str]] = {
        "setting": (setting_table, "memory_split"),
        "memory_parts": (memory_table, "memory_parts"),
        "ablation": (ablation_table, "modifications"),
        "missing_values": (missing_table, "memory_split"),
    }
    found = {name: make(drawn) for name, (make, of) in makers.items() if drawn.has(of)}
    claims = judged.claims_table(drawn.claims).rename(columns=judged.HEADS)
    return {"models": models_table(), "claims": claims, **found}


WIDE = {
    "claims": r"@{}lp{.22\linewidth}lp{.34\linewidth}l@{}",
    "missing_values": r"@{}p{.13\linewidth}*{3}{p{.12\linewidth}}p{.13\linewidth}"
    r"p{.09\linewidth}p{.25\linewidth}@{}",
}
"""Columns of tables whose texts are longer than a line."""


def booktabs(name: str, table: pd.DataFrame) -> str:
    """A table for LaTeX, which needs the package booktabs; without the column of figures."""
    table = table.drop(columns="figure", errors="ignore")
    escaped = table.rename(columns=tex_escaped).map(tex_escaped)
    columns = WIDE.get(name, f"@{{}}{'l' * len(table.columns)}@{{}}")
    text: str = escaped.to_latex(index=False, escape=False, column_format=columns)
    return text


# -- the page --


def numbers_tex(numbers: Mapping[str, Named]) -> str:
    """One macro for every number of the prose: \\wbBestRate, ..."""
    lines = []
    for part, own in numbers.items():
        lines.append(f"% {part}")
        lines += [f"\\newcommand{{\\{macro(n)}}}{{{tex_escaped(text)}}}" for n, text in own.items()]
    return "\n".join(lines) + "\n"


def macro(name: str) -> str:
    """What a number is called in LaTeX."""
    return f"wb{name[0].upper()}{name[1:]}"


def page(drawn: Drawn, numbers: Mapping[str, Named]) -> str:
    """The report as one HTML page: images within it, nothing loaded."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    shown = {
        name: table.to_html(index=False, border=0, classes="data")
        for name, table in tables(drawn).items()
    }
    quoted = {n: html.escape(text) for own in numbers.values() for n, text in own.items()}
    said = drawn.sweep["provenance"] if drawn.has("memory_split") else ""
    provenance = html.escape(said).splitlines()
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    verdict = dict.fromkeys(judged.CLAIMS, "")
    verdict |= {c.key: c.verdict for c in reversed(drawn.claims)}  # of the first rung
    more = {"told": numbers, "figure": drawn.image, "table": shown, "verdict": verdict}
    return template.render(quoted, provenance=provenance, **more)


def write_report(figures: Path) -> Path:
    """The page of a folder's figures, beside them; of the project's own in reports/, with the
    claims, the numbers and the tables. Returns the page.
    """
    drawn, root = Drawn(figures), project_root()
    numbers = named_numbers(drawn)
    content = {"study.html": page(drawn, numbers).encode()}
    if figures != root / "figures":
        write_together(figures, content)
        return figures / "study.html"
    texts = {f"{name}.tex": booktabs(name, table) for name, table in tables(drawn).items()}
    texts["claims.md"] = judged.claims_page(figures, "../figures")
    texts["numbers.tex"] = numbers_tex(numbers)
    write_together(root / "reports", content | {n: text.encode() for n, text in texts.items()})
    return root / "reports" / "study.html"
