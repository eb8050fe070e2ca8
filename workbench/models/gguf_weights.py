"""The tensors of a GGUF file under the names, and in the order of rows, of Hugging Face.

Quantised matrices stay the file's mapped bytes until somebody dequantises them.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.kernels.quantised import FORMATS, Quantised
from workbench.models.gguf_config import ROPE_FACTORS, hub_name
from workbench.models.gguf_file import GGUFFile
from workbench.models.rounding import Listed
from workbench.models.weights import Stored, Weights

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFWeights(Weights):
    """One file's tensors, each taken once and by the name that Hugging Face gives it."""

    def __init__(self, file: GGUFFile) -> None:
        self.path, self._file = file.path, file
        self._own = {hub_name(name): name for name in file.tensors if name != ROPE_FACTORS}
        super().__init__(file.path, self._own)

    def file(self, name: str) -> Path:
        return self.path

    def read(self, name: str) -> Stored:
        self._file.release()  # else file and packed copy are held at once
        stored = self._file.tensors[self._own[name]]
        data, order = self._file.data(stored.name), self._order(name, stored.shape[0])
        if stored.kind in FORMATS:
            columns = stored.shape[-1]
            rows = math.prod(stored.shape) // columns
            matrix = Quantised(stored.kind, data.reshape(rows, -1), (rows, columns))
            return matrix if order is None else matrix.pick(order)
        plain = torch.frombuffer(data.copy(), dtype=_PLAIN[stored.kind]).view(stored.shape)
        return plain if order is None else plain[torch.from_numpy(order)]

    def listed(self) -> list[Listed]:
        return [Listed(t.name, t.kind, t.shape) for t in self._file.tensors.values()]

    def held_bytes(self, itemsize: int) -> int:
        return self._file.held_bytes(itemsize)

    def digest(self) -> str:
        with self.path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    def _order(self, name: str, rows: int) -> NDArray[np.intp] | None:
        """Which rows to take for Hugging Face's order: None where they lie so.

        Llama files rotate neighbouring rows of a head, (0, 1), (2, 3); ours and Hugging Face's
        rotate row i with row i + head_dim / 2. Rows that are no whole heads stay: their shape will
        be refused.
        """
        heads = self._heads(name)
        if heads is None or rows % (2 * heads):
            return None
        pairs = np.arange(rows).reshape(heads, rows // heads // 2, 2)
        return pairs.swapaxes(1, 2).reshape(-1)

    def _heads(self, name: str) -> int | None:
        """Heads of a projection that a Llama file rotates in its own way; None for all others."""
        settings = self._file.settings
        if settings.text("general.architecture") != "llama":
            return None
        if ".self_attn.q_proj." in name:
            return settings.whole("llama.attention.head_count")
        if ".self_attn.k_proj." in name:
            return settings.whole("llama.attention.head_count_kv")
        return None
