"""The soak: a whole one in seconds, and that it sees what is broken."""

import json
from unittest.mock import Mock

import pytest

from workbench.bench import soak
from workbench.bench.search import TINY, make_workload
from workbench.cli import main
from workbench.kvcache.arena import KVArena
from workbench.search.result import SearchResult


@pytest.fixture
def workload():
    return make_workload(TINY, limit=1, n=4, beam_width=2, max_depth=4)


def test_searches_that_are_disturbed_all_the_time_break_nothing(workload, monkeypatch) -> None:
    """Interrupts, re-splits and a full disk came to pass; no law is broken, no node differs."""
    monkeypatch.setattr(soak, "SEEDS", 1)
    rows = {row.name: row for row in soak.soak(workload, least_s=5)}
    assert rows["searches"].value >= soak.LEAST
    assert rows["interrupts"].value > 0 and rows["resplits"].value > 10
    assert rows["full_disks"].value == 1
    assert rows["broken_laws"].value == rows["differing_nodes"].value == 0
    assert rows["differing_nodes"].repeats > 0
    assert rows["rss_growth"].value < 0.1


@pytest.mark.parametrize("what", ["law", "node"])
def test_what_is_broken_is_counted_and_told(workload, what, monkeypatch, tmp_path, capsys) -> None:
    """The record has the count, the message the first of it and the seed; the status is not 0."""
    monkeypatch.setattr(soak, "SEEDS", 1)
    monkeypatch.setattr(soak, "make_workload", lambda *_, **__: workload)
    if what == "law":
        lost = Mock(side_effect=AssertionError("a page is lost"))
        monkeypatch.setattr(KVArena, "check", lost)
    else:
        nodes_of, calls = soak.nodes_of, []

        def altered(result: SearchResult):
            calls.append(result)
            return nodes_of(result) | ({("p", "n"): ((1,), 0.5)} if len(calls) == 2 else {})

        monkeypatch.setattr(soak, "nodes_of", altered)
    file = tmp_path / "soak.json"
    assert main(["bench", "soak", "--minutes", "0", "--seed", "3", "--json", str(file)]) != 0
    rows = {row["name"]: row["value"] for row in json.loads(file.read_text())["rows"]}
    assert (rows["broken_laws"], rows["differing_nodes"]) == ((4, 0) if what == "law" else (0, 1))
    printed = capsys.readouterr()
    told = " ".join((printed.out + printed.err).split())
    assert ("a page is lost" if what == "law" else "1 nodes differ") in told and "--seed 3" in told
