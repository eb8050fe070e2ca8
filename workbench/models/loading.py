"""Weights into a LlamaModel: from a folder of safetensors, from the hub, or random ones.

Strict both ways: a tensor that is missing, one that is not known, one of another shape, a file that
is cut short are each an error that names the file and the tensor. The hub is asked only when no
local copy exists.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.config import QUANTIZATIONS
from workbench.errors import ConfigError
from workbench.kernels import Part, Quantised
from workbench.kernels.quantised import join, quantise
from workbench.models.building import Take, build
from workbench.models.folders import DUMMY, Source, find_model, open_source, read_spec
from workbench.models.gguf_file import GGUFFile
from workbench.models.gguf_weights import GGUFWeights
from workbench.models.llama import LlamaModel
from workbench.models.room import require_room
from workbench.models.rounding import (
    Listed,
    becomes,
    held_bytes,
    kind_of,
    listed,
    require_rounding,
)
from workbench.models.spec import ModelSpec
from workbench.models.weights import FolderWeights, Weights

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_ROWS = 1024  # of a matrix rounded at a time, so that what that takes beside it stays small


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    seed: int = 0,
    quantization: str | None = None,
    batch_invariant: bool = True,
    block_size: int | None = None,
) -> LlamaModel:
    """The model of a short name, a folder, a .gguf file, a hub id, or `dummy:` and one of them.

    A dummy has random weights, from `seed`.

    dtype: of the weights and of all arithmetic; "auto" is float32 on a CPU, else the config's.
    quantization: None keeps weights as the file has them; "int8" or "int4" rounds the matrices
    that it has in more bits, be they floating point or quantised. batch_invariant: False takes the
    fastest kernels of a device that has several. Where some cannot be rounded a warning counts
    them. Memory is saved by the float32 kernels of a CPU; others widen them again. block_size: of
    the cache that the kernels will read, where it is known.
    Raises ModelError (unknown, incomplete, corrupt or unsupported model), ConfigError (dtype, a
    device that is not there, a quantization that is unknown or would round nothing) or
    OutOfMemory (weights larger than the memory available).
    """
    kind, dummy, place = kind_of(quantization), name.startswith(DUMMY), require_device(device)
    source = open_source(find_model(name.removeprefix(DUMMY), weights=not dummy))
    spec = read_spec(source)
    chosen = arithmetic_dtype(dtype, device, spec)
    weights = None if dummy else open_weights(source)
    tensors = listed(spec) if weights is None else weights.listed()
    tensors = [tensor for tensor in tensors if tensor.name not in spec.unused_tensors]
    if quantization is not None:
        require_rounding(tensors, quantization, name)
    _require_room(name, tensors, kind, chosen, place, spec.table_bytes(chosen.itemsize))
    if weights is None:
        take = _rounding(_random(seed, place), kind)
        model = build(spec, take, chosen, place, batch_invariant, block_size)
        origin = f"dummy {seed}"
    else:
        with ThreadPoolExecutor(max_workers=1) as beside:  # reads the file ahead of who packs it
            digest = beside.submit(weights.digest)
            take = _rounding(weights.take_stored, kind)
            model = build(spec, take, chosen, place, batch_invariant, block_size)
        weights.refuse_leftovers(spec.unused_tensors)
        origin = digest.result()
    if isinstance(source, GGUFFile):
        source.release()
    model.source = source
    where = "" if place.type == "cpu" else f" {place.type}"
    model.fingerprint = _digest(f"{origin} {spec} {chosen}{where}")
    if quantization is not None:
        model.fingerprint += f"/{quantization}"
    return model


def open_weights(source: Source) -> Weights:
    """The tensors of a model's folder or .gguf file, by the names Hugging Face gives them."""
    return GGUFWeights(source) if isinstance(source, GGUFFile) else FolderWeights(source)


def require_device(name: str) -> torch.device:
    """The device of a name; ConfigError for a GPU that torch does not find."""
    device = torch.device(name)
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        found = f"{count} CUDA device{'s' if count > 1 else ''}" if count else "no CUDA device"
        raise ConfigError(
            f"device={name!r}, and torch {torch.__version__} finds {found} here. Give "
            "device='cpu', or install a CUDA build of torch where there is an NVIDIA GPU."
        )
    return device


def arithmetic_dtype(dtype: str, device: str, spec: ModelSpec) -> torch.dtype:
    """What a model computes in, and keeps its keys and values in. Raises ConfigError."""
    wanted = ("float32" if device == "cpu" else spec.dtype) if dtype == "auto" else dtype
    if wanted not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; allowed: 'auto', {', '.join(map(repr, _DTYPES))}.")
    return _DTYPES[wanted]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _require_room(
    name: str,
    tensors: Sequence[Listed],
    kind: str | None,
    dtype: torch.dtype,
    device: torch.device,
    table_bytes: int,
) -> None:
    """OutOfMemory for what will not fit; only a CPU's float32 kernels keep matrices quantised."""
    if device.type != "cpu" or dtype != torch.float32:
        numbers = sum(math.prod(tensor.shape) for tensor in tensors)
        free = None if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
        held = str(dtype) if device.type == "cpu" else f"{dtype} on {device}"
        require_room(numbers * dtype.itemsize + table_bytes, name, held, {}, free)
        return
    needed = held_bytes(tensors, dtype.itemsize, kind) + table_bytes
    rounded = {
        quantization: held_bytes(tensors, dtype.itemsize, other) + table_bytes
        for quantization, other in QUANTIZATIONS.items()
    }
    smaller = {quantization: size for quantization, size in rounded.items() if size < needed}
    held = f"matrices rounded to {kind}" if kind else "quantised matrices kept so"
    require_room(needed, name, f"{dtype}, {held}", smaller)


def _rounding(take: Take, kind: str | None) -> Take:
    """Matrices rounded to a quantised kind, where that makes them smaller."""
    if kind is None:
        return take

    def rounded(name: str, shape: tuple[int, ...]) -> Part:
        part = take(name, shape)
        held = part.kind if isinstance(part, Quantised) else str(part.dtype)
        return part if becomes(held, shape, kind) == held else _quantised(part, kind)

    return rounded


def _quantised(part: Part, kind: str) -> Quantised:
    """A matrix rounded to `kind`, some rows at a time."""
    starts = range(0, part.shape[0], _ROWS)
    return join([quantise(kind, _floats(part, start, start + _ROWS)) for start in starts])


def _floats(part: Part, start: int, end: int) -> NDArray[np.float32]:
    """Some rows of a matrix, as float32."""
    if isinstance(part, Quantised):
        rows = part.rows[start:end]
        return Quantised(part.kind, rows, (len(rows), part.shape[1])).dequantise()
    floats: NDArray[np.float32] = part[start:end].float().cpu().numpy()
    return floats


def _random(seed: int, device: torch.device) -> Take:
    """Gaussian matrices that keep activations near 1, norms of ones, biases of zeros.

    The same for the same seed and kind of device, which draws them itself: a CPU would take
    minutes over eight billion.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        scale = 1.0 if "embed_tokens" in name else 1 / math.sqrt(shape[1])
        return torch.randn(shape, generator=generator, device=device) * scale

    return take
