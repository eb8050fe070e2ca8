"""The strategies of papers against small oracles over random trees, then over two fake engines.

A canned tree says by a node's path alone how its step ends, how long it is and what it scores. An
oracle knows only paths and plain numbers; it returns what must be sampled and which nodes vote.
"""

import hashlib
import math
import random
from collections import Counter
from fractions import Fraction
from itertools import accumulate, combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.search.conftest import tree
from workbench import config
from workbench.core import node_seed
from workbench.errors import ConfigError
from workbench.search import variants
from workbench.search.answers import extract_answer
from workbench.search.prm import PRM
from workbench.search.problems import Problem, load_problems
from workbench.search.search import run_search
from workbench.search.strategies import Beam, BeamSearch, BestOfN, Generate, Step, split_steps
from workbench.search.variants import DORA, DVTS, ETS, REBASE, STRATEGIES, WORKED, SelfConsistency

PROBLEM = Problem("p", "What is 1+1?")
TEXTS = ("add one\n\n", "add  one\n\n", "take two away\n\n", "12+7=19\n\n")


def drive(search, step_of, score_of):
    """Run a search with functions for replies; the outcome and everything it asked."""
    asked, reply = [], None
    try:
        while True:
            request = search.send(reply)
            asked.append(request)
            if isinstance(request, Generate):
                reply = [step_of(beam) for beam in request.beams]
            else:
                reply = [tuple(score_of(beam)) for beam in request.beams]
    except StopIteration as end:
        return end.value, asked


def generated(asked):
    return [[beam.path for beam in r.beams] for r in asked if isinstance(r, Generate)]


class Canned:
    """A tree in which everything is a function of seed and path. ends: in 1 of how many steps."""

    def __init__(self, seed, ends, levels, aggregation):
        self.seed, self.ends, self.levels = seed, ends, levels
        self.aggregate = {"last": lambda scores: scores[-1], "min": min}[aggregation]

    def pick(self, what, path, count):
        digest = hashlib.sha256(repr((self.seed, what, path)).encode()).digest()
        return int.from_bytes(digest[:4], "little") % count

    def grows(self, path):
        return self.pick("ends", path, self.ends) > 0

    def finished(self, path):
        return not self.grows(path) and self.pick("how", path, 3) > 0

    def text(self, path):
        return TEXTS[self.pick("text", path, len(TEXTS))]

    def tokens(self, path):
        return 1 + self.pick("tokens", path, 5)

    def scores(self, path):
        return [(1 + self.pick("score", p, self.levels)) / (1 + self.levels) for p in line(path)]

    def score(self, path):
        return self.aggregate(self.scores(path))

    def best(self, paths):
        """The first of the best."""
        return max(paths, key=self.score)

    def step(self, beam):
        reason = "stop" if self.grows(beam.path) else "context"
        reason = "eos" if self.finished(beam.path) else reason
        return Step((7,) * self.tokens(beam.path), self.text(beam.path), reason)

    def play(self, strategy):
        """What each Generate samples, and what votes; each beam has its own tokens and scores."""
        search = strategy.search(PROBLEM)
        outcome, asked = drive(search, self.step, lambda beam: self.scores(beam.path))
        sampled = generated(asked)
        assert max(Counter(path for paths in sampled for path in paths).values()) == 1
        for beam in outcome.beams:
            path = beam.path
            assert len(beam.token_ids) == sum(map(self.tokens, line(path)))
            assert beam.steps == tuple(map(self.text, line(path)))
            assert list(beam.step_scores) == self.scores(path)
            assert (beam.finished, beam.can_grow) == (self.finished(path), self.grows(path))
        keys = [(-self.score(beam.path), beam.path) for beam in outcome.beams]
        assert keys == sorted(keys)
        return [sorted(paths) for paths in sampled], sorted(beam.path for beam in outcome.beams)


def line(path):
    """The nodes on the way to this one, which comes last."""
    return [path[:depth] for depth in range(1, len(path) + 1)]


TREES = {
    "seed": st.integers(0, 10**6),
    "ends": st.sampled_from([1, 2, 4, 9, 10**9]),  # all beams at once, ..., never
    "levels": st.sampled_from([1, 3, 50]),  # 1: all scores are equal
    "aggregation": st.sampled_from(["last", "min"]),
    "n": st.integers(1, 9),
    "max_depth": st.integers(1, 5),
}


def on_trees(**more):
    """200 random trees, after n = 1, equal scores and all beams ending at once. more: of a test."""

    def decorate(test):
        usual = {"aggregation": "last", "max_depth": 4} | dict.fromkeys(more, 1)
        for corner in ((1, 1, 3, 4), (2, 10**9, 3, 1), (3, 10**9, 1, 6), (4, 1, 1, 1)):
            test = example(**dict(zip(("seed", "ends", "levels", "n"), corner)), **usual)(test)
        return settings(max_examples=200, deadline=None)(given(**TREES, **more)(test))

    return decorate


# -- beams that ended keep their places, and the rest are divided --


def grown(canned, n, max_depth, counts_of):
    """What is sampled and what votes, where counts_of divides the places that are left."""
    sampled, ended, nodes = [], [], [(k,) for k in range(n)]
    while True:
        sampled.append(sorted(nodes))
        ended += [node for node in nodes if not canned.grows(node)]
        nodes = [node for node in nodes if canned.grows(node)]
        if not nodes or len(sampled) == max_depth:
            return sampled, sorted(ended + nodes)
        counts = counts_of(nodes, n - len(ended))
        assert len(ended) + sum(counts) == n
        nodes = [(*node, k) for node, count in zip(nodes, counts) for k in range(count)]


def rounded(weights, places):
    """Shares of what is left, up, the heaviest first."""
    counts = {}
    order = sorted(range(len(weights)), key=lambda k: (-weights[k], k))
    for place, k in enumerate(order):
        left = [Fraction(weights[other]) for other in order[place:]]
        free = places - sum(counts.values())
        counts[k] = math.ceil(free * left[0] / sum(left)) if free else 0
    return [counts[k] for k in range(len(weights))]


def balanced(canned, nodes, temperature=0.2):
    scores = [canned.score(node) for node in nodes]
    powers = [math.exp((score - max(scores)) / temperature) for score in scores]
    return [power / math.fsum(powers) for power in powers]


@on_trees()
def test_rebase(seed, ends, levels, aggregation, n, max_depth):
    """A beam's children are its part of the free places, by the softmax of scores."""
    canned = Canned(seed, ends, levels, aggregation)

    def counts_of(nodes, free):
        return rounded(balanced(canned, nodes, 0.5), free)

    strategy = REBASE(n, max_depth, balance_temperature=0.5, aggregation=aggregation)
    assert canned.play(strategy) == grown(canned, n, max_depth, counts_of)


@on_trees(sharing=st.sampled_from([0, 0.5, 1, 2]), coverage=st.sampled_from([0, 1]))
def test_ets(seed, ends, levels, aggregation, n, max_depth, sharing, coverage):
    """REBASE among those that are kept, by the paper's objective worked out from scratch."""
    canned = Canned(seed, ends, levels, aggregation)

    def counts_of(nodes, free):
        shares = rounded(balanced(canned, nodes), free)

        def needs(chosen):  # nodes of the tree, its root among them
            return len({part for k in chosen for part in [(), *line(nodes[k])]})

        def kinds(chosen):
            return len({canned.text(nodes[k]).replace("  ", " ") for k in chosen})

        def worth(chosen):
            found = Fraction(sum(shares[k] for k in chosen), free)
            found -= Fraction(sharing) * needs(chosen) / needs(every)
            return found + Fraction(coverage) * kinds(chosen) / kinds(every)

        every = frozenset(range(len(nodes)))
        subtrees = [
            frozenset(k for k in every if part in [(), *line(nodes[k])])
            for node in nodes
            for part in [(), *line(node)]
        ]
        kept, before = every, None
        while kept != before:
            before = kept
            for these in sorted(dict.fromkeys(subtrees), key=len):
                kept = max(filter(None, (kept, kept - these, kept | these)), key=worth)
        weights = balanced(canned, nodes)
        return rounded([weights[k] if k in kept else 0 for k in range(len(nodes))], free)

    weights = {"sharing_weight": sharing, "coverage_weight": coverage}
    strategy = ETS(n, max_depth, aggregation=aggregation, **weights)
    assert canned.play(strategy) == grown(canned, n, max_depth, counts_of)


def kept_and_most(strategy, beams):
    """By the paper's objective with weights of 1: what ETS keeps, and the most of any set."""
    weights = REBASE.weights(strategy, beams)
    shares = rounded(weights, len(beams))
    nodes = [{beam.path[:depth] for depth in range(len(beam.path) + 1)} for beam in beams]
    kinds = [beam.steps[-1] for beam in beams]

    def worth(chosen):
        parts = sum(shares[k] for k in chosen) / len(beams)
        parts -= len(set().union(*(nodes[k] for k in chosen))) / len(set().union(*nodes))
        return parts + len({kinds[k] for k in chosen}) / len(set(kinds))

    every = range(len(beams))
    sets = [chosen for size in every for chosen in combinations(every, size + 1)]
    kept = [k for k, weight in enumerate(strategy.weights(beams)) if weight]
    return worth(kept), max(map(worth, sets))


def test_ets_keeps_what_pays_together():
    """Of two branches whose beams share a long line each, neither pays for it with one beam; over
    random trees little is missing to the best of all sets.
    """
    lines = [(branch, 0, 0, 0, 0, leaf) for branch in range(2) for leaf in range(4)]
    beams = [Beam(path, steps=("s",) * 5 + (str(path),), step_scores=(0.5,) * 6) for path in lines]
    assert kept_and_most(ETS(n=8), beams) == (1.0, 1.0)
    draw, missing = random.Random(0), []
    for _ in range(60):
        paths, texts = {()}, draw.choice((2, 4, 8))
        for _ in range(6):
            paths = {(*draw.choice([*paths]), k) for k in range(3) for _ in range(4)}
        beams = [
            Beam(
                path,
                steps=("s",) * 5 + (str(draw.randrange(texts)),),
                step_scores=(0.5,) * 5 + (draw.random(),),
            )
            for path in sorted(paths)[:8]
        ]
        found, most = kept_and_most(ETS(n=8), beams)
        missing.append(most - found)
    assert min(missing) > -1e-9 and sum(missing) / len(missing) < 0.01


@on_trees()
def test_dora(seed, ends, levels, aggregation, n, max_depth):
    """Of what REBASE would extend, by score times the beam's part in its own direction."""
    canned = Canned(seed, ends, levels, aggregation)

    def likeness(one, other):
        bags = []
        for path in (one, other):
            text = "  " + "".join(map(canned.text, line(path)))
            bags.append(Counter(text[k : k + 3] for k in range(len(text) - 2)))
        first, second = bags
        both = sum(first[key] * second[key] for key in first)
        return both / math.sqrt(math.prod(sum(v * v for v in bag.values()) for bag in bags))

    def counts_of(nodes, free):
        weights = balanced(canned, nodes)
        chosen = [k for k, count in enumerate(rounded(weights, free)) if count]
        for k, node in enumerate(nodes):
            alike = [math.exp((likeness(node, nodes[j]) - 1) / 0.01) for j in chosen]
            weights[k] *= 1 / math.fsum(alike) if k in chosen else 0
        return rounded(weights, free)

    strategy = DORA(n, max_depth, aggregation=aggregation)
    assert canned.play(strategy) == grown(canned, n, max_depth, counts_of)


def test_dora_gives_a_direction_one_share_however_many_beams_say_it():
    """Two beams that say the same share what one that says something else has alone."""
    texts = ["one way of it\n\n", "one way of it\n\n", "12+7=19\n\n"]
    search = DORA(n=3, max_depth=2).search(PROBLEM)
    _, asked = drive(
        search, lambda b: Step((1,), texts[b.path[0]], "stop"), lambda b: [0.5] * len(b.steps)
    )
    assert generated(asked)[1] == [(0, 0), (2, 0), (2, 1)]


# -- the others --


@on_trees(beam_width=st.integers(1, 3))
def test_dvts(seed, ends, levels, aggregation, n, max_depth, beam_width):
    """Each subtree on its own: its best child goes on; it ends with its finished siblings."""
    canned = Canned(seed, ends, levels, aggregation)
    sampled, voting = [[] for _ in range(max_depth)], []
    for subtree in range(n):
        siblings = [(subtree * beam_width + k,) for k in range(beam_width)]
        for depth in range(max_depth):
            sampled[depth] += siblings
            chosen = canned.best(siblings)
            if depth == max_depth - 1 or not canned.grows(chosen):
                voting += {chosen, *filter(canned.finished, siblings)}
                break
            siblings = [(*chosen, k) for k in range(beam_width)]
    found = canned.play(DVTS(n * beam_width, beam_width, max_depth, aggregation))
    assert found == ([sorted(paths) for paths in sampled if paths], sorted(voting))


def judged_ahead(canned, n, beam_width, max_depth, lookahead):
    """Beams are judged by their first child's first child; what is sampled once stays."""
    sampled, voting, known, survivors = [], [], set(), [()]

    def sample(paths):
        new = set(paths) - known
        sampled.extend([sorted(new)] if new else [])
        known.update(new)

    for depth in range(max_depth):
        places = n - len(voting)
        nodes = [(*survivors[k % len(survivors)], k // len(survivors)) for k in range(places)]
        sample(nodes)
        ahead = nodes
        for _ in range(min(lookahead, max_depth - 1 - depth)):
            ahead = [(*path, 0) if canned.grows(path) else path for path in ahead]
            sample(ahead)
        voting += [node for node in nodes if not canned.grows(node)]
        judged = [(node, canned.score(last)) for node, last in zip(nodes, ahead)]
        judged = [(node, score) for node, score in judged if canned.grows(node)]
        kept = sorted(judged, key=lambda each: -each[1])[: max(1, n // beam_width)]
        survivors = [node for node in nodes if node in dict(kept)]
        if not survivors:
            break
    return sampled, sorted(voting + [node for node, _ in judged])


@on_trees(beam_width=st.integers(1, 4), lookahead=st.integers(1, 3))
def test_lookahead(seed, ends, levels, aggregation, n, max_depth, beam_width, lookahead):
    canned = Canned(seed, ends, levels, aggregation)
    strategy = variants.Lookahead(n, beam_width, max_depth, lookahead, aggregation)
    assert canned.play(strategy) == judged_ahead(canned, n, beam_width, max_depth, lookahead)


def test_lookahead_ends_where_no_beam_grows():
    """Guards a server's thread: how far ahead is the client's to say."""
    canned = Canned(seed=2, ends=1, levels=3, aggregation="last")
    far, near = (variants.Lookahead(4, 2, depth, depth) for depth in (10**12, 3))
    assert canned.play(far) == canned.play(near)


@on_trees(beam_width=st.integers(1, 4))
def test_beam_search(seed, ends, levels, aggregation, n, max_depth, beam_width):
    """Each beam is judged by itself: no step ahead."""
    canned = Canned(seed, ends, levels, aggregation)
    strategy = BeamSearch(n, beam_width, max_depth, aggregation=aggregation)
    assert canned.play(strategy) == judged_ahead(canned, n, beam_width, max_depth, 0)


@on_trees()
def test_best_of_n(seed, ends, levels, aggregation, n, max_depth):
    """n samples at once; all vote, whatever ended them."""
    canned, nodes = Canned(seed, ends, levels, aggregation), [(k,) for k in range(n)]
    assert canned.play(BestOfN(n, aggregation=aggregation)) == ([nodes], nodes)


@on_trees(temperature=st.sampled_from([0.3, 1, 10]))
def test_particle_filter(seed, ends, levels, aggregation, n, max_depth, temperature):
    """n draws among all particles after every step but the last; ended ones are only copied."""
    canned = Canned(seed, ends, levels, aggregation)
    sampled, particles, nodes = [], [], [(k,) for k in range(n)]
    for step in range(1, max_depth + 1):
        sampled.append(sorted(nodes))
        particles += nodes
        if step == max_depth or not any(map(canned.grows, nodes)):
            break
        odds = [min(canned.score(p), 1 - 1e-7) for p in particles]
        logits = [math.log(score / (1 - score)) for score in odds]
        ends_at = list(accumulate(math.exp(each / temperature) for each in logits))
        drawn = Counter()
        for draw in range(n):
            number = node_seed(seed, "p\x1fresampling", (step, draw)) / 2**64
            drawn[next(k for k, end in enumerate(ends_at) if end > number * ends_at[-1])] += 1
        nodes = [(*particles[k], c) for k in sorted(drawn) for c in range(drawn[k])]
        nodes = [node for node in nodes if canned.grows(node[:-1])]
        ended = [k for k, particle in enumerate(particles) if not canned.grows(particle)]
        particles = [particles[k] for k in ended for _ in range(drawn[k])]
        if not nodes:
            break
    strategy = variants.ParticleFilter(n, max_depth, temperature, aggregation, seed)
    assert canned.play(strategy) == (sampled, sorted(particles))


@on_trees()
def test_self_consistency(seed, ends, levels, aggregation, n, max_depth):
    """n samples at once, none scored; all vote in their order, with nothing to weigh them by."""
    canned, search = Canned(seed, ends, levels, aggregation), SelfConsistency(n=n).search(PROBLEM)
    outcome, asked = drive(search, canned.step, lambda beam: pytest.fail("a score was asked"))
    paths = [(k,) for k in range(n)]
    assert generated(asked) == [paths] == [[beam.path for beam in outcome.beams]]
    for beam, path in zip(outcome.beams, paths):
        assert (beam.steps, beam.step_scores) == ((canned.text(path),), ())
        assert (len(beam.token_ids), beam.finished) == (canned.tokens(path), canned.finished(path))


def test_self_consistency_asks_no_score_and_poses_the_problem_in_its_words(fake_engine):
    """n samples, no PRM request, the answer of most; examples before, instruction after it."""
    answers = {(0,): 7, (1,): 3, (2,): 3}
    llm = fake_engine(lambda text, seed: f"\\boxed{{{answers[seeds[seed]]}}}<eos>")
    seeds = {node_seed(0, "p", path): path for path in answers}
    prm, words = fake_engine(), {"examples": ("Q: 2+2\nA: 4",), "instruction": "Step by step."}
    strategy = SelfConsistency(n=3, max_tokens=99, **words)
    result = run_search(PROBLEM, llm=llm, prm=PRM(prm), strategy=strategy)
    assert result.answers == {"p": "3"}
    assert not prm.asked
    asked = "Q: 2+2\nA: 4\n\nWhat is 1+1?\n\nStep by step."
    chat = llm.tokenizer.encode_chat([{"role": "user", "content": asked}])
    assert {tokens for tokens, _, _ in llm.asked} == {tuple(chat)}
    assert {(params.stop, params.max_tokens) for _, params, _ in llm.asked} == {((), 99)}
    posed = SelfConsistency(examples=WORKED, instruction=variants.STEP_BY_STEP).posed(PROBLEM)
    *examples, question, instruction = posed.problem.split("\n\n")
    assert (question, instruction) == ("What is 1+1?", "Let's think step by step.")
    assert [extract_answer(example) for example in examples] == ["29", "7"]


def test_finish_at_limit_samples_the_last_step_to_the_end():
    """Search and Learn's way: no stop string in the last iteration, and more tokens."""
    search = BeamSearch(n=2, beam_width=1, max_depth=2, finish_at_limit=True, limit_tokens=99)
    step = Step((1,), "s\n\n", "stop")
    _, asked = drive(search.search(PROBLEM), lambda _: step, lambda beam: [0.5] * len(beam.steps))
    requests = [request for request in asked if isinstance(request, Generate)]
    assert [(r.stop, r.max_tokens) for r in requests] == [(("\n\n",), None), ((), 99)]


def test_completions_are_split_at_blank_lines():
    """Search and Learn would score an empty last step; ours has 1, 2, 2, 2 steps."""
    assert split_steps("a") == ("a",)
    assert split_steps("a\n\nb") == split_steps("a\n\n\n\nb") == ("a\n\n", "b")
    assert split_steps("a\n\nb\n\n") == ("a\n\n", "b\n\n")
    assert split_steps("") == split_steps(" \n\n ") == ()


# -- all of them --


def test_the_list_has_every_strategy_with_a_line_that_says_what_it_does():
    assert tuple(STRATEGIES) == config.STRATEGIES
    lines = [kind.__doc__.partition("\n")[0] for kind in STRATEGIES.values()]
    assert all(line.endswith(".") and len(line) > 30 for line in lines)
    assert len(set(lines)) == len(STRATEGIES)


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_token_depends_on_batches_or_problems_in_flight(name, fake_engine):
    """The same tree, votes and token counts, whatever the engines do at once; another by seed."""

    def found(batch, seed=0):
        pair = {"llm": fake_engine(batch=batch), "prm": PRM(fake_engine(batch=batch + 1))}
        how = {"strategy": STRATEGIES[name](n=8), "max_step_tokens": 40, "seed": seed}
        return run_search(load_problems("tiny", 3), **pair, **how, min_problem_batch=batch)

    first, second, other = found(1), found(50), found(1, seed=1)
    assert tree(first) == tree(second) != tree(other)
    per_problem = first.tree.groupby("problem_id", sort=False)["step_tokens"].sum()
    assert per_problem.tolist() == first.problems["tokens"].tolist()
    assert first.throughput.tokens == per_problem.sum()


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (BeamSearch, {"n": 0}, "BeamSearch.n is 0; allowed"),
        (BestOfN, {"aggregation": "lst"}, "Did you mean 'last'"),
        (DVTS, {"n": 6}, r"DVTS.n is 6; allowed: multiples of beam_width \(4\)"),
        (REBASE, {"balance_temperature": 0}, "balance_temperature is 0; allowed: >= 1e-06"),
        (ETS, {"sharing_weight": -1}, "sharing_weight is -1"),
        (variants.ParticleFilter, {"seed": 0.5}, "seed is 0.5; allowed: a whole number or None"),
        (SelfConsistency, {"examples": "Q: 1"}, "examples is 'Q: 1'; allowed: a list of texts"),
    ],
)
def test_impossible_settings_are_refused(kind, given, said):
    """By the package's one check of settings, in words that say what is allowed."""
    with pytest.raises(ConfigError, match=said):
        kind(**given)
