"""The control experiment of a search: its scores dealt to its beams in a random order.

Whatever accuracy is left then is not the PRM's doing. Works around any strategy; the PRM is asked
and the tree records what it said, only the strategy is told something else.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

from workbench.search.requests import Score, Search


def shuffle_scores(search: Search, seed: int, problem_id: str) -> Search:
    """The same search; the beams of each Score get each other's scores, seeded by problem."""
    digest = hashlib.sha256(f"shuffle\x1f{seed}\x1f{problem_id}".encode()).digest()
    dealer = random.Random(int.from_bytes(digest[:8], "little"))
    reply: Any = None
    while True:
        try:
            request = search.send(reply)
        except StopIteration as end:
            return end.value
        reply = yield request
        if isinstance(request, Score):
            reply = dealer.sample(list(reply), len(reply))
