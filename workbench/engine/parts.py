"""What an engine is made of, built from its settings in the order in which one part needs another.

Weights and tokenizer first, then how much memory that leaves, then the cache, the executor and the
scheduler over it. What it does not do: run anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.config import EngineConfig
from workbench.engine.executor import Executor
from workbench.engine.limits import require_served_length
from workbench.engine.memory import MemoryProfile, StepLimits, memory_told, plan_memory
from workbench.engine.sampling import StopChecker
from workbench.engine.scheduler import Scheduler
from workbench.engine.shared import ArenaPlace, require_guaranteed
from workbench.engine.static_batch import StaticScheduler
from workbench.errors import ConfigError
from workbench.host import collection_paused
from workbench.kernels import require_served
from workbench.kvcache.manager import KVCacheManager
from workbench.kvcache.storage import BlockStorage, KVStorage
from workbench.models.llama import LlamaModel
from workbench.models.loading import arithmetic_dtype, load_model, require_device
from workbench.models.registry import DUMMY, load_tokenizer, model_spec
from workbench.models.spec import ModelSpec
from workbench.tokenizer import ByteTokenizer, Tokenizer

LOADED_WITH = ("model", "dtype", "device", "batch_invariant")
"""Settings that weights depend on."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A loaded model, which engines of one process may share: nothing writes to its tensors."""

    model: LlamaModel
    config: EngineConfig

    def fitting(self, config: EngineConfig) -> LlamaModel:
        """The model, for an engine of these settings; ConfigError if it was loaded otherwise."""
        for name in LOADED_WITH:
            here, there = getattr(config, name), getattr(self.config, name)
            if here != there:
                raise ConfigError(
                    f"Engine got {name}={here!r} and weights loaded with {name}={there!r}; give "
                    "both engines the same, or leave weights out."
                )
        return self.model


@dataclass(frozen=True, slots=True)
class Parts:
    """One engine's parts. token_bytes: the bytes of every token id of the model's vocabulary."""

    spec: ModelSpec
    fingerprint: str  # of weights, tokenizer and arithmetic
    tokenizer: Tokenizer | ByteTokenizer
    token_bytes: tuple[bytes, ...]
    max_model_len: int
    memory: MemoryProfile
    executor: Executor
    cache: KVCacheManager
    scheduler: Scheduler


@collection_paused()
def build_parts(
    config: EngineConfig, place: ArenaPlace | None = None, shared: Weights | None = None
) -> Parts:
    """All parts of an engine. Raises ModelError, OutOfMemory or ConfigError as Engine does."""
    _require_kernels(config)
    weights = _load(config) if shared is None else shared.fitting(config)
    weights.kernels.require_takes(config.block_size, weights.spec.head_dim)
    tokenizer = load_tokenizer(weights.source, dummy=config.model.startswith(DUMMY))
    token_bytes = _padded(tokenizer.token_bytes, weights.spec.vocab)
    max_model_len = _model_len(config, weights.spec)
    cached: dict[str, Any] = {
        "block_size": config.block_size,
        "enable_prefix_caching": config.enable_prefix_caching,
        "reuse_partial_blocks": config.reuse_partial_blocks,
        "namespace": weights.fingerprint.encode(),
    }
    if place is None:
        memory = _plan_memory(config, weights, max_model_len, config.num_blocks)
        storage: BlockStorage = _own_storage(config, weights, memory)
        cache = KVCacheManager(memory.num_blocks, **cached)
    else:
        require_guaranteed(place, config, max_model_len)
        cache = place.arena.cache(place.name, **cached)
        held = place.arena.storage is not None
        memory = _plan_memory(config, weights, max_model_len, cache.num_blocks, held)
        storage = place.storage(config, weights)
        with place.arena.lock:  # others may run
            cache.free_all()  # of an engine that had this name and was dropped with its requests
    cache.require(-(-max_model_len // config.block_size))
    with memory_told(config.model, weights, memory.activations, memory.kv):
        executor = _executor(config, weights, storage)
    kind = StaticScheduler if config.batching == "static" else Scheduler
    scheduler = kind(
        cache,
        executor.storage.offsets,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        stops=StopChecker(token_bytes, tokenizer.eos_ids),
        watermark=config.watermark,
    )
    mode = "invariant" if config.batch_invariant else "fast"
    fingerprint = f"{weights.fingerprint}/{tokenizer.fingerprint}/{mode}"
    found = (weights.spec, fingerprint, tokenizer, token_bytes, max_model_len, memory)
    return Parts(*found, executor, cache, scheduler)


def _load(config: EngineConfig) -> LlamaModel:
    return load_model(
        config.model,
        dtype=config.dtype,
        device=config.device,
        batch_invariant=config.batch_invariant,
        block_size=config.block_size,
    )


def _require_kernels(config: EngineConfig) -> None:
    """Refuse what no kernels serve before weights are loaded; float32 on a CPU always is."""
    device = require_device(config.device)
    if device.type == "cpu" and config.dtype in ("auto", "float32"):
        return
    spec = model_spec(config.model)
    require_served(
        device,
        arithmetic_dtype(config.dtype, config.device, spec),
        head_dim=spec.head_dim,
        block_size=config.block_size,
        batch_invariant=config.batch_invariant,
    )


def _plan_memory(
    config: EngineConfig,
    weights: LlamaModel,
    max_model_len: int,
    num_blocks: int | None,
    kv_held: bool = False,
) -> MemoryProfile:
    return plan_memory(
        weights,
        StepLimits(config.max_num_batched_tokens, config.max_num_seqs, max_model_len),
        config.block_size,
        memory=config.memory,
        kv_memory=config.kv_memory,
        num_blocks=num_blocks,
        activations_in_total=config.activations_in_total,
        kv_held=kv_held,
        name=config.model,
    )


def _own_storage(config: EngineConfig, weights: LlamaModel, memory: MemoryProfile) -> KVStorage:
    spec = weights.spec
    shape = (config.block_size, spec.layers, spec.kv_heads, spec.head_dim)
    return KVStorage(memory.num_blocks, *shape, weights.dtype, weights.device)


def _executor(config: EngineConfig, weights: LlamaModel, storage: BlockStorage) -> Executor:
    return Executor(
        weights,
        storage,
        batch_invariant=config.batch_invariant,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
    )


def _padded(token_bytes: tuple[bytes, ...], vocab: int) -> tuple[bytes, ...]:
    """As many as the model's vocabulary, which may be rounded up beyond the tokenizer's."""
    return token_bytes + (b"",) * (vocab - len(token_bytes))


def _model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """The longest request: the model's own maximum unless less is asked for."""
    wanted = config.max_model_len or spec.max_model_len
    require_served_length(wanted, spec, config.model)
    return wanted
