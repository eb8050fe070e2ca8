"""The figure of the optimisation chapter draws what its rows say, and says what is missing."""

import numpy as np
import pandas as pd
import pytest

from workbench.plots.modifications import POLICIES, TECHNIQUES, optimisation

SHARES = (0.08, 0.2, 0.3, 0.5)
BUDGETS = (0.5, 1.0)


def one(metric, budget, policy, share, technique, value):
    """A row of the figure, with the interval around it."""
    name = policy if share is None else f"{policy}_{share:g}"
    row = {"metric": metric, "setting": f"{budget:g}W/{name}/{technique}", "budget": budget}
    row |= {"policy": policy, "kv_share": share, "technique": technique, "value": value}
    return row | {"low": 0.95 * value, "high": 1.05 * value}


def setting_rows(*setting, speed):
    """Speed, tokens computed again, accuracy and sameness of one setting."""
    values = {"tokens_per_s": speed, "recomputed": 3e4 - 20 * speed, "accuracy": 0.9, "same": 1.0}
    return [one(metric, *setting, value) for metric, value in values.items()]


def rows(budgets=BUDGETS):
    """Static shares peak at 0.3; elastic ones are level with it; all techniques gain a fifth."""
    found = [one("infeasible", 0.5, "static", 0.08, "none", np.nan)]
    for budget in budgets:
        for share in SHARES[1:] if budget == 0.5 else SHARES:
            speed = 900 * budget**0.3 * (1 - 2 * (share - 0.3) ** 2)
            techniques = TECHNIQUES if budget == 0.5 else ("none",)
            for number, technique in enumerate(techniques):
                gain = 1.2 if technique == "all" else 1 + number / 60
                found += setting_rows(budget, "static", share, technique, speed=speed * gain)
        for number, policy in enumerate(("first_come", "phase_aware", "marginal_value")):
            speed = (780 + 50 * number) * budget**0.3
            found += setting_rows(budget, policy, None, "none", speed=speed)
        speed = 1050 * budget**0.3
        found += setting_rows(budget, "marginal_value", None, "all", speed=speed)
    return pd.concat([pd.DataFrame(found), held()], ignore_index=True)


def held(seconds=40):
    """Memory of two searches: the LLM's grows under the elastic policy."""
    times = np.linspace(0, seconds, 120)
    frames = []
    for policy, share in (("static", 0.3), ("marginal_value", None)):
        for model, part in (("llm", 0.3), ("prm", 0.7)):
            grown = 6 * part * 2**20 * (1 + (0.3 * times / seconds if policy != "static" else 0))
            wave = grown * (0.7 + 0.3 * np.sin(times) ** 2)
            for metric, value in (("held", wave), ("active", wave / 2), ("target", grown)):
                own = one(metric, 0.5, policy, share, "none", 0.0)
                columns = {"second": times, "value": value, "model": model}
                frames.append(pd.DataFrame(own | columns))
    return pd.concat(frames)


def names(fig):
    return [trace.name for trace in fig.data if trace.showlegend is not False and trace.name]


def points(fig, name):
    """Ratios and counts of one budget, by the label of their line."""
    ticks = fig.layout.yaxis.ticktext
    pair = [trace for trace in fig.data if trace.name == name]
    assert [trace.xaxis for trace in pair] == ["x", "x2"]
    return [{ticks[round(y)]: x for x, y in zip(trace.x, trace.y)} for trace in pair]


def test_every_setting_is_a_line_and_every_budget_a_mark_on_it():
    """Guards that nothing measured is left out, and that no more than three panels are drawn."""
    fig = optimisation(rows())
    statics = [f"static {share:g}" for share in SHARES]
    alone = [f"static 0.3 + {label}" for label in [*TECHNIQUES.values()][1:]]
    last = "marginal value + all techniques"
    assert [*fig.layout.yaxis.ticktext] == [*statics, *[*POLICIES.values()][1:], *alone, last]
    tight, roomy = (points(fig, f"{budget:g} W") for budget in BUDGETS)
    assert set(tight[0]) == set(tight[1]) == {*fig.layout.yaxis.ticktext} - {"static 0.08"}
    assert set(roomy[0]) == {*statics, *[*POLICIES.values()][1:], last}
    assert {"LLM held", "PRM held"} <= set(names(fig))
    assert len({trace.yaxis for trace in fig.data}) == 3
    assert len({trace.marker.symbol for trace in fig.data if trace.yaxis == "y"}) == len(BUDGETS)


def test_ratios_are_to_the_best_static_split_of_the_same_memory_and_counts_stand_beside():
    """Guards that a policy is not compared with a split that somebody chose badly."""
    table = rows()
    ratios, counts = points(optimisation(table), "0.5 W")
    assert ratios["static 0.3"] == 1 == max(v for k, v in ratios.items() if k[-1].isdigit())
    assert ratios["marginal value"] == pytest.approx(880 / 900)
    assert ratios["static 0.3 + all techniques"] == pytest.approx(1.2)
    own = table[(table["metric"] == "recomputed") & (table["budget"] == 0.5)]
    assert counts["first come"] == own.loc[own["policy"] == "first_come", "value"].item()


def test_a_share_that_does_not_fit_is_marked_and_without_any_there_is_no_ratio():
    fig = optimisation(rows())
    (bad,) = (note for note in fig.layout.annotations if "no room" in note.text)
    assert (fig.layout.yaxis.ticktext[int(bad.y)], bad.text) == ("static 0.08", " no room at 0.5 W")
    table = rows((0.5,))  # a memory so small that no static split fits
    table = table[(table["policy"] != "static") | (table["metric"] == "infeasible")]
    ratios, counts = points(optimisation(table), "0.5 W")
    assert pd.isna(ratios["marginal value"]) and counts["marginal value"] > 0


@pytest.mark.parametrize("budgets", [(0.5,), (0.5, 1.0), (0.5, 1.0, 2.0), (0.5, 1.0, 2.0, 3.0)])
def test_the_three_smallest_budgets_are_drawn(budgets):
    shown = [name for name in names(optimisation(rows(budgets))) if name.endswith(" W")]
    assert shown == [f"{budget:g} W" for budget in budgets[:3]]


def test_a_setting_whose_tokens_differ_is_counted_and_named():
    """Guards that a difference cannot hide among equal accuracies."""

    def words():
        return " ".join(note.text for note in optimisation(table).layout.annotations)

    table = rows()
    same = table["metric"] == "same"
    assert f"{same.sum()} of {same.sum()} settings sample the same" in words()
    table.loc[table.index[same][0], "value"] = 0.99
    said = words()
    assert f"{same.sum() - 1} of {same.sum()} settings sample the same" in said
    assert f"Not the same: {table['setting'][same].iloc[0]} (0.90)." in said
