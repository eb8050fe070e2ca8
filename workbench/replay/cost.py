"""How long a step lasts: a roofline over a device, or terms fitted to measured steps.

    seconds = roofline * max(flops / flops_per_s, bytes / bytes_per_s)
            + step + token * tokens + sequence * sequences + key * keys + logit * logits

Of a data sheet only the first line is known: its factor is 1 and the rest 0, so it is a bound from
below. `fit` finds all factors, none negative, by least squares over measured steps, each weighted
by 1 / the duration it is given: long steps do not decide alone, and all steps together last as long
as they were measured to. (Weights of measured durations would favour the steps that nothing held
up, and so promise too much.) What it does not do: guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigError
from workbench.replay.devices import Device
from workbench.replay.work import ModelWork, StepWork

ROUNDS = 8  # of weights and factors in turn; they settle in three or four
LEAST_SHARE = 1e-3  # of the mean duration: no step is weighted as if it took less


@dataclass(frozen=True, slots=True)
class Terms:
    """The factors above: roofline without a unit, the others in seconds."""

    roofline: float = 1.0
    step: float = 0.0
    token: float = 0.0
    sequence: float = 0.0
    key: float = 0.0
    logit: float = 0.0

    @property
    def factors(self) -> tuple[float, ...]:
        """All, in the order of `StepCost.measures`."""
        return (self.roofline, self.step, self.token, self.sequence, self.key, self.logit)

    @classmethod
    def on(cls, device: Device, model: str) -> Terms:
        """The model's on this device: fitted ones where there are any, else the roofline alone."""
        given, known = device.terms.get(model, {}), [f.name for f in fields(cls)]
        if not set(given) <= set(known):
            raise ConfigError(
                f"The terms of {model} on {device.name!r} are {', '.join(given)}; allowed: "
                f"{', '.join(known)}."
            )
        return cls(**given)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a model's steps on a device; call it with the counts of one."""

    model: ModelWork
    device: Device
    terms: Terms = Terms()

    def __call__(self, work: StepWork) -> float:
        return self.seconds(work)

    def seconds(self, work: StepWork) -> float:
        """Of a step with these counts."""
        terms, (tokens, sequences, keys, logits, _, _) = self.terms, work
        beside = terms.step + terms.token * tokens + terms.sequence * sequences
        beside += terms.key * keys + terms.logit * logits
        return terms.roofline * self.roofline(work) + beside

    def roofline(self, work: StepWork) -> float:
        """Seconds below which the device cannot do it."""
        device, model = self.device, self.model
        compute = model.flops(work) / device.flops_per_s
        return max(compute, model.bytes(work) / device.bytes_per_s)

    def measures(self, work: StepWork) -> tuple[float, ...]:
        """What the terms multiply, in their order."""
        return (self.roofline(work), 1.0, work.tokens, work.sequences, work.keys, work.logits)


class MeteredCost:
    """A cost that keeps the counts of every step it was asked about; `seconds` in their place."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.works: list[StepWork] = []
        self._seconds = seconds

    def __call__(self, work: StepWork) -> float:
        self.works.append(work)
        return self._seconds


def fit(
    model: ModelWork, device: Device, works: Sequence[StepWork], seconds: Sequence[float]
) -> Terms:
    """The terms that explain measured steps best. ConfigError without a step that took time."""
    measured = np.asarray(seconds, np.float64)
    if len(works) != len(measured) or not len(works) or not (measured > 0).all():
        raise ConfigError(
            f"A cost is fitted to {len(works)} steps and {len(measured)} durations; give as many, "
            "at least one, each above 0."
        )
    cost = StepCost(model, device)
    table = np.array([cost.measures(work) for work in works], np.float64)
    given = np.full(len(measured), measured.mean())
    for _ in range(ROUNDS):
        weight = 1.0 / np.sqrt(np.maximum(given, LEAST_SHARE * measured.mean()))
        found = non_negative_least_squares(table * weight[:, None], measured * weight)
        given = table @ found
    return Terms(*found.tolist())


def non_negative_least_squares(
    table: NDArray[np.float64], wanted: NDArray[np.float64]
) -> NDArray[np.float64]:
    """x >= 0 with the least |table x - wanted|: the best of all subsets of columns whose solution
    is not negative, which is where the optimum lies. For a few columns.
    """
    scale = np.linalg.norm(table, axis=0)
    columns = table / np.where(scale > 0, scale, 1.0)
    best, least = np.zeros(table.shape[1]), float(wanted @ wanted)
    for size in range(1, table.shape[1] + 1):
        for chosen in combinations(range(table.shape[1]), size):
            part, *_ = np.linalg.lstsq(columns[:, chosen], wanted, rcond=1e-10)
            left = wanted - columns[:, chosen] @ part
            if part.min() >= 0 and float(left @ left) < least:
                least = float(left @ left)
                best = np.zeros(table.shape[1])
                best[list(chosen)] = part
    return best / np.where(scale > 0, scale, 1.0)
