"""What memory is needed for over the split: measured on engines, computed by the same formulas."""

from dataclasses import replace

import pandas as pd
import pytest

from workbench import plots
from workbench.errors import ConfigError
from workbench.experiments import requirements
from workbench.experiments.claims import constant_claim, linear_claim
from workbench.experiments.plans import sweep_config
from workbench.experiments.requirements import COMPUTED, MEASURED, study_memory
from workbench.experiments.study import figures_home, profile_figures
from workbench.models.loading import load_model
from workbench.models.registry import model_spec

SHARES = (0.1, 0.5)
BEYOND = (0.04, 0.65)


@pytest.fixture(scope="module")
def study():
    return study_memory(sweep_config("quick", shares=(*SHARES, 0.05)), BEYOND)


@pytest.fixture(scope="module")
def rows(study):
    return requirements.memory_part_rows(study)


def test_all_but_the_kv_cache_is_the_same_at_every_share(rows):
    """The thesis's assumption, of engines that were really built (C2)."""
    built = rows[(rows["how"] == MEASURED) & rows["fits"]]
    spread = built.groupby(["model", "part"])["bytes"].agg(["min", "max"])
    for (_, part), (least, most) in spread.iterrows():
        assert (most > 1.5 * least) if part == "kv" else (most - least <= 0.01 * most)
    assert constant_claim(rows).verdict == "holds"
    is_own = (rows["part"] == "other") & rows["fits"]  # of built engines on a GPU
    assert constant_claim(rows.assign(bytes=rows["bytes"].mask(is_own, 1 << 29))).verdict == "holds"
    other = built.assign(how="measured SmolLM2", bytes=2 * built["bytes"])  # of itself the same
    assert constant_claim(pd.concat([rows, other])).verdict == "holds"
    first = rows.index == built.index[0]
    moved = rows.assign(bytes=rows["bytes"].where(~first, 2 * rows["bytes"]))
    assert constant_claim(moved).verdict == "fails"


def test_what_does_not_fit_is_there_with_the_bytes_that_lack(rows, study):
    """A starving model lacks bytes, its neighbour none, and neither is drawn as fitting."""
    for how in (MEASURED, COMPUTED):
        low, high = (rows[(rows["how"] == how) & (rows["llm_share"] == s)] for s in BEYOND)
        assert not low["fits"].any()
        assert not high["fits"].any()
        assert low.loc[low["model"] == "llm", "lacks_bytes"].min() > 0
        assert low.loc[low["model"] == "prm", "lacks_bytes"].max() == 0
        assert high.loc[high["model"] == "prm", "lacks_bytes"].min() > 0
    assert "lacks 2.5 MiB" in str(study.measured.shares.at(BEYOND[0]))


def test_blocks_lie_on_the_formula_s_line(study):
    """A built cache has exactly the blocks the formula gives, and so is linear (C3)."""
    parts = requirements.memory_part_rows(study).query("how == @MEASURED and fits").iloc[0]
    for name in ("llm_kv_tokens", "prm_kv_tokens"):  # the upper axis says what the engines say
        assert 0 <= parts[name] - study.runs.iloc[0][name] < study.config.block_size
    rows = requirements.block_count_rows(study)
    built, crosses = rows[rows["kind"] == "built"], rows[rows["kind"] == "lacking"]
    assert len(built) == 2 * len(SHARES)
    assert (built["blocks"] == built["formula_blocks"]).all()
    assert linear_claim(rows).verdict == "holds"
    assert linear_claim(rows.assign(blocks=rows["blocks"] + 40)).verdict == "fails"
    assert sorted(set(crosses["llm_share"])) == [0.04, 0.05, 0.65]
    assert len(crosses) == 2 * 3


def test_parts_add_up_to_the_model_s_part_of_the_total(rows):
    """Activations count where the total pays for them: not on the tiny pair, yet at 40 GiB."""
    fits = rows[rows["fits"]]
    for (how, _, _), own in fits.groupby(["how", "model", "llm_share"]):
        parts = own.set_index("part")["bytes"]
        held = parts["weights"] + parts["other"] + parts["kv"]
        held += parts["activations_limits"] if how == COMPUTED else 0
        assert held == own["budget_bytes"].iloc[0]


def test_the_formula_of_a_step_s_buffers_is_what_an_executor_keeps():
    """The computed activations come from the shapes the engine's own buffers have."""
    for name in ("tiny-solver", "tiny-prm"):
        model = load_model(name)
        assert model.spec == model_spec(name)
        size = model.dtype.itemsize
        assert model.spec.step_bytes(96, 8, size) == model.buffers(96, 8).nbytes


def test_the_thesis_s_pair_is_computed_at_its_own_size():
    """40 GiB, bf16, requests of 4,096 tokens; one request is a smaller step than the limits."""
    pair = requirements.computed_pair()
    assert all(a < b for a, b in zip(pair.longest, pair.limits))
    ends = pair.shares
    assert 0.06 < ends.low < 0.08
    assert 0.53 < ends.high < 0.62
    without = replace(pair, limits=(0, 0)).shares
    assert without.low < ends.low < ends.high < without.high
    assert ends.prm.block_bytes == 4 * ends.llm.block_bytes


def test_a_pair_that_stands_beside_another_study_is_named_and_computes_nothing(study, rows) -> None:
    """Its figure has a column of panels more, and the claims rows of its own."""
    beside = study_memory(study.config, how="measured SmolLM2")
    more = requirements.memory_part_rows(beside)
    blocks = [requirements.block_count_rows(each) for each in (study, beside)]
    assert set(blocks[1]["how"]) == {"measured SmolLM2"} == set(more["how"])
    for draw, parts in ((plots.memory_parts, [rows, more]), (plots.kv_blocks, blocks)):
        assert "measured SmolLM2" in draw(pd.concat(parts, ignore_index=True)).to_json()
    face = requirements.memory_provenance(study, beside)
    assert "; tiny-solver in both roles, 64.0 MiB, at 2 shares" in face


def test_both_dry_passes_are_measured_and_faces_name_what_was_built(study):
    assert all(0 < a <= 1.01 * b for a, b in zip(study.measured.longest, study.measured.limits))
    face = requirements.memory_provenance(study)
    assert "both engines built at 2 shares" in face
    assert "activations outside it" in face.splitlines()[0]
    assert "llama-3.2-1b, llama-3.1-8b-prm, bfloat16, 40.0 GiB" in face
    assert figures_home(study) == profile_figures("quick-changed")
    assert repr(study) == "MemoryStudy(quick: engines built at 2 shares)"


def test_no_feasible_share_is_an_error_that_says_why():
    with pytest.raises(ConfigError, match=r"llm_share 0\.01 is infeasible: the LLM .* lacks"):
        study_memory(sweep_config("quick", shares=(0.01,)))
