"""Benchmark records: the fixed keys, unique names, null for what does not apply."""

import inspect
import json
import math
import shutil
from importlib import import_module

import pytest

from tests.conftest import commit
from workbench import bench
from workbench.bench import mode_of
from workbench.bench.record import Row, compared_rows, median_row, record, write_record
from workbench.errors import ConfigError
from workbench.experiments.provenance import PACKAGE, git

REPORTS = PACKAGE.parent / "reports"
KEYS = ["bench", "machine", "versions", "git", "code", "mode", "isa", "rows"]
FIELDS = ["name", "value", "unit", "peer", "peer_value", "ratio", "ceiling", "share_of_ceiling"]
FIELDS += ["repeats", "spread"]


def test_a_record_has_the_contract_s_keys_and_fields(tmp_path):
    rows = Row("decode_b1", 10.0, "tokens/s", "transformers", ratio=2.0), Row("x", math.nan, "1")
    content = record("engine", rows, {"profile": "quick"})
    file = write_record(content, tmp_path / "deep" / "engine.json")
    stored = json.loads(file.read_text())
    assert list(stored) == KEYS
    assert [list(row) for row in stored["rows"]] == [FIELDS, FIELDS]
    assert stored["rows"][0]["ceiling"] is None
    assert stored["rows"][1]["value"] is None
    assert {"cpu", "cores", "threads", "gpu"} <= stored["machine"].keys()
    assert stored["git"].keys() == {"commit", "dirty"}
    assert list(file.parent.iterdir()) == [file]
    with pytest.raises(ConfigError, match="two rows named x"):
        record("engine", [rows[1], rows[1]], {})


def test_one_part_alone_is_refused_where_it_cannot_be(tmp_path, says):
    """Before anything is measured: an unknown part, and a record that was made otherwise."""
    assert "distinct, shared, two" in says("bench", "serve", "--part", "arenas", status=2)
    file = write_record(record("serve", [], {"part": "distinct"}), tmp_path / "m.json")
    told = says("bench", "serve", "--part", "shared", "--json", str(file), status=2)
    assert "is of --part distinct; name another file" in told.replace("\n", " ")
    told = says("bench", "memory", "--profile", "quick", "--json", str(file), status=2)
    assert "is of bench serve; name another file" in told.replace("\n", " ")
    assert json.loads(file.read_text())["bench"] == "serve"


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the package in a git checkout of its own, whose sources are asked for."""
    ignore = shutil.ignore_patterns("__pycache__", "*.parquet", "*.safetensors", "static")
    place = shutil.copytree(PACKAGE, tmp_path / "workbench", ignore=ignore)
    commit(tmp_path)
    monkeypatch.setattr(bench, "PACKAGE", place)
    bench.digest.cache_clear()
    yield place
    bench.digest.cache_clear()


def test_a_record_is_stale_once_what_bears_on_it_has_changed(copy):
    """By its digest without git's history, else by the commit it names; prose does not count."""
    made = {"commit": git(copy, "rev-parse", "HEAD"), "dirty": False}
    names = ("engine", "search", "replay")
    here = {"git": made, "machine": {"gpu": None}}
    new = [here | {"bench": name, "code": bench.digest(name)} for name in names]
    old = [here | {"bench": name} for name in names]

    def stale():
        bench.digest.cache_clear()
        found = [[bool(bench.doubts(each)) for each in of] for of in (new, old)]
        assert found[0] == found[1]
        return found[0]

    def change(module, text):
        file = copy / module
        file.write_text(file.read_text() + text)

    assert stale() == [False] * 3
    change("kernels/isa.py", "\n\n# a comment\n")
    change("plots/theme.py", "CHANGED = 1\n")
    change("kernels/triton/rows.py", "CHANGED = 1\n")
    assert stale() == [False] * 3
    assert bench.doubts(old[0] | {"machine": {"gpu": "H100"}})
    change("replay/cost.py", "CHANGED = 1\n")
    assert stale() == [False, False, True]
    change("search/rounds.py", "CHANGED = 1\n")
    assert stale() == [False, True, True]
    change("engine/engine.py", "CHANGED = 1\n")
    assert stale() == [True] * 3
    assert not bench.doubts(old[0], commit="HEAD")
    carried = new[0] | {"git": made | {"dirty": None}}  # measured on a copy without git
    assert not bench.doubts(carried, commit="HEAD")
    assert bench.doubts(carried | {"code": "other"}, commit="HEAD")[-1].startswith("dirty")


def test_a_record_of_no_commit_or_of_changed_files_does_not_stand():
    """Guards against numbers that nobody can make again."""
    stands = record("engine", [], {}) | {"git": {"commit": "0" * 40, "dirty": False}}
    assert not bench.doubts(stands)
    assert bench.doubts(stands | {"code": None})[0].startswith("stale")  # that commit is not here
    assert bench.doubts(stands | {"git": {"commit": None, "dirty": None}})[0].startswith("dirty")


def test_doubted_records_are_listed(tmp_path, monkeypatch, says):
    """`workbench bench stale`: those that stand are not in it."""
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    stands = record("engine", [], {}) | {"git": {"commit": "0" * 40, "dirty": False}}
    write_record(stands, tmp_path / "reports" / "bench" / "engine.json")
    assert says("bench", "stale") == "Every record stands.\n"
    write_record(stands | {"code": "other"}, tmp_path / "reports" / "gpu" / "engine.json")
    told = says("bench", "stale")
    assert told.startswith("gpu/engine.json (000000000000): stale: its sources")


def test_a_record_names_files_without_their_folders():
    """Guards that a committed record tells nothing of the machine's folders."""

    class Module:
        MODE = {"batch_invariant": True}

    mode = mode_of(Module, {"problems": "/data/math500.json", "llm": "smollm2-135m"})
    assert mode == {"problems": "math500.json", "llm": "smollm2-135m", "batch_invariant": True}


@pytest.mark.parametrize("name", ["engine", "search", "identity", "memory"])
def test_every_bench_says_how_it_was_run(name):
    """Guards that sizes of the search, the sample and the mode of arithmetic are in each record."""
    module = import_module(f"workbench.bench.{name}")
    settings = {k: p.default for k, p in inspect.signature(module.run).parameters.items()}
    mode = mode_of(module, settings)
    assert "batch_invariant" in mode
    if name in ("search", "identity"):
        real = mode_of(module, settings | {"llm": "smollm2-135m"})
        assert (mode["prm"], real["prm"]) == ("tiny-prm", "smollm2-135m")


def test_a_ratio_is_the_median_of_paired_ratios_not_the_ratio_of_medians():
    """Guards the pairing: a machine that is slow for one repeat is slow for both sides of it."""
    ours, peers = [10.0, 4.0, 30.0], [5.0, 1.0, 20.0]  # ratios 2, 4, 1.5
    row = median_row("decode", ours, "tokens/s", peer="peer", peers=peers, ceiling=40.0)
    assert (row.value, row.peer_value, row.ratio) == (10.0, 5.0, 2.0)
    assert (row.share_of_ceiling, row.repeats) == (0.25, 3)
    swapped = median_row("decode", ours, "tokens/s", peer="peer", peers=[1.0, 5.0, 20.0])
    assert (swapped.peer_value, swapped.ratio) == (5.0, 1.5)
    assert swapped.ceiling is None and swapped.share_of_ceiling is None


def test_the_spread_of_a_rate_is_of_its_ratios():
    """Guards that both sides' common drift is no spread, and that one repeat has none."""
    assert median_row("decode", [1.0, 2.0, 9.0], "x", peers=[2.0, 4.0, 18.0]).spread == 0
    assert median_row("decode", [1.0], "x", peers=[2.0]).spread is None
    assert median_row("time", [1.0, 2.0, 3.0, 4.0, 5.0], "s").spread == 1.0
    even = median_row("bookkeeping", [0.4, 0.1, 0.2, 0.3], "fraction")
    assert (even.value, even.spread, even.repeats) == (0.25, pytest.approx(0.075), 4)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        median_row("decode", [1.0], "x", peers=[1.0, 2.0])


def test_each_further_peer_has_a_row_of_its_own():
    """Guards names and labels; a peer that failed is named without a ratio."""
    peers = {"a": [5.0], "b": [2.0]}
    first, other = compared_rows("decode", [10.0], "tokens/s", peers, 20.0, {"b": "b 1.2"})
    assert (first.name, first.peer, first.ratio, first.share_of_ceiling) == ("decode", "a", 2, 0.5)
    assert (other.name, other.peer, other.ratio) == ("decode@b", "b 1.2", 5)
    (row,) = compared_rows("decode", [10.0], "tokens/s", {"a": []}, labels={"a": "no a: why"})
    assert (row.peer, row.ratio) == ("no a: why", None)
    assert [row.peer for row in compared_rows("decode", [10.0], "tokens/s", {})] == [None]


def test_no_committed_record_has_a_share_above_its_ceiling():
    """A ceiling that something passes is none."""
    files = [*REPORTS.glob("bench/*.json"), *REPORTS.glob("gpu/*.json")]
    found = {
        f"{file.name}: {row['name']}": (row["share_of_ceiling"], row["value"] / row["ceiling"])
        for file in files
        for row in json.loads(file.read_text())["rows"]
        if row["ceiling"] is not None and row["value"] is not None
    }
    assert len(found) > 20
    assert not {name: shares for name, shares in found.items() if max(shares) > 1}
    assert all(stored == pytest.approx(value) for stored, value in found.values())
