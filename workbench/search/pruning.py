"""Telling both engines which solutions a strategy has dropped, so that their caches forget them.

After each scoring a strategy goes on from some beams; the others, finished ones among them, are
never read again, and of a problem that is answered nothing is; its prompt is left to age, since
others may begin with the same. What it does not do: decide what is
dropped (the strategies), or give anything up (kvcache/manager.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.core import TokenEngine
from workbench.errors import ConfigError
from workbench.search.active import ActiveSearch
from workbench.search.prm import PRM
from workbench.search.requests import Beam, Generate, Score

CAPABILITY = "forget"


class Pruning:
    """Both engines of one run. ConfigError where one cannot forget."""

    def __init__(self, llm: TokenEngine, prm: PRM) -> None:
        for engine in (llm, prm.engine):
            if CAPABILITY not in engine.capabilities:
                able = ", ".join(sorted(engine.capabilities)) or "none"
                raise ConfigError(
                    f"forget_pruned needs engines that can forget; the capabilities of "
                    f"{engine.name} are: {able}. Give forget_pruned=False."
                )
        self._llm: Any = llm
        self._prm: Any = prm.engine

    def tell(self, search: ActiveSearch, scored: Score) -> None:
        """The strategy has had these beams' scores and said how it goes on."""
        going_on = search.request
        parents = (
            {beam.path[:-1] for beam in going_on.beams}
            if isinstance(going_on, Generate)
            else set[Any]()
        )
        kept = [beam for beam in scored.beams if beam.path in parents]
        dropped = [beam for beam in scored.beams if beam.path not in parents]
        if dropped:
            self._forget_samples(search, dropped, kept)
            self._forget_scored(search, dropped, kept)

    def _forget_samples(
        self, search: ActiveSearch, dropped: Sequence[Beam], kept: Sequence[Beam]
    ) -> None:
        prompt = search.prompt
        lines = [[*prompt, *beam.token_ids] for beam in dropped]
        self._llm.forget(lines, [prompt, *([*prompt, *beam.token_ids] for beam in kept)])

    def _forget_scored(
        self, search: ActiveSearch, dropped: Sequence[Beam], kept: Sequence[Beam]
    ) -> None:
        scores = search.scores
        lines, needed = (scores.inputs([b.steps for b in beams]) for beams in (dropped, kept))
        self._prm.forget(lines, [scores.beginning, *needed])
