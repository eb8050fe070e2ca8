"""Weights into a LlamaModel: from a folder of safetensors, from a GGUF file, or random ones.

Strict both ways: a tensor that is missing, one that is not known, one of another shape, a file that
is cut short are each an error that names the file and the tensor.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from workbench.config import format_size
from workbench.errors import ConfigError, DeviceOutOfMemory, ModelError
from workbench.host import available_memory
from workbench.kernels import Kernels, Part, Quantised, load_kernels
from workbench.kernels.quantised import FORMATS
from workbench.models import gpt2
from workbench.models.gguf import ROPE_FACTORS, GGUFFile, hub_name, kv_heads
from workbench.models.llama import Embedding, Layer, Linear, LlamaModel
from workbench.models.registry import DUMMY, Source, find_model, open_source, read_spec, shards_of
from workbench.models.spec import ARCHITECTURES, ModelSpec

Take = Callable[[str, tuple[int, ...]], Part]
_DTYPES = {n: getattr(torch, n) for n in ("float32", "bfloat16", "float16", "float64")}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_IGNORED = (".rotary_emb.inv_freq",)  # older files keep what follows from the config


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    batch_invariant: bool = True,
    block_size: int | None = None,
) -> LlamaModel:
    """The model of a short name, a folder, a .gguf file, a hub id, or `dummy:` and one of them.

    A dummy has random weights, always the same. Quantised matrices of a file stay so under the
    float32 kernels of a CPU; others widen them.

    dtype: of the weights and of all arithmetic; "auto" is float32 on a CPU, else the config's.
    batch_invariant: False takes the fastest kernels of a device that has several. block_size: of
    the cache that the kernels will read, where it is known.
    Raises ModelError (unknown, incomplete, corrupt or unsupported model), ConfigError (dtype,
    device, what no kernels serve) or OutOfMemory (weights larger than the memory available).
    """
    dummy, place = name.startswith(DUMMY), require_device(device)
    described = find_model(name.removeprefix(DUMMY), weights=False)
    source = open_source(described)
    spec = read_spec(source)
    chosen = arithmetic_dtype(dtype, device, spec)
    mode: dict[str, Any] = {"batch_invariant": batch_invariant, "block_size": block_size}
    kernels = load_kernels(place, chosen, head_dim=spec.head_dim, **mode)
    if not dummy and (whole := find_model(name)) != described:  # fetched once they can be used
        source = open_source(whole)
        spec = read_spec(source)
    weights = None if dummy else open_weights(source)
    _require_room(name, spec, None if dummy else source, chosen, place)
    if weights is None:
        model = _Builder(spec, _random(place), chosen, place, kernels).model()
        origin = "dummy 0"
    else:
        with ThreadPoolExecutor(max_workers=1) as beside:  # reads the file ahead of the packing
            digest = beside.submit(weights.digest)
            model = _Builder(spec, weights.take, chosen, place, kernels, weights.names).model()
        weights.refuse_leftovers(ARCHITECTURES[spec.architecture].unused)
        origin = digest.result()
    if isinstance(source, GGUFFile):
        source.release()
    model.source = source
    where = "" if place.type == "cpu" else f" {place.type}"
    told = f"{origin} {spec} {chosen}{where}"
    model.fingerprint = hashlib.sha256(told.encode()).hexdigest()[:16]
    return model


def require_device(name: str) -> torch.device:
    """The device of a name; ConfigError for another kind, or a GPU that torch does not find."""
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; allowed: 'cpu', 'cuda', 'cuda:1', ...")
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
        known = ", ".join(map(repr, _DTYPES))
        allowed = known if dtype == "auto" else f"'auto', {known}"  # what auto found is the model's
        raise ConfigError(f"dtype is {wanted!r}; allowed: {allowed}.")
    return _DTYPES[wanted]


def _require_room(
    name: str, spec: ModelSpec, source: Source | None, dtype: torch.dtype, device: torch.device
) -> None:
    """OutOfMemory, with the numbers, for weights that will not fit, before any is read.

    source: None for random weights. The memory is a GPU's, else the machine's or the container's.
    """
    needed, held = spec.weight_bytes(dtype.itemsize), str(dtype)
    if device.type != "cpu":
        held, available = f"{held} on {device}", torch.cuda.mem_get_info(device)[0]
    else:
        available = available_memory()
        if dtype == torch.float32:
            held += ", quantised matrices kept so"
            if isinstance(source, GGUFFile):
                needed = source.held_bytes(dtype.itemsize)
    needed += spec.table_bytes(dtype.itemsize)
    if needed > available:
        raise DeviceOutOfMemory(
            f"{name}'s weights take {format_size(needed)} ({held}; rotary tables included), and "
            f"{format_size(available)} of memory are available: {format_size(needed - available)} "
            "are missing. Take a smaller model, or a machine with more memory."
        )


def _random(device: torch.device) -> Take:
    """Gaussian matrices that keep activations near 1, norms of ones, biases of zeros.

    The device draws them itself: a CPU would take minutes over eight billion.
    """
    generator = torch.Generator(device).manual_seed(0)

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        scale = 1.0 if "embed_tokens" in name else 1 / math.sqrt(shape[1])
        return torch.randn(shape, generator=generator, device=device) * scale

    return take


@dataclass(frozen=True, slots=True)
class _Builder:
    """A LlamaModel out of named tensors; take(name, shape) gives what Hugging Face calls so."""

    spec: ModelSpec
    take: Take
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    names: Collection[str] = ()  # of all tensors, where they are of a file

    def model(self) -> LlamaModel:
        spec = self.spec
        if spec.gpt2:
            return gpt2.build(spec, self.kernels, self._place, self.names, self._require_tied)
        vocabulary = self._place("model.embed_tokens.weight", (spec.vocab, spec.hidden))
        layers = [self._layer(f"model.layers.{i}.") for i in range(spec.layers)]
        final_norm = self._vector("model.norm.weight", spec.hidden)
        inner: list[Linear] = []
        if spec.tied and spec.value_head is None:
            self._require_tied(vocabulary)
            head = Linear(self.kernels, [vocabulary])
            return LlamaModel(spec, self.kernels, Embedding(head), layers, final_norm, head)
        if spec.value_head is None:
            head = self._linear(spec.hidden, {"lm_head": spec.vocab})
        else:
            *before, last = spec.value_head.names
            widths = dict.fromkeys(before, spec.hidden) | {last: spec.outputs}
            products = [self._linear(spec.hidden, {n: w}, bias=True) for n, w in widths.items()]
            *inner, head = products
        if isinstance(vocabulary, Quantised) and self.device.type != "cpu":  # it stays so on a CPU
            vocabulary = torch.from_numpy(vocabulary.dequantise()).to(self.device, self.dtype)
        embedding = Embedding(vocabulary)
        return LlamaModel(spec, self.kernels, embedding, layers, final_norm, head, inner)

    def _require_tied(self, vocabulary: Part) -> None:
        """ModelError for a file with an output of its own, unless it is the embedding once more."""
        if (name := "lm_head.weight") in self.names:
            own = self._place(name, tuple(vocabulary.shape))
            assert isinstance(own, torch.Tensor) and isinstance(vocabulary, torch.Tensor)
            if not torch.equal(own, vocabulary):
                raise ModelError(
                    f"{name} is not the embedding, with which config.json ties it: set its "
                    "tie_word_embeddings to false, or fetch the model again."
                )

    def _layer(self, prefix: str) -> Layer:
        spec = self.spec
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        attention = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        mlp = {"gate_proj": spec.intermediate, "up_proj": spec.intermediate}
        self_attn, in_mlp = prefix + "self_attn.", prefix + "mlp."
        return Layer(
            attention_norm=self._vector(prefix + "input_layernorm.weight", spec.hidden),
            qkv=self._linear(spec.hidden, attention, self_attn, bias=spec.qkv_bias),
            output=self._linear(queries, {"o_proj": spec.hidden}, self_attn),
            mlp_norm=self._vector(prefix + "post_attention_layernorm.weight", spec.hidden),
            gate_up=self._linear(spec.hidden, mlp, in_mlp, gated=True),
            down=self._linear(spec.intermediate, {"down_proj": spec.hidden}, in_mlp),
        )

    def _linear(
        self,
        inputs: int,
        outputs: dict[str, int],
        prefix: str = "",
        bias: bool = False,
        gated: bool = False,
    ) -> Linear:
        """The fused product of these tensors, by their names and numbers of outputs."""
        parts = [self._place(f"{prefix}{n}.weight", (rows, inputs)) for n, rows in outputs.items()]
        biases = [self._vector(f"{prefix}{n}.bias", rows) for n, rows in outputs.items() if bias]
        return Linear(self.kernels, parts, torch.cat(biases) if biases else None, gated)

    def _vector(self, name: str, size: int) -> torch.Tensor:
        vector = self._place(name, (size,))
        assert isinstance(vector, torch.Tensor), name
        return vector.contiguous()

    def _place(self, name: str, shape: tuple[int, ...]) -> Part:
        part = self.take(name, shape)
        if isinstance(part, Quantised):
            return part
        most = torch.finfo(self.dtype).max
        wider = torch.finfo(part.dtype).max > most
        if wider and any(abs(float(end)) > most for end in torch.aminmax(part)):
            raise ModelError(f"{name} holds numbers beyond {self.dtype}; take a wider dtype.")
        return part.to(self.device, self.dtype)


class Weights(ABC):
    """Named tensors of one place; what is taken is crossed out, and what is left refused."""

    def __init__(self, where: Path, file_of: Mapping[str, Path]) -> None:
        self.where, self.file_of = where, file_of
        self.names = frozenset(file_of)
        self.left = set(file_of)

    def take(self, name: str, shape: tuple[int, ...]) -> Part:
        """The tensor `name` as the file holds it: Quantised where its kind is one of those.

        ModelError when it is not there, has another shape, or holds a number that is not finite.
        """
        if name not in self.names:
            raise ModelError(f"{self.where} lacks the tensor {name!r} of shape {list(shape)}.")
        stored = self.read(name)
        if tuple(stored.shape) != shape:
            raise ModelError(
                f"{self.file_of[name]}: {name} has shape {list(stored.shape)}; its config says "
                f"{list(shape)}."
            )
        if isinstance(stored, Quantised):
            finite = stored.is_finite
        else:  # the ends carry NaN and infinity both: a tenth of isfinite's time
            if stored.dtype not in _DTYPES.values():
                raise ModelError(
                    f"{self.file_of[name]}: {name} is stored as {stored.dtype}; allowed: "
                    f"{', '.join(_DTYPES)}."
                )
            finite = all(math.isfinite(float(e)) for e in torch.aminmax(stored))
        if not finite:
            raise ModelError(
                f"{self.file_of[name]}: {name} holds numbers that are not finite; the file is "
                "corrupt: fetch the model again."
            )
        self.left.discard(name)
        return stored

    def refuse_leftovers(self, unused: Collection[str] = ()) -> None:
        """ModelError where a file has a tensor that was not taken, nor ends as the `unused` do."""
        ends = (*_IGNORED, *unused)
        unknown = sorted(name for name in self.left if not name.endswith(ends))
        if unknown:
            raise ModelError(
                f"{self.file_of[unknown[0]]} holds {len(unknown)} tensors that this architecture "
                f"does not know, first {unknown[0]!r}; nothing is dropped silently: the config "
                "does not belong to these weights."
            )

    @abstractmethod
    def read(self, name: str) -> Part:
        """The tensor of a name that is there, as stored."""

    @abstractmethod
    def digest(self) -> str:
        """sha256 over the bytes of all files."""


def open_weights(source: Source) -> Weights:
    """The tensors of a model's folder or .gguf file, by the names Hugging Face gives them."""
    return GGUFWeights(source) if isinstance(source, GGUFFile) else FolderWeights(source)


class FolderWeights(Weights):
    """The safetensors files of a folder: one, or those that an index names."""

    def __init__(self, folder: Path) -> None:
        file_of: dict[str, Path] = {}
        for file in shards_of(folder):
            with self._open(file) as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping
                    if name in file_of:
                        raise ModelError(
                            f"{name} is in {file_of[name]} and in {file}; allowed: one."
                        )
                    file_of[name] = file
        super().__init__(folder, file_of)

    def _open(self, file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} is missing, cut short or corrupt ({error}); fetch the model again."
            ) from error

    def read(self, name: str) -> torch.Tensor:
        with self._open(self.file_of[name]) as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor

    def digest(self) -> str:
        total = hashlib.sha256()
        for file in sorted(set(self.file_of.values())):
            with file.open("rb") as opened:
                total.update(hashlib.file_digest(opened, "sha256").digest())
        return total.hexdigest()


class GGUFWeights(Weights):
    """A GGUF file's tensors; quantised matrices stay its mapped bytes."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._own = {hub_name(name): name for name in file.tensors if name != ROPE_FACTORS}
        if len(self._own) < len(file.tensors.keys() - {ROPE_FACTORS}):
            raise ModelError(f"{file.path} holds a tensor under two names; fetch the model again.")
        super().__init__(file.path, dict.fromkeys(self._own, file.path))

    def read(self, name: str) -> Part:
        self._file.release()  # else file and packed copy are held at once
        stored, data = self._file.tensors[self._own[name]], self._file.data(self._own[name])
        order = self._order(name, stored.shape[0])
        if stored.kind in FORMATS:
            columns = stored.shape[-1]
            rows = math.prod(stored.shape) // columns
            matrix = Quantised(stored.kind, data.reshape(rows, -1), (rows, columns))
            return matrix if order is None else matrix.pick(order)
        plain = torch.frombuffer(data.copy(), dtype=_PLAIN[stored.kind]).view(stored.shape)
        return plain if order is None else plain[torch.from_numpy(order)]

    def digest(self) -> str:
        with self.where.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    def _order(self, name: str, rows: int) -> NDArray[np.intp] | None:
        """Which rows to take for Hugging Face's order: None where they lie so.

        Llama files rotate neighbouring rows of a head, (0, 1), (2, 3); ours and Hugging Face's
        rotate row i with row i + head_dim / 2. Rows that are no whole heads stay: their shape will
        be refused.
        """
        settings = self._file.settings
        part = next((p for p in (".self_attn.q_proj.", ".self_attn.k_proj.") if p in name), None)
        if part is None or settings.text("general.architecture") != "llama":
            return None
        heads = settings.whole("llama.attention.head_count")
        heads = heads if "q_proj" in part else kv_heads(self._file)
        if rows % (2 * heads):
            return None
        pairs = np.arange(rows).reshape(heads, rows // heads // 2, 2)
        return pairs.swapaxes(1, 2).reshape(-1)
