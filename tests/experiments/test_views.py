"""The rows figures draw, counted again by hand on a small sweep without models."""

import numpy as np
import pandas as pd
import pytest

from tests.experiments.fake_sweep import BLOCKS, PROBLEMS, SHARES, FakeSweep, wall
from workbench import plots
from workbench.errors import RunStoreError
from workbench.experiments import claims, lost_time, sentences, views
from workbench.experiments.face import face, measured
from workbench.experiments.peak import draw_rates

COSTS = {
    "llm": lambda tokens, context, logits: tokens * 100.0,
    "prm": lambda tokens, context, logits: tokens * 700.0,
}


@pytest.fixture(scope="module")
def sweep():
    return FakeSweep()


@pytest.fixture(scope="module")
def lost(sweep):
    return lost_time.lost_time_rows(sweep, COSTS)


def at(rows, share, **where):
    found = rows[(rows["llm_share"] == share)]
    for column, value in where.items():
        found = found[found[column] == value]
    assert len(found) == 1
    return found.iloc[0]


def test_throughput_is_tokens_over_wall_time_of_all_seeds(sweep):
    rows = views.memory_split_rows(sweep)
    row = at(rows, 0.3, metric="tokens_per_s")
    assert row["value"] == pytest.approx(400 / wall(0.3))
    assert row["low"] < row["value"] < row["high"]
    problems = at(rows, 0.3, metric="problems_per_min")
    assert problems["value"] == pytest.approx(60 * len(PROBLEMS) / wall(0.3))


def test_busy_rates_count_new_tokens_only(sweep):
    rows = views.memory_split_rows(sweep)
    busy = 0.45 * wall(0.5)
    assert at(rows, 0.5, metric="llm_tokens_per_busy_s")["value"] == pytest.approx(400 / busy)
    new = 40 * (60 - 4 - 40)  # of 60 tokens a step 40 were evicted before and 4 in a partial block
    assert at(rows, 0.5, metric="prm_tokens_per_busy_s")["value"] == pytest.approx(new / busy)


def test_the_peak_is_a_measured_share_within_its_interval(sweep):
    rows = views.memory_split_rows(sweep)
    peak = rows[rows["metric"] == "peak_share"].iloc[0]
    assert peak["value"] == 0.3
    assert {peak["low"], peak["high"]} <= set(SHARES)


def many(noise, seeds=3, problems=12):
    """Rows of a flat curve: every share has the same rate but for `noise(rng)` seconds."""
    rng = np.random.default_rng(0)
    keys = [(s, k, p) for s in SHARES for k in range(seeds) for p in range(problems)]
    rows = pd.DataFrame(keys, columns=["llm_share", "seed", "problem_id"])
    rows["run_id"] = rows["llm_share"].astype(str) + "-" + rows["seed"].astype(str)
    return rows.assign(tokens=100.0, seconds=[1.0 + x for x in noise(rng, rows)])


def test_a_peak_that_problems_disagree_on_is_an_interval():
    rows = many(lambda rng, rows: rng.random(len(rows)))
    found = draw_rates(rows, "tokens", "seconds").peak
    assert found.low < found.high
    alone = draw_rates(rows[rows["problem_id"] == 3], "tokens", "seconds")
    assert (alone.peak.low, alone.peak.high) == (SHARES[0], SHARES[-1])
    assert alone.difference(0.3, 0.5).low == -np.inf


def test_a_slow_run_is_not_taken_for_the_shares_doing():
    """All problems of a run share its noise: drawing problems alone would call the peak certain."""

    def by_run(rng, rows):
        return rows["run_id"].map({run: 0.2 * rng.random() for run in rows["run_id"].unique()})

    rates = draw_rates(many(by_run), "tokens", "seconds")
    assert rates.peak.low < rates.peak.high
    assert rates.difference(0.3, 0.5).low < 0 < rates.difference(0.3, 0.5).high


def test_a_difference_all_problems_and_runs_agree_on_is_seen():
    rows = many(lambda rng, rows: 0.5 * (rows["llm_share"] == 0.5) + 0.01 * rng.random(len(rows)))
    found = draw_rates(rows, "tokens", "seconds").difference(0.3, 0.5)
    assert found.estimate == pytest.approx(100 / 1.5 - 100, rel=0.03)
    assert found.high < 0


def test_hit_rates_are_those_of_first_admissions(sweep):
    rows = views.prefix_hit_rows(sweep)
    assert at(rows, 0.2, engine="llm")["value"] == pytest.approx(0.90)
    assert at(rows, 0.2, engine="prm")["value"] == pytest.approx(0.95)


def test_thrashing_counts_per_look_up_and_bounds_a_zero(sweep):
    rows = views.thrashing_rows(sweep)
    events = at(rows, 0.5, engine="prm", metric="events_per_1000")
    assert events["value"] == pytest.approx(1000 * 40 / 20)  # 40 events, 20 look-ups a run
    blocks = at(rows, 0.5, engine="prm", metric="blocks")
    assert blocks["value"] == pytest.approx(40 * 4)
    zero = at(rows, 0.3, engine="prm", metric="events_per_1000")
    assert (zero["value"], zero["low"]) == (0, 0)
    assert zero["high"] == pytest.approx(1000 * 3 / 40, rel=0.06), (
        "the rule of three over 40 look-ups"
    )


def test_a_request_that_was_never_admitted_is_no_look_up():
    class Waiting(FakeSweep):
        def table(self, name, **where):
            rows = super().table(name, **where)
            if name == "requests":
                rows.loc[rows["problem_id"] == "a", "scheduled_s"] = np.nan
            return rows

    rows = views.thrashing_rows(Waiting())
    assert at(rows, 0.5, engine="prm", metric="events_per_1000")["value"] == 1000 * 40 / 15


def test_block_figures_get_every_step_and_common_axes(sweep):
    a, b = views.block_rows(sweep, 0.3, beside=(0.5,)), views.block_rows(sweep, 0.5, beside=(0.3,))
    assert len(a) == 40
    assert (a["engine"] == "prm").all()
    assert list(a["step"]) == list(range(40))
    for limit in ("axis_steps", "axis_blocks", "axis_events"):
        assert a[limit].iloc[0] == b[limit].iloc[0]
    assert b["evicted"].sum() == 200
    plots.prm_blocks(a)


def test_a_share_that_was_not_run_is_an_error(sweep):
    with pytest.raises((RunStoreError, ValueError)):
        views.block_rows(sweep, 0.99)


def test_parts_of_the_wall_time_add_up_to_it(lost):
    assert lost_time.accounted(lost).between(0.99, 1.01).all()
    assert set(lost["part"]) <= set(lost_time.PARTS)
    plots.lost_time(lost)


def test_a_mixed_step_is_divided_by_operations(lost):
    parts = lost[lost["llm_share"] == 0.5].groupby("part")["seconds"].sum()
    prm_forward = 0.45 * wall(0.5) * 0.9
    llm_forward = prm_forward
    again = prm_forward * 40 / 60
    assert parts["recomputed_evicted"] == pytest.approx(again)
    assert parts["prm_prefill"] == pytest.approx(prm_forward * 16 / 60)
    assert parts["llm_decode"] == pytest.approx(llm_forward * 16 / 24)
    assert parts["llm_prefill"] == pytest.approx(llm_forward * 7 / 24)
    assert parts["bookkeeping"] == pytest.approx(0.09 * wall(0.5) + 0.1 * wall(0.5), rel=0.01)


def test_a_gap_in_the_record_shows(sweep):
    class Gap(FakeSweep):
        def table(self, name, **where):
            rows = super().table(name, **where)
            return rows.iloc[::2] if name == "spans" else rows

    rows = lost_time.lost_time_rows(Gap(), COSTS)
    assert (lost_time.accounted(rows) < 0.97).all()


def test_claims_are_judged_by_their_rules(sweep, lost, monkeypatch):
    monkeypatch.setattr(claims, "lost_time_rows", lambda sweep: lost)
    found = {claim.key: claim for claim in claims.claims_of(sweep)}
    assert {key: claim.verdict for key, claim in found.items()} == {
        "C1": "holds",
        "C2": "holds",
        "C3": "holds",
        "C4": "holds",
        "C5": "holds",
        "C6": "depends on",
        "C9": "holds",
    }
    assert "0.50" in found["C6"].number
    assert all(claim.number and claim.figure in plots.FIGURES for claim in found.values())


def test_claims_can_fail(sweep):
    runs = sweep.runs
    moved = runs.assign(llm_weights_bytes=range(1, len(runs) + 1))
    assert claims.constant_claim(moved).verdict == "fails"
    bent = runs.assign(prm_blocks=runs["prm_blocks"] + 40 * (runs["llm_share"] > 0.3))
    assert claims.linear_claim(bent).verdict == "fails"
    nodes = sweep.table("nodes")
    nodes.at[5, "token_ids"] = [9, 9, 9]
    assert claims.sameness_claim(nodes).verdict == "fails"
    assert claims.sameness_claim(nodes.drop(index=5)).verdict == "fails"
    hits = views.prefix_hit_rows(sweep).assign(value=0.4, low=0.3, high=0.5)
    assert claims.hits_claim(hits).verdict == "fails"
    peak = views.memory_split_rows(sweep)
    at_the_end = peak.assign(low=peak["low"].where(peak["metric"] != "peak_share", 0.08))
    assert claims.peak_claim(at_the_end).verdict == "depends on"


def test_the_face_names_what_was_measured_and_where(sweep):
    text = face(sweep.runs)
    for part in (
        "tiny-solver",
        "tiny-prm",
        "measured tiny",
        "64.0 MiB",
        "4 problems, 2 seeds",
        "A CPU",
    ):
        assert part in text
    assert "Counts carry over" in text
    assert measured(sweep.runs)["machine"] == {"cpu": "A CPU", "gpu": None}
    assert BLOCKS > 0


def test_sentences_say_the_numbers_of_their_rows(sweep, lost):
    rows = views.memory_split_rows(sweep)
    assert (
        "**0.30** (95 %: 0.30 to 0.30) with **40** generated tokens/s"
        in sentences.peak_sentence(rows)
    )
    assert "at most 10 tokens" not in sentences.busy_sentence(rows)
    blocks = sentences.blocks_sentence(views.block_rows(sweep, 0.5))
    assert "200 blocks and holds at most 100 of them (50%)" in blocks
    assert "**200** of them evict" in blocks
    assert "LLM finds between **90.0%**" in sentences.hits_sentence(views.prefix_hit_rows(sweep))
    thrash = sentences.thrash_sentence(views.thrashing_rows(sweep))
    assert thrash.startswith("The LLM never thrashed: its rate is below ")
    assert "the PRM thrashes most at 0.50, **2000.0**" in thrash
    assert "100.00%" in sentences.accounted_sentence(lost)


def test_the_slow_down_is_put_into_numbers(lost):
    slow = sentences.lost_sentence(lost)
    assert slow.startswith("From the fastest share (0.30) to the highest (0.50)")
    fast = sentences.lost_sentence(lost[lost["llm_share"] <= 0.3])
    assert "no slow-down that evictions could explain" in fast
    verdict = sentences.thesis_sentence(
        claims.Claim("C4", "", "fails", "", ""), claims.Claim("C6", "", "depends on", "", "")
    )
    assert "**fails** here" in verdict
    assert verdict.endswith("**depends on** the share.")
    open_ = claims.Claim("C4", "", "depends on", "", "")
    assert "**depends on** more than these runs can tell" in sentences.thesis_sentence(open_, open_)
