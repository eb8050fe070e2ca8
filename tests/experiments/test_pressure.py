"""What a sweep promises and says of itself: how short of room it is, its machine and settings."""

import pandas as pd
import pytest

from tests.experiments.fake_sweep import FakeSweep
from workbench.experiments.face import face_here, sweep_face
from workbench.experiments.machine import machine_facts
from workbench.experiments.missing_values import missing_values
from workbench.experiments.pressure import pressure_rows, pressure_sentence, working_set
from workbench.experiments.preview import preview
from workbench.experiments.profiles import PROFILES, promises_scarcity, sweep_config
from workbench.experiments.sentences import starvation_sentence


def test_the_table_sets_both_scales_side_by_side():
    config = sweep_config("default")
    rows = pressure_rows(FakeSweep(), config)
    assert list(rows["llm_share"]) == [0.08, 0.08, 0.3, 0.3, 0.5, 0.5]
    assert working_set(FakeSweep()) == {"llm": 1600, "prm": 1600}
    prm = rows[rows["model"] == "prm"].set_index("llm_share")
    assert prm["room"].to_dict() == {0.08: 18400, 0.3: 11200, 0.5: 4640}
    assert prm["ratio"][0.5] == pytest.approx(1600 / 4640)
    assert prm["thesis_ratio"][0.5] == pytest.approx(prm["ratio"][0.5])
    llm = rows[rows["model"] == "llm"].set_index("llm_share")
    gib = 2**30
    weights = 1_235_814_400 * 2 + 4096 * 64 * 2  # parameters, and the table of rotations
    least = (0.08 * 40 * gib - weights) / (16 * 2 * 8 * 64 * 2)  # bytes of keys and values a token
    assert llm["thesis_room"][0.08] == pytest.approx(least, rel=0.02)
    assert "12 problems in flight here and 16 there" in pressure_sentence(rows, config)


def test_a_working_set_is_taken_where_there_is_most_room():
    class Capped(FakeSweep):
        def table(self, name, **where):
            rows = super().table(name, **where)
            rows.loc[rows["llm_share"] == 0.08, ["blocks_total", "blocks_active"]] = (120, 120)
            return rows

    assert working_set(Capped())["llm"] == 1600


def test_sizes_and_searches_that_promise_scarcity_are_those_of_the_default_profile():
    promised = {name: promises_scarcity(sweep_config(name)) for name in PROFILES}
    assert promised == {"quick": False, "default": True, "full": True, "thesis": False}
    for change in (
        {"shares": (0.3, 0.5)},
        {"n": 4},
        {"total_memory": "80MiB"},
        {"num_problems": 8},
    ):
        assert not promises_scarcity(sweep_config("default", **change)), change
    assert promises_scarcity(sweep_config("default", seeds=(3,), num_problems=20))


def test_what_a_small_sweep_does_not_show_is_a_sentence_and_no_failure():
    rows = pd.DataFrame(
        {
            "engine": ["prm", "prm", "llm"],
            "llm_share": [0.5, 0.5, 0.08],
            "what": ["blocks evicted", "evicted tokens computed again", "requests preempted"],
            "count": [200, 0, 6],
            "seen": [True, False, True],
        }
    )
    said = starvation_sentence(rows)
    assert "show **200** blocks evicted (PRM at 0.50), **6** requests preempted (LLM at 0" in said
    assert said.endswith(
        "Not seen in a sweep of this size: evicted tokens computed again (PRM at 0.50)."
    )


def test_what_is_taken_for_missing_values_is_what_the_profiles_set():
    taken = missing_values().set_index("value")["taken"]
    tiny, thesis = sweep_config("default"), sweep_config("thesis")
    flight = f"{tiny.min_problem_batch} (tiny), {thesis.min_problem_batch} (thesis scale)"
    assert taken["problems in flight"] == flight
    assert taken["batch size, max_num_seqs"].startswith(f"{tiny.max_num_seqs} (tiny)")
    assert taken["n"] == str(tiny.n)
    assert taken["max_model_len"] == "2,048 (tiny), 4,096 (thesis scale)"


def test_a_dry_run_counts_the_dtype_and_says_what_it_leaves_out(tmp_path):
    settings = {"total_memory": "64MiB", "shares": (0.3,), "seeds": (0,)}
    half, whole = (
        preview(sweep_config("quick", dtype=dtype, **settings), tmp_path)
        for dtype in ("bfloat16", "float32")
    )
    assert half.feasible.llm.weights * 2 == whole.feasible.llm.weights
    at = half.feasible.at(0.3)
    assert half.runs["prm_blocks"].iloc[0] == at.prm.num_blocks(at.prm_bytes)
    assert "activations" not in str(whole.feasible)
    inside = preview(sweep_config("quick", activations_in_total=True, **settings), tmp_path)
    assert "activations" in str(inside.feasible)


def test_a_face_names_the_machine_the_rung_and_the_one_seed_that_is_drawn():
    assert "(measured tiny)" in face_here("tiny-solver", "tiny-prm", "one problem")
    other = face_here("dummy:llama-3.2-1b", "tiny-prm", "one problem")
    assert "(dummy weights); one problem; " in other
    assert machine_facts()["cpu"] in other
    assert "4 problems, seed 0 of 2 seeds" in sweep_face(FakeSweep(), 0)
    assert "4 problems, 2 seeds" in sweep_face(FakeSweep())
    assert "4 problems, 1 seed," in sweep_face(FakeSweep(seeds=(0,)), 0)
    assert "10 of 10 runs; 4 runs of equal work differ by up to 1.02 times" in (
        sweep_face(FakeSweep())
    )
