"""Where the blocks of each model of an arena lie: the addresses that kernels are given.

They depend on the arena's page and size alone, not on who holds a page now. What it does not do:
choose a page or its packing (pages.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigError
from workbench.kvcache.pages import BlockShape, Packing, PageShape, pack


class ArenaLayout:
    """`num_pages` pages of one shape, and how each model's blocks are packed into one."""

    def __init__(self, page: PageShape, num_pages: int) -> None:
        self.page, self.num_pages = page, num_pages
        self._packings: dict[str, Packing] = {}

    @property
    def models(self) -> list[str]:
        """Names, in the order of their coming."""
        return list(self._packings)

    def packing(self, model: str) -> Packing:
        """How this model's blocks lie in a page. ConfigError if it is no model of the arena."""
        if model not in self._packings:
            raise ConfigError(f"The arena has no model {model!r}; it has {self.models}.")
        return self._packings[model]

    def layer_base(self, model: str) -> NDArray[np.int64]:
        """[layers] element offset of each layer of this model."""
        return self.packing(model).layer_base(self.num_pages)

    def offsets(self, model: str) -> NDArray[np.int64]:
        """[ids] element offset of each block id of this model, whoever holds its page now."""
        return self.packing(model).offsets(self.num_pages)

    def waste(self, models: Iterable[BlockShape] | None = None) -> dict[str, int]:
        """Bytes of a page that each model (default: those of the arena) cannot use."""
        shapes = [p.shape for p in self._packings.values()] if models is None else models
        return {shape.name: pack(shape, self.page).waste for shape in shapes}
