"""Load on a server: what clients wait for, and what the server brings, by the number of clients.

Closed loop: each of the clients asks anew once it has its answer. --rate: requests arrive by a
Poisson process, answered or not; one load, `_rateN`, of as many as the most clients would ask.
Prompts of 128 random tokens (--part shared: the first 96 are the same; two: of two models in one
memory, so many clients each, the second one's weights random), 64 new ones, greedy, end of sequence
ignored, streamed. The fields are those of `vllm bench serve`: ttft, to the first token; itl,
between tokens; e2e, to the end; goodput, requests a second within --slo-ttft and --slo-itl. The
peer of a closed loop's tokens_per_s is the same engine in this process with as many prompts at a
time. `@PEER`: the servers of `make bench-peers`, on the same weights, threads and prompts, vLLM's
in float32 and, where the processor multiplies it, bfloat16. over_sequential: tokens_per_s over that
of one client, beside what decoding and prefill gain in process. health_p99: what /health takes
meanwhile. The client shares the servers' cores and sends WORKBENCH_API_KEY, if any.

Servers stay up. In a turn all take the same fresh prompts, one after the other, number after number
of clients, in an order that alternates from turn to turn. Rates are medians of turns, ratios those
of paired turns, with the least and the most; percentiles and counts are of all turns' requests.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from tqdm.auto import tqdm

from workbench.bench.engine import PEERS_FOLDER, TRANSFORMERS, chosen_peers, peer_dtypes, peer_files
from workbench.bench.peers import PeerError, interpreter, last_words
from workbench.bench.record import Row, in_turn, median_row
from workbench.config import EngineConfig
from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.engine.memory import block_shape
from workbench.errors import ConfigError, RemoteError
from workbench.kvcache.arena import KVArena
from workbench.kvcache.policies import MarginalValue
from workbench.models.registry import DUMMY, model_spec
from workbench.search.answers import check_choice

REPEATS = {"quick": 1, "default": 3, "full": 5}  # turns
ROUNDS = 3  # requests a client a turn
TOKENS, SHARED, NEW = 128, 96, 64
SHARED_BLOCK = 32  # of vLLM, which wants a multiple of it on a CPU
SLO = (1.0, 0.1)  # seconds to the first token, and of the mean between a request's tokens
MODE: dict[str, Any] = {"prompt_tokens": TOKENS, "new_tokens": NEW, "rounds": ROUNDS}
MODE |= {"batch_invariant": True}
SHARES = (50, 95, 99)  # percentiles
EVERY = 0.2  # seconds between two looks at /health: fifty a second were a load of their own
REFUSALS = {"refused": 503, "late": 504}
RATE, ALONE = "tokens_per_s", "in process"
COMPARED = (RATE, "ttft_p95", "itl_p95")  # with peers
UNITS = {RATE: "tokens/s", "goodput": "requests/s"}
FAST = "Q4_0"  # of its formats the one that llama.cpp decodes fastest
START_SECONDS = 900.0  # until a server is ready: vLLM compiles
ANSWER_SECONDS = 900.0  # to a whole answer, after which it counts as lost
OURS = "import sys; from workbench.cli import main; sys.exit(main())"
LLAMA_CPP = """
import json, sys, time, xllamacpp
params, given = xllamacpp.CommonParams(), json.loads(sys.argv[1])
params.model.path = given.pop("model")
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.pop("threads")
for name, value in given.items():
    setattr(params, name, value)
params.port = int(sys.argv[2])
server = xllamacpp.Server(params)
time.sleep(1e9)
"""
Bodies = list[dict[str, object]]
ENDS: dict[str, Any] = {"extremes": True}  # of a few turns


@dataclass(slots=True)
class Answer:
    """What came of one request; times in seconds. status: 0 when the connection was lost."""

    sent: float
    status: int = 0
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0


@dataclass(slots=True)
class Turns:
    """What came of a load, turn by turn; health: seconds, of all turns."""

    answers: list[list[Answer]] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    slo: tuple[float, float] = SLO

    def each(self, name: str) -> list[float]:
        """Of each turn tokens_per_s, or a value of `summary`."""
        own, tokens = ("served", NEW) if name == RATE else (name, 1)
        return [tokens * summary(answers, self.slo)[own] for answers in self.answers]

    def whole(self) -> dict[str, float]:
        """Of all turns: rates are medians, all else is of all requests."""
        found = {RATE: 0.0} | summary([*chain(*self.answers)], self.slo)
        found |= percentiles({"health": self.health})
        del found["served"], found["little"]
        return found | {name: float(np.median(self.each(name))) for name in (RATE, "goodput")}


@dataclass(frozen=True, slots=True)
class Command:
    """Starts a server; the port comes as the last word. label: what the rows call it."""

    label: str
    words: Sequence[str]
    environment: Mapping[str, str]


def run(
    profile: str = "default",
    model: str = "tiny-solver",
    clients: str = "1,4,16,64",
    rate: float | None = None,
    url: str | None = None,
    part: str = "distinct",
    peers: str = "none",
    seed: int = 0,
    repeats: int | None = None,
    slo_ttft: float = SLO[0],
    slo_itl: float = SLO[1],
) -> Iterator[Row]:
    """The rows of `workbench bench serve`, after the last turn; repeats: turns."""
    check_choice("part", part, ("distinct", "shared", "two"))
    counts, two, slo = counts_of(clients, rate), part == "two", (slo_ttft, slo_itl)
    models, most = (model, f"{DUMMY}{model}") if two else (model,), max(counts.values())
    chosen = servers(peers, two)
    require_server(url)
    engines = engines_of(models, most)
    random = np.random.default_rng(seed)
    prefix = random.integers(0, engines[0].tokenizer.vocab_size, SHARED)

    def prompts(number: int) -> list[np.ndarray]:  # none is asked twice
        return [random.integers(0, e.tokenizer.vocab_size, (number, TOKENS)) for e in engines]

    def bodies(asked: Sequence[np.ndarray]) -> list[Bodies]:
        return [bodies_of(name, own, NEW) for name, own in zip(models, asked)]

    in_process(engines, first := prompts(1), 1)  # kernels are compiled
    with ExitStack() as running:
        up = served(ours(models, most)) if url is None else nullcontext(url)
        urls: dict[str, str | None] = {ALONE: None} if rate is None else {}
        urls[""] = running.enter_context(up)
        commands = peer_commands(model, most, chosen, part == "shared")
        for name, command in commands.items():
            try:
                urls[name] = running.enter_context(served(command))
            except PeerError as error:
                warnings.warn(f"Rows have no {name}: {error}", stacklevel=2)
        found = {label: {name: Turns(slo=slo) for name in urls} for label in counts}
        turns = product(range(repeats or REPEATS[profile]), counts.items())
        for turn, (label, count) in tqdm([*turns], desc="loads", leave=False):
            asked = prompts(count * ROUNDS)
            if part == "shared":
                asked[0][:, :SHARED] = prefix
            for name, where in in_turn(urls.items(), turn):
                own = found[label][name]
                if where is None:
                    own.answers.append(in_process(engines, asked, count))
                    continue
                asyncio.run(loads(where, bodies(first), [1] * len(models)))
                how = [count] * len(models), rate, seed + turn * len(models)
                answers, health = asyncio.run(loads(where, bodies(asked), *how))
                own.answers.append([*chain(*answers)])
                own.health += health
            require_answers(found[label][""].answers[-1], urls[""])
    for label, each in found.items():
        suffix = f"{'two_' * two}{label}"
        yield from rows_of(each[""], each.get(ALONE), ALONE, suffix)
        for name in [name for name in commands if name in urls]:
            yield from rows_of(each[""], each[name], commands[name].label, f"{suffix}@{name}")
        if counts[label] > 1 and "c1" in found and not two:
            one = found["c1"]
            gains, alone = (
                [a / b if b else math.nan for a, b in zip(each[n].each(RATE), one[n].each(RATE))]
                for n in ("", ALONE)
            )
            row = f"over_sequential_{suffix}"
            yield median_row(row, gains, "ratio", peer=ALONE, peers=alone, **ENDS)
    lacking = [name for name in chosen if not any(label.startswith(name) for label in urls)]
    yield from missing(lacking if peers != "installed" else ())


def counts_of(clients: str, rate: float | None) -> dict[str, int]:
    """Clients at a time of each load, by what its rows are called; of a rate there is one load."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", clients):
        raise ConfigError(f"clients is {clients!r}; allowed: whole numbers from 1 and commas: 1,4.")
    counts = {f"c{each}": int(each) for each in clients.split(",")}
    return counts if rate is None else {f"rate{rate:g}": max(counts.values())}


def servers(peers: str, two: bool) -> list[str]:
    """The names of --peers that serve; ConfigError for one that was named and does not."""
    names = chosen_peers(peers)
    found = [name for name in names if not (two or name == TRANSFORMERS)]
    if peers != "installed" and found != names:
        wrong = "beside two models there is no peer" if two else f"{TRANSFORMERS} is no server"
        raise ConfigError(f"--peers is {peers!r}; {wrong}.")
    return found


def missing(names: Iterable[str]) -> Iterator[Row]:
    """Rows of peers that were asked for by name."""
    for name in names:
        yield Row(f"peer@{name}", math.nan, "failed: did not start; the warning says why")


def engines_of(models: Sequence[str], most: int) -> list[Engine]:
    """As a server has them, in this process; several in one memory that holds all requests."""
    if len(models) == 1:
        return [Engine(models[0], max_num_seqs=most)]
    shapes = [block_shape(name) for name in models]
    blocks = most * (-(-(TOKENS + NEW) // EngineConfig().block_size) + 1)
    memory = sum(max(shape.floor_blocks, blocks) * shape.block_bytes for shape in shapes)
    arena = KVArena(memory, shapes, MarginalValue())
    return [Engine(name, arena=arena, max_num_seqs=most) for name in models]


def bodies_of(model: str, prompts: np.ndarray, new_tokens: int) -> Bodies:
    """Requests for so many tokens after each prompt: greedy, streamed, whatever ends a text."""
    same = {"model": model, "max_tokens": new_tokens, "temperature": 0}
    same |= {"ignore_eos": True, "stream": True}
    return [same | {"prompt": prompt} for prompt in prompts.tolist()]


def in_process(engines: Sequence[Engine], asked: Sequence[np.ndarray], count: int) -> list[Answer]:
    """Without a server, steps in turn; told as answers that all come at the end."""
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    start = time.perf_counter()
    for first in range(0, len(asked[0]), count):
        for engine, prompts in zip(engines, asked):
            for prompt in prompts[first : first + count].tolist():
                engine.add(prompt, params)
        while busy := [engine for engine in engines if engine.has_work]:
            for engine in busy:
                engine.step()
    end = time.perf_counter()
    return [Answer(start, 200, [end], end)] * sum(map(len, asked))


def rows_of(ours: Turns, theirs: Turns | None, label: str, suffix: str) -> Iterator[Row]:
    """What a load comes to, beside the same in process if that was asked; or beside a peer what is
    COMPARED, and how many of its requests were refused or lost.
    """
    mine, other, repeats = ours.whole(), theirs.whole() if theirs else {}, len(ours.answers)
    compared = (RATE,) if label == ALONE else COMPARED
    for name, value in mine.items():
        row, unit = f"{name}_{suffix}", UNITS.get(name, "s" if "_p" in name else "requests")
        if theirs is not None and name in compared:
            sides: dict[str, Any] = {"values": ours.each(name), "peers": theirs.each(name)}
            found = median_row(row, unit=unit, peer=label, less=name != RATE, **sides, **ENDS)
            yield replace(found, value=value, peer_value=other[name])
        elif label == ALONE:
            yield Row(row, value, unit, repeats=repeats)
        elif unit == "requests":
            yield Row(row, value, unit, label, other[name], repeats=repeats)


# -- servers --


def ours(models: Sequence[str], most: int, *words: str) -> Command:
    """`workbench serve`; words: further options."""
    words = ("serve", *models, *words, "--max-queue", "1024", "--set", f"max_num_seqs={most}")
    return Command("", [sys.executable, "-P", "-c", OURS, *words, "--port"], os.environ)


def peer_commands(
    model: str, most: int, chosen: Sequence[str], shared: bool = False
) -> dict[str, Command]:
    """The peers' servers, by the names in the rows. shared: prompts begin alike."""
    found, longest, threads = dict[str, Command](), TOKENS + NEW, torch.get_num_threads()
    settings = f"{threads} threads, {most} sequences, 2048 tokens a step"
    limits = {"max_num_seqs": most, "max_model_len": longest, "max_num_batched_tokens": 2048}
    for name in chosen:
        folder, gguf = peer_files(model)
        try:
            if name == "llama.cpp":
                if gguf is None:
                    raise PeerError(f"{model} is no .gguf file")
                python, environment = interpreter(name, PEERS_FOLDER.absolute(), threads)
                fast = folder.with_name(f"{folder.name}-{FAST}.gguf")  # of `bench engine`
                gguf = fast if fast.is_file() else gguf
                given = {"model": str(gguf.absolute()), "threads": threads, "n_parallel": most}
                given |= {"n_ctx": most * (longest + 16), "n_batch": 2048}
                told = f"xllamacpp{version_of(name, 'xllamacpp')} (llama.cpp's server as released, "
                told += f"without AVX-512, {gguf.name.rsplit('-')[-1]}, "
                words = [str(python), "-c", LLAMA_CPP, json.dumps(given)]
                found[name] = Command(f"{told}{settings})", words, environment)
                continue
            for dtype in peer_dtypes():
                told = f"vllm serve{version_of(name, 'vllm')} ({dtype}, {settings})"
                label = name if dtype == "float32" else f"{name}-{dtype}"
                own: Any = {"served_model_name": model, "dtype": dtype, **limits}
                each = model_spec(model).kv_bytes_per_token(4 if dtype == "float32" else 2)
                own |= {"kv_bytes": most * longest * each}
                if shared:  # its own on a CPU have 128 tokens: none would be cached
                    own["block_size"], told = (
                        SHARED_BLOCK,
                        f"{told[:-1]}, blocks of {SHARED_BLOCK})",
                    )
                found[label] = vllm_command(told, folder, "--disable-log-stats", **own)
        except PeerError as error:
            warnings.warn(f"Rows have no {name}: {error}", stacklevel=2)
    return found


def vllm_command(label: str, folder: Path, *flags: str, kv_bytes: int, **options: Any) -> Command:
    """vLLM's own server of a model's folder; flags, options: of its command line; kv_bytes: as of
    `interpreter`. Raises PeerError where it is not installed.
    """
    threads = torch.get_num_threads()
    python, environment = interpreter("vllm", PEERS_FOLDER.absolute(), threads, kv_bytes)
    given = {"model": folder, "host": "127.0.0.1", **options}
    words = [word for k, v in given.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    server = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    return Command(label, [*server, *words, *flags, "--port"], environment)


def version_of(peer: str, package: str) -> str:
    """Of what is installed in a peer's environment, after a space; "" where it is not."""
    found = (PEERS_FOLDER / peer).glob(f"lib/python*/site-packages/{package}*.dist-info")
    return "".join(f" {each.stem.rpartition('-')[2]}" for each in found)


@contextmanager
def served(command: Command) -> Iterator[str]:
    """A server in a process of its own; its url, once it is ready. Raises PeerError with what it
    said where it does not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            server = subprocess.Popen(
                [*command.words, str(port)], stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                env=command.environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise PeerError(f"{error}; run `make bench-peers`") from error
        try:
            end = time.monotonic() + START_SECONDS
            while not is_ready(url):
                if server.poll() is not None or time.monotonic() > end:
                    raise PeerError(f"the server did not start: {last_words(said)}")
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)  # and its own processes
                server.wait()


DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # as the loads are asked


def require_server(url: str | None) -> None:
    """ConfigError for an address that cannot be asked, RemoteError where no server is ready."""
    if url is None:
        return
    place = urlsplit(url)
    if place.scheme != "http" or not place.hostname:
        raise ConfigError(f"--url is {url!r}; give http://HOST:PORT.")
    if not is_ready(url):
        raise RemoteError(f"No server is ready at {url}/health.")


def require_answers(answers: Sequence[Answer], url: str | None) -> None:
    """RemoteError where a server answered none of what it was asked."""
    if not any(answer.chunks for answer in answers):
        raise RemoteError(f"{url} answered none of {len(answers)} requests.")


def is_ready(url: str) -> bool:
    """Whether /health says so."""
    try:
        with DIRECT(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def metrics_of(url: str, *names: str) -> list[float]:
    """What a server's /metrics says of each, over all its labels. names: regular expressions."""
    asked = urllib.request.Request(f"{url}/metrics", headers=authorization())
    with DIRECT(asked) as answer:
        text = answer.read().decode()
    lines = (rf"^{name}(?:\{{.*\}})? (\S+)$" for name in names)
    return [sum(map(float, re.findall(line, text, re.MULTILINE))) for line in lines]


# -- the client --


def authorization() -> dict[str, str]:
    """The header that carries the key of WORKBENCH_API_KEY, which servers take too; or none."""
    key = os.environ.get("WORKBENCH_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


async def load(
    url: str, bodies: Bodies, clients: int, rate: float | None = None, seed: int = 0
) -> list[Answer]:
    """The answers to all requests: of so many clients, or at so many requests a second."""
    if rate is None:
        left, answers = iter(bodies), list[Answer]()

        async def client() -> None:
            for body in left:  # shared by all
                answers.append(await ask(url, body))

        await asyncio.gather(*(client() for _ in range(clients)))
        return answers
    random, tasks = np.random.default_rng(seed), list[asyncio.Task[Answer]]()
    for body in bodies:
        tasks.append(asyncio.create_task(ask(url, body)))
        await asyncio.sleep(random.exponential(1 / rate))
    return await asyncio.gather(*tasks)


async def loads(
    url: str,
    asked: Sequence[Bodies],
    clients: Sequence[int],
    rate: float | None = None,
    seed: int = 0,
) -> tuple[list[list[Answer]], list[float]]:
    """`load` of several at once, each by its own clients; and seconds that /health took."""
    health: list[float] = []

    async def watch() -> None:
        while True:
            answer = await ask(url, {})
            health.append(answer.ended - answer.sent)
            await asyncio.sleep(EVERY)

    watching = asyncio.create_task(watch())
    each = enumerate(zip(asked, clients, strict=True))  # each arrives by its own chance
    answers = await asyncio.gather(*(load(url, *own, rate, seed + k) for k, own in each))
    watching.cancel()
    return answers, health


class _Client(asyncio.Protocol):
    """One request and its answer; reading it costs little, as servers have the same cores."""

    def __init__(self, answer: Answer, request: bytes) -> None:
        self.answer, self.ended = answer, asyncio.get_running_loop().create_future()
        self._request, self._last, self._failed = request, b"", False

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.answer.status:
            self.answer.status = int((data.split(maxsplit=2)[1:2] or [b"0"])[0])
        self._last += data
        self._failed |= b'data: {"error"' in self._last
        if b"data: {" in data and not self._failed:  # a token, or several that came together
            self.answer.chunks.append(time.perf_counter())
        self._last = self._last[-64:]

    def connection_lost(self, error: Exception | None) -> None:
        self.answer.ended = time.perf_counter()
        whole = self._request.startswith(b"GET")
        whole |= b"data: [DONE]" in self._last and bool(self.answer.chunks) and not self._failed
        if error is not None or (self.answer.status == 200 and not whole):
            self.answer.status = 0  # an error, or the end, in the midst of a stream
        if not self.ended.done():  # its wait may have been cancelled
            self.ended.set_result(None)


async def ask(url: str, body: dict[str, object]) -> Answer:
    """One streamed completion, or GET /health where the body is empty."""
    answer, text = Answer(time.perf_counter()), json.dumps(body) if body else ""
    place, line = urlsplit(url), "POST /v1/completions" if body else "GET /health"
    host, port = place.hostname or "127.0.0.1", place.port or 80
    head = f"{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in authorization().items())
    head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    try:
        _, client = await loop.create_connection(
            lambda: _Client(answer, (head + text).encode()), host, port
        )
        await asyncio.wait_for(client.ended, ANSWER_SECONDS)
    except OSError:  # TimeoutError, too
        answer.ended = time.perf_counter()
    return answer


def summary(answers: Sequence[Answer], slo: tuple[float, float] = SLO) -> dict[str, float]:
    """What clients see of a load: percentiles of seconds, answers and good ones a second (served,
    goodput: within slo), requests inside by Little's law, and how many got no answer, by the
    reason.
    """
    good = [a for a in answers if a.status == 200 and a.chunks]
    wall = max(a.ended for a in answers) - min(a.sent for a in answers)
    gaps = [[late - early for early, late in pairwise(a.chunks)] for a in good]
    seconds = {
        "ttft": [a.chunks[0] - a.sent for a in good],
        "itl": [gap for each in gaps for gap in each],
        "e2e": [a.ended - a.sent for a in good],
    }
    found = percentiles(seconds)
    waits = zip(seconds["ttft"], (float(np.mean(each or [0])) for each in gaps))
    kept = sum(first <= slo[0] and between <= slo[1] for first, between in waits)
    found |= {
        "served": len(good) / wall,
        "goodput": kept / wall,
        "little": sum(seconds["e2e"]) / wall,
    }
    found |= {n: sum(a.status == status for a in answers) for n, status in REFUSALS.items()}
    return found | {"lost": sum(a.status not in (200, *REFUSALS.values()) for a in answers)}


def percentiles(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """NAME_pSHARE; NaN of none."""
    return {
        f"{name}_p{share}": float(np.percentile(values, share)) if values else float("nan")
        for name, values in seconds.items()
        for share in SHARES
    }
