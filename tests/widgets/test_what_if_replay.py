"""Replays for the what-if widget, called as plain functions, and the process they run in."""

import asyncio
import multiprocessing
import os

import pandas as pd
import pytest

from workbench.errors import OutOfMemory, RecordingError
from workbench.replay.devices import PRESETS, write_device
from workbench.widgets import what_if_replay as r


@pytest.fixture
def info(infos):
    return infos["tiny-16-n4"]


def test_what_is_not_given_is_as_recorded(info):
    """Memory, share and limits are the recording's; every value can be another."""
    recorded = {"recording": "tiny-16-n4", "device": "h100", "policy": None}
    recorded |= {"total_memory": 64 << 20, "llm_share": 0.3, "block_size": 16}
    recorded |= {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    assert info.position().parameters == recorded
    assert info.position(policy="first_come", block_size=None).policy == "first_come"


def test_the_thesis_s_pair_comes_first_and_the_tiny_one_second():
    """1B + 8B in 40 GiB of an A100 at a share of 0.3, drawn anew where it is replayed."""
    infos = r.find_recordings()
    assert list(infos)[:2] == [r.THESIS, r.TINY]
    position = infos[r.THESIS].position()
    assert position.total_memory == 40 << 30 and position.llm_share == 0.3
    assert position.device == "a100-40" and position.parameters["recording"] == r.THESIS
    assert "LLM llama-3.2-1b, PRM llama-3.1-8b-prm, BeamSearch, n = 16" in str(infos[r.THESIS])
    assert r.recorded(infos[r.THESIS].path).recording == infos[r.THESIS].header


def test_the_thesis_s_pair_is_offered_with_every_strategy_that_can_be_drawn():
    """Each replays with its own requests, under the same device and memory."""
    infos = r.find_recordings(r.DRAWN)
    for name, info in infos.items():  # they are offered without being drawn
        held, drawn = info.header, r.thesis(name)
        assert (held.settings, held.llm, held.prm) == (drawn.settings, drawn.llm, drawn.prm)
        assert [each.problem for each in held.problems] == [each.problem for each in drawn.problems]
    told = [str(info).split(", ")[2] for info in infos.values()]
    assert told == ["BeamSearch", "BestOfN", "DVTS", "Lookahead", "REBASE", "ETS"]
    assert {info.position().at(0.3).parameters["device"] for info in infos.values()} == {"a100-40"}
    room = infos[r.THESIS].feasible(at := infos[r.THESIS].position())
    assert (room.llm.activations, room.prm.activations) == (351928320, 604635136), "of advise"
    one, other = (r.replay(infos[name], infos[name].position()) for name in list(infos)[:5:4])
    kv = [room.at(0.3).blocks(model) * at.block_size for model in ("llm", "prm")]
    assert [one.row[f"{model}_kv_tokens"] for model in ("llm", "prm")] == kv
    shared = infos[r.THESIS].position(policy="first_come")  # which keeps no split
    assert r.replay(infos[r.THESIS], shared.at(0.9)).row["tokens_per_s"] > 0
    with pytest.raises(OutOfMemory, match=r"llm_share 0\.01 is infeasible: the LLM .* lacks"):
        r.replay(infos[r.THESIS], at.at(0.01))
    assert other.position.recording == "thesis-48-rebase"
    assert one.row["prm_seconds"] != other.row["prm_seconds"]


def test_a_calibrated_device_is_offered_beside_the_presets(tmp_path, monkeypatch):
    """Where `workbench calibrate` left it in the project; no other file is."""
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    assert r.device_names() == list(PRESETS)
    write_device(PRESETS["l40s"], tmp_path / "device.json")
    assert r.device_names()[-1] == str(tmp_path / "device.json")


def test_recordings_are_found_by_name_and_by_file(info):
    """A name the package does not have is refused; a file's is absolute."""
    assert "BeamSearch, n = 4, beam width 4, 16 problems" in str(info)
    with pytest.raises(RecordingError, match="tiny-16-n4"):
        r.find_recordings(["tiny-16-n5"])
    name = os.path.relpath(info.path)
    position = r.find_recordings([name])[name].position()
    assert position.parameters["recording"] == str(info.path.resolve())


def test_shares_and_memories_offered_are_those_that_fit(info, position):
    """Hundredths; the ends hold one request of each model, what is beyond does not."""
    found = info.feasible(position)
    low, *_, high = (at.llm_share for at in info.grid(position, 5))
    assert found.at(low).fits and found.at(high).fits
    assert not found.at(low - 0.01).fits and not found.at(high + 0.01).fits
    assert len(info.grid(position, 5)) == 5 and len(info.grid(position, 1000)) < 99
    least, most = info.memories(position)
    assert found.llm.least + found.prm.least <= least < position.total_memory
    assert most == 4 * info.position().total_memory


def test_a_replay_tells_both_models_and_adds_up(info, replays):
    """Seconds of both models and the rest are a problem's; blocks never pass what there are."""
    for one in replays:
        parts = sum(one.row[part] for part in ("llm_seconds", "prm_seconds", "outside_s"))
        assert parts == pytest.approx(one.row["seconds_per_problem"])
        assert one.is_exact and one.took_s > 0
        used = one.blocks["blocks_active"] + one.blocks["blocks_cached"]
        assert (used <= one.blocks["blocks_total"]).all()
        assert set(one.blocks["engine"]) == {"llm", "prm"}
    assert replays[0].row["llm_kv_tokens"] < replays[1].row["llm_kv_tokens"]
    assert replays[0].row["prm_kv_tokens"] > replays[1].row["prm_kv_tokens"]


def test_between_two_replays_values_are_linear_and_said_to_be(position, replays):
    """At a quarter of the way; blocks are the nearer replay's; beyond the ends nothing is known."""
    low, high, _ = replays
    guess = r.interpolated(position.at(0.225), replays)
    for name in ("tokens_per_s", "prm_hit_rate", "llm_thrash"):
        assert guess.row[name] == pytest.approx(0.75 * low.row[name] + 0.25 * high.row[name])
    assert not guess.is_exact and guess.blocks is low.blocks
    assert pd.DataFrame([guess.row, replays[0].row]).dtypes.eq(float).all(), "one type a column"
    assert r.interpolated(position.at(0.45), replays) is None
    assert r.interpolated(position.at(0.2), replays[:1]) is None
    rows = r.replay_rows([high, low, guess])
    assert rows["llm_share"].tolist() == [0.2, 0.225, 0.3]
    assert rows["exact"].tolist() == [True, False, True]
    (row,) = r.interpolation_errors(replays).to_dict("records")  # the inner one left out
    rates = [one.row["tokens_per_s"] for one in replays]
    assert row["llm_share"] == 0.3
    assert row["error"] == pytest.approx((rates[0] + rates[2]) / 2 / rates[1] - 1)
    assert r.interpolation_errors(replays[:2]).empty


def test_another_process_replays_the_same_and_is_started_again_when_lost(info, position, replays):
    """Equal to a replay here; errors come back by name; killed, it is replaced unasked."""

    async def ask():
        found = await r.replay_elsewhere(info, position)
        (process,) = multiprocessing.active_children()
        process.kill()
        process.join()
        again = await r.replay_elsewhere(info, position)
        with pytest.raises(OutOfMemory, match="weights take"):
            await r.replay_elsewhere(info, position.at(0.99))
        return found, again

    for found in asyncio.run(ask()):
        assert found.row == replays[1].row
        assert found.blocks.equals(replays[1].blocks)
    assert len(multiprocessing.active_children()) == 1
