"""The machine's own noise in a sweep: how far runs of equal work differ in wall time.

Two runs of one seed whose engines computed as many tokens in as many steps did the same work: the
sentinel's repetitions, and every share at which neither model lacks room. What their wall times
differ by is the machine's doing, and an effect of the share must exceed it. What it does not do:
correct a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from workbench.experiments.health import sentinel_drift
from workbench.experiments.record import FINISHED

WORK = tuple(
    f"{engine}_{count}"
    for engine in ("llm", "prm")
    for count in ("prefill_tokens", "decode_tokens", "steps")
)
"""Columns of the runs table that are equal where two runs of one seed did the same work."""
LARGEST = 2.0
"""Of the logarithm of a drawn factor: few repetitions have tails that no machine has."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How wall times of equal work scatter. Nothing is known where `degrees` is 0."""

    sigma: float = 0.0  # standard deviation of the logarithm of wall seconds
    degrees: int = 0  # repetitions behind sigma: runs less groups of equal work
    runs: int = 0  # in groups of two and more
    spread: float = 1.0  # the slowest over the fastest of a group, of all groups the greatest
    sentinels: int = 0  # runs of the sentinel's setting
    drift: tuple[float, float] = (0.0, 0.0)  # of the sentinel from its median: lowest, highest

    @property
    def is_known(self) -> bool:
        """Whether equal work was done more than once."""
        return self.degrees > 0

    def factors(
        self, generator: np.random.Generator, shape: tuple[int, ...]
    ) -> NDArray[np.float64]:
        """What a run's seconds might be multiplied by: Student's t, since sigma is an estimate."""
        if not self.is_known:
            return np.ones(shape)
        drawn = self.sigma * generator.standard_t(self.degrees, size=shape)
        return np.exp(np.clip(drawn, -LARGEST, LARGEST))

    def __str__(self) -> str:
        if not self.is_known:
            return "no two runs did equal work, so the machine's noise is not known"
        text = (
            f"{self.runs} runs of equal work differ by up to {self.spread:.2f} times in wall time"
        )
        if self.sentinels < 2:
            return text
        low, high = self.drift
        return f"{text}; sentinel {low:+.0%} to {high:+.0%} over {self.sentinels} repetitions"


def noise_of(runs: pd.DataFrame) -> Noise:
    """The noise that these runs show, sentinels among them. runs: Sweep.all_runs."""
    if runs.empty or not set(WORK) <= set(runs.columns):
        return Noise()
    done = runs[runs["status"] == FINISHED]
    logs = pd.Series(np.log(done["wall_s"].to_numpy(float)), index=done.index)
    groups = [each for _, each in logs.groupby([done[name] for name in ("seed", *WORK)])]
    repeated = [each.to_numpy(float) for each in groups if len(each) > 1]
    drift = (sentinel_drift(runs)["relative"] - 1).to_numpy(float)
    reach = (float(drift.min()), float(drift.max())) if len(drift) else (0.0, 0.0)
    if not repeated:
        return Noise(sentinels=len(drift), drift=reach)
    runs_of_equal_work = sum(map(len, repeated))
    degrees = runs_of_equal_work - len(repeated)
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in repeated)
    spread = float(np.exp(max(each.max() - each.min() for each in repeated)))
    sigma = float(np.sqrt(squares / degrees))
    return Noise(sigma, degrees, runs_of_equal_work, spread, len(drift), reach)


def equal_work(runs: pd.DataFrame, seeds: Sequence[int]) -> dict[float, int]:
    """A number for each share, the same for shares whose runs of all `seeds` did the same work.

    runs: finished measured ones.
    """
    if not set(WORK) <= set(runs.columns):
        return {share: place for place, share in enumerate(sorted(runs["llm_share"].unique()))}
    own = runs[runs["seed"].isin(list(seeds))].sort_values(["llm_share", "seed"])
    columns = own[["seed", *WORK]].to_numpy(float)
    places = own["llm_share"].to_numpy(float)
    work = {share: tuple(map(tuple, columns[places == share])) for share in np.unique(places)}
    numbers: dict[object, int] = {}
    return {float(s): numbers.setdefault(done, len(numbers)) for s, done in work.items()}
