"""What the study of policies can switch on beside a policy, each alone and all together.

None of them changes a token (search/rounds.py says what each does). Together are those that gain
together on the embedded pair. With a beam width of four most children are no child 0, and what
speculation samples for nothing costs what full rows gain; overlap is the plain search on a CPU
with few threads (search/lanes.py). What it does not do: plan runs.
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


_SPECULATION = {"speculative_extension": True}
_LOOKAHEAD = {**_SPECULATION, "lookahead_scoring": True}
_PREFIX, _OVERLAP = {"request_order": "prefix"}, {"overlap": True}
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
    "speculation": Technique("speculative extension", "speculative extension", _SPECULATION),
    "lookahead": Technique("+ look-ahead scoring", "look-ahead scoring with it", _LOOKAHEAD),
    "overlap": Technique("overlap", "overlap of the two models", _OVERLAP),
    ALL: Technique("all that gain", "all techniques that gain together", _TOGETHER, _PARTIAL),
}
ALONE = tuple(key for key in TECHNIQUES if key not in (NONE, ALL))
