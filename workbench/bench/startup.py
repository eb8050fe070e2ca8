"""How long an engine takes from its construction to the first token, and the memory of that.

Measured in a process of its own, `python -m workbench.bench.startup MODEL KV_MEMORY [cold]`, from
the call of Engine(MODEL, kv_memory=KV_MEMORY) to the first token of a prompt of 8 token ids; and
the peak of resident memory over what was resident before that call. Not in it: what `from workbench
import Engine, SamplingParams` imports, torch above all. In it: the import of numba, loading of the
compiled kernels (the first start of all, which compiles them, is thrown away), reading, checking,
hashing and packing of the weights, the tokenizer, and the profiling pass. Cold: the model's files
are dropped from the page cache first; what imports read stays warm. A mapped file's pages count as
resident once they were read, those of the KV cache once they were written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from workbench.core import SamplingParams
from workbench.engine.engine import Engine
from workbench.models.registry import find_model

PROMPT = tuple(range(1, 9))  # any token ids


@dataclass(frozen=True, slots=True)
class Startup:
    """One start. budget_bytes: weights and the KV memory that was declared."""

    seconds: float
    peak_bytes: int
    budget_bytes: int


def measure(model: str, kv_memory: str, cold: bool = False) -> Startup:
    """A fresh process with as many threads as this one. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", "workbench.bench.startup", model, kv_memory]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        command + ["cold"] * cold,
        env=os.environ | threads,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Startup(**json.loads(done.stdout.splitlines()[-1]))


def start(model: str, kv_memory: str) -> Startup:
    """Build the engine and compute one token, in this process."""
    before = _status("VmRSS")
    began = time.perf_counter()
    engine = Engine(model, kv_memory=kv_memory)
    engine.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1))
    seconds = time.perf_counter() - began
    budget = engine.memory.weights + engine.memory.kv
    return Startup(seconds, _status("VmHWM") - before, budget)


def drop_from_page_cache(model: str) -> None:
    """Ask the system to forget the pages of a model's files: clean ones that nobody maps go."""
    where = find_model(model)
    for file in [where] if where.is_file() else sorted(where.iterdir()):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _status(name: str) -> int:
    """A size of this process in bytes, as Linux tells it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def main(model: str, kv_memory: str, *cold: str) -> None:
    """The child's part: one start, told as a line of JSON."""
    if cold:
        drop_from_page_cache(model)
    sys.stdout.write(json.dumps(asdict(start(model, kv_memory))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
