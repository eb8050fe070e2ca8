"""Notebook 13's rows: what is counted is exact, contenders differ in one thing, nothing is lost."""

from dataclasses import replace

import pytest

from workbench.bench import generation as g
from workbench.bench.record import Ceiling
from workbench.config import ConfigError

TINY = {"prompt_tokens": (8, 32), "new_tokens": (6, 20, 5000), "batches": (1, 4), "repeats": 1}
TINY |= {"counted_batches": (1, 2, 8), "block_sizes": (1, 16), "lengths": (4, 20)}
TINY |= {"kv_memory": "8MiB", "block_batch": 2}
CEILING = Ceiling(1e12, 1e11, 1e12)


@pytest.fixture(scope="module")
def plan() -> g.GenerationPlan:
    return replace(g.PROFILES["quick"], **TINY)


@pytest.mark.parametrize("stride", [1, 7])
def test_every_length_that_fits_has_seconds_and_the_tokens_that_it_computes(plan, stride) -> None:
    """With a cache each token once; without, the sum of all lengths; too long ones left out."""
    rows = g.cache_rows(replace(plan, stride=stride))
    assert set(rows["new_tokens"]) == {6, 20}
    for (prompt, new), own in rows.groupby(["prompt_tokens", "new_tokens"]):
        own = own.set_index(["metric", "kv_cache"])
        on, off = (own.loc[("seconds", kept)] for kept in (True, False))
        assert on["computed_tokens"] == prompt + new - 1
        assert off["computed_tokens"] == sum(prompt + k for k in range(new))
        assert own.loc[("ratio", False), "value"] == pytest.approx(off["value"] / on["value"])


def test_without_a_cache_a_request_s_time_is_that_of_all_its_lengths(plan, monkeypatch) -> None:
    """Where a step takes as many seconds as it has tokens, all take as many as are computed."""
    lengths = []
    monkeypatch.setattr(g, "_add", lambda engine, requests, seed: lengths.append(requests[0][0]))
    monkeypatch.setattr(g, "_seconds", lambda engine: float(lengths[-1]))
    monkeypatch.setattr(g, "_stamps", lambda engine, prompt, new, seed: g.np.ones(new))
    rows = g.cache_rows(replace(plan, stride=7))
    off = rows[(rows["metric"] == "seconds") & ~rows["kv_cache"].astype(bool)]
    assert len(off) == 4 and off["value"].tolist() == off["computed_tokens"].tolist()


def test_batches_compute_what_requests_need_and_static_ones_padding_too(plan) -> None:
    """Utilisation is of needed operations; the parts of the time add up to all of it."""
    rows = g.batch_rows(plan, CEILING)
    wide = rows[rows["batch"] == 4].set_index(["kind", "metric"])["value"]
    assert wide["continuous", "padding"] == 0 < wide["static", "padding"] < 1
    spec, requests = plan.spec, plan.requests(8)
    flops = sum(spec.flops(p, 0, logits=1) for p, _ in requests)  # prompts, then token by token
    flops += sum(spec.flops(1, p + k) for p, n in requests for k in range(n - 1))
    rate = wide["continuous", "tokens_per_s"]
    seconds = sum(n for _, n in requests) / rate
    assert wide["continuous", "mfu"] == pytest.approx(flops / seconds / 1e12)
    shares = rows[rows["metric"] == "share"].groupby(["batch", "kind"])["value"].sum()
    assert shares.tolist() == pytest.approx([1.0] * 4)


def test_a_batch_that_does_not_fit_has_no_rate_and_says_why(plan, monkeypatch) -> None:
    monkeypatch.setattr(g, "available_memory", lambda: plan.spec.block_bytes(16, 4) * 4)
    rows = g.batch_rows(plan, CEILING)
    refused = rows[rows["value"].isna()]
    assert list(refused["batch"]) == [4, 4]
    assert "of KV for 4 sequences" in refused["error"].iloc[0]


def test_bytes_are_those_of_the_blocks_and_of_whole_sequences(plan) -> None:
    """The largest batch named fits, the next does not; blocks of one token waste nothing."""
    rows = g.memory_rows(plan)
    spec, kinds = plan.spec, rows[rows["metric"] == "bytes"].set_index(["kind", "batch"])["value"]
    whole = spec.kv_bytes_per_token(4) * spec.max_model_len
    for batch in plan.counted_batches:
        blocks = g.held(plan, batch)["blocks_active"].max()
        assert kinds["paged", batch] == blocks * spec.block_bytes(16, 4)
        assert kinds["contiguous", batch] == batch * whole
    most = rows[rows["metric"] == "most"].set_index("kind")["batch"].astype(int)
    room, fits = 8 << 20, lambda b: g.held(plan, b)["blocks_active"].max() * spec.block_bytes(16, 4)
    assert fits(most["paged"]) <= room < fits(most["paged"] + 1)
    assert most["contiguous"] == room // whole
    waste = rows[rows["metric"] == "waste"].set_index("block_size")["value"]
    assert waste[1] == 0 < waste[16] < waste[spec.max_model_len] < 1


def test_block_sizes_are_timed_beside_one_block_for_each_sequence(plan) -> None:
    rows = g.block_rows(plan)
    ratios = rows[rows["metric"] == "ratio"].set_index("block_size")
    assert list(ratios.index) == [1, 16, 64]
    for size in ratios.index:
        engine = g._engine(plan, 2, plan.longest, block_size=int(size))
        g._add(engine, [(20, 20)] * 2, 0)
        engine.step()
        assert engine.scheduler.counts.running == 2, "all of a batch run from the first step"
    assert (ratios.loc[64, "kind"], ratios.loc[64, "value"]) == ("contiguous", 1.0)
    alone = rows[rows["metric"] == "attention"]
    assert (alone["value"] > 0).all() and len(alone) == 1


def test_a_plan_is_checked_and_told() -> None:
    plan = replace(g.PROFILES["default"], repeats=7)
    with pytest.raises(ConfigError, match="stride"):
        replace(plan, stride=0)
    wrong = {"block_sizes": (), "batches": (0, 4), "new_tokens": (5000,), "lengths": (1, 900)}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=r"is \(.*allowed: "):
            replace(plan, **{name: value})
    assert "gpt2 (random weights, 124.4 M parameters), cpu; 7 repeats" in g.provenance(plan)
