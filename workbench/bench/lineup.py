"""The contenders of one run of the engine benchmark on one model: who is there, and who is not.

Ours in both modes and over contiguous blocks, torch's products, `transformers`, and the peers that
are installed. A peer that is missing or fails is left out with a warning that says why. engine.py
draws prompts, orders repeats and makes rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.bench.contenders import Contender, Linears, Ours, TransformersGenerate
from workbench.bench.peer_models import PeerFiles, peer_files
from workbench.bench.peer_process import PEERS, PeerError, PeerProcess, interpreter
from workbench.engine.engine import Engine
from workbench.errors import ConfigError, nearest
from workbench.models.folders import model_spec
from workbench.models.spec import ModelSpec

PRODUCTS, CONTIGUOUS, TRANSFORMERS = "products", "contiguous", "transformers"
PRODUCTS_LABEL = "torch's products alone"
PEERS_FOLDER = Path("build/peers")
BLOCK_SIZE = 16
ALL, NONE = "installed", "none"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The largest that any contender is asked: sequences, and tokens of each input."""

    sequences: int
    prompt: int
    new: int
    prefill: int

    @property
    def longest(self) -> int:
        """Positions of the longest sequence."""
        return max(self.prompt + self.new, self.prefill + 1)

    @property
    def step(self) -> int:
        """Tokens of the largest step: every prompt at once."""
        return max(self.sequences * self.prompt, self.prefill)


class Lineup:
    """Contenders by name. A context manager: it ends the peers' processes.

    modes: of ours, row suffix -> batch_invariant on the way in, row suffix -> contender as an
    attribute: where the kernels know one way only, one contender stands for all.
    """

    def __init__(self, model: str, modes: Mapping[str, bool], sizes: Sizes) -> None:
        self.model, self.sizes = model, sizes
        self.spec: ModelSpec = model_spec(model)
        self.files: PeerFiles = peer_files(model, PEERS_FOLDER / "models")
        self.contenders: dict[str, Contender] = {}
        self.modes = self._add_ours(modes)
        self.contenders[PRODUCTS] = Linears(self.spec)
        self.contenders[CONTIGUOUS] = Ours(self._engine(False, self._one_block()))
        self.contenders[TRANSFORMERS] = TransformersGenerate(self.files.folder)
        self.labels = {
            TRANSFORMERS: TRANSFORMERS,
            PRODUCTS: PRODUCTS_LABEL,
        }  # peer's name in the rows -> with its version

    def _add_ours(self, modes: Mapping[str, bool]) -> dict[str, str]:
        first = next(iter(modes))
        engine = self._engine(modes[first])
        self.contenders[first] = Ours(engine)
        if engine.executor.model.kernels.batch_invariant:
            return dict.fromkeys(modes, first)
        others = {name: Ours(self._engine(modes[name])) for name in modes if name != first}
        self.contenders |= others
        return {name: name for name in modes}

    def bring(self, peers: str) -> None:
        """Start peers: "installed" (all that are), "none", or names joined by commas.

        Raises ConfigError for a name that is not known.
        """
        for name in _chosen(peers):
            try:
                python = interpreter(name, PEERS_FOLDER)
                settings = self._settings(name)
                peer = PeerProcess(name, python, torch.get_num_threads(), settings)
            except PeerError as error:
                _left_out(name, error)
                continue
            self.contenders[name], self.labels[name] = peer, f"{name} {peer.version}"

    def drop(self, name: str, reason: PeerError) -> None:
        """Go on without a peer that failed."""
        _left_out(name, reason)
        self._end(name)

    def __enter__(self) -> Lineup:
        return self

    def __exit__(self, *error: Any) -> None:
        for name in [n for n, c in self.contenders.items() if isinstance(c, PeerProcess)]:
            self._end(name)

    def _end(self, name: str) -> None:
        contender = self.contenders.pop(name)
        self.labels.pop(name)
        assert isinstance(contender, PeerProcess)
        contender.close()

    def _settings(self, name: str) -> dict[str, Any]:
        if name == "llama.cpp" and self.files.gguf is None:
            raise PeerError(f"{self.model} is no .gguf file, and {name} reads nothing else")
        model = self.files.gguf if name == "llama.cpp" else self.files.folder
        return {
            "model": str(model),
            "max_seqs": self.sizes.sequences,
            "max_tokens": self.sizes.step,
            "max_model_len": -(-self.sizes.longest // BLOCK_SIZE) * BLOCK_SIZE,
        }

    def _one_block(self) -> int:
        """A block size that holds a whole sequence, prompt and new tokens."""
        return -(-(self.sizes.prompt + self.sizes.new) // BLOCK_SIZE) * BLOCK_SIZE

    def _engine(self, invariant: bool, block_size: int = BLOCK_SIZE) -> Engine:
        a_sequence = -(-self.sizes.longest // block_size)
        whole_model = -(-self.spec.max_model_len // block_size)
        a_batch = self.sizes.sequences * -(-(self.sizes.prompt + self.sizes.new) // block_size)
        return Engine(
            self.model,
            block_size=block_size,
            num_blocks=max(a_batch, a_sequence, whole_model),
            max_num_seqs=self.sizes.sequences,
            max_num_batched_tokens=self.sizes.step,
            enable_prefix_caching=False,
            batch_invariant=invariant,
        )


def _chosen(peers: str) -> list[str]:
    if peers in (ALL, NONE):
        return list(PEERS) if peers == ALL else []
    names = [name.strip() for name in peers.split(",")]
    for name in names:
        if name not in PEERS:
            allowed = ", ".join((ALL, NONE, *PEERS))
            raise ConfigError(
                f"There is no peer {name!r}; allowed: {allowed}.{nearest(name, list(PEERS))}"
            )
    return names


def _left_out(name: str, reason: PeerError) -> None:
    warnings.warn(f"No rows @{name}: {reason}", stacklevel=3)
