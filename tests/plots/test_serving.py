"""The figures of served load draw what their rows say."""

from __future__ import annotations

import pandas as pd

from workbench import plots


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


def test_both_models_over_the_share() -> None:
    """In per cent of the first one's, told apart by colour and dash."""
    fig = plots.serving_split(split_rows())
    assert [*fig.data[0].x] == [25, 50, 75] and [*fig.data[0].y] == [600, 1200, 1800]
    assert fig.data[1].name == "tiny-solver, random weights: 8 clients"
    assert fig.data[0].line.dash != fig.data[1].line.dash
