"""Tokens chosen on the device are those of the sampler, row by row, and only ids leave it."""

from itertools import product

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")

from tests.kernels.synthetic import KINDS
from workbench.kernels.reference import Kernels
from workbench.kernels.triton import TritonKernels, rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


NOISE = [0.03, 0.6, float(np.nextafter(1.0, 0.0))]
SHAPES = [*product((4096, 9000), ("peaked", "whole")), (1, "equal"), (50, "masked"), (50, "flat")]
SHAPES += [(5000, kind) for kind in ("flat", "equal", "one above", "masked")]
CASES = [(*shape, torch.float32) for shape in SHAPES]
CASES += [(4096, "whole", torch.float16), (50, "masked", torch.float16)]  # interpreted, slow
HALVES = product(SHAPES, (torch.float16, torch.bfloat16))
CASES += [pytest.param(*shape, dtype, marks=pytest.mark.gpu) for shape, dtype in HALVES]


def given(logits: np.ndarray, temperature: list[float], noise: list[float], dtype=torch.float32):
    """On the device, rows apart from each other as a buffer's are."""
    room = torch.full((len(logits), logits.shape[1] + 3), torch.nan, dtype=dtype)
    room[:, : logits.shape[1]] = torch.from_numpy(logits)
    return (
        room.to(DEVICE)[:, : logits.shape[1]],
        torch.tensor(temperature, dtype=torch.float64, device=DEVICE),
        torch.tensor(noise, dtype=torch.float64, device=DEVICE),
    )


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("vocab", [1, 50, 4096, 9000])
def test_tokens_are_the_sampler_s(vocab: int, dtype: torch.dtype) -> None:
    """Greedy and drawn, in vocabularies of less than a piece, one, and several."""
    random = np.random.default_rng(vocab)
    drawn_logits = torch.from_numpy(random.standard_normal((8, vocab)) * 3)
    logits = drawn_logits.to(dtype).float().numpy()
    temperature = [0.0, 0.8, 1.0, 0.5, 0.0, 2.0, 1.0, 1.0]
    noise = [0.5, *random.random(5).tolist(), 0.0, np.nextafter(1.0, 0.0)]
    tokens, finite = rows.choose(*given(logits, temperature, noise, dtype)).cpu().numpy()
    twin = Kernels(DEVICE, torch.float32)
    expected = twin.choose(*given(logits, temperature, noise, dtype)).tolist()
    assert [tokens.tolist(), finite.tolist()] == expected
    assert expected[1] == [1] * 8
    assert expected[0][::4] == logits[::4].argmax(axis=1).tolist()
    alone = given(logits[1:2], temperature[1:2], noise[1:2], dtype)
    assert int(rows.choose(*alone)[0, 0]) == expected[0][1], "a row's token is its own"


def test_the_lowest_of_equal_logits_is_taken() -> None:
    """Within a piece and across pieces."""
    logits = np.zeros((2, 9000), np.float32)
    logits[0, [4100, 17, 8999]] = 5
    logits[1, [8000, 4096]] = 5
    tokens, _ = rows.choose(*given(logits, [0.0, 0.0], [0.0, 0.0])).cpu().numpy()
    assert tokens.tolist() == [17, 4096]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 4500])
def test_rows_that_are_not_finite_are_said(bad: float, place: int) -> None:
    """The others are chosen as ever."""
    logits = np.zeros((3, 5000), np.float32)
    logits[1, place] = bad
    logits[2, 7] = 1
    tokens, finite = rows.choose(*given(logits, [0.0, 1.0, 0.0], [0.5] * 3)).cpu().numpy()
    assert finite.tolist() == [1, 0, 1]
    assert tokens[2] == 7
    asked = given(logits, [1.0] * 3, [0.5] * 3)
    filters = torch.tensor([[0, 0.5, 0]] * 3, dtype=torch.float64, device=DEVICE)
    _, finite = rows.choose(*asked, filters).cpu().numpy()
    assert finite.tolist() == [1, 0, 1]


def shaped(kind: str, count: int, vocab: int, dtype: torch.dtype) -> np.ndarray:
    """Logits with and without equal ones, some with most weight on a few, some all alike."""
    random = np.random.default_rng(vocab)
    logits = random.standard_normal((count, vocab))
    if kind == "flat":
        logits = 0.5 + logits * 1e-3
    elif kind == "equal":
        logits = np.zeros((count, vocab))
        logits[:, ::5] = -0.0
    elif kind == "one above":
        logits = np.where(np.arange(vocab) == vocab // 2, 8.0, np.round(logits * 2) / 1024)
    elif kind == "masked":
        logits[random.random((count, vocab)) < 0.4] = -np.inf
        logits[::2] = np.maximum(logits[::2], -1e4)  # in float16 too
        logits[:, vocab // 3] = 4
    else:
        logits = np.round(logits * 3) if kind == "whole" else logits * 3
    return torch.from_numpy(logits).to(dtype).float().numpy()


def differing(
    logits: np.ndarray, temperature: list[float], filters: list[list[float]], dtype=torch.float32
) -> list[list[float]]:
    """Filters of the rows whose token, with any of the noises, is not the twin's."""
    own = torch.tensor(filters, dtype=torch.float64, device=DEVICE)
    wrong: list[list[float]] = []
    for noise in NOISE:
        asked = given(logits, temperature, [noise] * len(logits), dtype)
        found = TritonKernels(DEVICE, dtype).choose(*asked, own)
        expected = Kernels(DEVICE, torch.float32).choose(*asked, own)
        wrong += own[(found != expected).any(dim=0)].tolist()
    return wrong


@pytest.mark.parametrize(("vocab", "kind", "dtype"), CASES, ids=str)
def test_filters_keep_what_the_sampler_s_keep(vocab: int, kind: str, dtype: torch.dtype) -> None:
    """Each by itself and all together, rows without any and greedy ones beside them."""
    filters = [
        [0, 1, 0], [1, 1, 0], [5, 1, 0], [128, 1, 0], [129, 1, 0], [max(vocab - 1, 1), 1, 0],
        [vocab + 7, 1, 0], [0, 0.9, 0], [0, 1e-9, 0], [0, 1 - 1e-12, 0], [0, 1, 0.2], [0, 1, 1],
        [40, 0.5, 0.01], [3000, 0.95, 0], [2, 0.3, 0.5], [60, 0.8, 0],
    ]  # fmt: skip
    temperature = [1.0, 0.7, 2.0, 1.0, 0.01, 1.0, 0.5, 0.8] * 2
    temperature[-1] = 0.0
    assert not differing(shaped(kind, 16, vocab, dtype), temperature, filters, dtype)


def test_of_equal_logits_at_the_cut_the_lowest_ids_stay() -> None:
    """By number and by weight, where ties are spread over pieces; each token once is drawn."""
    logits = np.full((2, 9000), -30.0, np.float32)
    ties = [8990, 5000, 4095, 4096, 3]
    logits[:, ties] = 1.0
    filters = torch.tensor([[3, 1, 0], [0, 0.5, 0]], dtype=torch.float64, device=DEVICE)
    drawn = [
        rows.choose(*given(logits, [1.0] * 2, [noise] * 2), filters)[0].tolist()
        for noise in (0.1, 0.5, 0.9)
    ]
    assert drawn == [[token] * 2 for token in sorted(ties)[:3]]


def test_a_filtered_token_does_not_depend_on_the_other_rows() -> None:
    """Alone, or beside rows with other filters."""
    logits = shaped("peaked", 3, 5000, torch.float32)
    filters = torch.tensor([[0, 1, 0], [9, 0.8, 0.1], [0, 0.6, 0]], dtype=torch.float64).to(DEVICE)
    together = rows.choose(*given(logits, [1.0] * 3, [0.4] * 3), filters)[0].tolist()
    for row in range(3):
        alone = given(logits[row : row + 1], [1.0], [0.4])
        assert int(rows.choose(*alone, filters[row : row + 1])[0, 0]) == together[row]
    assert int(rows.choose(*given(logits[:1], [1.0], [0.4]))[0, 0]) == together[0]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("kind", ["peaked", "whole", "equal", "one above"])
@pytest.mark.parametrize("vocab", [1, 50, 9000])
def test_log_probabilities_are_the_sampler_s(vocab: int, kind: str, dtype: torch.dtype) -> None:
    """The ids of the largest, of equal ones the lowest; and what to subtract, row by row."""
    logits = given(shaped(kind, 3, vocab, dtype), [1.0], [0.0], dtype)[0]
    kernels, twin = TritonKernels(DEVICE, dtype), Kernels(DEVICE, torch.float32)
    for most in {0, 1, min(20, vocab)}:
        ids, totals = kernels.likely(logits, most)
        expected, about = twin.likely(logits, most)
        assert ids.tolist() == expected.tolist()
        torch.testing.assert_close(totals, about, rtol=0, atol=1e-5)
    assert kernels.likely(logits[1:2], 1)[1].item() == totals[1].item()
