"""The engine benchmark, on a CPU and as on a GPU: rows by name, ceilings, peers that drop out."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.bench import ceilings, engine, kernels, reenact
from workbench.bench.engine import TRANSFORMERS, EngineBench, Linears, Work, engine_rows
from workbench.bench.peers import PeerError
from workbench.bench.record import Ceiling, record
from workbench.errors import ConfigError
from workbench.models.registry import CONFIGS, model_spec, read_spec

SMALL = Work(1, 8, 4), Work(3, 8, 4), Work(1, 16)
MACHINE = Ceiling(flops_per_s=1e13, bytes_per_s=1e9, gemm_flops_per_s=1e12)


class Steady:
    """A contender of a fixed rate that may fail at its k-th measurement."""

    def __init__(self, rate, fails_at=None):
        self.rate, self.fails_at, self.seen = rate, fails_at, []

    def timed(self, prompts, new_tokens):
        self.seen.append((prompts.copy(), new_tokens))
        if len(self.seen) == self.fails_at:
            raise PeerError("out of luck")
        return self.rate, 1.0


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(engine, "WARM_UPS", (1, 2))
    monkeypatch.setattr(engine, "BFLOAT16", set())
    return EngineBench("dummy:tiny-solver", SMALL, 2)


def test_rows_pair_ours_with_each_peer_and_a_broken_one_has_none(bench):
    """Guards row names, pairing, and that one peer's failure costs nothing but its own rows."""
    rates = {"": 40.0, "+invariant": 30.0, "products": 50.0, TRANSFORMERS: 10.0, "vllm": 20.0}
    bench.contenders = {n: Steady(r) for n, r in rates.items()} | {"broken": Steady(1.0, 2)}
    bench.modes = ["", "+invariant"]
    bench.labels |= {"vllm": "vllm 1", "broken": "broken 2"}
    seen = {name: contender.seen for name, contender in bench.contenders.items()}
    with pytest.warns(UserWarning, match="Rows have no broken: out of luck"):
        found = bench.rates(Work(3, 8, 4))
    rows = {row.name: row for row in bench.rows("decode_b3", found, 80.0)}
    assert set(rows) == {f"decode_b3{name}" for name in ("", "+invariant", "@products", "@vllm")}
    fast = rows["decode_b3"]
    assert (fast.value, fast.ratio, fast.share_of_ceiling, fast.repeats) == (40.0, 4.0, 0.5, 2)
    assert rows["decode_b3+invariant"].ratio == 3.0
    assert rows["decode_b3@products"].ratio == 0.8
    assert (rows["decode_b3@vllm"].ratio, rows["decode_b3@vllm"].peer) == (2.0, "vllm 1")
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(seen[""], seen["vllm"]))
    assert [new for _, new in seen[""]] == [2, 4, 4], "a warm-up is shorter"


@pytest.mark.slow
def test_every_row_of_the_record_is_measured_on_a_small_input(monkeypatch, tmp_path):
    """Guards the names that the record is read by, and that each number is one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "CPU_WORKS", SMALL)
    monkeypatch.setattr(engine, "VOCABULARIES", (600,))
    monkeypatch.setattr(engine, "BFLOAT16", set())
    monkeypatch.setattr(ceilings, "PEAKS", 6)
    monkeypatch.setattr(ceilings, "WINDOWS", 15)
    rows = {row.name: row for row in engine.run(repeats=1, peers="none")}
    kinds = ("", "@products")
    assert list(rows) == [
        *(f"sample_{kind}{name}_600" for kind in ("", "flat_") for name in engine.SAMPLED),
        "tile_share_of_peak",
        *(f"decode_{batch}{kind}" for batch in ("b1", "b3") for kind in kinds),
        *("bookkeeping_share_b3", "paged_over_contiguous"),
        *(f"prefill_16{kind}" for kind in kinds),
        *("fma_flops_per_s", "gemm_flops_per_s", "read_bytes_per_s"),
        *("decode_b3+busy", "prefill_16+busy"),
    ]
    assert all(0 < row.share_of_ceiling <= 1 for row in rows.values() if row.ceiling is not None)
    assert all(row.value > 0 for row in rows.values())
    assert 0 < rows["bookkeeping_share_b3"].value < 1
    assert rows["prefill_16"].peer.startswith(TRANSFORMERS)


def test_paged_attention_stands_beside_what_torch_has_for_contiguous_keys(bench, monkeypatch):
    """Guards the peer, a layout that is chosen elsewhere; both read as many keys and values."""
    seen, real = [], kernels.scaled_dot_product_attention

    def attention(query, key, value, **settings):
        assert key.is_contiguous() and value.is_contiguous()
        seen.append((tuple(query.shape), tuple(key.shape), key.data_ptr()))
        return real(query, key, value, **settings)

    monkeypatch.setattr(kernels, "scaled_dot_product_attention", attention)
    spec, row = bench.spec, bench.paged_over_contiguous(Work(3, 8, 4))
    group = spec.heads // spec.kv_heads
    packed = (3, spec.kv_heads, group, spec.head_dim)
    assert {shape for shape, *_ in seen} == {(3, spec.heads, 1, spec.head_dim), packed}
    assert {shape for _, shape, _ in seen} == {(3, spec.kv_heads, 10, spec.head_dim)}
    assert len({place for *_, place in seen}) == spec.layers
    assert row.name == "paged_over_contiguous" and row.peer.startswith("torch's SDPA")
    assert row.ratio > 0 and row.repeats == 3 * bench.repeats
    assert not [name for name in bench.contenders if "contiguous" in name]


def test_the_rows_of_a_gpu_are_held_against_their_ceilings(bench):
    """Every row comes once, `transformers` beside it, and memory by part."""
    bench.on_cpu, bench.modes = False, ["", "+invariant"]
    bench.contenders["+invariant"] = bench.contenders[""]
    found = record("engine", engine_rows(bench, lambda **_: MACHINE), {})
    rows = {row["name"]: row for row in found["rows"]}
    for row in (rows["decode_b1"], rows["decode_b3+invariant"], rows["prefill_16"]):
        assert row["peer"].startswith(TRANSFORMERS) and row["ratio"] > 0
        assert row["share_of_ceiling"] == pytest.approx(row["value"] / row["ceiling"])
    assert 0 <= rows["bookkeeping_share_b3"]["value"] <= 1
    assert rows["read_bytes_per_s"]["value"] == MACHINE.bytes_per_s
    assert rows["memory_weights"]["value"] > rows["memory_other"]["value"] == 0
    assert not [name for name in rows if "busy" in name]


def test_a_ceiling_is_of_weights_and_contexts_or_of_operations(bench):
    """A step reads every matrix once, and keys and values of half grown contexts."""
    spec = bench.spec
    token = spec.kv_bytes_per_token(4)
    one, three = (batch / bench.ceiling(MACHINE, Work(batch, 8, 4)) for batch in (1, 3))
    assert three - one == pytest.approx(2 * (8 + 2) * token / 1e9)
    read = spec.parameters() - (2 * spec.layers + 1) * spec.hidden
    read -= 0 if spec.tied else spec.vocab * spec.hidden
    assert one == pytest.approx((4 * read + 10 * token) / 1e9, rel=0.05)
    slow = Ceiling(flops_per_s=1e9, bytes_per_s=1e12, gemm_flops_per_s=1e9)
    rest = 2 * spec.hidden * (spec.heads * spec.head_dim + 3 * spec.intermediate)
    seen_by_others = 4 * spec.heads * spec.head_dim * (15 * 16 // 2)  # of the last layer
    one_row_leaves = spec.flops(16, 0) - 15 * rest - seen_by_others
    assert bench.ceiling(slow, Work(1, 16)) == pytest.approx(16e9 / one_row_leaves)
    gpt2 = model_spec("gpt2")
    products = sum(weight.numel() for weight in Linears(replace(gpt2, layers=1, vocab=1)).layers)
    assert products == gpt2.hidden * (3 * gpt2.hidden + gpt2.hidden + 2 * gpt2.intermediate)
    linears = Linears(spec)
    assert sum(weight.numel() for weight in [*linears.layers, linears.head]) == read
    rows, seconds = linears.timed(np.zeros((4, 8), np.int64), 2)
    assert rows % 4 == 0 and seconds > 0


def test_without_a_gpu_it_is_refused_before_anything_is_measured(monkeypatch):
    """By name, with what to do instead; the record would say which type was used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"bench engine --device cuda measures a GPU.*--device"):
        next(engine.run("dummy:tiny-solver", device="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"device='cuda', and torch .* finds no CUDA device"):
        next(reenact.run(device="cuda"))
    assert engine.mode_of({"device": "cuda"})["dtype"] == "bfloat16"
    assert engine.mode_of({"device": "cpu"})["dtype"] == "float32"


def test_a_record_says_whether_peers_were_held_to_the_set(monkeypatch):
    """WORKBENCH_ISA alone holds our kernels only."""
    monkeypatch.setenv(engine.FORCED, "avx2")
    for variable, told in (("avx2", "as ours; "), ("avx512", "the host's best"), ("", "the host")):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", variable)
        assert engine.mode_of({"device": "cpu"})["peers_isa"].startswith(told)


@pytest.mark.parametrize("folder", sorted(CONFIGS.iterdir()), ids=lambda folder: folder.name)
def test_transformers_reads_every_config_of_the_package(folder: Path) -> None:
    """Else a model of true size would have no peer on a GPU."""
    transformers = pytest.importorskip("transformers")
    found, spec = transformers.AutoConfig.from_pretrained(folder), read_spec(folder)
    assert (found.num_hidden_layers, found.hidden_size) == (spec.layers, spec.hidden)
    if not spec.gpt2:  # whose positions are learned
        assert found.rope_parameters["rope_theta"] == spec.rope_theta


def test_rows_say_why_they_have_no_peer(bench, monkeypatch, tmp_path):
    """Of a peer that fails while it is measured, and of one that cannot be made: ours come."""
    bench.contenders = {"": Steady(40.0), TRANSFORMERS: Steady(10.0, 1)}
    with pytest.warns(UserWarning, match="no transformers: out of luck"):
        (row, *_) = bench.rows("decode_b1", bench.rates(Work(1, 8, 4)), 1e6)
    assert (row.value, row.peer) == (40.0, "no transformers: out of luck")
    assert (row.peer_value, row.ratio) == (None, None)
    pytest.importorskip("transformers")
    monkeypatch.setattr(engine, "find_model", lambda *_, **__: tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))  # of which family?
    with pytest.warns(UserWarning, match=r"no transformers: ValueError: .*model_type"):
        EngineBench("dummy:tiny-solver", SMALL, 1)
