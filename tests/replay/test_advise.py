"""Advice on a pair's memory: the share it recommends, where its numbers come from, what it refuses."""

import json

import pytest

import workbench
from workbench.errors import ConfigError, ModelError, OutOfMemory, PromptError
from workbench.replay.advise import NEAR, Advice, Pair, Question

SMALL = {"device": "h100", "n": 4, "in_flight": 4, "max_num_seqs": 32, "max_num_batched_tokens": 256}
SMALL |= {"max_model_len": 2048, "total": "28MiB"}
TINY = ("tiny-solver", "tiny-prm")


@pytest.fixture(scope="module")
def found() -> Advice:
    return workbench.advise(*TINY, **SMALL)


def test_the_recommended_share_is_the_best_of_all_within_two_percent(found) -> None:
    """Against an exhaustive replay over the axis, on which the worst share is much worse."""
    pair = Pair(Question(*TINY, **SMALL))
    seconds = {share: pair.at(share) for share in pair.axis}
    best = min(seconds.values())
    assert seconds[found.recommended] <= best / (1 - NEAR)
    assert max(seconds.values()) > 1.1 * best, "the axis is too easy"
    low, high = found.plateau
    inside = [each for share, each in seconds.items() if low <= share <= high]
    assert max(inside) <= best / (1 - NEAR)
    assert low <= found.recommended <= high
