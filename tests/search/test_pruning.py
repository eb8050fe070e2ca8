"""Caches are told what a strategy has dropped: all of it, and nothing that is still wanted."""

import pytest

from workbench.engine.engine import Engine
from workbench.errors import ConfigError
from workbench.search.prm import PRM
from workbench.search.problems import load_problems
from workbench.search.search import run_search
from workbench.search.strategies import BeamSearch

LIMITS = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 512}


def test_dropped_beams_leave_the_caches_and_nothing_is_asked_for_again():
    """With ample memory, what was forgotten is never missed, and little is left at the end."""
    left = {}
    for forgets in (False, True):
        llm, prm = (Engine(f"tiny-{n}", num_blocks=900, **LIMITS) for n in ("solver", "prm"))
        result = run_search(
            load_problems("tiny", 2, levels=[3]),
            llm=llm,
            prm=PRM(prm),
            strategy=BeamSearch(n=8, beam_width=4, max_depth=6),
            forget_pruned=forgets,
        )
        steps = result.trace.steps
        assert steps["recomputed_tokens_evicted"].sum() == 0
        assert steps["thrashed"].sum() == 0
        left[forgets] = [engine.cache.num_cached for engine in (llm, prm)]
    assert all(2 * after < before for before, after in zip(left[False], left[True]))


def test_engines_that_cannot_forget_are_refused_by_name(fake_engine):
    """The error says what they can and what to do."""
    with pytest.raises(ConfigError, match=r"forget_pruned.*token_identity.*forget_pruned=False"):
        run_search(
            load_problems("tiny", 1),
            llm=fake_engine(),
            prm=PRM(fake_engine()),
            strategy=BeamSearch(n=2, beam_width=2, max_depth=2),
            forget_pruned=True,
        )
