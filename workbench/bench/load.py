"""What clients of a server wait for, over their number and over the split of memory between two
served models; the rows of notebook 12.

Each server is a process of its own, asked by the client of `bench serve`. /metrics is read about
twenty times a second: requests inside, running or waiting, are one side of Little's law; the other
is what the clients see.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from workbench.bench import serve
from workbench.bench.record import meanwhile
from workbench.config import AtLeastOne, check, refused
from workbench.experiments.provenance import describe, machine_facts
from workbench.models.registry import DUMMY, model_spec

BLOCK_SIZE = 16
EVERY = 0.05  # seconds between two looks at /metrics


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What servers are asked; lengths in tokens.

    clients: at a time, each asking anew once it has its answer. offered: requests that arrive by
    chance, as shares of the rate at which the most clients are served. second: the other of two
    models that share memory; shares: the first one's; split_clients: of each. held: sequences that
    the memory of both holds, as a share of all clients'.
    """

    model: str = "smollm2-135m"
    second: str = f"{DUMMY}smollm2-135m"
    prompt_tokens: AtLeastOne = 128
    new_tokens: AtLeastOne = 64
    clients: tuple[int, ...] = (1, 4, 16, 64)
    rounds: AtLeastOne = 4  # requests a client, of at least 8
    offered: tuple[float, ...] = (0.3, 0.6, 0.9)
    requests: AtLeastOne = 64  # of those that arrive by chance
    shares: tuple[float, ...] = (0.25, 0.5, 0.75)
    split_clients: tuple[int, int] = (24, 8)
    held: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)
        for name in ("clients", "offered", "shares", "split_clients"):
            if not getattr(self, name) or min(getattr(self, name)) <= 0:
                raise refused(LoadPlan, name, getattr(self, name), "one or more, each above 0")

    @property
    def longest(self) -> int:
        """Tokens of a request."""
        return self.prompt_tokens + self.new_tokens

    def bodies(self, model: str, count: int, stream: int) -> serve.Bodies:
        """Requests of random tokens, others for another stream."""
        random = np.random.default_rng([self.seed, stream])
        prompts = random.integers(0, model_spec(model).vocab, (count, self.prompt_tokens))
        return serve.bodies_of(model, prompts, self.new_tokens)


TINY = LoadPlan("tiny-solver", f"{DUMMY}tiny-solver")
PROFILES = {
    "quick": replace(TINY, clients=(1, 4, 16)),
    "default": TINY,
    "full": LoadPlan(clients=(1, 4, 16, 64, 128), requests=256),
}
PROFILES["thesis"] = PROFILES["full"]


def provenance(plan: LoadPlan, *models: str) -> str:
    """What a figure says was measured."""
    told = ", ".join(models).replace(DUMMY, "random weights of ")
    lengths = f"{plan.prompt_tokens} random tokens, {plan.new_tokens} new ones, greedy, streamed"
    return f"{told}; {lengths}; seed {plan.seed}; {describe(machine_facts('cpu'))}."


def load_rows(plan: LoadPlan) -> pd.DataFrame:
    """One model: clients at a time, then requests that arrive by chance.

    Columns arrivals (closed | poisson), clients, offered (requests/s), inside (requests in the
    server, the mean of samples), tokens_per_s, and those of `summary`.
    """
    rows: list[dict[str, Any]] = []
    most = max(plan.clients)
    limits = "--set", f"max_model_len={plan.longest}"
    with serve.served(serve.ours([plan.model], most, *limits)) as url:
        for step, count in enumerate(tqdm(plan.clients, desc="clients")):
            bodies = plan.bodies(plan.model, max(8, count) * plan.rounds, step)
            rows.append({"arrivals": "closed", "clients": count} | _asked(url, bodies, count))
        full = max(row["served"] for row in rows)
        for step, share in enumerate(tqdm(plan.offered, desc="arriving by chance")):
            bodies = plan.bodies(plan.model, plan.requests, 100 + step)
            rate = share * full
            found = _asked(url, bodies, 1, rate, plan.seed)
            rows.append({"arrivals": "poisson", "offered": rate} | found)
    return pd.DataFrame(rows).assign(tokens_per_s=lambda own: own["served"] * plan.new_tokens)


def split_rows(plan: LoadPlan) -> pd.DataFrame:
    """Two models at once, under each split of one memory by POST /arena/split.

    Columns share (the first model's), model, clients, tokens_per_s and served, of the time in which
    both are asked: it ends with the load that ends first; seconds of `summary`, of what was asked
    in it.
    """
    rows: list[dict[str, Any]] = []
    models, blocks = (plan.model, plan.second), -(-plan.longest // BLOCK_SIZE)
    spec = model_spec(plan.model)
    held = max(2 * len(models), round(plan.held * sum(plan.split_clients)))
    size = held * blocks * spec.block_bytes(BLOCK_SIZE, 4) // len(models)
    limits = "--set", f"max_model_len={plan.longest}", "--set", f"block_size={BLOCK_SIZE}"
    command = serve.ours([f"{m}={size}" for m in models], max(plan.split_clients), *limits)
    with serve.served(command) as url:
        for step, share in enumerate(tqdm(plan.shares, desc="splits")):
            split = json.dumps({"shares": {models[0]: share, models[1]: 1 - share}}).encode()
            headers = {"Content-Type": "application/json"} | serve.authorization()
            asked_for = urllib.request.Request(f"{url}/arena/split", split, headers)
            serve.DIRECT(asked_for).close()
            asked = [
                plan.bodies(m, count * plan.rounds, 10 * step + k)
                for k, (m, count) in enumerate(zip(models, plan.split_clients))
            ]
            found, _ = _done(serve.loads(url, asked, plan.split_clients))
            both = zip(models, plan.split_clients, while_all_last(found, plan.new_tokens))
            for model, count, (answers, rate) in both:
                seen = serve.summary(answers)  # the rates in it are of each model's own time
                told = {n: value for n, value in seen.items() if n not in ("goodput", "little")}
                row = {"share": share, "model": model, "clients": count, "tokens_per_s": rate}
                rows.append(row | told | {"served": rate / plan.new_tokens})
    return pd.DataFrame(rows)


def while_all_last(
    loads: Sequence[Sequence[serve.Answer]], new_tokens: int
) -> list[tuple[list[serve.Answer], float]]:
    """Of each of several loads at once: what was asked before the first of them ended, and the
    tokens a second until then (of an answer that goes on, the part of its chunks that had come):
    after that the others have the machine to themselves.
    """
    begin = min(answer.sent for answers in loads for answer in answers)
    end = min(max(answer.ended for answer in answers) for answers in loads)
    found = []
    for answers in loads:
        asked = [answer for answer in answers if answer.sent < end]
        parts = [float(np.mean([at <= end for at in a.chunks] or [False])) for a in asked]
        found.append((asked, new_tokens * sum(parts) / (end - begin)))
    return found


def _asked(
    url: str, bodies: serve.Bodies, clients: int, rate: float | None = None, seed: int = 0
) -> dict[str, Any]:
    """What a load comes to, and the requests inside while it lasts."""
    seen = list[tuple[float, float]]()

    def look() -> None:
        asked = time.perf_counter()
        seen.append((asked, sum(serve.metrics_of(url, r"vllm:num_requests_\w+"))))

    with meanwhile(look, lambda: EVERY):
        (answers,), _ = _done(serve.loads(url, [bodies], [clients], rate, seed))
    begin, end = min(each.sent for each in answers), max(each.ended for each in answers)
    inside = [count for at, count in seen if begin < at < end]  # neither before nor after the load
    return serve.summary(answers) | {"inside": float(np.mean(inside or [np.nan]))}


def _done(work: Coroutine[Any, Any, Any]) -> Any:
    """Its result, in an event loop of its own: a notebook runs one already."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
