"""A scheduler without a KV cache: every sequence anew at each step, and the same tokens."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake_executor import Rig, expected_logits, expected_tokens
from workbench.engine.static_batch import RecomputingScheduler

PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=12)


class Recomputing(Rig):
    """It over blocks of 4."""

    kind, caching = RecomputingScheduler, False


class Forgetful(Recomputing):
    """With memory that holds nothing from one step to the next."""

    def step(self):
        self.executor.memory.clear()
        return super().step()


def test_each_token_computes_its_whole_sequence() -> None:
    rig = Forgetful()
    rig.add(5, max_tokens=4)
    rig.add(2, max_tokens=2)
    rig.run()
    assert [rig.rows(plan) for plan, _ in rig.plans] == [[5, 2], [6, 3], [7], [8]]
    assert rig.finished == {1: "length", 2: "length"}


def test_a_sequence_longer_than_a_step_goes_on_in_the_next() -> None:
    """What a token computes of its own sequence, in two chunks, it does not compute twice."""
    rig = Recomputing(max_num_batched_tokens=8)
    rig.add(10, max_tokens=2)
    rig.run()
    assert [rig.rows(plan) for plan, _ in rig.plans] == [[8], [2], [8], [3]]


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(PROMPT, st.integers(0, 6), st.booleans()), min_size=1, max_size=9),
    blocks=st.integers(5, 40),
    seqs=st.integers(1, 4),
    extra=st.integers(0, 20),
)
def test_tokens_and_logits_are_those_of_each_request_alone(requests, blocks, seqs, extra) -> None:
    """max_tokens 0 stands for a scoring request of the prompt; few blocks preempt."""
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": seqs + extra}
    rig = Recomputing(blocks, max_model_len=20, **limits)
    sequences = [
        rig.add(0, max_tokens, tokens, ignore_eos)
        if max_tokens
        else rig.add_score(tokens, (len(tokens) - 1,))
        for tokens, max_tokens, ignore_eos in requests
    ]
    rig.run()
    for sequence, (tokens, max_tokens, ignore_eos) in zip(sequences, requests, strict=True):
        if max_tokens:
            sampled = expected_tokens(tokens, sequence.request_id, max_tokens, ignore_eos)
            assert sequence.token_ids == tokens + sampled
        else:
            wanted = expected_logits(tokens, sequence.score.positions, (1, 2))
            assert {p: list(v) for p, v in sequence.score_rows.items()} == wanted
    assert rig.cache.num_active == 0
