"""Switches of a search (`SearchSwitches`), off by default: how the two engines are used.

All of them give the same tokens, scores, tree and answers, alone and together, because request ids,
order and batches never enter a token. What may differ beside time:

    switch            what it does                                    what differs
    request_order     which request meets which blocks                evictions, recomputed tokens
    problem_batching  static: no problem joins a batch                rounds; fewer blocks in use
                      adaptive: only what both caches can hold goes   the same
    forget_pruned     caches drop pruned beams                        evictions, recomputed tokens

The engines' `reuse_partial_blocks` and the PRM's score cache change no token either. dtype,
batch_invariant and finish_at_limit do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from workbench.core import CacheRoom, TokenEngine
from workbench.errors import ConfigError
from workbench.search.prm import PRM
from workbench.search.requests import Beam, Generate, Score

if TYPE_CHECKING:
    from workbench.search.rounds import ActiveSearch

TO_KEEP = 0.75
"""Part of a cache that beams to go on from may fill; the new steps pass through the rest."""

AMPLE = CacheRoom(2**40, 1)
Span = tuple[int, int]  # a node's first token and the one after its last, counted in its sequence


class RequestOrder:
    """The order in which one engine gets a round's requests, so what lies in its cache when.

    slot: as the strategy lists its beams; refilled ones alternate between the survivors.
    path: by depth, then path; siblings lie side by side and meet their parent's blocks together.
    prefix: path, and the problems that this engine served last go first: from round to round a
        cyclic order is the worst that a least-recently-used cache can be asked for.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._served: dict[str, int] = {}  # problem -> a number that grows with every request

    def searches(self, searches: Iterable[ActiveSearch]) -> list[ActiveSearch]:
        """These searches, all of which are served now, in their order."""
        ordered = list(searches)
        if self._kind == "prefix":
            ordered.sort(key=lambda search: -self._served.get(search.problem.id, 0))
            first = max(self._served.values(), default=0) + 1
            self._served |= {s.problem.id: place for place, s in enumerate(ordered, first)}
        return ordered

    def beams(self, beams: Sequence[Beam]) -> list[tuple[int, Beam]]:
        """Slots and beams of one search in order of their requests."""
        slots = list(enumerate(beams))
        if self._kind != "slot":
            slots.sort(key=lambda item: (len(item[1].path), item[1].path))
        return slots


class AdmissionControl:
    """Adaptive problem batching: as many problems are sampled in a round as both caches can hold.

    Every problem comes round again in each round. If together they need more than there is, each
    loses its prefixes before its next turn, and all are computed again; with some of them waiting,
    the rest keep theirs. What a problem needs is known: the blocks of the beams that it goes on
    from. They are sampled together, once none in flight waits for scores: half a batch costs nearly
    as much as a whole one. An engine that does not tell its cache is taken to have ample room.
    """

    def __init__(self, llm: TokenEngine, prm: TokenEngine) -> None:
        self._engines = llm, prm

    def admitted(self, in_flight: Sequence[ActiveSearch]) -> list[ActiveSearch]:
        """The first so many that fit into both caches, at least one; none while one is scored."""
        if any(isinstance(search.request, Score) for search in in_flight):
            return []
        rooms = [engine.cache_room or AMPLE for engine in self._engines]
        left = [TO_KEEP * room.blocks for room in rooms]
        admitted: list[ActiveSearch] = []
        for search in in_flight:
            for side, spans in enumerate(self._spans(search)):  # of one tree: none overlap
                size = rooms[side].block_size
                left[side] -= sum(end // size - start // size for start, end in spans)
            if admitted and min(left) < 0:
                break
            admitted.append(search)
        return admitted

    def _spans(self, search: ActiveSearch) -> tuple[Iterable[Span], Iterable[Span]]:
        """Tokens of each model that hold the beams which a search goes on from."""
        assert isinstance(search.request, Generate)
        parents = {beam.path[:-1]: beam for beam in search.request.beams}
        sampled = {
            node.path: (node.total_tokens - len(node.step.token_ids), node.total_tokens)
            for path in parents
            for node in search.tree.lineage(path)
        }
        prompt = len(search.prompt)
        nodes = [(0, prompt), *((prompt + start, prompt + end) for start, end in sampled.values())]
        scored = {
            node.steps: span
            for beam in parents.values()
            for node, span in search.scores.spans(beam.steps)
        }
        return nodes, scored.values()


class Pruning:
    """Tells both engines which solutions a strategy has dropped, so that their caches forget them.

    After each scoring a strategy goes on from some beams; the others, finished ones among them, are
    never read again, nor is anything of a problem that is answered. Its prompt is left to age:
    other prompts may begin with the same. ConfigError where an engine cannot forget.
    """

    def __init__(self, llm: TokenEngine, prm: PRM) -> None:
        for engine in (llm, prm.engine):
            if "forget" not in engine.capabilities:
                able = ", ".join(sorted(engine.capabilities)) or "none"
                raise ConfigError(
                    f"forget_pruned needs engines that can forget; the capabilities of "
                    f"{engine.name} are: {able}. Give forget_pruned=False."
                )
        self._llm, self._prm = llm, prm.engine

    def tell(self, search: ActiveSearch, scored: Score) -> None:
        """The strategy has had these beams' scores and said how it goes on."""
        going_on = search.request
        further = going_on.beams if isinstance(going_on, Generate) else ()
        parents = {beam.path[:-1] for beam in further}
        kept = [beam for beam in scored.beams if beam.path in parents]
        dropped = [beam for beam in scored.beams if beam.path not in parents]
        if not dropped:
            return
        prompt, scores = search.prompt, search.scores
        lines, needed = ([[*prompt, *b.token_ids] for b in beams] for beams in (dropped, kept))
        self._llm.forget(lines, [prompt, *needed])
        inputs, needed_inputs = (scores.inputs([b.steps for b in bs]) for bs in (dropped, kept))
        self._prm.forget(inputs, [scores.beginning, *needed_inputs])
