"""What is asked of the LLM for one node of a search tree, and nothing else that its tokens need.

The same node gives the same request, whoever asks and when: its seed comes of the run's seed, the
problem and the path alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from workbench.core import SamplingParams, Tag, node_seed
from workbench.search.active import ActiveSearch
from workbench.search.requests import Beam, Extension, Generate, Path
from workbench.search.tree import node_id


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """All that a node's tokens depend on, beside the model."""

    problem_id: str
    path: Path
    token_ids: list[int]
    params: SamplingParams

    @property
    def tag(self) -> Tag:
        """Its name in the trace."""
        return Tag(self.problem_id, node_id(self.path))


@dataclass(frozen=True, slots=True)
class NodeRequests:
    """Makes the requests of one run. params: of every step, but for its stop, length and seed."""

    seed: int
    params: SamplingParams
    max_model_len: int

    def room(self, search: ActiveSearch, beam: Beam) -> int:
        """Tokens that the LLM may still sample after this beam's."""
        return self.max_model_len - len(search.prompt) - len(beam.token_ids)

    def of(self, search: ActiveSearch, beam: Beam, how: Extension) -> NodeRequest:
        """What samples the node `beam.path`; there must be room for a token."""
        wanted = self.params.max_tokens if how.max_tokens is None else how.max_tokens
        params = replace(
            self.params,
            max_tokens=min(wanted, self.room(search, beam)),
            stop=how.stop,
            seed=node_seed(self.seed, search.problem.id, beam.path),
        )
        prompt = [*search.prompt, *beam.token_ids]
        return NodeRequest(search.problem.id, beam.path, prompt, params)

    def next_of(self, search: ActiveSearch, beam: Beam) -> NodeRequest:
        """For a node that nobody has asked for: sampled as the search says now, if it ever is."""
        asked = search.request
        assert isinstance(asked, Generate)
        assert asked.then is not None
        return self.of(search, beam, asked.then)
