"""What the study of policies can switch on beside a policy, each alone and all together.

None of them changes a token (search/switches.py says what each does). Together are those that gain
together on the embedded pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Technique:
    """Switches that are on together. label: as in a legend; said: within a sentence."""

    label: str
    said: str
    search: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)


_PREFIX = {"request_order": "prefix"}
_PARTIAL = {"reuse_partial_blocks": True}
_FORGET, _ADAPTIVE = {"forget_pruned": True}, {"problem_batching": "adaptive"}
_TOGETHER = {**_FORGET, **_ADAPTIVE, **_PREFIX}
NONE, ALL = "none", "all"
TECHNIQUES = {
    NONE: Technique("none", "no technique"),
    "partial_blocks": Technique("partial blocks reused", "reuse of partial blocks", {}, _PARTIAL),
    "forget_pruned": Technique("pruned beams forgotten", "forgetting pruned beams", _FORGET),
    "adaptive": Technique("adaptive problem batching", "adaptive problem batching", _ADAPTIVE),
    "prefix_order": Technique("prefix-aware order", "prefix-aware order", _PREFIX),
    ALL: Technique("all that gain", "all techniques that gain together", _TOGETHER, _PARTIAL),
}
ALONE = tuple(key for key in TECHNIQUES if key not in (NONE, ALL))
