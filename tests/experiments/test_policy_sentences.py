"""The study of policies in words: numbers of the rows, and what is missing is said."""

from dataclasses import replace

import pytest

from tests.experiments.policy_fakes import CONFIG, PLAN, execute
from workbench.experiments import policy_sentences as words
from workbench.experiments.policy_rows import optimisation_rows
from workbench.experiments.policy_study import run_policies


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    plan = replace(PLAN, kv_shares=(0.08, 0.3), budgets=(0.5, 2.0))
    folder = tmp_path_factory.mktemp("runs")
    return run_policies(CONFIG, plan, folder, execute=execute, progress=False)


def test_the_elastic_policy_is_told_against_both_peers_at_every_budget(study):
    """Guards the chapter's main sentence; equal work is said to be just that."""
    text = words.elastic_sentence(study)
    assert "at 0.5 W it has **1.16** times" in text
    assert "the best static share, 0.3," in text
    assert "at 2 W it has by equal work **1.00** times" in text


def test_what_does_not_fit_and_what_w_is_are_told(study):
    """Guards that infeasible shares reach the reader."""
    assert words.infeasible_sentence(study).endswith("0.08 at 0.5 W.")
    assert "**W = 10.0 MiB**" in words.working_set_sentence(study)
    assert "max_model_len is 608" in words.working_set_sentence(study)


def test_techniques_and_the_bound_are_told(study):
    """Guards the ablation's numbers, and that the bound stands beside what was reached."""
    text = words.techniques_sentence(study)
    assert "a static share of 0.3" in text
    assert "prefix-aware order **1.08** times" in text
    everything = words.all_sentence(study)
    assert "% of the bound" in everything
    assert "tokens/s**" in everything


def test_counts_and_sameness_are_told(study):
    """Guards the sentences whose numbers hold on every machine."""
    rows = optimisation_rows(study)
    assert "marginal value 320" in words.recomputed_sentence(rows)
    total = study.runs["setting"].nunique()
    assert f"**{total} of {total}** settings" in words.sameness_sentence(rows)
    assert words.memory_sentence(study).endswith("0.50 at 0.5 W, 0.50 at 2 W.")
