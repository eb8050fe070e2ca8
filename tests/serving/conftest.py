"""A server of the embedded pair, in a thread of the test's process, on a free port of loopback."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from workbench.serving.server import ServeConfig, Server, Service

SMALL = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256}


@contextmanager
def running(models: tuple[str, ...] = ("tiny-solver", "tiny-prm"), **config: Any) -> Iterator[Any]:
    """The service, once it is ready; its url is service.url. It has ended in order afterwards."""
    before = threading.enumerate()
    service = Service(ServeConfig(models, port=0, **config), SMALL)
    server = Server(service)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: service.ready and server.started, 300)  # kernels are compiled
        port = server.servers[0].sockets[0].getsockname()[1]
        service.url = f"http://127.0.0.1:{port}"
        yield service
    finally:
        server.end()
        thread.join(timeout=30)
    assert not any(each.name == "engines" for each in {*threading.enumerate()} - {*before})
    assert not thread.is_alive()


def until(fine: Any, seconds: float = 60) -> None:
    """Wait for something to be so."""
    end = time.monotonic() + seconds
    while not fine():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def require_idle(service: Any) -> None:
    """Nothing runs or waits any more, no law of the cache is broken, no block is in use."""
    thread = service.thread
    until(lambda: not service.calls)
    until(lambda: all(thread.state(n)["running"] == thread.state(n)["waiting"] == 0
                      for n in thread.engines))  # fmt: skip
    for engine in thread.engines.values():
        until(lambda engine=engine: engine.cache.num_active == 0)
    thread.arena.check()


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    with running(max_body=100_000) as service:
        yield service
        require_idle(service)
