"""Two and three models in one arena: any interleaving of their steps and re-splits."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.kvcache.test_manager_stateful import SALTS, TOKENS
from workbench.kvcache.arena import BlockShape, KVArena, PageShape
from workbench.kvcache.manager import KVCacheManager
from workbench.kvcache.policies import FirstCome, MarginalValue, PhaseAware, StaticSplit

SIZE = 3  # tokens a block
PAGE = PageShape(slabs=2, stripe=256)
SHAPES = (  # 4, 1 and 2 blocks a page: sizes that divide and one that does not
    BlockShape("llm", 2, 64, floor_blocks=5),
    BlockShape("prm", 2, 256, element_bytes=2, floor_blocks=2),
    BlockShape("third", 1, 160, floor_blocks=3, block_cost=2.0),
)
MODELS = st.sampled_from([shape.name for shape in SHAPES])
POLICIES = st.sampled_from([StaticSplit, FirstCome, PhaseAware, MarginalValue])
Content = tuple[bytes, tuple[int, ...]]  # salt, all tokens up to what is written in the block


@dataclass
class Running:
    salt: bytes
    tokens: list[int]
    room: int  # tokens the cache made room for
    stored: int  # tokens whose KV is in memory


class BytesOracle:
    """One arena, its caches and the bytes beneath, as plainly as possible; `store` is the forward
    pass of a step. Every read is compared with what ought to be there, so a stale hash, a lost
    move, or bytes of another model that nobody cleared are seen at once.
    """

    def __init__(self, arena: KVArena, block_size: int, reuse: bool = False) -> None:
        self.arena, self.size = arena, block_size
        self.caches: dict[str, KVCacheManager] = {}
        self.running: dict[str, dict[int, Running]] = {}
        for name in arena.models:
            self.caches[name] = arena.cache(name, block_size, reuse_partial_blocks=reuse)
            self.running[name] = {}
        # page -> model that wrote it, and block id -> content
        self.pages: dict[int, tuple[str, dict[int, Content]]] = {}
        self.copied = 0

    def read(self, model: str, block: int) -> Content | None:
        writer, held = self.pages.get(block // self.per_page(model), (model, {}))
        assert writer == model, "a block is read in a page with another model's bytes"
        return held.get(block)

    def write(self, model: str, block: int, content: Content) -> None:
        writer, held = self.pages.setdefault(block // self.per_page(model), (model, {}))
        assert writer == model, "a page was leased to another model and not cleared"
        held[block] = content

    def per_page(self, model: str) -> int:
        return self.arena.packing(model).blocks

    def store(self) -> None:
        """What is moved is read, pages are cleared, then all is written; then all is read back."""
        moves = {model: cache.take_moves() for model, cache in self.caches.items()}
        read = [(m, to, self.read(m, at)) for m, pairs in moves.items() for at, to in pairs]
        assert len({(model, to) for model, to, _ in read}) == len(read), "two moves to one block"
        for page in self.arena.take_retyped():
            self.pages.pop(page, None)
        for model, to, content in read:
            if content is not None:
                self.write(model, to, content)
        self.copied += len(read)
        for step in (self.compute, self.verify):
            for model, running in self.running.items():
                for seq_id, sequence in running.items():
                    step(model, seq_id, sequence)

    def compute(self, model: str, seq_id: int, sequence: Running) -> None:
        """The tokens that it lacks; those before them in the same block must be there."""
        table = self.caches[model].block_table(seq_id)
        for i in range(sequence.stored // self.size, -(-sequence.room // self.size)):
            if i * self.size < sequence.stored:
                before = self.content(sequence, i, sequence.stored)
                assert self.holds(model, table[i], before), "the start of a block is lost"
            self.write(model, table[i], self.content(sequence, i, sequence.room))
        sequence.stored = sequence.room

    def verify(self, model: str, seq_id: int, sequence: Running) -> None:
        for i, block in enumerate(self.caches[model].block_table(seq_id)):
            expected = self.content(sequence, i, sequence.room)
            assert self.holds(model, block, expected), "not what was written"

    def holds(self, model: str, block: int, expected: Content) -> bool:
        """Whether the block starts with it; a copied partial block may hold more."""
        salt, tokens = self.read(model, block) or (b"", ())
        return (salt, tokens[: len(expected[1])]) == expected

    def content(self, sequence: Running, block: int, num_tokens: int) -> Content:
        end = min(num_tokens, (block + 1) * self.size)
        return sequence.salt, tuple(sequence.tokens[:end])


class ArenaMachine(RuleBasedStateMachine):
    """Bytes are written, moved and cleared for real (BytesOracle); every read is compared."""

    @initialize(
        count=st.integers(2, 3), num_pages=st.integers(6, 11), policy=POLICIES,
        reuse=st.sampled_from([True, True, False]),
    )  # fmt: skip
    def create(self, count: int, num_pages: int, policy, reuse: bool) -> None:
        memory, shapes = num_pages * PAGE.page_bytes, SHAPES[:count]
        self.arena = KVArena(memory, shapes, policy(), page=PAGE)
        self.memory = BytesOracle(self.arena, SIZE, reuse)
        self.next_id = 0

    def model(self, name: str) -> str:
        return name if name in self.arena.models else "llm"

    def a_running(self, name: str, which: int) -> int | None:
        ids = list(self.memory.running[name])
        return ids[which % len(ids)] if ids else None

    @rule(name=MODELS, tokens=TOKENS, first=st.integers(1, 14), salt=SALTS, spare=st.integers(0, 2))
    def allocate(self, name: str, tokens, first: int, salt: bytes, spare: int) -> None:
        name, self.next_id = self.model(name), self.next_id + 1
        cache, first = self.memory.caches[name], min(first, len(tokens))
        cached, available = cache.match(tokens, salt=salt), cache.num_free + cache.num_cached
        needed = -(-len(tokens) // SIZE) + spare
        admitted = cache.allocate(self.next_id, tokens, first, salt=salt, keep_free=spare)
        if admitted is None:
            assert needed > available - cached // SIZE
            return
        assert needed <= available + cached // SIZE
        assert admitted.num_cached_tokens == cached
        room = max(first, cached)
        self.memory.running[name][self.next_id] = Running(salt, list(tokens), room, cached)

    @rule(name=MODELS, which=st.integers(0, 9), more=st.lists(st.integers(0, 1), max_size=5))
    def extend(self, name: str, which: int, more: list[int]) -> None:
        name = self.model(name)
        seq_id = self.a_running(name, which)
        if seq_id is not None:
            sequence = self.memory.running[name][seq_id]
            self.memory.store()
            tokens = sequence.tokens + more
            if self.memory.caches[name].extend(seq_id, tokens) is not None:
                sequence.tokens, sequence.room = tokens, len(tokens)

    @rule(name=MODELS, which=st.integers(0, 9), computed=st.none() | st.integers(0, 14))
    def free(self, name: str, which: int, computed: int | None) -> None:
        name = self.model(name)
        seq_id = self.a_running(name, which)
        if seq_id is not None:
            sequence = self.memory.running[name][seq_id]
            if computed is None or sequence.stored < sequence.room:
                self.memory.store()  # others may have hit what it was to compute
            stored = sequence.stored if computed is None else min(computed, sequence.stored)
            self.memory.caches[name].free(seq_id, stored, token_ids=sequence.tokens)
            del self.memory.running[name][seq_id]

    @rule(name=MODELS, lines=st.lists(TOKENS, min_size=1), kept=st.lists(TOKENS, max_size=1))
    def forget(self, name: str, lines: list[list[int]], kept: list[list[int]]) -> None:
        """Cached blocks go, and nothing that runs or is kept; their bytes may be anybody's."""
        cache = self.memory.caches[self.model(name)]
        before = cache.num_active, cache.num_cached
        hits = [cache.match(line) // SIZE for line in kept]
        given_up = cache.forget(lines, kept)
        assert (cache.num_active, cache.num_cached + given_up) == before
        assert [cache.match(line) // SIZE for line in kept] == hits

    @rule(name=MODELS, tokens=TOKENS)
    def visit(self, name: str, tokens: list[int]) -> None:
        """Come, compute everything, go: what fills pages with content to be given up."""
        name = self.model(name)
        cache = self.memory.caches[name]
        cached = cache.match(tokens)
        if cache.allocate(0, tokens) is not None:
            self.memory.running[name][0] = Running(b"", tokens, len(tokens), cached)
            self.memory.store()
            cache.free(0, token_ids=self.memory.running[name].pop(0).tokens)

    @rule(name=MODELS, first=st.integers(2, 40), kept=st.sets(st.integers(0, 11), max_size=4))
    def scatter(self, name: str, first: int, kept: set[int]) -> None:
        """Many come and few stay: pages that a block or two hold, with others cached."""
        name = self.model(name)
        cache, running = self.memory.caches[name], self.memory.running[name]
        come = {}
        for i in range(12):
            self.next_id += 1
            if cache.allocate(self.next_id, [first + i] * SIZE) is not None:
                running[self.next_id] = Running(b"", [first + i] * SIZE, SIZE, 0)
                come[i] = self.next_id
        self.memory.store()
        for i, seq_id in come.items():
            if i not in kept:
                del running[seq_id]
                cache.free(seq_id)

    @rule(name=MODELS, stored=st.booleans())
    def step(self, name: str, stored: bool) -> None:
        """Between two steps of a model: the arena may take pages, and move this model's blocks."""
        if stored:
            self.memory.store()
        cache = self.memory.caches[self.model(name)]
        before = {s: cache.block_table(s) for s in self.memory.running[self.model(name)]}
        moved = cache.apply()
        assert moved == any(cache.block_table(s) != table for s, table in before.items())
        pool = cache.pool
        assert not (pool.idle and pool.held > pool.grant.limit), "idle pages above the limit"

    @rule(name=MODELS)
    def recover(self, name: str) -> None:
        """A call of a model was cut short: what others have in use stays, bytes to come as well."""
        name = self.model(name)
        self.memory.caches[name].recover()
        self.memory.running[name].clear()

    @rule(share=st.floats(0.05, 0.95))
    def resplit(self, share: float) -> None:
        before = self.arena.target
        self.arena.resplit(share)
        assert self.arena.target == before, "nothing changes before the next step"

    @rule(name=MODELS, num_blocks=st.integers(1, 20))
    def resize(self, name: str, num_blocks: int) -> None:
        name = self.model(name)
        most = self.arena.num_pages * self.memory.per_page(name)
        answer = self.memory.caches[name].resize(min(num_blocks, most))
        pool = self.memory.caches[name].pool
        if -(-min(num_blocks, most) // pool.per_page) < pool.floor_pages:
            assert answer.refused

    @rule(name=MODELS)
    def nobody_starves(self, name: str) -> None:
        """A model without running requests can always admit one of the longest length."""
        name = self.model(name)
        shape = self.arena.packing(name).shape
        if not self.memory.running[name]:
            tokens = [7] * (shape.floor_blocks * SIZE)
            assert self.memory.caches[name].allocate(0, tokens) is not None
            self.memory.caches[name].free(0, 0)

    @rule()
    def store(self) -> None:
        self.memory.store()

    @invariant()
    def laws_hold(self) -> None:
        self.arena.check()

    def teardown(self) -> None:
        """Once nothing runs, every model comes to within its limit."""
        if not hasattr(self, "arena"):
            return
        self.memory.store()
        for name, running in self.memory.running.items():
            for seq_id in list(running):
                self.memory.caches[name].free(seq_id, running.pop(seq_id).stored)
        for cache in self.memory.caches.values():
            cache.apply()
        for pool in self.arena.pools:
            assert pool.held <= pool.grant.limit
        self.arena.check()


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
