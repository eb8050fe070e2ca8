"""The figures of one engine and of served load draw what their rows say; no fit is a cross."""

import math
from itertools import product

import numpy as np
import pandas as pd
import pytest

from workbench import plots


def spread(value: float) -> dict[str, float]:
    return {"value": value, "low": 0.9 * value, "high": 1.2 * value}


def cache_rows() -> pd.DataFrame:
    rows = []
    for prompt, new in product((16, 64), (200, 500, 1000)):
        own, on = {"prompt_tokens": prompt, "new_tokens": new}, new / 100
        for kept, value in ((True, on), (False, on * (1 + new / 200))):
            rows.append({**own, "metric": "seconds", "kv_cache": kept, **spread(value)})
        rows.append({**own, "metric": "ratio", "kv_cache": False, **spread(1 + new / 200)})
    return pd.DataFrame(rows)


def batch_rows() -> pd.DataFrame:
    rows = []
    for batch, kind in product((1, 4, 16, 64), ("continuous", "static")):
        own = {"batch": batch, "kind": kind}
        if (batch, kind) == (64, "static"):
            cannot = {"metric": "tokens_per_s", "value": math.nan, "error": "9 GiB of KV"}
            rows.append({**own, **cannot})
            continue
        rows.append({**own, "metric": "tokens_per_s", **spread(90.0 * batch**0.8)})
        rows.append({**own, "metric": "mfu", **spread(0.01 * batch**0.8)})
        rows.append({**own, "metric": "padding", **spread(0.4 if kind == "static" else 0.0)})
        parts = {"forward": 0.8, "sampling": 0.05, "scheduling": 0.1, "other": 0.05}
        rows += [{**own, "metric": "share", "part": p, **spread(v)} for p, v in parts.items()]
    return pd.DataFrame(rows)


def memory_rows() -> pd.DataFrame:
    rows = []
    for batch in (1, 16, 256):
        for kind, each in (("paged", 8 << 20), ("contiguous", 72 << 20)):
            rows.append({"metric": "bytes", "kind": kind, "batch": batch, "value": batch * each})
    for kind, batch in (("paged", 512), ("contiguous", 56)):
        rows.append({"metric": "most", "kind": kind, "batch": batch, "value": 4 << 30})
    for size, waste in ((1, 0.0), (16, 0.07), (64, 0.2), (1024, 0.9)):
        kind = "contiguous" if size == 1024 else "paged"
        own = {"kind": kind, "block_size": min(size, 256)}
        rows.append({**own, "block_size": size, "metric": "waste", "value": waste})
        rows.append({**own, "metric": "ratio", **spread(1.0)})
    attention = {"metric": "attention", "kind": "paged", "block_size": 16}
    return pd.DataFrame([*rows, {**attention, **spread(1.1)}])


def test_a_line_for_each_prompt_and_cache_and_the_ratio_below() -> None:
    fig, rows = plots.engine_cache(cache_rows()), cache_rows()
    assert len(fig.data) == 2 * 3 + 2, "and two entries of the legend"
    line = next(t for t in fig.data if t.name == "without, prompt of 64")
    own = rows.query("metric == 'seconds' and not kv_cache and prompt_tokens == 64")
    np.testing.assert_allclose(line.y, own["value"])
    np.testing.assert_allclose(line.error_y.array, own["high"] - own["value"])
    ratio = next(t for t in fig.data if t.name == "prompt of 64")
    assert (ratio.yaxis, list(ratio.y)) == ("y2", [2.0, 3.5, 6.0])


def test_batches_that_do_not_fit_are_crosses_and_the_time_adds_up() -> None:
    fig = plots.engine_batch(batch_rows())
    cross = next(t for t in fig.data if "does not fit" in t.name)
    assert (list(cross.x), list(cross.y), cross.marker.symbol) == ([64], [0], "x")
    assert cross.customdata.tolist() == [["9 GiB of KV"]]
    bars = [t for t in fig.data if t.type == "bar"]
    np.testing.assert_allclose(np.sum([t.y for t in bars], axis=0), 100)
    assert list(bars[0].x) == ["1", "4", "16", "64"]
    used = next(t for t in fig.data if t.yaxis == "y3" and t.name == "continuous")
    np.testing.assert_allclose(used.y, [100 * 0.01 * b**0.8 for b in (1, 4, 16, 64)])


def test_bytes_have_the_memory_as_a_line_and_say_what_it_holds() -> None:
    fig = plots.engine_memory(memory_rows())
    one = memory_rows().query("metric != 'bytes' or batch == 1")
    assert plots.engine_memory(one).data, "a single batch is drawn, too"
    paged = next(t for t in fig.data if t.name == "paged" and t.yaxis == "y")
    np.testing.assert_allclose(paged.y, [b * 8 / 1024 for b in (1, 16, 256)])
    line = next(t for t in fig.data if t.name.startswith("memory"))
    assert (list(line.y), line.name) == ([4.0, 4.0], "memory: 4 GiB")
    said = [a.text for a in fig.layout.annotations]
    assert "the memory holds 512 paged and 56 contiguous sequences" in said
    waste = next(t for t in fig.data if t.name == "paged" and t.yaxis == "y2")
    np.testing.assert_allclose(waste.y, [0, 7, 20])


def load_rows() -> pd.DataFrame:
    rows = []
    for clients in (1, 4, 16, 64):
        seconds = 0.5 + 0.02 * clients
        rows.append(
            {"arrivals": "closed", "clients": clients, "tokens_per_s": 64 * clients / seconds}
            | {"ttft_p50": seconds / 9, "ttft_p95": seconds / 4, "e2e_p50": seconds}
            | {"e2e_p95": 1.3 * seconds, "inside": 0.95 * clients, "little": 1.0 * clients}
        )
    for little in (2.0, 6.0):
        rows.append({"arrivals": "poisson", "inside": 1.1 * little, "little": little})
    return pd.DataFrame(rows)


def split_rows() -> pd.DataFrame:
    models = ("tiny-solver", 24), ("dummy:tiny-solver", 8)
    return pd.DataFrame(
        {"share": share, "model": model, "clients": clients}
        | {"tokens_per_s": 100 * share * clients, "ttft_p95": 1 / share}
        for share in (0.25, 0.5, 0.75)
        for model, clients in models
    )


def test_load_and_law() -> None:
    """Throughput over clients, four lines of seconds, and every load against the law."""
    fig = plots.serving_load(load_rows())
    assert [*fig.data[0].x] == [1, 4, 16, 64] and fig.data[0].y[0] == 64 / 0.52
    assert len([t for t in fig.data if t.legend == "legend" and "percentile" in t.name]) == 2
    dots = {t.name: (len(t.x), t.y[0] / t.x[0]) for t in fig.data if t.mode == "markers"}
    assert dots == {"clients that ask anew": (4, 0.95), "arriving by chance": (2, 1.1)}


@pytest.mark.parametrize("known", [0, 3])
def test_loads_too_short_to_be_counted(known: int) -> None:
    """The law's line spans what is known."""
    rows = load_rows()
    rows.loc[known:, "inside"] = np.nan
    fig = plots.serving_load(rows)
    law = next(t for t in fig.data if t.name == "Little's law")
    assert np.isfinite(law.x).all() and law.x[0] < law.x[1] == 64 * 1.3


def test_both_models_over_the_share() -> None:
    """In per cent of the first one's, told apart by colour and dash."""
    fig = plots.serving_split(split_rows())
    assert [*fig.data[0].x] == [25, 50, 75] and [*fig.data[0].y] == [600, 1200, 1800]
    assert fig.data[1].name == "tiny-solver, random weights: 8 clients"
    assert fig.data[0].line.dash != fig.data[1].line.dash
