"""The sampler draws from the filtered distribution, and each row minds its own business."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from workbench.core import SamplingRows
from workbench.engine.sampling import sample, uniform
from workbench.errors import StepError


def make_rows(count: int, **columns: object) -> SamplingRows:
    """`count` rows at temperature 1 without filters, seeds and positions all different."""
    rows = SamplingRows(
        rows=np.arange(count),
        positions=np.arange(count) + 3,
        seeds=np.arange(count).astype(np.uint64) * np.uint64(977),
        temperature=np.ones(count),
        top_k=np.zeros(count, np.int64),
        top_p=np.ones(count),
        min_p=np.zeros(count),
        logprobs=np.full(count, -1),
    )
    changed = {
        name: np.full(count, value, getattr(rows, name).dtype) for name, value in columns.items()
    }
    return replace(rows, **changed)


def take(rows: SamplingRows, at: NDArray[np.int64]) -> SamplingRows:
    return SamplingRows(**{f.name: getattr(rows, f.name)[at] for f in fields(rows)})


def repeated(logits: list[float], count: int) -> NDArray[np.float32]:
    return np.tile(np.array(logits, np.float32), (count, 1))


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = np.array([[0, 3, 3, 1], [5, 1, 5, 5]], np.float32)
    tokens, logprobs = sample(logits, make_rows(2, temperature=0.0))
    assert tokens.tolist() == [1, 0]
    assert logprobs == ()


def test_the_token_is_the_inverse_cdf_of_the_noise() -> None:
    """Computed one row at a time, in plain Python floats."""
    logits = np.random.default_rng(0).standard_normal((50, 9)).astype(np.float32) * 3
    rows = make_rows(50, temperature=0.7)
    tokens, _ = sample(logits, rows)
    noise = uniform(rows.seeds, rows.positions)
    for row in range(50):
        weights = np.exp((logits[row].astype(np.float64) - logits[row].max()) / 0.7)
        assert tokens[row] == np.searchsorted(np.cumsum(weights) / weights.sum(), noise[row])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature: float) -> None:
    """20,000 draws from five tokens, within four standard errors."""
    count, logits = 20_000, [1.0, 0.0, -1.0, 2.0, 0.5]
    tokens, _ = sample(repeated(logits, count), make_rows(count, temperature=temperature))
    expected = np.exp(np.array(logits) / temperature)
    expected /= expected.sum()
    seen = np.bincount(tokens, minlength=5) / count
    assert (abs(seen - expected) < 4 * np.sqrt(expected * (1 - expected) / count) + 1e-9).all()


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {0}),  # 0.5 is reached by the first
        ({"top_p": 0.51}, {0, 1}),
        ({"min_p": 0.49}, {0, 1}),  # 0.25 is half of 0.5
        ({"min_p": 0.51}, {0}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 2}),  # of 7/8, 0.9 needs all three
        ({"top_k": 3, "top_p": 0.9, "min_p": 0.3}, {0, 1}),
    ],
)
def test_filters_keep_what_they_say(filters: dict[str, float], kept: set[int]) -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8: every kept token is drawn, no other."""
    count = 400
    logits = np.log2([0.5, 0.25, 0.125, 0.125]) * np.log(2)
    tokens, _ = sample(repeated(logits.tolist(), count), make_rows(count, **filters))
    assert set(tokens.tolist()) == kept


def test_top_k_keeps_the_lowest_ids_of_equal_tokens() -> None:
    tokens, _ = sample(repeated([1.0, 1.0, 1.0, 1.0], 300), make_rows(300, top_k=2))
    assert set(tokens.tolist()) == {0, 1}


def test_a_row_does_not_depend_on_the_others() -> None:
    """Mixed greedy, warm and filtered rows give the same alone, in pairs and in another order."""
    draw = np.random.default_rng(1)
    logits = draw.standard_normal((40, 101)).astype(np.float32) * 4
    rows = replace(
        make_rows(40, logprobs=3),
        temperature=draw.choice([0.0, 0.5, 1.0], 40),
        top_k=draw.choice([0, 5], 40),
        top_p=draw.choice([0.8, 1.0], 40),
        min_p=draw.choice([0.0, 0.05], 40),
    )
    tokens, logprobs = sample(logits, rows)
    for at in (draw.permutation(40), *np.arange(40)[:, None]):
        some, their_logprobs = sample(logits[at], take(rows, at))
        assert some.tolist() == tokens[at].tolist()
        assert list(their_logprobs) == [logprobs[i] for i in at]


def test_noise_just_below_one_never_leaves_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token with a weight is taken, not one that a filter removed."""
    almost = np.nextafter(1.0, 0.0)
    monkeypatch.setattr("workbench.engine.sampling.uniform", lambda s, p: np.full(len(s), almost))
    logits = repeated([3.0, 2.9, 0.1, -50.0], 3)
    assert sample(logits, make_rows(3, top_k=2))[0].tolist() == [1, 1, 1]


def test_logprobs_are_of_the_unfiltered_distribution() -> None:
    """The chosen token's and the k most likely ones', whatever temperature and filters."""
    logits = np.array([[0.0, 1.0, 2.0, 3.0]], np.float32)
    expected = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    tokens, logprobs = sample(logits, make_rows(1, temperature=5.0, top_k=1, logprobs=2))
    assert tokens.tolist() == [3]
    assert logprobs[0] == pytest.approx({3: expected[3], 2: expected[2]})
    _, only_chosen = sample(logits, make_rows(1, temperature=0.0, logprobs=0))
    assert only_chosen[0] == pytest.approx({3: expected[3]})
    some_want = replace(make_rows(2), logprobs=np.array([-1, 1]))
    assert sample(np.tile(logits, (2, 1)), some_want)[1][0] is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_whose_logits_are_not_finite_is_named_and_never_sampled(
    temperature: float, bad: float
) -> None:
    """A NaN anywhere in a row is found; a token ruled out by -inf is none of that."""
    logits = repeated([0.0, 1.0, 2.0, -np.inf], 5)
    assert (sample(logits, make_rows(5, temperature=temperature))[0] < 3).all()
    logits[3, 1] = bad
    rows = replace(make_rows(5, temperature=temperature), rows=np.arange(5) * 10)
    with pytest.raises(StepError, match="1 of 5 rows are not finite") as raised:
        sample(logits, rows)
    assert raised.value.rows == (30,)
