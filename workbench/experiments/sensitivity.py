"""What the thesis leaves open, one value at a time: what is taken, why, and what others would do.

Each other setting of a value is a search of the thesis's pair replayed at some shares of one
memory, all else as taken. Of each the same is asked: where its plateau lies (shares within 2 % of
its best), and what it loses at 0.08, at the thesis's 0.3 and at 0.5. Swapping to the host is no
replay but arithmetic over those of what is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.config import Range, SweepConfig, check, format_size, parse_size, require_known
from workbench.errors import ConfigError, OutOfMemory
from workbench.experiments.backends import Backend
from workbench.experiments.export import read_figure
from workbench.experiments.memory import DTYPE_BYTES, shares_of
from workbench.experiments.plans import EVERY_SHARE, PROFILES, sweep_config
from workbench.experiments.settings import REPLAYED, THESIS_SHARE, nearest_to_thesis, overridden
from workbench.experiments.study import DRAWN, NOTHING_WAS_RUN
from workbench.models.registry import model_spec
from workbench.replay.advise import (
    DEPTH,
    NEAR,
    NO_LIMIT,
    ROLES,
    SHARE,
    USABLE,
    Explored,
    Pair,
    Question,
    plateau,
)
from workbench.replay.cost import ModelWork
from workbench.replay.devices import PRESETS, load_device
from workbench.replay.workload import DRAWN_STRATEGIES, Assumptions, drawn_engine

LOW, HIGH = EVERY_SHARE[0], EVERY_SHARE[-1]
ASKED = Question(total="40GiB")
FIGURE, TAKEN = "sensitivity", "taken"
APART = 0.02  # between the plateau and what is known not to be on it, at most
SHARPER = 3  # replays that this takes, roughly
SECONDS_OF_A_BEAM = 1.5e-4  # roughly what one core takes to replay one step of one beam
SURVIVES, DEPENDS, UNTRIED = "survives", "depends on it", "not replayed: it does not fit"
PCIE_BYTES_PER_S = {"a100-40": 32e9, "a100-80": 32e9, "h100": 64e9, "h200": 64e9, "l40s": 32e9,
                    "rtx-4090": 32e9}  # fmt: skip
"""To the host, one way, nominal: PCIe 4.0 or 5.0 with 16 lanes, as NVIDIA's data sheets have it."""
REACHED = (0.27, 0.3)
"""Of a roofline's tokens/s, by engines of these shapes on an H100: reports/gpu/reenact.json."""


class FixedPRM(Pair):
    """A pair whose PRM has half of the memory, whatever the LLM's share is."""

    def blocks(self, share: float) -> tuple[int, int]:
        """The LLM's at its share, the PRM's at a half."""
        return super().blocks(share)[0], super().blocks(0.5)[1]


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to set a value; what is not named is as taken.

    asked: fields of Question; assumed: of Assumptions; seed: of the drawn search; need: width and
    activations, as Need.of takes them; pair: what is replayed; rounds: as Base's.
    """

    label: str
    asked: Mapping[str, Any] = field(default_factory=dict)
    assumed: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    need: Mapping[str, Any] = field(default_factory=dict)
    pair: type[Pair] = Pair
    rounds: int | None = None


class Value(NamedTuple):
    """A missing value of the thesis. thesis: what it says; tried: other settings, each replayed."""

    name: str
    thesis: str
    taken: str
    why: str
    tried: tuple[Setting, ...] = ()


def as_text(value: Any) -> str:
    """`16,384` for a whole number, else the value's own text."""
    return f"{value:,}" if type(value) is int else str(value)


def set_to(name: str, *values: Any, said: str = "{:,}") -> tuple[Setting, ...]:
    """Settings of one field of Question or Assumptions to each of these, labelled as is said."""
    of = "asked" if hasattr(ASKED, name) else "assumed"
    return tuple(Setting(said.format(v), **dict[str, Any]({of: {name: v}})) for v in values)


SWAP, WHOSE, SPREAD = "preempted requests", "whose share", "score spread"
GIVEN = ("strategy", "beam width", "block size", "activations", "depth of the search")
"""Values that the thesis gives, and that are set otherwise as well."""


def values(base: Base | None = None) -> tuple[Value, ...]:
    """Every missing value; what is taken is read from the profiles, and from what is replayed."""
    tiny, thesis, full = map(sweep_config, ("default", "thesis", "full"))
    base, assumed = base or Base(), Assumptions()
    asked = base.asked
    longest = min(model_spec(model).max_model_len for model in (tiny.llm, tiny.prm))
    ends = shares_of(thesis)
    least = math.ceil(max(ends.llm.least / LOW, ends.prm.least / (1 - HIGH)))
    means = {None: longest, "auto": "float32"}  # what both can read; what a CPU computes in
    own = tiny.min_problem_batch * tiny.n / tiny.max_num_seqs
    times = asked.in_flight * asked.n / asked.max_num_seqs
    few, many = (limits.max_num_seqs // limits.n for limits in (tiny, asked))
    together = reach(few, many, "g", " (tiny) and ")
    beams = reach(own, times, "g", " (tiny) and ") + " times max_num_seqs"

    others = [name for name in DRAWN_STRATEGIES if name != asked.strategy]

    def both(name: str, field: str = "") -> str:
        """One value where both scales take the same. field: of what is replayed, if it has one."""
        ends = getattr(tiny, name), getattr(asked, field or name, getattr(thesis, name))
        small, large = (as_text(means.get(end, end)) for end in ends)
        return small if small == large else f"{small} (tiny), {large} (thesis scale)"

    return (
        Value("problems in flight", "a minimum batch, no number",
              both("min_problem_batch", "in_flight"),
              f"their beams are {beams}{' on both scales' if own == times else ''}",
              set_to("in_flight", 12, 24, 96)),
        Value("GPU", "not named", f"this machine (tiny), {asked.device} (thesis scale)",
              "the smallest preset on which 0.08 to 0.5 is feasible",
              set_to("device", "l40s", "a100-80", "h100", said="{}, the same memory")),
        Value("total memory", "not stated",
              f"{format_size(parse_size(tiny.total_memory))} (tiny), {base.total} (thesis scale)",
              f"{LOW:g} to {HIGH:g} is feasible from {format_size(least)} on",
              (Setting("l40s, 44 GiB", {"device": "l40s", "total": "44GiB"}),
               Setting("a100-80, 72 GiB", {"device": "a100-80", "total": "72GiB"}),
               Setting("h100, 72 GiB", {"device": "h100", "total": "72GiB"}),
               Setting("rtx-4090, 23.5 GiB", {"device": "rtx-4090", "total": "23.5GiB"}))),
        Value(WHOSE, "gpu_model_utilization", "the LLM's part of total memory",
              "8B weights cannot fit in 0.08"),
        Value("the PRM's remainder", "not stated", "all the LLM does not have",
              "nothing else runs on the device",
              (Setting("always 0.5", pair=FixedPRM),)),
        Value("strategy", "beam search", both("strategy").replace("_", " "), "the thesis's",
              (*set_to("strategy", *others, said="{}"),
               *(Setting(f"{name}, {SPREAD} {spread:g}", {"strategy": name},
                         {"score_spread": spread})
                 for name in ("rebase", "ets") for spread in (0.06, 0.24)))),
        Value("n", "beam width of four only", both("n"),
              "with n = 4 one survivor is left and there is no tree", set_to("n", 4, 8, 64)),
        Value("beam width", "four", both("beam_width"), "the thesis's", set_to("beam_width", 2, 8)),
        Value("temperature, top_p", "not stated", f"{tiny.temperature}, {tiny.top_p}",
              "search-and-learn's; replayed by how steps differ in length and siblings agree",
              (*set_to("step_spread", 0.34, 1.0, said="step spread {:g}"),
               *set_to("twins", 0.2, said="alike siblings {:g}"))),
        Value("tokens per step", "not stated",
              f"at most {both('max_step_tokens')}; median {assumed.step_tokens:g} (thesis scale)",
              "no step may be cut by the limit; SmolLM2's median on MATH-500",
              set_to("step_tokens", 20.0, 80.0, said="median {:g}")),
        Value("solution length", "not stated", f"{assumed.length_ratio:g} times the reference's",
              "a small model writes out small steps",
              (Setting("the reference's", assumed={"length_ratio": 1.0}),
               Setting("3 times", assumed={"length_ratio": 3.0}))),
        Value("max_num_seqs", "not stated", both("max_num_seqs"),
              f"{together} problems of n = {asked.n} decode together",
              set_to("max_num_seqs", 64, 128, 512)),
        Value("max_num_batched_tokens", "not stated", both("max_num_batched_tokens"),
              "vLLM's order of magnitude; decodes never wait",
              set_to("max_num_batched_tokens", 512, 2048, 16384)),
        Value("block size", "16 (vLLM)", both("block_size"), "vLLM's default",
              set_to("block_size", 8, 32)),
        Value("max_model_len", "not stated", both("max_model_len"), "the longest solution fits",
              set_to("max_model_len", 8192)),
        Value("dtype", "not stated", both("dtype"), "bf16 has no exact kernels on a CPU",
              (Setting("8 bit, products in 16", need={"width": 1}),
               Setting("32 bit, products in 16", need={"width": 4}))),
        Value("activations", "in the total", "in it (thesis scale), outside it (tiny)",
              "they do not shrink as the tiny pair's weights do",
              (Setting("outside the total", need={"activations": False}),)),
        Value("seeds", "not stated", f"{len(tiny.seeds)} (default), {len(full.seeds)} (full)",
              "a run's seed fixes every token",
              tuple(Setting(f"seed {seed}", seed=seed) for seed in (1, 2))),
        Value("depth of the search", "40 steps", base.depth, "the thesis's",
              (Setting("the first 16 rounds", rounds=16),)),
        Value(SWAP, "not stated", "recompute", "no second memory to swap to"),
    )  # fmt: skip


# -- rows: one a replay, and one a setting --


@dataclass(frozen=True, slots=True)
class Base:
    """What all settings are compared with. rounds: replayed of a search, two a step (None: of all
    its steps); replays: shares of a setting, at least three, before its plateau is sharpened.
    """

    asked: Question = ASKED
    rounds: Annotated[int | None, Range(2)] = None
    replays: Annotated[int, Range(3)] = 6

    def __post_init__(self) -> None:
        check(self)

    @property
    def depth(self) -> str:
        """How far a search is replayed."""
        return f"the first {self.rounds} rounds, two a step" if self.rounds else f"{DEPTH} steps"

    @property
    def total(self) -> str:
        """Memory of both models."""
        own = self.asked.total
        return format_size(parse_size(own)) if own else f"{USABLE:.0%} of the device's"

    def steps(self, setting: Setting) -> int:
        """Of the search that a setting replays, two rounds each."""
        rounds = setting.rounds or self.rounds
        return rounds // 2 if rounds else DEPTH

    def pair(self, setting: Setting) -> Pair:
        """What a setting is replayed with, its search drawn. Raises as `advise`."""
        asked = replace(self.asked, **setting.asked)
        drawn = asked.drawn(self.steps(setting), setting.seed, Assumptions(**setting.assumed))
        pair = setting.pair(asked, drawn, **setting.need)
        pair.rounds = setting.rounds or self.rounds
        return pair

    def replayed(self, value: str, setting: Setting) -> pd.DataFrame:
        """Rows of one setting: its replays (kind replay), and what they come to (kind setting).

        Shares at both ends of the interval, or of what is feasible of it, and at 0.3 are replayed,
        then those that the miss-ratio curves choose, then what tells the plateau's ends to within
        APART; of a pair that does not fit, what it lacks.
        """
        where = {"value": value, "setting": setting.label}
        try:
            pair = self.pair(setting)
            axis = [share for share in pair.axis if LOW <= share <= HIGH]
            if not axis:
                low, high = pair.feasible
                raise OutOfMemory(f"only {low:.2f} to {high:.2f} fit, none of {LOW} to {HIGH}")
            first = {axis[0], nearest_to_thesis(axis), axis[-1]}
            found = Explored.of(pair, axis, first, self.replays)
            found.sharpen(pair, axis, APART)
        except (OutOfMemory, ConfigError) as error:
            if value == TAKEN:
                raise
            lacks = str(error).partition(";")[0].partition(":")[0]
            return pd.DataFrame([where | {"kind": "setting", "lacks": lacks}])
        rows = found.table(pair).assign(kind="replay", **where)
        ends = dict(zip(("feasible_low", "feasible_high"), pair.feasible))
        return pd.concat([rows, summary(rows).assign(**where, **ends)], ignore_index=True)

    def swapped(self, taken: pd.DataFrame) -> pd.DataFrame:
        """The row of swapping blocks to the host, from rows of what is taken.

            seconds' = seconds - again * FLOPs of a token / FLOP/s + again * 2 * its KV / bytes/s

        of both models, out and in, where that is less. A bound: a bus never idle, room for all.
        """
        where = {"value": SWAP, "setting": "swap (arithmetic)", "kind": "setting"}
        if self.asked.device not in PCIE_BYTES_PER_S:
            lacks = f"no bus to the host is known of {self.asked.device}"
            return pd.DataFrame([where | {"lacks": lacks}])
        taken = taken[taken["what"] == SHARE]
        seconds = taken["tokens"] / taken["tokens_per_s"]
        times: Any = token_times(self.asked).set_index(["device", "model"]).loc[self.asked.device]
        saved = 1e-6 * (times["recompute_us"] - times["swap_us"]).clip(lower=0)
        for role in ROLES:
            seconds -= taken[f"{role}_computed_again"] * saved[role]
        return summary(taken.assign(tokens_per_s=taken["tokens"] / seconds)).assign(**where)

    @classmethod
    def of(cls, asked: Mapping[str, Any], rounds: int | None, replays: int | None) -> Base:
        """What is compared with, with some fields of its question set otherwise; None: as usual."""
        if not isinstance(asked, Mapping):
            raise ConfigError(f"asked is {asked!r}; allowed: fields of a question, by their names.")
        require_known(asked, [each.name for each in fields(Question)], "A question", "field")
        return cls(replace(ASKED, **asked), **overridden({"rounds": rounds, "replays": replays}))

    def replays_left(self, profile: str, wanted: Sequence[str] | None = None) -> list[float]:
        """Rough seconds of each replay that the rows take; none where those that are committed are
        drawn again: below the full profile, of all values, with nothing set otherwise.
        """
        require_known([profile], list(PROFILES), "The study", "profile")
        if profile in ("quick", "default") and wanted is None and self == Base():
            return []
        seconds = list[float]()
        for _, setting in _tried(wanted):
            try:
                asked = replace(self.asked, **setting.asked)
            except ConfigError:  # more than can be asked: a row says so
                continue
            each = replay_seconds(asked.problems, asked.n, self.steps(setting))
            seconds += [each] * (self.replays + SHARPER + 1)  # and memory without limit
        return seconds

    def rows(self, wanted: Sequence[str] | None = None) -> pd.DataFrame:
        """Rows of plots.sensitivity: what is taken, then every other setting of the values wanted
        (default: all). ConfigError for a name of none.
        """
        parts = Backend.usual().map(Base.replayed, [(self, *each) for each in _tried(wanted)])
        if not wanted or SWAP in wanted:
            parts.append(self.swapped(parts[0]))
        return pd.concat(parts, ignore_index=True)

    @property
    def provenance(self) -> str:
        """What stands below the figure."""
        a, device = self.asked, load_device(self.asked.device)
        return (
            f"LLM {a.llm}, PRM {a.prm} ({REPLAYED}); total memory {self.total}, activations in "
            f"it.\n{a.strategy} of {a.problems} problems, {self.depth}, 1 seed, n = {a.n}, "
            f"beam width {a.beam_width}, {a.in_flight} in flight; simulated {device.name}. "
            f"{NOTHING_WAS_RUN.format(DRAWN)}"
        )


def _tried(wanted: Sequence[str] | None) -> list[tuple[str, Setting]]:
    """What is taken, then the settings tried of these values (None: all); with a value's name."""
    known = {value.name: value.tried for value in values()}
    if isinstance(wanted, str):
        raise ConfigError(f"values is {wanted!r}; allowed: a list of names.")
    require_known(wanted or (), list(known), "The study", "missing value")
    others = [(name, setting) for name in wanted or known for setting in known[name]]
    return [(TAKEN, Setting(TAKEN)), *others]


def replay_seconds(num_problems: int, n: int, max_depth: int) -> float:
    """Rough seconds of one core for one replay of a search; no promise."""
    return SECONDS_OF_A_BEAM * num_problems * n * max_depth


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """What the replays of one setting come to, as one row: best and plateau_low to plateau_high
    (shares), low, mid and high (the ends that were replayed, and nearest to 0.3), and tokens/s lost
    to the best at these, as fractions: loss_low, loss_mid, loss_high.
    """
    own = rows[rows["what"] == SHARE].sort_values("llm_share")
    rate = own.set_index("llm_share")["tokens_per_s"].astype(float)
    first, last = plateau(1 / rate.to_numpy(), float(1 / rate.max()))
    loss, shares = 1 - rate / rate.max(), rate.index
    middle = nearest_to_thesis(shares)
    found = {"low": shares[0], "mid": middle, "high": shares[-1], "plateau_low": shares[first]}
    found |= {"plateau_high": shares[last], "best": rate.idxmax()}
    found |= {f"loss_{end}": loss[found[end]] for end in ("low", "mid", "high")}
    return pd.DataFrame([{"kind": "setting", "tokens_per_s": rate.max(), "lacks": ""} | found])


def token_times(asked: Question) -> pd.DataFrame:
    """Microseconds to compute a token's KV again, and to swap it out and in, on every preset."""
    rows = []
    for role, device in product(ROLES, PRESETS):
        work = ModelWork.of(drawn_engine(getattr(asked, role)))
        compute = 1e6 * (work.flops_of.tokens / PRESETS[device].flops_per_s)
        move = 1e6 * (2 * work.kv_bytes_per_token / PCIE_BYTES_PER_S[device])
        rows.append({"model": role, "device": device, "recompute_us": compute, "swap_us": move})
    return pd.DataFrame(rows)


# -- what the rows say of each value --


def stored(folder: Path | None = None) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Rows and record of the figure in a folder, where it is not drawn there the committed one."""
    is_there = folder is not None and (folder / f"{FIGURE}.parquet").is_file()
    return read_figure(FIGURE, folder if is_there else None)


def missing_values(rows: pd.DataFrame, record: Mapping[str, Any]) -> pd.DataFrame:
    """One row a value: value, thesis, taken, why, tried (other settings), conclusion (SURVIVES,
    DEPENDS or UNTRIED) and told (the numbers), of rows of plots.sensitivity that were replayed.
    record: of their figure.

    The conclusion: 0.3 lies on the plateau, and both ends of the interval lose more than 2 %.
    """
    free = rows[rows["what"] == NO_LIMIT].groupby(["value", "setting"])["tokens_per_s"].max()
    own, found = rows[rows["kind"] == "setting"], list[dict[str, Any]]()
    own = own.join(free.rename("no_limit"), on=["value", "setting"])
    taken, told = own[own["value"] == TAKEN].iloc[0], record["parameters"]
    for value in values(Base(Question(**told["asked"]), told["rounds"], told["replays"])):
        tried = own[own["value"] == value.name]
        if value.name == WHOSE:
            low, high = 1 - taken["feasible_high"], 1 - taken["feasible_low"]
            ends = ((f"figure 6.2's {THESIS_SHARE}", THESIS_SHARE), ("the lower end", LOW))
            low, high = max(low, LOW), min(high, HIGH)
            lost = [name for name, share in ends if not low <= share <= high]
            fit = f"only {low:.2f} to {high:.2f}" if low <= high else "no share"
            told = f"as the PRM's part {fit} of {LOW} to {HIGH} would fit both models"
            if lost:
                both = "neither {} nor {} could" if len(lost) > 1 else "{} could not"
                told += f", and {both.format(*lost)} have been run"
            cells = "the PRM's part", UNTRIED, told
        elif len(tried):
            cells = "; ".join(tried["setting"]), *verdict(tried)
        else:
            continue
        found.append(value._asdict() | dict(zip(("tried", "conclusion", "told"), cells)))
    return pd.DataFrame(found).rename(columns={"name": "value"})


def of_the_thesis(config: SweepConfig) -> list[str]:
    """What the thesis's run needs, said before its files are here: bytes, hours, and what it takes
    where the thesis is silent, a line each.
    """
    width = DTYPE_BYTES.get(config.dtype, 2)
    weights = [f"{format_size(model_spec(name).weight_bytes(width))} of {name}"
               for name in (config.llm, config.prm)]  # fmt: skip
    rows, _ = read_figure("memory_split", None)
    rows = rows[(rows["rung"] == REPLAYED) & (rows["metric"] == "problems_per_min")]
    rate = np.interp(config.shares, rows["llm_share"], rows["value"])
    hours = len(config.seeds) * float((config.num_problems / rate).sum()) / 60
    slow, fast = (f"{hours / part:.1f}" for part in REACHED)
    runs = len(config.seeds) * len(config.shares)
    return [
        f"Weights, fetched once: {' and '.join(weights)} ({config.dtype}); on the device "
        f"{config.total_memory} for both models.",
        f"{runs} runs of {config.num_problems} problems: {hours:.1f} hours by the roofline of an "
        f"A100 40 GB (figure memory_split, replayed), {fast} to {slow} if engines reach as much of "
        f"one as they did of an H100's ({REACHED[0]} to {REACHED[1]}: reports/gpu/reenact.json).",
        "What the thesis leaves open, and what is taken (09_missing_values says why):",
        *(
            f"  {each.name}: {each.thesis}; taken: {each.taken}"
            for each in values()
            if each.name not in (*GIVEN, "solution length")
        ),
    ]


def verdict(tried: pd.DataFrame) -> tuple[str, str]:
    """SURVIVES, DEPENDS or UNTRIED of the settings of one value, and the numbers."""
    fits, told = tried[tried["best"].notna()], list[str]()
    for row in fits.to_dict("records"):
        few = {
            f"{row[end]:.2f}" + ("" if row[end] == usual else " (the last that fits)"): loss
            for end, usual in (("low", LOW), ("high", HIGH))
            if (loss := row[f"loss_{end}"]) <= NEAR
        }
        none = [end for end, loss in few.items() if f"{loss:.2%}" == "0.00%"]
        said = [f"only {100 * few[end]:.2f} % is lost at {end}" for end in few if end not in none]
        if none:
            short = 1 - row["tokens_per_s"] / row.get("no_limit", float("nan"))
            at = f"lost at {' or '.join(none)}"
            also = f"at the best share, too, {100 * short:.0f} % is lost to memory without limit"
            said.append(f"nothing more is {at} ({also})" if short > NEAR else f"nothing is {at}")
        if row["loss_mid"] > NEAR:
            at = row.get("mid", THESIS_SHARE)
            said.append(f"{100 * row['loss_mid']:.0f} % is lost at {at:g}")
        told += [f"with {row['setting']}: {' and '.join(said)}"] if said else []
    lacks = [f"{row.setting}: {row.lacks}" for row in tried[tried["best"].isna()].itertuples()]
    if fits.empty:
        return UNTRIED, "; ".join(lacks)

    def ends_of(column: str, form: str, times: int = 1) -> str:
        return reach(times * fits[column].min(), times * fits[column].max(), form, "-")

    plateaus = f"plateau {ends_of('plateau_low', '.2f')} to {ends_of('plateau_high', '.2f')}"
    ends = f"lost at {ends_of('low', '.2f')}: {ends_of('loss_low', '.0f', 100)} %, at "
    ends += f"{ends_of('high', '.2f')}: {ends_of('loss_high', '.0f', 100)} %"
    conclusion = DEPENDS if told else SURVIVES
    return conclusion, "; ".join([*told, f"{plateaus}; {ends}", *lacks])


def reach(low: float, high: float, form: str, between: str = " to ") -> str:
    """Both ends, or one where they read the same."""
    return between.join(dict.fromkeys((f"{low:{form}}", f"{high:{form}}")))
