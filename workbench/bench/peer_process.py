"""Peers in processes and environments of their own, as contenders: the near end of the pipe.

`make bench-peers` makes the environments under build/peers; a peer that has none, or that cannot
load the model, is left out with the reason. Only one process computes at a time: a worker blocks on
its input between commands, and the caller lets a finished peer's threads fall asleep. What it does
not do: time anything; the workers do (peers/*_peer.py say how).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.bench.contenders import Prompts
from workbench.errors import WorkbenchError

WORKER = Path(__file__).parent / "peers" / "worker.py"
PEERS = {  # name in the rows -> module beside worker.py; with our own interpreter where it says so
    "vllm": "vllm_peer",
    "llama.cpp": "llama_cpp_peer",
    "transformers_cb": "transformers_cb_peer",
}
OWN_INTERPRETER = ("transformers_cb",)
SETTLE_SECONDS = 0.3  # OpenMP threads spin for up to 0.2 s after their last work
SHOWN = 400  # characters of a failed worker's last words


class PeerError(WorkbenchError, RuntimeError):
    """A peer that is not installed, cannot load the model, or failed while it was measured."""


def interpreter(name: str, folder: Path) -> Path:
    """The Python that has this peer; PeerError when `make bench-peers` has not made it."""
    if name in OWN_INTERPRETER:
        return Path(sys.executable)
    found = folder / name / "bin" / "python"
    if not found.exists():
        raise PeerError(f"{name} is not installed: there is no {found}; run `make bench-peers`.")
    return found


def _preloaded(python: Path) -> dict[str, str]:
    """Intel's OpenMP where the peer's environment brings it: what vLLM asks for on a CPU."""
    library = python.parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library.absolute())} if library.is_file() else {}


class PeerProcess:
    """A worker with one model loaded; a Contender. Close it when done."""

    def __init__(self, name: str, python: Path, threads: int, settings: Mapping[str, Any]) -> None:
        """Starts the worker and loads the model. Raises PeerError with the worker's reason."""
        self.name = name
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment = inherited | {"OMP_NUM_THREADS": str(threads)} | _preloaded(python)
        self._process = subprocess.Popen(
            [python, WORKER, PEERS[name]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        try:
            self.version = self._ask("load", threads=threads, **settings)["version"]
        except PeerError:
            self.close()
            raise

    def decode(self, prompts: Prompts, new_tokens: int) -> float:
        """Tokens/s after the first token of every sequence, by the worker's clock."""
        return self._rate(self._ask("decode", prompts=prompts.tolist(), new_tokens=new_tokens))

    def prefill(self, prompts: Prompts) -> float:
        """Prompt tokens/s of one prompt, by the worker's clock."""
        return self._rate(self._ask("prefill", prompt=prompts[0].tolist()))

    def close(self) -> None:
        """Ends the worker: at its next command if it can, else at once."""
        try:
            self._process.communicate('{"command": "quit"}\n', timeout=20)
        except (subprocess.TimeoutExpired, OSError, ValueError):
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _rate(self, answer: dict[str, Any]) -> float:
        time.sleep(SETTLE_SECONDS)
        return float(answer["tokens"] / answer["seconds"])

    def _ask(self, command: str, **given: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **given}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise PeerError(f"{self.name} ended at {command!r}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name} failed at {command!r}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        return " ".join(self._log.read()[-SHOWN:].split()) or "it said nothing"
