"""The ladder's runs carried out in turns: all rungs in the same minutes, so that they compare.

Rounds follow the plan's order; runs at lower depth limits, of which accuracy alone is asked, are
carried out one by one. What it does not do: compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import groupby

from workbench.experiments.ladder_plan import COST, DEPTH, LadderSpec
from workbench.experiments.plan import RunSpec
from workbench.experiments.record import RunResult
from workbench.experiments.sweep import Execute
from workbench.experiments.turns import Outcome, result_of, take_turns

MOST = 16  # runs that take turns with each other, processes of a third of a GiB
Turns = Callable[..., list[Outcome]]


class LadderInTurns:
    """Carries out runs as run.execute does; a whole round when the first of it is asked for.

    specs: those that may be asked for, whole seeds. turns, alone: who carries out many (keyword
    costs: how long each takes beside the others), and one.
    """

    def __init__(
        self,
        specs: Sequence[LadderSpec],
        turns: Turns | None = None,
        alone: Execute | None = None,
        progress: bool = False,
    ) -> None:
        self._rounds = rounds_of(specs)
        self._turns = turns or partial(take_turns, progress=progress)
        self._alone = alone
        self._outcomes: dict[RunSpec, Outcome] = {}

    def __call__(self, spec: RunSpec) -> RunResult:
        """Raises what building the engines or the search raised."""
        beside = next((each for each in self._rounds if spec in each), None)
        if beside is None:
            execute = self._alone or import_module("workbench.experiments.run").execute
            alone: RunResult = execute(spec)
            return alone
        if spec not in self._outcomes:
            found = self._turns(beside, costs=[COST.get(each.rung.key, 1.0) for each in beside])
            self._outcomes |= dict(zip(beside, found, strict=True))
        return result_of(self._outcomes.pop(spec))


def rounds_of(specs: Sequence[LadderSpec]) -> list[list[LadderSpec]]:
    """Those that take turns, role by role: whole seeds, as many as fit in a round."""
    rounds: list[list[LadderSpec]] = []
    timed = [spec for spec in specs if spec.role != DEPTH]
    for _, own in groupby(timed, lambda spec: spec.role):
        rounds.append([])
        for _, of_seed in groupby(own, lambda spec: spec.seed):
            runs = list(of_seed)
            if rounds[-1] and len(rounds[-1]) + len(runs) > MOST:
                rounds.append([])
            rounds[-1] += runs
    return rounds
