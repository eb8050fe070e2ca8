"""Greedy tokens equal those of `transformers` in float32, for random models of each family."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models.plain_driver import Driver
from workbench.core import WantedLogits
from workbench.models.loading import load_model

transformers = pytest.importorskip("transformers")

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SHAPES = {
    "gqa_tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "mha_untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "llama3_gqa": {"num_key_value_heads": 2, "rope_parameters": LLAMA3},
    "wide_heads": {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    "qwen2_tied": {"family": "Qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2_untied": {"family": "Qwen2", "num_key_value_heads": 4, "tie_word_embeddings": False},
    "mistral": {"family": "Mistral", "num_key_value_heads": 2, "sliding_window": None},
}
NEAR_TIE = 1e-4  # a difference is allowed where the reference's best two logits are this close


def peer_model(folder: Path, family: str = "Llama", **changes: object) -> torch.nn.Module:
    """A model of a family, with weights so large that logits differ clearly, saved in `folder`."""
    shape = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 136}
    shape |= {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 512}
    shape |= {"initializer_range": 0.15} | changes
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**shape)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(".bias"):  # zero until trained
                weights.normal_()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_tokens_equal_transformers(shape: str, tmp_path: Path) -> None:
    """At 2,048 positions, prefilled, in a chunk and decoded, the likeliest token is the peer's."""
    peer = peer_model(tmp_path, **SHAPES[shape])
    tokens = np.random.default_rng(1).integers(0, 320, (16, 128))
    driver, parts = Driver(load_model(str(tmp_path))), []
    for start, end in pairwise((0, 100, 126, 127, 128)):
        work = [(str(i), row[start:end].tolist()) for i, row in enumerate(tokens)]
        wanted = WantedLogits(np.arange(16 * (end - start)), np.arange(320))
        parts.append(driver.step(work, (wanted,)).wanted[0].reshape(16, end - start, 320))
    ours = np.concatenate(parts, 1).argmax(-1)
    with torch.inference_mode():
        best = peer(torch.tensor(tokens)).logits.topk(2)
    gaps = (best.values[..., 0] - best.values[..., 1]).numpy()
    differing = ours != best.indices[..., 0].numpy()
    assert (gaps[differing] < NEAR_TIE).all()
    assert differing.sum() <= 1  # one in 2,048 tokens
