"""Training of the embedded models from nothing: `train_tiny(folder, minutes=...)`.

tiny-solver learns to imitate the student of the corpus; tiny-prm learns, in one loss, to write
correct steps and to say "+" or "-" after any step, and begins as tiny-solver, widened. Both are
plain Llama models of transformers, trained with AdamW on an endless seeded stream, in bfloat16
autocast where the CPU is fast at it. The wall clock sets the length, so a rerun reproduces the
recipe and the quality, not the bits.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from workbench.errors import ConfigError
from workbench.search.strategies import STEP_END
from workbench.training.corpus import (
    ASSISTANT,
    BOS,
    DISTRACTED_STUDENT,
    END,
    PAD,
    STUDENT,
    USER,
    WorkedSolution,
    build_tokenizer,
    save_tokenizer,
    system_prefix,
    training_solutions,
)

log = logging.getLogger(__name__)

SHAPES = {
    "tiny-solver": {
        "hidden_size": 128,
        "intermediate_size": 544,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
    },
    "tiny-prm": {
        "hidden_size": 336,
        "intermediate_size": 1280,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
}
PEAK_LEARNING_RATE = {"tiny-solver": 2.5e-3, "tiny-prm": 1e-3}
TOKENS_PER_STEP = 4_096
# Until this part of the training all chains are short: copying is learnt on them first.
SHORT_UNTIL = {"tiny-solver": 0.15, "tiny-prm": 0.0}
# Until this part of the training, this share of the batches leaves the system message out: it is
# the same in every prompt, and learning to pass over it takes little of the time.
BARE_UNTIL, BARE_SHARE = 0.75, 0.8
CHECKPOINT_SECONDS = 300
ATTENTION = "float32_causal"
NEW_SCALE = 0.5  # of weights that a widened model has beside the narrow one's
IGNORED = -100
SHORT_OPERATIONS = tuple(range(2, 9))
TRAINED_OPERATIONS = (*range(2, 7), *range(4, 15), *range(7, 29))
# Of solutions with more steps than LONG this share is learnt from its first few steps only.
LONG, EXCERPT_SHARE = 10, 0.75


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, the id each position should predict (or IGNORED), and which are verdicts."""

    ids: list[int]
    targets: list[int]
    verdicts: list[int]


def solver_example(work: WorkedSolution, tokenizer: Tokenizer, prefix: list[int]) -> Example:
    """The chat prompt and the student's completion, which alone is learnt."""
    prompt = prefix + tokenizer.encode(f"{USER}{work.problem}{ASSISTANT}").ids
    close = END if work.steps[-1].kind == "answer" else STEP_END
    completion = tokenizer.encode(f"{work.completion}{close}").ids
    ids = prompt + completion
    return Example(ids, [IGNORED] * (len(prompt) - 1) + completion + [IGNORED], [])


def prm_example(
    work: WorkedSolution, tokenizer: Tokenizer, prefix: list[int], rng: random.Random
) -> Example:
    """The RLHFlow chat of a solution: the history always says "+", the targets the true labels.

    The text of every step that holds no slip is learnt. Most wrong solutions are cut some steps
    after their first wrong one.
    """
    texts = [work.problem + " " + work.steps[0].text, *(step.text for step in work.steps[1:])]
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    marks = (USER, ASSISTANT, "+", "-")
    user, assistant, good, bad = (tokenizer.encode(mark).ids[0] for mark in marks)
    ids, targets, verdicts = list(prefix), [IGNORED] * len(prefix), []
    question = len(tokenizer.encode(work.problem + " ").ids)
    steps_after_error = 999 if rng.random() < 0.3 else rng.choice((0, 1, 2, 4, 8))
    for index, (step, text) in enumerate(zip(work.steps, encoded, strict=True)):
        ids += [user, *text, assistant, good]
        skipped = len(text) if step.slipped else question if index == 0 else 0
        learnt = [IGNORED] * skipped + text[skipped:]
        targets += [*learnt, IGNORED]
        verdicts.append(len(targets))
        targets += [good if step.correct else bad, IGNORED]
        steps_after_error -= not step.correct
        if steps_after_error < 0:
            break
    return Example(ids, targets, verdicts)


def examples(
    name: str, tokenizer: Tokenizer, seed: int, operations: Sequence[int]
) -> Iterator[Example]:
    """The endless training stream of one model."""
    rng, prefix = random.Random(f"{name}-{seed}"), system_prefix(tokenizer)
    rates = (STUDENT,) if name == "tiny-solver" else (STUDENT, DISTRACTED_STUDENT)
    for work in training_solutions(operations, rng, rates):
        if len(work.steps) > LONG and rng.random() < EXCERPT_SHARE:
            work = replace(work, steps=work.steps[: rng.randint(4, LONG)])
        if name == "tiny-solver":
            yield solver_example(work, tokenizer, prefix)
        else:
            yield prm_example(work, tokenizer, prefix, rng)


def batches(stream: Iterator[Example], rng: random.Random) -> Iterator[list[Example]]:
    """Batches of about TOKENS_PER_STEP tokens of examples of like length, in random order."""
    while True:
        ready = sorted(islice(stream, 256), key=lambda example: len(example.ids))
        groups: list[list[Example]] = [[]]
        for example in ready:
            if groups[-1] and len(example.ids) * (len(groups[-1]) + 1) > TOKENS_PER_STEP:
                groups.append([])
            groups[-1].append(example)
        rng.shuffle(groups)
        yield from groups


def _padded(rows: Sequence[list[int]], filler: int) -> torch.Tensor:
    """[rows, longest] int64."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=filler)


def float32_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, **_: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Causal attention in float32: on a CPU the bfloat16 backward pass takes twice as long."""
    with torch.autocast("cpu", enabled=False):
        rows = query.float(), key.float(), value.float()
        mixed = scaled_dot_product_attention(*rows, is_causal=True, scale=scaling, enable_gqa=True)
    return mixed.transpose(1, 2).contiguous(), None


def batch_loss(model: LlamaForCausalLM, batch: list[Example], bfloat16: bool) -> torch.Tensor:
    """Mean loss per learnt token; verdicts, where there are any, weigh as much as all the text."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        hidden = model.model(_padded([example.ids for example in batch], 0)).last_hidden_state
        targets = _padded([example.targets for example in batch], IGNORED)
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


@torch.no_grad()
def widened(narrow: LlamaForCausalLM, config: LlamaConfig) -> LlamaForCausalLM:
    """A model of `config` that computes nearly what `narrow` does (Net2Net, Chen et al. 2015).

    The narrow model's weights fill the first rows and columns of each matrix, its query heads are
    dealt out over the wider model's KV groups, and whatever is new starts small and writes nothing
    into the old channels. Both have as many layers and the same head size; the narrow model has one
    KV head, which every group gets.
    """
    wide, size, groups = LlamaForCausalLM(config), config.head_dim, config.num_key_value_heads
    assert narrow.config.num_hidden_layers == config.num_hidden_layers
    assert (narrow.config.head_dim, narrow.config.num_key_value_heads) == (size, 1)
    old, width = narrow.config.hidden_size, narrow.config.intermediate_size
    shrink = (old / config.hidden_size) ** 0.5  # of the root mean square: new channels are near 0
    for parameter in wide.parameters():
        if parameter.dim() == 2:
            parameter.mul_(NEW_SCALE)
    wide.model.embed_tokens.weight[:, :old] = narrow.model.embed_tokens.weight
    norms = [(wide.model.norm, narrow.model.norm)]
    for target, source in zip(wide.model.layers, narrow.model.layers, strict=True):
        norms.append((target.input_layernorm, source.input_layernorm))
        norms.append((target.post_attention_layernorm, source.post_attention_layernorm))
        ours, theirs = target.self_attn, source.self_attn
        ours.o_proj.weight[:old] = 0
        for head in range(narrow.config.num_attention_heads):
            slot = head % groups * (config.num_attention_heads // groups) + head // groups
            to, of = slice(slot * size, (slot + 1) * size), slice(head * size, (head + 1) * size)
            ours.q_proj.weight[to, :old] = theirs.q_proj.weight[of]
            ours.o_proj.weight[:old, to] = theirs.o_proj.weight[:, of]
        for mine, its in ((ours.k_proj, theirs.k_proj), (ours.v_proj, theirs.v_proj)):
            mine.weight[:, :old] = its.weight.repeat(groups, 1)
        for name in ("gate_proj", "up_proj"):
            getattr(target.mlp, name).weight[:width, :old] = getattr(source.mlp, name).weight
        target.mlp.down_proj.weight[:old] = 0
        target.mlp.down_proj.weight[:old, :width] = source.mlp.down_proj.weight
    for norm, its in norms:
        norm.weight.fill_(float(its.weight.mean()) * shrink)
        norm.weight[:old] = its.weight * shrink
    return wide


def train_model(
    folder: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, seconds: float, seed: int
) -> None:
    """Train `model` for `seconds` of wall time; written to its folder now and then."""
    name = folder.name
    peak, warm_up = PEAK_LEARNING_RATE[name], 0.02
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    short, full = (
        batches(examples(name, tokenizer, seed, lengths), random.Random(seed))
        for lengths in (SHORT_OPERATIONS, TRAINED_OPERATIONS)
    )
    bfloat16 = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    coin = random.Random(seed)
    begun = saved = time.monotonic()
    prefix_length = len(system_prefix(tokenizer))
    smooth, tokens, step = 0.0, 0, 0
    while (elapsed := time.monotonic() - begun) < seconds:
        progress = elapsed / seconds  # a linear warm-up, then a cosine to a fiftieth of the peak
        fraction = min(1.0, (progress - warm_up) / (1 - warm_up))
        rate = peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * fraction)))
        for group in optimizer.param_groups:
            group["lr"] = peak * (progress + 1e-3) / warm_up if progress < warm_up else rate
        batch = next(short if elapsed < SHORT_UNTIL[name] * seconds else full)
        if elapsed < BARE_UNTIL * seconds and coin.random() < BARE_SHARE:
            batch = [
                Example(
                    example.ids[prefix_length:],
                    example.targets[prefix_length:],  # the prefix holds none
                    [position - prefix_length for position in example.verdicts],
                )
                for example in batch
            ]
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
            export(model, tokenizer, folder)
    export(model, tokenizer, folder)


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write an ordinary model folder; weights in float16, each file replaced atomically."""
    save_tokenizer(tokenizer, folder)
    config = model.config.to_diff_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    weights = {
        key: value.half() for key, value in model.state_dict().items() if key != "lm_head.weight"
    }
    unfinished = folder / "model.partial"
    save_file(weights, str(unfinished), metadata={"format": "pt"})
    unfinished.chmod(0o644)
    unfinished.replace(folder / "model.safetensors")
    log.info("written: %s", folder)


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
        raise ConfigError(f"minutes is {minutes!r}; allowed: more than 0.")
    if unknown := set(models) - set(SHAPES):
        raise ConfigError(f"No embedded model is called {sorted(unknown)}; allowed: {[*SHAPES]}.")
    tokenizer = build_tokenizer(seed)
    folders = [Path(out_dir) / name for name in SHAPES if name in models]
    for folder in folders:
        start, solver = None, folder.parent / "tiny-solver"
        if folder != solver:
            if not (solver / "model.safetensors").is_file():
                raise ConfigError(
                    f"tiny-prm begins as tiny-solver, which is not in {solver}: train both."
                )
            start = LlamaForCausalLM.from_pretrained(solver, dtype=torch.float32)
        torch.manual_seed(seed)
        AttentionInterface.register(ATTENTION, float32_attention)
        config = LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            num_hidden_layers=4,
            head_dim=16,
            max_position_embeddings=2048,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.token_to_id(BOS),
            eos_token_id=tokenizer.token_to_id(END),
            pad_token_id=tokenizer.token_to_id(PAD),
            attn_implementation=ATTENTION,
            **SHAPES[folder.name],
        )
        model = LlamaForCausalLM(config) if start is None else widened(start, config)
        train_model(folder, model, tokenizer, 60 * minutes / len(folders), seed)
    return folders
