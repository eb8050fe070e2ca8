"""Stops: ids, end of sequence, and strings across token borders; the pre-filter misses nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core import SamplingParams, Sequence
from workbench.engine.sampling import StopChecker

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


def test_strings_within_and_across_tokens() -> None:
    assert reason([1, 4], stop=("\n\n",)) == "stop"
    assert reason([3, 3], stop=("\n\n",)) == "stop"
    assert reason([6, 3], stop=("\n\n",)) == "stop"  # "b\n" + "\n"
    assert reason([7], stop=("\n\n",)) == "stop"  # more text after it in the token
    assert reason([6, 7], stop=("\n\nx",)) == "stop"
    assert reason([9, 10], stop=("é",)) == "stop"  # a character in two tokens
    assert reason([3, 1, 3], stop=("\n\n",)) is None
    assert reason([4, 1], stop=("\n\n",)) is None  # complete before the last token


def test_prompts_never_stop_a_sequence() -> None:
    """Half of the stop string in the prompt does not count."""
    checker = StopChecker(PIECES, {EOS})
    checker.add(5, SamplingParams(stop=("\n\n",)))
    assert checker.finish_reason(sequence([3], prompt=(3,))) is None
    assert checker.finish_reason(sequence([], prompt=(4,))) is None


def test_conditions_are_counted_and_forgotten() -> None:
    """A condition is watched while a request has it, and stops that request alone."""
    checker = StopChecker(PIECES, {EOS})
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
