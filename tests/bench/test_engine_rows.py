"""The engine benchmark: its rows by name, the share of the ceiling, and peers that drop out."""

import warnings

import numpy as np
import pytest

from workbench.bench import engine, lineup
from workbench.bench.contenders import Linears
from workbench.bench.lineup import PRODUCTS, TRANSFORMERS, Sizes
from workbench.bench.peer_process import PeerError
from workbench.models.registry import model_spec


class Steady:
    """A contender of a fixed rate that may fail at its k-th measurement."""

    def __init__(self, rate, fails_at=None):
        self.rate, self.fails_at, self.seen = rate, fails_at, []

    def decode(self, prompts, new_tokens):
        self.seen.append((prompts.copy(), new_tokens))
        if len(self.seen) == self.fails_at:
            raise PeerError("out of luck")
        return self.rate


class Faked:
    """A lineup of steady contenders."""

    def __init__(self, contenders):
        self.contenders, self.dropped = contenders, []
        self.spec = model_spec("tiny-solver")
        self.labels = {TRANSFORMERS: TRANSFORMERS, PRODUCTS: "its products", "vllm": "vllm 1"}
        self.labels |= {"broken": "broken 2"}
        self.modes = {"": "", "+invariant": "+invariant"}

    def drop(self, name, reason):
        self.dropped.append((name, str(reason)))
        self.labels.pop(name)


def test_rows_pair_ours_with_each_peer_and_a_broken_one_has_none():
    """Guards row names, pairing, and that one peer's failure costs nothing but its own rows."""
    rates = {"": 40.0, "+invariant": 30.0, PRODUCTS: 50.0, TRANSFORMERS: 10.0, "vllm": 20.0}
    contenders = {name: Steady(rate) for name, rate in rates.items()} | {"broken": Steady(1.0, 2)}
    faked = Faked(contenders)
    random = np.random.default_rng(0)
    rows = {row.name: row for row in engine._decode_rows(16, faked, 3, random, busy="+busy")}
    names = ["", "+invariant", "@products", "@vllm"]
    assert list(rows) == [f"decode_b16+busy{name}" for name in names]
    fast = rows["decode_b16+busy"]
    assert (fast.value, fast.ratio, fast.share_of_ceiling, fast.repeats) == (40.0, 4.0, None, 3)
    assert rows["decode_b16+busy+invariant"].ratio == 3.0
    assert rows["decode_b16+busy@products"].ratio == 0.8
    rows = {name.replace("+busy", ""): row for name, row in rows.items()}
    assert (rows["decode_b16@vllm"].ratio, rows["decode_b16@vllm"].peer) == (2.0, "vllm 1")
    assert faked.dropped == [("broken", "out of luck")]
    first, others = contenders[""].seen, contenders["vllm"].seen
    assert all(np.array_equal(mine[0], theirs[0]) for mine, theirs in zip(first, others))
    assert [new for _, new in first] == [engine.WARM_UP_TOKENS, 64, 64, 64]


@pytest.mark.slow
def test_every_row_of_the_record_is_measured_on_a_small_input(monkeypatch, tmp_path):
    """Guards the names that the record is read by, and that each number is one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "SIZES", Sizes(sequences=2, prompt=8, new=4, prefill=16))
    monkeypatch.setattr(engine, "BATCHES", (1, 2))
    monkeypatch.setattr(engine, "BUSY_BATCHES", (1,))
    rows = {row.name: row for row in engine.run(repeats=1, peers="none")}
    kinds = ("", "+invariant", "@products")
    assert list(rows) == [
        "tile_share_of_peak",
        *(f"decode_{batch}{kind}" for batch in ("b1", "b2") for kind in kinds),
        *("bookkeeping_share_b2", "bookkeeping_share_b2+invariant", "paged_over_contiguous"),
        *(f"prefill_16{kind}" for kind in kinds),
        *("fma_flops_per_s", "gemm_flops_per_s", "read_bytes_per_s"),
        *(f"{name}+busy{kind}" for name in ("decode_b1", "prefill_16") for kind in kinds[:2]),
    ]
    assert all(0 < row.share_of_ceiling <= 1 for row in rows.values() if row.ceiling is not None)
    assert all(row.value > 0 for row in rows.values())
    assert 0 < rows["bookkeeping_share_b2"].value < 1
    assert rows["prefill_16"].peer == TRANSFORMERS


def test_a_peer_that_is_missing_is_left_out_with_a_warning(monkeypatch, tmp_path):
    """Guards that a machine without peers measures all the same, and says what is absent."""
    monkeypatch.setattr(lineup, "PEERS_FOLDER", tmp_path)
    found = object.__new__(lineup.Lineup)
    found.contenders = {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found.bring("vllm,llama.cpp")
    assert found.contenders == {}
    assert [str(w.message).split(":")[0] for w in told] == ["No rows @vllm", "No rows @llama.cpp"]


def test_the_ceiling_multiplies_by_every_weight_of_the_model():
    """Guards that the ceiling is of the same shapes: as many products as the model has."""
    spec = model_spec("tiny-solver")
    linears = Linears(spec)
    elements = sum(weight.numel() for weight in [*linears._layers, linears._head])
    norms = spec.hidden * (2 * spec.layers + 1)
    assert elements == spec.parameters() - norms + (0 if spec.tied else -spec.vocab * spec.hidden)
    assert linears.decode(np.zeros((4, 1), np.int64), 2) > 0
