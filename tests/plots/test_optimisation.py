"""The figure of the optimisation chapter draws what its rows say, and says what is missing."""

import numpy as np
import pandas as pd
import pytest

from workbench.plots.modifications import EVERYTHING, POLICIES, TECHNIQUES, optimisation

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


def test_every_policy_technique_and_model_is_drawn_once_in_the_legends():
    """Guards that nothing measured is left out, and nothing told twice."""
    shown = names(optimisation(rows()))
    wanted = [*POLICIES.values(), EVERYTHING, *TECHNIQUES.values()]
    for line in wanted:
        assert shown.count(line.label) == 1
    assert {"LLM held", "PRM held", "infeasible"} <= set(shown)
    assert len({line.dash for line in POLICIES.values()}) == len(POLICIES)  # in a grey print too
    assert len({line.symbol for line in TECHNIQUES.values()}) == len(TECHNIQUES)


def test_every_technique_has_a_line_of_counts_beside_that_of_seconds():
    """Guards that what is exact stands next to what is the machine's."""
    table = rows()
    fig = optimisation(table)
    for label in (line.label for line in TECHNIQUES.values()):
        counts, rates = [trace for trace in fig.data if trace.name == label]
        assert (counts.yaxis, rates.yaxis) == ("y3", "y4")
        assert max(rates.y) < min(counts.y)


def test_elastic_policies_are_horizontal_and_infeasible_shares_are_marked():
    """Guards the reading of the top panels."""
    traces = {trace.name: trace for trace in optimisation(rows()).data[:6]}
    assert set(traces["marginal value"].y) == {880 * 0.5**0.3}
    assert list(traces["infeasible"].x) == [0.08]
    assert len(traces["static split"].x) == 3
    table = rows((0.5,))  # a memory so small that no static split fits
    table = table[(table["policy"] != "static") | (table["metric"] == "infeasible")]
    assert "marginal value" in names(optimisation(table))


@pytest.mark.parametrize("budgets", [(0.5,), (0.5, 1.0), (0.5, 1.0, 2.0)])
def test_one_to_three_budgets_have_a_panel_each(budgets):
    """Guards the grid of panels."""
    fig = optimisation(rows(budgets))
    titles = [note.text for note in fig.layout.annotations if note.text.endswith(" W")]
    assert titles == [f"{budget:g} W" for budget in budgets]


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
