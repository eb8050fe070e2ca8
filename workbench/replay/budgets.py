"""Bytes of KV for each of two models, from one memory and a share of it.

    total = llm weights + llm KV + prm weights + prm KV        llm_share: of total, weights included
    kv    =               llm KV +               prm KV        kv_share: of kv

Activations are outside, as in every sweep of the embedded pair. What it does not do: make blocks of
bytes (what_if.py), or pages (kvcache/arena.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from workbench.config import format_size, parse_size
from workbench.errors import ConfigError, OutOfMemory, RecordingError
from workbench.search.recording import RecordedEngine

Size = int | str


class Budgets(NamedTuple):
    """Bytes of KV."""

    llm: int
    prm: int

    @property
    def total(self) -> int:
        """Of both models."""
        return self.llm + self.prm

    @property
    def share(self) -> float:
        """The LLM's."""
        return self.llm / self.total


def budgets(
    models: Sequence[RecordedEngine],
    *,
    total_memory: Size | None = None,
    kv_memory: Size | None = None,
    llm_share: float | None = None,
    kv_share: float | None = None,
    needed: bool = False,
) -> Budgets | None:
    """What each model gets; None where nothing is given and bytes are not needed.

    Without a memory it is the recorded one, without a share the recorded share. Raises ConfigError
    for settings that exclude each other, OutOfMemory where weights leave a model nothing.
    """
    _require_one_way(total_memory, kv_memory, llm_share, kv_share)
    given = (total_memory, kv_memory, llm_share, kv_share)
    if all(value is None for value in given) and not needed:
        return None
    weights = [_known(model, "weight_bytes") for model in models]
    if llm_share is not None:
        assert total_memory is not None
        total = parse_size(total_memory)
        llm = round(total * llm_share)
        return _with_room(Budgets(llm - weights[0], total - llm - weights[1]), models)
    if total_memory is not None:
        kv = parse_size(total_memory) - sum(weights)
    elif kv_memory is not None:
        kv = parse_size(kv_memory)
    else:
        kv = sum(_recorded_kv(model) for model in models)
    share = _recorded_share(models) if kv_share is None else kv_share
    llm = round(max(kv, 0) * share)
    return _with_room(Budgets(llm, kv - llm), models)


def _require_one_way(
    total: Size | None, kv: Size | None, llm_share: float | None, kv_share: float | None
) -> None:
    for first, second in (
        ({"total_memory": total}, {"kv_memory": kv}),
        ({"llm_share": llm_share}, {"kv_share": kv_share}),
        ({"llm_share": llm_share}, {"kv_memory": kv}),
    ):
        both = first | second
        if all(value is not None for value in both.values()):
            raise ConfigError(f"what_if got {' and '.join(both)}; give one of them.")
    if llm_share is not None and total is None:
        raise ConfigError("what_if got llm_share alone; it is a share of total_memory: give both.")
    shares: dict[str, Any] = {"llm_share": llm_share, "kv_share": kv_share}
    for name, share in shares.items():
        if share is not None and not (isinstance(share, float) and 0 < share < 1):
            raise ConfigError(f"{name} is {share!r}; allowed: a number in (0, 1).")


def _known(model: RecordedEngine, name: str) -> int:
    value: int | None = getattr(model, name)
    if value is None:
        raise RecordingError(
            f"The recording does not say the {name} of {model.name}; record the search on an "
            "Engine of this workbench, or give num_blocks."
        )
    return value


def _recorded_kv(model: RecordedEngine) -> int:
    if model.num_blocks is None:
        raise ConfigError(
            f"The recording does not say how many blocks {model.name} had, or they changed in the "
            "search; give total_memory or kv_memory, and a share."
        )
    return model.num_blocks * _known(model, "block_bytes")


def _recorded_share(models: Sequence[RecordedEngine]) -> float:
    llm, prm = (_recorded_kv(model) for model in models)
    return llm / (llm + prm)


def _with_room(given: Budgets, models: Sequence[RecordedEngine]) -> Budgets:
    for model, kv in zip(models, given, strict=True):
        if kv <= 0:
            raise OutOfMemory(
                f"{model.name} is left {format_size(max(kv, 0))} for its KV cache: its weights "
                f"take {format_size(model.weight_bytes or 0)}"
                + (f" and {format_size(-kv)} are missing" if kv < 0 else "")
                + ". Give more memory, or another share."
            )
    return given
