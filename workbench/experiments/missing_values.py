"""What the thesis leaves open, what this study takes instead, and why.

A value marked as open is one whose effect on the peak only a replay over many settings can tell.
What it does not do: hide that a choice was made.
"""

from __future__ import annotations

import pandas as pd

OPEN = "open: to be told by replay"
MISSING: tuple[tuple[str, str, str, str], ...] = (
    (
        "GPU",
        "not named",
        "this machine; 40 GiB for the replayed pair",
        "0.08 to 0.5 is feasible in 40 to 48 GiB",
    ),
    (
        "whose share",
        "gpu_model_utilization",
        "the LLM's part of total memory",
        "8B weights cannot fit in 0.08",
    ),
    (
        "the PRM's remainder",
        "not stated",
        "all the LLM does not have",
        "nothing else runs on the device",
    ),
    ("n", "beam width of four only", "16", "with n = 4 one survivor is left and there is no tree"),
    ("temperature, top_p", "not stated", "0.8, 1.0", "search-and-learn's defaults"),
    (
        "tokens per step",
        "not stated",
        "at most 256 (tiny), 2,048 (thesis scale)",
        "no step may be cut by the limit",
    ),
    (
        "problems in flight",
        "a minimum batch, no number",
        "8",
        "demand over room as at thesis scale",
    ),
    ("batch size, max_num_seqs", "not stated", "64", "four problems of n = 16 decode together"),
    (
        "max_num_batched_tokens",
        "not stated",
        "2,048",
        "vLLM's order of magnitude; decodes never wait",
    ),
    ("block size", "16 (vLLM)", "16", "vLLM's default"),
    (
        "max_model_len",
        "not stated",
        "2,048 (tiny), 4,096 (thesis scale)",
        "the longest solution fits",
    ),
    (
        "dtype",
        "not stated",
        "float32 (tiny), bfloat16 (thesis scale)",
        "bf16 has no exact kernels on a CPU",
    ),
    ("seeds", "not stated", "2 (default), 5 (full)", "a run's seed fixes every token"),
    ("preempted requests", "not stated", "recompute", "no second memory to swap to"),
)


def missing_values() -> pd.DataFrame:
    """One row a value: value, thesis, taken, why, moves_the_peak."""
    columns = ["value", "thesis", "taken", "why"]
    return pd.DataFrame(MISSING, columns=columns).assign(moves_the_peak=OPEN)
