"""What an arena costs."""

from workbench.bench import memory
from workbench.engine.engine import Engine


def test_an_arena_is_set_against_pools_of_their_own_which_do_all_their_work_too(monkeypatch):
    """Guards the pairing, the lower bound's row, and the side that takes more steps."""
    made = []

    def engine(*given, **settings):
        made.append(Engine(*given, **settings))
        return made[-1]

    monkeypatch.setattr(memory, "BLOCKS", 160)
    monkeypatch.setattr(memory, "Engine", engine)
    monkeypatch.setitem(memory.PROFILES, "quick", (1, 16))
    ratio, low = memory.run("quick")
    assert (ratio.name, ratio.repeats) == ("arena_vs_dedicated", 1)
    assert low.value == ratio.spread[0] <= ratio.ratio
    steps = [len(each.trace.steps) for each in made]
    assert steps[0] < steps[2], "the LLM's"
    assert not any(each.has_work for each in made)
