"""What a run depends on beside its settings: the bytes of both models and its problems' texts.

Files are hashed, not loaded: no torch. Large weight files are told apart by size, header and
samples of their content, since hashing tens of gigabytes would take longer than a run.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from workbench import __version__
from workbench.config import SweepConfig
from workbench.experiments.plan import Identity
from workbench.models.registry import DUMMY, find_model
from workbench.search.problems import Problem, load_problems
from workbench.trace import SCHEMA_VERSION

WHOLE_UP_TO = 256 * 2**20
"""Bytes up to which a file is hashed as a whole."""
SAMPLE = 2**20
SAMPLES = 16
MODEL_FILES = ("*.json", "*.safetensors", "*.gguf", "*.jinja", "*.model")


def identify(config: SweepConfig) -> Identity:
    """The identity shared by all runs of a sweep. Raises ModelError or ProblemFileError."""
    llm, prm = model_fingerprint(config.llm), model_fingerprint(config.prm)
    problems = problems_fingerprint(sweep_problems(config))
    return Identity(llm, prm, problems, __version__, SCHEMA_VERSION)


def sweep_problems(config: SweepConfig) -> list[Problem]:
    """The problems that every run of the sweep searches, in the same order."""
    levels = config.levels or None
    return load_problems(config.problems, config.num_problems, levels, config.problem_seed)


def problems_fingerprint(problems: list[Problem]) -> str:
    """12 hexadecimal digits over ids, texts and answers."""
    text = json.dumps([(p.id, p.problem, p.answer, p.level) for p in problems])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def model_fingerprint(model: str) -> str:
    """12 hexadecimal digits over the content of a model's files; of a dummy only its configs."""
    dummy = model.startswith(DUMMY)
    where = find_model(model.removeprefix(DUMMY), weights=not dummy)
    patterns = MODEL_FILES[:1] if dummy else MODEL_FILES
    files = sorted(file for pattern in patterns for file in where.glob(pattern)) or [where]
    stamp = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return ("dummy-" if dummy else "") + _hash_files(stamp)


@lru_cache(maxsize=16)
def _hash_files(stamp: tuple[tuple[str, int, int], ...]) -> str:
    """Hash of names and contents; the time stamp only tells this process when to hash again."""
    digest = hashlib.sha256()
    for name, size, _ in stamp:
        digest.update(f"{Path(name).name}\x1f{size}\x1f".encode())
        _feed(digest, Path(name), size)
    return digest.hexdigest()[:12]


def _feed(digest: hashlib._Hash, file: Path, size: int) -> None:
    with file.open("rb") as content:
        if size <= WHOLE_UP_TO:
            while part := content.read(SAMPLE):
                digest.update(part)
            return
        for k in range(SAMPLES):  # the first sample holds the header of a safetensors file
            content.seek(k * (size - SAMPLE) // (SAMPLES - 1))
            digest.update(content.read(SAMPLE))
