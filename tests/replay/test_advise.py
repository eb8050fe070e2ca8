"""Advice on a pair's memory: the share it recommends, where its numbers are from, its refusals."""

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pandas as pd
import pytest

import workbench
from workbench.errors import ConfigError, ModelError, OutOfMemory
from workbench.replay import advise as module
from workbench.replay.advise import ENOUGH, MARGIN, NO_LIMIT, SHARE, WHOLE, Advice, Pair, Question

TINY = ("tiny-solver", "tiny-prm")
SMALL = {"device": "h100", "total": "27MiB", "n": 8, "in_flight": 16, "max_num_seqs": 64}
SMALL |= {"max_num_batched_tokens": 256, "max_model_len": 2048}
THESIS, QWEN = ("llama-3.2-1b", "llama-3.1-8b-prm"), ("qwen2.5-1.5b-instruct", "skywork-prm-1.5b")
ASKED = {
    "embedded": (TINY, SMALL),
    "between": (TINY, SMALL | {"total": "28MiB"}),  # room for four rounds, and not for the rest
    "a100-40": (THESIS, {"device": "a100-40", "total": "40GiB"}),
    "rtx-4090": (THESIS, {"device": "rtx-4090"}),
    "l40s": (QWEN, {"device": "l40s", "total": "40GiB"}),
}
PEAKED = ("embedded", "between", "a100-40")  # both ends lose; the 4090 lacks room everywhere


@pytest.fixture(scope="module", autouse=True)
def shallow():
    """Searches of six steps, not forty, over four rounds, not sixteen: half a second a replay. Each
    is drawn once.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Question, "drawn", cache(Question.drawn))
        patch.setattr(module, "DEPTH", 6)
        patch.setattr(module, "LEAST_ROUNDS", 4)
        patch.setattr(module, "MOST_ROUNDS", 4)
        yield


@cache
def advised(name: str) -> Advice:
    models, settings = ASKED[name]
    return workbench.advise(*models, **settings)


@pytest.fixture(scope="module")
def found() -> Advice:
    return advised("embedded")


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_the_recommended_share_is_within_two_percent_of_the_best_of_all(name) -> None:
    """Against replays of ten even steps of the axis, or of each hundredth where these are few, and
    of what advise replayed; the whole plateau is as good. At least one end of the axis loses more
    than 5 %, both where a peak lies inside. The share replayed again has the row and flags told.
    """
    found, (models, settings) = advised(name), ASKED[name]
    told = found.replays[found.replays["what"] == SHARE].set_index("llm_share")
    pair, (low, high), kept = Pair(Question(*models, **settings)), found.plateau, found.recommended
    axis, pair.rounds = pair.axis, found.replays["rounds"].iloc[0] and pair.rounds
    assert (pair.rounds is None) == (name == "between"), "where shares are compared over all of it"
    even = {kept, axis[-1], *axis[:: max(1, len(axis) // 10)]}
    for share in sorted(even - ({*told.index} - {kept})):
        pair.at(share)
    again = pd.DataFrame(pair.rows).set_index("llm_share").drop(columns="replay_s")
    rates = {**again["tokens_per_s"], **told["tokens_per_s"]}
    best = max(rates.values())
    ends = [rates[axis[0]] < 0.95 * best, rates[axis[-1]] < 0.95 * best]
    assert any(ends) and (all(ends) or name not in PEAKED), "the axis is too flat"
    assert low <= kept <= high
    plateau = [rate for share, rate in rates.items() if low <= share <= high]
    assert min(plateau) >= (1 - module.NEAR) * best
    both = again.loc[kept].to_dict(), told.loc[kept, again.columns].to_dict()
    assert both[0] == both[1]
    exact = [each["max-total-tokens"] for each in found.flags["SGLang"]]
    assert exact == [both[0]["llm_kv_tokens"], both[0]["prm_kv_tokens"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_a_whole_search_loses_nothing_on_its_plateau(name) -> None:
    """It takes as long there as without limit, nothing is computed again; tight memory has none."""
    found, (models, settings) = advised(name), ASKED[name]
    assert found.whole == (name in ("a100-40", "l40s"))
    pair = Pair(Question(*models, **settings))
    pair.rounds = None
    for share in {*found.plateau, found.recommended} if found.whole else ():
        pair.at(share)
    free = found.replays.set_index("what")["tokens_per_s"].get(WHOLE)
    for row in pair.rows:
        assert row["tokens_per_s"] == pytest.approx(free)
        assert row["llm_computed_again"] == row["prm_computed_again"] == 0


@pytest.mark.parametrize(
    ("models", "device", "total"), [(THESIS, "rtx-4090", "16GiB"), (QWEN, "l40s", "5GiB")]
)
def test_a_pair_that_does_not_fit_gets_the_memory_that_lacks(models, device, total) -> None:
    """With so many GiB more it fits, with a tenth less it does not."""
    asked = Question(*models, device, total, n=1, in_flight=1)
    with pytest.raises(OutOfMemory) as refused:
        Pair(asked)
    had, lacks = float(total[:-3]), float(re.search(r"lack (.*?) GiB", str(refused.value))[1])
    assert Pair(replace(asked, total=f"{had + lacks + 0.05:.2f}GiB"))
    with pytest.raises(OutOfMemory, match="lack "):
        Pair(replace(asked, total=f"{had + lacks - 0.1:.2f}GiB"))


def test_each_number_is_a_row_of_the_replays(found) -> None:
    """At most six shares, the outermost that leave a margin and 0.5/0.5 (or why it does not fit)
    among them; gains are against the recommended share; a cache that lacks tokens computes again.
    """
    rows = found.replays[found.replays["what"] == SHARE].set_index("llm_share")
    assert len(rows) <= 6 and found.recommended in rows.index
    assert found.whole or {*found.plateau} <= {*rows.index}
    low, high = found.feasible
    assert MARGIN <= rows.index.min() - low < MARGIN + 0.01
    assert MARGIN <= high - rows.index.max() < MARGIN + 0.01
    assert (rows["llm_computed"] > rows["llm_computed_again"]).all()
    assert "An LLM share of 0.5 leaves tiny-prm" in found.notes[0]
    assert rows["against_best"].max() == 0 and found.replays["what"].iloc[0] == NO_LIMIT
    for role in ("llm", "prm"):
        lacks, free = rows[f"{role}_lacks_tokens"] > 0, found.replays[f"{role}_hit_rate"].iloc[0]
        assert lacks.equals(rows[f"{role}_hit_rate"] < ENOUGH * free) and lacks.any()
        assert (rows.loc[lacks, f"{role}_computed_again"] > 0).all()
    changed = ["max_num_seqs 32", "max_num_seqs 128", "in_flight 8", "n 4"]
    assert sorted(found.changes["what"]) == sorted(changed)
    one = found.replays.set_index("what").loc["n 4", "tokens_per_s"]
    gain = found.changes.set_index("what").loc["n 4", "tokens_per_s"]
    assert gain == pytest.approx(one / rows.loc[found.recommended, "tokens_per_s"] - 1)
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["replays"][0]["llm_share"] is None


def test_shares_are_compared_over_whole_searches_where_it_is_asked(found) -> None:
    """Every row is of all rounds; the LLM's end, short of more there, loses more than before."""
    whole = workbench.advise(*TINY, **SMALL | {"whole": True})
    assert found.replays["rounds"].notna().any() and whole.replays["rounds"].isna().all()
    assert whole.replays["tokens"].min() > found.replays["tokens"].max()
    ends = [each.replays.set_index("llm_share")["against_best"].dropna() for each in (found, whole)]
    assert ends[1].loc[ends[1].index.min()] < ends[0].loc[ends[0].index.min()] < 0


def test_a_prm_that_writes_critiques_takes_more_of_the_memory(found) -> None:
    """It computes their tokens, needs a larger cache for them, and the split follows."""
    writes = workbench.advise(*TINY, **SMALL | {"critiques": 1, "critique_tokens": 64})
    free = [each.replays.set_index("what").loc[NO_LIMIT] for each in (found, writes)]
    assert free[1]["prm_computed"] > 2 * free[0]["prm_computed"]
    assert free[1]["llm_computed"] == free[0]["llm_computed"]
    by_share = [each.replays.groupby("llm_share") for each in (found, writes)]
    lacks = [each["prm_lacks_tokens"].max() for each in by_share]
    assert lacks[1].max() > lacks[0].max() and writes.recommended < found.recommended
    assert any("Critiques: 1 a step" in note for note in writes.notes)
    with pytest.raises(ConfigError, match="tokens, a critique among them: give more than that"):
        workbench.advise(*TINY, **SMALL | {"critiques": 1, "critique_tokens": 5000})


def test_a_strategy_whose_beams_share_less_takes_more_of_the_prms_memory(found) -> None:
    """DVTS keeps n / beam_width subtrees apart: fewer blocks are shared, the PRM needs more."""
    apart = workbench.advise(*TINY, **SMALL | {"strategy": "dvts"})
    needs = [each.replays["prm_lacks_tokens"].max() for each in (found, apart)]
    assert needs[1] > needs[0]


def test_a_change_that_cannot_be_is_told_and_the_rest_is_advised() -> None:
    """Guards a question refused for twice its sequences, more than the tokens of a step."""
    found = workbench.advise(*TINY, **SMALL | {"max_num_seqs": 256, "n": 4, "in_flight": 4})
    (told,) = (note for note in found.notes if note.startswith("max_num_seqs 512 was not replayed"))
    assert "256" in told
    assert {"max_num_seqs 128", "in_flight 2", "n 2"} <= set(found.changes["what"])


def test_flags_are_the_recommended_share_in_each_engines_terms() -> None:
    """vLLM's of the whole device, SGLang's of what is free as it starts; KV in bytes and tokens."""
    asked = Question("llama-3.2-1b", "llama-3.1-8b-prm", "a100-40", "36GiB", n=1, in_flight=1)
    pair = Pair(asked)
    llm, prm = pair.needs
    vllm, sglang = module.start_up(pair, 0.25).values()
    assert vllm[1]["model"] == "RLHFlow/Llama3.1-8B-PRM-Deepseek-Data"
    assert [each["gpu-memory-utilization"] for each in vllm] == [0.225, 0.675]
    assert [each["max-model-len"] for each in vllm] == [4096, 4096]
    wide = module.start_up(Pair(replace(asked, block_size=32)), 0.25)
    assert [wide["vLLM"][1]["block-size"], wide["SGLang"][1]["page-size"]] == [32, 32]
    blocks = pair.blocks(0.25)
    assert vllm[1]["kv-cache-memory-bytes"] == blocks[1] * prm.block
    assert prm.weights + prm.activations + blocks[1] * prm.block <= 27 << 30
    assert sglang[0]["max-total-tokens"] == 16 * blocks[0]
    static = [each["mem-fraction-static"] for each in sglang]
    first, second = (need.weights + n * need.block for need, n in zip((llm, prm), blocks))
    assert static[0] == pytest.approx(first / (40 << 30), abs=1e-4)
    assert static[1] == pytest.approx(second / (31 << 30), abs=1e-4)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"device": "h10"}, ConfigError, "Did you mean 'h100'"),
        ({"n": 65}, ConfigError, r"Question.n is 65; allowed: in \[1, 64\]"),
        ({"n": 0}, ConfigError, r"Question.n is 0; allowed"),
        ({"critique_tokens": 64}, ConfigError, "critique_tokens is 64; allowed: with critiques"),
        ({"strategy": "dora"}, ConfigError, "strategy is 'dora'; allowed: .*rebase"),
        ({"strategy": "rebase", "beam_width": 2}, ConfigError, "rebase has no beam_width, given 2"),
        ({"n": 64, "in_flight": 96}, ConfigError, "6,144 beams; allowed: at most 3,072"),
        ({"shares": 0.3}, ConfigError, "advise has no setting 'shares'"),
        ({"llm": "tiny-solvr"}, ModelError, "Did you mean 'tiny-solver'"),
        ({"llm_share": 0.6}, OutOfMemory, r"0.6 leaves tiny-prm .* are missing. Feasible in 27.0"),
        ({"llm_share": 1.2}, ConfigError, "llm_share is 1.2; allowed"),
        ({"max_model_len": 256}, ConfigError, "max_model_len is 256; the replayed search has req"),
        ({"device": "rtx-4090", "total": "25GiB"}, OutOfMemory, "RTX 4090 has 24.0 GiB"),
        ({"llm": "llama-3.2-1b", "prm": "llama-3.1-8b-prm", "total": "16GiB", "block_size": 16},
         OutOfMemory, r"llama-3.2-1b and llama-3.1-8b-prm lack \d.\d GiB: weights"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(given, error, said) -> None:
    """With what is allowed, or the bytes that lack, before anything is replayed."""
    llm, prm = given.pop("llm", TINY[0]), given.pop("prm", TINY[1])
    with pytest.raises(error, match=said):
        workbench.advise(llm, prm, **SMALL | given)


def test_nothing_is_claimed_of_a_model_on_vllm_where_it_was_not_run() -> None:
    """A model with a value head: its class is named, and what such models lack there."""
    asked = Question(*QWEN, "l40s", n=1, in_flight=1)
    told = [note for note in module._notes(Pair(asked)) if "vLLM" in note]
    assert len(told) == 1 and "skywork-prm-1.5b (Qwen2ForPrmModel) was not run on vLLM" in told[0]
    other = module._notes(Pair(replace(asked, prm=THESIS[1], strategy="best_of_n")))
    assert not any("vLLM" in note for note in other)
    assert sum("500 problems to their end" in note for note in other) == 1, "samples are whole"


def test_a_plateau_s_ends_are_told_as_sharply_as_is_asked() -> None:
    """Guards a plateau that began at 0.30 because nothing from 0.11 on had been replayed."""
    axis = [k / 100 for k in range(8, 51)]
    known = {share: 1.0 if 0.12 <= share <= 0.35 else 1.5 for share in axis}
    asked: list[float] = []

    class Told:
        """A pair whose seconds are known; it notes what is asked."""

        def at(self, share: float) -> float:
            asked.append(share)
            return known[share]

    found = module.Explored(Any, {share: known[share] for share in (0.08, 0.11, 0.3, 0.36, 0.5)})
    assert found.plateau == (0.3, 0.3)
    found.sharpen(Told(), axis, 0.02)  # type: ignore[arg-type]
    assert found.plateau[0] in (0.12, 0.13) and found.plateau[1] in (0.34, 0.35)
    assert 0 < len(asked) == len(set(asked)) <= 8
    found.sharpen(Told(), axis, 0.01)  # type: ignore[arg-type]
    assert found.plateau == (0.12, 0.35)
    whole = module.Explored(Any, {0.08: 1.0, 0.5: 1.0})
    whole.sharpen(Told(), axis, 0.02)  # type: ignore[arg-type]
    assert sorted(whole.seconds) == [0.08, 0.5], "it ends where the axis does"


@pytest.mark.parametrize(("total", "tight"), [("39.9GiB", True), ("36GiB", False)])
def test_no_room_for_two_processes_is_told(total: str, tight: bool) -> None:
    """A second engine's context and workspace come on top of all that is counted."""
    notes = module._notes(Pair(Question(*THESIS, "a100-40", total, n=1, in_flight=1)))
    assert any("Ask with less total" in note for note in notes) == tight


def test_samples_are_cut_to_what_a_request_may_have() -> None:
    """Whole samples that max_model_len has no room for are shorter, as steps are fewer."""
    asked = Question(*THESIS, n=2, in_flight=4, strategy="best_of_n")
    pairs = [Pair(asked), Pair(replace(asked, max_model_len=2048))]
    assert pairs[1].longest < 2048 < pairs[0].longest
    most = [pair.answers.recording.settings.strategy_settings["max_tokens"] for pair in pairs]
    assert most == [2048, 1024]
    assert any("to their end or 1,024 tokens" in note for note in module._notes(pairs[1]))
