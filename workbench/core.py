"""The plain data that layers hand to each other, and the one protocol search needs of an engine.

No torch here: a plan can be pickled, replayed without a model, or sent to another process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from workbench.config import AtLeastOne, Range, Share, check, refused


def node_seed(run_seed: int, problem_id: str, path: SequenceOf[int]) -> int:
    """64-bit seed of a tree node: depends on the run's seed, problem and the node's path only."""
    text = f"{run_seed}\x1f{problem_id}\x1f{'/'.join(map(str, path))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 filter nothing.
    """

    temperature: Annotated[float, Range(0)] = 1.0
    max_tokens: AtLeastOne = 16
    top_k: Annotated[int, Range(0, 2**31)] = 0
    top_p: Share = 1.0
    min_p: Annotated[float, Range(0, 1)] = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    ignore_eos: bool = False
    logprobs: Annotated[int | None, Range(0, 2**31)] = None  # the likeliest, and the chosen

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        check(self)
        # half of a surrogate pair is no whole character
        if not all(text and not re.search(r"[\ud800-\udfff]", text) for text in self.stop):
            allowed = "non-empty strings of whole characters"
            raise refused(SamplingParams, "stop", self.stop, allowed)
        if min(self.stop_token_ids, default=0) < 0:
            raise refused(SamplingParams, "stop_token_ids", self.stop_token_ids, "token ids, >= 0")


@dataclass(frozen=True, slots=True)
class ScoreParams:
    """The logits a scoring request wants: for each position p those that follow tokens[: p + 1]."""

    positions: tuple[int, ...]  # ascending, each < len(token_ids)
    columns: tuple[int, ...]  # token ids, or outputs of a value head


@dataclass(frozen=True, slots=True)
class Tag:
    """Where a request comes from: neither scheduler nor sampler reads it. A replay does."""

    problem_id: str = ""
    node_id: str = ""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in flight. num_computed <= len(token_ids), and < once anything is wanted.

    token_ids: prompt, then what was sampled; may carry its block hashes (kvcache/manager.py).
    """

    request_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams | None = None  # exactly one of params and score
    score: ScoreParams | None = None
    salt: bytes = b""
    tag: Tag = field(default_factory=Tag)
    arrival_s: float = 0.0
    num_computed: int = 0  # tokens whose KV is in the cache now
    num_cached_tokens: int = 0  # hit at the first admission
    readmit_cached_tokens: int = 0
    preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    # position -> logits [columns]
    score_rows: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        """Leading tokens that are ever computed: all, or up to the last position scored."""
        return len(self.token_ids) if self.score is None else self.score.positions[-1] + 1


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows of a step that are sampled, as columns; R rows. Filters are applied in float64."""

    rows: NDArray[np.int64]  # [R] row of the flat batch whose logits are sampled
    positions: NDArray[np.int64]  # [R] of the token to come (counter of the noise)
    seeds: NDArray[np.uint64]  # [R]
    temperature: NDArray[np.float64]  # [R]
    top_k: NDArray[np.int64]  # [R] 0: all
    top_p: NDArray[np.float64]  # [R]
    min_p: NDArray[np.float64]  # [R]
    logprobs: NDArray[np.int64]  # [R] -1: none wanted, else how many of the likeliest

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class WantedLogits:
    """Logits asked for by scoring requests that share the columns: result [rows, columns]."""

    rows: NDArray[np.int64]  # rows of the flat batch
    columns: NDArray[np.int64]  # token ids


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything one forward pass needs: one flat batch of T tokens of S sequences, no padding.

    Sequence s owns rows query_start[s] : query_start[s + 1]; its keys are positions
    0 .. context_len[s] - 1; block b of its table lies at element offset block_offsets[s, b]
    within each layer's slab (0 where unused).
    """

    step: int
    tokens: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    query_start: NDArray[np.int32]  # [S + 1]
    context_len: NDArray[np.int32]  # [S]
    block_offsets: NDArray[np.int64]  # [S, most blocks of one sequence]
    sampling: SamplingRows
    wanted: tuple[WantedLogits, ...] = ()

    @property
    def num_tokens(self) -> int:
        """T, the rows of the flat batch."""
        return len(self.tokens)

    @property
    def num_seqs(self) -> int:
        """S, the sequences that take part."""
        return len(self.context_len)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an executor returns for a StepPlan; rows in the plan's order."""

    tokens: NDArray[np.int64]  # [R] sampled
    logprobs: tuple[dict[int, float] | None, ...] = ()  # [R] or empty when no row wants any
    wanted: tuple[NDArray[np.float32], ...] = ()  # one [rows, columns] a WantedLogits
    forward_s: float = 0.0
    sampling_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. finish_reason: stop | length | eos | score | abort | error."""

    request_id: int
    token_ids: tuple[int, ...]  # sampled, stop string's and end-of-sequence tokens included
    text: str
    finish_reason: str
    num_cached_tokens: int | None = 0  # None: the engine does not tell
    logprobs: tuple[dict[int, float], ...] | None = None
    logits: NDArray[np.float32] | None = None  # [positions, columns] of a scoring request
    error: Exception | None = None


class CacheRoom(NamedTuple):
    """How many blocks a KV cache may come to hold, and the tokens of a block."""

    blocks: int
    block_size: int


class TokenEngine(Protocol):
    """What search needs of an engine; an adapter declares what it lacks in `capabilities`."""

    name: str
    max_model_len: int
    tokenizer: Any  # workbench.tokenizer.Tokenizer or a look-alike
    fingerprint: str  # of the weights and the arithmetic: equal fingerprints give equal tokens
    capabilities: frozenset[str]  # "token_identity", "trace", "resplit", "forget"; a server's own
    architecture: str  # as the model's config names it
    value_outputs: int | None  # columns of its value head; None: a language model

    def add(
        self, prompt: str | SequenceOf[int], params: SamplingParams, *, tag: Tag | None = None
    ) -> int:
        """Queue a prompt; returns its request id."""
        ...

    def add_score(
        self,
        token_ids: SequenceOf[int],
        positions: SequenceOf[int],
        columns: SequenceOf[int],
        *,
        tag: Tag | None = None,
    ) -> int:
        """Queue a request for logits [positions, columns]: token ids, or a value head's outputs."""
        ...

    def step(self) -> list[RequestOutput]:
        """One scheduling step; returns the requests that finished in it."""
        ...

    def abort(self, request_id: int) -> None:
        """Drop a request; unknown or finished ids are ignored."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        ...

    @property
    def cache_room(self) -> CacheRoom | None:
        """What its cache may hold under the present split; None: it does not tell."""
        ...

    @property
    def description(self) -> Mapping[str, Any]:
        """Of config, spec, num_blocks, weight_bytes and block_bytes, for a recording, the known."""
        ...

    def trace_as(self, recorder: Any, name: str) -> tuple[Any, str]:
        """Write steps and requests to this trace.Recorder from now on, under this name; returns
        those before it (capability "trace").
        """
        ...

    def forget(
        self, lines: SequenceOf[SequenceOf[int]], kept: SequenceOf[SequenceOf[int]] = ()
    ) -> int:
        """Give up cached KV of these tokens that `kept` ones do not need (capability "forget")."""
        ...
