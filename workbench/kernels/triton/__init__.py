"""The GPU's kernels, in Triton; `Kernels` says what they mean, `reference` is their twin.

    kernels.py   TritonKernels: the signatures of `Kernels`
    taken.py     types, head sizes and block sizes, and the words that refuse others
    work.py      which program does what of a step's attention: lists, made on the host
    placing.py   those lists on the device, in one copy
    launch.py    attention of one layer: which kernels, over which lists
    recorded.py  decoding steps as CUDA graphs
    spans.py     some lanes over some positions: the piece all attention is made of
    prefill.py, decode.py, fused.py    the programs made of it
    rows.py      norms, SwiGLU, rotation and storing of keys and values
    columns.py   logits of some columns at some rows
    choosing.py  tokens out of logits
    products.py, fixed_tiles.py        matrix products that do not depend on the batch
    tuning.py    the tiles of attention, by head size

With TRITON_INTERPRET=1, set before triton is first imported, every kernel runs on a CPU, slowly.
Importing this without triton raises ConfigError.
"""

from workbench.errors import ConfigError

try:
    import triton  # noqa: F401 - an optional extra
except ImportError as error:
    raise ConfigError(
        "The Triton kernels need the package triton, which is not installed; it exists for Linux: "
        "pip install 'workbench[gpu]'."
    ) from error
