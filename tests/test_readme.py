"""The README holds: its code runs, its links lead somewhere, its numbers are those of the records.

`python tests/test_readme.py` writes anew what stands between the markers of the README and of
reports/README.md, and all of reports/bench/RESULTS.md, from the rows of the committed figures and
the records.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import pytest

from workbench.bench import doubts
from workbench.bench.record import median_row
from workbench.config import POLICIES
from workbench.experiments.claims import (
    RARE_EVENTS,
    SMOL,
    claims_of_figures,
    harder_in_words,
    listed,
    most_accurate_for,
    ranked_strategies,
    split_in_words,
    time_spent,
)
from workbench.experiments.provenance import counted, describe, git
from workbench.experiments.sensitivity import DEPENDS, missing_values, stored
from workbench.experiments.settings import RECORDED, REPLAYED, THESIS_SHARE
from workbench.replay.cost import BOUND
from workbench.replay.workload import IN_FLIGHT

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
REPORTS = ROOT / "reports" / "README.md"
RESULTS = ROOT / "reports" / "bench" / "RESULTS.md"
MARKERS = ("<!-- results: written by tests/test_readme.py -->", "<!-- end of results -->")
IN_SHORT = ("<!-- in short: written by tests/test_readme.py -->", "<!-- end of in short -->")
PEERED = {
    "decode_b1": "decode, 1 sequence",
    "decode_b16": "decode, 16 sequences",
    "decode_b64": "decode, 64 sequences",
    "prefill_512": "prefill, one prompt of 512 tokens",
}
WORKS = PEERED | {
    f"{row}+busy": f"{PEERED[row]}, beside a busy process"
    for row in ("decode_b16", "decode_b64", "prefill_512")
}
SERVED = {
    f"{row}_c{count}": f"{label}, {counted(count, 'client')}"
    for count in (1, 16, 64)
    for row, label in {
        "tokens_per_s": "tokens a second",
        "over_sequential": "tokens a second over those of 1 client",
        "ttft_p95": "time to first token, p95",
    }.items()
    if count > 1 or row != "over_sequential"
}
LABELS = {
    "search": {
        "pass_at_1": "pass@1 of the solver",
        "accuracy": "accuracy of beam search",
        "accuracy_gain": "beam search minus pass@1",
        "gain_at_equal_tokens": "beam search minus weighted best-of-{N}",
        "problems_per_min": "problems a minute",
        "tokens_per_s": "generated tokens a second",
        "prm_over_ideal": "PRM tokens computed over those distinct within a problem",
    },
    "search_systems_tiny": {
        "gain_over@vllm-both": "accuracy above that of our rounds over two vLLM",
        "gain_over@search-and-learn": "accuracy above Search and Learn's",
    },
    "memory": {"arena_vs_dedicated": "two models in an arena against memory of their own"},
    "replay": {
        "events_identical": "every setting's replay has exactly the measured run's events",
        "throughput_mean_error@repeats": "error of replayed throughput against a measured run, "
        "mean over settings",
        "throughput_worst_error@repeats": "the same, worst setting",
        "measured_spread_worst": "repeats of one setting differed by at most",
        "throughput_mean_error": "error against each step's mean over the repeats, mean "
        "over settings",
    },
    **{name: {
        f"{row}{mode}": f"{label}{', invariant mode' if mode else ''}"
        for row, label in {**PEERED, "prefill_2048": "prefill, one prompt of 2,048 tokens"}.items()
        for mode in ("", "+invariant")
    } for name in ("gpu/engine-1b", "gpu/engine-8b")},
    "gpu/kernels": {
        f"{row}{backend}": label
        for row, label in {
            "decode_attention": "attention of decoding, keys and values read",
            "prefill_attention": "attention of whole prompts",
            "cascade_attention": "attention of siblings, their prefix read once",
            "product_64_rows+invariant": "products of 64 rows, invariant mode",
            "product_1024_rows+invariant": "products of 1,024 rows, invariant mode",
            "gemm_flops_per_s": "this GPU's matrix multiplications, bfloat16",
            "read_bytes_per_s": "this GPU's memory, reading",
        }.items()
        for backend in ("", "@flash", "@cudnn")
        if not backend or row in ("decode_attention", "prefill_attention")
    },
    "gpu/reenact": {
        **{f"reenact_{share:03d}": f"a recorded search, LLM share 0.{share:02d}"
           for share in (11, 14, 20, 24, 31)},
        "reenact_best_over_worst": "the best of these shares over the worst",
        "reenact_events_identical": "every share's run has exactly the replay's events",
    },
}  # fmt: skip
"""What reports/README.md shows of a record a line each, and what it calls these rows."""
ENGINE = {
    "ours": "={}",
    "transformers": "{}",
    "transformers bf16": "{}@transformers-*",
    "vLLM": "{}@vllm",
    "vLLM bf16": "{}@vllm-*",
    "llama.cpp, same file": "{}@llama.cpp",
    "llama.cpp's fastest": "{}@llama.cpp-*",
    "torch's products": "{}@products",
}
IN_README = ("ours", "transformers", "vLLM", "vLLM bf16", "llama.cpp's fastest")
SYSTEMS = {
    "problems_per_min": "problems a minute",
    "tokens": "tokens generated a problem",
    "tokens_per_s": "generated tokens a second",
    "prm_over_ideal": "PRM tokens computed over those distinct within a problem",
    "peak_memory": "peak memory of all processes",
}
BOTH_PEERS = {
    "ours": "={}@vllm-both",
    "our rounds over two vLLM": "{}@vllm-both",
    "Search and Learn": "{}@search-and-learn",
}
GRIDS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "engine_smollm2": (WORKS, ENGINE),
    "search_systems": (SYSTEMS, BOTH_PEERS),
    "search_systems_tiny": (
        {"accuracy": "accuracy"} | SYSTEMS, BOTH_PEERS | {"ours": "={}@search-and-learn"}
    ),
    "serve_smollm2": (
        SERVED,
        {"ours": "={}", "in process": "{}", "vLLM": "{}@vllm", "vLLM bf16": "{}@vllm-bfloat16",
         "llama.cpp, Q4_0": "{}@llama.cpp"},
    ),
}  # fmt: skip
"""What is shown of a record as a grid: its rows, its columns, and the row of the record at both; =
shows our value, the others the ratio to the peer."""
HEADS = {  # of the records that reports/README.md shows; RESULTS.md has all
    "engine_smollm2": "**One engine**, SmolLM2-135M.",
    "search": "**Search** on the embedded pair.",
    "search_systems": "**Whole systems** on SmolLM2-135M in both roles.",
    "search_systems_tiny": "**Whole systems** on the embedded pair, whose answers mean something.",
    "serve_smollm2": "**Serving** SmolLM2-135M; *in process*: the same requests given to the "
    "engine without a server.",
    "memory": "**An arena** for two models; which policy shares its memory best stands above.",
    "replay": "**Replay** against runs on this machine.",
    "gpu/engine-1b": "**On a GPU**: Llama 3.2 1B's shapes, random weights.",
    "gpu/reenact": "**1B + 8B in 24 GiB**, every token of a replayed search computed.",
}
READING = (
    "Ratios above 1: ours is better, on the same threads. Median of paired repeats, so not the "
    "quotient of two medians; ± half the range of the middle half of the repeats (of all, if "
    "three); two numbers in brackets: the least and the most. Contenders in float32 unless named "
    "otherwise; *same file*: the same GGUF; *torch's products*: a step's matrix products alone by "
    "torch, no attention; *beside a busy process*: another process keeps one core busy; what each "
    "was given, and its rates: [RESULTS.md](bench/RESULTS.md)."
)
RATIOS = (
    "A ratio (x) below is the median over repeats, in each of which both sides were measured in "
    "turn (of whole systems: one after the other); so it need not be the quotient of the two "
    "values that stand beside it. Spread: ± is half the range of the middle half of the repeats, "
    "of three half the range of all; of two both are named; the rest say what they are."
)


def tree() -> Path:
    """As last committed; as it is, when the README is written anew."""
    if __name__ == "__main__":
        return ROOT
    from tests.conftest import committed_tree

    return committed_tree()


def records() -> dict[str, dict[str, Any]]:
    """The committed bench records by file: `engine`, `engine_smollm2`, ..., `gpu/kernels`."""
    return {
        prefix + file.stem: json.loads(file.read_text())
        for folder, prefix in (("bench", ""), ("gpu", "gpu/"))
        for file in sorted((tree() / "reports" / folder).glob("*.json"))
    }


MEASURED = "measured tiny"


def table_of(name: str) -> pd.DataFrame:
    """The stored rows of a committed figure."""
    return pd.read_parquet(tree() / "figures" / f"{name}.parquet")


def origin_of(name: str) -> dict[str, Any]:
    """Its record."""
    return json.loads((tree() / "figures" / f"{name}.json").read_text())


def figure_rows(name: str, rung: str = MEASURED, **wanted: str) -> pd.DataFrame:
    """The stored rows of a committed figure, of one rung, that have these values, by share."""
    rows = table_of(name)
    for column, value in {"rung": rung, **wanted}.items():
        rows = rows[rows[column] == value]
    return rows.set_index("llm_share").sort_index()


def number(value: float, unit: str) -> str:
    """Three figures and the unit; fractions bare."""
    if unit in ("FLOP/s", "B/s"):
        value, unit = value / 1e9, f"G{unit}"
    if unit == "bytes" and value >= 2**30:
        value, unit = value / 2**30, "GiB"
    digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if unit in ("x", "ratio"):
        return f"{digits}x"
    return digits if unit == "fraction" else f"{digits} {unit}"


def shown(row: dict[str, Any]) -> str:
    """The value of a row: errors in per cent, what holds or does not yes or no; or why none."""
    if row["value"] is None:
        return str(row["unit"])
    if row["name"].startswith(("throughput_mean", "throughput_worst", "measured_spread")):
        return f"{100 * row['value']:.1f} %"
    if row["name"].endswith("events_identical"):
        return "yes" if row["value"] == 1 else "no"
    return number(row["value"], row["unit"])


def between(row: dict[str, Any], record: str) -> str:
    """The interval or spread of a row of a record as text."""
    if isinstance(row["spread"], list):
        extremes = record.startswith(("serve_", "search_systems"))
        extremes &= not row["name"].startswith("gain_over@")
        kind = "least, most" if extremes else "95 %"
        low, high = (number(bound, "fraction") for bound in row["spread"])
        return f"{low} to {high} ({kind})"
    of = "ratio" if row["ratio"] is not None else row["unit"]
    return f"{told.strip('()')} ({of})" if (told := within(row)) else ""


def within(row: dict[str, Any]) -> str:
    """Half the range of the middle half of the repeats, or both ends where these are stored. Of two
    and three the spread that is stored is a quarter of the distance of the ends: of two both are
    told, which lie about the median, of three half their distance.
    """
    repeats, spread = row["repeats"], row["spread"]
    if isinstance(spread, list):
        return f"({spread[0]:.2f}-{spread[1]:.2f})"
    if spread is not None and repeats == 2:
        middle, form = (row["ratio"], ".2f") if row["ratio"] is not None else (row["value"], ".3g")
        return f"({middle - 2 * spread:{form}}-{middle + 2 * spread:{form}})"
    told = spread is not None and repeats != 1
    return f"±{spread * (2 if repeats == 3 else 1):.2g}" if told else ""


def beside(row: dict[str, Any]) -> str:
    """The peer's value and the ratio, where there is a peer."""
    if row["peer_value"] is None:
        return row["peer"] or ""
    told, ends = f"{row['peer']} {number(row['peer_value'], row['unit'])}", row["spread"]
    digits = 3 if isinstance(ends, list) and ends[1] - ends[0] < 0.02 else 2
    return told if row["ratio"] is None else f"{told}: {row['ratio']:.{digits}f}x"


def heading(found: dict[str, Any]) -> str:
    """What was run on which machine, with what, at which commit."""
    machine, mode = found["machine"], found["mode"]
    seeds = f", {mode['seeds']} seeds" if mode.get("seeds") else ""
    if seeds and "problems_in_flight" in mode:
        seeds = f", {mode['problems']} problems, {mode['problems_in_flight']} in flight{seeds}"
    seeds = f", {mode['problems']} problems" if "problem_ids" in mode else seeds
    model = mode.get("model") or mode.get("llm") or ""
    given = {} if not model or model.startswith("tiny-") else {"model": model}
    if machine["gpu"]:
        given = {name: mode[name] for name in ("device", "model", "llm", "prm") if name in mode}
    given |= {"isa": found["isa"]} if "peers_isa" in mode else {}
    usual = {"profile": "default", "peer": None, "part": "distinct", "clients": "1,4,16,64"}
    usual["strategy"] = "beam_search"
    usual |= {"peers": "none" if found["bench"] == "serve" else "installed"}
    given |= {k: mode[k] for k, value in usual.items() if mode.get(k) not in (None, value)}
    chosen = "".join(f" --{name} {value}" for name, value in given.items())
    what = f"`workbench bench {found['bench']}{chosen}`{seeds}"
    what += "" if mode.get("complete", True) else " (broken off)"
    return f"{what}, on {place(found)}."


def place(found: dict[str, Any]) -> str:
    """Machine, versions and commit of a record."""
    machine, software = found["machine"], found["versions"]
    sizes = f"{counted(machine['cores'], 'core')}, {counted(machine['threads'], 'thread')}"
    isa = "" if machine["gpu"] else f", {found['isa'].upper()}"
    with_ = f"Python {software['python']}, torch {software['torch']}"
    return f"{machine['gpu'] or machine['cpu']}, {sizes}{isa}; {with_}; {mark(found)}"


def found_rows(found: dict[str, Any], keys: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Rows by key; KEY*: the peer's fastest; without absent peers and what was broken off."""
    rows = {row["name"]: row for row in found["rows"]}
    for key in (key for key in keys if key.endswith("*")):
        variants = [row for name, row in rows.items() if name.startswith(key[:-1])]
        if variants:
            rows[key] = max(variants, key=lambda row: row["peer_value"])
    whole = found["mode"].get("complete", True)
    return {key: rows[key] for key in keys if key in rows or ("@" not in key and whole)}


WHOLE_REPEATS = "throughput_mean_error@repeats"


def over_settings(rows: dict[str, dict[str, Any]]) -> str:
    """Of each setting's error, the median of its repeats': the median and both ends."""
    each = [
        abs(row["value"])
        for name, row in rows.items()
        if name.startswith("throughput_error@") and name.endswith("@repeats")
    ]
    middle, *ends = (f"{100 * value:.1f}" for value in (median(each), min(each), max(each)))
    return f"by each setting's median repeat: median {middle} %, {ends[0]} to {ends[1]} %"


def table(name: str, found: dict[str, Any], every: bool = False) -> list[str]:
    """A record as heading and Markdown table: the rows of LABELS, or every one."""
    mode, rows = found["mode"], {row["name"]: row for row in found["rows"]}
    lines = [heading(found), "", "| | value | compared with | spread |", "|---|---|---|---|"]
    labels = LABELS.get(name, {})
    for key, row in (rows if every else found_rows(found, labels)).items():
        label = labels.get(key, f"`{key}`")
        if "{" in label:
            label = label.format(N=f"{rows['equal_tokens_n']['value']:.0f}")
        if key == "prm_tokens_saved" and "uncached_problems" in mode:
            label += f", first {mode['uncached_problems']} problems, seed 0"
        of = row["share_of_ceiling"] if name.startswith("gpu/") else None
        compared = [beside(row), *([] if of is None else [f"{of:.0%} of what the GPU could do"])]
        spread = over_settings(rows) if key == WHOLE_REPEATS else between(row, name)
        cells = (label, shown(row), "; ".join(filter(None, compared)), spread)
        lines.append("| " + " | ".join(cells) + " |")
    told = [left_of_the_gain(rows, mode), ""] if name == "search" else []
    return [*lines, "", *told]


def grid(name: str, found: dict[str, Any], short: bool = False) -> list[str]:
    """One record as its heading and a Markdown grid, without columns of absent peers. short: the
    rows and columns of the README.
    """
    works, columns = GRIDS[name]
    if short:
        works, columns = PEERED, {column: columns[column] for column in IN_README}
    keys = {key.format(work).strip("=") for work in works for key in columns.values()}
    rows = found_rows(
        found, keys & ({row["name"] for row in found["rows"]} | {k for k in keys if "*" in k})
    )
    kept = {
        column: key
        for column, key in columns.items()
        if any(key.format(work).strip("=") in rows for work in works)
    }
    heads = ["", *kept]
    lines = [heading(found), "", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for work, label in works.items():
        cells = [label]
        for key in kept.values():
            row = rows.get(key.format(work).strip("="))
            if row is None or (row["peer"] is None and not key.startswith("=")):
                cells.append("")
            elif key.startswith("="):
                cells.append(number(row["value"], row["unit"]))
            elif row["ratio"] is None:
                cells.append(number(row["peer_value"], row["unit"]))
            else:
                cells.append(f"{row['ratio']:.2f}x {within(row)}".strip())
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def mark(found: dict[str, Any]) -> str:
    """A record's commit, and in bold why it does not stand."""
    written = __name__ == "__main__" or not git(ROOT, "rev-parse", "HEAD")
    words = [f"commit {(found['git']['commit'] or 'unknown')[:12]}"]
    words += [f"**{doubt}**" for doubt in doubts(found, None if written else "HEAD")]
    return "; ".join(words)


def left_of_the_gain(rows: dict[str, Any], mode: dict[str, Any]) -> str:
    """What beam search gains over pass@1, and what of it is left over samples that are scored."""

    def gain(name: str) -> str:
        low, high = rows[name]["spread"]
        return f"{rows[name]['value']:+.3f} (95 %: {low:+.3f} to {high:+.3f})"

    count = rows["equal_tokens_n"]["value"]
    low, high = rows["gain_at_equal_tokens"]["spread"]
    verdict = "" if low > 0 else " That interval holds 0: no gain over best-of-n is shown."
    verdict = " There searching loses." if high < 0 else verdict
    own, theirs = (rows[f"{name}tokens_a_problem"]["value"] for name in ("", "equal_"))
    over = f"with the same PRM and {theirs:,.0f} tokens a problem to beam search's {own:,.0f}"
    found = f"Beam search gains {gain('accuracy_gain')} over pass@1, one sample without a PRM; "
    if count != mode["n"]:
        found += f"over weighted best-of-{mode['n']} {gain('gain_over_best_of_n')}; "
    return (
        found
        + f"over weighted best-of-{count:.0f} {over}, {gain('gain_at_equal_tokens')}.{verdict}"
    )


def compared(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the identity record that compare a setting with the first."""
    base = found["rows"][0]["name"].partition("@")[2]
    rows = (row for row in found["rows"] if row["name"].startswith("identical@"))
    return [row for row in rows if row["name"] != f"identical@{base}"]


def identity_in_short(found: dict[str, Any]) -> str:
    """How many settings gave the same search, and how much of it `transformers` gives."""
    others, told = compared(found), {row["name"]: row for row in found["rows"]}
    same = sum(row["value"] == 1 for row in others)
    beside = [told[f"same@transformers,{how}"] for how in ("sampled", "greedy")]
    least = min(row["value"] for row in beside)
    return (
        f"in {same} of {len(others)} further settings all {others[0]['repeats']:,} nodes have the "
        f"tokens and scores of the first; {least:.0%} of {beside[0]['repeats']:,} have those of a "
        "search over `transformers`"
    )


def identity(found: dict[str, Any]) -> list[str]:
    """The identity record in one sentence."""
    rows, model = found["rows"], found["mode"]["llm"]
    chosen = "" if model.startswith("tiny-") else f" --model {model}"
    others = compared(found)
    same = sum(r["value"] == 1 for r in others)
    preempted = sum(r["value"] for r in rows if r["name"].startswith("preemptions@"))
    partial = sum(",partial" in r["name"] for r in others)
    policies = sum(any(f"@{name}," in r["name"] for name in POLICIES) for r in others)
    both = sum(",techniques" in r["name"] for r in others)
    sets = [r["name"].partition("isa_")[2] for r in others if "isa_" in r["name"]]
    host = found["isa"].upper()
    forced = f", one of them under {sets[0].upper()} on a host with {host}," if sets else ""
    beside, told = [], {row["name"]: row for row in rows}
    for how in ("sampled", "greedy"):
        if (same_nodes := told.get(f"same@transformers,{how}")) is not None:
            gain = told[f"gain_over@transformers,{how}"]
            low, high = gain["spread"]
            beside.append(
                f"{how} {same_nodes['value']:.2%} of {same_nodes['repeats']:,} nodes have the same "
                f"tokens, and accuracy differs by {gain['value']:+.3f} ({low:+.3f} to {high:+.3f})"
            )
    said = f" Over `transformers`, each request alone, {'; '.join(beside)}." if beside else ""
    return [
        f"`workbench bench identity{chosen}`: {same} of {len(others)} further settings of memory "
        f"split, batch, chunk and block size{forced} gave the same search as the first, token by "
        f"token and score by score ({others[0]['repeats']:,} nodes each; {preempted:,.0f} "
        f"preemptions in all), {partial} of them with partly filled blocks reused, {policies} "
        f"under a policy, {both} with all techniques; {mark(found)}.{said}",
        "",
    ]


def split() -> list[str]:
    """The memory split as a table, a row a share; and where throughput peaks."""
    speed = figure_rows("memory_split", metric="tokens_per_s")
    per_1000 = {"metric": "events_per_1000"}
    hits = [figure_rows("prefix_hits", engine=name)["value"] for name in ("llm", "prm")]
    thrash = [figure_rows("thrashing", engine=e, **per_1000)["value"] for e in ("llm", "prm")]
    told = origin_of("memory_split")["parameters"]["provenance"]
    *said, last = told.splitlines()
    models = [line for line in said if line.startswith("LLM ")]  # each rung's first line
    own = said[: said.index(models[1])]
    lines = [f"The memory split: {' '.join([*own, last])}", ""]
    heads = ("LLM's share", "KV tokens LLM / PRM", "generated tokens/s (95 % interval)")
    heads += ("prefix hits LLM / PRM", "thrash events per 1,000 look-ups LLM / PRM")
    lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for share, row in speed.iterrows():
        cells = (
            f"{share:.2f}",
            f"{row.llm_kv_tokens:,.0f} / {row.prm_kv_tokens:,.0f}",
            f"{row.value:,.0f} ({row.low:,.0f} to {row.high:,.0f})",
            " / ".join(f"{found[share]:.1%}" for found in hits),
            " / ".join(f"{found[share]:.3g}" for found in thrash),
        )
        lines.append("| " + " | ".join(cells) + " |")
    devices = iter(re.findall(r"simulated ([^.]+)\.", told))
    for rung in (MEASURED, RECORDED, REPLAYED):
        name = ""
        if rung != MEASURED:
            name = f"{rung[0].upper()}{rung[1:]}, not run: seconds are a roofline's of one "
            name += f"{next(devices)}, {BOUND}. "
        lines += ["", name + split_in_words(figure_rows("memory_split", rung).reset_index())]
        if rung == RECORDED:
            lines[-1] += f" {as_run()}"
    return [*lines, ""]


def as_run() -> str:
    """What the recorded pair loses where it was run, beside its replay."""
    ran = figure_rows("memory_split", SMOL).reset_index()
    told = split_in_words(ran)
    return (
        f"Run on the machine above at {len(ran['llm_share'].unique())} shares: "
        f"{told[0].lower()}{told[1:]} What computing a prompt again costs beside a step of "
        "decoding differs from machine to machine: a replay tells which shares lose, not how much "
        "on another."
    )


def in_short() -> str:
    """What the main figure says: where throughput is highest, what both ends lose, and why."""
    speed = figure_rows("memory_split", metric="tokens_per_s")
    lost = figure_rows("lost_time").reset_index()
    again = time_spent(lost, "recomputed_evicted", "recomputed_preempted")
    best = {r: figure_rows("memory_split", r, metric="peak_share") for r in (MEASURED, REPLAYED)}
    own, far = (f"{p['low'].item():.2f} to {p['high'].item():.2f}" for p in best.values())
    ends = []
    for share, short in zip(speed.index[[0, -1]], ("LLM", "PRM"), strict=True):
        bounds = speed.loc[share, ["ratio", "ratio_high", "ratio_low"]]
        less, least, most = 100 * (1 - bounds.astype(float))
        ends.append(
            f"{share:.2f} brings {less:.0f} % less than 0.30 ({least:.0f} to {most:.0f}), since "
            f"the {short}'s cache is short: {100 * again[share]:.0f} % of the time goes into "
            "recomputing what was evicted or preempted"
        )
    fewer = f"; with {few} nothing is lost at 0.50" if (few := no_loss_up_to()) else ""
    return (
        f"On the embedded pair throughput is highest at an LLM share of {own} (95 %). {ends[0]}. "
        f"{ends[1]}. The thesis's pair, replayed with {IN_FLIGHT} problems in flight, is fastest "
        f"from {far}{fewer}.\n\n{claims_in_short()}"
    )


def claims_in_short() -> str:
    """How many of the thesis's claims hold on the measured and on its own pair, and on what its
    main one depends.
    """
    figures = tree() / "figures"
    judged = pd.DataFrame(claims_of_figures(figures))
    values = missing_values(*stored(figures)).set_index("value")["conclusion"]
    words = {"holds": "hold", "depends on": "depend on a setting", "fails": "fail",
             "not testable here": "cannot be tested"}  # fmt: skip
    once = {"holds": "holds", "depends on": "depends on a setting", "fails": "fails"}
    counts = [
        ", ".join(
            f"{count} {(once if count == 1 else words).get(verdict, words[verdict])}"
            for verdict in words
            if (count := ((judged["verdict"] == verdict) & (judged["rung"] == rung)).sum())
        )
        for rung in (MEASURED, REPLAYED)
    ]
    depends = values.index[values == DEPENDS]
    return (
        f"Of the thesis's {judged['key'].nunique()} claims {counts[0]} on the embedded pair; on "
        f"the thesis's pair, replayed, {counts[1]} ([claims](reports/claims.md)). That a share of "
        f"0.3 is as good as any, and that both ends lose, depends on {listed(depends, '')} "
        "([09](notebooks/09_missing_values.ipynb))."
    )


def no_loss_up_to() -> int:
    """How many problems in flight leave the thesis's pair, replayed, room at the highest share; 0:
    none that was tried does.
    """
    rows = table_of("sensitivity")
    rows = rows[(rows["kind"] == "setting") & (rows["value"] == "problems in flight")]
    assert rows["high"].eq(0.5).all()
    return max(rows[rows["loss_high"] < 0.005]["setting"].astype(int), default=0)


def policies() -> list[str]:
    """Notebook 08's figure as a table: at each budget times the best static split's throughput."""
    origin, rows = origin_of("optimisation"), table_of("optimisation")
    rates = rows[rows["metric"] == "tokens_per_s"].set_index("setting")
    columns = {"static 0.3": "static_0.3/none", "default policy": "marginal_value/none",
               "static 0.3, all techniques": "static_0.3/all",
               "default policy, all techniques": "marginal_value/all"}  # fmt: skip
    heads = ["KV memory", "best static split", *columns]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for budget, own in rates.groupby("budget"):
        plain = own[(own["policy"] == "static") & (own["technique"] == "none")]
        best, tried = plain["value"], ", ".join(f"{at:g}" for at in sorted(plain["kv_share"]))
        label = f"{best.idxmax().split('/')[1].replace('_', ' ')} (of {tried})"
        cells = [f"{budget:g} W", f"{label}: {best.max():,.0f} tokens/s"]
        for name in columns.values():
            setting = f"{budget:g}W/{name}"
            row = own.loc[setting, ["value", "low", "high"]] / best.max()
            cells.append("itself" if setting == best.idxmax() else over_best(*row))
        lines.append(f"| {' | '.join(cells)} |")
    same = rows.loc[rows["metric"] == "same", "value"] == 1
    return [
        "**Two models in one memory** on the embedded pair (notebook 08; W: "
        "[Terms](../README.md#terms)): times the throughput of the best static split tried, with "
        "its 95 % interval. *All techniques* are the four of [One memory for both "
        "models](../README.md#one-memory-for-both-models).",
        "",
        f"{' '.join(origin['parameters']['provenance'].splitlines()[1:-1])} Commit "
        f"{origin['git']['commit'][:12]}.",
        "",
        *lines,
        "",
        f"In {same.sum()} of {len(same)} settings every node has the tokens and the score that it "
        "has with memory uncapped. On 1B + 8B, replayed, the default policy alone and with all "
        f"techniques that can be replayed: {policy_gains('optimisation_replayed')}.",
        "",
    ]


def policy_gains(figure: str) -> str:
    """Of each budget, times the best static split's throughput: the default policy's, alone and
    with all techniques.
    """
    told = []
    for budget, own in table_of(figure).query("metric == 'tokens_per_s'").groupby("budget"):
        plain = own[(own["policy"] == "static") & (own["technique"] == "none")]["value"].max()
        flows = own[own["policy"] == "marginal_value"].set_index("technique")
        flows = flows[["value", "low", "high"]].loc[["none", "all"]] / plain
        told.append(f"{' and '.join(over_best(*row) for row in flows.to_numpy())} at {budget:g} W")
    return ", ".join(told)


def over_best(value: float, low: float, high: float) -> str:
    """How many times the best static split's throughput."""
    return f"{value:.2f}x ({'the same work' if low == high else f'{low:.2f} to {high:.2f}'})"


def strategies() -> list[str]:
    """Notebook 11's figure as a table."""
    rows, origin = table_of("search_strategies"), origin_of("search_strategies")
    told = origin["parameters"]["provenance"]
    (searched,) = re.findall(r"Searched: (.*)\.", told)
    searched, _, older = searched.partition("; ets with ")
    (ran,) = re.findall(r"beam width \d+; (.*)\.", told)
    ran += "" if "commits" in ran else f"; commit {origin['git']['commit'][:12]}"
    own = rows[rows["levels"] == "all levels"]
    heads = [f"n = {n}" for n in sorted(own["n"].unique())]
    lines = ["|  | " + " | ".join(heads) + " |", "|" + "---|" * (len(heads) + 1)]
    for name, each in own.groupby("strategy", sort=False):
        cells = [
            f"{row.value:.3f} ({row.low:.3f} to {row.high:.3f}); {row.tokens:,.0f} + "
            f"{row.prm_tokens:,.0f} tokens, {row.seconds:.2f} s"
            for row in each.sort_values("n").itertuples()
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    most = own[own["n"] == own["n"].max()].set_index("strategy")["prm_thrash"]
    again, often = "", most[most >= RARE_EVENTS]
    if len(often):
        again = (
            f" There, with {heads[-1]}, {len(often)} strategies make the PRM ask again for what "
            f"was evicted ({often.min():,.0f} to {often.max():,.0f} of 1,000 look-ups, beam search "
            f"{most['beam_search']:,.0f}), which is part of their PRM tokens and seconds."
        )
    return [
        "**Strategies** on the embedded pair (notebook 11): accuracy with its 95 % interval; what "
        "a problem takes: tokens that the LLM samples and the PRM computes, and seconds.",
        "",
        f"{searched}; {ran}. LLM share {THESIS_SHARE}.{again} Lookahead samples rollouts, "
        "too; with n = 4 DVTS has one subtree, and searches as beam search does.",
        "",
        *lines,
        "",
        *([f"The row of ets, and what is compared with it, is of {older}.", ""] if older else []),
        f"{most_accurate(rows)} Of all that sample no more tokens, from few to many: "
        f"{most_accurate_for(rows, 'tokens')}.",
        "",
        f"{harder_in_words(rows)}.",
        "",
    ]


def most_accurate(rows: pd.DataFrame) -> str:
    """The strategy that is right most often with each number of beams."""
    best = [f"n = {n}: {line}" for n, line in ranked_strategies(rows)["all levels"].items()]
    older = "ets with " in origin_of("search_strategies")["parameters"]["provenance"]
    note = " (Of ets an earlier rule was run.)" if older else ""
    return f"Most accurate, compared problem by problem: {'; '.join(best)}.{note}"


def mechanisms() -> list[str]:
    """What notebook 13's figures say of GPT-2; nothing where they are of another model."""
    origin = origin_of("engine_memory")
    if origin["parameters"]["model"] != "dummy:gpt2":
        return []
    gain = table_of("engine_cache").query("metric == 'ratio'").nlargest(1, "new_tokens")
    rows = table_of("engine_memory")
    sizes = rows.pivot_table("value", ["metric", "batch"], "kind")
    paged = rows[(rows["metric"] == "ratio") & (rows["kind"] == "paged")].set_index("block_size")
    most = {kind: rows[(rows["metric"] == "most") & (rows["kind"] == kind)]["batch"].iloc[0]
            for kind in ("paged", "contiguous")}  # fmt: skip
    times, at = sizes["contiguous"] / sizes["paged"], ("bytes", 256)
    told, time, lengths = gain.iloc[0], paged.loc[16], origin["parameters"]["lengths"]
    return [
        f"**One engine, mechanism by mechanism** (notebook 13; GPT-2 124M, random weights; "
        f"{describe(origin['machine'])}): {told['new_tokens']:,.0f} tokens take "
        f"{told['value']:.1f} times as long without a KV cache ({told['low']:.1f} to "
        f"{told['high']:.1f}; after a prompt of {told['prompt_tokens']}); keys and values of 256 "
        f"sequences, prompts and outputs of {lengths[0]} to {lengths[1]} tokens each, "
        f"take {times[at]:.1f} times the bytes if contiguous, so that "
        f"{origin['parameters']['kv_memory']} hold {most['paged']:,.0f} sequences paged and "
        f"{most['contiguous']:,.0f} contiguous; a step in blocks of 16 takes {time['value']:.2f} "
        f"({time['low']:.2f} to {time['high']:.2f}) times as long as a contiguous one.",
        "",
    ]


def headlines() -> str:
    """All that stands between the README's markers of results: a finding a row."""
    found = records()
    rows = {name: {row["name"]: row for row in record["rows"]} for name, record in found.items()}

    def times(record: str, name: str) -> str:
        row = rows[record][name]
        return f"{row['ratio']:.2f}x {within(row) if row['repeats'] > 1 else ''}".strip()

    def machine(found: dict[str, Any]) -> str:
        stale = "; **stale**" if "**" in mark(found) else ""
        return f"{found['machine']['gpu'] or found['machine']['cpu']}; {software(found)}{stale}"

    def software(found: dict[str, Any]) -> str:
        return f"torch {found['versions']['torch']}; commit {found['git']['commit'][:9]}"

    def figure(name: str) -> str:
        origin = origin_of(name)
        return f"{describe(origin['machine'])}; {software(origin)}"

    peer = "problems_per_min@search-and-learn"
    right = rows["search_systems_tiny"]["accuracy@search-and-learn"]
    error, decode = rows["replay"][WHOLE_REPEATS], rows["gpu/engine-1b"]["decode_b16+invariant"]
    best = rows["gpu/reenact"]["reenact_best_over_worst"]
    told = {
        "problems a minute, over those of [Search and Learn]"
        "(https://github.com/huggingface/search-and-learn) (its own beam search over vLLM); three "
        "problems, SmolLM2-135M in both roles": (times("search_systems", peer), "search_systems"),
        "the same, over our own rounds on two vLLM servers": (
            times("search_systems", "problems_per_min@vllm-both"), "search_systems",
        ),
        "problems a minute, over those of Search and Learn, embedded pair, 128 problems, once": (
            f"{times('search_systems_tiny', peer)}; {right['value']:.3f} of the answers right to "
            f"its {right['peer_value']:.3f}", "search_systems_tiny",
        ),
        "same tokens whatever the memory split, batch, policy": (
            identity_in_short(found["identity"]), "identity",
        ),
        "what beam search gains, embedded pair": (
            left_of_the_gain(rows["search"], found["search"]["mode"]), "search",
        ),
        "strategies (notebook 11)": (
            most_accurate(table_of("search_strategies")), figure("search_strategies"),
        ),
        "a policy in the place of a split (notebook 08): throughput, times the best static "
        "split's; the default policy alone and with all techniques": (
            policy_gains("optimisation"), figure("optimisation"),
        ),
        "the same, 1B + 8B": (policy_gains("optimisation_replayed"), "replayed"),
        "a replay's throughput beside the measured": (
            f"{100 * error['value']:.1f} % off in the mean over settings; every event of the "
            "caches the same", "replay",
        ),
        "one engine on a GPU: 16 sequences, Llama 3.2 1B's shapes, random weights": (
            f"{times('gpu/engine-1b', decode['name'])} the tokens/s of `transformers` (not "
            f"compiled), {times('gpu/engine-1b', 'decode_b16')} with `batch_invariant=False`; "
            f"{decode['share_of_ceiling']:.0%} of what the GPU could do", "gpu/engine-1b",
        ),
        "five splits of a search by 1B + 8B on a GPU": (
            f"the best made {best['value']:.2f} times the tokens/s of the worst; the replay had "
            f"said {best['peer_value']:.2f}", "gpu/reenact",
        ),
    }  # fmt: skip
    return "\n".join([
        "",
        "**One engine**, SmolLM2-135M on a CPU: our tokens/s, then our rate over each peer's "
        "(above 1 ours is faster), in turn on the same threads: the median of paired repeats, ± "
        "half the range of their middle half. Ours, transformers and *vLLM* compute in float32; "
        "ours reads weights of 4 bits, these two of 32, *llama.cpp's fastest* Q8_0 or Q4_0.",
        "",
        *grid("engine_smollm2", found["engine_smollm2"], short=True),
        "| what | found | on |",
        "|---|---|---|",
        *(f"| {what} | {finding} | {machine(found[on]) if on in found else on} |"
          for what, (finding, on) in told.items()),
        "",
    ])  # fmt: skip


def results() -> str:
    """All that stands between the markers of reports/README.md."""
    found = records()
    lines = [*split(), READING, ""]
    for name, head in HEADS.items():
        if name in found:
            lines += [head, ""] + (grid(name, found[name]) if name in GRIDS else [])
        if name in found and name in LABELS:  # below a grid it needs no heading
            lines += table(name, found[name])[2 if name in GRIDS else 0 :]
        lines += [*strategies(), *policies()] if name == "search" else []
    for name in ("identity", "identity_smollm2"):
        lines += identity(found[name]) if name in found else []
    lines += mechanisms()
    return "\n".join(["", *lines])


def every_result() -> str:
    """reports/bench/RESULTS.md: every row of every record."""
    lines = ["# Every record", "", "Written by `python tests/test_readme.py`.", "", RATIOS, ""]
    for name, found in records().items():
        lines += table(name, found, every=True)
    return "\n".join(lines)


def parts(page: Path, markers: tuple[str, str] = MARKERS) -> tuple[str, str, str]:
    """A page before, between and after two markers."""
    before, rest = (tree() / page.relative_to(ROOT)).read_text().split(markers[0])
    return before, *rest.split(markers[1])


def test_the_numbers_are_those_of_the_records() -> None:
    """No number of the results stands on these pages that a committed record does not hold."""
    assert parts(README)[1].strip() == headlines().strip(), "run: python tests/test_readme.py"
    assert parts(README, IN_SHORT)[1].strip() == in_short()
    assert parts(REPORTS)[1].strip() == results().strip()
    assert (tree() / "reports/bench/RESULTS.md").read_text() == every_result()


def test_the_fastest_variant_of_a_peer_stands_beside_it() -> None:
    """Of llama.cpp on its own formats, of vLLM and `transformers` in bfloat16: its own best."""
    found = records()["engine_smollm2"]
    kept = {row["name"]: row for row in found["rows"]}
    made = [
        kept["decode_b1"] | {"name": f"decode_b1@llama.cpp{kind}", "peer": f"llama.cpp{kind}"}
        for kind in ("", "-Q8_0", "-Q4_0")
    ]
    for row, rate in zip(made, (50.0, 80.0, 70.0)):
        row |= {"peer_value": rate, "ratio": 100 / rate}
    lines = grid("engine_smollm2", found | {"rows": [*found["rows"], *made]})
    (one,) = (line for line in lines if line.startswith(f"| {PEERED['decode_b1']} |"))
    assert "| 2.00x" in one and "| 1.25x" in one and "| 1.43x" not in one


def test_the_gain_of_beam_search_stands_beside_its_fair_baseline() -> None:
    """What is left of it at equal tokens is said in words, also where that is nothing."""
    found = records()["search"]
    rows = {row["name"]: row for row in found["rows"]}
    low, high = rows["gain_at_equal_tokens"]["spread"]
    shown = f"(95 %: {low:+.3f} to {high:+.3f})."
    assert shown in left_of_the_gain(rows, found["mode"])
    for spread, verdict in (
        ((-0.02, 0.02), "holds 0: no gain over best-of-n is shown."),
        ((0.02, 0.08), ""),
        ((-0.08, -0.02), "There searching loses."),
    ):
        rows["gain_at_equal_tokens"] |= {"spread": spread}
        told = left_of_the_gain(rows, found["mode"])
        assert told.endswith(verdict) and told.endswith(").") == (not verdict)


def test_spreads_are_told_as_what_they_are() -> None:
    """Least and most of paired turns, both ends of two repeats, ± of more; nothing of one."""
    two = asdict(median_row("decode_b1", [11.8, 12.2], "tokens/s", peer="a", peers=[10.0, 10.0]))
    assert within(two) == "(1.18-1.22)" and between(two, "engine_smollm2") == "1.18-1.22 (ratio)"
    alone = asdict(median_row("share", [0.01, 0.03], "fraction"))
    assert between(alone, "engine") == "0.01-0.03 (fraction)"
    many = asdict(median_row("decode_b1", [1.0, 2, 3, 4, 5], "tokens/s"))
    assert within(many) == "±1" and between(many, "engine") == "±1 (tokens/s)"
    three = asdict(median_row("decode_b1", [1.0, 2, 3], "tokens/s"))
    once = asdict(median_row("decode_b1", [1.0], "tokens/s"))
    assert within(three) == "±1" and within(once) == ""
    served = json.loads(json.dumps(two | {"name": "tokens_per_s_c1", "spread": (0.9, 1.1)}))
    for record in ("serve_smollm2", "serve_two_smollm2", "search_systems"):
        assert between(served, record) == "0.9 to 1.1 (least, most)"
        assert between(served | {"spread": None}, record) == ""
    assert between(served, "search") == "0.9 to 1.1 (95 %)"
    gain = served | {"name": "gain_over@vllm-both"}
    assert between(gain, "search_systems_tiny") == "0.9 to 1.1 (95 %)"


def test_links_lead_somewhere() -> None:
    """Every relative link and picture of every page exists."""
    pages = [file for top in ("workbench", "reports") for file in (ROOT / top).glob("**/*.md")]
    for page in (README, *pages):
        targets = re.findall(r"\]\(([^)#]+)\)", page.read_text())
        missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
        assert not missing, page


def test_the_tree_is_that_of_the_package() -> None:
    """Every folder of the package stands in the README's file tree."""
    text = README.read_text()
    folders = {p.parent.name for p in (ROOT / "workbench").glob("*/__init__.py")}
    assert not {name for name in folders if f"{name}/" not in text}


def test_the_reading_order_is_that_of_the_spine() -> None:
    """The files that the README names in order are those whose size pyproject.toml limits."""
    (order,) = re.findall(r"in this order: (.*?)\. A step", README.read_text(), flags=re.S)
    groups = [group.split("`")[1::2] for group in order.split(";")]
    named = [str(Path(group[0]).with_name(Path(n).name)) for group in groups for n in group]
    spine = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["workbench"]["size"]
    assert named == spine["spine"]["modules"]


def test_make_targets_and_commands_exist(says) -> None:
    """What the README tells a reader to type exists."""
    text = README.read_text()
    targets = set(re.findall(r"^\s*make (\w+)", text, flags=re.M))
    known = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert targets <= known
    shown = says("--help")
    for command in set(re.findall(r"(?:`|^    )workbench ([a-z][a-z-]+)", text, flags=re.M)):
        assert re.search(rf"^  {command}\b", shown, flags=re.M), command


@pytest.mark.slow
def test_the_tour_runs(tmp_path: Path) -> None:
    """The README's Python runs as it stands, from another folder."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    assert blocks
    program = tmp_path / "tour.py"
    program.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    for page, markers, text in (
        (README, MARKERS, headlines()),
        (README, IN_SHORT, in_short()),
        (REPORTS, MARKERS, results()),
    ):
        head, _, tail = parts(page, markers)
        page.write_text(f"{head}{markers[0]}\n{text}\n{markers[1]}{tail}")
    RESULTS.write_text(every_result())
