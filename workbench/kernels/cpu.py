"""The CPU's kernels: numba, float32, each by a team of threads; `Kernels` says what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from weakref import WeakValueDictionary

import numpy as np
import torch

from workbench.kernels import ForwardContext, Kernels, LayerCache, Part, Quantised
from workbench.kernels.cpu_attention import attend
from workbench.kernels.cpu_draw import draw
from workbench.kernels.cpu_rows import add_row, rms_norm, store_kv
from workbench.kernels.panels import Beside, Panels, pack_codes, pack_floats
from workbench.kernels.products import ADD, GATED, PLAIN, columns, multiply
from workbench.kernels.quantised import join
from workbench.kernels.team import Program, Team

_TEAMS: WeakValueDictionary[int, Team] = WeakValueDictionary()  # by their size


def _kind(part: Part) -> str | None:
    """What a part is stored as: None if it is no quantised one."""
    return part.kind if isinstance(part, Quantised) else None


def _pack(parts: Sequence[Part], gated: bool) -> Panels:
    """Parts of one kind in that kind; of several, in float32."""
    quantised = [part for part in parts if isinstance(part, Quantised)]
    if len(quantised) == len(parts) and len(set(map(_kind, parts))) == 1:
        return pack_codes(join(quantised).codes(), gated)
    floats = [
        part.dequantise() if isinstance(part, Quantised) else part.float().numpy() for part in parts
    ]
    return pack_floats(np.concatenate(floats), gated)


def _team(threads: int) -> Team:
    """One for all models of the process: two would spin for the same cores."""
    team = _TEAMS.get(threads)
    if team is None:
        team = _TEAMS[threads] = Team(threads)
    return team


class CpuKernels(Kernels):
    """float32 on a CPU, by a team of threads."""

    name, batch_invariant = "cpu", True

    def __init__(self, threads: int) -> None:
        self.team = _team(threads)

    def pack(self, parts: Sequence[Part], gated: bool = False) -> Panels | Beside:
        """Quantised parts stay so, each of its kind; a gated pair of two kinds becomes float32."""
        runs = [list(parts)] if gated else [list(run) for _, run in groupby(parts, _kind)]
        packed = [_pack(run, gated) for run in runs]
        return packed[0] if len(packed) == 1 else Beside(tuple(packed))

    def multiply(self, x: torch.Tensor, matrix: Panels | Beside, out: torch.Tensor) -> None:
        if isinstance(matrix, Panels):
            multiply(self.team, x, matrix, out, PLAIN)
            return
        widths = [part.columns for part in matrix.parts]
        for part, some in zip(matrix.parts, out.split(widths, dim=1)):
            multiply(self.team, x, part, some, PLAIN)

    def multiply_add(self, x: torch.Tensor, matrix: Panels, out: torch.Tensor) -> None:
        multiply(self.team, x, matrix, out, ADD)

    def multiply_gated(self, x: torch.Tensor, matrix: Panels, out: torch.Tensor) -> None:
        multiply(self.team, x, matrix, out, GATED)

    def columns(self, matrix: Panels, numbers: torch.Tensor, out: torch.Tensor) -> None:
        columns(self.team, matrix, numbers, out)

    def add_row(self, row: torch.Tensor, out: torch.Tensor) -> None:
        add_row(self.team, row, out)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor
    ) -> None:
        rms_norm(self.team, x, weight, epsilon, out)

    def store_kv(
        self,
        qkv: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        cache: LayerCache,
        context: ForwardContext,
    ) -> None:
        store_kv(self.team, qkv, cosine, sine, cache, context)

    def attend(
        self, qkv: torch.Tensor, out: torch.Tensor, cache: LayerCache, context: ForwardContext
    ) -> None:
        """Sixteen lanes at a time."""
        attend(self.team, qkv, out, cache, context)

    def draw(
        self, logits: torch.Tensor, temperature: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        return draw(self.team, logits, temperature, noise)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Launches without Python in between, recorded once for each team that runs them."""
        programs: dict[Team, Program] = {}

        def run() -> None:
            team = self.team
            if team not in programs:
                programs[team] = team.record(work)
            programs[team].run()

        return run
