"""Steps of one row a sequence: decoding, where what is launched matters as much as what it does.

A pass through the layers is recorded once for each number of rows, over arrays that stay in place,
and from then on run again without Python in between (as a CUDA graph is). On a GPU a few numbers of
rows serve all: rows beyond a step's own belong to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from workbench.core import StepPlan
from workbench.kernels import ForwardContext, LayerCache
from workbench.models.llama import Buffers, LlamaModel


class DecodeSteps:
    """Passes of up to buffers.logit_rows rows, and where their plans are put down."""

    def __init__(self, model: LlamaModel, caches: Sequence[LayerCache], buffers: Buffers) -> None:
        self._model, self._caches, self._buffers = model, caches, buffers
        rows = buffers.logit_rows
        self._positions = np.zeros(rows, np.int64)
        self._context_len = np.zeros(rows, np.int32)
        self._block_offsets = np.zeros((rows, 0), np.int64)
        self._passes: dict[int, Callable[[], None]] = {}

    def forward(self, tokens: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """`LlamaModel.forward` of a plan whose sequences own one row each."""
        rows, blocks = plan.block_offsets.shape
        launched = self._model.kernels.rows_launched(rows)
        launched = max(rows, min(launched, len(self._positions)))
        self._make_room(blocks)
        self._positions[:rows] = plan.positions
        self._context_len[:rows] = plan.context_len
        self._block_offsets[:rows, :blocks] = plan.block_offsets
        self._positions[rows:launched] = -1  # no sequence's
        self._context_len[rows:launched] = 0
        if launched not in self._passes:
            self._passes[launched] = self._record(launched)
        self._model.embedding(tokens, self._buffers.residual[:rows])
        self._passes[launched]()
        return self._buffers.normed[:rows]

    def _make_room(self, blocks: int) -> None:
        """Longer sequences than ever before: a wider table, and passes that read it."""
        rows, width = self._block_offsets.shape
        if blocks > width:
            self._block_offsets = np.zeros((rows, max(blocks, 2 * width)), np.int64)
            self._passes.clear()

    def _record(self, rows: int) -> Callable[[], None]:
        """Unused entries of the table are of former steps: no row reads beyond its position.

        What is recorded does not hold on to this object, which would keep buffers until garbage is
        collected.
        """
        context = ForwardContext(
            positions=self._positions[:rows],
            sequence=np.arange(rows, dtype=np.int64),
            query_start=np.arange(rows + 1, dtype=np.int32),
            context_len=self._context_len[:rows],
            block_offsets=self._block_offsets[:rows],
        )
        model, caches, buffers = self._model, self._caches, self._buffers
        return model.kernels.record(lambda: model.run_layers(rows, caches, context, buffers))
