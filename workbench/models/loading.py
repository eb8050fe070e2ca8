"""Weights into a LlamaModel: from a folder of safetensors, from the hub, or random ones.

Strict both ways: a tensor that is missing, one that is not known, one of another shape, a file that
is cut short are each an error that names the file and the tensor. The hub is asked only when no
local copy exists.
"""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import torch

from workbench.config import QUANTIZATIONS
from workbench.errors import ConfigError
from workbench.kernels import Part, Quantised
from workbench.kernels.quantised import quantise
from workbench.models.building import Take, build
from workbench.models.folders import DUMMY, Source, find_model, open_source, read_spec
from workbench.models.gguf_file import GGUFFile
from workbench.models.gguf_weights import GGUFWeights
from workbench.models.llama import LlamaModel
from workbench.models.room import require_room
from workbench.models.spec import ModelSpec
from workbench.models.weights import FolderWeights, Weights

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    seed: int = 0,
    quantization: str | None = None,
) -> LlamaModel:
    """The model of a short name, a folder, a .gguf file, a hub id, or `dummy:` and one of them.

    A dummy has random weights, from `seed`.

    dtype: of the weights and of all arithmetic; "auto" is float32 on a CPU, else the config's.
    quantization: None keeps weights as the file has them; "int8" or "int4" rounds the matrices
    that it has as floating point.
    Raises ModelError (unknown, incomplete, corrupt or unsupported model), ConfigError (dtype) or
    OutOfMemory (weights larger than the memory available).
    """
    dummy = name.startswith(DUMMY)
    where = find_model(name.removeprefix(DUMMY), weights=not dummy)
    source = open_source(where)
    spec = read_spec(source)
    chosen = arithmetic_dtype(dtype, device, spec)
    if dummy:
        require_room(spec.weight_bytes(chosen.itemsize), name, str(chosen))
        model = build(spec, _rounding(_random(seed), quantization), chosen, device)
        model.fingerprint = _digest(f"dummy {seed} {spec} {chosen}")
    else:
        weights = open_weights(source)
        require_room(weights.held_bytes(chosen.itemsize), name, str(chosen))
        with ThreadPoolExecutor(max_workers=1) as beside:  # reads the file ahead of who packs it
            digest = beside.submit(weights.digest)
            model = build(spec, _rounding(weights.take_stored, quantization), chosen, device)
        weights.refuse_leftovers(spec.unused_tensors)
        model.fingerprint = _digest(f"{digest.result()} {spec} {chosen}")
    if isinstance(source, GGUFFile):
        source.release()
    model.source = source
    if quantization is not None:
        model.fingerprint += f"/{quantization}"
    return model


def open_weights(source: Source) -> Weights:
    """The tensors of a model's folder or .gguf file, by the names Hugging Face gives them."""
    return GGUFWeights(source) if isinstance(source, GGUFFile) else FolderWeights(source)


def arithmetic_dtype(dtype: str, device: str, spec: ModelSpec) -> torch.dtype:
    """What a model computes in, and keeps its keys and values in. Raises ConfigError."""
    wanted = ("float32" if device == "cpu" else spec.dtype) if dtype == "auto" else dtype
    if wanted not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; allowed: 'auto', {', '.join(map(repr, _DTYPES))}.")
    return _DTYPES[wanted]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _rounding(take: Take, quantization: str | None) -> Take:
    """Matrices rounded to a quantised kind; what is quantised already is left as it is."""
    if quantization is None:
        return take
    kind = QUANTIZATIONS[quantization]

    def rounded(name: str, shape: tuple[int, ...]) -> Part:
        part = take(name, shape)
        if isinstance(part, Quantised) or part.ndim != 2 or shape[1] % 32:
            return part
        return quantise(kind, part.float().numpy())

    return rounded


def _random(seed: int) -> Take:
    """Gaussian matrices that keep activations near 1, norms of ones, biases of zeros.

    The same for the same seed.
    """
    generator = torch.Generator().manual_seed(seed)

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        scale = 1.0 if "embed_tokens" in name else 1 / math.sqrt(shape[1])
        return torch.randn(shape, generator=generator) * scale

    return take
