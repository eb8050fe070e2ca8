"""Tokens chosen on the device are those of the sampler, row by row, and only ids leave it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux)")

from tests.kernels.synthetic import KINDS
from workbench.kernels.reference import Kernels, leave_out
from workbench.kernels.triton import rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
    _, finite = rows.choose(leave_out(*asked[:2], filters), *asked[1:]).cpu().numpy()
    assert finite.tolist() == [1, 0, 1]
