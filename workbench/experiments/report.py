"""The report: one page that needs nothing beside it, and its numbers and tables for LaTeX.

The prose stands in report.html, a Jinja template, and quotes numbers by name. PARTS reads each of
them from the rows beside the figures; the page and numbers.tex are made of the same ones.
A part whose figures are not drawn, or lack what it tells, is left out.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, product
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import pandas as pd

from workbench.config import format_size, parse_size
from workbench.errors import RunStoreError
from workbench.experiments import claims as judged
from workbench.experiments import plans, sensitivity, settings
from workbench.experiments.export import filled, tex_escaped, write_together
from workbench.experiments.plans import sweep_config
from workbench.experiments.provenance import counted, project_root
from workbench.experiments.settings import RECORDED, REPLAYED, THESIS_SHARE
from workbench.experiments.study import rung_of
from workbench.models.registry import model_spec
from workbench.replay import workload

TINY = "measured tiny"
PAIRS = {TINY: "tiny", RECORDED: "smol", REPLAYED: "far"}
"""The pairs of models as rows name them, and how the names of their numbers begin."""
MEASURED_AND_THESIS = [pair for pair in PAIRS.items() if pair[0] != RECORDED]
Named = dict[str, str]
OF_REPLAY = r"replayed 1B.*\n.*?: (\d+ problems, \d+(?: to \d+)? seeds?)"  # in a figure's note
FORM, BOUNDS = "{:.2f} ({:.2f} to {:.2f})", ["value", "low", "high"]


@dataclass(frozen=True)
class Drawn:
    """The figures of a folder: their rows, records, images and captions."""

    folder: Path

    def rows(self, name: str, rung: str = TINY) -> pd.DataFrame:
        """Of a figure those of one pair: of its panel, or all where it is of that pair alone.
        LookupError if there are none, FileNotFoundError where it is not drawn.
        """
        rows = pd.read_parquet(self.folder / f"{name}.parquet")
        if "rung" not in rows and (llm := self.parameters(name).get("llm")):
            rows = rows.assign(rung=rung_of(llm))
        rows = rows[rows["rung"] == rung] if "rung" in rows else rows
        if rows.empty:
            raise LookupError(f"{name} has no rows of {rung}")
        return rows

    def parameters(self, name: str) -> dict[str, Any]:
        """What a figure was made with."""
        record = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        return dict(record["parameters"])

    def said(self, name: str, pattern: str) -> str:
        """What a pattern's group finds in the note below a figure. LookupError where nothing."""
        return str(re.findall(pattern, self.parameters(name)["provenance"])[0])

    def noise(self, name: str) -> str:
        """By how much runs of equal work differ, in words, as the note below a figure says."""
        found = re.findall(r"differ (by up to [\d.]+ times)", self.parameters(name)["provenance"])
        return found[0] if found else "by an amount that is not known"

    @cached_property
    def claims(self) -> list[judged.Claim]:
        """Each as judged for each pair of models."""
        return judged.claims_of_figures(self.folder)

    def image(self, name: str, numbers: Iterator[int], caller: Callable[[], str]) -> str:
        """A figure as a piece of the page: numbered, its finding in the template's words, and its
        caption folded; the words alone where it has no image of these rows.
        """
        finding = " ".join(caller().split())
        files = (self.folder / f"{name}{ending}" for ending in (".svg", ".html", ".json"))
        picture, page, record = files
        if not (picture.is_file() and "images" in json.loads(record.read_text(encoding="utf-8"))):
            return f'<p class="finding">{finding}</p>'
        (caption,) = re.findall(r"<figcaption>(.*?)</figcaption>", page.read_text(encoding="utf-8"))
        code = base64.b64encode(picture.read_bytes()).decode()
        return f"""\
<figure id="{name}"><img alt="{finding}" src="data:image/svg+xml;base64,{code}">
<figcaption><b>Figure {next(numbers)}, {name}.</b> <span class="finding">{finding}</span>
<details><summary>How to read it</summary>{caption}</details></figcaption></figure>"""


# -- numbers, by name: each function's are told in one part of the page --


def percent(value: float, digits: int = 0) -> str:
    """A fraction as text: 17 %."""
    return f"{100 * value:.{digits}f} %"


def _at_thesis(rows: pd.DataFrame) -> pd.DataFrame:
    """All rows at the share that is nearest to the thesis's."""
    return rows[rows["llm_share"] == settings.nearest_to_thesis(rows["llm_share"])]


def setting_numbers(drawn: Drawn) -> Named:
    """What was searched, from the record of the memory split."""
    told, split = drawn.parameters("memory_split"), drawn.rows("memory_split")
    return {
        "problems": f"{told['num_problems']}",
        "seeds": counted(len(told["seeds"]), "seed"),
        "beams": f"{told['n']}",
        "width": f"{told['beam_width']}",
        "searchBy": told["strategy"].replace("_", " "),
        "totalMemory": format_size(parse_size(told["total_memory"])),
        "lowEnd": f"{split['llm_share'].min():.2f}",
        "highEnd": f"{split['llm_share'].max():.2f}",
    }


def memory_numbers(drawn: Drawn) -> Named:
    """What fits, on both scales."""
    blocks, parts, found = drawn.rows("kv_blocks"), drawn.rows("memory_parts"), Named()
    for how, name in (("measured", "tiny"), ("computed", "thesis")):
        first = blocks[blocks["how"] == how].iloc[0]
        found[f"{name}Feasible"] = f"{first['low_end']:.3f} to {first['high_end']:.3f}"
    parts = parts[parts["how"] == "computed"]
    room = _at_thesis(parts)[["llm_kv_tokens", "prm_kv_tokens"]].iloc[0]
    found["thesisTokens"] = judged.listed(room, ",.0f")
    weights = parts[(parts["part"] == "weights") & (parts["model"] == "prm")]["bytes"].iloc[0]
    found["leastTotal"] = format_size(weights / sensitivity.LOW)
    return found | {"prmWeights": format_size(weights)}


def split_numbers(drawn: Drawn) -> Named:
    """Where throughput is highest and how sure that is; of each pair, what its shares lose."""
    lost, found = drawn.rows("lost_time"), Named()
    splits = {rung: drawn.rows("memory_split", rung) for rung in PAIRS}
    reads = {rung: judged.read_split(split) for rung, split in splits.items()}
    rate, peak, same = reads[TINY]
    alike = rate.loc[same["low"] : same["high"], "value"]
    middle, fall = settings.nearest_to_thesis(rate.index), set[str]()
    for rung, name in PAIRS.items():
        speed, _, own = reads[rung]
        loses = speed["ratio_high"].fillna(speed["ratio"]) < 1  # is shown to, against 0.3
        loses.loc[own["low"] : own["high"]] = False
        ends = zip(("the lower end", "the upper end"), loses.iloc[[0, -1]])
        fall |= {end for end, is_slower in ends if is_slower}
        told = losses(splits[rung], drawn.rows("lost_time", rung))
        found |= {f"{name}{key}": text for key, text in told.items()}
    apart = judged.counted_apart(splits[TINY])
    for part in ("recomputed_evicted", "recomputed_partial", "bookkeeping"):
        spent, short = judged.time_spent(lost, part), part.removeprefix("recomputed_")
        found[f"mid{short.capitalize()}"] = percent(spent[middle], 1)
        reach = sensitivity.reach(100 * spent.min(), 100 * spent.max(), ".0f")
        found[f"{short}Reach"] = f"{reach} %"
    low = max(own["low"] for _, own, _ in reads.values())  # of where all peaks lie
    high = min(own["high"] for _, own, _ in reads.values())
    far = reads[REPLAYED][0]
    wide, least = (far["ratio_high"] - far["ratio_low"]).fillna(0.0).iloc[1:-1], "none"
    if wide.any():
        ends = far.loc[wide.idxmax(), ["ratio", "ratio_low", "ratio_high"]]
        least = f"{FORM.format(*ends)} at {wide.idxmax():.2f}"
    equal = no_loss(lost)
    past = len(equal) > 0 and peak["low"] <= equal[0] and equal[-1] <= peak["high"]
    past = past and (equal[0], equal[-1]) != (peak["low"], peak["high"])
    return found | {
        "falls": "at both ends" if len(fall) > 1 else f"at {judged.listed(fall, '')}",
        "everywhere": sensitivity.reach(low, high, ".2f") if low <= high else "none",
        "farSearch": drawn.said("memory_split", OF_REPLAY),
        "leastSure": least,
        "smolSearch": drawn.said("memory_split", OF_REPLAY.replace("1B", "SmolLM2")),
        "baseShare": f"{middle:g}",
        "peakPast": "yes" if past else "no",
        "peakLow": f"{peak['low']:.2f}",
        "peakHigh": f"{peak['high']:.2f}",
        "countedApart": percent(apart.max(), 1),
        "machineNoise": percent(float(alike.max() / alike.min()) - 1, 1),
        "runNoise": drawn.noise("memory_split"),
    }


LOST = ["recomputed_evicted", "recomputed_preempted"]  # parts of the time that more memory saves


def no_loss(lost: pd.DataFrame) -> pd.Index[float]:
    """Shares at which nothing is lost and computed again, of rows of plots.lost_time."""
    spent = lost["seconds"].where(lost["part"].isin(LOST), 0.0).groupby(lost["llm_share"]).sum()
    return spent.index[spent == 0]


def losses(split: pd.DataFrame, lost: pd.DataFrame) -> Named:
    """Of one pair where throughput is highest (Peak), the shares where nothing is lost and computed
    again (Equal), and what each end that is as fast as none of those loses to the thesis's share,
    in short (Lost) and with its interval and what the time goes into (Losses).
    """
    rate, _, same = judged.read_split(split)
    short, lines = list[str](), list[str]()
    more: Any = lost.pivot_table("seconds", "llm_share", "part", aggfunc="sum").fillna(0.0)
    alike = no_loss(lost)
    fastest = rate.loc[same["low"] : same["high"]].index
    base = settings.nearest_to_thesis(rate.index)
    more -= more.loc[base]
    for share in map(float, rate.index[[0, -1]].difference([*alike, *fastest, base])):
        loss, low, high = 100 - 100 * rate.loc[share, ["ratio", "ratio_high", "ratio_low"]]
        if loss <= 0:
            continue
        bounds = "no interval kept" if pd.isna(low + high) else f"95 %: {low:.1f} to {high:.1f} %"
        own = more.loc[share] / more.loc[share].sum()
        again = own.reindex(LOST).sum()
        goes = f"computing again: {percent(again) if again < 0.995 else 'all'} of the extra time"
        if own["llm_decode"] > 0.1:
            goes += f", slower decoding: {percent(own['llm_decode'])}"
        short.append(f"{loss:.1f} % at {share:.2f}")
        lines.append(f"{short[-1]} ({bounds}; {goes})")
    told = {"Equal": judged.listed(alike), "Lost": " and ".join(short), "Losses": ", ".join(lines)}
    told = {key: text or "nothing" for key, text in told.items()}
    return told | {"Peak": judged.peak_in_words(split)}


def ran_numbers(drawn: Drawn) -> Named:
    """What the recorded pair loses where it was run, beside its replay."""
    rows = (drawn.rows(name, judged.SMOL) for name in ("memory_split", "lost_time"))
    told = losses(*rows)
    return {f"ran{key}": told[key] for key in ("Lost", "Losses")}


def cache_numbers(drawn: Drawn) -> Named:
    """Of each pair misses, thrashing and its cost, and whether the policy is to blame."""
    found = Named()
    for rung, name in PAIRS.items():
        misses = 1 - drawn.rows("prefix_hits", rung).groupby("engine")["value"].agg(["max", "min"])
        told = [f"the {str(model).upper()} {sensitivity.reach(low, high, '.1%')}"
                for model, low, high in misses.itertuples()]  # fmt: skip
        found[f"{name}Misses"] = " and ".join(told)
        events = drawn.rows("thrashing", rung), drawn.rows("lost_time", rung)
        found[f"{name}Thrash"] = judged.thrashing_in_words(*events)
    for figure, rung in (("miss_ratio", TINY), ("miss_ratio_replayed", REPLAYED)):
        blame, name = judged.policy_or_size(drawn.rows(figure, rung)), PAIRS[rung]
        found |= dict(zip((f"{name}Blame", f"{name}Policy"), blame))
    return found


def critique_numbers(drawn: Drawn) -> Named:
    """What a PRM that writes does to the split."""
    told = drawn.parameters("critiques_replayed")
    rows = pd.read_parquet(drawn.folder / "critiques_replayed.parquet")
    own: Any = rows[rows["kind"] == "scores"].set_index("metric")
    rates = own.loc["problems_per_min"].set_index("llm_share")["ratio"].sort_index()
    return {
        "critiquesBest": f"{own.at['peak_share', 'value']:.2f}",
        "critiquesLow": f"{percent(1 - rates.iloc[0])} is lost at {rates.index[0]:.2f}",
        "critiquesTold": judged.critiques_in_words(rows),
        "critiquesPair": f"{told['llm']} and {told['prm']} in {told['total_memory']}",
        "critiquesMedian": f"{workload.CRITIQUE_MEDIAN:.0f}",
    }


def block_numbers(drawn: Drawn) -> Named:
    """What the PRM evicts at 0.3 and at the upper end, and how short of room it is there."""
    found, needs = Named(), judged.prm_need(drawn.folder)
    for rung, name in PAIRS.items():
        ends = [drawn.rows(figure, rung) for figure in ("prm_blocks_030", "prm_blocks_050")]
        for end, own in zip(("Mid", "High"), ends):
            took, gave, again = own[["allocated", "evicted", "thrashed"]].sum()
            told = f"{gave:,} of {took:,} (of those {again:,} asked for again)"
            found[f"{name}{end}Blocks"] = told
            found[f"blocks{end}Share"] = f"{own['llm_share'].iloc[0]:.2f}"
        found[f"{name}Need"] = f"{needs[rung]:.2f}"
    return found


def batch_numbers(drawn: Drawn) -> Named:
    """What the limits of a batch gain each model, and what part of its blocks holds no token."""
    found = Named()
    for (rung, name), model in product(MEASURED_AND_THESIS, ("llm", "prm")):
        rows = drawn.rows(f"{model}_batch", rung)
        done = rows[(rows["status"] == "finished") & (rows["kind"] == settings.CONTINUOUS)]
        best = done.groupby("max_num_seqs")["steps_per_s"].max()
        (few, slow), (many, fast) = best.iloc[[0, -1]].items()
        found[f"{name}{model.capitalize()}Seqs"] = f"{fast / slow:.1f} times from {few} to {many}"
    rows = drawn.rows("balance")
    busy = rows[rows["metric"] == "steps_per_busy_s"]
    last = busy[busy["llm_share"] == busy["llm_share"].max()]
    for name, at in (("mid", _at_thesis(busy)), ("high", last)):
        found[f"{name}Balance"] = f"{at['llm_share'].iloc[0]:g}"
        for role, value in at[["model", "value"]].itertuples(index=False):
            found[f"{name}{role.capitalize()}Steps"] = f"{value:,.0f}"
    waste = rows[(rows["metric"] == "waste") & (rows["model"] == "llm")]
    both = waste.groupby("max_num_seqs")["kind"].transform("nunique") > 1  # limits of both kinds
    padded = waste[both & (waste["kind"] == settings.STATIC_BATCH)].set_index("max_num_seqs")
    if padded.empty:
        raise LookupError("padded and continuous batches have no limit in common")
    worst = padded["value"].idxmax()
    most = waste[waste["max_num_seqs"] == worst].groupby(["kind", "block_size"])["value"].max()
    found["paddedSeqs"] = f"{worst:g}"
    found["paddedWaste"] = percent(most[settings.STATIC_BATCH].max())
    told = [f"{percent(v)} in blocks of {size:g}" for size, v in most[settings.CONTINUOUS].items()]
    return found | {"waste": judged.listed(told, "")}


def ablation_numbers(drawn: Drawn) -> Named:
    """What the thesis's modifications gain; each of them stands in a table."""
    told, found, tried = drawn.parameters("modifications"), Named(), list[list[str]]()
    for rung, pair in MEASURED_AND_THESIS:
        rows: Any = drawn.rows("modifications", rung).set_index(["metric", "setting"])
        tried.append([key for key in rows.loc["gain"].index if key != plans.BESIDE])
        scores, whole = rows.loc[("gain", plans.BATCHED[0])], rows.loc["whole"].iloc[0]
        for name, row in (("ScoreCache", scores), ("Whole", whole)):
            found[f"{pair}{name}"] = FORM.format(*row[BOUNDS])
    own: Any = drawn.rows("modifications").query("metric == 'gain'").set_index("setting")
    ends = own.reindex([plans.LAST_TWO[1]])[["low", "high"]].iloc[0]
    gains, whole = own.index[own["low"] > 1], drawn.said("modifications", OF_REPLAY)
    far = drawn.said("modifications", r"replayed 1B.*\n.*\n.*?(\d+) problems in flight")
    slower = [c.rung for c in drawn.claims if c.key == "C7" and judged.OUT_OF_STEP in c.number]
    told_slower = f"on {judged.listed(map(judged.pair_in_words, slower), '')}: {judged.OUT_OF_STEP}"
    left = [plans.MODIFICATIONS[key].said for key in tried[0] if key not in tried[1]]
    (depth,) = (c.number for c in drawn.claims if (c.key, c.rung) == ("C8", TINY))
    seeds, dear = (len(told["seeds"][: told["plan"][n]]) for n in ("num_seeds", "dear_seeds"))
    return found | {
        "helping": judged.listed([plans.MODIFICATIONS[key].said for key in gains], ""),
        "ablationProblems": f"{told['plan']['num_problems']}",
        "ablationSeeds": counted(seeds, "seed")
        + (f", without a score cache {dear}" if dear < seeds else ""),
        "farTried": f"{len(tried[1])} of the {len(tried[0])}, all but {judged.listed(left, '')},",
        "farAblationProblems": whole,
        "farWaits": f"{max(0, int(whole.split()[0]) - int(far))}",
        "ablationInFlight": f"{told['min_problem_batch']}",
        "ablationDepth": f"{told['max_depth']}",
        "finishingSame": "yes" if (ends == 1).all() else "no",
        "batchingSlows": told_slower if slower else "on no pair",
        "depthTold": depth.partition("; hardly")[0],
    }


def strategy_numbers(drawn: Drawn) -> Named:
    """Which strategy answers most, by how much more than beam search, and on which levels."""
    rows = drawn.rows("search_strategies")
    most = rows[(rows["levels"] == "all levels") & (rows["n"] == rows["n"].max())]
    names = most["best"].iloc[0], "beam_search"
    best, beam = (most[most["strategy"] == name].iloc[0] for name in names)
    ranked = judged.ranked_strategies(rows)
    found, told = ranked["all levels"], ranked.reset_index(name="line")
    told = told[told["levels"] != "all levels"]
    levels = [f"at {a}, n = {n}: {line}" for a, n, line in told.itertuples(index=False)]
    others = most[most["strategy"] != "beam_search"]
    often = others[others["prm_thrash"] >= judged.RARE_EVENTS]
    often = often["strategy"] + often["prm_thrash"].map(" {:,.0f}".format)
    return {
        "strategyWidth": f"{drawn.parameters('search_strategies')['beam_width']}",
        "strategyBeamThrash": f"{beam['prm_thrash']:.0f}",
        "strategyThrash": judged.listed(often, ""),
        "strategyRanked": "; ".join(f"with n = {n} {line}" for n, line in found.items()),
        "strategyLevels": "; ".join(levels),
        "strategyTokens": judged.most_accurate_for(rows, "tokens"),
        "strategySeconds": judged.most_accurate_for(rows, "seconds"),
        "strategyMost": f"{best['n']}",
        "strategyBest": f"{best['strategy']}",
        "strategyAhead": "{:.3f} ({:.3f} to {:.3f})".format(*beam[["gap", "gap_low", "gap_high"]]),
        "strategyTimes": f"{best['seconds'] / beam['seconds']:.1f}",
        "strategySearched": drawn.said("search_strategies", r"Searched: (.*)\."),
        "harder": judged.harder_in_words(rows),
    }


def techniques_of(drawn: Drawn, name: str, budget: float | None = None) -> pd.DataFrame:
    """Settings of plots.optimisation at a budget (default: the smallest), techniques at the
    thesis's split or without one (kv_share 0); value, low, high: tokens/s over the best static
    split's without any.
    """
    rows = pd.read_parquet(drawn.folder / f"{name}.parquet").fillna({"kv_share": 0.0})
    plain, near = rows["technique"] == plans.NONE, rows["kv_share"].isin([0.0, THESIS_SHARE])
    rows = rows[(rows["budget"] == (budget or rows["budget"].min())) & (plain | near)]
    keys = ["policy", "kv_share", "technique", "label"]
    again = rows[rows["metric"] == "recomputed"].set_index(keys)["value"].rename("recomputed")
    rows = rows[rows["metric"] == "tokens_per_s"]
    split = (rows["policy"] == plans.STATIC) & (rows["technique"] == plans.NONE)
    rates = rows[BOUNDS] / rows.loc[split, "value"].max()
    return rows[keys].join(rates).join(again, on=keys)


def times_in_words(value: float, low: float, high: float) -> str:
    """How many times the best split's throughput; one of equal work is apart by noise alone."""
    same = f"{value:.2f} (with the same work)"
    return same if low == high else FORM.format(value, low, high)


def policy_numbers(drawn: Drawn) -> Named:
    """What the policies and techniques gain at the smallest budget, of the figures' rows."""
    rows, found = drawn.rows("optimisation"), Named()
    for figure, name in (("optimisation_replayed", "far"), ("optimisation", "tiny")):
        table = techniques_of(drawn, figure)
        times = table.set_index(["policy", "technique"])[BOUNDS].sort_index()
        static, flows = times.loc[plans.STATIC], times.loc[plans.ELASTIC]
        alone, together = static.drop([plans.NONE, plans.ALL]), static.loc[plans.ALL]
        if alone.empty:
            raise LookupError(f"{name}: no technique alone was tried")
        best = str(alone["value"].idxmax())
        told = {"One": alone.loc[best], "Together": together, "All": flows.loc[plans.ALL],
                "Flow": flows.loc[plans.NONE]}  # fmt: skip
        found |= {f"{name}{key}": times_in_words(*row) for key, row in told.items()}
        found[f"{name}OneName"] = plans.TECHNIQUES[best].said
        found[f"{name}Count"] = f"{len(alone)}"
    tried = table[(table["policy"] == plans.STATIC) & (table["technique"] == plans.NONE)]
    plain = tried.set_index("kv_share")[BOUNDS].sort_index()
    shares, others = plain["value"], alone["value"].drop(best).sort_values()
    edge = ", the highest of them" if shares.idxmax() == shares.index[-1] else ""
    for share in rows.loc[rows["metric"] == "infeasible", "kv_share"].drop_duplicates():
        edge += f"; {share:g} leaves a model less than one request"
    same = rows.loc[rows["metric"] == "same", "value"] == 1
    plan, seeds = (drawn.parameters("optimisation")[name] for name in ("plan", "seeds"))
    ran = judged.listed(seeds[: plan["num_seeds"]], "g")
    return found | {
        "policySearch": f"{plan['num_problems']} problems, seed{'s' * (' ' in ran)} {ran}",
        "farPolicySearch": drawn.said("optimisation_replayed", OF_REPLAY),
        "tried": judged.listed(shares.index, "g"),
        "bestTried": f"{shares.idxmax():g}{edge}",
        "worstTried": f"{shares.min():.2f} at {shares.idxmin():g}",
        "tinyStatic": times_in_words(*plain.loc[THESIS_SHARE]),
        "tinyOthers": judged.listed(others, ".2f"),
        "budget": f"{rows['budget'].min():g}",
        "workingSet": drawn.said("optimisation", WORKING_SET),
        "policyNoise": drawn.noise("optimisation"),
        "sameSettings": f"{same.sum()} of {len(same)}",
    }


WORKING_SET = r"W = ([\d.]+ \w+)"  # in a figure's note


def room_numbers(drawn: Drawn) -> Named:
    """The memory of the split in working sets of the policies, which other notebooks draw."""
    parts = drawn.rows("memory_parts").query("how == 'measured' and part == 'kv'")
    unit = parse_size(drawn.said("optimisation", WORKING_SET))
    return {"splitInW": f"{_at_thesis(parts)['bytes'].sum() / unit:.1f}"}


def gain_numbers(drawn: Drawn) -> Named:
    """What the default policy and all techniques gain where there is more memory."""
    keys = {"Flow": (plans.ELASTIC, plans.NONE), "Together": (plans.STATIC, plans.ALL),
            "All": (plans.ELASTIC, plans.ALL)}  # fmt: skip
    found = dict[str, list[str]]()
    for figure, rung, pair in (("optimisation", TINY, "ample"),
                               ("optimisation_replayed", REPLAYED, "farAmple")):  # fmt: skip
        budgets = sorted(drawn.rows(figure, rung)["budget"].dropna().unique())[1:]
        if not budgets:
            raise LookupError("no second budget was tried")
        for at in budgets:
            times = techniques_of(drawn, figure, at).set_index(["policy", "technique"])[BOUNDS]
            for name, key in keys.items():
                told = times_in_words(*times.loc[[key]].iloc[0])
                found.setdefault(f"{pair}{name}", []).append(f"{told} with {at:g} W")
    return {name: " and ".join(told) for name, told in found.items()}


def device_numbers(_: Drawn) -> Named:
    """What `workbench bench reenact` recorded on a GPU, beside its roofline's replay."""
    file = project_root() / "reports" / "gpu" / "reenact.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    rows, mode = {row["name"]: row for row in record["rows"]}, record["mode"]
    shares = [row for row in rows.values() if row["unit"] == "tokens/s"]
    gain, of = rows["reenact_best_over_worst"], [row["ratio"] for row in shares]
    groups = pd.DataFrame(shares).groupby("peer_value")["value"]  # ascending
    apart, total = groups.max() / groups.min() - 1, parse_size(mode["total_memory"]) / 2**30
    size = f"{mode['problems']} problems, {mode['max_depth']} steps deep, in {total:g} GiB"
    ordered = (groups.max().to_numpy()[:-1] < groups.min().to_numpy()[1:]).all()
    return {
        "deviceName": record["machine"]["gpu"],
        "deviceSearch": size,
        "deviceShares": f"{len(shares)}",
        "deviceGain": f"{gain['value']:.2f}",
        "deviceForetold": f"{gain['peer_value']:.2f}",
        "deviceOrder": "in the order foretold" if ordered else "in another order",
        "deviceNoise": percent(apart.max()),
        "deviceRoofline": f"{min(of):.2f} to {max(of):.2f}",
    }


def missing_numbers(drawn: Drawn) -> Named:
    """What is replayed, and how many of the open values leave the conclusion standing."""
    rows, base = drawn.rows(sensitivity.FIGURE), drawn.parameters(sensitivity.FIGURE)
    table = sensitivity.missing_values(rows, {"parameters": base}).set_index("value")
    given = table.index.isin(sensitivity.GIVEN)
    kept, breaks = (table["conclusion"] == w for w in (sensitivity.SURVIVES, sensitivity.DEPENDS))
    own = rows[rows["kind"] == "setting"].set_index("value")
    taken = own.loc[sensitivity.TAKEN, ["plateau_low", "plateau_high"]]
    others: Any = own[own.index == "strategy"].dropna(subset="best").itertuples()
    plateaus = {
        row.setting: f"{row.setting}: {row.plateau_low:.2f} to {row.plateau_high:.2f}"
        + f" ({percent(row.loss_mid)} lost at {row.mid:.2f})" * (row.loss_mid > sensitivity.NEAR)
        for row in others
    }
    spread = [told for name, told in plateaus.items() if sensitivity.SPREAD in name]
    losses = own.filter(like="loss_")
    change = (losses - losses.loc[sensitivity.TAKEN]).abs().max(axis=1)
    change = change[change.index.isin(table.index[breaks & ~given])]
    change = change.groupby(level=0, sort=False).max()
    most = list(change.index[change > change.max() - 0.005])  # which read the same
    told = table["told"].str.partition("; plateau")[0].get(most[0], "") if most else ""
    if len(most) > 1:
        told = "for each of them some setting changes what is lost at an end or at 0.3 by "
        told += f"{100 * change.max():.0f} percentage points"
    return {
        "farInFlight": f"{base['asked']['in_flight']}",
        "farDepth": sensitivity.Base(rounds=base["rounds"]).depth,
        "farProblems": drawn.said(sensitivity.FIGURE, r"of (\d+) problems"),
        "takenPlateau": "{:.2f} to {:.2f}".format(*taken),
        "takenTold": sensitivity.verdict(own.loc[[sensitivity.TAKEN]])[1],
        "cutTried": str(table.at["depth of the search", "tried"]),
        "cutTold": str(table.at["depth of the search", "told"]),
        "missingCount": f"{((kept | breaks) & ~given).sum()}",
        "missingKept": f"{(kept & ~given).sum()}",
        "givenCount": f"{given.sum()}",
        "givenKept": f"{(kept & given).sum()}",
        "missingMost": judged.listed(most, ""),
        "missingMostTold": told,
        "strategyPlateaus": "; ".join(t for t in plateaus.values() if t not in spread) or "none",
        "scoreSpreads": "; ".join(spread) or "none",
        "missingNames": judged.listed(change.index.difference(most, sort=False), ""),
        "givenNames": judged.listed(table.index[breaks & given], ""),
    }


def claim_numbers(drawn: Drawn) -> Named:
    """Which verdicts differ from pair to pair; whether the pairs agree, how far by choice."""
    found = {(c.key, c.verdict) for c in drawn.claims if c.verdict != judged.UNTESTED}
    keys = [key for key in judged.CLAIMS if sum(key == own for own, _ in found) > 1]
    differ = [f"{judged.CLAIMS[key][0]} ({key})" for key in keys]
    split = pd.read_parquet(drawn.folder / "memory_split.parquet")
    return {
        "claimsDiffer": "; ".join(differ) or "none",
        "rungsAgree": judged.rungs_in_words(split),
        "agreementChosen": judged.chosen_in_words(drawn.folder),
    }


def spoken(claim: judged.Claim) -> str:
    """The verdict as a sentence goes on: holds, fails, depends on the share."""
    on = claim.number.partition("; it ")[2].partition(":")[0]
    found = {judged.DEPENDS: on, judged.UNTESTED: "could not be tested"}
    return found.get(claim.verdict, claim.verdict)


def spoken_of_pairs(claims: Iterable[judged.Claim]) -> str:
    """`on the measured tiny pair it holds; on 1B + 8B, replayed, it fails`: one claim's."""
    pairs = dict[str, list[str]]()
    for claim in claims:
        name = judged.pair_in_words(claim.rung)
        pairs.setdefault(spoken(claim), []).append(name + "," * name.endswith("replayed"))
    if len(pairs) == 1:
        return f"on every pair it {next(iter(pairs))}"
    return "; ".join(f"on {' and '.join(names)} it {text}" for text, names in pairs.items())


PARTS: dict[str, Callable[[Drawn], Named]] = {  # of the page: what reads the numbers told there
    "setting": setting_numbers,
    "memory": memory_numbers,
    "split": split_numbers,
    "ran": ran_numbers,
    "caches": cache_numbers,
    "critiques": critique_numbers,
    "blocks": block_numbers,
    "batches": batch_numbers,
    "ablation": ablation_numbers,
    "strategies": strategy_numbers,
    "policies": policy_numbers,
    "room": room_numbers,
    "gains": gain_numbers,
    "device": device_numbers,
    "missing": missing_numbers,
    "claims": claim_numbers,
}


def made_of(drawn: Drawn, makers: Mapping[str, Callable[[Drawn], Any]]) -> dict[str, Any]:
    """What PARTS or TABLES make of the figures, without those whose figures are not all drawn, or
    lack rows of what did not run.
    """
    found = {}
    for name, make in makers.items():
        with suppress(LookupError, FileNotFoundError, RunStoreError):
            found[name] = make(drawn)
    return found


# -- tables, for the page and for LaTeX --

HEADS = {"key": "", "text": "claim", "number": "number and interval", "rung": "pair",
         "told": "numbers"}  # fmt: skip
"""How columns of claims and missing values are headed, where not by their names."""


def models_table(_: Drawn) -> pd.DataFrame:
    """The models of both scales by their shapes."""
    tiny, thesis, rows = sweep_config("default"), sweep_config("thesis"), []
    for config, width in ((tiny, 4), (thesis, 2)):
        for role, name in (("LLM", config.llm), ("PRM", config.prm)):
            spec = model_spec(name)
            sizes = f"{spec.layers}", f"{spec.hidden:,}", f"{spec.kv_heads}"
            rows.append([name, role, *sizes, format_size(spec.block_bytes(1, width))])
    heads = ["model", "role", "layers", "hidden", "KV heads", "KV a token"]
    return pd.DataFrame(rows, columns=heads)


SETTINGS = ("total_memory", "activations_in_total", "problems", "num_problems", "n", "beam_width",
            "max_depth", "temperature", "top_p", "max_step_tokens", "min_problem_batch",
            "max_num_seqs", "max_num_batched_tokens", "block_size", "voting")  # fmt: skip


def setting_table(drawn: Drawn) -> pd.DataFrame:
    """What was drawn beside the thesis profile, by the names that settings have in the code."""
    sweep, thesis = drawn.parameters("memory_split"), sweep_config("thesis").to_dict()
    pairs = [(name, sweep.get(name), thesis[name]) for name in SETTINGS]
    cells = [[name, *map(sensitivity.as_text, own)] for name, *own in pairs]
    return pd.DataFrame(cells, columns=["setting", "measured", "thesis profile"])


def memory_table(drawn: Drawn) -> pd.DataFrame:
    """Parts of the memory of each model at the thesis's share."""
    own = _at_thesis(drawn.rows("memory_parts"))
    names = own["name"].str.removeprefix("dummy:")
    own = own.assign(size=own["bytes"].map(format_size), name=names)
    wide = own.pivot(index=["how", "model", "name"], columns="part", values="size")
    heads = {"weights": "weights", "activations_longest": "activations, longest request",
             "activations_limits": "activations, batch limits", "kv": "KV"}  # fmt: skip
    wide = wide[list(heads)].rename(columns=heads).rename_axis(columns=None).reset_index()
    wide = wide.drop(columns="model").rename(columns={"name": "model"})
    return wide.sort_values("how", ascending=False, kind="stable")


def ablation_table(drawn: Drawn) -> pd.DataFrame:
    """What each modification gains over the setting before, on each pair."""
    rows = pd.read_parquet(drawn.folder / "modifications.parquet").query("metric == 'gain'")
    cells = pd.Series([FORM.format(*row) for row in rows[BOUNDS].to_numpy()], rows.index)
    cells = cells.mask(rows["low"] == rows["high"], "the same work")
    rows = rows.assign(cell=cells, modification=rows["label"].str.replace("<br>", " "))
    wide = rows.pivot_table("cell", "modification", "rung", aggfunc="first", sort=False)
    return wide.fillna("").rename(columns=judged.PAIRS).rename_axis(columns=None).reset_index()


def strategy_table(drawn: Drawn) -> pd.DataFrame:
    """What each strategy answers, what a problem takes, and what becomes of both caches."""
    rows = drawn.rows("search_strategies").query("levels == 'all levels'")
    columns = {
        "accuracy": "{value:.3f}",
        "tokens LLM / PRM": "{tokens:,.0f} / {prm_tokens:,.0f}",
        "seconds": "{seconds:.2f}",
        "LLM peak / hits / thrash": "{llm_peak:.0%} / {llm_hits:.0%} / {llm_thrash:,.1f}",
        "PRM peak / hits / thrash": "{prm_peak:.0%} / {prm_hits:.0%} / {prm_thrash:,.1f}",
    }
    each: Any = rows.to_dict("records")
    cells = {head: [form.format(**row) for row in each] for head, form in columns.items()}
    told = rows[["strategy", "n"]].astype(str).assign(**cells)
    told["PRM peak / hits / thrash"] = told.iloc[:, -1].mask(rows["prm_tokens"] == 0, "not asked")
    return told


def technique_table(drawn: Drawn) -> pd.DataFrame:
    """Tokens/s of each policy and technique over the best static split's, with their interval, and
    tokens computed again.
    """
    columns = []
    for figure, rung in (("optimisation", TINY), ("optimisation_replayed", REPLAYED)):
        own = techniques_of(drawn, figure)
        share = own["kv_share"].map(lambda share: f" {share:g}" if share else "")
        names = own.assign(policy=own["policy"].str.replace("_", " ") + share)
        names["technique"] = own["label"].mask(own["technique"] == plans.ALL, "all of these")
        told = [FORM.format(*row) for row in own[BOUNDS].to_numpy()]
        cells = told + own["recomputed"].map("; {:,.0f}".format)
        index = pd.MultiIndex.from_frame(names[["policy", "technique"]])
        columns.append(cells.set_axis(index).rename(judged.PAIRS[rung]))
    return pd.concat(columns, axis=1).fillna("not run, or no room").reset_index()


def verdict_table(drawn: Drawn) -> pd.DataFrame:
    """The verdict on each claim, a column a pair of models."""
    rows = pd.DataFrame(drawn.claims).assign(verdict=[*map(spoken, drawn.claims)])
    wide = rows.pivot(index=["key", "text"], columns="rung", values="verdict")
    wide = wide.rename(columns=judged.PAIRS).rename_axis(columns=None).reset_index()
    return wide.rename(columns=HEADS)


def missing_table(drawn: Drawn) -> pd.DataFrame:
    """The missing values."""
    rows = sensitivity.missing_values(*sensitivity.stored(drawn.folder))
    return rows.rename(columns=HEADS)


def claims_table(drawn: Drawn) -> pd.DataFrame:
    """Every claim on every pair."""
    return pd.DataFrame(drawn.claims).replace(judged.PAIRS).rename(columns=HEADS)


TABLES: dict[str, Callable[[Drawn], pd.DataFrame]] = {  # by the names of their files
    "models": models_table,
    "claims": claims_table,
    "setting": setting_table,
    "memory_parts": memory_table,
    "ablation": ablation_table,
    "strategies": strategy_table,
    "techniques": technique_table,
    "missing_values": missing_table,
    "verdicts": verdict_table,
}


WIDTHS = {
    "memory_parts": (0.11, 0.21, 0.11, 0.18, 0.16, 0.11),
    "strategies": (0.13, 0.03, 0.1, 0.14, 0.09, 0.18, 0.18),
    "verdicts": (0.04, 0.27),
    "claims": (0.04, 0.19, 0.13, 0.38, 0.16),
    "missing_values": (0.135, 0.11, 0.12, 0.12, 0.11, 0.11, 0.195),
}
"""Columns of tables with long texts, as parts of the text's width; the rest lies between them."""
LONG = ("claims", "missing_values")  # tables of several pages, which no float can hold


def booktabs(name: str, table: pd.DataFrame) -> str:
    """A table for LaTeX, which needs the packages array, booktabs and longtable; letters of 9 pt,
    of LONG 8. Without the column of figures; names may break behind an underscore.
    """
    table = table.drop(columns="figure", errors="ignore")
    escaped = table.rename(columns=tex_escaped).map(tex_escaped)
    widths = WIDTHS.get(name, ())
    if rest := len(table.columns) - len(widths) if widths else 0:  # of as many pairs as there are
        widths += (0.6 / rest,) * rest
    wide = [f">{{\\raggedright\\arraybackslash}}p{{{w:g}\\linewidth}}" for w in widths]
    columns, is_long = f"@{{}}{''.join(wide) or 'l' * len(table.columns)}@{{}}", name in LONG
    text = escaped.to_latex(index=False, escape=False, column_format=columns, longtable=is_long)
    text = text.replace("\\_", "\\_\\allowbreak{}")
    letters = "scriptsize" if is_long else "footnotesize"
    return f"{{\\{letters}\\setlength{{\\tabcolsep}}{{3pt}}%\n{text}}}\n"


# -- the page --


def numbers_tex(numbers: Mapping[str, Named]) -> str:
    """One macro for every text of the prose, \\wbFarPeak, ..., and for each number in it, in its
    order: \\wbFarPeakA, \\wbFarPeakB, ...
    """
    lines = []
    for part, own in numbers.items():
        lines.append(f"% {part}")
        for name, text in own.items():
            told = {macro(name): tex_escaped(text)}
            if (found := NUMBER.findall(text)) != [text]:
                told |= zip((macro(name) + letters for letters in LETTERS), found)
            lines += [f"\\newcommand{{\\{key}}}{{{value}}}" for key, value in told.items()]
    return "\n".join(lines) + "\n"


NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:,\d{3})*(?:\.\d+)?")
LETTERS = [f"{first}{second}" for first in ("", *ascii_uppercase) for second in ascii_uppercase]


def macro(name: str) -> str:
    """What a number is called in LaTeX."""
    return f"wb{name[0].upper()}{name[1:]}"


def claims_page(drawn: Drawn, numbers: Named) -> str:
    """The claims as Markdown, for reports/, and what was taken for missing values."""
    claims, needs = claims_table(drawn), judged.prm_need(drawn.folder).items()
    claims["verdict"] = "**" + claims["verdict"] + "**"
    links = "[" + claims["figure"] + "](../figures/" + claims["figure"] + ".svg)"
    claims["figure"] = links.where(claims["figure"] != "", "")
    return filled(
        "claims.jinja",
        **numbers,
        claims=claims,
        missing=missing_table(drawn),
        provenance=drawn.parameters("memory_split")["provenance"].replace("\n", " "),
        need=[f"{ratio:.2f} on {judged.pair_in_words(str(at))}" for at, ratio in needs],
        given=sensitivity.GIVEN,
    )


def page(drawn: Drawn, numbers: Mapping[str, Named]) -> str:
    """The report as one HTML page: images within it, nothing loaded."""
    how: Any = {"index": False, "border": 0, "classes": "data"}
    shown = {name: table.to_html(**how) for name, table in made_of(drawn, TABLES).items()}
    quoted = {n: html.escape(text) for own in numbers.values() for n, text in own.items()}
    first = {c.key: spoken(c) for c in reversed(drawn.claims)}  # of the first pair
    of_pairs = {k: spoken_of_pairs(c for c in drawn.claims if c.key == k) for k in judged.CLAIMS}
    return filled(
        "report.html",
        **quoted,
        told=numbers,
        figure=partial(drawn.image, numbers=count(1)),
        parameters=drawn.parameters,
        is_drawn=lambda name: (drawn.folder / f"{name}.parquet").is_file(),
        table=shown,
        verdict=dict.fromkeys(judged.CLAIMS, "") | first,
        verdicts=of_pairs,
    )


def write_report(figures: Path) -> Path:
    """The page of a folder's figures, beside them; of the project's own in reports/, with the
    claims, the numbers and the tables. Returns the page.
    """
    drawn, place = Drawn(figures), figures
    numbers = made_of(drawn, PARTS)
    texts = {"study.html": page(drawn, numbers)}
    if figures == project_root() / "figures":
        place = figures.with_name("reports")
        own = {name: booktabs(name, table) for name, table in made_of(drawn, TABLES).items()}
        own["numbers"] = numbers_tex(numbers)
        texts |= {f"{name}.tex": text for name, text in own.items()}
        if {"claims", "blocks"} <= numbers.keys():
            texts["claims.md"] = claims_page(drawn, numbers["claims"])
    write_together(place, {name: text.encode() for name, text in texts.items()})
    return place / "study.html"
