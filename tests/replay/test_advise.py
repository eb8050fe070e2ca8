"""Advice on a pair's memory: the share it recommends, where its numbers are from, its refusals."""

import json

import pytest

import workbench
from workbench.errors import ConfigError, ModelError, OutOfMemory
from workbench.replay import advise as module
from workbench.replay.advise import NEAR, NO_LIMIT, SHARE, Advice, Pair, Question

TINY = ("tiny-solver", "tiny-prm")
SMALL = {"device": "h100", "total": "28MiB", "n": 8, "in_flight": 16, "max_num_seqs": 64}
SMALL |= {"max_num_batched_tokens": 256, "max_model_len": 2048}


@pytest.fixture(scope="module", autouse=True)
def shallow():
    """Searches of four rounds, whose replays take a quarter of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_ROUNDS", 4)
        yield


@pytest.fixture(scope="module")
def found() -> Advice:
    return workbench.advise(*TINY, **SMALL)


def test_the_recommended_share_is_within_two_percent_of_the_best_of_all(found) -> None:
    """Against replays of every second hundredth of an axis with a peak inside; its whole plateau is
    as good.
    """
    pair, (low, high) = Pair(Question(*TINY, **SMALL)), found.plateau
    shares = sorted({*pair.axis[::2], found.recommended, low, high})
    seconds = {share: pair.at(share) for share in shares}
    best = min(seconds.values())
    assert min(seconds[shares[0]], seconds[shares[-1]]) > 1.05 * best, "the axis is too flat"
    assert low <= found.recommended <= high
    assert max(each for share, each in seconds.items() if low <= share <= high) <= best / (1 - NEAR)


def test_each_number_is_a_row_of_the_replays(found) -> None:
    """At most six shares, the ends and 0.5/0.5 (or why it does not fit) among them; gains are
    against the recommended share; a cache that lacks tokens is one that computes some again.
    """
    rows = found.replays[found.replays["what"] == SHARE].set_index("llm_share")
    assert len(rows) <= 6 and {found.recommended, *found.plateau} <= {*rows.index}
    assert rows.index.min() < found.feasible[0] + 0.01 and found.feasible[1] - 0.01 < max(
        rows.index
    )
    assert "An LLM share of 0.5 leaves tiny-prm" in found.notes[0]
    assert rows["against_best"].max() == 0 and found.replays["what"].iloc[0] == NO_LIMIT
    for role in ("llm", "prm"):
        again = rows[f"{role}_computed_again"] > 0.02 * rows[f"{role}_computed_again"].max()
        assert (rows[f"{role}_lacks_tokens"] > 0).equals(again)
    changed = ["max_num_seqs 32", "max_num_seqs 128", "in_flight 8", "n 4"]
    assert sorted(found.changes["what"]) == sorted(changed)
    one = found.replays.set_index("what").loc["n 4", "tokens_per_s"]
    gain = found.changes.set_index("what").loc["n 4", "tokens_per_s"]
    assert gain == pytest.approx(one / rows.loc[found.recommended, "tokens_per_s"] - 1)
    assert (
        json.loads(json.dumps(found.to_dict(), allow_nan=False))["replays"][0]["llm_share"] is None
    )


def test_flags_are_the_recommended_share_in_each_engines_terms() -> None:
    """vLLM's of the whole device, SGLang's of what is free as it starts; KV in bytes and tokens."""
    asked = Question("llama-3.2-1b", "llama-3.1-8b-prm", "a100-40", "36GiB", n=1, in_flight=1)
    pair = Pair(asked)
    llm, prm = pair.needs
    vllm, sglang = module.start_up(pair, 0.25).values()
    assert vllm[1]["model"] == "RLHFlow/Llama3.1-8B-PRM-Deepseek-Data"
    assert [each["gpu-memory-utilization"] for each in vllm] == [0.225, 0.675]
    assert [each["max-model-len"] for each in vllm] == [4096, 4096]
    blocks = pair.blocks(0.25)
    assert vllm[1]["kv-cache-memory-bytes"] == blocks[1] * prm.block
    assert prm.weights + prm.activations + blocks[1] * prm.block <= 27 << 30
    assert sglang[0]["max-total-tokens"] == 16 * blocks[0]
    static = [each["mem-fraction-static"] for each in sglang]
    first, second = (need.weights + n * need.block for need, n in zip((llm, prm), blocks))
    assert static[0] == pytest.approx(first / (40 << 30), abs=1e-4)
    assert static[1] == pytest.approx(second / (31 << 30), abs=1e-4)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"device": "h10"}, ConfigError, "Did you mean 'h100'"),
        ({"n": 65}, ConfigError, r"Question.n is 65; allowed: in \[1, 64\]"),
        ({"n": 0}, ConfigError, r"Question.n is 0; allowed"),
        ({"n": 64, "in_flight": 96}, ConfigError, "6,144 beams; allowed: at most 3,072"),
        ({"shares": 0.3}, ConfigError, "advise has no setting 'shares'"),
        ({"llm": "tiny-solvr"}, ModelError, "Did you mean 'tiny-solver'"),
        ({"llm_share": 0.6}, OutOfMemory, r"0.6 leaves tiny-prm .* are missing. Feasible in 28.0"),
        ({"llm_share": 1.2}, ConfigError, "llm_share is 1.2; allowed"),
        ({"max_model_len": 256}, ConfigError, "max_model_len is 256; the replayed search has req"),
        ({"device": "rtx-4090", "total": "25GiB"}, OutOfMemory, "RTX 4090 has 24.0 GiB"),
        (
            {"llm": "llama-3.2-1b", "prm": "llama-3.1-8b-prm", "total": "16GiB", "block_size": 16},
            OutOfMemory,
            r"llama-3.2-1b and llama-3.1-8b-prm lack \d.\d GiB: weights",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(given, error, said) -> None:
    """With what is allowed, or the bytes that lack, before anything is replayed."""
    llm, prm = given.pop("llm", TINY[0]), given.pop("prm", TINY[1])
    with pytest.raises(error, match=said):
        workbench.advise(llm, prm, **SMALL | given)
