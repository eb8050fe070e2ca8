"""What the thesis leaves open, what this study takes instead, and why.

What is taken is read from the profiles, so that the table cannot differ from what is run. A value
marked as open is one whose effect on the peak only a replay over many settings can tell. What it
does not do: hide that a choice was made.
"""

from __future__ import annotations

import pandas as pd

from workbench.config import SweepConfig
from workbench.experiments.profiles import sweep_config
from workbench.models.registry import model_spec

OPEN = "open: to be told by replay"
COLUMNS = ("value", "thesis", "taken", "why")


def missing_values() -> pd.DataFrame:
    """One row a value: value, thesis, taken, why, moves_the_peak."""
    tiny, thesis = sweep_config("default"), sweep_config("thesis")
    rows = [*_the_setting(thesis), *_the_search(tiny, thesis), *_the_engines(tiny, thesis)]
    return pd.DataFrame(rows, columns=list(COLUMNS)).assign(moves_the_peak=OPEN)


def _the_setting(thesis: SweepConfig) -> list[tuple[str, str, str, str]]:
    return [
        (
            "GPU",
            "not named",
            f"this machine; {_size(thesis.total_memory)} for the replayed pair",
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
    ]


def _the_search(tiny: SweepConfig, thesis: SweepConfig) -> list[tuple[str, str, str, str]]:
    full = sweep_config("full")
    return [
        (
            "n",
            "beam width of four only",
            _both(tiny.n, thesis.n),
            "with n = 4 one survivor is left and there is no tree",
        ),
        (
            "temperature, top_p",
            "not stated",
            f"{tiny.temperature}, {tiny.top_p}",
            "search-and-learn's defaults",
        ),
        (
            "tokens per step",
            "not stated",
            f"at most {_both(tiny.max_step_tokens, thesis.max_step_tokens)}",
            "no step may be cut by the limit",
        ),
        (
            "problems in flight",
            "a minimum batch, no number",
            _both(tiny.min_problem_batch, thesis.min_problem_batch),
            "demand over room as at thesis scale",
        ),
        (
            "seeds",
            "not stated",
            f"{len(tiny.seeds)} (default), {len(full.seeds)} (full)",
            "a run's seed fixes every token",
        ),
    ]


def _the_engines(tiny: SweepConfig, thesis: SweepConfig) -> list[tuple[str, str, str, str]]:
    seqs = _both(tiny.max_num_seqs, thesis.max_num_seqs)
    tokens = _both(tiny.max_num_batched_tokens, thesis.max_num_batched_tokens)
    together = tiny.max_num_seqs // tiny.n
    dtypes = _both(_dtype(tiny), _dtype(thesis))
    return [
        (
            "batch size, max_num_seqs",
            "not stated",
            seqs,
            f"{together} problems of n = {tiny.n} decode together in the tiny pair",
        ),
        (
            "max_num_batched_tokens",
            "not stated",
            tokens,
            "vLLM's order of magnitude; decodes never wait",
        ),
        ("block size", "16 (vLLM)", _both(tiny.block_size, thesis.block_size), "vLLM's default"),
        (
            "max_model_len",
            "not stated",
            _both(_longest(tiny), _longest(thesis)),
            "the longest solution fits",
        ),
        ("dtype", "not stated", dtypes, "bf16 has no exact kernels on a CPU"),
        ("preempted requests", "not stated", "recompute", "no second memory to swap to"),
    ]


def _both(tiny: object, thesis: object) -> str:
    """One value where both scales take the same."""
    texts = [f"{value:,}" if isinstance(value, int) else str(value) for value in (tiny, thesis)]
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} (tiny), {texts[1]} (thesis scale)"


def _size(size: int | str) -> str:
    return str(size).replace("GiB", " GiB")


def _longest(config: SweepConfig) -> int:
    """Tokens of the longest request: what is set, else what both models can read."""
    if config.max_model_len is not None:
        return config.max_model_len
    return min(model_spec(name).max_model_len for name in (config.llm, config.prm))


def _dtype(config: SweepConfig) -> str:
    """What weights are computed in; auto is float32 on a CPU."""
    return "float32" if config.dtype == "auto" else config.dtype
