"""Load on a server: what clients wait for, and what the server brings, by the number of clients.

Closed loop: each of the clients asks anew once it has its answer. --rate: requests arrive by a
Poisson process, answered or not. Prompts of 128 random tokens (--part shared: the first 96 are the
same), 64 new ones, greedy, end of sequence ignored, streamed. The fields are those of `vllm bench
serve`: ttft, to the first token; itl, between tokens; e2e, to the end; goodput, requests a second
that keep SLO. The peer of tokens_per_s is the same engine in this process, which generates for as
many prompts at a time; it runs before the server starts. health_p99 is what /health takes
meanwhile: how long the event loop lets a request wait. The client shares the server's cores.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import urlsplit

import numpy as np

from workbench.bench.record import Row
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.errors import WorkbenchError
from workbench.search.answers import check_choice

ROUNDS = {"quick": 2, "default": 4, "full": 12}  # requests a client
TOKENS, SHARED, NEW = 128, 96, 64
SLO = {"ttft": 1.0, "itl": 0.1}  # seconds; of a request's mean itl
MODE = {"prompt_tokens": TOKENS, "new_tokens": NEW, "slo_s": SLO, "batch_invariant": True}
SHARES = (50, 95, 99)  # percentiles
CALL = "import sys; from workbench.cli import main; sys.exit(main())"
Bodies = list[dict[str, object]]


@dataclass(slots=True)
class Answer:
    """What came of one request; times in seconds. status: 0 when the connection was lost."""

    sent: float
    status: int = 0
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0


def run(
    profile: str = "default",
    model: str = "tiny-solver",
    clients: str = "1,4,16,64",
    rate: float | None = None,
    url: str | None = None,
    part: str = "distinct",
    seed: int = 0,
) -> Iterator[Row]:
    """The rows of `workbench bench serve`. url: of a server that runs already, to be asked for
    `model`; rate: requests a second, in place of a closed loop.
    """
    check_choice("part", part, ("distinct", "shared"))
    counts, rounds = [int(each) for each in clients.split(",")], ROUNDS[profile]
    engine = Engine(model, max_num_seqs=max(counts), max_num_batched_tokens=2048)
    random = np.random.default_rng(seed)
    prompts = random.integers(0, engine.tokenizer.vocab_size, (sum(counts) * rounds, TOKENS))
    if part == "shared":
        prompts[:, :SHARED] = prompts[0, :SHARED]
    fixed = {
        "model": model,
        "max_tokens": NEW,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    parts = np.split(prompts, np.cumsum(counts)[:-1] * rounds)  # no prompt is asked twice
    in_process(engine, random.integers(0, 9, (1, TOKENS)), 1)  # kernels are compiled
    alone = [in_process(engine, asked, count) for asked, count in zip(parts, counts)]
    del engine
    with running(model, max(counts)) if url is None else given(url) as place:
        for count, asked, peer in zip(counts, parts, alone):
            bodies: Bodies = [fixed | {"prompt": prompt.tolist()} for prompt in asked]
            answers, health = asyncio.run(load(place, bodies, count, rate, seed))
            yield from rows_of(answers, health, f"c{count}", peer)


def in_process(engine: Engine, prompts: np.ndarray, count: int) -> float:
    """Tokens a second of the engine alone, so many prompts at a time."""
    params, start = (
        SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True),
        time.perf_counter(),
    )
    for first in range(0, len(prompts), count):
        engine.generate(prompts[first : first + count].tolist(), params)
    return len(prompts) * NEW / (time.perf_counter() - start)


@contextmanager
def running(model: str, most: int) -> Iterator[tuple[str, int]]:
    """A server of the model in a process of its own; host and port, once it is ready."""
    words = ["serve", model, "--port", "0", "--max-queue", "1024", "--set", f"max_num_seqs={most}"]
    server = subprocess.Popen(
        [sys.executable, "-P", "-c", CALL, *words], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    said = ""
    try:
        while "ready: " not in said:
            line = server.stderr.readline()
            said += line
            if not line:
                raise WorkbenchError(f"The server did not start: {said.strip()[-500:]}")
        found = re.search(r"http://(\S+):(\d+)", said)
        assert found is not None
        yield found[1], int(found[2])
    finally:
        server.terminate()
        server.wait()
        server.stderr.close()


@contextmanager
def given(url: str) -> Iterator[tuple[str, int]]:
    """Host and port of a server that runs already."""
    parts = urlsplit(url)
    yield parts.hostname or "127.0.0.1", parts.port or 80


async def load(
    place: tuple[str, int], bodies: Bodies, clients: int, rate: float | None, seed: int
) -> tuple[list[Answer], list[float]]:
    """The answers to all requests, and seconds that /health took meanwhile."""
    health: list[float] = []
    watch = asyncio.create_task(watched(place, health))
    if rate is None:
        left, answers = iter(bodies), list[Answer]()

        async def client() -> None:
            for body in left:  # shared by all
                answers.append(await ask(place, body))

        await asyncio.gather(*(client() for _ in range(clients)))
    else:
        random, tasks = np.random.default_rng(seed), []
        for body in bodies:
            tasks.append(asyncio.create_task(ask(place, body)))
            await asyncio.sleep(random.exponential(1 / rate))
        answers = list(await asyncio.gather(*tasks))
    watch.cancel()
    return answers, health


async def ask(place: tuple[str, int], body: dict[str, object]) -> Answer:
    """One streamed completion, or GET /health where the body is empty."""
    answer, text = Answer(time.perf_counter()), json.dumps(body) if body else ""
    line = "POST /v1/completions" if body else "GET /health"
    head = f"{line} HTTP/1.1\r\nHost: {place[0]}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    try:
        reader, writer = await asyncio.open_connection(*place, limit=2**20)
        writer.write((head + text).encode())
        answer.status, whole = int((await reader.readline()).split()[1]), not body
        async for piece in reader:
            whole |= piece.startswith(b"data: [DONE]")
            if piece.startswith(b"data: {"):  # a token, or several that were ready together
                answer.chunks.append(time.perf_counter())
        if answer.status == 200 and not whole:  # an error, or the end, in the midst of a stream
            answer.status = 0
        writer.close()
    except (OSError, IndexError, ValueError):
        answer.status = 0
    answer.ended = time.perf_counter()
    return answer


async def watched(place: tuple[str, int], seconds: list[float]) -> None:
    """Ask /health again and again."""
    while True:
        answer = await ask(place, {})
        seconds.append(answer.ended - answer.sent)
        await asyncio.sleep(0.02)


def rows_of(
    answers: Sequence[Answer], health: Sequence[float], suffix: str, alone: float
) -> Iterator[Row]:
    """What a load comes to; the peer is `alone`, tokens a second in process."""
    good = [a for a in answers if a.status == 200 and a.chunks]
    wall = max(a.ended for a in answers) - min(a.sent for a in answers)
    tokens, number = len(good) * NEW / wall, len(good)
    peer = {"peer": "in process", "peer_value": alone, "ratio": tokens / alone}
    yield Row(f"tokens_per_s_{suffix}", tokens, "tokens/s", **peer, repeats=number)  # type: ignore[arg-type]
    gaps = {id(a): [late - early for early, late in pairwise(a.chunks)] for a in good}
    seconds = {
        "ttft": [a.chunks[0] - a.sent for a in good],
        "itl": [gap for each in gaps.values() for gap in each],
        "e2e": [a.ended - a.sent for a in good],
        "health": [*health],
    }
    for name, values in seconds.items():
        for share in SHARES:
            value = float(np.percentile(values, share)) if values else float("nan")
            yield Row(f"{name}_p{share}_{suffix}", value, "s", repeats=len(values))
    kept = sum(
        a.chunks[0] - a.sent <= SLO["ttft"] and float(np.mean(gaps[id(a)] or [0])) <= SLO["itl"]
        for a in good
    )
    yield Row(f"goodput_{suffix}", kept / wall, "requests/s", repeats=number)
    for name, statuses in {"refused": (503,), "late": (504,)}.items():
        yield Row(f"{name}_{suffix}", sum(a.status in statuses for a in answers), "requests")
    lost = sum(a.status not in (200, 503, 504) for a in answers)
    yield Row(f"lost_{suffix}", lost, "requests", repeats=len(answers))
