"""The manager alone against a naive model: any interleaving of admissions, growth and releases."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tests.kvcache.naive import ComparedCache
from workbench.kvcache.arena import BlockShape, KVArena, PageShape
from workbench.kvcache.manager import KVCacheManager
from workbench.kvcache.policies import StaticSplit

FAMILY = [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 1, 1]  # few tokens, many equal prefixes
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14) | st.integers(1, 14).map(
    lambda n: FAMILY[:n]
)
SALTS = st.sampled_from([b"", b"tenant"])
MAX_HITS = st.none() | st.integers(0, 14)


class ManagerMachine(RuleBasedStateMachine):
    """Each call goes to both and every answer, count and statistic is compared (naive.py)."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.next_id = 0
        self.tokens: dict[int, list[int]] = {}

    @initialize(
        num_blocks=st.integers(1, 9), block_size=st.integers(1, 4),
        caching=st.sampled_from([True] * 4 + [False]), reuse=st.booleans(),
    )  # fmt: skip
    def create(self, num_blocks: int, block_size: int, caching: bool, reuse: bool) -> None:
        reuse = {"reuse_partial_blocks": caching and reuse}
        self.cache = ComparedCache(self.new_manager(num_blocks, block_size, caching, **reuse))

    new_manager = KVCacheManager

    @rule(
        target=sequences, tokens=TOKENS, first=st.none() | st.integers(1, 14), salt=SALTS,
        max_hit=MAX_HITS, keep_free=st.integers(0, 3), readmission=st.booleans(),
    )  # fmt: skip
    def allocate(self, tokens, first, salt, max_hit, keep_free, readmission) -> int:
        self.next_id += 1
        first = None if first is None else min(first, len(tokens))
        asked = {"salt": salt, "max_hit": max_hit}
        cached = self.cache.match(tokens, **asked)
        asked |= {"keep_free": keep_free, "readmission": readmission}
        answer = self.cache.allocate(self.next_id, tokens, first, **asked)
        if answer is not None:
            assert answer.num_cached_tokens == cached
            self.tokens[self.next_id] = tokens
        return self.next_id

    @rule(sequence=sequences, more=st.lists(st.integers(0, 1), max_size=5))
    def extend(self, sequence: int, more: list[int]) -> None:
        if sequence in self.tokens:
            tokens = self.tokens[sequence] + more
            if self.cache.extend(sequence, tokens) is not None:
                self.tokens[sequence] = tokens

    @rule(
        sequence=consumes(sequences), computed=st.none() | st.integers(0, 20),
        remember=st.booleans(),
    )  # fmt: skip
    def free(self, sequence: int, computed: int | None, remember: bool) -> None:
        if sequence in self.tokens:
            tokens = self.tokens.pop(sequence)
            room = self.cache.naive.sequences[sequence].room
            computed = None if computed is None else min(computed, room)
            self.cache.free(sequence, computed, token_ids=tokens if remember else None)

    @rule(tokens=TOKENS, readmission=st.booleans())
    def visit(self, tokens: list[int], readmission: bool) -> None:
        """Come, compute everything, go: what fills a cache with content to be evicted."""
        if self.cache.allocate(0, tokens, readmission=readmission) is not None:
            self.cache.free(0, token_ids=tokens)

    @rule(line=TOKENS, kept=TOKENS, salt=SALTS)
    def forget(self, line: list[int], kept: list[int], salt: bytes) -> None:
        self.cache.forget(line, kept, salt)

    @invariant()
    def laws_hold(self) -> None:
        self.cache.compare()


class ArenaMachine(ManagerMachine):
    """Under a static split a model behaves as one with blocks of its own, whatever others do."""

    def new_manager(self, num_blocks: int, block_size: int, caching: bool, **reuse: bool):
        page = PageShape(slabs=1, stripe=64 * (1 + num_blocks % 3))
        shapes = [BlockShape("it", 1, 64), BlockShape("other", 1, page.stripe)]
        memory, share = (num_blocks + 3) * page.page_bytes, num_blocks / (num_blocks + 3)
        self.arena = KVArena(memory, shapes, StaticSplit(), share, page=page)
        return self.arena.cache("it", block_size, caching, **reuse)

    @rule(tokens=TOKENS, stays=st.booleans())
    def another_model_works(self, tokens: list[int], stays: bool) -> None:
        other = self.arena.cache("other", 4)
        other.apply()
        if stays and other.num_active:
            other.free_all()
        elif other.allocate(self.next_id, tokens) is not None and not stays:
            other.free(self.next_id)
        self.next_id += 1
        self.arena.check()


class ResizedMachine(ManagerMachine):
    """A cache that is made smaller and larger all the time drops nothing in use."""

    @rule(num_blocks=st.integers(1, 9))
    def resize(self, num_blocks: int) -> None:
        num_blocks, active = min(num_blocks, len(self.cache.pool.blocks)), self.cache.num_active
        answer = self.cache.resize(num_blocks)
        assert answer.outcome == ("later" if num_blocks < active else "reached")
        self.cache.apply()
        assert self.cache.num_blocks == max(num_blocks, active)

    @rule()
    def step(self) -> None:
        self.cache.apply()


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestManagerInArena = ArenaMachine.TestCase
TestManagerInArena.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestResizedManager = ResizedMachine.TestCase
TestResizedManager.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
