"""The GPU's kernels: bytes and operations a second, beside torch's and what the GPU can do.

decode_attention: one new row for each of many long contexts, whose keys and values are read once;
prefill_attention: whole prompts; cascade_attention: siblings over a shared prefix, against the same
step with the prefix read for each. `@flash`, `@cudnn`, `@efficient`: torch's attention by that
backend, over contiguous keys and values. `+invariant`: tiles that give a row the same bits wherever
it is computed. `_error`: the largest difference from the plain torch twin.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workbench.bench.gpu_timing import graph_seconds, require_gpu
from workbench.bench.kernel_rows import KernelBench, Sizes
from workbench.bench.record import Row

SIZES = {
    "quick": Sizes(decodes=(64, 1024), decode_layers=2, prompts=(2, 1024), sibling_layers=8),
    "default": Sizes(),
    "full": Sizes(),
}
REPEATS = {"quick": 10, "default": 50, "full": 100}
MODE = {"dtype": "bfloat16", "shape": "32 query and 8 key-value heads of 128, blocks of 16"}


def run(profile: str = "default", repeats: int | None = None) -> Iterator[Row]:
    """The rows of `workbench bench kernels`; full also times every candidate of the tiles' table.

    Raises ConfigError without a GPU or triton, OutOfMemory on a GPU that is too small.
    """
    sizes = SIZES[profile]
    device = require_gpu(sizes.needed_bytes)
    bench = KernelBench(device, torch.bfloat16, sizes, graph_seconds, repeats or REPEATS[profile])
    yield from bench.rows()
    if profile == "full":
        yield from bench.candidate_rows()
