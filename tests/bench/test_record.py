"""Benchmark records: the fixed keys, unique names, null for what does not apply."""

import json

import pytest

from workbench.bench.record import KEYS, Row, record, write_record
from workbench.errors import ConfigError

FIELDS = [
    "name",
    "value",
    "unit",
    "peer",
    "peer_value",
    "ratio",
    "ceiling",
    "share_of_ceiling",
    "repeats",
    "spread",
]


def test_a_record_has_the_contract_s_keys_and_fields(tmp_path):
    rows = [
        Row("decode_b1", 10.0, "tokens/s", peer="transformers", ratio=2.0),
        Row("x", float("nan"), "1"),
    ]
    file = write_record(
        record("engine", rows, {"profile": "quick"}), tmp_path / "deep" / "engine.json"
    )
    stored = json.loads(file.read_text())
    assert tuple(stored) == KEYS
    assert [list(row) for row in stored["rows"]] == [FIELDS, FIELDS]
    assert stored["rows"][0]["ceiling"] is None
    assert stored["rows"][1]["value"] is None
    assert {"cpu", "cores", "threads", "gpu"} <= stored["machine"].keys()
    assert stored["git"].keys() == {"commit", "dirty"}
    assert list(file.parent.iterdir()) == [file]


def test_two_rows_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two rows named a"):
        record("engine", [Row("a", 1.0, "s"), Row("a", 2.0, "s")], {})
