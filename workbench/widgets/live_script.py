"""What a hand would do to a live search, done by a script: for papermill, and to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.search.result import SearchResult
from workbench.widgets.live_search import LiveSearch, Snapshot


def move_while_it_runs(live: LiveSearch, shares: Sequence[float], every: int) -> SearchResult:
    """Start it, ask for each share after `every` more steps, and wait for its end.

    What does not fit into the search any more is left out; `live.snapshot().moves` tells.
    """
    live.start()
    for share in shares:
        if live.wait_for_steps(every):
            live.resplit(share)
    return live.wait()


def different_nodes(a: SearchResult, b: SearchResult) -> int:
    """Nodes whose tokens or score differ between two searches, those that one lacks included."""
    first, second = _nodes(a), _nodes(b)
    return sum(first.get(name) != second.get(name) for name in first.keys() | second.keys())


def _nodes(result: SearchResult) -> dict[tuple[str, str], Any]:
    tree = result.tree
    names = zip(tree["problem_id"], tree["node_id"])
    return dict(zip(names, zip(map(tuple, tree["token_ids"]), tree["score"])))


def sameness_in_words(calm: SearchResult, moved: SearchResult, seen: Snapshot) -> str:
    """Whether the split changed what was sampled, with the numbers of both searches."""
    differing, nodes = different_nodes(calm, moved), len(calm.tree)
    moves = [move for move in seen.moves if move.outcome != "refused"]
    verdict = "identical" if not differing else f"different in **{differing}** nodes"
    refused = len(seen.moves) - len(moves)
    note = f" ({refused} more were refused)" if refused else ""
    speeds = [result.throughput.tokens_per_s for result in (calm, moved)]
    return (
        f"The memory was split anew **{len(moves)}** times{note} while "
        f"**{moved.throughput.tokens:,}** tokens were sampled into **{nodes}** nodes; beside the "
        f"search that was left alone tokens and scores are **{verdict}**. {speeds[0]:,.0f} "
        f"tokens/s without moves, {speeds[1]:,.0f} with them."
    )
