"""Training of the embedded models from nothing: `train_tiny(folder, minutes=...)`.

tiny-solver learns to imitate the student of tiny_corpus; tiny-prm learns, in one loss, to write
correct steps and to say "+" or "-" after any step. Both are plain Llama models of transformers,
trained with AdamW on an endless seeded stream, in bfloat16 autocast where the CPU is fast at it.
The wall clock sets the length, so a rerun reproduces the recipe and the quality, not the bits.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from workbench.errors import ConfigError
from workbench.experiments.tiny_examples import (
    IGNORED,
    SHORT_OPERATIONS,
    TRAINED_OPERATIONS,
    Example,
    batches,
    examples,
    without_prefix,
)
from workbench.experiments.tiny_tokenizer import (
    BOS,
    END,
    PAD,
    build_tokenizer,
    save_tokenizer,
    system_prefix,
)
from workbench.experiments.tiny_widening import widened

log = logging.getLogger(__name__)

SHAPES = {
    "tiny-solver": {
        "hidden_size": 128,
        "intermediate_size": 544,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "tiny-prm": {
        "hidden_size": 336,
        "intermediate_size": 1280,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 16,
    },
}
PEAK_LEARNING_RATE = {"tiny-solver": 2.5e-3, "tiny-prm": 1e-3}
TOKENS_PER_STEP = 4_096
SHORT_UNTIL = {"tiny-solver": 0.15, "tiny-prm": 0.0}
"""Until this part of the training all chains are short: copying is learnt on them first."""
CHECKPOINT_SECONDS = 300
ATTENTION = "float32_causal"
BARE_UNTIL, BARE_SHARE = 0.75, 0.8
"""Until this part of the training, this share of the batches leaves the system message out.

It says the same in every prompt; learning to pass over it takes little of the time."""


def model_config(name: str, tokenizer: Tokenizer) -> LlamaConfig:
    """The Llama configuration of one embedded model."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
        attn_implementation=ATTENTION,
        **SHAPES[name],
    )


def padded(rows: Sequence[list[int]], filler: int) -> torch.Tensor:
    """[rows, longest] int64."""
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


def float32_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, **_: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Causal attention in float32: on a CPU the bfloat16 backward pass takes twice as long."""
    with torch.autocast("cpu", enabled=False):
        mixed = scaled_dot_product_attention(
            query.float(),
            key.float(),
            value.float(),
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        )
    return mixed.transpose(1, 2).contiguous(), None


def batch_loss(model: LlamaForCausalLM, batch: list[Example], bfloat16: bool) -> torch.Tensor:
    """Mean loss per learnt token; verdicts, where there are any, weigh as much as all the text."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        hidden = model.model(padded([example.ids for example in batch], 0)).last_hidden_state
        targets = padded([example.targets for example in batch], IGNORED)
        learnt = targets != IGNORED
        logits = model.lm_head(hidden[learnt])
    losses = cross_entropy(logits.float(), targets[learnt], reduction="none")
    if not batch[0].verdicts:
        return losses.mean()
    verdict = torch.zeros_like(targets, dtype=torch.bool)
    for row, example in enumerate(batch):
        verdict[row, example.verdicts] = True
    is_verdict = verdict[learnt]
    text = losses[~is_verdict].mean() if not is_verdict.all() else losses.new_zeros(())
    return losses[is_verdict].mean() + text


def rate_at(progress: float, peak: float, warm_up: float = 0.02) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak; progress in [0, 1]."""
    if progress < warm_up:
        return peak * (progress + 1e-3) / warm_up
    fraction = min(1.0, (progress - warm_up) / (1 - warm_up))
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * fraction)))


def start_model(
    name: str, tokenizer: Tokenizer, seed: int, start: LlamaForCausalLM | None = None
) -> LlamaForCausalLM:
    """A model to train: from random weights, or from `start`, widened to its shape."""
    torch.manual_seed(seed)
    AttentionInterface.register(ATTENTION, float32_attention)
    config = model_config(name, tokenizer)
    return LlamaForCausalLM(config) if start is None else widened(start, config)


def train_model(
    name: str, model: LlamaForCausalLM, tokenizer: Tokenizer, seconds: float, seed: int,
    checkpoint: Callable[[LlamaForCausalLM, float], None],
) -> None:  # fmt: skip
    """Train `model` for `seconds` of wall time; `checkpoint(model, progress)` now and then."""
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    short, full = (
        batches(examples(name, tokenizer, seed, lengths), TOKENS_PER_STEP, random.Random(seed))
        for lengths in (SHORT_OPERATIONS, TRAINED_OPERATIONS)
    )
    bfloat16 = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    coin = random.Random(seed)
    begun = saved = time.monotonic()
    prefix_length = len(system_prefix(tokenizer))
    smooth, tokens, step = 0.0, 0, 0
    while (elapsed := time.monotonic() - begun) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(elapsed / seconds, PEAK_LEARNING_RATE[name])
        batch = next(short if elapsed < SHORT_UNTIL[name] * seconds else full)
        if elapsed < BARE_UNTIL * seconds and coin.random() < BARE_SHARE:
            batch = [without_prefix(example, prefix_length) for example in batch]
        loss = batch_loss(model, batch, bfloat16)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step, tokens = step + 1, tokens + sum(len(example.ids) for example in batch)
        smooth = loss.item() if step == 1 else 0.98 * smooth + 0.02 * loss.item()
        if step % 50 == 0:
            log.info("%s step %d loss %.4f %.0f tokens/s %.0f s", name, step, smooth,
                     tokens / (time.monotonic() - begun), elapsed)  # fmt: skip
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            saved = time.monotonic()
            checkpoint(model, elapsed / seconds)
    checkpoint(model, 1.0)


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write an ordinary model folder; weights in float16, each file replaced atomically."""
    save_tokenizer(tokenizer, folder)
    tokens = tokenizer.get_vocab_size()
    config = model.config.to_diff_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "rope_theta": 10000.0,
        "vocab_size": tokens,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    weights = {
        key: value.detach()[: tokens if "embed_tokens" in key else None].half().contiguous()
        for key, value in model.state_dict().items()
        if key != "lm_head.weight"
    }
    unfinished = folder / "model.partial"
    save_file(weights, str(unfinished), metadata={"format": "pt"})
    unfinished.chmod(0o644)
    os.replace(unfinished, folder / "model.safetensors")


def train_tiny(
    out_dir: str | Path,
    minutes: float = 60.0,
    seed: int = 0,
    models: Sequence[str] = ("tiny-solver", "tiny-prm"),
) -> list[Path]:
    """Train the embedded models one after the other, `minutes` in all; returns their folders.

    tiny-prm begins as the tiny-solver of `out_dir`, so that must be there or among `models`.
    Raises ConfigError for a model that is unknown and for no time at all.
    """
    if not 0 < minutes < math.inf:
        raise ConfigError(
            f"minutes is {minutes!r}; allowed: more than 0. Untrained is not trained."
        )
    if unknown := set(models) - set(SHAPES):
        raise ConfigError(f"No embedded model is called {sorted(unknown)}; allowed: {[*SHAPES]}.")
    tokenizer = build_tokenizer(seed)
    folders = [Path(out_dir) / name for name in SHAPES if name in models]
    for folder in folders:
        start = None if folder.name == "tiny-solver" else _solver(folder.parent / "tiny-solver")
        model = start_model(folder.name, tokenizer, seed, start)
        checkpoint = partial(_checkpoint, tokenizer=tokenizer, folder=folder)
        seconds = 60 * minutes / len(folders)
        train_model(folder.name, model, tokenizer, seconds, seed, checkpoint)
    return folders


def _checkpoint(
    model: LlamaForCausalLM, progress: float, tokenizer: Tokenizer, folder: Path
) -> None:
    export(model, tokenizer, folder)
    log.info("%s written at %.0f %%", folder, 100 * progress)


def _solver(folder: Path) -> LlamaForCausalLM:
    if not (folder / "model.safetensors").is_file():
        raise ConfigError(f"tiny-prm begins as tiny-solver, which is not in {folder}: train both.")
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
