"""From logits to tokens: the noise, the sampler's distribution, and when a sequence stops."""

import tracemalloc
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from workbench.core import SamplingParams, SamplingRows, Sequence
from workbench.engine import executor
from workbench.engine.sampling import StopChecker, mix, rows_of, uniform
from workbench.errors import StepError
from workbench.kernels import Kernels
from workbench.kernels.cpu import CpuKernels

# -- noise: a fixed function of seed and position, even and without visible pattern --


def test_known_answers() -> None:
    """splitmix64's published stream; recorded runs replay only while the noise stays as it is."""
    state = np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    stream = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert mix(state).tolist() == [*stream, 16408922859458223821]
    seeds, positions = np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 7, 100], np.int64)
    frozen = [0.6524484863740322, 0.24696520214533768, 0.3430236274313533]
    assert uniform(seeds, positions).tolist() == frozen


def test_uniform_is_even_and_uncorrelated() -> None:
    """Along positions of one seed and along seeds at one position: mean, range, neighbours."""
    count = 20_000
    numbers = np.arange(count)
    for draws in (
        uniform(np.full(count, 7, np.uint64), numbers),
        uniform(numbers.astype(np.uint64), np.full(count, 7)),
    ):
        assert 0 <= draws.min() < 1e-3
        assert 1 - 1e-3 < draws.max() < 1
        assert abs(draws.mean() - 0.5) < 4 / np.sqrt(12 * count)
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 4 / np.sqrt(count)
        assert np.histogram(draws, 10)[0].std() < 4 * np.sqrt(count / 10)


# -- the sampler: every row minds its own business --


def make_rows(count: int, **columns: object) -> SamplingRows:
    """`count` rows at temperature 1 without filters, seeds and positions all different."""
    rows = rows_of(SamplingParams(), np.arange(count), np.arange(count) + 3)
    rows = replace(rows, seeds=np.arange(count).astype(np.uint64) * np.uint64(977))
    dtypes = {name: getattr(rows, name).dtype for name in columns}
    return replace(rows, **{k: np.full(count, v, dtypes[k]) for k, v in columns.items()})


def take(rows: SamplingRows, at: NDArray[np.int64]) -> SamplingRows:
    return SamplingRows(**{f.name: getattr(rows, f.name)[at] for f in fields(rows)})


BOTH = (CpuKernels(2), Kernels(torch.device("cpu"), torch.float32))


def sample(
    logits: NDArray[np.float32], rows: SamplingRows
) -> tuple[NDArray[np.int64], tuple[dict[int, float] | None, ...]]:
    """Tokens and log probabilities, the same of the compiled kernels and of the reference."""

    def of(kernels: Kernels) -> tuple[NDArray[np.int64], tuple[dict[int, float] | None, ...]]:
        return executor.sample(kernels, torch.from_numpy(logits), rows)

    (tokens, logprobs), (others, their_logprobs) = map(of, BOTH)
    assert tokens.tolist() == others.tolist()
    for ours, theirs in zip(logprobs, their_logprobs, strict=True):
        assert ours == (theirs if theirs is None else pytest.approx(theirs, abs=1e-5))
    return tokens, logprobs


def repeated(logits: list[float], count: int) -> NDArray[np.float32]:
    return np.tile(np.array(logits, np.float32), (count, 1))


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = np.array([[0, 3, 3, 1], [5, 1, 5, 5]], np.float32)
    tokens, logprobs = sample(logits, make_rows(2, temperature=0.0))
    assert tokens.tolist() == [1, 0]
    assert logprobs == ()


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2}),
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
    """Probabilities 1/2, 1/4, 1/8, 1/8: every kept token is drawn, no other; equal ones by id."""
    count = 400
    logits = np.log2([0.5, 0.25, 0.125, 0.125]) * np.log(2)
    tokens, _ = sample(repeated(logits.tolist(), count), make_rows(count, **filters))
    assert set(tokens.tolist()) == kept


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


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("vocab", [17, 257, 3000, 49_152])
def test_filters_leave_the_same_of_large_vocabularies(vocab: int, spread: float) -> None:
    """Selected among many, many of them equal, as sorting them all would; alone and together."""
    draw, count = np.random.default_rng(vocab), 24
    logits = (draw.standard_normal((count, vocab)) * spread).astype(np.float32)
    logits[::2] = np.round(logits[::2] * 2) / 2
    rows = replace(
        make_rows(count),
        temperature=draw.choice([0.3, 0.8, 2.0], count),
        top_k=draw.choice([0, 1, 40, 300, 2000], count),
        top_p=draw.choice([0.02, 0.5, 0.95, 0.999, 1.0], count),
        min_p=draw.choice([0.0, 0.05, 1.0], count),
    )
    noise = uniform(rows.seeds, rows.positions)
    tokens, _ = sample(logits, rows)
    for row in range(count):
        wide = logits[row].astype(np.float64)
        weights = np.exp((wide - wide.max()) / rows.temperature[row])
        order = np.argsort(-weights, kind="stable")
        weights[order[int(rows.top_k[row]) or vocab :]] = 0
        if rows.top_p[row] < 1:
            reached = np.cumsum(weights[order])
            enough = int(np.searchsorted(reached, rows.top_p[row] * reached[-1])) + 1
            weights[order[enough:]] = 0
        weights[weights < rows.min_p[row]] = 0
        sums = np.cumsum(weights)
        assert tokens[row] == np.searchsorted(sums, noise[row] * sums[-1], side="right")


def test_logprobs_are_of_the_unfiltered_distribution() -> None:
    """The chosen token's and the k most likely ones', whatever temperature and filters."""
    logits = np.array([[0.0, 1.0, 2.0, 3.0]], np.float32)
    expected = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    tokens, logprobs = sample(logits, make_rows(1, temperature=5.0, top_k=1, logprobs=2))
    assert tokens.tolist() == [3]
    assert logprobs[0] == pytest.approx({3: expected[3], 2: expected[2]}, abs=1e-5)
    _, only_chosen = sample(logits, make_rows(1, temperature=0.0, logprobs=0))
    assert only_chosen[0] == pytest.approx({3: expected[3]}, abs=1e-5)
    some_want = replace(make_rows(2), logprobs=np.array([-1, 1]))
    assert sample(np.tile(logits, (2, 1)), some_want)[1][0] is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_whose_logits_are_not_finite_is_named_and_never_sampled(temperature, bad) -> None:
    """A NaN anywhere in a row is found; a token ruled out by -inf is none of that."""
    logits = repeated([0.0, 1.0, 2.0, -np.inf], 5)
    assert (sample(logits, make_rows(5, temperature=temperature))[0] < 3).all()
    logits[3, 1] = bad
    rows = replace(make_rows(5, temperature=temperature), rows=np.arange(5) * 10)
    for filters in ({}, {"top_p": np.full(5, 0.9)}):
        with pytest.raises(StepError, match="1 of 5 rows are not finite") as raised:
            sample(logits, replace(rows, **filters))
        assert raised.value.rows == (30,)


# -- stops: ids, and strings across token borders; the pre-filter misses nothing --

EOS = 0
PIECES = (b"", b"a", b"b", b"\n", b"\n\n", b"ab", b"b\n", b"\n\nx", "é".encode(), b"\xc3", b"\xa9")


def sequence(output: list[int], prompt: tuple[int, ...] = (1, 2), request_id: int = 5) -> Sequence:
    return Sequence(request_id, [*prompt, *output], len(prompt))


def reason(output: list[int], **params: object) -> str | None:
    checker = StopChecker(PIECES, {EOS})
    checker.add(5, SamplingParams(**params))  # type: ignore[arg-type]
    found = checker.finish_reason(sequence(output))
    assert found is None or checker.suspects(np.array(output[-1:]))[0]
    return found


def test_end_of_sequence_and_ids() -> None:
    assert reason([1, EOS]) == "eos"
    assert reason([1, EOS], ignore_eos=True) is None
    assert reason([EOS, 1]) is None  # only the newest token counts
    assert reason([1, 2], stop_token_ids=(2,)) == "stop"
    assert reason([1, 99], stop_token_ids=(99,)) == "stop"  # beyond the tokenizer's vocabulary


def test_conditions_are_counted_and_forgotten() -> None:
    """A condition is watched while a request has it, and stops that request alone."""
    checker = StopChecker(PIECES, {EOS})
    checker.add(5, SamplingParams(stop=("\n\n",)))
    assert checker.finish_reason(sequence([3], prompt=(3,))) is None, "half of it is the prompt's"
    assert checker.finish_reason(sequence([], prompt=(4,))) is None
    a, b = np.array([1]), np.array([2])
    checker.add(1, SamplingParams(stop=("a",)))
    checker.add(2, SamplingParams(stop=("a",), stop_token_ids=(2,)))
    checker.remove(1)
    checker.remove(1)
    assert checker.suspects(a)[0]
    checker.add(3, SamplingParams())
    assert checker.finish_reason(sequence([1], request_id=3)) is None
    assert checker.finish_reason(sequence([1], request_id=77)) is None
    checker.remove(2)
    assert not checker.suspects(a)[0]
    assert not checker.suspects(b)[0]
    assert checker.suspects(np.array([EOS, 5000])).tolist() == [True, False]


def test_the_tables_of_stop_strings_go_with_their_requests() -> None:
    """Memory is that of the stop strings in use and a few more, whatever came before."""
    checker = StopChecker([b"", *(b"x%d" % i for i in range(4096))], {EOS})

    def held_after(numbers: range) -> int:
        for number in numbers:
            checker.add(number, SamplingParams(stop=(f"{number}x",)))
            assert checker.suspects(np.array([1]))[0]
            checker.remove(number)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = held_after(range(32))
        assert held_after(range(32, 200)) < before + 4096 * 8
    finally:
        tracemalloc.stop()
    assert not checker.suspects(np.array([1]))[0]


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.binary(max_size=4).map(lambda b: bytes(x % 3 + 97 for x in b)), min_size=1),
    stop=st.text("abc", min_size=1, max_size=5),
)
def test_suspects_are_the_tokens_that_can_complete_a_stop(tokens: list[bytes], stop: str) -> None:
    """Those that hold it, or begin with an end of it, however often the stop came and went."""
    checker = StopChecker(tokens, ())
    ends = tuple(stop[start:].encode() for start in range(len(stop)))
    for number in range(3):
        checker.add(number, SamplingParams(stop=(stop,)))
        found = checker.suspects(np.arange(len(tokens)))
        assert found.tolist() == [ends[0] in t or t.startswith(ends) for t in tokens]
        checker.remove(number)
        for other in range(100, 110) if number else ():
            checker.add(other, SamplingParams(stop=(f"{other}",)))
            checker.remove(other)


def test_a_long_stop_takes_as_long_as_a_short_one() -> None:
    """Of its million ends only those that a token has room for are looked at."""
    checker = StopChecker([b"b", b"ab", b"a", b"abab", b"cab"], ())
    checker.add(1, SamplingParams(stop=("ab" * 500_000,)))
    assert checker.suspects(np.arange(5)).tolist() == [True, True, False, True, False]


@settings(max_examples=300, deadline=None)
@given(
    output=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12),
    stop=st.sampled_from(["a", "ab", "\n\n", "b\n\n", "\n\nx", "é", "aab"]),
)
def test_a_stop_is_found_with_the_token_that_completes_it(output: list[int], stop: str) -> None:
    """Against the plain definition: an occurrence ends within the last token."""
    checker = StopChecker(PIECES, ())
    checker.add(5, SamplingParams(stop=(stop,)))
    text, before = (b"".join(PIECES[t] for t in part) for part in (output, output[:-1]))
    needle = stop.encode()
    ends = [i + len(needle) for i in range(len(text)) if text.startswith(needle, i)]
    expected = any(end > len(before) for end in ends)
    assert (checker.finish_reason(sequence(output)) == "stop") == expected
    assert not expected or checker.suspects(np.array(output[-1:]))[0]
